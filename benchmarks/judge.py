"""What a policy learns of a judge by `pellucid serve`, and what the judge can tell: recipes/judge.toml, three seeds.

    python benchmarks/judge.py [--seeds 0 1 2] [--into runs/judge]

First the judge is asked about sentences whose sentiment is known. A seed whose run is there already is not run again.
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
from seeds import cell, records

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
    with served() as url:
        settings = replace(config.load_config(RECIPE).task.rewards[0].judge, base_url=url)
        print(agreement(settings), flush=True)
        runs = {seed: options.into / str(seed) for seed in options.seeds}
        for seed, run in runs.items():
            if not (run / "model").is_dir():
                train(run, seed, url)
    print(table(list(runs.values())))


@contextmanager
def served() -> Iterator[str]:
    """`pellucid serve` on a free port, and where it is."""
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


def agreement(settings: JudgeSettings) -> str:
    judge = Judge(settings, None)
    rows = ["| sentences | called positive | called neutral or negative | said something else |", "|---|---|---|---|"]
    for name, texts in {"positive": POSITIVE, "neutral": NEUTRAL, "negative": NEGATIVE}.items():
        lines = texts.strip().splitlines()
        parts = judge.grade([(Prompt("", ""), Completion((), (), line, True)) for line in lines])
        counts = [sum(part.value == value for part in parts) for value in (0.0, 1.0, None)]
        rows.append(f"| {len(lines)} {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


def table(runs: Sequence[Path]) -> str:
    first = records(runs[0] / "evals.jsonl")[0]
    k = f"mean@{first['k']}"
    rows = [
        f"| seed | greedy before | after | {k} before | after | a step, s | of it rewards | judge's s | no grade |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        before, *_, after = records(run / "evals.jsonl")
        steps = records(run / "metrics.jsonl")
        whole = sum(step["time/step"] for step in steps)
        cells = [run.name, *(cell(each[name]) for name in ("greedy", "mean@k") for each in (before, after))]
        cells += [f"{whole / len(steps):.1f}", f"{sum(step['time/reward'] for step in steps) / whole:.0%}"]
        cells += [f"{mean(step['logged/judge/seconds'] for step in steps):.2f}"]
        cells += [f"{mean(step.get('failed/judge', 0.0) for step in steps):.1%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
