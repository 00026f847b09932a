"""Kill runs with SIGKILL at random moments, resume them to their end, and compare every bit with undisturbed runs.

    python tests/crash/kill.py --points 40 --seed 0

A point is a stage, one of its visits, and a share of the time that such a visit takes; "any" is a moment of the whole
run. The processes are those that the command line starts. They report their stages through `marks/sitecustomize.py`,
so the table says in which stage each was killed. The exit status is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from subprocess import Popen
from tempfile import mkdtemp
from typing import NamedTuple

import torch
from launch import Begin, Kill, Trace, launch
from transformers.utils.logging import disable_progress_bar

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))

from conftest import character_tokenizer, tiny_llama, tiny_recipe  # noqa: E402 - found where pytest finds it

STEPS = 8
TARGETS = ("rollout", "update", "save", "finish", "restore", "any")
TIMED = ("time/", "memory/")
LAUNCH = {1: ["-m"], 2: ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "--"]}
SETTINGS = ["--algorithm.steps", f"{STEPS}", "--evaluate.every", "3", "--log.no-tensorboard"]
STUDY = """
base = "recipe.toml"
seeds = [0]
[common.algorithm]
steps = {steps}
[variants.grpo]
[variants.centered.algorithm]
advantage = "centered"
"""


class Configuration(NamedTuple):
    settings: str = ""
    task: str = ""
    """Inserted between [task] and the settings of the inner task."""
    inner: str = ""
    """Replaces the task of the recipe."""
    processes: int = 1
    study: bool = False


CONFIGURATIONS = {
    "full weights": Configuration(),
    "LoRA": Configuration("--policy.lora 2"),
    "replay": Configuration("--algorithm.max_staleness 3"),
    "curriculum": Configuration(task='name = "curriculum"\npool = 10\nwindow = 3\nrest = 1'),
    "prefixes": Configuration(
        "--algorithm.prefix_coef 0.5 --sampler.max_tokens 4",
        task='name = "prefixed"\nshortest = 0.5',
        inner='name = "arithmetic"\ntemplate = "{a}{operator}{b}="',
    ),
    "moving reference, adaptive KL": Configuration(
        "--algorithm.reference_every 2 --algorithm.reference_decay 0.5"
        " --algorithm.kl k2 --algorithm.kl_in loss --algorithm.kl_target 0.001"
    ),
    "dynamic sampling": Configuration("--algorithm.max_rounds 3 --algorithm.min_reward_range 0.3"),
    "offload": Configuration("--optimizer.offload --policy.dtype bfloat16"),
    "fp16": Configuration("--policy.dtype float16"),
    "two processes": Configuration(processes=2),
    "a study": Configuration(study=True),
}


class Row(NamedTuple):
    name: str
    points: Counter[str]
    resumed: list[str]
    """The step that each resumed run started from."""
    wrong: list[str]


# ---------------------------------------------------------------- one configuration


@dataclass
class Subject:
    """A configuration with its commands and folders."""

    name: str
    folder: Path
    """Contains recipe.toml and study.toml."""
    begin: Begin

    @property
    def configuration(self) -> Configuration:
        return CONFIGURATIONS[self.name]

    def command(self, into: Path) -> list[str]:
        """Return the command that starts the run or continues it: `--resume` if there is a checkpoint, else the first
        one.
        """
        start = [sys.executable, *LAUNCH[self.configuration.processes], "pellucid"]
        if self.configuration.study:
            return [*start, "study", str(self.folder / "study.toml"), "--into", str(into), "--keep-models"]
        if any(newest(run_dir) for run_dir in self.runs(into)):
            return [*start, "train", "--resume", str(into)]
        recipe = str(self.folder / "recipe.toml")
        return [*start, "train", recipe, "--run", str(into), *SETTINGS, *self.configuration.settings.split()]

    def runs(self, into: Path) -> list[Path]:
        return [into / variant / "seed-0" for variant in ("grpo", "centered")] if self.configuration.study else [into]

    def kept(self, into: Path) -> int:
        """Return the number of steps that need not be repeated."""
        return sum(STEPS if (run_dir / "model").exists() else newest(run_dir) for run_dir in self.runs(into))


def newest(run_dir: Path) -> int:
    """Return the step of the last complete checkpoint, or 0."""
    return max((int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step-*") if p.name[5:].isdigit()), default=0)


def trial(
    name: str,
    folder: Path,
    points: int,
    rng: random.Random,
    targets: Sequence[str] = TARGETS,
    most: int = 2,
    begin: Begin = Popen,
) -> Row:
    """Train once undisturbed, then with `points` kills, at most `most` of them in one run."""
    subject = Subject(name, prepared(folder / name.replace(" ", "-"), CONFIGURATIONS[name]), begin)
    undisturbed = launch(subject.command(subject.folder / "whole"), subject.folder / "whole.log", begin)
    check(undisturbed.status == 0, subject.folder / "whole.log")
    row, aims = Row(name, Counter(), [], []), cycle(rng.sample(targets, len(targets)))
    for life in range(4 * points):  # a kill that comes too late does not count
        if (left := points - row.points.total()) <= 0:
            break
        into = subject.folder / f"killed-{life}"
        row.wrong.extend(lived(subject, into, rng.randint(1, min(most, left)), aims, undisturbed.trace, row, rng))
    check(row.points.total() == points, subject.folder)
    return row


def lived(
    subject: Subject,
    into: Path,
    kills: int,
    aims: Iterator[str],
    undisturbed: Trace,
    row: Row,
    rng: random.Random,
) -> list[str]:
    """Kill and resume one run to its end. Return its differences from the undisturbed run."""
    log = into.with_suffix(".log")
    for _ in range(kills):
        kept = subject.kept(into)
        kill = aimed(next(aims), kept, len(subject.runs(into)) * STEPS, undisturbed, rng)
        ended = launch(subject.command(into), log, subject.begin, kill)
        if not ended.died:
            break
        row.points[ended.died] += 1
        row.resumed.append(str(subject.kept(into) or "start"))
    done = launch(subject.command(into), log, subject.begin)
    check(done.status == 0, log)
    runs = zip(subject.runs(subject.folder / "whole"), subject.runs(into), strict=True)
    return [f"{into}: {what}" for whole, killed in runs for what in differences(whole, killed)]


def aimed(target: str, kept: int, total: int, undisturbed: Trace, rng: random.Random) -> Kill:
    """Return a random moment in the rest of a run of which `kept` steps are done."""
    left, everyone = 1 - kept / total, rng.random() < 0.5
    if target == "restore" and kept:
        return Kill("restore", 1, rng.random() * 0.02, everyone)
    if target in ("any", "restore"):
        return Kill("train", 1, rng.random() * left * sum(undisturbed.seconds["train"]), everyone)
    seconds = undisturbed.seconds[target]
    visit = rng.randint(1, max(1, round(left * len(seconds))))
    return Kill(target, visit, rng.random() * seconds[visit - 1], everyone)


def prepared(folder: Path, configuration: Configuration) -> Path:
    folder.mkdir(parents=True)
    disable_progress_bar()
    torch.manual_seed(0)
    tiny_llama().save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    recipe = tiny_recipe(folder / "recipe.toml", folder / "model")
    head, task = recipe.read_text().split("[task]\n")
    name, rest = task.split("\n", 1)
    inner = configuration.inner or name
    text = (
        f"{head}[task]\n{configuration.task}\n[task.task]\n{inner}" if configuration.task else f"{head}[task]\n{inner}"
    )
    recipe.write_text(f"{text}\n{rest}")
    (folder / "study.toml").write_text(STUDY.format(steps=STEPS))
    return folder


# ---------------------------------------------------------------- comparison


def differences(whole: Path, killed: Path) -> list[str]:
    """Return the files that differ, except in times, and the temporary files that are left."""
    files = sorted(path.relative_to(whole) for path in (whole / "model").rglob("*") if path.is_file())
    wrong = [str(file) for file in files if not same_bytes(whole / file, killed / file)]
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        wrong += [name] if untimed(whole / name) != untimed(killed / name) else []
    return wrong + [f"{path} is left" for path in killed.rglob("*") if path.suffix in (".partial", ".tmp")]


def same_bytes(one: Path, two: Path) -> bool:
    return two.is_file() and one.read_bytes() == two.read_bytes()


def untimed(path: Path) -> list[str]:
    """Return the lines of a file without times, at full precision."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [json.dumps({key: value for key, value in row.items() if not key.startswith(TIMED)}) for row in rows]


def check(condition: bool, log: Path) -> None:
    if not condition:
        end_of_log = log.read_text().splitlines()[-15:] if log.is_file() else []
        raise SystemExit("\n".join([f"{log}: it did not come to its end", *end_of_log]))


def table(rows: Sequence[Row]) -> str:
    lines = ["| configuration | killed in | resumed from step | same bits |", "|---|---|---|---|"]
    for row in rows:
        points = ", ".join(f"{stage} {n}" if n > 1 else stage for stage, n in row.points.items())
        lines.append(f"| {row.name} | {points} | {', '.join(row.resumed)} | {'NO' if row.wrong else 'yes'} |")
    total = sum((row.points for row in rows), Counter[str]())
    stages = ", ".join(f"{n} in {stage}" for stage, n in total.most_common())
    same = sum(not row.wrong for row in rows)
    return "\n".join(
        [*lines, "", f"{total.total()} points ({stages}); same bits in {same} of {len(rows)} configurations"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=40, help="over all configurations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    options = parser.parse_args()
    rng, folder, rows = random.Random(options.seed), Path(mkdtemp(prefix="kill-")), []
    share, more = divmod(options.points, len(options.only))
    for i, name in enumerate(options.only):
        rows.append(trial(name, folder, share + (i < more), rng))
        print(f"{name}: {'; '.join(rows[-1].wrong) or 'same bits'}", file=sys.stderr, flush=True)
    print(table(rows))
    if any(row.wrong for row in rows):
        print(f"what differs is left in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
