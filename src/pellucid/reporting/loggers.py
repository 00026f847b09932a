"""Loggers: a run as JSON lines, and whatever else shows it.

`step` counts finished steps: the first step of a run is logged as 1, an evaluation before it as 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pellucid.machine import disk
from pellucid.machine.harmless import harmless
from pellucid.protocols import Logger
from pellucid.reporting.conversations import branches_of, conversation_of, sequence_of
from pellucid.reporting.measures import evaluation_of, record_of
from pellucid.reporting.run_folder import records
from pellucid.types import Evaluation, Group

DRAWING = (OSError, ValueError, ArithmeticError, LookupError, TypeError)
"""What may go wrong with a display, a chart or a board: no place to write to, or numbers and records as no one thought
of. Mistakes in names are ours, and not among them."""


@contextmanager
def only_shown(what: str) -> Iterator[None]:
    """Guard what only shows a run: where it fails, that costs a line and not the run."""
    try:
        yield
    except DRAWING as error:
        with suppress(OSError):
            told = harmless(f"{type(error).__name__}: {error}")
            print(f"! {what} could not be shown ({told}); nothing is lost", flush=True)


class Loggers:
    """Several loggers as one: `files` hold the run, `boards` only show it."""

    def __init__(self, files: Sequence[Logger], displays: Sequence[Logger] = ()):
        self.files, self.displays = files, displays

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for logger in self.files:
            logger.log(step, metrics, groups)
        for logger in self.displays:
            with only_shown(f"step {step}"):
                logger.log(step, metrics, groups)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        for logger in self.files:
            logger.log_evaluation(step, evaluation)
        for logger in self.displays:
            with only_shown(f"the evaluation after step {step}"):
                logger.log_evaluation(step, evaluation)

    def close(self) -> None:
        for logger in (*self.displays, *self.files):
            with only_shown("the end"):
                logger.close()


class Jsonl:
    """metrics.jsonl, rollouts.jsonl and evals.jsonl of a run folder.

    Each step is with the system when `log` returns, where a kill does not reach it, and on disk after `sync`: a power
    failure costs lines that come after the last checkpoint, which a resumed run writes again.

    every: steps between those whose rollouts are written, besides step 1; 0 is none at all.
    """

    FILE_NAMES = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")

    def __init__(self, run_dir: Path, every: int = 1):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.every = every
        self.metrics_file, self.rollouts_file, self.evals_file = (
            (run_dir / name).open("a", encoding="utf-8") for name in self.FILE_NAMES
        )

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for group in groups if self.every and (step == 1 or step % self.every == 0) else ():
            self.rollouts_file.writelines(json_line({"step": step, **rollout}) for rollout in rollouts(group))
        self.rollouts_file.flush()
        self.metrics_file.write(json_line({"step": step, **metrics}))
        self.metrics_file.flush()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.evals_file.write(json_line({"step": step, **record_of(evaluation)}))
        self.evals_file.flush()

    def close(self) -> None:
        for file in (self.metrics_file, self.rollouts_file, self.evals_file):
            file.close()


def sync(run_dir: Path) -> None:
    """Sync to disk what was logged so far."""
    for name in Jsonl.FILE_NAMES:
        disk.sync(run_dir / name)


def rollouts(group: Group) -> list[dict[str, Any]]:
    """A JSON-like record of each completion of a group; rewards may come as numpy's numbers."""
    return [
        {
            "id": group.prompt.id,
            "prompt": group.prompt.question,
            **({"prefix": group.prompt.prefix} if group.prompt.prefix else {}),
            "completion": completion.text,
            **conversation_of(completion),
            "finished": completion.finished,
            "correct": reward.is_correct if reward.is_verdict and not reward.failed else None,
            "reward": None if reward.failed else float(reward.value),
            "parts": {name: float(value) for name, value in reward.parts.items()},
            "advantage": advantage,
            **({"error": reward.error} if reward.error else {}),
            **({"extra": dict(reward.extra)} if reward.extra else {}),
            **sequence_of(completion),
            **branches_of(completion),
        }
        for completion, reward, advantage in zip(group.completions, group.rewards, group.advantages, strict=True)
    ]


def json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_null(record), allow_nan=False) + "\n"


def finite_or_null(value: Any) -> Any:
    """Return a value as JSON has it, with None in place of NaN and infinities, which it does not have."""
    # The parser does it however deep they stand, where a function that calls itself would run out of stack.
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def truncate(run_dir: Path, step: int) -> list[str]:
    """Forgets what was logged after `step`, and what a crash or a power failure made of lines: a resumed run writes
    them again. Lines that say which steps up to `step` are missing for good.

    In place, so that a full disk is no hindrance; where it is killed half-way, the next time does the rest.
    """
    missing = []
    for path in (run_dir / name for name in Jsonl.FILE_NAMES):
        kept, unreadable = cut(path, step) if path.exists() else (set(), 0)
        if unreadable:
            missing.append(f"{path}: {unreadable} lines could not be read, and are gone")
        if path.name == "metrics.jsonl" and (gaps := [n for n in range(1, step + 1) if n not in kept]):
            missing.append(f"{path} lacks {len(gaps)} of {step} steps, the first of them step {gaps[0]}")
    return missing


def cut(path: Path, step: int) -> tuple[set[int], int]:
    """The steps that are left, and how many lines between them could not be read.

    What goes from between other lines becomes spaces before the next one.
    """
    dropped, steps, start, end = list[tuple[int, int, bool]](), set[int](), 0, 0
    with path.open("r+b") as file:
        for line in file:
            of_line = step_of_line(line)
            if of_line is None or of_line > step:
                dropped.append((start, len(line), of_line is None))
            else:
                steps.add(of_line)
                end = start + len(line)
            start += len(line)
        between = [gap for gap in dropped if gap[0] < end]
        for place, length, _ in between:
            file.seek(place)
            file.write(b" " * length)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    return steps, sum(unreadable for _, _, unreadable in between)


def step_of_line(line: bytes) -> int | None:
    """The record of a line; None where it is half-written or no record."""
    try:
        record = json.loads(line) if line.endswith(b"}\n") else None
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def read_evaluations(run_dir: Path) -> dict[int, Evaluation]:
    """What `Jsonl` wrote into evals.jsonl, by step; empty where there is none."""
    return {record["step"]: evaluation_of(record) for record in records(run_dir / "evals.jsonl")}
