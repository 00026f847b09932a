"""Line charts as SVG text: axes, direct labels, intervals, a tooltip on every point. No library, no script."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, isfinite, log10, nan
from pathlib import Path
from statistics import fmean

CSS = Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
"""The colours of the charts, light and dark; whatever shows a chart must hold it."""
PAGE_CSS = CSS + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
"""What all pages have in common, charts included: type, tables, the grid of charts."""

WIDTH, HEIGHT = 440, 252
LEFT, RIGHT, TOP, BOTTOM = 46, 320, 60, 220
LABEL_GAP = 16
MOST_POINTS = 120
MOST_DOTS = 60
CONSTANT = 1e-9
"""Differences smaller than this share of the values count as none."""
TINIEST, LARGEST = 1e-280, 1e280
"""The largest value that is drawn: a metric may run away."""
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


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


def chart(title: str, subtitle: str, series: Sequence[Series], include: Sequence[float] = ()) -> str:
    """An `<svg>` of lines over steps, or nothing where there is no point to draw.

    include: values that the y axis must reach.
    """
    drawable = [line for line in series if line.points]
    if not drawable:
        return ""
    size = ceil(max(len(line.points) for line in drawable) / MOST_POINTS)
    series = [thinned(line, size) for line in drawable]
    if any("pooled" in line.style for line in series):
        subtitle += f"; mean and range of {size} steps"
    y_ticks = ticks(*extent([*include, *(value for line in series for value in heights(line))]))
    x = Scale(0, max(1.0, *(point.x for line in series for point in line.points)), LEFT, RIGHT)
    y = Scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP)
    x_ticks = [tick for tick in ticks(0, x.high) if tick <= x.high and tick == int(tick)]
    drawn = [draw(line, x, y, shift=4 * (i - (len(series) - 1) / 2)) for i, line in enumerate(series)]
    about = f"{title}: {'; '.join(summary(line) for line in series if line.label)}"
    return "\n".join(
        [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown(about)}">',
            f'<text class="title" x="0" y="17">{shown(title)}</text>',
            f'<text class="tick" x="0" y="36">{shown(subtitle)}</text>',
            *(axis_y(tick, y(tick)) for tick in y_ticks),
            *(axis_x(tick, x(tick), series[0].unit) for tick in x_ticks),
            *drawn,
            *end_labels(series, y),
            "</svg>",
        ]
    )


def stack(series: Sequence[Series]) -> list[Series]:
    """The lines as layers, each standing on those before it."""
    tops: defaultdict[float, float] = defaultdict(float)
    layers = []
    for line in series:
        points = [replace(point, base=tops[point.x]) for point in line.points]
        tops |= {point.x: point.top for point in points}
        layers.append(Series(line.label, points, f"{line.style} layer"))
    return layers


def mean_of(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean line, at the steps that all lines have."""
    columns = [{point.x: point.y for point in line} for line in lines]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    return [Point(x, sum(column[x] for column in columns) / len(columns)) for x in shared]


def range_of(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean line with the lowest and the highest of the lines around it, at the steps that all have."""
    columns = [{point.x: point.y for point in line} for line in lines]
    around = {mean.x: [column[mean.x] for column in columns] for mean in mean_of(lines)}
    return [Point(x, fmean(values), min(values), max(values)) for x, values in around.items()]


def shown(text: object) -> str:
    """HTML of a text as it is: markup escaped; control, direction and broken characters as \\u escapes."""
    return escape(INVISIBLE.sub(lambda char: f"\\u{ord(char[0]):04x}", str(text)))


def thinned(line: Series, size: int) -> Series:
    """Each `size` neighbours as one point: their mean and range; where points have intervals of their own, the last."""
    ends = range(len(line.points), 0, -size)
    runs = [line.points[max(0, end - size) : end] for end in reversed(ends)]
    if size == 1 or has_intervals(line):
        return replace(line, points=[run[-1] for run in runs])
    return replace(line, points=[pooled(run) for run in runs], style=f"{line.style} pooled")


def has_intervals(line: Series) -> bool:
    return any(isfinite(point.low) for point in line.points)


def pooled(points: Sequence[Point]) -> Point:
    values = [point.y for point in points]
    return Point(points[-1].x, fmean(values), min(values), max(values), base=fmean(point.base for point in points))


def heights(line: Series) -> Iterable[float]:
    return (value for point in line.points for value in (point.top, point.low, point.high) if isfinite(value))


def drawable(value: object) -> bool:
    """A number that has a place on a page; a log may hold others, and null where there was none."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Different round numbers that reach from `low` to `high` or just beyond, whatever numbers these are.

    Values that differ by rounding alone, or from 0 by next to nothing, have the axis of a single value.
    """
    size, span = max(abs(low), abs(high)), high - low
    rough = (span if span > CONSTANT * size > TINIEST else size if size > TINIEST else 1.0) / count
    power = floor(log10(rough))
    step = next(multiple * 10.0**power for multiple in (1, 2, 5, 10) if multiple * 10.0**power >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, -power) for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def counted(n: int, thing: str) -> str:
    """Example: "2 steps"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def axis_y(tick: float, y: float) -> str:
    line = f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>'
    return f'{line}<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'


def axis_x(tick: float, x: float, unit: str) -> str:
    name = f"{unit} 0" if tick == 0 else number(tick)
    mark = f'<path class="mark" d="M{x} {BOTTOM}v5"/>'
    return f'{mark}<text class="tick" x="{x}" y="{BOTTOM + 20}" text-anchor="middle">{name}</text>'


def draw(line: Series, x: Scale, y: Scale, shift: float) -> str:
    """A line with its points and its area, range or intervals; `shift` sets these beside the other lines' intervals."""
    path = [f"{x(point.x)} {y(point.top)}" for point in line.points]
    if "layer" in line.style:
        around = area("area", path, [f"{x(point.x)} {y(point.base)}" for point in line.points])
    elif "pooled" in line.style or "band" in line.style:
        highs = [f"{x(point.x)} {y(point.high)}" for point in line.points]
        lows = [f"{x(point.x)} {y(point.low)}" for point in line.points]
        around = area("range", highs, lows)
    else:
        bars = (f"M{x(p.x) + shift:.1f} {y(p.low)}V{y(p.high)}" for p in line.points if isfinite(p.low))
        around = f'<path class="bar" d="{"".join(bars)}"/>'
    dots = "".join(dot(point, line, x(point.x), y(point.top)) for point in line.points) if line.label else ""
    density = "dense" if len(path) > MOST_DOTS else "lone" if len(path) == 1 else "sparse"
    return f'<g class="{line.style} {density}">{around}<path class="line" d="M{"L".join(path)}"/>{dots}</g>'


def area(kind: str, upper: Sequence[str], lower: Sequence[str]) -> str:
    return f'<path class="{kind}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'


def dot(point: Point, line: Series, x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.2"><title>{shown(reading(point, line))}</title></circle>'


def reading(point: Point, line: Series) -> str:
    bounds = f" [{number(point.low)}, {number(point.high)}]" if isfinite(point.low) else ""
    return f"{line.label}, {line.unit} {number(point.x)}: {number(point.y)}{bounds}"


def summary(line: Series) -> str:
    first, last = line.points[0], line.points[-1]
    ends = [f"{number(point.y)} at {line.unit} {number(point.x)}" for point in (first, last)]
    return f"{line.label} from {ends[0]} to {ends[1]}"


def label_height(line: Series) -> float:
    """The end of a line, or the middle of the end of a layer."""
    last = line.points[-1]
    return last.base + last.y / 2 if "layer" in line.style else last.y


def end_labels(series: Sequence[Series], y: Scale) -> Iterable[str]:
    """The name and the last value of each line, beside its end, pushed apart where they would overlap."""
    named = sorted((y(label_height(line)), i) for i, line in enumerate(series) if line.label)
    places: list[float] = []
    for place, _ in named:
        places.append(max(place, places[-1] + LABEL_GAP) if places else place)
    beyond = max(0.0, places[-1] - BOTTOM) if places else 0.0
    for place, (_, i) in zip(places, named, strict=True):
        label = series[i].label if len(series[i].label) < 14 else series[i].label[:13] + "…"
        text = f"{shown(label)} <tspan>{number(series[i].points[-1].y)}</tspan>"
        yield f'<text class="label {series[i].style}" x="{RIGHT + 10}" y="{place - beyond + 4:.1f}">{text}</text>'
