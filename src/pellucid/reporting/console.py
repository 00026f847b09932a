"""Shows a run on the screen: a live display in a terminal, a chart in a notebook, plain lines elsewhere.

The headline is the reward, held-out accuracy (or reward, if rewards do not say which answers are right), and the share
of zero-variance groups. `loss` is only in the files, since on-policy it is 0 whatever the policy learns.
"""

from __future__ import annotations

import math
import sys
import time
from base64 import b64encode
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import rich.box
import rich.console
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pellucid.reporting.charts import (
    draw_evaluation_charts,
    draw_reward_chart,
    escape_text,
    format_count,
    join_charts,
)
from pellucid.reporting.conversations import (
    count_turns,
    describe_tool_use,
    format_fault_shares,
    format_messages,
    get_tool_events,
)
from pellucid.reporting.eval_metrics import (
    REWARD_MEASURES,
    TOO_FEW_PROMPTS,
    compare_intervals,
    describe_intervals,
    drop_correctness,
    format_measure_name,
    get_measures,
    get_zero_variance_share,
    make_evaluation_record,
    pair_measures,
    select_measures,
)
from pellucid.reporting.loggers import DISPLAY_ERRORS
from pellucid.rewards.answers import split_thought
from pellucid.types import Completion, Estimate, Evaluation, Group, Reward, rewards_are_verdicts
from pellucid.utils.text import escape_controls

_STAGE_COLORS = {"generate": "cyan", "reward": "magenta", "score": "blue", "update": "green", "other": "bright_black"}
_WARNING_LABELS = {
    "reward/failed": "failed rewards",
    "reward/no_term": "completions to which no reward applies",
    "skipped": "skipped updates",
    "skipped/overflow": "updates too large for fp16 at this loss_scale",
    "idle": "updates without a gradient",
}
_DISPLAY_ROWS = (
    ("groups drawn", "groups/drawn", "{:.0f}", "{groups/drawn_dead:.0%} of them dead"),
    ("length", "completion/length_mean", "{:.1f}", "tokens per completion, {completion/finished:.0%} finished"),
    ("sampler gap", "sampler/gap_mean", "{:.4f}", "{sampler/gap_max:.3f} at most"),
    ("kl", "kl", "{:.4f}", "nats per token"),
    ("update", "update/kl", "{:.5f}", "nats per token from the policy before it"),
    ("turns", "turns/mean", "{:.1f}", "per conversation"),
)
"""Rows of the live display: label, metric, format of the value, format of the detail after it."""
_TREND_STEPS = 40
_BAR_WIDTH_CELLS = 40


def make_screen_logger(total_steps: int, first_step: int = 0) -> ConsoleLogger | PlainLogger:
    """Return a live display if standard output is a terminal, else plain lines."""
    return ConsoleLogger(total_steps, first_step) if sys.stdout and sys.stdout.isatty() else PlainLogger(total_steps)


class _ScreenLogger:
    """Base class of the loggers for people.

    Correctness is hidden from the first step whose rewards do not say which answers are right (`rewards_are_verdicts`).
    The first error of a reward and the count of each warning are kept.
    """

    has_continuous_rewards = False

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.first_error = ""
        self.warning_counts: Counter[str] = Counter()

    def adapt_metrics(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the metrics of a step as they are shown, and count their warnings."""
        self.first_error = self.first_error or find_first_error(groups)
        self.warning_counts.update({name: int(metrics.get(name, 0)) for name in _WARNING_LABELS})
        if not rewards_are_verdicts(reward for group in groups for reward in group.rewards):
            self.has_continuous_rewards = True
        return drop_correctness(metrics) if self.has_continuous_rewards else metrics

    def adapt_evaluation(self, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation as it is shown."""
        self.has_continuous_rewards = self.has_continuous_rewards or not evaluation.has_verdicts
        return replace(evaluation, has_verdicts=not self.has_continuous_rewards)

    def format_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> str:
        """Return a line for the metrics of a step, as `adapt_metrics` returns them."""
        count, faults = len(groups), format_fault_shares(metrics)
        width = len(str(count))
        formats = {
            "reward/mean": "reward {:6.3f}",
            "reward/after_kl": "after kl {:6.3f}",
            "groups/dead_all_right": f"dead {{:{width}.0f}}/{count} right",
            "groups/dead_all_wrong": f"{{:{width}.0f}}/{count} wrong",
            "groups/dead_equal": f"dead {{:{width}.0f}}/{count}",
            "groups/drawn": "drawn {:3.0f}",
            "completion/length_mean": "len {:6.1f}",
            "completion/finished": "fin {:.2f}",
            "turns/mean": "turns {:.1f}",
            "tools/calls": "tools {:.1f}" + (f" ({faults})" if faults else ""),
            "sampler/gap_mean": "gap {:.4f}",
            "kl": "kl {:.4f}",
            "update/kl": "update {:.4f}",
            "time/step": "{:5.1f} s",
            "speed": "{:5.0f} tok/s",
        }
        dead = {name: share * count for name, share in metrics.items() if name.startswith("groups/dead")}
        values = {**metrics, **dead, **_compute_speed(metrics)}
        cells = [form.format(values[name]) for name, form in formats.items() if name in values]
        return "  ".join([f"step {step:{len(str(self.total_steps))}}/{self.total_steps}", *cells])

    def list_warnings(self) -> Iterator[str]:
        """Yield a line for each warning of the steps so far."""
        for name, count in self.warning_counts.items():
            if count:
                error = f", the first with {self.first_error}" if name == "reward/failed" and self.first_error else ""
                yield f"! {_WARNING_LABELS[name]}: {count}{error}"


class PlainLogger(_ScreenLogger):
    """Prints a line for each step and each evaluation."""

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        had_error = bool(self.first_error)
        metrics = self.adapt_metrics(metrics, groups)
        cells = [self.format_step(step, metrics, groups)]
        cells += [f"! {what}: {metrics[name]:.0f}" for name, what in _WARNING_LABELS.items() if metrics.get(name)]
        cells += [f"({failed})"] if (failed := format_failed_terms(metrics)) else []
        print("  ".join(cells), flush=True)
        if self.first_error and not had_error:
            print(f"! the first failed reward says {self.first_error}", flush=True)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        evaluation = self.adapt_evaluation(evaluation)
        labeled = _label_measures(evaluation)
        estimates = [f"{name} {each.value:.2f} {format_interval(each)}".rstrip() for name, each in labeled.items()]
        few = [f"({TOO_FEW_PROMPTS})"] if describe_intervals(evaluation) == TOO_FEW_PROMPTS else []
        print("  ".join([f"eval step {step}", *estimates, *few, *_describe_uncounted(evaluation)]), flush=True)

    def close(self) -> None:
        pass


def format_failed_terms(metrics: Mapping[str, float]) -> str:
    """Return the failed terms of a reward, each with its share of the completions."""
    shares = {name.removeprefix("failed/"): share for name, share in metrics.items() if name.startswith("failed/")}
    return ", ".join(f"{escape_controls(name)} {share:.0%}" for name, share in shares.items())


def _compute_speed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the sampled tokens per second of a step; empty if either is unknown."""
    is_known = "tokens" in metrics and metrics.get("time/step")
    return {"speed": metrics["tokens"] / metrics["time/step"]} if is_known else {}


def find_first_error(groups: Sequence[Group]) -> str:
    """Return the first error line of the first failed reward, with escaped control characters; empty if none failed."""
    rewards = (reward for group in groups for reward in group.rewards)
    return format_error_line(next((reward for reward in rewards if reward.error and reward.applies), Reward(0.0)))


def format_error_line(reward: Reward) -> str:
    """Return the first error line of a reward, with escaped control characters."""
    return escape_controls(reward.error.strip().partition("\n")[0])


def _label_measures(evaluation: Evaluation, *others: Evaluation) -> dict[str, Estimate]:
    """Return the measures of an evaluation by label: those to show when it is compared with others."""
    measures = get_measures(evaluation)
    names = [name for name in select_measures([evaluation, *others]) if name in measures]
    return {format_measure_name(name, evaluation.k): measures[name] for name in names}


def format_interval(estimate: Estimate) -> str:
    """Return the interval in brackets; empty if there is none."""
    return f"[{estimate.low:.2f}, {estimate.high:.2f}]" if estimate.has_interval else ""


class ConsoleLogger(_ScreenLogger):
    """A live display that runs until `close`. A resumed run starts it with `first_step` steps done."""

    def __init__(self, total_steps: int, first_step: int = 0, screen: rich.console.Console | None = None):
        super().__init__(total_steps)
        bar = BarColumn(bar_width=_BAR_WIDTH_CELLS, complete_style="cyan", finished_style="cyan")
        columns = (bar, MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[dim]left"), TimeRemainingColumn())
        # Steps may take minutes: the default of 30 s may not contain the two steps that an estimate needs.
        self.progress = Progress(TextColumn("step"), *columns, auto_refresh=False, speed_estimate_period=3600)
        self.step_task = self.progress.add_task("step", total=total_steps, completed=first_step)
        self.trend: deque[float] = deque(maxlen=_TREND_STEPS)
        self.metrics: Mapping[str, float] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.live = Live(console=screen, get_renderable=self.render_safely, refresh_per_second=4)
        self.live.start()

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        self.metrics = metrics = self.adapt_metrics(metrics, groups)
        self.trend.append(metrics.get("reward/mean", math.nan))
        self.progress.update(self.step_task, completed=step)
        self.live.refresh()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.evaluations[step] = self.adapt_evaluation(evaluation)
        self.live.refresh()

    def close(self) -> None:
        self.live.stop()

    def render_safely(self) -> rich.console.RenderableType:
        """Render the display, or the error if that fails: Rich also calls this in a thread that catches none."""
        try:
            return self.render()
        except DISPLAY_ERRORS as error:
            return Text(f"! the display cannot be drawn ({type(error).__name__}: {error}); nothing is lost")

    def render(self) -> rich.console.Group:
        table = Table.grid(padding=(0, 2))
        for name, value, detail in self.make_rows():
            table.add_row(Text(name, "dim"), value, detail)
        warnings = list(self.list_warnings())
        if failed := format_failed_terms(self.metrics):
            warnings.append(f"! failed in the last step: {failed}")
        lines = (Text(line, "bold yellow", no_wrap=True, overflow="ellipsis") for line in warnings)
        return rich.console.Group(self.progress, Padding(table, (1, 0, 0, 0)), *lines)

    def make_rows(self) -> Iterator[tuple[str, str | Text, str | Text]]:
        metrics = defaultdict(lambda: math.nan, self.metrics)
        if self.trend:
            first, last = self.trend[0], self.trend[-1]
            change = f"  {last - first:+.3f} over {len(self.trend)} steps" if len(self.trend) > 1 else ""
            trend = Text.assemble((format_sparkline(self.trend), "cyan"), (change, "dim"))
            yield "reward", Text(f"{last:.3f}", "bold"), trend
        yield from make_evaluation_rows(self.evaluations)
        if (dead := get_zero_variance_share(self.metrics)) is not None:
            kinds = "{groups/dead_all_right:.0%} all right, {groups/dead_all_wrong:.0%} all wrong"
            is_split = "groups/dead_all_right" in metrics
            yield "dead groups", f"{dead:.0%}", kinds.format_map(metrics) if is_split else "have equal rewards"
        for name, metric, value, detail in _DISPLAY_ROWS:
            if metric in self.metrics:
                yield name, value.format(metrics[metric]), detail.format_map(metrics)
        if "tools/calls" in self.metrics:
            faults = format_fault_shares(self.metrics)
            yield "tools", f"{metrics['tools/calls']:.1f}", f"calls per conversation{faults and f', {faults}'}"
        if "time/step" in self.metrics:
            yield from _make_time_rows(self.metrics)


def format_sparkline(values: Sequence[float]) -> str:
    """Return the values as blocks of 8 heights, with a gap for a value that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    heights = "▁▂▃▄▅▆▇█"
    return "".join(
        heights[round((value - low) / (span or 1) * (len(heights) - 1))] if math.isfinite(value) else " "
        for value in values
    )


def describe_prompts(evaluation: Evaluation) -> str:
    """Return the number of prompts and whether there are intervals, such as "64 prompts, 95% intervals"."""
    return ", ".join(
        [format_count(evaluation.n, "prompt"), describe_intervals(evaluation), *_describe_uncounted(evaluation)]
    )


def _describe_uncounted(evaluation: Evaluation) -> list[str]:
    """Return how many rewards failed and how many prompts the accuracies exclude, as texts; empty if none."""
    counts = {
        "! failed rewards": evaluation.failed,
        "left out, no reward applies": evaluation.left_out,
        "neither right nor wrong": evaluation.undecided,
    }
    return [f"{what}: {count}" for what, count in counts.items() if count]


def make_evaluation_rows(evaluations: Mapping[int, Evaluation]) -> Iterator[tuple[str, str | Text, str | Text]]:
    """Yield the rows of the last evaluation, with its gain over the first."""
    if not evaluations:
        return
    before, (step, evaluation) = next(iter(evaluations.values())), list(evaluations.items())[-1]
    first = _label_measures(before, evaluation)
    yield "held out", "", Text(f"after step {step}: {describe_prompts(evaluation)}", "dim")
    for i, (name, estimate) in enumerate(_label_measures(evaluation, before).items()):
        gain = f"  {estimate.value - first[name].value:+.2f}" if len(evaluations) > 1 and name in first else ""
        value = Text(f"{estimate.value:.2f}", "" if i else "bold")
        yield f"  {name}", value, Text.assemble(format_interval(estimate), (gain, "dim"))


def _make_time_rows(metrics: Mapping[str, float]) -> Iterator[tuple[str, str | Text, str | Text]]:
    """Yield the rows for the time of a step, with the share of each stage as a bar and a legend."""
    total = metrics["time/step"]
    spent = {stage: metrics[f"time/{stage}"] for stage in _STAGE_COLORS if f"time/{stage}" in metrics}
    spent["other"] = max(0.0, total - sum(spent.values()))
    shares = {stage: seconds / total for stage, seconds in spent.items()} if total else {}
    rate = _compute_speed(metrics)
    yield "step", f"{total:.1f} s", f"{rate['speed']:,.0f} tokens per second" if rate else ""
    bar = [("█" * round(share * _BAR_WIDTH_CELLS), _STAGE_COLORS[stage]) for stage, share in shares.items()]
    legend = [(f"{stage} {share:.0%}  ", _STAGE_COLORS[stage]) for stage, share in shares.items()]
    yield "", "", Text.assemble(*bar)
    yield "", "", Text.assemble(*legend)


def _make_titled_table(title: str, *columns: str) -> Table:
    return Table(*columns, title=Text(title, "dim"), title_justify="left", box=rich.box.SIMPLE_HEAD)


def make_comparison_table(first: Evaluation, last: Evaluation) -> Table:
    """Return a table of the first and the last evaluation. If their intervals overlap, the gain may be by chance."""
    title = f"{last.task}, {last.split}: {describe_prompts(last)}"
    table = _make_titled_table(title, "", "before", "after", "gain", "intervals")
    for name, before, after in pair_measures(first, last):
        cells = (f"{estimate.value:.3f} {format_interval(estimate)}".rstrip() for estimate in (before, after))
        gain = f"{after.value - before.value:+.3f}"
        table.add_row(format_measure_name(name, last.k), *cells, gain, compare_intervals(before, after))
    return table


def make_evaluation_table(model: str, evaluation: Evaluation) -> Table:
    """Return a table of one evaluation, for `pellucid eval`."""
    title = f"{model} on {evaluation.task}, {evaluation.split}: {describe_prompts(evaluation)}"
    rewards = any(name in REWARD_MEASURES for name in select_measures([evaluation]))
    table = _make_titled_table(title, "", "mean" if rewards else "accuracy", "interval")
    for name, estimate in _label_measures(evaluation).items():
        table.add_row(name, f"{estimate.value:.3f}", format_interval(estimate))
    return table


# ---------------------------------------------------------------- graded answers, for pellucid eval


MAX_MESSAGE_CHARACTERS = 2000
"""How many characters of each message of a conversation are shown."""


def make_verdict_table(group: Group, has_verdicts: bool = True) -> Table:
    """Return a table of a group's question and first completion: its answer or conversation, and its grade.

    `has_verdicts`: whether rewards say which answers are right (`rewards_are_verdicts`).
    """
    completion, reward = group.completions[0], group.rewards[0]
    verdict = _format_grade(reward, has_verdicts)
    if group.prompt.answer and not (has_verdicts and reward.is_correct):
        verdict += f", {'right is' if has_verdicts else 'gold answer'} {' or '.join(group.prompt.gold_answers)}"
    if not completion.finished:
        verdict += ", cut off at the limit"
    if completion.messages:
        verdict += f"; {', '.join(describe_tool_use(count_turns(completion), get_tool_events(completion)))}"
    table = Table.grid(padding=(0, 2))
    for name, text in (("question", group.prompt.question), *format_completion(completion), ("verdict", verdict)):
        if text:
            table.add_row(Text(escape_controls(name), "dim"), Text(escape_controls(text), overflow="fold"))
    table.add_row()
    return table


def format_completion(completion: Completion) -> Iterator[tuple[str, str]]:
    """Yield the reasoning and the answer, or the messages of a conversation, each after its name or speaker."""
    if completion.messages:
        yield from format_messages(completion.messages, MAX_MESSAGE_CHARACTERS)
    else:
        reasoning, answer = split_thought(completion.full_text)
        yield from (("reasoning", reasoning), ("answer", (answer or "").strip()))


def _format_grade(reward: Reward, has_verdicts: bool) -> str:
    if reward.failed:
        return f"not graded: {format_error_line(reward) or 'the reward failed'}"
    verdict = f"{'right' if reward.is_correct else 'wrong'}, " if has_verdicts else ""
    return f"{verdict}reward {reward.value:.2f}"


# ---------------------------------------------------------------- notebooks


_MIN_REDRAW_SECONDS = 0.5
"""The minimum time between two redraws. Each redraw sends a message to the browser."""


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. This does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class NotebookLogger(_ScreenLogger):
    """Shows curves of reward and held-out accuracy, and the last step as text, in one output of a notebook.

    `metrics` are the records of the finished steps of a resumed run.
    """

    def __init__(self, total_steps: int, metrics: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(total_steps)
        self.rewards = [{"step": row["step"], "reward/mean": row.get("reward/mean")} for row in metrics]
        self.evaluations: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.status_line = ""
        self._display: Any = None
        self._shown_at = 0.0

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        metrics = self.adapt_metrics(metrics, groups)
        self.rewards.append({"step": step, "reward/mean": metrics.get("reward/mean")})
        self.status_line = self.format_step(step, metrics, groups)
        if time.monotonic() - self._shown_at > _MIN_REDRAW_SECONDS:
            self.redraw()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        rows = self.evaluations.setdefault((evaluation.task, evaluation.split), [])
        rows.append({"step": step, **make_evaluation_record(self.adapt_evaluation(evaluation))})
        self.redraw()

    def close(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Draw the output in place of the previous one."""
        from IPython.display import display  # noqa: PLC0415 - only notebooks have it

        bundle = self.make_bundle()
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)
        self._shown_at = time.monotonic()

    def make_bundle(self) -> dict[str, str]:
        """Return the output as HTML, and as text for frontends without HTML."""
        evaluations = (chart for key, rows in self.evaluations.items() for chart in draw_evaluation_charts(*key, rows))
        charts = list(filter(None, [draw_reward_chart(self.rewards), *evaluations]))
        text = "\n".join([self.status_line, *self.list_warnings()])
        html = f'<pre style="margin:0">{escape_text(text)}</pre>'
        if charts:  # as an image, so that the styles of the chart and of the notebook do not affect one another
            image = f"data:image/svg+xml;base64,{b64encode(join_charts(charts).encode()).decode()}"
            html = f'<img alt="{escape_text(self.status_line)}" style="max-width:100%" src="{image}">{html}'
        return {"text/html": html, "text/plain": text}


def display_page(path: Path) -> None:
    """Show an HTML page in a frame that runs no script."""
    from IPython.display import display  # noqa: PLC0415 - only notebooks have it

    page = escape(path.read_text(encoding="utf-8"))
    style = "width:100%;height:640px;border:1px solid #8884"
    frame = f'<iframe sandbox title="{escape_text(path.parent.name)}" style="{style}" srcdoc="{page}"></iframe>'
    display({"text/html": frame, "text/plain": str(path)}, raw=True)
