"""A run on the screen: a live display in a terminal, plain lines elsewhere, a table at the end.

The headline is reward, held-out accuracy (reward, where no answer is right or wrong) and dead groups. `loss` is in the
files and not on the screen: on-policy it is 0 by construction, whatever is being learnt.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import rich.box
import rich.console
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pellucid.machine.harmless import harmless
from pellucid.reporting.charts import counted
from pellucid.reporting.conversations import fault_shares
from pellucid.reporting.loggers import DRAWING
from pellucid.reporting.measures import (
    REWARDS,
    TOO_FEW,
    about_intervals,
    between,
    dead_share,
    have_verdicts,
    labelled,
    measures,
    without_correctness,
    worth_showing,
)
from pellucid.types import Estimate, Evaluation, Group, Reward, state_correctness

STAGES = {"generate": "cyan", "reward": "magenta", "score": "blue", "update": "green", "other": "bright_black"}
WARNINGS = {
    "reward/failed": "failed rewards",
    "reward/no_term": "completions that no reward is meant for",
    "skipped": "skipped updates",
    "skipped/overflow": "updates too large for fp16 at this loss_scale",
    "idle": "updates without a gradient",
}
TREND_STEPS = 40
BAR_CELLS = 40


def terminal(total_steps: int, first_step: int = 0) -> Console | Plain:
    """A live display where a person watches, plain lines where a file does."""
    return Console(total_steps, first_step) if sys.stdout and sys.stdout.isatty() else Plain(total_steps)


class Screen:
    """Shows a run without calling answers right or wrong once its rewards have been a matter of degree."""

    has_continuous_rewards = False

    def adapt_metrics(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the metrics of a step as they are shown."""
        if not state_correctness(reward for group in groups for reward in group.rewards):
            self.has_continuous_rewards = True
        return without_correctness(metrics) if self.has_continuous_rewards else metrics

    def adapt_evaluation(self, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation as it is shown."""
        self.has_continuous_rewards = self.has_continuous_rewards or not evaluation.has_verdicts
        return replace(evaluation, has_verdicts=not self.has_continuous_rewards)


class Plain(Screen):
    """One line a step and one line an evaluation, on standard output."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.first_error = ""

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        metrics = self.adapt_metrics(metrics, groups)
        width = len(str(self.total_steps))
        cells = [f"step {step:{width}}/{self.total_steps}", *plain_cells(metrics, len(groups))]
        cells += [f"! {what}: {metrics[name]:.0f}" for name, what in WARNINGS.items() if metrics.get(name)]
        cells += [f"({failing(metrics)})"] if failing(metrics) else []
        print("  ".join(cells), flush=True)
        if not self.first_error and (error := first_error(groups)):
            self.first_error = error
            print(f"! the first failed reward says {error}", flush=True)

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        evaluation = self.adapt_evaluation(evaluation)
        shown = (with_interval(name, estimate) for name, estimate in named(evaluation).items())
        few = [f"({TOO_FEW})"] if about_intervals(evaluation) == TOO_FEW else []
        print("  ".join([f"eval step {step}", *shown, *few, *not_counted(evaluation)]), flush=True)

    def close(self) -> None:
        pass


def plain_cells(metrics: Mapping[str, float], groups: int) -> list[str]:
    """The cells of a line, for the metrics that are there; dead groups are counted."""
    counts = {name: value * groups for name, value in metrics.items() if name.startswith("groups/dead")}
    width = len(str(groups))
    faults = fault_shares(metrics)
    formats = {
        "reward/mean": "reward {:6.3f}",
        "reward/after_kl": "after kl {:6.3f}",
        "groups/dead_all_right": f"dead {{:{width}.0f}}/{groups} right",
        "groups/dead_all_wrong": f"{{:{width}.0f}}/{groups} wrong",
        "groups/dead_equal": f"dead {{:{width}.0f}}/{groups}",
        "groups/drawn": "drawn {:3.0f}",
        "completion/length_mean": "len {:6.1f}",
        "completion/finished": "fin {:.2f}",
        "turns/mean": "turns {:.1f}",
        "tools/calls": "tools {:.1f}" + (f" ({faults})" if faults else ""),
        "sampler/gap_mean": "gap {:.4f}",
        "kl": "kl {:.4f}",
        "time/step": "{:5.1f} s",
        "speed": "{:5.0f} tok/s",
    }
    values = {**metrics, **counts, **speed(metrics)}
    return [form.format(values[name]) for name, form in formats.items() if name in values]


def failing(metrics: Mapping[str, float]) -> str:
    """The terms of a reward that failed, with the share of completions."""
    shares = {name.removeprefix("failed/"): share for name, share in metrics.items() if name.startswith("failed/")}
    return ", ".join(f"{harmless(name)} {share:.0%}" for name, share in shares.items())


def speed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sampled tokens a second of the whole step, where both are known."""
    known = "tokens" in metrics and metrics.get("time/step")
    return {"speed": metrics["tokens"] / metrics["time/step"]} if known else {}


def first_error(groups: Sequence[Group]) -> str:
    """The first line of the first failed reward, harmless to a terminal; empty where none failed."""
    rewards = (reward for group in groups for reward in group.rewards)
    return first_line(next((reward for reward in rewards if reward.error and reward.applies), Reward(0.0)))


def first_line(reward: Reward) -> str:
    """The first line of its error, harmless to a terminal."""
    return harmless(reward.error.strip().partition("\n")[0])


def named(evaluation: Evaluation, *others: Evaluation) -> dict[str, Estimate]:
    """The measures of an evaluation that are worth showing beside those of others, by their labels."""
    measured = measures(evaluation)
    names = [name for name in worth_showing([evaluation, *others]) if name in measured]
    return {labelled(name, evaluation.k): measured[name] for name in names}


def interval(estimate: Estimate) -> str:
    """The interval in brackets; empty where there is none."""
    return f"[{estimate.low:.2f}, {estimate.high:.2f}]" if estimate.has_interval else ""


def with_interval(name: str, estimate: Estimate) -> str:
    return f"{name} {estimate.value:.2f} {interval(estimate)}".rstrip()


class Console(Screen):
    """A live display; `close` gives the terminal back.

    first_step: steps that were finished before, when a run resumes.
    """

    def __init__(self, total_steps: int, first_step: int = 0, screen: rich.console.Console | None = None):
        bar = BarColumn(bar_width=BAR_CELLS, complete_style="cyan", finished_style="cyan")
        left = TimeRemainingColumn()
        columns = (bar, MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[dim]left"), left)
        # Steps may take minutes: the default of 30 s would have no two of them to measure a speed from.
        self.progress = Progress(TextColumn("step"), *columns, auto_refresh=False, speed_estimate_period=3600)
        self.step_task = self.progress.add_task("step", total=total_steps, completed=first_step)
        self.trend: deque[float] = deque(maxlen=TREND_STEPS)
        self.metrics: Mapping[str, float] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.warning_counts: Counter[str] = Counter()
        self.first_error = ""
        self.live = Live(console=screen, get_renderable=self.render_safely, refresh_per_second=4)
        self.live.start()

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        self.metrics = metrics = self.adapt_metrics(metrics, groups)
        self.trend.append(metrics.get("reward/mean", math.nan))
        self.warning_counts.update({name: int(metrics.get(name, 0)) for name in WARNINGS})
        self.first_error = self.first_error or first_error(groups)
        self.progress.update(self.step_task, completed=step)
        self.live.refresh()

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.evaluations[step] = self.adapt_evaluation(evaluation)
        self.live.refresh()

    def close(self) -> None:
        self.live.stop()

    def render_safely(self) -> rich.console.RenderableType:
        """Render the display. A thread of its own does so, too, and nobody would catch an error there."""
        try:
            return self.render()
        except DRAWING as error:
            return Text(f"! this cannot be shown ({type(error).__name__}: {error}); nothing is lost")

    def render(self) -> rich.console.Group:
        table = Table.grid(padding=(0, 2))
        for name, value, detail in self.make_rows():
            table.add_row(Text(name, "dim"), value, detail)
        return rich.console.Group(self.progress, Padding(table, (1, 0, 0, 0)), *self.make_warning_lines())

    def make_rows(self) -> Iterator[tuple[str, str | Text, str | Text]]:
        metrics = self.metrics
        if self.trend:
            yield "reward", Text(f"{self.trend[-1]:.3f}", "bold"), trend_line(self.trend)
        yield from evaluation_rows(self.evaluations)
        if (dead := dead_share(metrics)) is not None:
            right, wrong = (metrics.get(f"groups/dead_all_{name}") for name in ("right", "wrong"))
            told = "have equal rewards" if right is None else f"{right:.0%} all right, {wrong or 0.0:.0%} all wrong"
            yield "dead groups", f"{dead:.0%}", told
        if "groups/drawn" in metrics:
            yield "groups drawn", f"{metrics['groups/drawn']:.0f}", f"{metrics['groups/drawn_dead']:.0%} of them dead"
        if "completion/length_mean" in metrics:
            finished = f"tokens a completion, {metrics.get('completion/finished', math.nan):.0%} finished"
            yield "length", f"{metrics['completion/length_mean']:.1f}", finished
        if "turns/mean" in metrics:
            yield "turns", f"{metrics['turns/mean']:.1f}", "a conversation"
        if "tools/calls" in metrics:
            faults = fault_shares(metrics)
            yield "tools", f"{metrics['tools/calls']:.1f}", "calls a conversation" + (f", {faults}" if faults else "")
        if "sampler/gap_mean" in metrics:
            yield (
                "sampler gap",
                f"{metrics['sampler/gap_mean']:.4f}",
                f"{metrics.get('sampler/gap_max', math.nan):.3f} at most",
            )
        if "kl" in metrics:
            yield "kl", f"{metrics['kl']:.4f}", "nats a token"
        if "time/step" in metrics:
            yield from time_rows(metrics)

    def make_warning_lines(self) -> Iterator[Text]:
        for name, count in self.warning_counts.items():
            if count:
                said = f", the first with {self.first_error}" if name == "reward/failed" and self.first_error else ""
                yield Text(f"! {WARNINGS[name]}: {count}{said}", "bold yellow", no_wrap=True, overflow="ellipsis")
        if failed := failing(self.metrics):
            yield Text(f"! failed in the last step: {failed}", "bold yellow", no_wrap=True, overflow="ellipsis")


def trend_line(values: Sequence[float]) -> Text:
    change = f"  {values[-1] - values[0]:+.3f} over {len(values)} steps" if len(values) > 1 else ""
    return Text.assemble((sparkline(values), "cyan"), (change, "dim"))


def sparkline(values: Sequence[float]) -> str:
    """The values as blocks from the lowest to the highest of them; a gap where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    heights = "▁▂▃▄▅▆▇█"
    return "".join(
        heights[round((value - low) / (span or 1) * (len(heights) - 1))] if math.isfinite(value) else " "
        for value in values
    )


def asked(evaluation: Evaluation) -> str:
    """Return how many prompts were asked, and if there are intervals. Example: "64 prompts, 95% intervals"."""
    return ", ".join([counted(evaluation.n, "prompt"), about_intervals(evaluation), *not_counted(evaluation)])


def not_counted(evaluation: Evaluation) -> list[str]:
    """Return how many answers failed, and how many prompts count in no accuracy, in words; empty if all count."""
    counts = {
        "! failed rewards": evaluation.failed,
        "left out, no reward applies": evaluation.left_out,
        "neither right nor wrong": evaluation.undecided,
    }
    return [f"{what}: {count}" for what, count in counts.items() if count]


def evaluation_rows(evaluations: Mapping[int, Evaluation]) -> Iterator[tuple[str, str | Text, str | Text]]:
    """The last evaluation, and what it has gained on the first."""
    if evaluations:
        step, evaluation = list(evaluations.items())[-1]
        before = next(iter(evaluations.values()))
        first = named(before, evaluation)
        yield "held out", "", Text(f"after step {step}: {asked(evaluation)}", "dim")
        for i, (name, estimate) in enumerate(named(evaluation, before).items()):
            gain = f"  {estimate.value - first[name].value:+.2f}" if len(evaluations) > 1 and name in first else ""
            value = Text(f"{estimate.value:.2f}", "" if i else "bold")
            yield f"  {name}", value, Text.assemble(interval(estimate), (gain, "dim"))


def time_rows(metrics: Mapping[str, float]) -> Iterator[tuple[str, str | Text, str | Text]]:
    """Where the time of a step goes, as one bar and its legend."""
    total = metrics["time/step"]
    spent = {stage: metrics[f"time/{stage}"] for stage in STAGES if f"time/{stage}" in metrics}
    spent["other"] = max(0.0, total - sum(spent.values()))
    shares = {stage: seconds / total for stage, seconds in spent.items()} if total else {}
    rate = speed(metrics)
    yield "step", f"{total:.1f} s", f"{rate['speed']:,.0f} tokens a second" if rate else ""
    yield "", "", Text.assemble(*(("█" * round(share * BAR_CELLS), STAGES[stage]) for stage, share in shares.items()))
    yield "", "", Text.assemble(*((f"{stage} {share:.0%}  ", STAGES[stage]) for stage, share in shares.items()))


def titled(title: str, *columns: str) -> Table:
    return Table(*columns, title=Text(title, "dim"), title_justify="left", box=rich.box.SIMPLE_HEAD)


def before_after(first: Evaluation, last: Evaluation) -> Table:
    """The first and the last evaluation side by side; where the intervals overlap, the gain may be chance."""
    title = f"{last.task}, {last.split}: {asked(last)}"
    table = titled(title, "", "before", "after", "gain", "intervals")
    before = named(first, last)
    for name, new in named(last, first).items():
        if old := before.get(name):
            cells = (f"{estimate.value:.3f} {interval(estimate)}".rstrip() for estimate in (old, new))
            table.add_row(name, *cells, f"{new.value - old.value:+.3f}", between(old, new))
    return table


def accuracy_table(model: str, evaluation: Evaluation) -> Table:
    """One evaluation, for `pellucid eval`."""
    title = f"{model} on {evaluation.task}, {evaluation.split}: {asked(evaluation)}"
    rewards = not have_verdicts([evaluation]) or any(name in REWARDS for name in worth_showing([evaluation]))
    table = titled(title, "", "mean" if rewards else "accuracy", "interval")
    for name, estimate in named(evaluation).items():
        table.add_row(name, f"{estimate.value:.3f}", interval(estimate))
    return table
