"""Trains the five systems, each with several seeds, and prints whether their rewards rose.

    python benchmarks/systems.py                       all five with one seed, in runs/systems/
    python benchmarks/systems.py sorting "by hand"     some of them
    python benchmarks/systems.py --seeds 0 1 2 --into docs/systems

Each run leaves its log in NAME/seed-N of the folder, and is not repeated if the log is there. The tables have the mean
rewards of the first three and of the last ten steps, with 95% intervals by Student's t. A system learns if these
intervals do not overlap with any seed; otherwise its heading says that it does not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from pellucid.config import dump_config, load_config
from pellucid.reporting.charts import Point, draw_chart, join_charts, make_seed_series
from pellucid.utils.hardware import pick_dtype

FIRST, LAST = 3, 10
STUDENT = {FIRST: 4.303, LAST: 2.262}
"""The 97.5% quantile of Student's t for a number of values: one degree of freedom less."""
Settings = dict[str, Any]
RECIPES: dict[str, tuple[str, Settings]] = {
    "gsm8k": (
        "gsm8k",
        {"algorithm.steps": 20, "algorithm.prompts-per-step": 8, "algorithm.minibatches": 4, "sampler.max-tokens": 24}
        | {"optimizer.lr": 1e-5, "task.grading": "literal"},
    ),
    "by hand": (
        "expected",
        {"algorithm.steps": 40, "algorithm.prompts-per-step": 4, "algorithm.group-size": 24, "sampler.max-tokens": 16}
        | {"optimizer.lr": 5e-6, "task.language": "en"},
    ),
    "study bench": (
        "study_bench",
        {"algorithm.steps": 20, "algorithm.prompts-per-step": 8, "sampler.max-tokens": 24},
    ),
}
"""The recipe of a system, and the settings with which the 135M model learns something in a few minutes."""
GSM8K_TASKS = {"gsm8k": "task", "study bench": "task.task.task"}
"""The systems that ask sums in the form of GSM8K, and the section of the task that reads the file."""
QUESTION = (
    "Answer like this.\nQuestion: What is 2 + 4?\nAnswer: <think>2 + 4 = 6</think> <answer>6</answer>\n"
    "Question: {question}\nAnswer:"
)
"""An example comes before each question: the model does not know the tags, and would never be rewarded."""
SHORTER = {
    "evaluate.every": 0,
    "checkpoint.every": 0,
    "policy.gradient-checkpointing": False,
    "log.tensorboard": False,
}
ONE_FILE = "examples/transparent_grpo.py"
ONE_FILE_SETTINGS: Settings = {
    "problem": "seam",
    "steps": 40,
    "group_size": 16,
    "max_new_tokens": 32,
    "inner_epochs": 1,
    "lr": 3e-5,
}
NAMES = ("transparent", *RECIPES, "sorting")


@dataclass(frozen=True)
class Run:
    """The mean reward of each step, and the seconds of all."""

    rewards: Sequence[float]
    seconds: float

    def estimate_ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return mean and half width of the interval for the first and for the last steps."""
        return estimate_mean(self.rewards[:FIRST]), estimate_mean(self.rewards[-LAST:])

    def has_learned(self) -> bool:
        (first, first_width), (last, last_width) = self.estimate_ends()
        return first + first_width < last - last_width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--into", type=Path, default=Path("runs/systems"))
    options = parser.parse_args()
    names = options.systems or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no system is called {', '.join(sorted(unknown))}: {', '.join(NAMES)}")
    systems = {name: [load_run(name, seed, options.into) for seed in options.seeds] for name in names}
    print("\n".join(["# What the five systems learn", *(make_table(n, options.seeds, r) for n, r in systems.items())]))
    charts = [draw_rewards(name, runs) for name, runs in systems.items()]
    (options.into / "curves.svg").write_text(join_charts(charts))


# ---------------------------------------------------------------- tables


def make_table(name: str, seeds: Sequence[int], runs: Sequence[Run]) -> str:
    heading = f"{name}: " + ("learns" if all(run.has_learned() for run in runs) else "not seen to learn")
    rows = ["| seed | first three steps | last ten | steps | minutes |", "|---|---|---|---|---|"]
    for seed, run in zip(seeds, runs, strict=True):
        first, last = (f"{mean:.3f} ± {width:.3f}" for mean, width in run.estimate_ends())
        rows.append(f"| {seed} | {first} | {last} | {len(run.rewards)} | {run.seconds / 60:.1f} |")
    return "\n".join([f"\n## {heading}\n", f"Differs from the source in: {list_changes(name)}.\n", *rows])


def list_changes(name: str) -> str:
    """Return what is not as in the source: the recipes and the one file have the settings of the sources."""
    if name == "sorting":
        return "nothing but the spread of the embedding at the start, 1 → 0.3"
    if name == "transparent":
        sys.path.append("examples")
        import transparent_grpo  # noqa: PLC0415 - an example, not a part of the package

        defaults = {field.name: field.default for field in fields(transparent_grpo.Config)}
        return "; ".join(f"{key} {defaults[key]} → {value}" for key, value in ONE_FILE_SETTINGS.items())
    recipe, settings = RECIPES[name]
    defaults = dump_config(load_config(Path(f"recipes/{recipe}.toml")))
    changes = ["the questions, GSM8K → sums of two digits after an example"] if name in GSM8K_TASKS else []
    for key, value in settings.items():
        section, _, setting = key.replace("-", "_").partition(".")
        if (default := defaults[section].get(setting)) != value:
            changes.append(f"{section}.{setting} {default} → {value}")
    return "; ".join(changes)


def estimate_mean(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95% interval."""
    return fmean(rewards), STUDENT[len(rewards)] * stdev(rewards) / len(rewards) ** 0.5


def draw_rewards(name: str, runs: Sequence[Run]) -> str:
    curves = [[Point(step, reward) for step, reward in enumerate(run.rewards, 1)] for run in runs]
    label = f"mean reward of a step, {len(runs)} seeds"
    return draw_chart(name, label, [make_seed_series("reward", curves, "first")], include=(0,))


# ---------------------------------------------------------------- training


def load_run(name: str, seed: int, into: Path) -> Run:
    """Read the log of a run, and train first if there is none."""
    folder = into / name.replace(" ", "-") / f"seed-{seed}"
    log = folder / "metrics.jsonl"
    if not log.exists():
        folder.mkdir(parents=True, exist_ok=True)
        {"transparent": train_one_file, "sorting": train_sorting}.get(name, train_recipe)(name, seed, folder)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    return Run([step["reward/mean"] for step in steps], sum(step["time/step"] for step in steps))


def train_recipe(name: str, seed: int, folder: Path) -> None:
    recipe, settings = RECIPES[name]
    if name in GSM8K_TASKS:
        settings = settings | {f"{GSM8K_TASKS[name]}.data": write_sums(), f"{GSM8K_TASKS[name]}.test-data": ""}
    run = Path(f"runs/systems/{name.replace(' ', '-')}-{seed}-{time.strftime('%d-%H%M%S')}")
    flags = [make_flag(key, value) for key, value in (settings | SHORTER | {"algorithm.seed": seed}).items()]
    train = [sys.executable, "-m", "pellucid", "train", f"recipes/{recipe}.toml", "--run", str(run)]
    subprocess.run(train + flags, check=True)
    shutil.copy(run / "metrics.jsonl", folder)
    (folder / "config.json").write_text((run / "config.json").read_text().replace(f"{Path.cwd()}/", ""))


def make_flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        section, _, key = name.partition(".")
        return f"--{section}.{'' if value else 'no-'}{key}"
    return f"--{name}={value}"


def train_one_file(_name: str, seed: int, folder: Path) -> None:
    """Launch the one file, and keep what it prints."""
    precision = "bf16" if pick_dtype("auto", torch.device("cpu")) == torch.bfloat16 else "no"
    launch = ["launch", "--cpu", "--num_processes", "1", "--mixed_precision", precision, ONE_FILE]
    for key, value in {**ONE_FILE_SETTINGS, "seed": seed, "save": f"runs/systems/transparent-{seed}"}.items():
        launch += [f"--{key}", str(value)]
    output, metrics, start = [f"$ accelerate {' '.join(launch)}\n"], [], time.perf_counter()
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
            step, *cells = line.split("|")
            if cells and step.strip().isdigit():
                now = time.perf_counter()
                metrics.append({"step": int(step), "reward/mean": float(cells[1]), "time/step": now - start})
                start = now
    if process.returncode:
        raise SystemExit(f"transparent, seed {seed}: ended with status {process.returncode}")
    (folder / "printed.log").write_text("".join(output))
    write_metrics(folder, metrics)


def train_sorting(_name: str, seed: int, folder: Path) -> None:
    sys.path.append("examples")
    import sorting_from_scratch as sorting  # noqa: PLC0415 - an example, not a part of the package

    start = time.perf_counter()
    _, steps = sorting.train(sorting.parse_options(["--seed", str(seed)]), "centered", "clipped")
    seconds = (time.perf_counter() - start) / len(steps)
    rewards = [sorting.average_reward([step]) for step in steps]
    write_metrics(folder, [{"step": i, "reward/mean": r, "time/step": seconds} for i, r in enumerate(rewards, 1)])


def write_metrics(folder: Path, metrics: Sequence[Settings]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metric) + "\n" for metric in metrics))


def write_sums() -> Path:
    """Write sums of two digits in the form of GSM8K, whose own problems a model of 135M parameters cannot solve."""
    path, rng = Path("runs/systems/sums.jsonl"), random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(400):
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        question = QUESTION.format(question=f"What is {a} + {b}?")
        rows.append({"question": question, "answer": f"{a} + {b} = {a + b}\n#### {a + b}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
