"""Line charts as SVG text: axes, direct labels, intervals, a tooltip on every point. No library, no script."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, isfinite, log10, nan
from pathlib import Path
from statistics import fmean

from pellucid.reporting.eval_metrics import (
    TOO_FEW_PROMPTS,
    describe_intervals,
    format_measure_name,
    parse_estimate,
    parse_evaluation,
    select_measures,
)
from pellucid.reporting.run_files import Record

CHART_CSS = Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
"""The colours of the charts, light and dark; whatever shows a chart must hold it."""
PAGE_CSS = CHART_CSS + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
"""What all pages have in common, charts included: type, tables, the grid of charts."""

CHART_WIDTH, CHART_HEIGHT = 440, 252
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 46, 320, 60, 220
LABEL_GAP = 16
MAX_POINTS = 120
MAX_DOTS = 60
MIN_RELATIVE_SPAN = 1e-9
"""Differences smaller than this share of the values count as none."""
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-280, 1e280
"""The largest value that is drawn: a metric may run away."""
INVISIBLE_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float = nan
    high: float = nan
    """The ends of the interval around y, where there is one."""
    base: float = 0.0
    """The value that y stands on, in a stack."""

    @property
    def top(self) -> float:
        return self.base + self.y


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    """Stands at the end of the line; empty for a line that is one of many."""
    points: Sequence[Point]
    style: str = "first"
    """CSS classes of charts.css: first, second, third, fourth, thin, layer; band: intervals are drawn as one area."""
    unit: str = "step"
    """The name of the x axis."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the values of an axis lie on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def draw_chart(title: str, subtitle: str, series: Sequence[Series], include: Sequence[float] = ()) -> str:
    """An `<svg>` of lines over steps, or nothing where there is no point to draw.

    include: values that the y axis must reach.
    """
    drawable = [line for line in series if line.points]
    if not drawable:
        return ""
    size = ceil(max(len(line.points) for line in drawable) / MAX_POINTS)
    series = [thin_series(line, size) for line in drawable]
    if any("pooled" in line.style for line in series):
        subtitle += f"; mean and range of {size} steps"
    y_ticks = compute_ticks(*compute_extent([*include, *(value for line in series for value in list_y_values(line))]))
    x = Scale(0, max(1.0, *(point.x for line in series for point in line.points)), PLOT_LEFT, PLOT_RIGHT)
    y = Scale(y_ticks[0], y_ticks[-1], PLOT_BOTTOM, PLOT_TOP)
    x_ticks = [tick for tick in compute_ticks(0, x.high) if tick <= x.high and tick == int(tick)]
    drawn = [draw_series(line, x, y, shift=4 * (i - (len(series) - 1) / 2)) for i, line in enumerate(series)]
    about = f"{title}: {'; '.join(describe_series(line) for line in series if line.label)}"
    return "\n".join(
        [
            f'<svg class="chart" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{escape_text(about)}">',
            f'<text class="title" x="0" y="17">{escape_text(title)}</text>',
            f'<text class="tick" x="0" y="36">{escape_text(subtitle)}</text>',
            *(draw_y_tick(tick, y(tick)) for tick in y_ticks),
            *(draw_x_tick(tick, x(tick), series[0].unit) for tick in x_ticks),
            *drawn,
            *draw_end_labels(series, y),
            "</svg>",
        ]
    )


def stack_series(series: Sequence[Series]) -> list[Series]:
    """The lines as layers, each standing on those before it."""
    tops: defaultdict[float, float] = defaultdict(float)
    layers = []
    for line in series:
        points = [replace(point, base=tops[point.x]) for point in line.points]
        tops |= {point.x: point.top for point in points}
        layers.append(Series(line.label, points, f"{line.style} layer"))
    return layers


def compute_mean_line(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean line, at the steps that all lines have."""
    columns = [{point.x: point.y for point in line} for line in lines]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    return [Point(x, sum(column[x] for column in columns) / len(columns)) for x in shared]


def compute_range_line(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean line with the lowest and the highest of the lines around it, at the steps that all have."""
    columns = [{point.x: point.y for point in line} for line in lines]
    around = {mean.x: [column[mean.x] for column in columns] for mean in compute_mean_line(lines)}
    return [Point(x, fmean(values), min(values), max(values)) for x, values in around.items()]


def escape_text(text: object) -> str:
    """HTML of a text as it is: markup escaped; control, direction and broken characters as \\u escapes."""
    return escape(INVISIBLE_CHARACTERS.sub(lambda char: f"\\u{ord(char[0]):04x}", str(text)))


def thin_series(line: Series, size: int) -> Series:
    """Each `size` neighbours as one point: their mean and range; where points have intervals of their own, the last."""
    ends = range(len(line.points), 0, -size)
    runs = [line.points[max(0, end - size) : end] for end in reversed(ends)]
    if size == 1 or has_intervals(line):
        return replace(line, points=[run[-1] for run in runs])
    return replace(line, points=[pool_points(run) for run in runs], style=f"{line.style} pooled")


def has_intervals(line: Series) -> bool:
    return any(isfinite(point.low) for point in line.points)


def pool_points(points: Sequence[Point]) -> Point:
    values = [point.y for point in points]
    return Point(points[-1].x, fmean(values), min(values), max(values), base=fmean(point.base for point in points))


def list_y_values(line: Series) -> Iterable[float]:
    return (value for point in line.points for value in (point.top, point.low, point.high) if isfinite(value))


def is_drawable(value: object) -> bool:
    """A number that has a place on a page; a log may hold others, and null where there was none."""
    return isinstance(value, int | float) and abs(value) < MAX_MAGNITUDE


def compute_extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def compute_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Different round numbers that reach from `low` to `high` or just beyond, whatever numbers these are.

    Values that differ by rounding alone, or from 0 by next to nothing, have the axis of a single value.
    """
    size, span = max(abs(low), abs(high)), high - low
    rough = (span if span > MIN_RELATIVE_SPAN * size > MIN_MAGNITUDE else size if size > MIN_MAGNITUDE else 1.0) / count
    power = floor(log10(rough))
    step = next(multiple * 10.0**power for multiple in (1, 2, 5, 10) if multiple * 10.0**power >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, -power) for i in range(first, max(last, first + 1) + 1)]


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_count(n: int, thing: str) -> str:
    """Example: "2 steps"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def draw_y_tick(tick: float, y: float) -> str:
    line = f'<path class="grid" d="M{PLOT_LEFT} {y}H{PLOT_RIGHT}"/>'
    return (
        f'{line}<text class="tick" x="{PLOT_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
    )


def draw_x_tick(tick: float, x: float, unit: str) -> str:
    name = f"{unit} 0" if tick == 0 else format_number(tick)
    mark = f'<path class="mark" d="M{x} {PLOT_BOTTOM}v5"/>'
    return f'{mark}<text class="tick" x="{x}" y="{PLOT_BOTTOM + 20}" text-anchor="middle">{name}</text>'


def draw_series(line: Series, x: Scale, y: Scale, shift: float) -> str:
    """A line with its points and its area, range or intervals; `shift` sets these beside the other lines' intervals."""
    path = [f"{x(point.x)} {y(point.top)}" for point in line.points]
    if "layer" in line.style:
        around = draw_area("area", path, [f"{x(point.x)} {y(point.base)}" for point in line.points])
    elif "pooled" in line.style or "band" in line.style:
        highs = [f"{x(point.x)} {y(point.high)}" for point in line.points]
        lows = [f"{x(point.x)} {y(point.low)}" for point in line.points]
        around = draw_area("range", highs, lows)
    else:
        bars = (f"M{x(p.x) + shift:.1f} {y(p.low)}V{y(p.high)}" for p in line.points if isfinite(p.low))
        around = f'<path class="bar" d="{"".join(bars)}"/>'
    dots = "".join(draw_dot(point, line, x(point.x), y(point.top)) for point in line.points) if line.label else ""
    density = "dense" if len(path) > MAX_DOTS else "lone" if len(path) == 1 else "sparse"
    return f'<g class="{line.style} {density}">{around}<path class="line" d="M{"L".join(path)}"/>{dots}</g>'


def draw_area(kind: str, upper: Sequence[str], lower: Sequence[str]) -> str:
    return f'<path class="{kind}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'


def draw_dot(point: Point, line: Series, x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.2"><title>{escape_text(describe_point(point, line))}</title></circle>'


def describe_point(point: Point, line: Series) -> str:
    bounds = f" [{format_number(point.low)}, {format_number(point.high)}]" if isfinite(point.low) else ""
    return f"{line.label}, {line.unit} {format_number(point.x)}: {format_number(point.y)}{bounds}"


def describe_series(line: Series) -> str:
    first, last = line.points[0], line.points[-1]
    ends = [f"{format_number(point.y)} at {line.unit} {format_number(point.x)}" for point in (first, last)]
    return f"{line.label} from {ends[0]} to {ends[1]}"


def compute_label_y(line: Series) -> float:
    """The end of a line, or the middle of the end of a layer."""
    last = line.points[-1]
    return last.base + last.y / 2 if "layer" in line.style else last.y


def draw_end_labels(series: Sequence[Series], y: Scale) -> Iterable[str]:
    """The name and the last value of each line, beside its end, pushed apart where they would overlap."""
    named = sorted((y(compute_label_y(line)), i) for i, line in enumerate(series) if line.label)
    places: list[float] = []
    for place, _ in named:
        places.append(max(place, places[-1] + LABEL_GAP) if places else place)
    beyond = max(0.0, places[-1] - PLOT_BOTTOM) if places else 0.0
    for place, (_, i) in zip(places, named, strict=True):
        label = series[i].label if len(series[i].label) < 14 else series[i].label[:13] + "…"
        text = f"{escape_text(label)} <tspan>{format_number(series[i].points[-1].y)}</tspan>"
        yield f'<text class="label {series[i].style}" x="{PLOT_RIGHT + 10}" y="{place - beyond + 4:.1f}">{text}</text>'


# ---------------------------------------------------------------- curves
# Which curves a run is seen by: from the records of its folder to charts.


SERIES_STYLES = ("first", "second", "third", "fourth")
CHART_MARGIN = 24
LENGTH_LABELS = {
    "completion/length_mean": "mean",
    "completion/length_right": "right",
    "completion/length_wrong": "wrong",
}
ZERO_VARIANCE_LABELS = {
    "groups/dead_all_right": "all right",
    "groups/dead_all_wrong": "all wrong",
    "groups/dead_equal": "equal rewards",
}
GAP_LABELS = {"sampler/gap_mean": "mean", "sampler/gap_max": "max"}
STAGE_LABELS = {f"time/{stage}": stage for stage in ("generate", "reward", "score", "update")}
CALLS_METRIC = "tools/calls"
MAX_LOGGED_CHARTS = 8
"""How many of the metrics that rewards log have a chart on the report; all of them are in metrics.jsonl."""
NON_TERM_METRICS = {"reward/mean", "reward/std", "reward/failed", "reward/no_term", "reward/after_kl"}


def draw_run_charts(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> list[str]:
    """The charts that the records of a run suffice for."""
    charts = [
        *(drawn for key, rows in evals.items() for drawn in draw_evaluation_charts(*key, rows)),
        draw_chart("Reward", "mean of a step", make_series(metrics, {"reward/mean": "reward"})),
        draw_chart(
            "Dead groups",
            "share of groups with equal rewards: no signal",
            stack_series(make_series(metrics, ZERO_VARIANCE_LABELS)),
            include=(0, 1),
        ),
        draw_chart("Length", "tokens of a completion", make_series(metrics, LENGTH_LABELS), include=(0,)),
        *draw_tool_charts(metrics),
        draw_chart(
            "Terms of the reward", "means, before their weights", make_series(metrics, list_reward_terms(metrics))
        ),
        *(
            draw_chart(
                name.removeprefix("logged/"), "logged by rewards, mean of a step", make_series(metrics, {name: "mean"})
            )
            for name in list_logged_metrics(metrics)
        ),
        draw_chart("Entropy", "nats a token", make_series(metrics, {"entropy": "entropy"}), include=(0,)),
        draw_chart("KL", "from the reference, nats a token", make_series(metrics, {"kl": "kl"}), include=(0,)),
        draw_chart(
            "Sampler gap", "between sampler and scorer, nats a token", make_series(metrics, GAP_LABELS), include=(0,)
        ),
        draw_chart("Time", "seconds a step", stack_series(make_series(metrics, STAGE_LABELS)), include=(0,)),
    ]
    return [drawn for drawn in charts if drawn]


def draw_tool_charts(metrics: Sequence[Record]) -> list[str]:
    """Turns and calls of tools, and which share of these came to nothing, where a run has conversations."""
    held = [row for row in metrics if "turns/mean" in row]
    called = (
        [{**row, CALLS_METRIC: row.get(CALLS_METRIC, 0.0)} for row in held]
        if any(CALLS_METRIC in row for row in held)
        else []
    )
    kinds = list({name: None for row in held for name in row if name.startswith("tools/") and name != CALLS_METRIC})
    faults = [
        {"step": row["step"], **{kind: row.get(kind, 0.0) for kind in kinds}} for row in called if row[CALLS_METRIC]
    ]
    labels = {kind: kind.removeprefix("tools/") for kind in kinds}
    return [
        draw_chart(
            "Turns", "of the policy, mean of a conversation", make_series(held, {"turns/mean": "turns"}), include=(0,)
        ),
        draw_chart(
            "Calls of tools", "mean of a conversation", make_series(called, {CALLS_METRIC: "calls"}), include=(0,)
        ),
        draw_chart(
            "Calls that came to nothing", "share of the calls of tools", make_series(faults, labels), include=(0,)
        ),
    ]


def draw_evaluation_charts(task: str, split: str, rows: Sequence[Record]) -> list[str]:
    """Charts of the evaluations, those of accuracy and of reward that are worth showing."""
    names, k = select_measures([parse_evaluation(row) for row in rows]), rows[-1]["k"]
    few = describe_intervals(parse_evaluation(rows[-1])) == TOO_FEW_PROMPTS
    about, charts = f"{task}, {split}, {TOO_FEW_PROMPTS if few else 'with 95% intervals'}", []
    if "greedy" in names:
        charts.append(
            draw_chart("Held-out accuracy", about, make_evaluation_series(rows, "mean@k", "greedy", k), (0, 1))
        )
    if "reward" in names:
        charts.append(draw_chart("Held-out reward", about, make_evaluation_series(rows, "reward@k", "reward", k)))
    return charts if "reward" not in names[:1] else charts[::-1]


def make_evaluation_series(rows: Sequence[Record], sampled: str, best: str, k: int) -> list[Series]:
    return [
        Series(format_measure_name(sampled, k), make_estimate_points(rows, sampled), "second"),
        Series(best, make_estimate_points(rows, best), "first"),
    ]


def draw_accuracy_picture(runs: Sequence[tuple[Sequence[Record], Sequence[Record]]]) -> str:
    """One SVG document of the accuracy and the reward of runs, each the (evaluations, metrics) of a seed."""
    greedy, mean = ([make_estimate_points(evals, name) for evals, _ in runs] for name in ("greedy", "mean@k"))
    k = next((evals[-1]["k"] for evals, _ in runs if evals), "k")
    rewards = [make_points(metrics, "reward/mean") for _, metrics in runs]
    seeds = f", {len(runs)} runs and their mean" if len(runs) > 1 else ""
    accuracies = [*make_seed_series(f"mean@{k}", mean, "second"), *make_seed_series("greedy", greedy, "first")]
    charts = [
        draw_chart(
            "Held-out accuracy", f"share of prompts{seeds or ', with 95% intervals'}", accuracies, include=(0, 1)
        ),
        draw_chart("Training reward", f"mean of a step{seeds}", make_seed_series("reward", rewards, "first")),
    ]
    return join_charts([drawn for drawn in charts if drawn])


def join_charts(charts: Sequence[str]) -> str:
    """Charts side by side as one SVG document, on paper of its own."""
    width, height = len(charts) * (CHART_WIDTH + CHART_MARGIN) + CHART_MARGIN, CHART_HEIGHT + 2 * CHART_MARGIN
    placed = (
        f'<svg x="{CHART_MARGIN + i * (CHART_WIDTH + CHART_MARGIN)}" y="{CHART_MARGIN}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}">{drawn}</svg>'
        for i, drawn in enumerate(charts)
    )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    paper = '<rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>'
    return "\n".join([start, f"<style>{CHART_CSS}</style>", paper, *placed, "</svg>\n"])


def make_seed_series(label: str, runs: Sequence[Sequence[Point]], style: str) -> list[Series]:
    """One run as it is, with its intervals; several as thin lines under their mean."""
    runs = [points for points in runs if points]
    if len(runs) < 2:
        return [Series(label, points, style) for points in runs]
    bare = ([replace(point, low=nan, high=nan) for point in points] for points in runs)
    return [*(Series("", points, f"{style} thin") for points in bare), Series(label, compute_mean_line(runs), style)]


def make_series(rows: Sequence[Record], labels: Mapping[str, str]) -> list[Series]:
    drawn = [(label, points) for name, label in labels.items() if (points := make_points(rows, name))]
    return [Series(label, points, SERIES_STYLES[i % len(SERIES_STYLES)]) for i, (label, points) in enumerate(drawn)]


def list_reward_terms(metrics: Sequence[Record]) -> dict[str, str]:
    """The terms of a composite reward; a single one would be the reward again."""
    names = [
        name for name in (metrics[-1] if metrics else {}) if name.startswith("reward/") and name not in NON_TERM_METRICS
    ]
    return {name: name.removeprefix("reward/") for name in names} if len(names) > 1 else {}


def list_logged_metrics(metrics: Sequence[Record]) -> list[str]:
    """The first metrics that rewards logged."""
    return list({name: None for row in metrics for name in row if name.startswith("logged/")})[:MAX_LOGGED_CHARTS]


def make_points(rows: Sequence[Record], name: str) -> list[Point]:
    return [Point(row["step"], row[name]) for row in rows if is_drawable(row.get(name))]


def make_estimate_points(rows: Sequence[Record], name: str) -> list[Point]:
    """A measure of the evaluations, with its intervals."""
    found = [(row["step"], parse_estimate(row.get(name))) for row in rows if row.get(name)]
    return [Point(step, estimate.value, estimate.low, estimate.high) for step, estimate in found]
