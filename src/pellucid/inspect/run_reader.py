"""What a run folder answers, by key: the same JSON for the page of a server, for a page on disk and for the terminal.

Keys: "overview", "summaries/PAGE", "tokens/STEP", "questions", "question/NAME", "why".
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pellucid.inspect.diagnosis import JUDGED_STEPS, diagnose_run
from pellucid.inspect.group_history import QuestionHistory, summarize_step
from pellucid.inspect.steps import GROUP_MEASURE_COLUMNS, StepTokens, build_step_tokens, encode_for_page
from pellucid.reporting import token_files
from pellucid.reporting.charts import CHART_WIDTH, PLOT_LEFT, PLOT_RIGHT, draw_run_charts
from pellucid.reporting.eval_metrics import get_zero_variance_share, have_continuous_rewards, make_metrics_consistent
from pellucid.reporting.report import Lede, format_task_name, get_setting, make_lede
from pellucid.reporting.run_files import (
    Record,
    find_run_dir,
    parse_records,
    read_config,
    read_evaluation_records,
    read_records,
)
from pellucid.types import UserError

STEPS_PER_PAGE = 25
"""Steps of a page of summaries."""
QUIET_AFTER_SECONDS = 600
"""Seconds without news after which a run is said to be quiet."""
CACHED_SUMMARY_PAGES = 64
"""Pages of summaries that are kept in memory."""


class RunReader:
    """A run folder, read as far as it is written by now."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        size = int(get_setting(read_config(run_dir), "algorithm.group_size", 0) or 0)
        self.rollouts = RolloutIndex(run_dir / "rollouts.jsonl", size)
        self.get_summary = lru_cache(CACHED_SUMMARY_PAGES * STEPS_PER_PAGE)(self.compute_summary)
        self.has_graded_rewards = lru_cache(1)(
            lambda _: have_continuous_rewards(list(read_records(run_dir / "metrics.jsonl")))
        )
        self.question_history = QuestionHistory(self.iterate_summaries)
        self.handlers: Mapping[str, Callable[[str], Any]] = {
            "overview": lambda _: self.build_overview(),
            "summaries": lambda page: self.read_summaries(self.list_page_steps(parse_number(page))),
            "tokens": lambda step: encode_for_page(
                token_files.read_tokens(self.run_dir, parse_number(step)), self.has_verdicts
            ),
            "questions": lambda _: self.refresh_questions().list_repeated(),
            "question": lambda name: self.refresh_questions().trace_question(name, lambda _: True),
            "why": lambda _: self.find_explanations(),
            "pulse": lambda _: self.read_pulse(),
        }

    def answer(self, key: str) -> Any:
        """The JSON object of a key. UserError where there is none of that name, or its file is damaged."""
        name, _, rest = key.partition("/")
        if name not in self.handlers:
            raise UserError(f"the microscope knows no {key}")
        return self.handlers[name](rest)

    @property
    def min_reward_range(self) -> float:
        """The range of rewards that counts as none."""
        return float(get_setting(read_config(self.run_dir), "algorithm.min_reward_range", 0.0) or 0.0)

    @property
    def has_verdicts(self) -> bool:
        """Whether the rewards of the run say which answers are right, as far as it is written by now."""
        path = self.run_dir / "metrics.jsonl"
        return not self.has_graded_rewards(path.stat().st_size) if path.exists() else True

    def read_metrics(self) -> list[Record]:
        return make_metrics_consistent(list(read_records(self.run_dir / "metrics.jsonl")))

    def list_steps(self) -> list[int]:
        """The steps of which tokens or completions are recorded."""
        return sorted({*token_files.list_recorded_steps(self.run_dir), *self.rollouts.locate_steps()})

    def list_page_steps(self, number: int) -> list[int]:
        """The steps of a page: its number is that of its steps, divided by PAGE."""
        return [step for step in self.list_steps() if step // STEPS_PER_PAGE == number]

    def read_pulse(self) -> dict[str, Any]:
        """What changes when there is something new: sizes of the logs, and the last recorded step."""
        names = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")
        sizes = [path.stat().st_size if (path := self.run_dir / name).exists() else 0 for name in names]
        recorded = token_files.list_recorded_steps(self.run_dir)
        told = {"sizes": sizes, "recorded": len(recorded), "last": recorded[-1] if recorded else 0}
        return {**told, "quiet": self.is_quiet(names), "minutes": QUIET_AFTER_SECONDS // 60}

    def is_quiet(self, names: Sequence[str]) -> bool:
        """Whether none of these logs was written to for so long that the run may have stopped."""
        written = [path.stat().st_mtime for name in names if (path := self.run_dir / name).exists()]
        return time.time() - max(written, default=0.0) > QUIET_AFTER_SECONDS

    def list_predicted_steps(self, every: int) -> list[int]:
        """The recorded steps whose changes were predicted, one in `every`; none where the first of them was not."""
        due = [
            step for step in token_files.list_recorded_steps(self.run_dir) if every and (step == 1 or step % every == 0)
        ]
        try:
            first = token_files.read_tokens(self.run_dir, due[0], ["predicted"])["predicted"] if due else None
        except UserError:  # a damaged file says so where it is looked at
            return due
        return due if first is not None and first.null_count < len(first) else []

    def build_overview(self) -> dict[str, Any]:
        """The run at a glance: what it is, its charts, and of each step the numbers by which one is chosen."""
        config, metrics, evals = read_config(self.run_dir), self.read_metrics(), read_evaluation_records(self.run_dir)
        return {
            "name": self.run_dir.resolve().name,
            "model": get_setting(config, "policy.model", "a model"),
            "task": format_task_name(config),
            "lede": serialize_lede(make_lede(metrics, evals)),
            "charts": draw_run_charts(metrics, evals),
            "axis": {"left": PLOT_LEFT / CHART_WIDTH, "right": PLOT_RIGHT / CHART_WIDTH},
            "last": metrics[-1]["step"] if metrics else 0,
            "planned": get_setting(config, "algorithm.steps", 0),
            "steps": [row["step"] for row in metrics],
            "reward": [row.get("reward/mean") for row in metrics],
            "dead": [get_zero_variance_share(row) for row in metrics],
            "recorded": token_files.list_recorded_steps(self.run_dir),
            "predicted": self.list_predicted_steps(int(get_setting(config, "log.predictions", 0) or 0)),
            "per_page": STEPS_PER_PAGE,
            "pulse": self.read_pulse(),
        }

    def read_summary(self, step: int) -> dict[str, Any]:
        """The groups of a step; of a step that is still being written, anew each time."""
        return self.read_summaries([step])[0]

    def read_summaries(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        """The same of several steps, of whose folder one look is enough."""
        verdicts = self.has_verdicts
        return [self.get_summary(step, *mark, verdicts) for step, mark in self.fingerprint_steps(steps).items()]

    def iterate_summaries(self, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The same, one after another and none of them kept: of more steps than memory has room for."""
        return (self.compute_summary(step, *mark) for step, mark in self.fingerprint_steps(steps).items())

    def fingerprint_steps(self, steps: Sequence[int]) -> dict[int, tuple[bool, tuple[int, int] | None]]:
        """Of each step whether its tokens are recorded, and where its completions lie in rollouts.jsonl."""
        recorded, places = self.find_recorded_steps(), self.rollouts.locate_steps()
        return {step: (step in recorded, places.get(step)) for step in steps}

    def find_recorded_steps(self) -> set[int]:
        return set(token_files.list_recorded_steps(self.run_dir))

    def compute_summary(
        self, step: int, recorded: bool, byte_range: tuple[int, int] | None, verdicts: bool = True
    ) -> dict[str, Any]:
        """The summary of a step. Its arguments are what a summary that is kept depends on."""
        groups = self.rollouts.read_groups(step) if byte_range else []
        columns = GROUP_MEASURE_COLUMNS if groups else None  # without completions, these are read from the tokens
        try:
            table = token_files.read_tokens(self.run_dir, step, columns) if recorded else None
            return summarize_step(step, groups, table, self.min_reward_range, verdicts)
        except UserError as error:  # a file that is damaged costs its tokens, and not the steps around it
            return {**summarize_step(step, groups, None, self.min_reward_range, verdicts), "damaged": str(error)}

    def read_tokens(self, step: int) -> StepTokens:
        return build_step_tokens(token_files.read_tokens(self.run_dir, step), self.has_verdicts)

    def refresh_questions(self) -> QuestionHistory:
        """What was asked in the steps that are there by now."""
        self.question_history.update(self.fingerprint_steps(self.list_steps()))
        return self.question_history

    def prepare_questions(self, batch_size: int) -> Iterator[int]:
        """Read what was asked in all steps, so many at a time; yields how many have been read."""
        marks = list(self.fingerprint_steps(self.list_steps()).items())
        for count in range(batch_size, len(marks) + batch_size, batch_size):
            self.question_history.update(dict(marks[:count]))
            yield min(count, len(marks))

    def find_explanations(self) -> list[dict[str, Any]]:
        last = self.list_steps()[-JUDGED_STEPS:]
        return diagnose_run(
            read_config(self.run_dir), self.read_metrics(), self.read_summaries(last), self.find_last_reward_error(last)
        )

    def find_last_reward_error(self, steps: Sequence[int]) -> str:
        """Why the last reward that failed did."""
        failed = (row for step in reversed(steps) for group in self.rollouts.read_groups(step) for row in group)
        return next((str(row["error"]) for row in failed if row.get("error")), "")


def open_recorded_run(run_dir: Path) -> RunReader:
    """The run of a folder with tokens that are recorded, or will be. UserError, a line with the mend, for another."""
    if not find_run_dir(str(run_dir)):
        raise UserError(f"{run_dir} is no run: name the folder that pellucid train --run wrote")
    if not token_files.list_recorded_steps(run_dir) and not get_setting(read_config(run_dir), "log.tokens", 0):
        raise UserError(
            f"{run_dir} has no tokens: train it with --log.tokens 4, or tokens = 4 under [log] of its recipe"
        )
    return RunReader(run_dir)


def parse_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"a step is a number, got {text}")
    return int(text)


def serialize_lede(lede: Lede) -> dict[str, Any]:
    """The first sentence of a report, for the page to say: without the marks of its values."""
    bare = {name: html.replace("<small>", "").replace("</small>", "") for name, html in lede.values.items()}
    return {"key": lede.key, "values": bare, "phrases": dict(lede.phrases)}


# ---------------------------------------------------------------- rollouts
# rollouts.jsonl by its steps: where each begins is found once, and what is written later is found when it is there.


STEP_PATTERN = re.compile(rb' *\{"step": (\d+)[,}]')
READ_BLOCK_BYTES = 1 << 24
"""Bytes that are read at a time."""


class RolloutIndex:
    """The groups of the steps of a file that may be larger than memory, and may grow.

    size: of a group, where it is known: neighbours may have one id.
    """

    def __init__(self, path: Path, group_size: int = 0):
        self.path, self.group_size = path, group_size
        self.byte_ranges: dict[int, tuple[int, int]] = {}
        """Of each step its first byte and the byte after its last one."""
        self.indexed_bytes = 0

    def locate_steps(self) -> Mapping[int, tuple[int, int]]:
        """Where the steps lie by now. A file that has become shorter, as at a resume, is read anew."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.indexed_bytes:
            self.byte_ranges, self.indexed_bytes = {}, 0
        if size > self.indexed_bytes:
            self.index_new_lines()
        return self.byte_ranges

    def index_new_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.indexed_bytes)
            for lines in iter(lambda: file.readlines(READ_BLOCK_BYTES), []):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return  # half-written: the next time reads it whole
                    end = self.indexed_bytes + len(line)
                    if found := STEP_PATTERN.match(line):
                        step = int(found[1])
                        self.byte_ranges[step] = self.byte_ranges.get(step, (self.indexed_bytes, end))[0], end
                    self.indexed_bytes = end

    def read_groups(self, step: int) -> list[list[Record]]:
        """The groups of a step, each the records of its completions; none where they were not written."""
        if step not in self.locate_steps():
            return []
        start, end = self.byte_ranges[step]
        with self.path.open("rb") as file:
            file.seek(start)
            text = file.read(end - start).decode("utf-8", "replace")
        groups: list[list[Record]] = []
        for record in parse_records(text.splitlines()):
            if record.get("step") != step:
                continue
            last = groups[-1] if groups else []
            if not last or last[0].get("id") != record.get("id") or len(last) == self.group_size:
                groups.append([])
            groups[-1].append(record)
        return groups
