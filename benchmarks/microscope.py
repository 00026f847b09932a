"""Measures what recording for the token microscope costs: seconds and bytes per step by the number of recorded groups.

    python benchmarks/microscope.py recipes/arithmetic.toml --algorithm.group_size 8 --sampler.max_tokens 64

Each repeat trains a few steps with each number of groups, in one process. The learning rate is so small that the
weights do not change, so every measurement is of the same steps. Settings of `pellucid train` may follow the recipe.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from pellucid import config
from pellucid.algorithm import grpo
from pellucid.config import Config
from pellucid.training.build import Components, build_components, make_training_sampling, resolve_machine_settings
from pellucid.training.token_recorder import record_steps

GROUPS = (0, 1, 2, 4)
"""The numbers of recorded groups; 0 is the baseline."""
LEARNING_RATE = 1e-12
"""Small enough to leave the weights unchanged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("recipe", type=Path)
    options, overrides = parser.parse_known_args()
    cfg = resolve_machine_settings(config.resolve_config(config.load_config(options.recipe, overrides)))
    optimizer = replace(cfg.optimizer, lr=LEARNING_RATE, schedule="constant", warmup=0)
    cfg = replace(cfg, optimizer=optimizer, evaluate=replace(cfg.evaluate, every=0))
    cfg = replace(cfg, algorithm=replace(cfg.algorithm, steps=options.steps))
    parts = build_components(cfg)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        time_steps(cfg, parts, root, 0)  # warm-up
        repeats = [{n: time_steps(cfg, parts, root / f"{n}", n) for n in GROUPS} for _ in range(options.repeats)]
        times = {n: average_times([repeat[n] for repeat in repeats]) for n in GROUPS}
        print(format_table(times, {n: compute_file_size(root / f"{n}") for n in GROUPS}))
    parts.close()


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """The sum over all threads. It does not depend on other processes if OMP_NUM_THREADS=1, since threads that wait for
    each other count as busy."""

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def time_steps(cfg: Config, parts: Components, folder: Path, groups: int) -> list[Seconds]:
    """Train with `groups` recorded groups per step, and return the time of each step."""
    cfg = replace(cfg, log=replace(cfg.log, tokens=groups))
    parts.state = grpo.TrainingState()
    parts.runtime.updates = 0
    objects = (parts.task, parts.sampler, parts.policy, parts.runtime)
    steps = grpo.train(*objects, cfg.algorithm, parts.reference, parts.state, make_training_sampling(cfg))
    seconds, start = [], Seconds(time.perf_counter(), time.process_time())
    for _ in record_steps(steps, cfg, folder, parts):
        now = Seconds(time.perf_counter(), time.process_time())
        seconds.append(now - start)
        start = now
    return seconds


def average_times(repeats: list[list[Seconds]]) -> Seconds:
    """Return the time of a step: the mean over steps of the median over repeats."""
    steps = list(zip(*repeats, strict=True))
    clocks = ([median(times[clock] for times in step) for step in steps] for clock in (0, 1))
    return Seconds(*(fmean(medians) for medians in clocks))


def compute_file_size(folder: Path) -> float:
    """Return the KB that a recorded step takes on disk."""
    sizes = [path.stat().st_size for path in folder.glob("tokens/*.parquet")]
    return sum(sizes) / len(sizes) / 1e3 if sizes else 0.0


def format_table(times: dict[int, Seconds], sizes: dict[int, float]) -> str:
    lines = ["| groups | step, s | more | CPU, s | more | KB a step |", "|---|---|---|---|---|---|"]
    for n, seconds in times.items():
        cells = [f"{x:.3f} | {x / baseline - 1:+.1%}" for x, baseline in zip(seconds, times[0], strict=True)]
        lines.append(f"| {n} | {' | '.join(cells)} | {sizes[n]:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
