"""Draws line charts as SVG, without a library or a script, and chooses the charts of a run.

Lines have direct labels, intervals, and a tooltip on every point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from pellucid.utils.text import escape_controls

_CHART_CSS = Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
"""The colors of the charts, light and dark. Each page with a chart must include it."""
PAGE_CSS = _CHART_CSS + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
"""The style of all pages: _CHART_CSS, fonts, tables, and the grid of charts."""

CHART_WIDTH, _CHART_HEIGHT = 440, 252
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 46, 320, 60, 220
_LABEL_GAP = 16
MAX_POINTS = 120
_MAX_DOTS = 60
_MIN_RELATIVE_SPAN = 1e-9
"""Values count as equal if their relative difference is smaller."""
_MIN_MAGNITUDE, _MAX_MAGNITUDE = 1e-280, 1e280
"""Smaller values count as 0, and larger values are not drawn, since a metric may diverge."""


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
    """The label at the end of the line."""
    points: Sequence[Point]
    style: str = "first"
    """Classes of charts.css: first, second, third, fourth, layer. With band, intervals are drawn as an area."""
    unit: str = "step"
    """The name of the x axis."""


def _make_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function that maps the values of an axis to coordinates."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def draw_chart(title: str, subtitle: str, series: Sequence[Series], include: Sequence[float] = ()) -> str:
    """Return an `<svg>` of lines whose y axis includes the values `include`; empty if there is no point to draw."""
    drawable = [line for line in series if line.points]
    if not drawable:
        return ""
    size = ceil(max(len(line.points) for line in drawable) / MAX_POINTS)
    series = [_thin_series(line, size) for line in drawable]
    if any("pooled" in line.style for line in series):
        subtitle += f"; mean and range of {size} steps"
    tops = [value for line in series for point in line.points for value in (point.top, point.low, point.high)]
    heights = [*include, *filter(isfinite, tops)]
    y_ticks = compute_ticks(min(heights), max(heights))
    last_x = max(1.0, *(point.x for line in series for point in line.points))
    x_ticks = [tick for tick in compute_ticks(0, last_x) if tick <= last_x and tick == int(tick)]
    x = _make_scale(0, last_x, PLOT_LEFT, PLOT_RIGHT)
    y = _make_scale(y_ticks[0], y_ticks[-1], PLOT_BOTTOM, PLOT_TOP)
    lines = [_draw_series(line, x, y, shift=4 * (i - (len(series) - 1) / 2)) for i, line in enumerate(series)]
    label = escape_text(f"{title}: {'; '.join(_describe_series(line) for line in series)}")
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


def make_seed_series(label: str, lines: Iterable[Sequence[Point]], style: str) -> Series:
    """Return a single line with its intervals. For several lines, return mean and range at the steps of all."""
    lines = [line for line in lines if line]
    if len(lines) < 2:
        return Series(label, lines[0] if lines else [], style)
    columns = [{point.x: point.y for point in line} for line in lines]
    points = []
    for x in sorted(set.intersection(*map(set, columns))):
        values = [column[x] for column in columns]
        points.append(Point(x, fmean(values), min(values), max(values)))
    return Series(label, points, f"{style} band")


def escape_text(text: object) -> str:
    """Return a text as HTML, with escapes in place of control, direction and surrogate characters."""
    return escape(escape_controls(str(text)))


def _thin_series(line: Series, size: int) -> Series:
    """Replace every `size` neighbors by one point with their mean and range; by the last if they have intervals."""
    ends = range(len(line.points), 0, -size)
    pools = [line.points[max(0, end - size) : end] for end in reversed(ends)]
    if size == 1 or any(isfinite(point.low) for point in line.points):
        return replace(line, points=[pool[-1] for pool in pools])
    return replace(line, points=list(map(_pool_points, pools)), style=f"{line.style} pooled")


def _pool_points(points: Sequence[Point]) -> Point:
    values = [point.y for point in points]
    return Point(points[-1].x, fmean(values), min(values), max(values), base=fmean(point.base for point in points))


def compute_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that span an interval, which counts as one value if it is a rounding error."""
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
    text = f'<text class="tick" x="{PLOT_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
    return f'<path class="grid" d="M{PLOT_LEFT} {y}H{PLOT_RIGHT}"/>{text}'


def _draw_x_tick(tick: float, x: float, unit: str) -> str:
    name = f"{unit} 0" if tick == 0 else format_number(tick)
    mark = f'<path class="mark" d="M{x} {PLOT_BOTTOM}v5"/>'
    return f'{mark}<text class="tick" x="{x}" y="{PLOT_BOTTOM + 20}" text-anchor="middle">{name}</text>'


def _draw_series(line: Series, x: Callable[[float], float], y: Callable[[float], float], shift: float) -> str:
    """Draw a line with its points and its area, range or intervals. `shift` moves intervals away from others."""

    def trace(heights: Iterable[float]) -> list[str]:
        return [f"{x(point.x)} {y(height)}" for point, height in zip(line.points, heights, strict=True)]

    def draw_area(kind: str, upper: list[str], lower: list[str]) -> str:
        return f'<path class="{kind}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'

    path = trace(point.top for point in line.points)
    if "layer" in line.style:
        around = draw_area("area", path, trace(point.base for point in line.points))
    elif "pooled" in line.style or "band" in line.style:
        around = draw_area("range", *(trace(getattr(p, end) for p in line.points) for end in ("high", "low")))
    else:
        bars = (f"M{x(p.x) + shift:.1f} {y(p.low)}V{y(p.high)}" for p in line.points if isfinite(p.low))
        around = f'<path class="bar" d="{"".join(bars)}"/>'
    dots = "".join(
        f'<circle cx="{x(p.x)}" cy="{y(p.top)}" r="2.2"><title>{escape_text(_describe_point(p, line))}</title></circle>'
        for p in line.points
    )
    density = "dense" if len(path) > _MAX_DOTS else "lone" if len(path) == 1 else "sparse"
    return f'<g class="{line.style} {density}">{around}<path class="line" d="M{"L".join(path)}"/>{dots}</g>'


def _describe_point(point: Point, line: Series) -> str:
    bounds = f" [{format_number(point.low)}, {format_number(point.high)}]" if isfinite(point.low) else ""
    return f"{line.label}, {line.unit} {format_number(point.x)}: {format_number(point.y)}{bounds}"


def _describe_series(line: Series) -> str:
    first, last = line.points[0], line.points[-1]
    ends = [f"{format_number(point.y)} at {line.unit} {format_number(point.x)}" for point in (first, last)]
    return f"{line.label} from {ends[0]} to {ends[1]}"


def _draw_end_labels(series: Sequence[Series], y: Callable[[float], float]) -> Iterable[str]:
    """Draw the name and the last value of each line at its end, moved apart if they would overlap."""
    ends = [line.points[-1] for line in series]
    heights = [end.base + end.y / 2 if "layer" in line.style else end.y for line, end in zip(series, ends, strict=True)]
    order = sorted(range(len(series)), key=lambda i: y(heights[i]))
    positions: list[float] = []
    for i in order:
        positions.append(max([y(heights[i]), *(above + _LABEL_GAP for above in positions[-1:])]))
    overflow = max(0.0, positions[-1] - PLOT_BOTTOM)
    for i, position in zip(order, positions, strict=True):
        label = series[i].label if len(series[i].label) < 14 else series[i].label[:13] + "…"
        text = f"{escape_text(label)} <tspan>{format_number(ends[i].y)}</tspan>"
        y_text = f"{position - overflow + 4:.1f}"
        yield f'<text class="label {series[i].style}" x="{PLOT_RIGHT + 10}" y="{y_text}">{text}</text>'


# ---------------------------------------------------------------- the charts of a run


_SERIES_STYLES = ("first", "second", "third", "fourth")
_CHART_MARGIN = 24
_MAX_LOGGED_CHARTS = 8
"""The maximum number of charts for metrics that rewards log. metrics.jsonl has all of these metrics."""
NON_TERM_METRICS = {"reward/mean", "reward/std", "reward/failed", "reward/no_term", "reward/after_kl"}


def _draw_metrics(
    rows: Sequence[Record], title: str, subtitle: str, labels: Mapping[str, str], include: Sequence[float] = (0,)
) -> str:
    return draw_chart(title, subtitle, make_series(rows, labels), include)


def draw_reward_chart(metrics: Sequence[Record]) -> str:
    return _draw_metrics(metrics, "Reward", "mean of a step", {"reward/mean": "reward"}, ())


def draw_run_charts(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> list[str]:
    """Return the charts of a run, without those that have no records."""
    lengths = {f"completion/length_{name}": name for name in ("mean", "right", "wrong")}
    gaps = {"sampler/gap_mean": "mean", "sampler/gap_max": "max"}
    dead = {"all_right": "all right", "all_wrong": "all wrong", "equal": "equal rewards"}
    dead_layers = stack_series(make_series(metrics, {f"groups/dead_{name}": label for name, label in dead.items()}))
    stages = {f"time/{stage}": stage for stage in ("generate", "reward", "score", "update")}
    charts = [
        *(chart for key, rows in evals.items() for chart in draw_evaluation_charts(*key, rows)),
        draw_reward_chart(metrics),
        draw_chart("Dead groups", "share of groups with equal rewards: no signal", dead_layers, (0, 1)),
        _draw_metrics(metrics, "Length", "tokens of a completion", lengths),
        *draw_tool_charts(metrics),
        _draw_metrics(metrics, "Terms of the reward", "means, before their weights", _list_reward_terms(metrics), ()),
        *(
            _draw_metrics(
                metrics, name.removeprefix("logged/"), "logged by rewards, mean of a step", {name: "mean"}, ()
            )
            for name in _list_metrics(metrics, "logged/")[:_MAX_LOGGED_CHARTS]
        ),
        _draw_metrics(metrics, "Entropy", "nats per token", {"entropy": "entropy"}),
        _draw_metrics(metrics, "KL", "from the reference, nats per token", {"kl": "kl"}),
        _draw_metrics(metrics, "Update", "KL from the policy before it, nats per token", {"update/kl": "update/kl"}),
        _draw_metrics(metrics, "Sampler gap", "between sampler and scorer, nats per token", gaps),
        draw_chart("Time", "seconds per step", stack_series(make_series(metrics, stages)), (0,)),
    ]
    return [chart for chart in charts if chart]


def draw_tool_charts(metrics: Sequence[Record]) -> list[str]:
    """Return charts of turns, tool calls and their faults, for a run with conversations."""
    rows = [{"tools/calls": 0.0, **row} for row in metrics if "turns/mean" in row]
    calling = [row for row in rows if row["tools/calls"]]
    faults = {name: name.removeprefix("tools/") for name in _list_metrics(calling, "tools/") if name != "tools/calls"}
    with_faults = [{**dict.fromkeys(faults, 0.0), **row} for row in calling]
    calls = {"tools/calls": "calls"} if calling else {}
    return [
        _draw_metrics(rows, "Turns", "of the policy, mean of a conversation", {"turns/mean": "turns"}),
        _draw_metrics(rows, "Tool calls", "mean of a conversation", calls),
        _draw_metrics(with_faults, "Failed calls", "share of tool calls", faults),
    ]


def draw_evaluation_charts(task: str, split: str, rows: Sequence[Record]) -> list[str]:
    """Return charts of the accuracy and the reward of evaluations, if `select_measures` selects them."""
    evaluations = [parse_evaluation(row) for row in rows]
    names, intervals = select_measures(evaluations), describe_intervals(evaluations[-1])
    about = f"{task}, {split}, {intervals if intervals == TOO_FEW_PROMPTS else f'with {intervals}'}"
    charts = [
        draw_chart(
            title,
            about,
            [
                Series(format_measure_name(sampled, rows[-1]["k"]), make_estimate_points(rows, sampled), "second"),
                Series(greedy, make_estimate_points(rows, greedy), "first"),
            ],
            include,
        )
        for title, greedy, sampled, include in (
            ("Held-out accuracy", "greedy", "mean@k", (0, 1)),
            ("Held-out reward", "reward", "reward@k", ()),
        )
        if greedy in names
    ]
    return charts[::-1] if names[:1] == ["reward"] else charts


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


def make_series(rows: Sequence[Record], labels: Mapping[str, str]) -> list[Series]:
    """Return a series for each metric in `labels` that has values."""
    lines = [(label, points) for name, label in labels.items() if (points := make_points(rows, name))]
    return [Series(label, points, _SERIES_STYLES[i % len(_SERIES_STYLES)]) for i, (label, points) in enumerate(lines)]


def _list_metrics(metrics: Sequence[Record], prefix: str) -> list[str]:
    """Return the names that begin with a prefix, in the order of their first appearance."""
    return list({name: None for row in metrics for name in row if name.startswith(prefix)})


def _list_reward_terms(metrics: Sequence[Record]) -> dict[str, str]:
    """Return the labels of reward terms; empty if there is only one, which would repeat the reward."""
    names = [name for name in _list_metrics(metrics[-1:], "reward/") if name not in NON_TERM_METRICS]
    return {name: name.removeprefix("reward/") for name in names} if len(names) > 1 else {}


def make_points(rows: Sequence[Record], name: str) -> list[Point]:
    """Return the values of a metric, without those that cannot be drawn: null or too large."""
    values = ((row["step"], row.get(name)) for row in rows)
    return [Point(step, y) for step, y in values if isinstance(y, int | float) and abs(y) < _MAX_MAGNITUDE]


def make_estimate_points(rows: Sequence[Record], name: str) -> list[Point]:
    """Return the points of a measure, with intervals, from the records of evaluations."""
    estimates = [(row["step"], parse_estimate(row.get(name))) for row in rows if row.get(name)]
    return [Point(step, estimate.value, estimate.low, estimate.high) for step, estimate in estimates]
