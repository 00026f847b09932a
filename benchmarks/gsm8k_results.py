"""Keeps the results of benchmarks/gsm8k.py in small files, prints their tables, and draws their curves.

    python benchmarks/gsm8k_results.py runs/gsm8k runs/chance --picture docs/pictures/gsm8k.svg

Each run named is first copied into docs/studies/gsm8k, without its texts and tokens: its settings, its metrics, and a
digit for each answer to a test question. The tables have all runs kept there, the picture those that are named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gsm8k import (
    RECIPE,
    ROOT,
    SAMPLES,
    START,
    count_correct,
    estimate_gain,
    find_folder_before,
    format_estimate,
    read_answers,
    read_evaluation,
)

from pellucid.config import read_settings
from pellucid.reporting.charts import Point, Series, draw_chart, join_charts, make_estimate_points, make_points
from pellucid.training.evaluate import compute_pass_at_k, estimate_share

KEPT = Path("docs/studies/gsm8k")
BEFORE = "before"
"""The model as it comes; `START` is the one after the supervised phase, with which GRPO starts."""
MEAN_OF = 5
"""Steps in a point of a curve."""
STYLES = ("first", "second", "third", "fourth", "layer")

Marks = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.picture and not 0 < len(options.runs) <= len(STYLES):
        parser.error(f"--picture draws the runs that are named, {len(STYLES)} at most")
    for run in options.runs:
        keep_run(run, options.kept)
    print(make_tables(options.kept))
    if options.picture:
        options.picture.write_text(
            join_charts(draw_charts([options.kept / run.name for run in options.runs])), encoding="utf-8"
        )


# ---------------------------------------------------------------- keeping


def keep_run(run: Path, kept: Path) -> None:
    """Copy what is small of a run, and of the evaluations before it, into a folder of `kept`."""
    into = kept / run.name
    into.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "metrics.jsonl", "evals.jsonl"):
        if (run / name).exists():
            text = (run / name).read_text(encoding="utf-8")
            (into / name).write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")
    keep_marks(run / "test", into)
    keep_marks(find_folder_before(run, read_settings(RECIPE)["policy"]["model"]), kept / BEFORE)
    keep_marks(find_folder_before(run, START), kept / START)


def keep_marks(evaluation: Path, into: Path) -> None:
    """Write a digit for each greedy answer and question, in the order of the test file."""
    if not (evaluation / "greedy.jsonl").exists():
        return
    answers = read_evaluation(evaluation)
    greedy = answers["greedy"]
    marks: Marks = {
        "box": join_digits(answer["parts"].get("math", 0.0) for answer in greedy),
        "number": join_digits(answer["parts"].get("numeric", 0.0) for answer in greedy),
        "cut": join_digits(not answer["finished"] for answer in greedy),
        "tokens": round(fmean(answer["tokens"] for answer in greedy), 1),
        "sampled": join_digits(count_correct(answers["sampled"])),
    }
    into.mkdir(parents=True, exist_ok=True)
    (into / "marks.json").write_text(json.dumps(marks, indent=1) + "\n", encoding="utf-8")


def join_digits(values: Iterable[float]) -> str:
    return "".join(str(round(value)) for value in values)


# ---------------------------------------------------------------- tables


def make_tables(kept: Path) -> str:
    """Return the Markdown tables of test answers and of costs."""
    evaluated = list_evaluated(kept)
    if BEFORE not in evaluated:
        sys.exit(f"{kept} has no test answers of the model before training: evaluate a run with benchmarks/gsm8k.py")
    compared = [name for name in (BEFORE, START) if name in evaluated]
    title = f"{len(evaluated[BEFORE]['box']):,} test questions, greedy"
    gains = " | ".join(f"more than {name}" for name in compared)
    rows = [f"| {title} | in the box | {gains} | last number | cut off | tokens |", "|---" * (5 + len(compared)) + "|"]
    for name, marks in evaluated.items():
        box = read_digits(marks["box"])
        differences = [estimate_gain(read_digits(evaluated[other]["box"]), box) for other in compared]
        gains = " | ".join("" if name in compared else format_estimate(gain, "+") for gain in differences)
        shares = [format_estimate(estimate_share(read_digits(marks[kind]))) for kind in ("box", "number", "cut")]
        rows.append(f"| {name} | {shares[0]} | {gains} | {shares[1]} | {shares[2]} | {marks['tokens']:.0f} |")
    sampled = {name: read_digits(marks["sampled"]) for name, marks in evaluated.items() if marks["sampled"]}
    if sampled:
        questions = len(next(iter(sampled.values())))
        rows += ["", f"| {questions} test questions, {SAMPLES} samples of each | mean@8 | pass@8 |", "|---" * 3 + "|"]
    for name, counts in sampled.items():
        means = estimate_share([count / SAMPLES for count in counts])
        passed = estimate_share([compute_pass_at_k(SAMPLES, SAMPLES, round(count)) for count in counts])
        rows.append(f"| {name} | {format_estimate(means)} | {format_estimate(passed)} |")
    rows += ["", "| | steps | hours of training | seconds per step | peak GB |", "|---" * 5 + "|"]
    for run in list_runs(kept):
        steps = read_answers(run / "metrics.jsonl")
        seconds = [step["time/step"] for step in steps]
        peak = max(step["memory/peak_gb"] for step in steps)
        cells = f"{len(steps)} | {sum(seconds) / 3600:.2f} | {fmean(seconds):.0f} | {peak:.1f}"
        rows.append(f"| {run.name} | {cells} |")
    return "\n".join(rows)


def list_runs(kept: Path) -> list[Path]:
    return sorted(path.parent for path in kept.glob("*/metrics.jsonl"))


def list_evaluated(kept: Path) -> dict[str, Marks]:
    """Return the marks of each run by its name; the models before GRPO come first."""
    names = (path.parent.name for path in kept.glob("*/marks.json"))
    names = sorted(names, key=lambda name: (name != BEFORE, name != START, name))
    return {name: json.loads((kept / name / "marks.json").read_text(encoding="utf-8")) for name in names}


def read_digits(digits: str) -> list[float]:
    return [float(digit) for digit in digits]


# ---------------------------------------------------------------- curves


def draw_charts(runs: Sequence[Path]) -> list[str]:
    """Draw held-out accuracy, right answers, and the size of the updates of the runs that have them."""
    accuracies, rewards, sizes = list[Series](), list[Series](), list[Series]()
    for run, style in zip(runs, STYLES, strict=False):
        steps = read_answers(run / "metrics.jsonl")
        if (run / "evals.jsonl").exists():
            points = make_estimate_points(read_answers(run / "evals.jsonl"), "greedy")
            accuracies.append(Series(run.name, points, style))
        rewards.append(Series(run.name, average_steps(steps, "completion/correct"), style))
        sizes.append(Series(run.name, average_steps(steps, "update/kl"), style))
    return [
        draw_chart("Held-out accuracy", "training questions that are not trained on, greedy", accuracies, (0,)),
        draw_chart("Right answers in training", f"share of the samples, means of {MEAN_OF} steps", rewards, (0,)),
        draw_chart("Update KL", f"nats per token, means of {MEAN_OF} steps", sizes, (0,)),
    ]


def average_steps(steps: Sequence[Marks], name: str) -> list[Point]:
    """Return a point for each MEAN_OF steps with the mean of a metric; none if the run does not have it.

    Fewer steps at the end have no point, since their mean is noisier than the others.
    """
    points = make_points(steps, name)
    pools = [points[i : i + MEAN_OF] for i in range(0, len(points) - MEAN_OF + 1, MEAN_OF)]
    return [Point(pool[-1].x, fmean(point.y for point in pool)) for pool in pools]


if __name__ == "__main__":
    main()
