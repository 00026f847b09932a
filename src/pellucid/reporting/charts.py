"""Draws line charts as SVG, without a library or a script, and chooses the charts of a run.

Lines have direct labels, intervals, and a tooltip on every point.
"""

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

_CHART_CSS = Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
"""The colors of the charts, light and dark. Each page with a chart must include it."""
PAGE_CSS = _CHART_CSS + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
"""The style of all pages: CHART_CSS, fonts, tables, and the grid of charts."""

CHART_WIDTH, _CHART_HEIGHT = 440, 252
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 46, 320, 60, 220
_LABEL_GAP = 16
MAX_POINTS = 120
_MAX_DOTS = 60
_MIN_RELATIVE_SPAN = 1e-9
"""Values whose difference is a smaller share of them count as equal."""
_MIN_MAGNITUDE, _MAX_MAGNITUDE = 1e-280, 1e280
"""The magnitudes that are drawn: a metric may diverge."""
_INVISIBLE_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float = nan
    high: float = nan
    """The ends of the interval around y; NaN without one."""
    base: float = 0.0
    """The top of the layer below, in a stack."""

    @property
    def top(self) -> float:
        return self.base + self.y


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    """The label at the end of the line; empty for no label."""
    points: Sequence[Point]
    style: str = "first"
    """Classes of charts.css: first, second, third, fourth, thin, layer. With band, intervals are drawn as an area."""
    unit: str = "step"
    """The name of the x axis."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps the values of an axis to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def draw_chart(title: str, subtitle: str, series: Sequence[Series], include: Sequence[float] = ()) -> str:
    """Return an `<svg>` of lines; empty if there is no point to draw.

    Args:
        title: The title.
        subtitle: What the y axis is.
        series: The lines.
        include: Values that the y axis must reach.
    """
    drawable = [line for line in series if line.points]
    if not drawable:
        return ""
    size = ceil(max(len(line.points) for line in drawable) / MAX_POINTS)
    series = [_thin_series(line, size) for line in drawable]
    if any("pooled" in line.style for line in series):
        subtitle += f"; mean and range of {size} steps"
    y_ticks = compute_ticks(*_compute_extent([*include, *(value for line in series for value in _list_y_values(line))]))
    x = _Scale(0, max(1.0, *(point.x for line in series for point in line.points)), PLOT_LEFT, PLOT_RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], PLOT_BOTTOM, PLOT_TOP)
    x_ticks = [tick for tick in compute_ticks(0, x.high) if tick <= x.high and tick == int(tick)]
    lines = [_draw_series(line, x, y, shift=4 * (i - (len(series) - 1) / 2)) for i, line in enumerate(series)]
    label = escape_text(f"{title}: {'; '.join(_describe_series(line) for line in series if line.label)}")
    return "\n".join(
        [
            f'<svg class="chart" viewBox="0 0 {CHART_WIDTH} {_CHART_HEIGHT}" role="img" aria-label="{label}">',
            f'<text class="title" x="0" y="17">{escape_text(title)}</text>',
            f'<text class="tick" x="0" y="36">{escape_text(subtitle)}</text>',
            *(_draw_y_tick(tick, y(tick)) for tick in y_ticks),
            *(_draw_x_tick(tick, x(tick), series[0].unit) for tick in x_ticks),
            *lines,
            *_draw_end_labels(series, y),
            "</svg>",
        ]
    )


def stack_series(series: Sequence[Series]) -> list[Series]:
    """Return the lines as layers, each on top of those before it."""
    tops: defaultdict[float, float] = defaultdict(float)
    layers = []
    for line in series:
        points = [replace(point, base=tops[point.x]) for point in line.points]
        tops |= {point.x: point.top for point in points}
        layers.append(Series(line.label, points, f"{line.style} layer"))
    return layers


def compute_mean_line(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean line, at the steps that all lines have."""
    columns = [{point.x: point.y for point in line} for line in lines]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    return [Point(x, sum(column[x] for column in columns) / len(columns)) for x in shared]


def compute_range_line(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean line with the range of the lines as its interval, at the steps that all have."""
    columns = [{point.x: point.y for point in line} for line in lines]
    around = {mean.x: [column[mean.x] for column in columns] for mean in compute_mean_line(lines)}
    return [Point(x, fmean(values), min(values), max(values)) for x, values in around.items()]


def escape_text(text: object) -> str:
    """Return a text as HTML, with control, direction and surrogate characters as \\u escapes."""
    return escape(_INVISIBLE_CHARACTERS.sub(lambda char: f"\\u{ord(char[0]):04x}", str(text)))


def _thin_series(line: Series, size: int) -> Series:
    """Pool each `size` neighbors into a point, their mean and range; of points with intervals, keep the last."""
    ends = range(len(line.points), 0, -size)
    runs = [line.points[max(0, end - size) : end] for end in reversed(ends)]
    if size == 1 or _has_intervals(line):
        return replace(line, points=[run[-1] for run in runs])
    return replace(line, points=[_pool_points(run) for run in runs], style=f"{line.style} pooled")


def _has_intervals(line: Series) -> bool:
    return any(isfinite(point.low) for point in line.points)


def _pool_points(points: Sequence[Point]) -> Point:
    values = [point.y for point in points]
    return Point(points[-1].x, fmean(values), min(values), max(values), base=fmean(point.base for point in points))


def _list_y_values(line: Series) -> Iterable[float]:
    return (value for point in line.points for value in (point.top, point.low, point.high) if isfinite(value))


def _is_drawable(value: object) -> bool:
    """Whether a logged value can be drawn. It may be null, or too large."""
    return isinstance(value, int | float) and abs(value) < _MAX_MAGNITUDE


def _compute_extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def compute_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that reach from `low` to `high` or just beyond.

    Values that differ only by rounding get the axis of a single value.
    """
    size, span = max(abs(low), abs(high)), high - low
    rough = (
        span if span > _MIN_RELATIVE_SPAN * size > _MIN_MAGNITUDE else size if size > _MIN_MAGNITUDE else 1.0
    ) / count
    power = floor(log10(rough))
    step = next(multiple * 10.0**power for multiple in (1, 2, 5, 10) if multiple * 10.0**power >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, -power) for i in range(first, max(last, first + 1) + 1)]


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_count(n: int, thing: str) -> str:
    """Return a number with a noun, such as "2 steps"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _draw_y_tick(tick: float, y: float) -> str:
    line = f'<path class="grid" d="M{PLOT_LEFT} {y}H{PLOT_RIGHT}"/>'
    return (
        f'{line}<text class="tick" x="{PLOT_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
    )


def _draw_x_tick(tick: float, x: float, unit: str) -> str:
    name = f"{unit} 0" if tick == 0 else format_number(tick)
    mark = f'<path class="mark" d="M{x} {PLOT_BOTTOM}v5"/>'
    return f'{mark}<text class="tick" x="{x}" y="{PLOT_BOTTOM + 20}" text-anchor="middle">{name}</text>'


def _draw_series(line: Series, x: _Scale, y: _Scale, shift: float) -> str:
    """Draw a line with its points and its area, range or intervals. `shift` moves intervals beside those of others."""
    path = [f"{x(point.x)} {y(point.top)}" for point in line.points]
    if "layer" in line.style:
        around = _draw_area("area", path, [f"{x(point.x)} {y(point.base)}" for point in line.points])
    elif "pooled" in line.style or "band" in line.style:
        highs = [f"{x(point.x)} {y(point.high)}" for point in line.points]
        lows = [f"{x(point.x)} {y(point.low)}" for point in line.points]
        around = _draw_area("range", highs, lows)
    else:
        bars = (f"M{x(p.x) + shift:.1f} {y(p.low)}V{y(p.high)}" for p in line.points if isfinite(p.low))
        around = f'<path class="bar" d="{"".join(bars)}"/>'
    dots = "".join(_draw_dot(point, line, x(point.x), y(point.top)) for point in line.points) if line.label else ""
    density = "dense" if len(path) > _MAX_DOTS else "lone" if len(path) == 1 else "sparse"
    return f'<g class="{line.style} {density}">{around}<path class="line" d="M{"L".join(path)}"/>{dots}</g>'


def _draw_area(kind: str, upper: Sequence[str], lower: Sequence[str]) -> str:
    return f'<path class="{kind}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'


def _draw_dot(point: Point, line: Series, x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.2"><title>{escape_text(_describe_point(point, line))}</title></circle>'


def _describe_point(point: Point, line: Series) -> str:
    bounds = f" [{format_number(point.low)}, {format_number(point.high)}]" if isfinite(point.low) else ""
    return f"{line.label}, {line.unit} {format_number(point.x)}: {format_number(point.y)}{bounds}"


def _describe_series(line: Series) -> str:
    first, last = line.points[0], line.points[-1]
    ends = [f"{format_number(point.y)} at {line.unit} {format_number(point.x)}" for point in (first, last)]
    return f"{line.label} from {ends[0]} to {ends[1]}"


def _compute_label_y(line: Series) -> float:
    """Return the y value of the end of a line, or of the middle of the end of a layer."""
    last = line.points[-1]
    return last.base + last.y / 2 if "layer" in line.style else last.y


def _draw_end_labels(series: Sequence[Series], y: _Scale) -> Iterable[str]:
    """Draw the name and the last value of each line at its end, moved apart if they would overlap."""
    labels = sorted((y(_compute_label_y(line)), i) for i, line in enumerate(series) if line.label)
    positions: list[float] = []
    for position, _ in labels:
        positions.append(max(position, positions[-1] + _LABEL_GAP) if positions else position)
    overflow = max(0.0, positions[-1] - PLOT_BOTTOM) if positions else 0.0
    for position, (_, i) in zip(positions, labels, strict=True):
        label = series[i].label if len(series[i].label) < 14 else series[i].label[:13] + "…"
        text = f"{escape_text(label)} <tspan>{format_number(series[i].points[-1].y)}</tspan>"
        y_text = f"{position - overflow + 4:.1f}"
        yield f'<text class="label {series[i].style}" x="{PLOT_RIGHT + 10}" y="{y_text}">{text}</text>'


# ---------------------------------------------------------------- the charts of a run


_SERIES_STYLES = ("first", "second", "third", "fourth")
_CHART_MARGIN = 24
_LENGTH_LABELS = {
    "completion/length_mean": "mean",
    "completion/length_right": "right",
    "completion/length_wrong": "wrong",
}
_ZERO_VARIANCE_LABELS = {
    "groups/dead_all_right": "all right",
    "groups/dead_all_wrong": "all wrong",
    "groups/dead_equal": "equal rewards",
}
_GAP_LABELS = {"sampler/gap_mean": "mean", "sampler/gap_max": "max"}
_STAGE_LABELS = {f"time/{stage}": stage for stage in ("generate", "reward", "score", "update")}
_CALLS_METRIC = "tools/calls"
_MAX_LOGGED_CHARTS = 8
"""The most metrics logged by rewards that have a chart in the report. All of them are in metrics.jsonl."""
NON_TERM_METRICS = {"reward/mean", "reward/std", "reward/failed", "reward/no_term", "reward/after_kl"}


def draw_run_charts(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> list[str]:
    """Return the charts of a run for which it has records."""
    charts = [
        *(drawn for key, rows in evals.items() for drawn in draw_evaluation_charts(*key, rows)),
        draw_chart("Reward", "mean of a step", make_series(metrics, {"reward/mean": "reward"})),
        draw_chart(
            "Dead groups",
            "share of groups with equal rewards: no signal",
            stack_series(make_series(metrics, _ZERO_VARIANCE_LABELS)),
            include=(0, 1),
        ),
        draw_chart("Length", "tokens of a completion", make_series(metrics, _LENGTH_LABELS), include=(0,)),
        *draw_tool_charts(metrics),
        draw_chart(
            "Terms of the reward", "means, before their weights", make_series(metrics, _list_reward_terms(metrics))
        ),
        *(
            draw_chart(
                name.removeprefix("logged/"), "logged by rewards, mean of a step", make_series(metrics, {name: "mean"})
            )
            for name in _list_logged_metrics(metrics)
        ),
        draw_chart("Entropy", "nats a token", make_series(metrics, {"entropy": "entropy"}), include=(0,)),
        draw_chart("KL", "from the reference, nats a token", make_series(metrics, {"kl": "kl"}), include=(0,)),
        draw_chart(
            "Sampler gap", "between sampler and scorer, nats a token", make_series(metrics, _GAP_LABELS), include=(0,)
        ),
        draw_chart("Time", "seconds a step", stack_series(make_series(metrics, _STAGE_LABELS)), include=(0,)),
    ]
    return [drawn for drawn in charts if drawn]


def draw_tool_charts(metrics: Sequence[Record]) -> list[str]:
    """Return charts of turns, tool calls and their faults, for a run with conversations."""
    rows = [row for row in metrics if "turns/mean" in row]
    called = (
        [{**row, _CALLS_METRIC: row.get(_CALLS_METRIC, 0.0)} for row in rows]
        if any(_CALLS_METRIC in row for row in rows)
        else []
    )
    kinds = list({name: None for row in rows for name in row if name.startswith("tools/") and name != _CALLS_METRIC})
    faults = [
        {"step": row["step"], **{kind: row.get(kind, 0.0) for kind in kinds}} for row in called if row[_CALLS_METRIC]
    ]
    labels = {kind: kind.removeprefix("tools/") for kind in kinds}
    return [
        draw_chart(
            "Turns", "of the policy, mean of a conversation", make_series(rows, {"turns/mean": "turns"}), include=(0,)
        ),
        draw_chart(
            "Calls of tools", "mean of a conversation", make_series(called, {_CALLS_METRIC: "calls"}), include=(0,)
        ),
        draw_chart(
            "Calls that came to nothing", "share of the calls of tools", make_series(faults, labels), include=(0,)
        ),
    ]


def draw_evaluation_charts(task: str, split: str, rows: Sequence[Record]) -> list[str]:
    """Return charts of the accuracy and of the reward of evaluations, as far as they are shown."""
    names, k = select_measures([parse_evaluation(row) for row in rows]), rows[-1]["k"]
    few = describe_intervals(parse_evaluation(rows[-1])) == TOO_FEW_PROMPTS
    about, charts = f"{task}, {split}, {TOO_FEW_PROMPTS if few else 'with 95% intervals'}", []
    if "greedy" in names:
        charts.append(
            draw_chart("Held-out accuracy", about, _make_evaluation_series(rows, "mean@k", "greedy", k), (0, 1))
        )
    if "reward" in names:
        charts.append(draw_chart("Held-out reward", about, _make_evaluation_series(rows, "reward@k", "reward", k)))
    return charts if "reward" not in names[:1] else charts[::-1]


def _make_evaluation_series(rows: Sequence[Record], sampled: str, best: str, k: int) -> list[Series]:
    return [
        Series(format_measure_name(sampled, k), make_estimate_points(rows, sampled), "second"),
        Series(best, make_estimate_points(rows, best), "first"),
    ]


def draw_accuracy_picture(runs: Sequence[tuple[Sequence[Record], Sequence[Record]]]) -> str:
    """Return an SVG document of the accuracy and the reward of runs, each given as (evaluations, metrics)."""
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
    """Return charts side by side as one SVG document with a background."""
    width, height = len(charts) * (CHART_WIDTH + _CHART_MARGIN) + _CHART_MARGIN, _CHART_HEIGHT + 2 * _CHART_MARGIN
    size = f'y="{_CHART_MARGIN}" width="{CHART_WIDTH}" height="{_CHART_HEIGHT}"'
    placed = (
        f'<svg x="{_CHART_MARGIN + i * (CHART_WIDTH + _CHART_MARGIN)}" {size}>{chart}</svg>'
        for i, chart in enumerate(charts)
    )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    paper = '<rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>'
    return "\n".join([start, f"<style>{_CHART_CSS}</style>", paper, *placed, "</svg>\n"])


def make_seed_series(label: str, runs: Sequence[Sequence[Point]], style: str) -> list[Series]:
    """Return the series of one run with its intervals, or of several as thin lines with their mean."""
    runs = [points for points in runs if points]
    if len(runs) < 2:
        return [Series(label, points, style) for points in runs]
    without_intervals = ([replace(point, low=nan, high=nan) for point in points] for points in runs)
    return [
        *(Series("", points, f"{style} thin") for points in without_intervals),
        Series(label, compute_mean_line(runs), style),
    ]


def make_series(rows: Sequence[Record], labels: Mapping[str, str]) -> list[Series]:
    """Return a series for each metric in `labels` that has values."""
    lines = [(label, points) for name, label in labels.items() if (points := make_points(rows, name))]
    return [Series(label, points, _SERIES_STYLES[i % len(_SERIES_STYLES)]) for i, (label, points) in enumerate(lines)]


def _list_reward_terms(metrics: Sequence[Record]) -> dict[str, str]:
    """Return the metrics of the terms of a reward with several terms. A single term would repeat the reward."""
    names = [
        name for name in (metrics[-1] if metrics else {}) if name.startswith("reward/") and name not in NON_TERM_METRICS
    ]
    return {name: name.removeprefix("reward/") for name in names} if len(names) > 1 else {}


def _list_logged_metrics(metrics: Sequence[Record]) -> list[str]:
    """Return the first MAX_LOGGED_CHARTS metrics that rewards logged."""
    return list({name: None for row in metrics for name in row if name.startswith("logged/")})[:_MAX_LOGGED_CHARTS]


def make_points(rows: Sequence[Record], name: str) -> list[Point]:
    return [Point(row["step"], row[name]) for row in rows if _is_drawable(row.get(name))]


def make_estimate_points(rows: Sequence[Record], name: str) -> list[Point]:
    """Return a measure of the evaluations with its intervals."""
    estimates = [(row["step"], parse_estimate(row.get(name))) for row in rows if row.get(name)]
    return [Point(step, estimate.value, estimate.low, estimate.high) for step, estimate in estimates]
