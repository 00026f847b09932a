"""All that only a GPU can show, as one table: for a machine with one GPU and no network, and some nine minutes.

    python benchmarks/gpu.py --output gpu.md
    python benchmarks/gpu.py --only device resume kernels
    python benchmarks/gpu.py --simulated         without a GPU: the same rows, tiny, on what stands in for one

Each row runs in a process of its own. One that fails or takes too long is a line of the table, with the end of its log
on stderr; the others run all the same, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from bench import commit
from gpu_place import Apart, Place
from gpu_rows import ROWS, Outcome

LIBRARIES = ("torch", "transformers", "trl")
LAST = 60
"""Lines of the log of a row that failed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--output", type=Path, help="write the table there, too")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count, of each contender")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a row may take")
    options = parser.parse_args()
    if not options.simulated and not torch.cuda.is_available():
        parser.error("there is no GPU here; --simulated runs the same rows on what stands in for one")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.simulated, options.repeats)
        failed = run(place, options)
    sys.exit(1 if failed else 0)


def run(place: Place, options: argparse.Namespace) -> bool:
    """Print the table, a line as soon as it is known. Whether a row failed."""
    lines: list[str] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if options.output:  # whole after each row: whoever ends this loses only the rows that are missing
            options.output.write_text("\n".join(lines) + "\n")

    tell(f"{heading(place)}\n\n| row | on | result | verdict | s |\n|---|---|---|---|---|")
    gpu, failed = "" if place.simulated else torch.cuda.get_device_name(), False
    if place.simulated:
        preload()
    for name in options.only:
        start = time.perf_counter()
        outcome = outcome_of(place, name, options.limit)
        failed |= outcome.verdict.startswith("fail")
        on = gpu or ROWS[name].stands_in
        result, verdict = (text.replace("|", "/") for text in outcome)
        tell(f"| {name} | {on} | {result} | {verdict} | {time.perf_counter() - start:.0f} |")
    return failed


def heading(place: Place) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    what = f"Commit {commit() or 'unknown'}, {date.today()}, {versions}."
    if place.simulated:
        return f"{what} Simulated, there is no GPU here: seconds, GB and ratios below say nothing of one."
    gpu = torch.cuda.get_device_properties(0)
    return f"{what} {gpu.name}, {gpu.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}."


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def preload() -> None:
    """Import what the rows need, once for all of them: simulated, they are copies of this process."""
    for name in ("datasets", "trl.trainer.grpo_trainer", "pellucid.training.run"):
        importlib.import_module(name)


def outcome_of(place: Place, name: str, limit: float) -> Outcome:
    log = place.folder / f"{name}.log"
    row = Apart(place.beginning, ROWS[name].work, (place,), log)
    try:
        result, reason = row.result(limit), ""
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
