"""What a run folder answers, by key: the same JSON for the page of a server, for a page on disk and for the terminal.

Keys: "overview", "summaries/PAGE", "tokens/STEP", "questions", "question/NAME", "why".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pellucid.look.questions import Questions
from pellucid.look.rollouts import Rollouts
from pellucid.look.steps import BRIEF, Tokens, for_page, tokens_of
from pellucid.look.summaries import summary
from pellucid.look.why import WINDOW, findings
from pellucid.reporting import tokens
from pellucid.reporting.charts import LEFT, RIGHT, WIDTH
from pellucid.reporting.curves import curves
from pellucid.reporting.measures import are_degrees, consistent, dead_share
from pellucid.reporting.report import Lede, at, happened, task_of
from pellucid.reporting.run_folder import Record, evaluations, read_config, records, run_of
from pellucid.types import UserError

PAGE = 25
"""Steps of a page of summaries."""
QUIET = 600
"""Seconds without news after which a run is said to be quiet."""
KEPT = 64
"""Pages of summaries that are kept in memory."""


class Run:
    """A run folder, read as far as it is written by now."""

    def __init__(self, folder: Path):
        self.folder = folder
        size = int(at(read_config(folder), "algorithm.group_size", 0) or 0)
        self.rollouts = Rollouts(folder / "rollouts.jsonl", size)
        self.summary = lru_cache(KEPT * PAGE)(self.summarised)
        self.graded_by = lru_cache(1)(lambda _: are_degrees(list(records(folder / "metrics.jsonl"))))
        self.asked = Questions(self.anew)
        self.answers: Mapping[str, Callable[[str], Any]] = {
            "overview": lambda _: self.overview(),
            "summaries": lambda page: self.of_steps(self.page(number_of(page))),
            "tokens": lambda step: for_page(tokens.read(self.folder, number_of(step)), self.verdicts),
            "questions": lambda _: self.questions().listed(),
            "question": lambda name: self.questions().followed(name, lambda _: True),
            "why": lambda _: self.why(),
            "pulse": lambda _: self.pulse(),
        }

    def answer(self, key: str) -> Any:
        """The JSON object of a key. UserError where there is none of that name, or its file is damaged."""
        name, _, rest = key.partition("/")
        if name not in self.answers:
            raise UserError(f"the microscope knows no {key}")
        return self.answers[name](rest)

    @property
    def least_range(self) -> float:
        """The range of rewards that counts as none."""
        return float(at(read_config(self.folder), "algorithm.min_reward_range", 0.0) or 0.0)

    @property
    def verdicts(self) -> bool:
        """Whether the rewards of the run say which answers are right, as far as it is written by now."""
        path = self.folder / "metrics.jsonl"
        return not self.graded_by(path.stat().st_size) if path.exists() else True

    def metrics(self) -> list[Record]:
        return consistent(list(records(self.folder / "metrics.jsonl")))

    def steps(self) -> list[int]:
        """The steps of which tokens or completions are recorded."""
        return sorted({*tokens.steps(self.folder), *self.rollouts.steps()})

    def page(self, number: int) -> list[int]:
        """The steps of a page: its number is that of its steps, divided by PAGE."""
        return [step for step in self.steps() if step // PAGE == number]

    def pulse(self) -> dict[str, Any]:
        """What changes when there is something new: sizes of the logs, and the last recorded step."""
        names = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")
        sizes = [path.stat().st_size if (path := self.folder / name).exists() else 0 for name in names]
        recorded = tokens.steps(self.folder)
        told = {"sizes": sizes, "recorded": len(recorded), "last": recorded[-1] if recorded else 0}
        return {**told, "quiet": self.quiet(names), "minutes": QUIET // 60}

    def quiet(self, names: Sequence[str]) -> bool:
        """Whether none of these logs was written to for so long that the run may have stopped."""
        written = [path.stat().st_mtime for name in names if (path := self.folder / name).exists()]
        return time.time() - max(written, default=0.0) > QUIET

    def predicted(self, every: int) -> list[int]:
        """The recorded steps whose changes were predicted, one in `every`; none where the first of them was not."""
        due = [step for step in tokens.steps(self.folder) if every and (step == 1 or step % every == 0)]
        try:
            first = tokens.read(self.folder, due[0], ["predicted"])["predicted"] if due else None
        except UserError:  # a damaged file says so where it is looked at
            return due
        return due if first is not None and first.null_count < len(first) else []

    def overview(self) -> dict[str, Any]:
        """The run at a glance: what it is, its charts, and of each step the numbers by which one is chosen."""
        config, metrics, evals = read_config(self.folder), self.metrics(), evaluations(self.folder)
        return {
            "name": self.folder.resolve().name,
            "model": at(config, "policy.model", "a model"),
            "task": task_of(config),
            "lede": plain_text(happened(metrics, evals)),
            "charts": curves(metrics, evals),
            "axis": {"left": LEFT / WIDTH, "right": RIGHT / WIDTH},
            "last": metrics[-1]["step"] if metrics else 0,
            "planned": at(config, "algorithm.steps", 0),
            "steps": [row["step"] for row in metrics],
            "reward": [row.get("reward/mean") for row in metrics],
            "dead": [dead_share(row) for row in metrics],
            "recorded": tokens.steps(self.folder),
            "predicted": self.predicted(int(at(config, "log.predictions", 0) or 0)),
            "per_page": PAGE,
            "pulse": self.pulse(),
        }

    def at(self, step: int) -> dict[str, Any]:
        """The groups of a step; of a step that is still being written, anew each time."""
        return self.of_steps([step])[0]

    def of_steps(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        """The same of several steps, of whose folder one look is enough."""
        verdicts = self.verdicts
        return [self.summary(step, *mark, verdicts) for step, mark in self.marks(steps).items()]

    def anew(self, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The same, one after another and none of them kept: of more steps than memory has room for."""
        return (self.summarised(step, *mark) for step, mark in self.marks(steps).items())

    def marks(self, steps: Sequence[int]) -> dict[int, tuple[bool, tuple[int, int] | None]]:
        """Of each step whether its tokens are recorded, and where its completions lie in rollouts.jsonl."""
        recorded, places = self.recorded(), self.rollouts.steps()
        return {step: (step in recorded, places.get(step)) for step in steps}

    def recorded(self) -> set[int]:
        return set(tokens.steps(self.folder))

    def summarised(
        self, step: int, recorded: bool, place: tuple[int, int] | None, verdicts: bool = True
    ) -> dict[str, Any]:
        """The summary of a step. Its arguments are what a summary that is kept depends on."""
        groups = self.rollouts.of(step) if place else []
        columns = BRIEF if groups else None  # without completions, these are read from the tokens
        try:
            table = tokens.read(self.folder, step, columns) if recorded else None
            return summary(step, groups, table, self.least_range, verdicts)
        except UserError as error:  # a file that is damaged costs its tokens, and not the steps around it
            return {**summary(step, groups, None, self.least_range, verdicts), "damaged": str(error)}

    def tokens(self, step: int) -> Tokens:
        return tokens_of(tokens.read(self.folder, step), self.verdicts)

    def questions(self) -> Questions:
        """What was asked in the steps that are there by now."""
        self.asked.read(self.marks(self.steps()))
        return self.asked

    def prepared(self, at_a_time: int) -> Iterator[int]:
        """Read what was asked in all steps, so many at a time; yields how many have been read."""
        marks = list(self.marks(self.steps()).items())
        for count in range(at_a_time, len(marks) + at_a_time, at_a_time):
            self.asked.read(dict(marks[:count]))
            yield min(count, len(marks))

    def why(self) -> list[dict[str, Any]]:
        last = self.steps()[-WINDOW:]
        return findings(read_config(self.folder), self.metrics(), self.of_steps(last), self.error(last))

    def error(self, steps: Sequence[int]) -> str:
        """Why the last reward that failed did."""
        failed = (row for step in reversed(steps) for group in self.rollouts.of(step) for row in group)
        return next((str(row["error"]) for row in failed if row.get("error")), "")


def opened(folder: Path) -> Run:
    """The run of a folder with tokens that are recorded, or will be. UserError, a line with the mend, for another."""
    if not run_of(str(folder)):
        raise UserError(f"{folder} is no run: name the folder that pellucid train --run wrote")
    if not tokens.steps(folder) and not at(read_config(folder), "log.tokens", 0):
        raise UserError(
            f"{folder} has no tokens: train it with --log.tokens 4, or tokens = 4 under [log] of its recipe"
        )
    return Run(folder)


def number_of(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"a step is a number, got {text}")
    return int(text)


def plain_text(lede: Lede) -> dict[str, Any]:
    """The first sentence of a report, for the page to say: without the marks of its values."""
    bare = {name: html.replace("<small>", "").replace("</small>", "") for name, html in lede.values.items()}
    return {"key": lede.key, "values": bare, "phrases": dict(lede.phrases)}
