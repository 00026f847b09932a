"""Fixed learning rates against `optimizer.desired_kl`: how far steps moved the policy, and what was learned.

    python benchmarks/step_size.py sums-135m sums-0.5b gsm8k-0.5b --picture docs/step_size.svg

Each job is trained once for each fixed rate, and once with `desired_kl` from the same first rate in all jobs. Whole
weights are trained, since the right rate of an adapter depends less on the size of the model. Settings may follow. A
run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gsm8k import RECIPE, list_data_flags

from pellucid.reporting.charts import Series, draw_chart, join_charts, make_estimate_points, make_points

RATES = (1e-6, 5e-6, 2e-5, 1e-4)
DESIRED_KL, FIRST_RATE = 1e-3, 2e-5
SUMS = RECIPE.parent / "arithmetic.toml"
CODER = ["--policy.model", "qwen2.5-coder-0.5b"]
JOBS: dict[str, list[str]] = {
    "sums-135m": [str(SUMS)],
    # This model solves one-digit problems as it comes.
    "sums-0.5b": [str(SUMS), *CODER, "--task.digits", "4", "--task.operators", "+", "-"],
    "gsm8k-0.5b": [str(RECIPE), *map(str, list_data_flags()), "--policy.lora", "0", "--algorithm.steps", "20"],
}
STYLES = ("first", "second", "third", "fourth", "layer")

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=list(JOBS), help=", ".join(JOBS))
    parser.add_argument("--into", type=Path, default=Path("runs/step_size"))
    parser.add_argument("--picture", type=Path)
    options, overrides = parser.parse_known_args()
    pictures = []
    for job in options.jobs:
        runs = {label: options.into / job / label for label in list_variants()}
        for label, run in runs.items():
            if not (run / "model").is_dir():
                command = [sys.executable, "-m", "pellucid", "train", *JOBS[job], "--run", str(run)]
                flags = ["--optimizer.schedule", "constant", "--evaluate.every", "5", *list_variants()[label]]
                flags += ["--checkpoint.every", "0", "--checkpoint.no-keep_best"]  # they would take gigabytes
                subprocess.run([*command, *flags, *overrides], check=True)
        print(f"\n{job}\n\n{make_table(runs)}", flush=True)
        pictures += draw_charts(job, runs)
    if options.picture:
        options.picture.write_text(join_charts(pictures))


def list_variants() -> dict[str, list[str]]:
    """Return the flags of each variant by its label."""
    fixed = {f"lr {rate:g}": ["--optimizer.lr", str(rate), "--optimizer.desired_kl", "0"] for rate in RATES}
    adapted = ["--optimizer.lr", str(FIRST_RATE), "--optimizer.desired_kl", str(DESIRED_KL)]
    return {**fixed, f"desired_kl {DESIRED_KL:g}": adapted}


def make_table(runs: dict[str, Path]) -> str:
    rows = [
        "| | greedy before | after | best | update/kl, first 5 steps | last 5 | last learning rate |",
        "|---" * 7 + "|",
    ]
    for label, run in runs.items():
        evaluations, steps = read_records(run / "evals.jsonl"), read_records(run / "metrics.jsonl")
        greedy = [evaluation["greedy"]["value"] for evaluation in evaluations]
        kl = [step["update/kl"] for step in steps]
        cells = [f"{greedy[0]:.2f}", f"{greedy[-1]:.2f}", f"{max(greedy[1:]):.2f}"]
        cells += [f"{median(kl[:5]):.1e}", f"{median(kl[-5:]):.1e}", f"{steps[-1]['lr']:.1e}"]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def draw_charts(job: str, runs: dict[str, Path]) -> list[str]:
    accuracies, sizes = list[Series](), list[Series]()
    for (label, run), style in zip(runs.items(), STYLES, strict=True):
        accuracies.append(Series(label, make_estimate_points(read_records(run / "evals.jsonl"), "greedy"), style))
        moved = [step for step in read_records(run / "metrics.jsonl") if step["update/kl"] > 0]
        logarithms = [{**step, "update/kl": math.log10(step["update/kl"])} for step in moved]
        sizes.append(Series(label, make_points(logarithms, "update/kl"), style))
    return [
        draw_chart(f"{job}: held-out accuracy", "greedy", accuracies, (0, 1)),
        draw_chart(f"{job}: update KL", "logarithm to base 10, nats per token", sizes),
    ]


def read_records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
