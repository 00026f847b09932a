"""Where a run is written down: JSON lines, TensorBoard, Weights & Biases.

`step` counts finished steps: the first step of a run is logged as 1, an evaluation before it as 0.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from pellucid.extras import extra
from pellucid.types import Estimate, Evaluation, Group, Logger, UserError


class Loggers:
    """Several loggers as one."""

    def __init__(self, loggers: Sequence[Logger]):
        self.loggers = loggers

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics, groups)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        for logger in self.loggers:
            logger.log_evaluation(step, evaluation)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


class Jsonl:
    """metrics.jsonl, rollouts.jsonl and evals.jsonl of a run folder; each step is on disk when `log` returns."""

    NAMES = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")

    def __init__(self, run_dir: Path):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics, self.rollouts, self.evals = ((run_dir / name).open("a", encoding="utf-8") for name in self.NAMES)

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for group in groups:
            self.rollouts.writelines(json_line({"step": step, **rollout}) for rollout in rollouts(group))
        self.rollouts.flush()
        self.metrics.write(json_line({"step": step, **metrics}))
        self.metrics.flush()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        about = {"task": evaluation.task, "split": evaluation.split, "n": evaluation.n, "k": evaluation.k}
        measured = {
            name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            for name, estimate in measures(evaluation, "k")
        }
        answers = {"questions": evaluation.questions, "right": list(evaluation.right), "failed": evaluation.failed}
        self.evals.write(json_line({"step": step, **about, **measured, **answers}))
        self.evals.flush()

    def close(self) -> None:
        for file in (self.metrics, self.rollouts, self.evals):
            file.close()


def rollouts(group: Group) -> list[dict[str, Any]]:
    """A JSON-like record of each completion of a group; rewards may come as numpy's numbers."""
    return [
        {
            "id": group.prompt.id,
            "prompt": group.prompt.question,
            **({"prefix": group.prompt.prefix} if group.prompt.prefix else {}),
            "completion": completion.text,
            "finished": completion.finished,
            "correct": None if reward.failed else reward.is_correct,
            "reward": None if reward.failed else float(reward.value),
            "parts": {name: float(value) for name, value in reward.parts.items()},
            "advantage": advantage,
            **({"error": reward.error} if reward.error else {}),
            "tokens": list(completion.token_ids),
            "logprobs": [float(f"{logprob:.6g}") for logprob in completion.logprobs],
        }
        for completion, reward, advantage in zip(group.completions, group.rewards, group.advantages, strict=True)
    ]


def json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_null(record), allow_nan=False) + "\n"


def finite_or_null(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    return [finite_or_null(item) for item in value] if isinstance(value, list) else value


def truncate(run_dir: Path, step: int) -> None:
    """Forgets what was logged after `step`, and the half-written line of a crash: a resumed run writes it again."""
    for path in (run_dir / name for name in Jsonl.NAMES):
        if path.exists():
            kept = path.with_name(path.name + ".tmp")
            with path.open("rb") as lines, kept.open("wb") as file:
                file.writelines(line for line in lines if is_whole(line) and json.loads(line)["step"] <= step)
            os.replace(kept, path)


def is_whole(line: bytes) -> bool:
    return line.endswith(b"}\n")


FIELD_TAGS = {
    "loss": "train/loss",
    "kl": "train/kl_divergence",
    "grad_norm": "train/grad_norm",
    "reward/mean": "rollout/returns",
    "completion/correct": "rollout/success_rate",
}
"""What other trainers call our metrics, on the boards where runs of several trainers are compared."""


def tagged(metrics: Mapping[str, float]) -> dict[str, float]:
    """With the field's names besides."""
    return {**metrics, **{tag: metrics[name] for name, tag in FIELD_TAGS.items() if name in metrics}}


class TensorBoard:
    """Scalars for TensorBoard. Raises UserError where it is not installed.

    first_step: finished steps at the start; on resume, what was logged after it is purged.
    """

    def __init__(self, log_dir: Path, first_step: int = 0):
        board = extra("torch.utils.tensorboard", "tensorboard", "log.tensorboard")
        self.writer = board.SummaryWriter(str(log_dir), purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        for name, value in tagged(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        for name, estimate in measures(evaluation, "k"):
            self.writer.add_scalar(f"heldout/{name.replace('@', '_at_')}", estimate.value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run at Weights & Biases, or a folder that `wandb sync` uploads. UserError where it is not installed or refuses.

    The id comes from the run folder, so that a resumed run goes on where it was.
    """

    def __init__(self, run_dir: Path, project: str, mode: str, config: Mapping[str, Any]):
        wandb = extra("wandb", "wandb", "log.wandb")
        try:
            self.run = wandb.init(
                project=project,
                name=run_dir.name,
                id=uuid5(NAMESPACE_URL, run_dir.resolve().as_uri()).hex,
                dir=run_dir,
                mode=mode,
                resume="allow" if mode == "online" else None,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise UserError(
                f'log.wandb = "{mode}": {str(error).splitlines()[0]}; "offline" needs no account'
            ) from error
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], _groups: Sequence[Group]) -> None:
        self.run.log({"step": step, **tagged(metrics)})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.run.log({"step": step, **{f"heldout/{name}": e.value for name, e in measures(evaluation, "k")}})

    def close(self) -> None:
        self.run.finish()


def measures(evaluation: Evaluation, k: str) -> list[tuple[str, Estimate]]:
    """What was measured, by name; where k is 0, only the greedy answer was."""
    named = {"greedy": evaluation.greedy, f"mean@{k}": evaluation.mean_at_k, f"pass@{k}": evaluation.pass_at_k}
    return [(name, estimate) for name, estimate in named.items() if math.isfinite(estimate.value)]


def read_evaluations(run_dir: Path) -> dict[int, Evaluation]:
    """What `Jsonl` wrote into evals.jsonl, by step; empty where there is none."""
    path = run_dir / "evals.jsonl"
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if is_whole(line)]
    unmeasured = {"value": math.nan, "low": math.nan, "high": math.nan}
    return {
        record["step"]: Evaluation(
            **{name: record[name] for name in ("task", "split", "n", "k")},
            greedy=Estimate(**record["greedy"]),
            mean_at_k=Estimate(**record.get("mean@k", unmeasured)),
            pass_at_k=Estimate(**record.get("pass@k", unmeasured)),
            right=tuple(record.get("right", ())),
            questions=record.get("questions", ""),
        )
        for record in records
    }
