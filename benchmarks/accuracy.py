"""Measures how long Pellucid and TRL train until a share of held-out answers is correct, with five seeds.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --tasks one-digit --peers pellucid trl-autocast --seeds 0 1

Both have the same task, split, prompts in the same order, group size, learning rate schedule and seeds, and the same
code evaluates them at the same steps. On two-digit arithmetic Pellucid also has prefixes, which TRL does not support;
pellucid-plain has none. Seconds are those of training only. A run ends when it reaches the share, or when its steps or
minutes are used up. Runs that are in the --into file are not repeated, so an interrupted table can be resumed. Settings
of the recipe may follow, such as --algorithm.steps 2; they apply to all peers.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import append_row, collect_metadata
from processes import Contender, MissingError, check_available

EVALUATE_EVERY = {"one-digit": 1, "two-digit": 8}
"""Steps between evaluations."""
PEERS = {
    "one-digit": ("pellucid", "trl-autocast", "trl-bf16", "trl-best-autocast", "trl-best-bf16"),
    "two-digit": ("pellucid", "pellucid-plain", "trl-autocast", "trl-best-autocast", "trl-best-bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--peers", nargs="+", help="only these peers of a task")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--reach", type=float, default=0.85, help="the share of correct samples to reach, mean@8")
    parser.add_argument("--minutes", type=float, default=60.0, help="the most training time of one seed")
    parser.add_argument("--into", type=Path, default=Path("runs/accuracy.jsonl"))
    options, overrides = parser.parse_known_args()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        peers = [peer for peer in PEERS[task] if peer in (options.peers or [peer])]
        missing = find_missing(task, peers)
        for seed in options.seeds:
            for peer in peers:
                if peer not in missing and not select_rows(read_rows(options, overrides), task, peer, [seed]):
                    append_row(options.into, collect_metadata() | train_seed(task, peer, seed, options, overrides))
        rows = read_rows(options, overrides)
        print(make_table(task, peers, options, rows, missing), flush=True)


def find_missing(task: str, peers: Sequence[str]) -> dict[str, str]:
    """Return a row for each peer that is missing, which says how to get it."""
    rows = {}
    for peer in peers:
        try:
            check_available(peer)
        except MissingError as missing:
            rows[peer] = f"| {task} | {peer} | {missing} |"
    return rows


def train_seed(
    task: str, peer: str, seed: int, options: argparse.Namespace, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train until the share is reached, and return the evaluations with the seconds of training before each."""
    settings = {"task": task, "seed": seed, "every": EVALUATE_EVERY[task]}
    evaluations: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Contender("accuracy", peer, settings, Path(folder), tuple(overrides)) as contender,
    ):
        steps, seconds = int(contender.info["steps"]), 0.0
        while True:
            evaluation = contender.take_turn()
            seconds += evaluation["seconds"]
            evaluations.append({**evaluation, "seconds": seconds})
            print(f"{task}, {peer}, seed {seed}: {format_evaluation(evaluations[-1])}", flush=True)
            reached = evaluation["mean"] >= options.reach
            if reached or evaluation["step"] + EVALUATE_EVERY[task] > steps or seconds > 60 * options.minutes:
                break
        peak = contender.close()["peak_gb"]
    result = {"reach": options.reach, "reached": reached, "steps": int(evaluation["step"]), "seconds": seconds}
    return {**settings, "peer": peer, **result, "peak_gb": peak, "words": list(overrides), "evaluations": evaluations}


def format_evaluation(evaluation: dict[str, float]) -> str:
    accuracy = f"mean@{evaluation['k']:.0f} {evaluation['mean']:.3f}, greedy {evaluation['greedy']:.3f}"
    return f"step {evaluation['step']:.0f}, {evaluation['seconds']:.1f} s of training, {accuracy}"


def read_rows(options: argparse.Namespace, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of the file that have the same share to reach and the same settings."""
    lines = options.into.read_text().splitlines() if options.into.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if (row["reach"], row["words"]) == (options.reach, list(overrides))]


def select_rows(rows: Sequence[dict[str, Any]], task: str, peer: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the last row of each seed that has one."""
    last = {row["seed"]: row for row in rows if (row["task"], row["peer"]) == (task, peer)}
    return [last[seed] for seed in seeds if seed in last]


def make_table(
    task: str,
    peers: Sequence[str],
    options: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    missing: dict[str, str],
) -> str:
    heads = ["task", "peer", f"reached {options.reach:g}", "steps", "seconds, median", "each", "times ours", "GB"]
    lines = ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    baseline = select_rows(rows, task, peers[0], options.seeds) if peers else []
    for peer in peers:
        peer_rows = select_rows(rows, task, peer, options.seeds)
        lines.append(missing[peer] if peer in missing else make_row(task, peer, peer_rows, baseline))
    return "\n".join(lines)


def make_row(task: str, peer: str, rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> str:
    """Return a row of the table, with the time relative to the median of `baseline`."""
    if not rows:
        return f"| {task} | {peer} | not run |"
    each = [f"{row['seconds']:.0f}" if row["reached"] else f"not in {row['seconds']:.0f}" for row in rows]
    reached = sum(row["reached"] for row in rows)
    steps = compute_median([row["steps"] if row["reached"] else math.inf for row in rows])
    most_steps = max(row["steps"] for row in rows)
    seconds = compute_median([get_seconds(row) for row in rows])
    cells = [
        f"{reached} of {len(rows)}",
        f"{steps:g}" if math.isfinite(steps) else f"not reached in {most_steps} steps",
        f"{seconds:.0f}" if math.isfinite(seconds) else "",
        ", ".join(each),
        format_ratio(seconds, compute_median([get_seconds(row) for row in baseline])),
        f"{max(row['peak_gb'] for row in rows):.1f}",
    ]
    return f"| {task} | {peer} | {' | '.join(cells)} |"


def get_seconds(row: dict[str, Any]) -> float:
    """Return the seconds until the share was reached, infinite if it was not."""
    return row["seconds"] if row["reached"] else math.inf


def compute_median(values: Sequence[float]) -> float:
    """Return the middle value, for an even number the higher of the two. It is NaN without values."""
    return sorted(values)[len(values) // 2] if values else math.nan


def format_ratio(seconds: float, baseline: float) -> str:
    return f"{seconds / baseline:.1f}x" if math.isfinite(seconds) and math.isfinite(baseline) and baseline else ""


if __name__ == "__main__":
    main()
