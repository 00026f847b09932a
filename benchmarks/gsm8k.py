"""GSM8K before and after training: one command that evaluates, trains, evaluates again and prints the table.

    python benchmarks/gsm8k.py --run runs/gsm8k
    python benchmarks/gsm8k.py --run runs/chance --task.rewards.0.name benchmarks/gsm8k_rewards.py:reward_chance

It trains by recipes/gsm8k_laptop.toml on questions of GSM8K's training file; settings may follow. The test file is
asked before and after: all questions greedily, and 8 samples of each of the first 200. `--evaluate.n 16` asks 16
questions everywhere. The command can be repeated: it skips finished parts, resumes an interrupted run, and refuses a
finished run with other settings. Runs in one folder share the figures before training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pellucid.config import load_config, read_settings, resolve_config
from pellucid.reporting.run_files import list_checkpoints
from pellucid.study.bootstrap import estimate_interval
from pellucid.training.evaluate import compute_pass_at_k, estimate_share
from pellucid.training.run_dir import dump_settings
from pellucid.types import Estimate

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "gsm8k_laptop.toml"
DATA = ROOT / "recipes" / "data" / "gsm8k"
SAMPLED_QUESTIONS = 200
"""Questions of which 8 answers are sampled."""
SAMPLES = 8
EVALUATION_TOKENS = 512
"""The longest answer in an evaluation, more than in training, so that learning to be brief alone gains little."""

CHOSEN = ("policy.device", "policy.dtype", "policy.revision", "algorithm.micro_batch", "sampler.rows")
"""Settings that a run may choose by itself, and that do not change what is learned."""

Answer = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument("--greedy-only", action="store_true", help="evaluate without the 8 samples: half the time")
    options, overrides = parser.parse_known_args()
    run, n = options.run, read_flag(overrides, "--evaluate.n")
    if changed := list_other_settings(run, overrides):
        sys.exit(
            f"{run} is a finished run with other settings ({', '.join(changed)}): give the new one a folder of its own,"
            " --run runs/NAME, or remove this one"
        )
    model = read_flag(overrides, "--policy.model") or read_settings(RECIPE)["policy"]["model"]
    sampled = not options.greedy_only
    answers = [evaluate_test_questions(model, find_folder_before(run, model, n), n, sampled)]
    train(run, overrides)
    best = run / "model-best"
    answers.append(evaluate_test_questions(str(best if best.is_dir() else run / "model"), run / "test", n, sampled))
    print(make_table(answers[0], answers[1]))


def find_folder_before(run: Path, model: str, n: str = "") -> Path:
    """Return the folder of the evaluation before training, which the runs beside `run` share."""
    return run.parent / f"{Path(model).name}-before{f'-{n}' if n else ''}"


def list_other_settings(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return what a finished run was trained or evaluated with in place of what is asked for; empty if nothing is."""
    if not (run / "model").is_dir() or not (run / "config.json").exists():
        return []
    recorded = json.loads((run / "config.json").read_text(encoding="utf-8"))
    flags = [*map(str, list_data_flags()), *overrides]
    asked = dump_settings(resolve_config(load_config(RECIPE, flags)))
    return [
        f"{section}.{key} = {recorded[section][key]}, not {value}"
        for section in ("policy", "task", "sampler", "algorithm", "optimizer", "evaluate")
        for key, value in asked[section].items()
        if f"{section}.{key}" not in CHOSEN and recorded[section].get(key, value) != value
    ]


def read_flag(flags: Sequence[str], name: str) -> str:
    """Return the value of a command-line flag; empty if it is not there."""
    return flags[flags.index(name) + 1] if name in flags[:-1] else ""


def evaluate_test_questions(model: str, folder: Path, n: str, sampled: bool) -> dict[str, list[Answer]]:
    """Return the greedy and the sampled answers to test questions, from files if they are there."""
    if not (folder / "greedy.jsonl").exists():
        run_evaluation(model, folder / "greedy.jsonl", ["--evaluate.n", n or "0", "--evaluate.k", "0"])
    if sampled and not (folder / "sampled.jsonl").exists():
        flags = ["--evaluate.n", n or str(SAMPLED_QUESTIONS), "--evaluate.k", str(SAMPLES)]
        run_evaluation(model, folder / "sampled.jsonl", flags)
    return read_evaluation(folder)


def read_evaluation(folder: Path) -> dict[str, list[Answer]]:
    """Return the greedy and the sampled answers in a folder; no sampled ones if they were not asked for."""
    greedy, sampled = folder / "greedy.jsonl", folder / "sampled.jsonl"
    return {
        "greedy": [answer for answer in read_answers(greedy) if answer["drawn"] == "greedy"],
        "sampled": [a for a in (read_answers(sampled) if sampled.exists() else []) if a["drawn"] == "sample"],
    }


def run_evaluation(model: str, output: Path, flags: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pellucid", "eval", model, "--task", RECIPE, "--show", "0", "--output", output]
    command += ["--sampler.max-tokens", str(EVALUATION_TOKENS), *list_data_flags()]
    command += ["--task.test-data", DATA / "test.jsonl", *flags]
    subprocess.run(command, check=True)


def list_data_flags() -> list[str | Path]:
    return ["--task.data", DATA / "train.jsonl", "--task.subset", ""]


def read_answers(path: Path) -> list[Answer]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(run: Path, overrides: Sequence[str]) -> None:
    """Train, or resume a run that was interrupted."""
    if (run / "model").is_dir():
        return
    command = [sys.executable, "-m", "pellucid", "train"]
    if list_checkpoints(run):
        subprocess.run([*command, "--resume", run], check=True)
    else:
        subprocess.run([*command, RECIPE, "--run", run, *list_data_flags(), *overrides], check=True)


# ---------------------------------------------------------------- the table


def make_table(before: dict[str, list[Answer]], after: dict[str, list[Answer]]) -> str:
    """Return the Markdown table of all figures before and after, and of their differences question by question."""
    greedy: dict[str, Callable[[Answer], float]] = {
        "greedy, in the box": lambda answer: answer["parts"].get("math", 0.0),
        "greedy, the last number": lambda answer: answer["parts"].get("numeric", 0.0),
        "greedy answers cut off": lambda answer: not answer["finished"],
    }
    rows = [f"| {len(before['greedy']):,} test questions | before | after | difference |", "|---|---|---|---|"]
    for label, measure in greedy.items():
        rows.append(make_row(label, *([[float(measure(a)) for a in answers["greedy"]] for answers in (before, after)])))
    lengths = [fmean(answer["tokens"] for answer in answers["greedy"]) for answers in (before, after)]
    rows.append(f"| tokens of a greedy answer | {lengths[0]:.0f} | {lengths[1]:.0f} | |")
    if not (before["sampled"] and after["sampled"]):
        return "\n".join(rows)
    counts = [count_correct(answers["sampled"]) for answers in (before, after)]
    rows.append(f"| **{len(counts[0])} questions, {SAMPLES} samples of each** | | | |")
    rows.append(make_row("mean@8", *([correct / SAMPLES for correct in row] for row in counts)))
    rows.append(make_row("pass@8", *([compute_pass_at_k(SAMPLES, SAMPLES, c) for c in row] for row in counts)))
    return "\n".join(rows)


def count_correct(answers: Sequence[Answer]) -> list[int]:
    """Return the number of correct samples of each question."""
    values = [round(answer["parts"].get("math", 0.0)) for answer in answers]
    return [sum(values[i : i + SAMPLES]) for i in range(0, len(values), SAMPLES)]


def make_row(label: str, before: Sequence[float], after: Sequence[float]) -> str:
    """Return a row: both shares, and the mean difference of the same questions, with intervals."""
    difference = estimate_interval([[b - a for a, b in zip(before, after, strict=True)]])
    cells = [format_estimate(estimate_share(before)), format_estimate(estimate_share(after))]
    return f"| {label} | {' | '.join(cells)} | {format_estimate(difference, '+')} |"


def format_estimate(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


if __name__ == "__main__":
    main()
