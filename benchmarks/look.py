"""Measures `pellucid inspect` on a run of many steps: time and memory of its answers, and size of its page.

    python benchmarks/look.py RUN --steps 10000 --groups 1

The long run repeats the recorded steps and rollouts of RUN under new step numbers, each with its first groups. It is
written by the same functions as a real run.
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
        tokens = write_long_run(options.run, long, options.steps, options.groups)
        print(f"{options.steps} steps, {tokens / options.steps:.0f} tokens each, {compute_size(long):.0f} MB of files")
        print("\n| answer | s | again, s | KB |\n|---|---|---|---|")
        for line in time_answers(long):
            print(line)
        print(f"\npeak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")
        page, start = Path(folder) / "page.html", time.perf_counter()
        left_out = single_file.write_page([RunReader(long)], page)
        print(f"--output: {page.stat().st_size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s. {left_out}")
        print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


def write_long_run(run: Path, long: Path, steps: int, groups: int) -> int:
    """Write the long run and return the number of its tokens."""
    long.mkdir()
    (long / "config.json").write_bytes((run / "config.json").read_bytes())
    (long / "evals.jsonl").touch()
    sources = token_files.list_recorded_steps(run)
    tables = {step: token_files.read_tokens(run, step) for step in sources}
    tables = {step: table.filter(pc.field("group") < groups) for step, table in tables.items()}
    rows = {step: (table.to_pydict(), token_files.get_token_metadata(table)) for step, table in tables.items()}
    metrics = {row["step"]: row for row in read_records(run / "metrics.jsonl")}
    rollouts = {step: list(read_rollouts(RunReader(run), step, groups)) for step in sources}
    tokens = 0
    with (long / "metrics.jsonl").open("w") as metrics_file, (long / "rollouts.jsonl").open("w") as rollouts_file:
        for step in range(1, steps + 1):
            source = sources[(step - 1) % len(sources)]
            columns, metadata = rows[source]
            count = len(columns["step"])
            token_files.write_tokens(long, step, {**columns, "step": [step] * count}, {**metadata, "step": step})
            tokens += count
            metrics_file.write(json.dumps({**metrics[source], "step": step}) + "\n")
            rollouts_file.writelines(json.dumps({**rollout, "step": step}) + "\n" for rollout in rollouts[source])
    return tokens


def read_rollouts(run: RunReader, step: int, groups: int) -> Iterator[dict[str, Any]]:
    for group in run.rollouts.read_groups(step)[:groups]:
        yield from ({"step": step, **{name: value for name, value in row.items() if name != "step"}} for row in group)


def time_answers(folder: Path) -> Iterator[str]:
    """Yield a table row for each request of the page, as answered by a new server."""
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
        yield from map(partial(time_answer, server), keys)
        questions = run.answer("questions")
        if questions:
            yield time_answer(server, f"question/{questions[0]['question']}")


def time_answer(server: InspectServer, key: str) -> str:
    """Request an answer twice. The second may come from a cache."""
    seconds, text = [], ""
    for _ in range(2):
        start = time.perf_counter()
        text = server.answer(f"0/{key}")
        seconds.append(f"{time.perf_counter() - start:.3f}")
    return f"| {key} | {' | '.join(seconds)} | {len(text) / 1e3:.0f} |"


def compute_size(folder: Path) -> float:
    """Return the MB of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    main()
