"""What the token microscope costs: seconds and bytes a step by the number of recorded groups, against recording off.

python benchmarks/microscope.py recipes/arithmetic.toml --algorithm.group_size 8 --sampler.max_tokens 64

In one process, in turn: every turn takes the same steps of the same weights, which a learning rate of next to nothing
leaves where they are. Words after the recipe are settings, as `pellucid train` takes them.
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
STILL = 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("recipe", type=Path)
    options, words = parser.parse_known_args()
    cfg = resolve_machine_settings(config.resolve_config(config.load_config(options.recipe, words)))
    optimizer = replace(cfg.optimizer, lr=STILL, schedule="constant", warmup=0)
    cfg = replace(cfg, optimizer=optimizer, evaluate=replace(cfg.evaluate, every=0))
    cfg = replace(cfg, algorithm=replace(cfg.algorithm, steps=options.steps))
    parts = build_components(cfg)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        turn(cfg, parts, place, 0)
        rounds = [{n: turn(cfg, parts, place / f"{n}", n) for n in GROUPS} for _ in range(options.repeats)]
        taken = {n: of_turns([of_round[n] for of_round in rounds]) for n in GROUPS}
        print(table(taken, {n: size(place / f"{n}") for n in GROUPS}))
    parts.close()


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """Of all threads: what other processes do meanwhile does not count, if OMP_NUM_THREADS=1 keeps threads from waiting
    for one another."""

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def turn(cfg: Config, parts: Components, place: Path, groups: int) -> list[Seconds]:
    """How long each step took."""
    cfg = replace(cfg, log=replace(cfg.log, tokens=groups))
    parts.state = grpo.TrainingState()
    parts.runtime.updates = 0
    objects = (parts.task, parts.sampler, parts.policy, parts.runtime)
    steps = grpo.train(*objects, cfg.algorithm, parts.reference, parts.state, make_training_sampling(cfg))
    seconds, start = [], Seconds(time.perf_counter(), time.process_time())
    for _ in record_steps(steps, cfg, place, parts):
        now = Seconds(time.perf_counter(), time.process_time())
        seconds.append(now - start)
        start = now
    return seconds


def of_turns(turns: list[list[Seconds]]) -> Seconds:
    """Of a step: the mean over steps of the median over turns."""
    steps = list(zip(*turns, strict=True))
    clocks = ([median(one[clock] for one in of_step) for of_step in steps] for clock in (0, 1))
    return Seconds(*(fmean(medians) for medians in clocks))


def size(place: Path) -> float:
    """KB a step."""
    files = [path.stat().st_size for path in place.glob("tokens/*.parquet")]
    return sum(files) / len(files) / 1e3 if files else 0.0


def table(taken: dict[int, Seconds], sizes: dict[int, float]) -> str:
    lines = ["| groups | step, s | more | of the processor, s | more | KB a step |", "|---|---|---|---|---|---|"]
    for n, of_step in taken.items():
        more = [f"{x:.3f} | {x / off - 1:+.1%}" for x, off in zip(of_step, taken[0], strict=True)]
        lines.append(f"| {n} | {' | '.join(more)} | {sizes[n]:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
