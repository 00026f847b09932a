"""Ours against TRL, generate() and vLLM: the same model, prompts, lengths, threads and allocator, turn by turn.

    python benchmarks/bench.py                 every table
    python benchmarks/bench.py step-64 vllm-64  some of them

Two contenders at a time each in a process of its own; while one works the other waits. Two turns each to warm up, then
--repeats that count. Medians; a ratio is the median of the ratios of neighbouring turns. benchmarks/README.md holds the
last output, benchmarks/results.jsonl the single figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pellucid.machine import hardware
from pellucid.policy.pretrained import locate
from pellucid.tasks.arithmetic import Arithmetic

HERE = Path(__file__).parent
VLLM = Path(os.environ.get("PELLUCID_VLLM", ".venv-vllm")) / "bin" / "python"
# What performance guides tell users of peers to set; ours sets its own.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "500000000"}
WARM_UP = 2


class Duel(NamedTuple):
    work: str
    peer: str
    settings: dict[str, int | str]
    goal: float | None
    """Ratio that is aimed for: how many times faster than the peer."""


def step(peer: str, tokens: int, goal: float | None = None) -> Duel:
    return Duel("step", peer, {"tokens": tokens, "prompts": 4, "group": 8}, goal)


def sample(peer: str, prompts: int, group: int, tokens: int, goal: float) -> Duel:
    return Duel("sample", peer, {"tokens": tokens, "prompts": prompts, "group": group}, goal)


TABLES = {
    "step-64": [step("trl-bf16", 64, 4.0), step("trl-autocast", 64, 5.0), step("trl-fp32", 64)],
    "step-256": [step("trl-bf16", 256, 4.0), step("trl-autocast", 256, 5.0)],
    "generate": [sample("generate", 4, 8, 64, 2.4), sample("generate", 1, 32, 64, 2.4)],
    "vllm-64": [sample("vllm-compiled", 4, 8, 64, 1.3), sample("vllm-eager", 4, 8, 64, 1.3)],
    "vllm-256": [sample("vllm-compiled", 4, 8, 256, 1.3), sample("vllm-eager", 4, 8, 256, 1.3)],
}


class Contender:
    """A process that does one unit of work for every line it is sent."""

    def __init__(self, work: str, name: str, settings: dict[str, int | str], folder: Path) -> None:
        self.name = name
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        command = [sys.executable, HERE / "contenders.py", work, name, *arguments]
        if name.startswith("vllm"):
            chats = folder / "chats.json"
            task, prompts = Arithmetic(digits=2, operators=("+", "-")), settings["prompts"]
            chats.write_text(
                json.dumps([[[dict(m) for m in p.text] for p in task.sample(i, prompts)] for i in range(50)])
            )
            own = [f"--{key}={settings[key]}" for key in ("tokens", "group")]
            command = [VLLM, HERE / "contender_vllm.py", work, name, "--model", locate("smollm2-135m"), *own]
            command += ["--chats", chats]
        self.log = (folder / f"{name}.log").open("w+")
        self.process = self.started([str(part) for part in command])
        self._answer()

    def started(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | ALLOCATOR,
        )

    def turn(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        answer = self._answer()
        self.process.wait()
        return answer

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} ended early:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()


def fight(duel: Duel, repeats: int, contender: type[Contender] = Contender) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = stack.enter_context(contender(duel.work, "pellucid", duel.settings, folder))
        theirs = stack.enter_context(contender(duel.work, duel.peer, duel.settings, folder))
        turns = [(ours.turn(), theirs.turn()) for _ in range(WARM_UP + repeats)][WARM_UP:]
        peaks = ours.close()["peak_gb"], theirs.close()["peak_gb"]
    return {"peer": duel.peer, "goal": duel.goal, **duel.settings, "turns": turns, "peaks": peaks}


def ratio(turns: list[tuple[dict[str, float], dict[str, float]]], what: str) -> float:
    return median(theirs[what] / ours[what] for ours, theirs in turns)


def row_of(result: dict[str, Any]) -> str:
    turns = result["turns"]
    ours, theirs = (median(pair[i]["seconds"] for pair in turns) for i in (0, 1))
    cells = [
        result["peer"],
        f"{result['prompts']}x{result['group']}, {result['tokens']} tokens",
        f"{ours:.2f}",
        f"{theirs:.2f}",
        f"**{ratio(turns, 'seconds'):.2f}x**",
        f"{result['goal']}x" if result["goal"] else "",
    ]
    if "update" in turns[0][0]:
        cells += [f"{ratio(turns, 'generate'):.2f}x", f"{ratio(turns, 'update'):.2f}x"]
    else:
        tokens = result["prompts"] * result["group"] * result["tokens"]
        cells += [f"{tokens / ours:.0f}", f"{tokens / theirs:.0f}"]
    ours_gb, theirs_gb = result["peaks"]
    return f"| {' | '.join(cells)} | {ours_gb:.1f} | {theirs_gb:.1f} | {ours_gb / theirs_gb:.2f}x |"


def heading(name: str) -> str:
    last = ["sampling", "update"] if name.startswith("step") else ["our tokens/s", "theirs"]
    cells = ["peer", "work", "ours, s", "theirs, s", "faster", "goal", *last, "our GB", "theirs", "ratio"]
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=[], help=", ".join(TABLES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    names = options.tables or list(TABLES)
    for name in names:
        print(f"\n### {name}\n\n{heading(name)}", flush=True)
        for duel in TABLES[name]:
            result = fight(duel, options.repeats)
            print(row_of(result), flush=True)
            record(name, result)


def commit() -> str:
    told = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def record(table: str, result: dict[str, Any]) -> None:
    path = HERE / "results.jsonl"
    facts = {
        "table": table,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": hardware.cpu_name(),
        "python": platform.python_version(),
    }
    with path.open("a") as file:
        file.write(json.dumps(facts | result) + "\n")


if __name__ == "__main__":
    main()
