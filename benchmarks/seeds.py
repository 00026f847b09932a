"""Trains a recipe with several seeds, and prints the held-out accuracy before and after as a Markdown table.

    python benchmarks/seeds.py recipes/arithmetic.toml --seeds 0 1 2 --into runs/seeds

Seeds that already have a run in the folder are not trained again, so an interrupted command can be repeated. Settings
of `pellucid train` may follow.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from pellucid.reporting.charts import draw_chart, join_charts, make_estimate_points, make_points, make_seed_series
from pellucid.reporting.eval_metrics import get_zero_variance_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--into", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--metric", help="also print this metric of metrics.jsonl, step by step")
    parser.add_argument("--picture", type=Path, help="also draw the curves, as SVG")
    options, overrides = parser.parse_known_args()
    runs = {seed: options.into / f"{options.recipe.stem}-{seed}" for seed in options.seeds}
    for seed, run in runs.items():
        if not (run / "model").is_dir():
            command = [sys.executable, "-m", "pellucid", "train", options.recipe, "--run", run]
            subprocess.run([*command, "--algorithm.seed", str(seed), *overrides], check=True)
    print(format_table(runs))
    if options.metric:
        print("", options.metric, "", format_metric(runs, options.metric), sep="\n")
    if options.picture:
        options.picture.write_text(draw_picture(list(runs.values())))


def format_table(runs: dict[int, Path]) -> str:
    rows = [
        "| seed | greedy before | greedy after | mean@k before | mean@k after | steps | minutes | dead groups |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed, run in runs.items():
        first, *_, last = read_records(run / "evals.jsonl")
        rows[0] = rows[0].replace("@k", f"@{last['k']}")
        cells = [format_estimate(e[name]) for name in ("greedy", "mean@k") for e in (first, last)]
        steps = read_records(run / "metrics.jsonl")
        minutes = sum(s["time/step"] for s in steps) / 60
        dead = mean(get_zero_variance_share(s) or 0.0 for s in steps)
        cells += [str(len(steps)), f"{minutes:.1f}", f"{dead:.0%}"]
        rows.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(rows)


def format_metric(runs: dict[int, Path], metric: str) -> str:
    rows = [f"| step | {' | '.join(f'seed {seed}' for seed in runs)} |", "|---" * (1 + len(runs)) + "|"]
    for steps in zip(*(read_records(run / "metrics.jsonl") for run in runs.values()), strict=True):
        rows.append(
            f"| {steps[0]['step']} | {' | '.join(f'{step[metric]:.4f}' if metric in step else '' for step in steps)} |"
        )
    return "\n".join(rows)


def draw_picture(runs: list[Path]) -> str:
    """Return an SVG of the held-out accuracy and training reward of one run, or of several seeds and their mean."""
    evals, metrics = ([read_records(run / f"{name}.jsonl") for run in runs] for name in ("evals", "metrics"))
    seeds = f", mean and range of {len(runs)} runs" if len(runs) > 1 else ""
    k = next((rows[-1]["k"] for rows in evals if rows), "k")
    accuracies = [
        make_seed_series(label, [make_estimate_points(rows, name) for rows in evals], style)
        for label, name, style in ((f"mean@{k}", "mean@k", "second"), ("greedy", "greedy", "first"))
    ]
    rewards = make_seed_series("reward", [make_points(rows, "reward/mean") for rows in metrics], "first")
    charts = [
        draw_chart("Held-out accuracy", f"share of prompts{seeds or ', with 95% intervals'}", accuracies, (0, 1)),
        draw_chart("Training reward", f"mean of a step{seeds}", [rewards]),
    ]
    return join_charts([chart for chart in charts if chart])


def format_estimate(estimate: dict[str, float | None]) -> str:
    """Format an estimate with its interval. An estimate from too few prompts has no interval."""
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
