"""Measures weak scaling: one process against two with twice the prompts, each with one thread.

    python benchmarks/scaling.py
    .venv-deepspeed/bin/python benchmarks/scaling.py --engines ZeRO-2 ZeRO-3      after `make deepspeed`

The table has the time of a step, the share of it in which processes communicate, and the peak resident memory of a
process, next to the estimate of `pellucid doctor --plan`.
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

from pellucid.config import load_config
from pellucid.training import memory
from pellucid.training.doctor import ENGINE_SETTINGS

Pair = tuple[dict[str, float], dict[str, float]]
"""The results of one process and of two."""

PROMPTS, PROFILED, STEPS = 2, 3, 6
"""Prompts per process, the profiled step, and the number of steps."""
STAGES = ("step", "generate", "update")
FIXED = {
    "policy.dtype": "bfloat16",
    "algorithm.steps": STEPS,
    "algorithm.group-size": 8,
    "algorithm.entropy-coef": 1e-6,  # keeps rows without an advantage in the update
    "sampler.max-tokens": 16,
    "evaluate.every": 0,
    "checkpoint.every": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/arithmetic.toml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINE_SETTINGS, default=["ddp", "fsdp2"])
    options = parser.parse_args()
    pairs: dict[str, list[Pair]] = {engine: [] for engine in options.engines}
    for _ in range(options.repeats):
        one = measure_run(options.recipe, 1, "ddp")
        for engine, repeats in pairs.items():
            repeats.append((one, measure_run(options.recipe, 2, engine)))
    print(format_table(pairs))


def make_flags(processes: int, engine: str) -> list[str]:
    settings = FIXED | {"algorithm.prompts-per-step": PROMPTS * processes}
    settings |= {f"runtime.{name}": value for name, value in ENGINE_SETTINGS[engine].items()}
    return [flag for name, value in settings.items() for flag in (f"--{name}", str(value))]


def measure_run(recipe: str, processes: int, engine: str) -> dict[str, float]:
    """Train, and measure the run.

    Returns:
        The median seconds of each stage, the share of communication in the profiled step ("between"), and the peak and
        planned memory in GB.
    """
    flags = make_flags(processes, engine)
    cfg = load_config(Path(recipe), flags)
    planned = memory.estimate_peak(memory.describe_model(cfg.policy), cfg, processes)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "--", "pellucid", "train", recipe, "--run", str(run_dir), "--profile", *flags]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        # The first step fills caches, and the one before the profiled step counts FLOPs.
        steady = [row for row in rows if row["step"] not in (1, PROFILED - 1, PROFILED)]
        lines = (run_dir / "profile.txt").read_text().splitlines()
        profile = {line[:26].strip(): line.split()[-1] for line in lines if line}
    between = float(profile.get("between processes", 0)) / float(profile["seconds"])
    seconds = {stage: median(row[f"time/{stage}"] for row in steady) for stage in STAGES}
    peak = max(row["memory/peak_gb"] for row in rows if row["step"] < PROFILED - 1)
    return seconds | {"between": between, "peak": peak, "planned": planned}


def format_table(pairs: dict[str, list[Pair]]) -> str:
    headings = ["engine", "one, s", "two, s", "two / one", "sampling", "update", "between processes", "GB", "planned"]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for engine, repeats in pairs.items():
        one, two = (median(pair[i]["step"] for pair in repeats) for i in (0, 1))
        ratios = [f"{median(b[stage] / a[stage] for a, b in repeats):.2f}" for stage in STAGES]
        between = median(b["between"] for _, b in repeats)
        peak, planned = (median(b[name] for _, b in repeats) for name in ("peak", "planned"))
        cells = [f"{one:.2f}", f"{two:.2f}", *ratios, f"{between:.0%}", f"{peak:.1f}", f"{planned:.1f}"]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
