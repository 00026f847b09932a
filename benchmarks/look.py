"""What the page of the microscope costs for a run of many steps: seconds and memory of its answers, bytes of the file.

python benchmarks/look.py RUN --steps 10000 --groups 1

The steps that RUN recorded are told again and again under new numbers, with what was said in them, until there are so
many, each with its first groups; they are written by what writes them in a run.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from pellucid.inspect import single_file
from pellucid.inspect.run_reader import STEPS_PER_PAGE, RunReader
from pellucid.inspect.server import InspectServer
from pellucid.reporting import token_files
from pellucid.reporting.run_files import read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--groups", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "run"
        written = repeated(options.run, long, options.steps, options.groups)
        print(f"{options.steps} steps, {written / options.steps:.0f} tokens in each, {megabytes(long):.0f} MB of files")
        print("\n| answer | s | again, s | KB |\n|---|---|---|---|")
        for line in answers(long):
            print(line)
        print(f"\nmemory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB at most")
        page, start = Path(folder) / "page.html", time.perf_counter()
        left_out = single_file.write_page([RunReader(long)], page)
        print(f"--output: {page.stat().st_size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s. {left_out}")
        print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB at most")


def repeated(run: Path, long: Path, steps: int, groups: int) -> int:
    """Write the longer run. Returns how many tokens it has."""
    long.mkdir()
    (long / "config.json").write_bytes((run / "config.json").read_bytes())
    (long / "evals.jsonl").touch()
    there = token_files.list_recorded_steps(run)
    tables = {step: token_files.read_tokens(run, step) for step in there}
    tables = {step: table.filter(pc.field("group") < groups) for step, table in tables.items()}
    rows = {step: (table.to_pydict(), token_files.get_token_metadata(table)) for step, table in tables.items()}
    metrics = {row["step"]: row for row in read_records(run / "metrics.jsonl")}
    said = {step: list(of_groups(RunReader(run), step, groups)) for step in there}
    written = 0
    with (long / "metrics.jsonl").open("w") as curves, (long / "rollouts.jsonl").open("w") as rollouts:
        for step in range(1, steps + 1):
            source = there[(step - 1) % len(there)]
            columns, about = rows[source]
            count = len(columns["step"])
            token_files.write_tokens(long, step, {**columns, "step": [step] * count}, {**about, "step": step})
            written += count
            curves.write(json.dumps({**metrics[source], "step": step}) + "\n")
            rollouts.writelines(json.dumps({**line, "step": step}) + "\n" for line in said[source])
    return written


def of_groups(run: RunReader, step: int, groups: int) -> Iterator[dict[str, Any]]:
    for group in run.rollouts.read_groups(step)[:groups]:
        yield from ({"step": step, **{name: value for name, value in row.items() if name != "step"}} for row in group)


def answers(folder: Path) -> Iterator[str]:
    """What the page asks for, each the first time and again, by a server that has just started."""
    with InspectServer([RunReader(folder)], 0) as server:
        run = server.runs[0]
        last = run.list_steps()[-1]
        keys = [
            "overview",
            f"summaries/{last // STEPS_PER_PAGE}",
            f"tokens/{last}",
            "summaries/0",
            "why",
            "pulse",
            "questions",
        ]
        yield from map(partial(timed, server), keys)
        often = run.answer("questions")
        if often:
            yield timed(server, f"question/{often[0]['question']}")


def timed(server: InspectServer, key: str) -> str:
    seconds, text = [], ""
    for _ in range(2):
        start = time.perf_counter()
        text = server.answer(f"0/{key}")
        seconds.append(f"{time.perf_counter() - start:.3f}")
    return f"| {key} | {' | '.join(seconds)} | {len(text) / 1e3:.0f} |"


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    main()
