"""The five systems, each as itself, with several seeds: what became of their rewards.

    python benchmarks/systems.py                       all five with one seed, in runs/systems/
    python benchmarks/systems.py sorting "by hand"     some
    python benchmarks/systems.py --seeds 0 1 2 --into docs/systems

Each run leaves its log in the folder, NAME/seed-N; what is there already is not run again. The rewards of the tables
are means of the first three and of the last ten steps, with the 95% interval of such a mean by Student's t. A system
has learnt where these intervals are apart with every seed; if not, its heading says so.
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

from pellucid.config import dump_config, load_config
from pellucid.reporting.charts import Point, draw_chart, join_charts, make_seed_series

FIRST, LAST = 3, 10
STUDENT = {FIRST: 4.303, LAST: 2.262}
"""Student's t at 97.5%, with one degree of freedom less."""
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
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
"""What the embedded model can learn in a few minutes. The questions show how they are answered: it has never seen the
tags of GSM8K, and where nothing is rewarded nothing is learnt."""
ASKED = {"gsm8k": "task", "study bench": "task.task.task"}
"""Those with sums, in GSM8K's form, and the section of the task that asks them."""
SHOWN = (
    "Answer like this.\nQuestion: What is 2 + 4?\nAnswer: <think>2 + 4 = 6</think> <answer>6</answer>\n"
    "Question: {question}\nAnswer:"
)
LEFT_OUT = {
    "evaluate.every": 0,
    "checkpoint.every": 0,
    "policy.gradient-checkpointing": False,
    "log.tensorboard": False,
}
ONE_FILE = (
    "accelerate launch --cpu --num_processes 1 --mixed_precision bf16 examples/transparent_grpo.py --problem seam"
    " --steps 40 --group_size 16 --max_new_tokens 32 --inner_epochs 1 --lr 3e-5"
)
NAMES = ("transparent", *RECIPES, "sorting")


@dataclass(frozen=True)
class Learnt:
    """Of one run: the mean reward of each step."""

    rewards: Sequence[float]
    seconds: float

    @property
    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(mean, half of its interval) at the beginning and at the end."""
        return interval(self.rewards[:FIRST]), interval(self.rewards[-LAST:])

    @property
    def apart(self) -> bool:
        (first, before), (last, after) = self.ends
        return first + before < last - after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--into", type=Path, default=Path("runs/systems"))
    options = parser.parse_args()
    names = options.systems or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no system is called {', '.join(sorted(unknown))}: {', '.join(NAMES)}")
    found = {name: [run(name, seed, options.into) for seed in options.seeds] for name in names}
    print("\n".join(["# What the five systems learn", *(told(name, runs, options) for name, runs in found.items())]))
    (options.into / "curves.svg").write_text(join_charts([drawn(name, runs) for name, runs in found.items()]))


def told(name: str, runs: Sequence[Learnt], options: argparse.Namespace) -> str:
    heading = f"{name}: " + ("learns" if all(run.apart for run in runs) else "not seen to learn")
    rows = ["| seed | first three steps | last ten | steps | minutes |", "|---|---|---|---|---|"]
    for seed, run in zip(options.seeds, runs, strict=True):
        first, last = (f"{mean:.3f} ± {half:.3f}" for mean, half in run.ends)
        rows.append(f"| {seed} | {first} | {last} | {len(run.rewards)} | {run.seconds / 60:.1f} |")
    return "\n".join([f"\n## {heading}\n", f"Departs from the source in: {departures(name)}.\n", *rows])


def departures(name: str) -> str:
    """What is set otherwise than the recipe or the file has it, which is as the source has it."""
    if name == "transparent":
        sys.path.append("examples")
        import transparent_grpo  # noqa: PLC0415 - an example, not a part of the package

        usual = {field.name: field.default for field in fields(transparent_grpo.Config)}
        flags = ONE_FILE.partition(" --problem ")[2].replace(" --", "\n").splitlines()
        pairs = [("problem", flags[0]), *(tuple(flag.split()) for flag in flags[1:])]
        return "; ".join(f"{key} {usual[key]} → {value}" for key, value in pairs)
    if name == "sorting":
        return "nothing but the spread of the embedding at the start, 1 → 0.3"
    recipe, settings = RECIPES[name]
    usual = dump_config(load_config(Path(f"recipes/{recipe}.toml")))
    questions = ["the questions, GSM8K → sums of two digits from 1 to 9, after an example"] if name in ASKED else []
    pairs = [(key.replace("-", "_"), usual_of(usual, key), value) for key, value in settings.items()]
    changed = [f"{key} {before} → {value}" for key, before, value in pairs if before != value]
    return "; ".join([*questions, *changed])


def usual_of(settings: dict, key: str) -> object:
    section, _, name = key.replace("-", "_").partition(".")
    return settings[section].get(name)


def run(name: str, seed: int, into: Path) -> Learnt:
    """Read, if it was run before."""
    folder = into / name.replace(" ", "-") / f"seed-{seed}"
    log = folder / "metrics.jsonl"
    if not log.exists():
        folder.mkdir(parents=True, exist_ok=True)
        {"transparent": one_file, "sorting": sort}.get(name, train)(name, seed, folder)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    return Learnt([step["reward/mean"] for step in steps], sum(step["time/step"] for step in steps))


def train(name: str, seed: int, folder: Path) -> None:
    recipe, settings = RECIPES[name]
    data = {f"{ASKED[name]}.data": sums(), f"{ASKED[name]}.test-data": ""} if name in ASKED else {}
    made = Path(f"runs/systems/{name.replace(' ', '-')}-{seed}-{time.strftime('%d-%H%M%S')}")
    command = [sys.executable, "-m", "pellucid", "train", f"recipes/{recipe}.toml", "--run", str(made)]
    flags = [flag(*pair) for pair in (settings | data | LEFT_OUT | {"algorithm.seed": seed}).items()]
    subprocess.run(command + flags, check=True)
    shutil.copy(made / "metrics.jsonl", folder)
    (folder / "config.json").write_text((made / "config.json").read_text().replace(f"{Path.cwd()}/", ""))


def flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        section, _, key = name.partition(".")
        return f"--{section}.{'' if value else 'no-'}{key}"
    return f"--{name}={value}"


def one_file(_name: str, seed: int, folder: Path) -> None:
    """Prints as it goes, and keeps what was printed."""
    command = f"{ONE_FILE} --seed {seed} --save runs/systems/transparent-{seed}"
    printed, metrics, start = [f"$ {command}\n"], [], time.perf_counter()
    launch = [sys.executable, "-m", "accelerate.commands.launch", *command.split()[2:]]
    with subprocess.Popen(launch, stdout=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None
        for line in launched.stdout:
            print(line, end="", flush=True)
            printed.append(line)
            step, *cells = line.split("|")
            if cells and step.strip().isdigit():
                since = time.perf_counter() - start - sum(metric["time/step"] for metric in metrics)
                metrics.append({"step": int(step), "reward/mean": float(cells[1]), "time/step": since})
    if launched.returncode:
        raise SystemExit(f"transparent, seed {seed}: ended with status {launched.returncode}")
    (folder / "printed.log").write_text("".join(printed))
    write(folder, metrics)


def sort(_name: str, seed: int, folder: Path) -> None:
    sys.path.append("examples")
    import sorting_from_scratch as sorting  # noqa: PLC0415 - an example, not a part of the package

    start = time.perf_counter()
    _, steps = sorting.train(sorting.parsed(["--seed", str(seed)]), "centered", "clipped")
    each = (time.perf_counter() - start) / len(steps)
    rewards = [sorting.sampled([step]) for step in steps]
    write(folder, [{"step": i, "reward/mean": r, "time/step": each} for i, r in enumerate(rewards, 1)])


def write(folder: Path, metrics: Sequence[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metric) + "\n" for metric in metrics))


def sums() -> Path:
    """In the form of GSM8K, whose problems are beyond a model of 135M parameters."""
    path, rng = Path("runs/systems/sums.jsonl"), random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(400):
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        rows.append(
            {"question": SHOWN.format(question=f"What is {a} + {b}?"), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def interval(rewards: Sequence[float]) -> tuple[float, float]:
    return fmean(rewards), STUDENT[len(rewards)] * stdev(rewards) / len(rewards) ** 0.5


def drawn(name: str, runs: Sequence[Learnt]) -> str:
    curves = [[Point(step, reward) for step, reward in enumerate(run.rewards, 1)] for run in runs]
    return draw_chart(
        name, f"mean reward of a step, {len(runs)} seeds", [make_seed_series("reward", curves, "first")], include=(0,)
    )


if __name__ == "__main__":
    main()
