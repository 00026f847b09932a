"""How the time of a step grows with prompts, group size and completion length, beside what the machine needs at least.

    python benchmarks/growth.py --picture docs/pictures/growth.svg

At the limit is what roofline.py says: each part at the speed of one large product, or of one large read.
"""

from __future__ import annotations

import argparse
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench import WARM_UP
from contenders import our_policy
from processes import Contender
from roofline import Options, at_the_limit, bandwidth, context_of, speed_of_products, work_of

from pellucid.reporting.charts import Point, Series, draw_chart, join_charts

BASE = {"prompts": 4, "group": 8, "tokens": 64}
AXES = {"prompts": (4, 8, 16), "group": (4, 8, 16, 32), "tokens": (64, 128, 256, 512)}
TIMES = (1, 2, 4)
"""Of BASE, on the plot that has all three axes."""
NAMES = {"prompts": "prompts", "group": "group", "tokens": "length"}
PARTS = {"seconds": "step", "update": "update", "generate": "sampling"}
Rows = dict[int, dict[str, float]]
Known = dict[tuple[int, ...], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--largest", type=int, default=8, help="times BASE: leaves out what is beyond")
    options = parser.parse_args()
    sizes = {axis: [x for x in values if x <= options.largest * BASE[axis]] for axis, values in AXES.items()}
    limits = limits_of(sizes)
    known: Known = {}
    rows: dict[str, Rows] = {}
    for axis, values in sizes.items():
        rows[axis] = {x: measured(BASE | {axis: x}, options.repeats, known) | limits[axis][x] for x in values}
        print(table(axis, rows[axis]), end="\n\n", flush=True)
    if options.picture:
        options.picture.write_text(join_charts(charts(rows)))


def limits_of(sizes: dict[str, list[int]]) -> dict[str, Rows]:
    """Seconds of a step at the limit of this machine."""
    policy = our_policy(Namespace(model="smollm2-135m", device="cpu", dtype="bfloat16"))
    context, speed, width = context_of(policy), speed_of_products(), bandwidth()

    def limit(settings: dict[str, int]) -> dict[str, float]:
        work = work_of(policy, Options(**settings), context)
        return {"limit": sum(at_the_limit(work, speed, width).values())}

    return {axis: {x: limit(BASE | {axis: x}) for x in values} for axis, values in sizes.items()}


def measured(settings: dict[str, int], repeats: int, known: Known) -> dict[str, float]:
    """Medians; what is known is not measured again."""
    key = tuple(settings.values())
    if key not in known:
        with tempfile.TemporaryDirectory() as folder, Contender("step", "pellucid", {**settings}, Path(folder)) as ours:
            turns = [ours.turn() for _ in range(WARM_UP + repeats)][WARM_UP:]
            peak = ours.close()["peak_gb"]
        known[key] = {name: median(turn[name] for turn in turns) for name in PARTS} | {"peak": peak}
    return known[key]


def table(axis: str, rows: Rows) -> str:
    heads = [axis, "step, s", "update, s", "sampling, s", "at the limit, s", "ratio", "peak, GB"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for x, row in rows.items():
        cells = [*(row[name] for name in PARTS), row["limit"], row["seconds"] / row["limit"]]
        lines.append(f"| {x} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {row['peak']:.1f} |")
    return "\n".join(lines)


def charts(rows: dict[str, Rows]) -> list[str]:
    about = "times 4 prompts, G = 8 or 64 tokens; thin: at the limit"
    return [
        draw_chart("Seconds a step, by what grows", about, together(rows), include=[0.0]),
        drawn("Seconds a step, by length", "tokens of each completion; 4 prompts, G = 8", rows["tokens"], "tokens"),
        drawn("Seconds a step, by group", "G; 4 prompts, 64 tokens", rows["group"], "G"),
    ]


def together(rows: dict[str, Rows]) -> Sequence[Series]:
    """Prompts, group and length on one plot, at so many times what they are in BASE, and the limit of each."""
    styles = dict(zip(NAMES, ("first", "second", "third"), strict=True))

    def line(axis: str, what: str, label: str, style: str) -> Series:
        there = [n for n in TIMES if n * BASE[axis] in rows[axis]]
        return Series(label, [Point(n, rows[axis][n * BASE[axis]][what]) for n in there], style, "times")

    takes = [line(axis, "seconds", name, styles[axis]) for axis, name in NAMES.items()]
    needs = [line(axis, "limit", f"{name} limit", f"{styles[axis]} thin") for axis, name in NAMES.items()]
    return [*takes, *needs]


def drawn(title: str, subtitle: str, rows: Rows, unit: str) -> str:
    styles = dict(zip((*PARTS, "limit"), ("first", "second", "third", "second thin"), strict=True))
    lines = [
        Series(label, [Point(x, row[name]) for x, row in rows.items()], styles[name], unit)
        for name, label in {**PARTS, "limit": "limit"}.items()
    ]
    return draw_chart(title, subtitle, lines, include=[0.0])


if __name__ == "__main__":
    main()
