"""The one-file example, as it is launched by hand, with several seeds: its logs, their curves, and a table.

    python benchmarks/one_file.py                  three seeds, into docs/one-file/; a log that is whole is kept

The rewards of the table are means of five steps, with the 95% interval of a mean of so many prompts by Student's t: the
answers to one prompt are siblings, and no two of its steps' prompts are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

from pellucid.charts import Point, chart
from pellucid.curves import over_seeds, picture

STEPS, EDGE, STUDENT = 60, 5, 2.776
"""Student's t at 97.5%, with EDGE - 1 degrees of freedom."""
COMMAND = (
    "accelerate launch --cpu --num_processes 1 --mixed_precision bf16 examples/transparent_grpo.py --problem seam"
    f" --steps {STEPS} --group_size 16 --max_new_tokens 32 --inner_epochs 1 --lr 3e-5"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--into", type=Path, default=Path("docs/one-file"))
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    rows = ["| seed | first five steps | last five | KL a token | minutes |", "|---|---|---|---|---|"]
    curves = []
    for seed in options.seeds:
        log = options.into / f"seed-{seed}.log"
        if not log.exists():
            train(seed, log)
        steps, seconds = read(log)
        rewards = [reward for reward, _ in steps]
        curves.append([Point(step, reward) for step, reward in enumerate(rewards, 1)])
        edges = f"{interval(rewards[:EDGE])} | {interval(rewards[-EDGE:])}"
        rows.append(f"| {seed} | {edges} | {fmean(kl for _, kl in steps[-EDGE:]):.2f} | {seconds / 60:.0f} |")
    print("\n".join(rows))
    title = f"mean of a step's 16 answers, {len(curves)} seeds and their mean"
    drawn = chart("Raw reward of the one-file example", title, over_seeds("reward", curves, "first"), include=(0, 1))
    (options.into / "curve.svg").write_text(picture([drawn]))


def train(seed: int, log: Path) -> None:
    """Prints as it goes; the log has its name once it is whole."""
    command = f"{COMMAND} --seed {seed} --save runs/transparent_grpo-{seed}"
    lines, start = [f"$ {command}\n"], time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *command.split()[2:]], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if run.returncode:
        raise SystemExit(f"seed {seed} ended with status {run.returncode}")
    lines.append(f"{time.perf_counter() - start:.0f} seconds\n")
    log.write_text("".join(lines))


def read(log: Path) -> tuple[list[tuple[float, float]], float]:
    """(raw reward, KL a token) of each step, and the seconds of all."""
    *lines, last = log.read_text().splitlines()
    cells = [line.split("|") for line in lines if line.count("|") == 4][1:]
    return [(float(row[2]), float(row[4])) for row in cells], float(last.split()[0])


def interval(rewards: list[float]) -> str:
    mean, half = fmean(rewards), STUDENT * stdev(rewards) / len(rewards) ** 0.5
    return f"{mean:.2f} ± {half:.2f}"


if __name__ == "__main__":
    main()
