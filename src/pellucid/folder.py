"""Reading a run folder back, whatever a crash has left of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pellucid.types import UserError

Record = Mapping[str, Any]


def run_of(name: str) -> Path | None:
    """The run folder of this name; None where it is no run, but perhaps a model."""
    run_dir = Path(name)
    return run_dir if all((run_dir / file).is_file() for file in ("config.json", "metrics.jsonl")) else None


def model_of(run_dir: Path) -> Path:
    """What the run has made. UserError where it is not finished."""
    if not (run_dir / "model").is_dir():
        raise UserError(f"{run_dir} has no model yet: finish it with pellucid train --resume {run_dir}")
    return run_dir / "model"


def read_config(run_dir: Path) -> Record:
    return next(records(run_dir / "config.json", whole=True), {})


def records(path: Path, whole: bool = False) -> Iterator[Record]:
    """The JSON objects of the lines of a file, or of the whole file; what a crash left half-written is passed over."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from parsed([lines.read()] if whole else lines)


def parsed(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def evaluations(run_dir: Path) -> dict[tuple[str, str], list[Record]]:
    """The evaluations of each (task, split), in order."""
    rows = defaultdict(list)
    for row in records(run_dir / "evals.jsonl"):
        rows[row["task"], row["split"]].append(row)
    return rows


def end_rollouts(path: Path) -> tuple[list[Record], list[Record]]:
    """The completions of the first and of the last step, of a file that may be larger than memory."""
    first: list[str] = []
    last: list[str] = []
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            whole = (line for line in lines if line.endswith("}\n"))
            for _, step in groupby(whole, key=lambda line: line.partition(",")[0]):
                last = list(step)
                first = first or last
    return list(parsed(first)), list(parsed(last)) if last is not first else []
