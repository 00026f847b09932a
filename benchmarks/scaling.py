"""Weak scaling: one process against two with twice the prompts, a thread each, and what goes between them.

python benchmarks/scaling.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

PROMPTS, PROFILED, STEPS = 2, 3, 6
"""Prompts of each process, the step that the profiler slows down, and how many there are."""
STAGES = ("step", "generate", "update")
FIXED = {
    "algorithm.steps": STEPS,
    "algorithm.group-size": 8,
    "algorithm.entropy-coef": 1e-6,  # no row is dropped from the update, whatever its reward
    "sampler.max-tokens": 16,
    "evaluate.every": 0,
    "checkpoint.every": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/arithmetic.toml")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    pairs = {"ddp": [], "fsdp2": []}
    for _ in range(options.repeats):
        alone = measured(options.recipe, 1, "ddp")
        for engine, turns in pairs.items():
            turns.append((alone, measured(options.recipe, 2, engine)))
    print(table(pairs))


def measured(recipe: str, processes: int, engine: str) -> dict[str, float]:
    """Median seconds of each stage, and the share of the profiled step in which something went between processes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = FIXED | {"algorithm.prompts-per-step": PROMPTS * processes, "runtime.engine": engine}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "--", "pellucid", "train", recipe, "--run", str(run_dir), "--profile"]
        command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steady = [row for row in rows if row["step"] not in (1, PROFILED - 1, PROFILED)]
        lines = (run_dir / "profile.txt").read_text().splitlines()
        profile = {line[:26].strip(): line.split()[-1] for line in lines if line}
    between = float(profile.get("between processes", 0)) / float(profile["seconds"])
    return {stage: median(row[f"time/{stage}"] for row in steady) for stage in STAGES} | {"between": between}


def table(pairs: dict[str, list[tuple[dict[str, float], dict[str, float]]]]) -> str:
    heads = ["engine", "one, s", "two, s", "two / one", "sampling", "update", "between processes"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for engine, turns in pairs.items():
        one, two = (median(turn[i]["step"] for turn in turns) for i in (0, 1))
        ratios = [f"{median(b[stage] / a[stage] for a, b in turns):.2f}" for stage in STAGES]
        between = median(b["between"] for _, b in turns)
        lines.append(f"| {engine} | {one:.2f} | {two:.2f} | {' | '.join(ratios)} | {between:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
