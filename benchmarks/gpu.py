"""Measures everything that needs a GPU in less than eight minutes, on a machine with one GPU and no network.

    python benchmarks/gpu.py --output gpu.jsonl                       all rows, the most valuable first
    python benchmarks/gpu.py --only kernels-0.5B tests --output gpu.jsonl
    python benchmarks/gpu.py --table gpu.jsonl > gpu.md               tables, on any machine, afterwards
    python benchmarks/gpu.py --simulated                              all rows, tiny, on the simulated GPU of the tests

One process imports the libraries without using the GPU, and each row runs in a fork of it. A row writes each finding as
a line of JSON at once. If a row fails or takes longer than --limit, a line says so, the end of its log goes to stderr,
the other rows still run, and the exit status is 1. When the seconds of --within are over, the remaining rows are
skipped, with a line for each.

benchmarks/README.md lists the rows, and says what a bare machine needs besides torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # checks for a GPU without using it
if "--simulated" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it while it is imported

import psutil
import torch
from bench import read_commit

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
MODULES = (
    "pellucid.training.run",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
)
PEER_MODULES = ("datasets", "trl.trainer.grpo_trainer")
LOG_LINES = 60
"""Lines of the log of a failed row that go to stderr."""
LEAST_SECONDS = 5.0
"""The time that must be left for a row to start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows, in this order")
    parser.add_argument("--output", type=Path, help="also write the findings to this file")
    parser.add_argument("--simulated", action="store_true", help="run tiny rows on a simulated GPU")
    parser.add_argument("--limit", type=float, default=130.0, help="seconds that a row may take")
    parser.add_argument("--within", type=float, default=450.0, help="seconds for everything, imports included")
    parser.add_argument("--table", type=Path, metavar="FINDINGS", help="print the tables of a file of findings")
    options = parser.parse_args()
    if options.table:
        print(make_tables(map(json.loads, options.table.read_text().splitlines())))
        return
    if not options.simulated and not torch.cuda.is_available():
        parser.error("no GPU is available; --simulated runs the same rows on a simulated one")
    deadline = time.monotonic() + options.within - (time.time() - psutil.Process().create_time())
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        if options.simulated:
            pretend_gpu(Path(folder))
        preload()
        rows = importlib.import_module("gpu_rows").make_rows(options.simulated)
        if unknown := set(options.only or ()) - rows.keys():
            parser.error(f"there is no row {sorted(unknown)[0]}; the rows are {', '.join(rows)}")
        report = Report(options.output)
        report.add("facts", **describe_versions(options.simulated))
        for name in options.only or rows:
            run_row(name, rows[name], Path(folder), report, options.limit, deadline)
    sys.exit(1 if report.has_fault else 0)


class Report:
    """Writes findings as lines of JSON to stdout and to a file."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.has_fault = path, False
        self.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        if path:
            path.write_text("")

    def add(self, row: str, **finding: Any) -> None:
        self.has_fault |= "fault" in finding
        line = json.dumps({"row": row, **finding})
        print(line, file=self.stdout, flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(f"{line}\n")


def pretend_gpu(folder: Path) -> None:
    """Make torch accept tensors on cuda:0, for all modules that are imported from now on."""
    pretended_cuda = importlib.import_module("pretended_cuda")
    library = pretended_cuda.compile_library(folder)
    if library is None:
        raise SystemExit("--simulated needs g++, and a torch without CUDA that has its headers")
    os.environ[pretended_cuda.LIBRARY_VARIABLE] = str(library)
    importlib.import_module("simulated_device")


def preload() -> None:
    """Import what the rows need, without using the GPU."""
    torch.set_num_threads(1)  # threads do not survive a fork
    for name in MODULES:
        importlib.import_module(name)
    with suppress(ModuleNotFoundError):
        for name in PEER_MODULES:
            importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise SystemExit("a library used CUDA while it was imported: rows cannot be forked from this process")


def describe_versions(simulated: bool) -> dict[str, str]:
    versions = {}
    for name in ("torch", "triton", "transformers", "trl"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = "simulated: seconds and bytes are not those of a GPU" if simulated else f"CUDA {torch.version.cuda}"
    return {"commit": read_commit() or "unknown", "date": str(date.today()), "on": device, **versions}


# ---------------------------------------------------------------- rows


def run_row(name: str, work: Any, folder: Path, report: Report, limit: float, deadline: float) -> None:
    """Run a row in a fork until it ends, or stop it at its limit or at the deadline, on the monotonic clock."""
    start = time.monotonic()
    seconds = min(limit, deadline - start)
    if seconds < LEAST_SECONDS:
        report.add(name, left_out="no time was left")
        return
    log = folder / f"{name}.log"
    process = multiprocessing.get_context("fork").Process(target=run_in_fork, args=(name, work, folder, report, log))
    process.start()
    process.join(seconds)
    fault = f"not done after {seconds:.0f} s" if process.is_alive() else ""
    if fault:
        fork = psutil.Process(process.pid)
        for each in (*fork.children(recursive=True), fork):
            each.kill()
    process.join()
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if not fault and process.exitcode:
        fault = find_error(lines)
    finding = {"fault": fault} if fault else {}
    if fault:
        print("\n".join([f"--- {name}", *lines[-LOG_LINES:]]), file=sys.stderr, flush=True)
    report.add(name, **finding, row_seconds=round(time.monotonic() - start, 1))


def run_in_fork(name: str, work: Any, folder: Path, report: Report, log: Path) -> None:
    """Run a row. All that this process and its children print goes to the log."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.modules["__main__"] = ModuleType("__main__")  # spawned reward workers must not import this script
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    status = 1
    try:
        work(folder, lambda **finding: report.add(name, **finding))
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # does not wait for threads and atexit functions of libraries


def find_error(lines: Iterable[str]) -> str:
    """Return the first error in a log, since later ones follow from it; without one, return the last line."""
    error = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b(?!.*most recent call last)")
    stripped = [line.strip() for line in lines if line.strip()]
    return next((line for line in stripped if error.match(line)), stripped[-1] if stripped else "no output")[:200]


# ---------------------------------------------------------------- tables


def make_tables(findings: Iterable[dict[str, Any]]) -> str:
    """Return a table for each kind of finding. Findings of a kind have the same keys."""
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for finding in findings:
        tables.setdefault(tuple(finding), []).append(finding)
    parts = []
    for keys, rows in tables.items():
        cells = [" | ".join(format_cell(row[key]) for key in keys) for row in rows]
        parts.append(
            "\n".join([f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}", *(f"| {cell} |" for cell in cells)])
        )
    return "\n\n".join(parts)


def format_cell(value: Any) -> str:
    if isinstance(value, list):
        return "<br>".join(" ".join(map(str, each)) if isinstance(each, list) else str(each) for each in value)
    return str(value).replace("|", "/")


if __name__ == "__main__":
    main()
