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

FOLDER = Path("runs/systems")
EDGE = 5
JOINS = (
    "Say where f changes, write one equation for each of these points, then a = and b =, and put a + b in \\boxed{}."
)
SHORT: dict[str, tuple[str, dict[str, object]]] = {
    "transparent": (
        "continuity",
        {"algorithm.steps": 12, "algorithm.group-size": 32, "algorithm.epochs": 2, "sampler.max-tokens": 48}
        | {"optimizer.lr": 3e-5, "task.system": JOINS},
    ),
    "gsm8k": (
        "gsm8k",
        {"algorithm.steps": 28, "algorithm.prompts-per-step": 8, "algorithm.minibatches": 4, "sampler.max-tokens": 24}
        | {"optimizer.lr": 2e-5, "task.grading": "literal"},
    ),
    "by hand": (
        "expected",
        {"algorithm.steps": 12, "algorithm.prompts-per-step": 4, "algorithm.group-size": 8, "sampler.max-tokens": 24}
        | {"optimizer.lr": 2e-5},
    ),
    "study bench": (
        "study_bench",
        {"algorithm.steps": 28, "algorithm.prompts-per-step": 8, "algorithm.minibatches": 4, "sampler.max-tokens": 24}
        | {"optimizer.lr": 2e-5, "task.grading": "literal", "task.format-reward": 0},
    ),
}
"""What the embedded model can do in a few minutes. Literal grading: it has never seen the tags, and the first hundredth
of a point, for any tags at all, is what it learns from."""
NO_EVALUATION = {"evaluate.every": 0, "checkpoint.every": 0, "policy.gradient-checkpointing": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", help=", ".join([*SHORT, "sorting"]))
    names = parser.parse_args().systems or [*SHORT, "sorting"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = ["| system | what was run | first reward | last reward | seconds | report |", "|---|---|---|---|---|---|"]
    for name in names:
        start = time.perf_counter()
        what, rewards, report = sort() if name == "sorting" else train(name)
        first, last = fmean(rewards[:EDGE]), fmean(rewards[-EDGE:])
        rows.append(f"| {name} | {what} | {first:.3f} | {last:.3f} | {time.perf_counter() - start:.0f} | {report} |")
    print("\n".join(rows))


def train(name: str) -> tuple[str, list[float], Path]:
    recipe, overrides = SHORT[name]
    run = FOLDER / f"{name.replace(' ', '-')}-{time.strftime('%H%M%S')}"
    data = {"task.data": sums(), "task.test-data": ""} if recipe in ("gsm8k", "study_bench") else {}
    command = [sys.executable, "-m", "pellucid", "train", f"recipes/{recipe}.toml", "--run", str(run)]
    flags = [flag(name, value) for name, value in (overrides | data | NO_EVALUATION).items()]
    subprocess.run(command + flags, check=True)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return f"recipes/{recipe}.toml, {len(steps)} steps", [step["reward/mean"] for step in steps], run / "report.html"


def flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        section, _, key = name.partition(".")
        return f"--{section}.{'' if value else 'no-'}{key}"
    return f"--{name}={value}"


def sort() -> tuple[str, list[float], Path]:
    sys.path.append("examples")
    import sorting_from_scratch as sorting  # noqa: PLC0415 - an example, not a part of the package

    _, steps = sorting.train(sorting.parsed([]), "centered", "clipped")
    sorting.draw(steps, FOLDER / "sorting.png")
    rewards = [sorting.sampled([step]) for step in steps]
    return f"examples/sorting_from_scratch.py, {len(steps)} epochs", rewards, FOLDER / "sorting.png"


def sums() -> Path:
    """In the form of GSM8K, whose problems are beyond a model of 135M parameters."""
    path, rng = FOLDER / "sums.jsonl", random.Random(0)
    rows = []
    for _ in range(400):
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        question = f"What is {a} + {b}? Write the number between <answer> and </answer>."
        rows.append({"question": question, "answer": f"{a} + {b} = {a + b}\n#### {a + b}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
