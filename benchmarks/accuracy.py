"""How long until a share of held-out answers is right: ours and TRL's training of the same task, five seeds.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --tasks one-digit --peers pellucid trl-autocast --seeds 0 1

Task, split, prompts and their order, group size, learning rate and its course, and seeds are the same; on two-digit
arithmetic ours also has prefixes, which TRL has not. Seconds are those of training alone. Both are graded by the same
code at the same steps. A seed ends when it has reached the share, or its steps or minutes are used up. One that is in
the file that --into names is not run again, so an interrupted table can be gone on with. Settings of a recipe may
follow, such as --algorithm.steps 2, for all peers.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import facts, record
from processes import Contender, MissingError, check_there

EVERY = {"one-digit": 1, "two-digit": 8}
"""Steps between evaluations."""
PEERS = {
    "one-digit": ("pellucid", "trl-autocast", "trl-bf16", "trl-best-autocast", "trl-best-bf16"),
    "two-digit": ("pellucid", "pellucid-plain", "trl-autocast", "trl-best-autocast", "trl-best-bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--peers", nargs="+", help="of those of the task")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--reach", type=float, default=0.85, help="the share of right samples, mean@8")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training, for one seed")
    parser.add_argument("--into", type=Path, default=Path("runs/accuracy.jsonl"))
    options, words = parser.parse_known_args()
    options.into.parent.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        peers = [peer for peer in PEERS[task] if peer in (options.peers or [peer])]
        told = there(task, peers)
        for seed in options.seeds:
            for peer in peers:
                if peer not in told and not found(rows_in(options, words), task, peer, [seed]):
                    record(options.into, facts() | run(task, peer, seed, options, words))
        rows = rows_in(options, words)
        print(table(task, peers, options, rows, told), flush=True)


def there(task: str, peers: Sequence[str]) -> dict[str, str]:
    """Of peers that are missing, the line that says how to get them."""
    lines = {}
    for peer in peers:
        try:
            check_there(peer)
        except MissingError as missing:
            lines[peer] = f"| {task} | {peer} | {missing} |"
    return lines


def run(task: str, peer: str, seed: int, options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """One seed: what each evaluation said, with the seconds of training before it."""
    settings = {"task": task, "seed": seed, "every": EVERY[task]}
    evaluations: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Contender("accuracy", peer, settings, Path(folder), tuple(words)) as contender,
    ):
        steps, seconds = int(contender.facts["steps"]), 0.0
        while True:
            turn = contender.turn()
            seconds += turn["seconds"]
            evaluations.append({**turn, "seconds": seconds})
            print(f"{task}, {peer}, seed {seed}: {said(evaluations[-1])}", flush=True)
            reached = turn["mean"] >= options.reach
            if reached or turn["step"] + EVERY[task] > steps or seconds > 60 * options.minutes:
                break
        peak = contender.close()["peak_gb"]
    ends = {"reach": options.reach, "reached": reached, "steps": int(turn["step"]), "seconds": seconds}
    return {**settings, "peer": peer, **ends, "peak_gb": peak, "words": list(words), "evaluations": evaluations}


def said(turn: dict[str, float]) -> str:
    right = f"mean@{turn['k']:.0f} {turn['mean']:.3f}, greedy {turn['greedy']:.3f}"
    return f"step {turn['step']:.0f}, {turn['seconds']:.1f} s of training, {right}"


def rows_in(options: argparse.Namespace, words: Sequence[str]) -> list[dict[str, Any]]:
    """Of the file, those that were after the same share by the same settings."""
    lines = options.into.read_text().splitlines() if options.into.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if (row["reach"], row["words"]) == (options.reach, list(words))]


def found(rows: Sequence[dict[str, Any]], task: str, peer: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What is known of these seeds, the last said of each."""
    last = {row["seed"]: row for row in rows if (row["task"], row["peer"]) == (task, peer)}
    return [last[seed] for seed in seeds if seed in last]


def table(
    task: str,
    peers: Sequence[str],
    options: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    told: dict[str, str],
) -> str:
    heads = ["task", "peer", f"reached {options.reach:g}", "steps", "seconds, median", "each", "times ours", "GB"]
    lines = ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    ours = found(rows, task, peers[0], options.seeds) if peers else []
    for peer in peers:
        theirs = found(rows, task, peer, options.seeds)
        lines.append(told[peer] if peer in told else row_of(task, peer, theirs, ours))
    return "\n".join(lines)


def row_of(task: str, peer: str, seeds: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> str:
    if not seeds:
        return f"| {task} | {peer} | not run |"
    each = [f"{row['seconds']:.0f}" if row["reached"] else f"not in {row['seconds']:.0f}" for row in seeds]
    right = sum(row["reached"] for row in seeds)
    steps = median_of([row["steps"] if row["reached"] else math.inf for row in seeds])
    most = max(row["steps"] for row in seeds)
    seconds = median_of([time_of(row) for row in seeds])
    cells = [
        f"{right} of {len(seeds)}",
        f"{steps:g}" if math.isfinite(steps) else f"not reached in {most} steps",
        f"{seconds:.0f}" if math.isfinite(seconds) else "",
        ", ".join(each),
        times(seconds, median_of([time_of(row) for row in ours])),
        f"{max(row['peak_gb'] for row in seeds):.1f}",
    ]
    return f"| {task} | {peer} | {' | '.join(cells)} |"


def time_of(row: dict[str, Any]) -> float:
    return row["seconds"] if row["reached"] else math.inf


def median_of(values: Sequence[float]) -> float:
    """Of an odd number of them the middle one, and so infinite only where most are; of an even one the higher."""
    return sorted(values)[len(values) // 2] if values else math.nan


def times(seconds: float, ours: float) -> str:
    return f"{seconds / ours:.1f}x" if math.isfinite(seconds) and math.isfinite(ours) and ours else ""


if __name__ == "__main__":
    main()
