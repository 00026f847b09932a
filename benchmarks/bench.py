"""Ours against TRL, generate(), vLLM and llama.cpp: the same model, prompts, lengths and threads, turn by turn.

    python benchmarks/bench.py                 every table
    python benchmarks/bench.py step-64 vllm-64  some of them

Two contenders at a time each in a process of its own; while one works the other waits. Two turns each to warm up, then
--repeats that count. Medians; a ratio is the median of the ratios of neighbouring turns. The main job learns, and its
steps change: there the first sixteen all count, and what is told is their sum. benchmarks/README.md holds the last
output, benchmarks/results.jsonl the single figures.
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
"""Pairs of what ours and the peer told of a turn."""
WARM_UP, OF_JOB = 2, 16
LAST = 4
"""Steps of the job whose mean reward tells what was learnt."""


class Duel(NamedTuple):
    work: str
    peer: str
    settings: Settings
    goal: float | None = None
    """Ratio that is aimed for: how many times faster than the peer."""


def steps(tokens: int, lora: int = 0, **goals: float | None) -> list[Duel]:
    """lora: the rank of an adapter that ours, and TRL through peft, train in place of whole weights."""
    settings: Settings = {"tokens": tokens, "prompts": 4, "group": 8} | ({"lora": lora} if lora else {})
    return [Duel("step", peer.replace("_", "-"), settings, goal) for peer, goal in goals.items()]


def sample(peer: str, prompts: int, group: int, tokens: int, goal: float | None) -> Duel:
    return Duel("sample", peer, {"tokens": tokens, "prompts": prompts, "group": group}, goal)


def job(peer: str) -> Duel:
    return Duel("job", peer, {"tokens": 24, "prompts": 4, "group": 16})


BEST = {"trl_best_bf16": None, "trl_best_autocast": None}
TABLES = {
    "step-64": steps(64, trl_bf16=4.0, trl_autocast=5.0, trl_fp32=None, **BEST, trl_as_it_comes=None),
    "step-256": steps(256, trl_bf16=4.0, trl_autocast=5.0, **BEST),
    "lora": steps(64, 16, whole_weights=None, transformers=None, trl_bf16=4.0, trl_autocast=5.0),
    "job": [job(f"trl-{kind}") for kind in ("bf16", "autocast", "best-bf16", "best-autocast", "as-it-comes")],
    "generate": [sample("generate", 4, 8, 64, 2.4), sample("generate", 1, 32, 64, 2.4)],
    **{
        f"{peer}-{tokens}": [sample(mode, 4, 8, tokens, goal) for mode in modes]
        for tokens in (64, 256)
        for peer, modes, goal in (
            ("vllm", ("vllm-compiled", "vllm-eager"), 1.3),
            ("llama", ("llama-server",), None),
        )
    },
}


def fight(duel: Duel, repeats: int, contender: type[Contender] = Contender) -> dict[str, Any]:
    """MissingError where the peer is not there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        theirs = stack.enter_context(contender(duel.work, duel.peer, duel.settings, folder))
        ours = stack.enter_context(contender(duel.work, "pellucid", duel.settings, folder))
        before = 0 if duel.work == "job" else WARM_UP
        turns = [(ours.turn(), theirs.turn()) for _ in range(before + repeats)]
        check_same_work(duel, ours, theirs, turns)
        peaks = ours.close()["peak_gb"], theirs.close()["peak_gb"]
    result = {"work": duel.work, "peer": duel.peer, "goal": duel.goal, **duel.settings}
    return {**result, "turns": turns[before:], "peaks": peaks}


def check_same_work(duel: Duel, ours: Contender, theirs: Contender, turns: Turns) -> None:
    """The same format of numbers, and as many tokens."""
    dtypes = {each.facts.get("dtype") for each in (ours, theirs)}
    tokens = {turn.get("tokens") for pair in turns for turn in pair}
    if len(dtypes) > 1 or len(tokens) > 1:
        raise SystemExit(f"{duel.peer} did other work than ours: {dtypes}, {tokens} tokens")


def ratio(turns: Turns, what: str, work: str = "") -> float:
    if work == "job":
        ours, theirs = (sum(pair[i][what] for pair in turns) for i in (0, 1))
        return theirs / ours
    return median(theirs[what] / ours[what] for ours, theirs in turns)


def row_of(result: dict[str, Any]) -> str:
    turns, work = result["turns"], result["work"]
    ours, theirs = ((sum if work == "job" else median)(pair[i]["seconds"] for pair in turns) for i in (0, 1))
    cells = [
        result["peer"],
        f"{result['prompts']}x{result['group']}, {result['tokens']} tokens",
        f"{ours:.2f}",
        f"{theirs:.2f}",
        f"**{ratio(turns, 'seconds', work):.2f}x**",
        f"{result['goal']}x" if result["goal"] else "",
    ]
    if work == "sample":
        tokens = result["prompts"] * result["group"] * result["tokens"]
        cells += [f"{tokens / ours:.0f}", f"{tokens / theirs:.0f}"]
    else:
        cells += [f"{ratio(turns, part, work):.2f}x" for part in ("generate", "update")]
    if work == "job":
        cells += [f"{fmean(pair[i]['reward'] for pair in turns[-LAST:]):.2f}" for i in (0, 1)]
    ours_gb, theirs_gb = result["peaks"]
    return f"| {' | '.join(cells)} | {ours_gb:.1f} | {theirs_gb:.1f} | {ours_gb / theirs_gb:.2f}x |"


def heading(work: str) -> str:
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
    parser.add_argument("--peers", nargs="+", metavar="PEER", help="these only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--job-steps", type=int, default=OF_JOB, help="steps of the main job")
    parser.add_argument("--tokens", type=int, help="of each completion, in place of what the tables have")
    parser.add_argument("--into", type=Path, default=HERE / "results.jsonl", help="where single figures are added")
    options = parser.parse_args()
    if unknown := set(options.tables) - TABLES.keys():
        parser.error(f"there is no table {sorted(unknown)[0]}; there are {', '.join(TABLES)}")
    for name in options.tables or TABLES:
        duels = [duel for duel in TABLES[name] if duel.peer in (options.peers or [duel.peer])]
        print(*([f"\n### {name}\n\n{heading(duels[0].work)}"] if duels else []), flush=True)
        for duel in duels:
            tell(name, duel, options)


def tell(table: str, duel: Duel, options: argparse.Namespace) -> None:
    if options.tokens:
        duel = duel._replace(settings=duel.settings | {"tokens": options.tokens})
    try:
        result = fight(duel, options.job_steps if duel.work == "job" else options.repeats)
    except MissingError as missing:
        print(f"| {duel.peer} | {missing} |", flush=True)
        return
    print(row_of(result), flush=True)
    record(options.into, {"table": table} | facts() | result)


def facts() -> dict[str, str]:
    """Of which commit a figure is, from when, and where."""
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": hardware.get_cpu_name(),
        "python": platform.python_version(),
    }


def commit() -> str:
    told = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def record(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
