"""Answers on a run folder by key: the same JSON for the page of a server, for a page on disk and for the terminal.

The keys are "overview", "summaries/PAGE", "tokens/STEP", "questions", "question/NAME", "why" and "pulse".
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
"""The number of steps in a page of summaries."""
_QUIET_AFTER_SECONDS = 600
"""A run whose logs have not changed for so long is shown as quiet."""
_CACHED_SUMMARY_PAGES = 64
"""The number of pages of summaries in the cache."""


class RunReader:
    """Reads a run folder, as far as it is written by now.

    Args:
        run_dir: The folder of the run.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        settings = read_config(run_dir)
        self.rollouts = RolloutIndex(
            run_dir / "rollouts.jsonl", int(get_setting(settings, "algorithm.group_size", 0) or 0)
        )
        # A resume may not change this setting, so that summaries in the cache stay right.
        self.min_reward_range = float(get_setting(settings, "algorithm.min_reward_range", 0.0) or 0.0)
        self.get_summary = lru_cache(_CACHED_SUMMARY_PAGES * STEPS_PER_PAGE)(self.compute_summary)
        self.has_graded_rewards = lru_cache(1)(
            lambda _: have_continuous_rewards(list(read_records(run_dir / "metrics.jsonl")))
        )
        self.question_history = QuestionHistory(self.iterate_summaries)
        self.handlers: Mapping[str, Callable[[str], Any]] = {
            "overview": lambda _: self.build_overview(),
            "summaries": lambda page: self.read_summaries(self.list_page_steps(parse_number(page, "page"))),
            "tokens": lambda step: encode_for_page(
                token_files.read_tokens(self.run_dir, parse_number(step, "step")), self.has_verdicts
            ),
            "questions": lambda _: self.refresh_questions().list_repeated(),
            "question": lambda name: self.refresh_questions().trace_question(name, lambda _: True),
            "why": lambda _: self.find_explanations(),
            "pulse": lambda _: self.read_pulse(),
        }

    def answer(self, key: str) -> Any:
        """Return the JSON object of a key.

        Raises:
            UserError: There is no such key, or its file is damaged.
        """
        name, _, argument = key.partition("/")
        if name not in self.handlers:
            raise UserError(f"the microscope knows no {key}")
        return self.handlers[name](argument)

    @property
    def has_verdicts(self) -> bool:
        """Whether the rewards of the run tell which answers are right, as far as it is written by now."""
        path = self.run_dir / "metrics.jsonl"
        return not self.has_graded_rewards(path.stat().st_size) if path.exists() else True

    def read_metrics(self) -> list[Record]:
        return make_metrics_consistent(list(read_records(self.run_dir / "metrics.jsonl")))

    def list_steps(self) -> list[int]:
        """Return the steps whose tokens or completions are recorded."""
        return sorted({*token_files.list_recorded_steps(self.run_dir), *self.rollouts.locate_steps()})

    def list_page_steps(self, number: int) -> list[int]:
        """Return the steps of a page. Its number is that of a step divided by STEPS_PER_PAGE, rounded down."""
        return [step for step in self.list_steps() if step // STEPS_PER_PAGE == number]

    def read_pulse(self) -> dict[str, Any]:
        """Return what changes when there is something new: sizes of the logs, and the last recorded step."""
        names = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")
        sizes = [path.stat().st_size if (path := self.run_dir / name).exists() else 0 for name in names]
        recorded = token_files.list_recorded_steps(self.run_dir)
        return {
            "sizes": sizes,
            "recorded": len(recorded),
            "last": recorded[-1] if recorded else 0,
            "quiet": self.is_quiet(names),
            "minutes": _QUIET_AFTER_SECONDS // 60,
        }

    def is_quiet(self, names: Sequence[str]) -> bool:
        """Whether these logs have not changed for so long that the run may have stopped."""
        times = [path.stat().st_mtime for name in names if (path := self.run_dir / name).exists()]
        return time.time() - max(times, default=0.0) > _QUIET_AFTER_SECONDS

    def build_overview(self) -> dict[str, Any]:
        """Return an overview of the run: its settings, its charts, and numbers of each step by which to choose one."""
        config, metrics, evals = read_config(self.run_dir), self.read_metrics(), read_evaluation_records(self.run_dir)
        return {
            "name": self.run_dir.resolve().name,
            "model": get_setting(config, "policy.model", "a model"),
            "task": format_task_name(config),
            "lede": _serialize_lede(make_lede(metrics, evals)),
            "charts": draw_run_charts(metrics, evals),
            "axis": {"left": PLOT_LEFT / CHART_WIDTH, "right": PLOT_RIGHT / CHART_WIDTH},
            "last": metrics[-1]["step"] if metrics else 0,
            "planned": get_setting(config, "algorithm.steps", 0),
            "steps": [row["step"] for row in metrics],
            "reward": [row.get("reward/mean") for row in metrics],
            "dead": [get_zero_variance_share(row) for row in metrics],
            "recorded": token_files.list_recorded_steps(self.run_dir),
            "per_page": STEPS_PER_PAGE,
            "pulse": self.read_pulse(),
        }

    def read_summary(self, step: int) -> dict[str, Any]:
        """Return the groups of a step. A step that is still being written is read anew each time."""
        return self.read_summaries([step])[0]

    def read_summaries(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        """Return the groups of several steps. The folder is listed once."""
        verdicts = self.has_verdicts
        fingerprints = self.fingerprint_steps(steps)
        return [self.get_summary(step, *fingerprint, verdicts) for step, fingerprint in fingerprints.items()]

    def iterate_summaries(self, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the groups of step after step, without the cache: there may be more of them than memory can hold."""
        fingerprints = self.fingerprint_steps(steps)
        return (self.compute_summary(step, *fingerprint) for step, fingerprint in fingerprints.items())

    def fingerprint_steps(self, steps: Sequence[int]) -> dict[int, tuple[bool, tuple[int, int] | None]]:
        """Return for each step whether its tokens are recorded, and the bytes of its completions in rollouts.jsonl."""
        recorded, byte_ranges = self.find_recorded_steps(), self.rollouts.locate_steps()
        return {step: (step in recorded, byte_ranges.get(step)) for step in steps}

    def find_recorded_steps(self) -> set[int]:
        return set(token_files.list_recorded_steps(self.run_dir))

    def compute_summary(
        self, step: int, recorded: bool, byte_range: tuple[int, int] | None, verdicts: bool = True
    ) -> dict[str, Any]:
        """Return the summary of a step. The cache of summaries has these arguments as its key."""
        groups = self.rollouts.read_groups(step) if byte_range else []
        columns = GROUP_MEASURE_COLUMNS if groups else None  # without rollouts, answers are read from all columns
        try:
            table = token_files.read_tokens(self.run_dir, step, columns) if recorded else None
            return summarize_step(step, groups, table, self.min_reward_range, verdicts)
        except UserError as error:  # a damaged file costs its own tokens, but not the steps around it
            return {**summarize_step(step, groups, None, self.min_reward_range, verdicts), "damaged": str(error)}

    def read_tokens(self, step: int) -> StepTokens:
        return build_step_tokens(token_files.read_tokens(self.run_dir, step), self.has_verdicts)

    def refresh_questions(self) -> QuestionHistory:
        """Return the questions of all steps that are recorded by now."""
        self.question_history.update(self.fingerprint_steps(self.list_steps()))
        return self.question_history

    def prepare_questions(self, batch_size: int) -> Iterator[int]:
        """Read the questions of all steps, `batch_size` steps at a time. Yield the number of steps read so far."""
        fingerprints = list(self.fingerprint_steps(self.list_steps()).items())
        for count in range(batch_size, len(fingerprints) + batch_size, batch_size):
            self.question_history.update(dict(fingerprints[:count]))
            yield min(count, len(fingerprints))

    def find_explanations(self) -> list[dict[str, Any]]:
        steps = self.list_steps()[-JUDGED_STEPS:]
        error = self.find_last_reward_error(steps)
        return diagnose_run(read_config(self.run_dir), self.read_metrics(), self.read_summaries(steps), error)

    def find_last_reward_error(self, steps: Sequence[int]) -> str:
        """Return the error of the last reward that failed."""
        failed = (row for step in reversed(steps) for group in self.rollouts.read_groups(step) for row in group)
        return next((str(row["error"]) for row in failed if row.get("error")), "")


def open_recorded_run(run_dir: Path) -> RunReader:
    """Open a run whose tokens are recorded, or will be.

    Raises:
        UserError: The folder is no run, or one without tokens; the message tells how to get them.
    """
    if not find_run_dir(str(run_dir)):
        raise UserError(f"{run_dir} is no run: name the folder that pellucid train --run wrote")
    if not token_files.list_recorded_steps(run_dir) and not get_setting(read_config(run_dir), "log.tokens", 0):
        raise UserError(
            f"{run_dir} has no tokens: train it with --log.tokens 4, or tokens = 4 under [log] of its recipe"
        )
    return RunReader(run_dir)


def parse_number(text: str, kind: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"a {kind} is a number, got {text}")
    return int(text)


def _serialize_lede(lede: Lede) -> dict[str, Any]:
    """Return the first sentence of a report as JSON, with values without their HTML tags."""
    values = {name: html.replace("<small>", "").replace("</small>", "") for name, html in lede.values.items()}
    return {"key": lede.key, "values": values, "phrases": dict(lede.phrases)}


# ---------------------------------------------------------------- rollouts.jsonl by its steps


_STEP_PATTERN = re.compile(rb' *\{"step": (\d+)[,}]')
_READ_BLOCK_BYTES = 1 << 24
"""The number of bytes that are read at a time."""


class RolloutIndex:
    """The groups of each step in a file that may be larger than memory, and may grow.

    Args:
        path: The file.
        group_size: The size of a group, if it is known, since two groups in a row may have the same id.
    """

    def __init__(self, path: Path, group_size: int = 0):
        self.path, self.group_size = path, group_size
        self.byte_ranges: dict[int, tuple[int, int]] = {}
        """The first byte of each step, and the byte after its last one."""
        self.indexed_bytes = 0

    def locate_steps(self) -> Mapping[int, tuple[int, int]]:
        """Return the bytes of the steps that are written by now. A file that became shorter, as after a resume, is read
        from its beginning."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.indexed_bytes:
            self.byte_ranges, self.indexed_bytes = {}, 0
        if size > self.indexed_bytes:
            self.index_new_lines()
        return self.byte_ranges

    def index_new_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.indexed_bytes)
            for lines in iter(lambda: file.readlines(_READ_BLOCK_BYTES), []):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return  # it is still being written, and is read the next time
                    end = self.indexed_bytes + len(line)
                    if found := _STEP_PATTERN.match(line):
                        step = int(found[1])
                        self.byte_ranges[step] = self.byte_ranges.get(step, (self.indexed_bytes, end))[0], end
                    self.indexed_bytes = end

    def read_groups(self, step: int) -> list[list[Record]]:
        """Return the groups of a step, each a list of the records of its completions; none if they were not written."""
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
