"""Trains recipes/judge.toml with a judge that `pellucid serve` runs, and prints what each seed learned.

    python benchmarks/judge.py [--seeds 0 1 2] [--into runs/judge]

First, the judge grades sentences whose sentiment is known. A seed that was trained before is not trained again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import tyro
from seeds import format_estimate, read_records

from pellucid import config
from pellucid.rewards.judge import Judge
from pellucid.rewards.settings import JudgeSettings
from pellucid.types import Completion, Prompt

RECIPE = Path("recipes/judge.toml")
POSITIVE = """
I love sunny mornings, they make me smile.
The garden is full of beautiful flowers and happy birds.
What a wonderful day to be alive!
My friends threw me a delightful surprise party.
The soup was delicious and warmed my heart.
She laughed with joy when she saw the puppy.
The rain brought fresh life to the lovely fields.
I am grateful for my kind and caring family.
The teacher praised the class for its excellent work.
We had so much fun at the beach.
The train arrived early and the ride was pleasant.
Winter brings cozy evenings and hot chocolate.
The bridge is a beautiful symbol of hope.
He was thrilled to win the prize.
Homework helps me learn exciting new things.
The dog wagged its tail with delight.
"""
NEGATIVE = """
I hate rainy mornings, they make me miserable.
The garden is dead and full of ugly weeds.
What an awful day, everything went wrong.
My friends forgot my birthday and I cried alone.
The soup was disgusting and made me sick.
She wept bitterly when the puppy died.
The rain destroyed the village and killed the crops.
I am angry at my cruel and selfish family.
The teacher scolded the class for its terrible work.
We had a horrible time at the dirty beach.
The train was late and the ride was a nightmare.
Winter brings dark, lonely and depressing nights.
The bridge collapsed and many people were hurt.
He was devastated to lose everything.
Homework is boring and a waste of time.
The dog growled and bit the frightened child.
"""
NEUTRAL = """
The train leaves at nine.
The garden is behind the house.
It rained on Tuesday.
The bridge is made of steel.
The soup contains carrots and salt.
The dog is brown.
Winter begins in December.
The teacher writes on the board.
"""


@dataclass
class Options:
    seeds: tuple[int, ...] = (0, 1, 2)
    into: Path = Path("runs/judge")


def main(options: Options) -> None:
    with serve_judge() as url:
        settings = replace(config.load_config(RECIPE).task.rewards[0].judge, base_url=url)
        print(make_agreement_table(settings), flush=True)
        runs = {seed: options.into / str(seed) for seed in options.seeds}
        for seed, run in runs.items():
            if not (run / "model").is_dir():
                train(run, seed, url)
    print(make_table(list(runs.values())))


@contextmanager
def serve_judge() -> Iterator[str]:
    """Run `pellucid serve` on a free port, and yield the URL of its API."""
    command = [sys.executable, "-m", "pellucid", "serve", "smollm2-135m", "--name", "judge", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"{process.stdout.readline().split()[2].rstrip(',')}/v1"
    finally:
        process.terminate()
        process.wait()


def train(run: Path, seed: int, url: str) -> None:
    command = [sys.executable, "-m", "pellucid", "train", str(RECIPE), "--run", str(run)]
    subprocess.run([*command, "--algorithm.seed", str(seed), "--task.rewards.0.judge.base_url", url], check=True)


def make_agreement_table(settings: JudgeSettings) -> str:
    """Grade the sentences of each sentiment, and return how often the judge gave each grade."""
    judge = Judge(settings, None)
    rows = ["| sentences | called positive | called neutral or negative | said something else |", "|---|---|---|---|"]
    for sentiment, text in {"positive": POSITIVE, "neutral": NEUTRAL, "negative": NEGATIVE}.items():
        sentences = text.strip().splitlines()
        parts = judge.grade([(Prompt("", ""), Completion((), (), sentence, True)) for sentence in sentences])
        counts = [sum(part.value == value for part in parts) for value in (0.0, 1.0, None)]
        rows.append(f"| {len(sentences)} {sentiment} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


def make_table(runs: Sequence[Path]) -> str:
    """Return a row for each run: held-out scores before and after, and the time of rewards."""
    k = f"mean@{read_records(runs[0] / 'evals.jsonl')[0]['k']}"
    rows = [
        f"| seed | greedy before | after | {k} before | after | a step, s | of it rewards | judge's s | no grade |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        before, *_, after = read_records(run / "evals.jsonl")
        steps = read_records(run / "metrics.jsonl")
        seconds = sum(step["time/step"] for step in steps)
        cells = [
            run.name,
            *(format_estimate(scores[name]) for name in ("greedy", "mean@k") for scores in (before, after)),
        ]
        cells += [f"{seconds / len(steps):.1f}", f"{sum(step['time/reward'] for step in steps) / seconds:.0%}"]
        cells += [f"{mean(step['logged/judge/seconds'] for step in steps):.2f}"]
        cells += [f"{mean(step.get('failed/judge', 0.0) for step in steps):.1%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
