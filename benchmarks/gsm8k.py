"""GSM8K before and after training: one command that evaluates, trains, evaluates again and prints the table.

    python benchmarks/gsm8k.py --run runs/gsm8k

Training has two phases: some supervised steps on solutions of GSM8K's training file (benchmarks/gsm8k_supervised.py),
then GRPO by recipes/gsm8k_laptop.toml; settings of the recipe may follow, and `--policy.model` takes the place of the
supervised phase. The test file is asked before and after each phase: all questions greedily, and 8 samples of each of
the first 200. After GRPO the model of the last step is asked, since no evaluation has chosen it. `--evaluate.n 16`
asks 16 questions everywhere. The command can be repeated: it skips finished parts, resumes an interrupted run, and
refuses a finished run with other settings. Runs in one folder share the supervised phase and the figures before GRPO.
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

from pellucid.config import load_config, parse_setting_flags, read_settings, resolve_config
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

START, START_TOKENS = "start", 100_000
"""The folder of the supervised phase, beside the run, and on how many tokens of solutions it trains."""
START_FLAGS = ("--optimizer.lr", "2e-4")

CHOSEN = ("policy.device", "policy.dtype", "policy.revision", "algorithm.micro_batch", "sampler.rows")
"""Settings that a run may choose by itself, and that do not change what is learned."""

Answer = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument("--greedy-only", action="store_true", help="evaluate without the 8 samples: half the time")
    parser.add_argument("--start-tokens", type=int, default=START_TOKENS, help="of solutions, in the supervised phase")
    options, overrides = parser.parse_known_args()
    run, n, sampled = options.run, read_flag(overrides, "evaluate", "n"), not options.greedy_only
    start = run.parent / (START if options.start_tokens == START_TOKENS else f"{START}-{options.start_tokens}")
    models = {"as it comes": read_flag(overrides, "policy", "model")}
    if not models["as it comes"]:
        models = {"as it comes": read_settings(RECIPE)["policy"]["model"], "after the supervised steps": str(start)}
        overrides += ["--policy.model", str(start / "model")]
    if changed := list_other_settings(run, overrides):
        sys.exit(
            f"{run} is a finished run with other settings ({', '.join(changed)}): give the new one a folder of its own,"
            " --run runs/NAME, or remove this one"
        )
    answers = {}
    for label, model in models.items():
        if model == str(start):
            train_supervised(start, options.start_tokens)
        answers[label] = evaluate_test_questions(model, find_folder_before(run, model, n), n, sampled)
    train(run, overrides)
    answers["at the end"] = evaluate_test_questions(str(run), run / "test", n, sampled)
    print(make_table(answers))


def find_folder_before(run: Path, model: str, n: str = "") -> Path:
    """Return the folder of an evaluation before GRPO, which the runs beside `run` share."""
    return run.parent / f"{Path(model).name}-before{f'-{n}' if n else ''}"


def list_other_settings(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return what a finished run was trained or evaluated with in place of what is asked for; empty if nothing is.

    A model of the other scripts, which write no evaluations, is accepted as it is.
    """
    if not (run / "model").is_dir() or not (run / "evals.jsonl").exists():
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


def read_flag(flags: Sequence[str], section: str, key: str) -> str:
    """Return the value of a setting on the command line; empty if it is not there."""
    return "".join(parse_setting_flags(flags).get(section, {}).get(key, ()))


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


def train_supervised(run: Path, tokens: int) -> None:
    if not (run / "model").is_dir():
        command = [sys.executable, Path(__file__).with_name("gsm8k_supervised.py"), "--run", run]
        subprocess.run([*command, "--tokens", str(tokens), *START_FLAGS], check=True)


# ---------------------------------------------------------------- the table


def make_table(models: dict[str, dict[str, list[Answer]]]) -> str:
    """Return the Markdown table of all figures of some models, and of the gain of the last over each of the others.

    Gains are computed question by question.
    """
    greedy: dict[str, Callable[[Answer], float]] = {
        "greedy, in the box": lambda answer: answer["parts"].get("math", 0.0),
        "greedy, the last number": lambda answer: answer["parts"].get("numeric", 0.0),
        "greedy answers cut off": lambda answer: not answer["finished"],
    }
    columns = list(models.values())
    title = f"{len(columns[0]['greedy']):,} test questions"
    gains = [f"more than {label}" for label in [*models][:-1]]
    rows = [f"| {title} | {' | '.join([*models, *gains])} |", "|---" * (2 * len(models)) + "|"]
    for label, measure in greedy.items():
        rows.append(make_row(label, [[float(measure(a)) for a in answers["greedy"]] for answers in columns]))
    lengths = [f"{fmean(answer['tokens'] for answer in answers['greedy']):.0f}" for answers in columns]
    rows.append(f"| tokens of a greedy answer | {' | '.join(lengths)} |{' |' * len(gains)}")
    if not all(answers["sampled"] for answers in columns):
        return "\n".join(rows)
    counts = [count_correct(answers["sampled"]) for answers in columns]
    rows.append(f"| **{len(counts[0])} questions, {SAMPLES} samples of each** |{' |' * (2 * len(models) - 1)}")
    rows.append(make_row("mean@8", [[correct / SAMPLES for correct in row] for row in counts]))
    rows.append(make_row("pass@8", [[compute_pass_at_k(SAMPLES, SAMPLES, c) for c in row] for row in counts]))
    return "\n".join(rows)


def count_correct(answers: Sequence[Answer]) -> list[int]:
    """Return the number of correct samples of each question."""
    values = [round(answer["parts"].get("math", 0.0)) for answer in answers]
    return [sum(values[i : i + SAMPLES]) for i in range(0, len(values), SAMPLES)]


def make_row(label: str, columns: Sequence[Sequence[float]]) -> str:
    """Return a row: the shares of all models, and the mean gains of the last over each other, with intervals."""
    cells = [format_estimate(estimate_share(values)) for values in columns]
    cells += [format_estimate(estimate_gain(values, columns[-1]), "+") for values in columns[:-1]]
    return f"| {label} | {' | '.join(cells)} |"


def estimate_gain(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean difference of the same questions with its interval."""
    return estimate_interval([[b - a for a, b in zip(before, after, strict=True)]])


def format_estimate(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


if __name__ == "__main__":
    main()
