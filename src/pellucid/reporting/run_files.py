"""Reads the files of a run directory, also after a crash has left them incomplete."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pellucid.reporting.best_evaluation import count_evaluations_since_best, find_best_evaluation
from pellucid.reporting.eval_metrics import parse_evaluation
from pellucid.types import Evaluation, UserError

Record = Mapping[str, Any]
BEST_MODEL_DIR = "model-best"
"""The folder of the model of the best evaluation."""
BEST_EVALUATION_FILE = "evaluation.json"
"""The file in that folder that says which evaluation it was."""
_CHECKPOINT_NAME = re.compile(r"step-(\d+)")


def find_run_dir(name: str) -> Path | None:
    """Return the path if it is a run directory; None if it is something else, such as a model."""
    run_dir = Path(name)
    return run_dir if all((run_dir / file).is_file() for file in ("config.json", "metrics.jsonl")) else None


def get_model_dir(run_dir: Path) -> Path:
    """Return the folder of the trained model. Raise UserError if there is none yet."""
    if not (run_dir / "model").is_dir():
        export = f", or export its last checkpoint with pellucid export {run_dir}" if list_checkpoints(run_dir) else ""
        raise UserError(f"{run_dir} has no model yet: finish it with pellucid train --resume {run_dir}{export}")
    return run_dir / "model"


def find_run_of_model(name: str) -> Path | None:
    """Return the run that a path names, itself or by its `model/` or `model-best/`; None if it names no run."""
    path = Path(name)
    is_of_run = path.name in ("model", BEST_MODEL_DIR) and path.is_dir()
    return find_run_dir(name) or (find_run_dir(str(path.parent)) if is_of_run else None)


def locate_trained_model(name: str) -> str:
    """Return the folder of the model of a run; any other name unchanged. Raise UserError if a run has no model yet."""
    run_dir = find_run_dir(name)
    return str(get_model_dir(run_dir)) if run_dir else name


def read_best_model_step(run_dir: Path) -> int | None:
    """Return the step whose model is in `model-best/`; None if there is none."""
    record = next(read_records(run_dir / BEST_MODEL_DIR / BEST_EVALUATION_FILE, whole_file=True), {})
    return record.get("step")


def describe_best_model(run_dir: Path) -> str:
    """Return where the model of the best evaluation is, and its accuracy; empty if there are less than two."""
    evaluations = read_evaluations(run_dir)
    best = find_best_evaluation(evaluations)
    if best is None or len(evaluations) < 2:
        return ""
    if not best.step:
        return f"{best.describe()}: no evaluation since was better"
    if read_best_model_step(run_dir) != best.step:
        return f"{best.describe()}: its model was not kept"
    return f"{run_dir / BEST_MODEL_DIR} ({best.describe()})"


def find_merged_adapter(model: str) -> Path | None:
    """Return the folder of the LoRA adapter that was merged in fp32 into a model of a run; None if there is none.

    If the folder is gone, print a warning: rounding merged weights to bfloat16 or float16 loses most of a LoRA update.
    """
    path = Path(model)
    run_dir = find_run_dir(str(path.parent)) if path.is_dir() else None
    policy = (read_config(run_dir).get("policy") or {}) if run_dir else {}
    if not policy.get("lora") or policy.get("save_dtype", "float32") != "float32":
        return None
    folder = (path.parent if path.name == "model" else path) / "adapter"
    if folder.is_dir():
        return folder
    print(f"! {folder} is missing: only dtype float32 keeps all that the adapter in {path} learned", flush=True)
    return None


def read_config(run_dir: Path) -> Record:
    return next(read_records(run_dir / "config.json", whole_file=True), {})


def trusts_remote_code(run_dir: Path) -> bool:
    """Whether the run was made with `policy.trust_remote_code`, so that code of its model may run."""
    return bool((read_config(run_dir).get("policy") or {}).get("trust_remote_code"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the completely written checkpoints, oldest first. They may have been damaged since."""
    paths = (run_dir / "checkpoints").glob("step-*")
    return sorted((path for path in paths if _CHECKPOINT_NAME.fullmatch(path.name)), key=get_checkpoint_step)


def get_checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def is_run_finished(run_dir: Path) -> bool:
    """Whether the last step was taken and evaluated. Config, metrics and evaluations are enough to tell.

    A run with a checkpoint but no model was stopped before its end.
    """
    settings, steps = read_config(run_dir), list(read_records(run_dir / "metrics.jsonl"))
    if not steps or (list_checkpoints(run_dir) and not (run_dir / "model").is_dir()):
        return False
    algorithm, evaluate = (settings.get(name) or {} for name in ("algorithm", "evaluate"))
    last, seconds = steps[-1]["step"], 60 * (algorithm.get("minutes") or 0)
    elapsed = sum(row.get("time/step") or 0 for row in steps)
    is_last = last == algorithm.get("steps") or (0 < seconds <= elapsed) or has_stopped_improving(run_dir)
    evaluated = {row["step"] for row in read_records(run_dir / "evals.jsonl")}
    return is_last and (evaluate.get("every") == 0 or last in evaluated)


def has_stopped_improving(run_dir: Path) -> bool:
    """Whether the last `evaluate.patience` evaluations of a run were no better than one before."""
    patience = (read_config(run_dir).get("evaluate") or {}).get("patience") or 0
    return 0 < patience <= count_evaluations_since_best(read_evaluations(run_dir))


def read_records(path: Path, whole_file: bool = False) -> Iterator[Record]:
    """Yield the JSON objects of the lines of a file, or of the whole file. Incomplete ones are skipped."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from parse_records([lines.read()] if whole_file else lines)


def parse_records(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def read_evaluations(run_dir: Path) -> dict[int, Evaluation]:
    """Return the evaluations of a run by step."""
    return {record["step"]: parse_evaluation(record) for record in read_records(run_dir / "evals.jsonl")}


def read_evaluation_records(run_dir: Path) -> dict[tuple[str, str], list[Record]]:
    """Return the evaluations of each (task, split), in order."""
    rows = defaultdict(list)
    for row in read_records(run_dir / "evals.jsonl"):
        rows[row["task"], row["split"]].append(row)
    return rows


def read_end_rollouts(path: Path) -> tuple[list[Record], list[Record]]:
    """Return the rollouts of the first and of the last step. The file may be larger than memory."""
    first: list[str] = []
    last: list[str] = []
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            complete = (line for line in lines if line.endswith("}\n"))
            for _, step in groupby(complete, key=lambda line: line.strip().partition(",")[0]):
                last = list(step)
                first = first or last
    return list(parse_records(first)), list(parse_records(last)) if last is not first else []
