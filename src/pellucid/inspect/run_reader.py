"""Reads a run folder for the terminal and, by key, as the same JSON for the server's page and a page on disk.

The keys are "overview", "summaries/PAGE", "tokens/STEP", "questions", "question/NAME", "why" and "pulse".
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pellucid.inspect.diagnosis import JUDGED_STEPS, diagnose_run
from pellucid.inspect.group_history import QuestionHistory, summarize_step
from pellucid.inspect.steps import GROUP_MEASURE_COLUMNS, StepTokens, build_step_tokens, encode_for_page
from pellucid.reporting import token_files
from pellucid.reporting.charts import CHART_WIDTH, PLOT_LEFT, PLOT_RIGHT, draw_run_charts
from pellucid.reporting.eval_metrics import get_zero_variance_share, have_continuous_rewards, make_metrics_consistent
from pellucid.reporting.report import format_task_name, get_setting, make_lede
from pellucid.reporting.run_files import (
    Record,
    find_run_dir,
    parse_records,
    read_config,
    read_evaluation_records,
    read_evaluations,
    read_records,
)
from pellucid.types import UserError

STEPS_PER_PAGE = 25
"""The number of steps in a page of summaries."""
_QUIET_AFTER_SECONDS = 600
"""A run whose logs have not changed for this long is shown as quiet."""
_CACHED_SUMMARY_PAGES = 64
"""The number of pages of summaries in the cache."""


class Fingerprint(NamedTuple):
    """The facts that the summary of a step depends on."""

    is_recorded: bool
    """Whether its tokens are recorded."""
    byte_range: tuple[int, int] | None
    """The bytes of its completions in rollouts.jsonl."""
    has_verdicts: bool
    """Whether the rewards of the run say which answers are right."""


class RunReader:
    """Reads a run folder, which may still grow."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        settings = read_config(run_dir)
        group_size = int(get_setting(settings, "algorithm.group_size", 0) or 0)
        self.rollouts = RolloutIndex(run_dir / "rollouts.jsonl", group_size)
        # A resume may not change this setting, so cached summaries stay valid.
        self.min_reward_range = float(get_setting(settings, "algorithm.min_reward_range", 0.0) or 0.0)
        self.get_summary = lru_cache(_CACHED_SUMMARY_PAGES * STEPS_PER_PAGE)(self.compute_summary)
        self.verdicts_by_size: dict[int, bool] = {}
        """Whether rewards say which answers are right, by the size of metrics.jsonl when it was read last."""
        self.question_history = QuestionHistory(self.iterate_summaries)

    def answer(self, key: str) -> Any:
        """Return the JSON object of a key.

        Raises:
            UserError: There is no such key, or its file is damaged.
        """
        name, _, argument = key.partition("/")
        match name:
            case "overview":
                answer = self.build_overview()
            case "summaries":
                page = parse_number(argument, "page")
                answer = self.read_summaries([step for step in self.list_steps() if step // STEPS_PER_PAGE == page])
            case "tokens":
                answer = encode_for_page(self.read_table(parse_number(argument, "step")))
            case "questions":
                answer = self.refresh_questions().list_repeated()
            case "question":
                answer = self.refresh_questions().trace_question(argument)
            case "why":
                answer = self.find_explanations()
            case "pulse":
                answer = self.read_pulse()
            case _:
                raise UserError(f"a run has no data named {key}")
        return answer

    @property
    def has_verdicts(self) -> bool:
        """Whether the rewards of the run say which answers are right, as far as it is written by now."""
        path = self.run_dir / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size not in self.verdicts_by_size:
            self.verdicts_by_size = {size: not have_continuous_rewards(list(read_records(path)))}
        return self.verdicts_by_size[size]

    def read_metrics(self) -> list[Record]:
        return make_metrics_consistent(list(read_records(self.run_dir / "metrics.jsonl")))

    def list_steps(self) -> list[int]:
        """Return the steps whose tokens or completions are recorded."""
        return sorted({*token_files.list_recorded_steps(self.run_dir), *self.rollouts.locate_steps()})

    def read_pulse(self) -> dict[str, Any]:
        """Return values that change as the run is written: sizes of the logs, and the last recorded step."""
        paths = [self.run_dir / name for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")]
        stats = [path.stat() if path.exists() else None for path in paths]
        recorded = token_files.list_recorded_steps(self.run_dir)
        changed_at = max((stat.st_mtime for stat in stats if stat), default=0.0)
        return {
            "sizes": [stat.st_size if stat else 0 for stat in stats],
            "recorded": len(recorded),
            "last": recorded[-1] if recorded else 0,
            "quiet": time.time() - changed_at > _QUIET_AFTER_SECONDS,
            "minutes": _QUIET_AFTER_SECONDS // 60,
        }

    def build_overview(self) -> dict[str, Any]:
        """Return an overview of the run: its settings, its charts, and numbers that help to choose a step."""
        config, metrics, evals = read_config(self.run_dir), self.read_metrics(), read_evaluation_records(self.run_dir)
        lede = make_lede(metrics, evals)
        texts = {name: re.sub("</?small>", "", html) for name, html in lede["values"].items()}
        return {
            "name": self.run_dir.resolve().name,
            "model": get_setting(config, "policy.model", "a model"),
            "task": format_task_name(config),
            "lede": {**lede, "values": texts},
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
        return [self.get_summary(step, fingerprint) for step, fingerprint in self.fingerprint_steps(steps).items()]

    def iterate_summaries(self, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the groups of step after step, without the cache: there may be more of them than memory can hold."""
        return (self.compute_summary(step, found) for step, found in self.fingerprint_steps(steps).items())

    def fingerprint_steps(self, steps: Sequence[int]) -> dict[int, Fingerprint]:
        recorded, byte_ranges = set(token_files.list_recorded_steps(self.run_dir)), self.rollouts.locate_steps()
        verdicts = self.has_verdicts
        return {step: Fingerprint(step in recorded, byte_ranges.get(step), verdicts) for step in steps}

    def compute_summary(self, step: int, fingerprint: Fingerprint) -> dict[str, Any]:
        """Return the summary of a step. These arguments are the key of the cache."""
        groups = self.rollouts.read_groups(step) if fingerprint.byte_range else []
        if not fingerprint.has_verdicts:
            groups = [[{**row, "correct": None} for row in group] for group in groups]
        columns = GROUP_MEASURE_COLUMNS if groups else None  # without rollouts, answers are read from all columns
        table, damage = None, {}
        try:
            table = self.read_table(step, columns) if fingerprint.is_recorded else None
        except UserError as error:  # a damaged file costs its own tokens, but not the steps around it
            damage = {"damaged": str(error)}
        return {**summarize_step(step, groups, table, self.min_reward_range), **damage}

    def read_table(self, step: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the token table of a step. If rewards do not say which answers are right, `correct` is null."""
        table = token_files.read_tokens(self.run_dir, step, columns)
        if self.has_verdicts or "correct" not in table.column_names:
            return table
        i = table.schema.get_field_index("correct")
        return table.set_column(i, table.field(i), pa.nulls(len(table), table.field(i).type))

    def read_tokens(self, step: int) -> StepTokens:
        return build_step_tokens(self.read_table(step))

    def refresh_questions(self) -> QuestionHistory:
        """Return the questions of all steps recorded so far."""
        self.question_history.update(self.fingerprint_steps(self.list_steps()))
        return self.question_history

    def find_explanations(self) -> list[dict[str, Any]]:
        steps = self.list_steps()[-JUDGED_STEPS:]
        rollouts = (row for step in reversed(steps) for group in self.rollouts.read_groups(step) for row in group)
        last_error = next((str(row["error"]) for row in rollouts if row.get("error")), "")
        return diagnose_run(
            *(read_config(self.run_dir), self.read_metrics(), self.read_summaries(steps), last_error),
            evaluations=read_evaluations(self.run_dir),
        )


def open_recorded_run(run_dir: Path) -> RunReader:
    """Open a run whose tokens are recorded, or will be.

    Raises:
        UserError: The folder is not a run, or has no tokens; the message tells how to get them.
    """
    if not find_run_dir(str(run_dir)):
        raise UserError(f"{run_dir} is not a run: name the folder that pellucid train --run wrote")
    if not token_files.list_recorded_steps(run_dir) and not get_setting(read_config(run_dir), "log.tokens", 0):
        raise UserError(
            f"{run_dir} has no tokens: train it with --log.tokens 4, or tokens = 4 under [log] of its recipe"
        )
    return RunReader(run_dir)


def parse_number(text: str, kind: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"a {kind} must be a number, got {text}")
    return int(text)


# ---------------------------------------------------------------- rollouts.jsonl by its steps


_STEP_PATTERN = re.compile(rb' *\{"step": (\d+)[,}]')


class RolloutIndex:
    """The groups of each step in a file that may be larger than memory, and may grow.

    Successive groups may have the same id; `group_size`, if known, tells them apart.
    """

    def __init__(self, path: Path, group_size: int = 0):
        self.path, self.group_size = path, group_size
        self.byte_ranges: dict[int, tuple[int, int]] = {}
        """The first byte of each step, and the byte after its last one."""
        self.indexed_bytes = 0

    def locate_steps(self) -> Mapping[int, tuple[int, int]]:
        """Return the byte range of each step written so far. A file that a resume shortened is indexed anew."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.indexed_bytes:
            self.byte_ranges, self.indexed_bytes = {}, 0
        if size > self.indexed_bytes:
            self.index_new_lines()
        return self.byte_ranges

    def index_new_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.indexed_bytes)
            for line in file:
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
