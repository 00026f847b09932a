"""How the time of a step grows with completion length and group size, and a picture of it.

python benchmarks/growth.py --picture docs/growth.svg
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from bench import WARM_UP, Contender

from pellucid.reporting.charts import Point, Series, chart
from pellucid.reporting.curves import picture

TOKENS, GROUPS = (64, 128, 256, 512), (4, 8, 16, 32)
PARTS = {"seconds": "step", "update": "update", "generate": "sampling"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    by_length = {n: measured(tokens=n, group=8, repeats=options.repeats) for n in TOKENS}
    by_group = {g: measured(tokens=64, group=g, repeats=options.repeats) for g in GROUPS}
    print(table("tokens", by_length), table("G", by_group), sep="\n\n")
    if options.picture:
        charts = [
            drawn("Seconds a step, by length", "tokens of each completion; 4 prompts, G = 8", by_length, "tokens"),
            drawn("Seconds a step, by group", "G; 4 prompts, 64 tokens", by_group, "G"),
        ]
        options.picture.write_text(picture(charts))


def measured(tokens: int, group: int, repeats: int) -> dict[str, float]:
    """Medians."""
    settings = {"tokens": tokens, "group": group, "prompts": 4}
    with tempfile.TemporaryDirectory() as folder, Contender("step", "pellucid", settings, Path(folder)) as ours:
        turns = [ours.turn() for _ in range(WARM_UP + repeats)][WARM_UP:]
        peak = ours.close()["peak_gb"]
    return {name: median(turn[name] for turn in turns) for name in PARTS} | {"peak": peak}


def table(what: str, rows: dict[int, dict[str, float]]) -> str:
    lines = [f"| {what} | step, s | update, s | sampling, s | peak, GB |", "|---|---|---|---|---|"]
    for x, row in rows.items():
        lines.append(f"| {x} | {' | '.join(f'{row[name]:.2f}' for name in PARTS)} | {row['peak']:.1f} |")
    return "\n".join(lines)


def drawn(title: str, subtitle: str, rows: dict[int, dict[str, float]], unit: str) -> str:
    styles = dict(zip(PARTS, ("first", "second", "third"), strict=True))
    lines = [
        Series(label, [Point(x, row[name]) for x, row in rows.items()], styles[name], unit)
        for name, label in PARTS.items()
    ]
    return chart(title, subtitle, lines, include=[0.0])


if __name__ == "__main__":
    main()
