"""Measures how the time of a step grows with prompts, group size, and completion length, next to the machine's limit.

    python benchmarks/growth.py --picture docs/pictures/growth.svg

The limit is that of roofline.py: each part runs at the speed of one large matrix product or of one large read.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import roofline
from bench import WARM_UP
from contenders import load_policy
from processes import Contender

from pellucid.reporting.charts import Point, Series, draw_chart, join_charts

BASE = {"prompts": 4, "group": 8, "tokens": 64}
AXES = {"prompts": (4, 8, 16), "group": (4, 8, 16, 32), "tokens": (64, 128, 256, 512)}
MULTIPLES = (1, 2, 4)
"""The multiples of BASE on the plot of all three axes."""
AXIS_LABELS = {"prompts": "prompts", "group": "group", "tokens": "length"}
PARTS = {"seconds": "step", "update": "update", "generate": "sampling"}
Rows = dict[int, dict[str, float]]
"""The measurements of a step by the value of an axis."""
Cache = dict[tuple[int, ...], dict[str, float]]
"""The measurements of a step by the values of all settings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--largest", type=int, default=8, help="largest multiple of the smallest size on each axis")
    options = parser.parse_args()
    sizes = {axis: [x for x in values if x <= options.largest * BASE[axis]] for axis, values in AXES.items()}
    limits = compute_axis_limits(sizes)
    cache: Cache = {}
    rows: dict[str, Rows] = {}
    for axis, values in sizes.items():
        rows[axis] = {x: measure_step(BASE | {axis: x}, options.repeats, cache) | limits[axis][x] for x in values}
        print(format_table(axis, rows[axis]), end="\n\n", flush=True)
    if options.picture:
        options.picture.write_text(join_charts(draw_charts(rows)))


def compute_axis_limits(sizes: dict[str, list[int]]) -> dict[str, Rows]:
    """Return the seconds of a step at the limit of this machine, for each value of each axis."""
    policy = load_policy("smollm2-135m", "cpu", "bfloat16")
    prompt_length = roofline.compute_prompt_length(policy)
    speed, bandwidth = roofline.measure_matmul_speed(), roofline.measure_bandwidth()

    def compute_limit(settings: dict[str, int]) -> dict[str, float]:
        work = roofline.estimate_work(policy, roofline.Options(**settings), prompt_length)
        return {"limit": sum(roofline.compute_limits(work, speed, bandwidth).values())}

    return {axis: {x: compute_limit(BASE | {axis: x}) for x in values} for axis, values in sizes.items()}


def measure_step(settings: dict[str, int], repeats: int, cache: Cache) -> dict[str, float]:
    """Return the median seconds of each part and the peak memory in GB. Cached settings are not measured again."""
    key = tuple(settings.values())
    if key not in cache:
        with (
            tempfile.TemporaryDirectory() as folder,
            Contender("step", "pellucid", {**settings}, Path(folder)) as process,
        ):
            turns = [process.take_turn() for _ in range(WARM_UP + repeats)][WARM_UP:]
            peak = process.close()["peak_gb"]
        cache[key] = {name: median(turn[name] for turn in turns) for name in PARTS} | {"peak": peak}
    return cache[key]


def format_table(axis: str, rows: Rows) -> str:
    headings = [axis, "step, s", "update, s", "sampling, s", "at the limit, s", "ratio", "peak, GB"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for x, row in rows.items():
        cells = [*(row[name] for name in PARTS), row["limit"], row["seconds"] / row["limit"]]
        lines.append(f"| {x} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {row['peak']:.1f} |")
    return "\n".join(lines)


def draw_charts(rows: dict[str, Rows]) -> list[str]:
    subtitle = "multiples of 4 prompts, G = 8, 64 tokens; thin: the limit"
    return [
        draw_chart("Seconds per step", subtitle, make_axis_series(rows), include=[0.0]),
        draw_parts("Seconds per step, by length", "tokens per completion; 4 prompts, G = 8", rows["tokens"], "tokens"),
        draw_parts("Seconds per step, by group size", "G; 4 prompts, 64 tokens", rows["group"], "G"),
    ]


def make_axis_series(rows: dict[str, Rows]) -> Sequence[Series]:
    """Return the seconds of a step and their limit along each axis, by multiples of BASE."""
    styles = dict(zip(AXIS_LABELS, ("first", "second", "third"), strict=True))

    def make_series(axis: str, name: str, label: str, style: str) -> Series:
        measured = [n for n in MULTIPLES if n * BASE[axis] in rows[axis]]
        return Series(label, [Point(n, rows[axis][n * BASE[axis]][name]) for n in measured], style, "times")

    times = [make_series(axis, "seconds", label, styles[axis]) for axis, label in AXIS_LABELS.items()]
    limits = [
        make_series(axis, "limit", f"{label} limit", f"{styles[axis]} thin") for axis, label in AXIS_LABELS.items()
    ]
    return [*times, *limits]


def draw_parts(title: str, subtitle: str, rows: Rows, unit: str) -> str:
    """Draw the seconds of a step, its parts, and its limit along one axis."""
    styles = dict(zip((*PARTS, "limit"), ("first", "second", "third", "second thin"), strict=True))
    lines = [
        Series(label, [Point(x, row[name]) for x, row in rows.items()], styles[name], unit)
        for name, label in {**PARTS, "limit": "limit"}.items()
    ]
    return draw_chart(title, subtitle, lines, include=[0.0])


if __name__ == "__main__":
    main()
