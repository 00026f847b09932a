"""Compares the speed of Pellucid with that of TRL, transformers' generate(), vLLM and llama.cpp.

    python benchmarks/bench.py                 every table
    python benchmarks/bench.py step-64 vllm-64  some of them

Model, prompts, lengths and threads are the same for both. Each comparison starts two processes, Pellucid's and the
peer's, which take turns: while one works, the other waits. Two turns of each warm up, then --repeats count. The tables
have medians; a ratio is the median of the ratios of neighboring turns. In the main job, that of `make train`, steps
change as the policy learns, so all of the first sixteen count, and the table has their sums. benchmarks/README.md has
the last output, benchmarks/results.jsonl the values of every turn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from processes import HERE, Contender, MissingError, Settings

from pellucid.utils import hardware

Turns = Sequence[Sequence[dict[str, float]]]
"""For each turn, the answers of Pellucid and of the peer."""
WARM_UP, JOB_STEPS = 2, 16
LAST_STEPS = 4
"""The steps at the end of the job whose mean reward is printed."""


class Comparison(NamedTuple):
    work: str
    peer: str
    settings: Settings
    goal: float | None = None
    """The speed that Pellucid aims for, as a multiple of the peer's."""


def make_step_comparisons(tokens: int, lora: int = 0, **goals: float | None) -> list[Comparison]:
    """Return a comparison with each peer. With `lora`, both train an adapter of this rank, TRL through peft."""
    settings: Settings = {"tokens": tokens, "prompts": 4, "group": 8} | ({"lora": lora} if lora else {})
    return [Comparison("step", peer.replace("_", "-"), settings, goal) for peer, goal in goals.items()]


def make_sample_comparison(peer: str, prompts: int, group: int, tokens: int, goal: float | None) -> Comparison:
    return Comparison("sample", peer, {"tokens": tokens, "prompts": prompts, "group": group}, goal)


def make_job_comparison(peer: str) -> Comparison:
    return Comparison("job", peer, {"tokens": 24, "prompts": 4, "group": 16})


BEST = {"trl_best_bf16": None, "trl_best_autocast": None}
TABLES = {
    "step-64": make_step_comparisons(64, trl_bf16=4.0, trl_autocast=5.0, trl_fp32=None, **BEST, trl_as_it_comes=None),
    "step-256": make_step_comparisons(256, trl_bf16=4.0, trl_autocast=5.0, **BEST),
    "lora": make_step_comparisons(64, 16, whole_weights=None, transformers=None, trl_bf16=4.0, trl_autocast=5.0),
    "job": [
        make_job_comparison(f"trl-{kind}") for kind in ("bf16", "autocast", "best-bf16", "best-autocast", "as-it-comes")
    ],
    "generate": [
        make_sample_comparison("generate", 4, 8, 64, 2.4),
        make_sample_comparison("generate", 1, 32, 64, 2.4),
    ],
    **{
        f"{peer}-{tokens}": [make_sample_comparison(mode, 4, 8, tokens, goal) for mode in modes]
        for tokens in (64, 256)
        for peer, modes, goal in (
            ("vllm", ("vllm-compiled", "vllm-eager"), 1.3),
            ("llama", ("llama-server",), None),
        )
    },
}


def compare(comparison: Comparison, repeats: int) -> dict[str, Any]:
    """Let Pellucid and the peer take turns, and return the comparison with the answers and the peak memory of both.

    Raises:
        MissingError: The peer is not installed, or its setup is not known.
    """
    work, peer_name, settings, goal = comparison
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = stack.enter_context(Contender(work, peer_name, settings, folder))
        pellucid = stack.enter_context(Contender(work, "pellucid", settings, folder))
        warm_up = 0 if work == "job" else WARM_UP
        turns = [(pellucid.take_turn(), peer.take_turn()) for _ in range(warm_up + repeats)]
        check_same_work(comparison, pellucid, peer, turns)
        peaks = pellucid.close()["peak_gb"], peer.close()["peak_gb"]
    return {"work": work, "peer": peer_name, "goal": goal, **settings, "turns": turns[warm_up:], "peaks": peaks}


def check_same_work(comparison: Comparison, pellucid: Contender, peer: Contender, turns: Turns) -> None:
    """Raise SystemExit if the dtypes or the numbers of tokens differ."""
    dtypes = {each.info.get("dtype") for each in (pellucid, peer)}
    tokens = {answer.get("tokens") for pair in turns for answer in pair}
    if len(dtypes) > 1 or len(tokens) > 1:
        raise SystemExit(f"{comparison.peer} did other work than Pellucid: {dtypes}, {tokens} tokens")


def compute_ratio(turns: Turns, key: str, work: str = "") -> float:
    """Return the peer's time divided by Pellucid's: the median over turns, or the ratio of the sums for the job."""
    if work == "job":
        pellucid, peer = (sum(pair[i][key] for pair in turns) for i in (0, 1))
        return peer / pellucid
    return median(peer[key] / pellucid[key] for pellucid, peer in turns)


def make_row(result: dict[str, Any]) -> str:
    turns, work = result["turns"], result["work"]
    pellucid, peer = ((sum if work == "job" else median)(pair[i]["seconds"] for pair in turns) for i in (0, 1))
    cells = [
        result["peer"],
        f"{result['prompts']}x{result['group']}, {result['tokens']} tokens",
        f"{pellucid:.2f}",
        f"{peer:.2f}",
        f"**{compute_ratio(turns, 'seconds', work):.2f}x**",
        f"{result['goal']}x" if result["goal"] else "",
    ]
    if work == "sample":
        tokens = result["prompts"] * result["group"] * result["tokens"]
        cells += [f"{tokens / pellucid:.0f}", f"{tokens / peer:.0f}"]
    else:
        cells += [f"{compute_ratio(turns, part, work):.2f}x" for part in ("generate", "update")]
    if work == "job":
        cells += [f"{fmean(pair[i]['reward'] for pair in turns[-LAST_STEPS:]):.2f}" for i in (0, 1)]
    pellucid_gb, peer_gb = result["peaks"]
    return f"| {' | '.join(cells)} | {pellucid_gb:.1f} | {peer_gb:.1f} | {pellucid_gb / peer_gb:.2f}x |"


def make_heading(work: str) -> str:
    middle = {
        "sample": ["our tokens/s", "theirs"],
        "step": ["sampling", "update"],
        "job": ["sampling", "update", "our reward at the end", "theirs"],
    }[work]
    cells = ["peer", "work", "ours, s", "theirs, s", "faster", "goal", *middle, "our GB", "theirs", "ratio"]
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--peers", nargs="+", metavar="PEER", help="only these peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--job-steps", type=int, default=JOB_STEPS, help="steps of the main job")
    parser.add_argument("--tokens", type=int, help="tokens of each completion, instead of those of the tables")
    parser.add_argument("--into", type=Path, default=HERE / "results.jsonl", help="a file that results are appended to")
    options = parser.parse_args()
    if unknown := set(options.tables) - TABLES.keys():
        parser.error(f"there is no table {sorted(unknown)[0]}; there are {', '.join(TABLES)}")
    for name in options.tables or TABLES:
        comparisons = [each for each in TABLES[name] if each.peer in (options.peers or [each.peer])]
        if comparisons:
            print(f"\n### {name}\n\n{make_heading(comparisons[0].work)}", flush=True)
        for comparison in comparisons:
            print_row(name, comparison, options)


def print_row(table: str, comparison: Comparison, options: argparse.Namespace) -> None:
    """Run a comparison, print its row, and append its result to the file."""
    if options.tokens:
        comparison = comparison._replace(settings=comparison.settings | {"tokens": options.tokens})
    try:
        result = compare(comparison, options.job_steps if comparison.work == "job" else options.repeats)
    except MissingError as missing:
        print(f"| {comparison.peer} | {missing} |", flush=True)
        return
    print(make_row(result), flush=True)
    append_row(options.into, {"table": table} | collect_metadata() | result)


def collect_metadata() -> dict[str, str]:
    """Return the commit, date, processor and Python version of a measurement."""
    return {
        "commit": read_commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": hardware.get_cpu_name(),
        "python": platform.python_version(),
    }


def read_commit() -> str:
    """Return the short hash of the current commit, or an empty string outside of a git repository."""
    done = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def append_row(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
