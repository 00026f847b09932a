"""The five systems at reduced length, one after the other, and one table of what became of them.

    python benchmarks/systems.py            all five, in runs/systems/
    python benchmarks/systems.py sorting    some

A reward is the mean of the first and of the last five steps.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import rich
from rich.table import Table

FOLDER = Path("runs/systems")
EDGE = 5
SHORT = {
    "transparent": (
        "continuity",
        [
            "--sampler.max-tokens",
            "96",
            "--algorithm.steps",
            "30",
            "--algorithm.group-size",
            "16",
            "--optimizer.lr",
            "1e-5",
        ],
    ),
    "gsm8k": (
        "gsm8k",
        [
            "--task.grading",
            "literal",
            "--sampler.max-tokens",
            "64",
            "--algorithm.steps",
            "20",
            "--algorithm.prompts-per-step",
            "4",
            "--algorithm.minibatches",
            "2",
            "--optimizer.lr",
            "2e-5",
        ],
    ),
    "by hand": (
        "expected",
        ["--algorithm.group-size", "8", "--algorithm.prompts-per-step", "4", "--optimizer.lr", "1e-5"],
    ),
    "study bench": (
        "study_bench",
        [
            "--sampler.max-tokens",
            "64",
            "--algorithm.steps",
            "20",
            "--algorithm.prompts-per-step",
            "4",
            "--optimizer.lr",
            "2e-5",
        ],
    ),
}
NO_EVALUATION = ["--evaluate.every", "0", "--checkpoint.every", "0", "--policy.no-gradient-checkpointing"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", help=", ".join([*SHORT, "sorting"]))
    names = parser.parse_args().systems or [*SHORT, "sorting"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    table = Table("system", "what was run", "first reward", "last reward", "seconds", "report", box=rich.box.MARKDOWN)
    for name in names:
        start = time.perf_counter()
        what, rewards, report = sort() if name == "sorting" else train(name)
        first, last = fmean(rewards[:EDGE]), fmean(rewards[-EDGE:])
        table.add_row(name, what, f"{first:.2f}", f"{last:.2f}", f"{time.perf_counter() - start:.0f}", str(report))
    rich.print(table)


def train(name: str) -> tuple[str, list[float], Path]:
    recipe, overrides = SHORT[name]
    run = FOLDER / f"{name.replace(' ', '-')}-{time.strftime('%H%M%S')}"
    data = ["--task.data", str(word_problems()), "--task.test-data", ""] if recipe in ("gsm8k", "study_bench") else []
    command = ["train", f"recipes/{recipe}.toml", *overrides, *data, *NO_EVALUATION, "--run", str(run)]
    subprocess.run([sys.executable, "-m", "pellucid", *command], check=True)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return f"recipes/{recipe}.toml, {len(steps)} steps", [step["reward/mean"] for step in steps], run / "report.html"


def sort() -> tuple[str, list[float], Path]:
    sys.path.append("examples")
    import sorting_from_scratch as sorting  # noqa: PLC0415 - an example, not a part of the package

    _, steps = sorting.train(sorting.parsed([]), "centered", "clipped")
    sorting.draw(steps, FOLDER / "sorting.png")
    return (
        f"examples/sorting_from_scratch.py, {len(steps)} epochs",
        [sorting.sampled([s]) for s in steps],
        (FOLDER / "sorting.png"),
    )


def word_problems() -> Path:
    """GSM8K is at the floor for a model of 135M parameters: these are a step each, in its form."""
    path, rng = FOLDER / "word_problems.jsonl", random.Random(0)
    rows = []
    for _ in range(400):
        name, thing = rng.choice(["Tom", "Ann", "Lee", "Mia"]), rng.choice(["apples", "books", "coins", "cards"])
        a, b = rng.randint(2, 9), rng.randint(1, 9)
        question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
        rows.append({"question": question, "answer": f"{a} + {b} = {a + b}\n#### {a + b}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
