"""Measures the resident memory and the time that a data set takes.

    python benchmarks/data_memory.py [MB] [SUFFIX]

Prints the rows and the size of the file, then the growth of this process and the seconds for both splits.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from pellucid.tasks.dataset import Dataset

SENTENCE = "A shop sells pens in boxes of twelve, and somebody buys some of them. How many pens are there? "


def write_rows(path: Path, megabytes: int) -> int:
    """Write rows of about 330 bytes, and return their number."""
    n = 0
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        if path.suffix == ".csv":
            table.writerow(["question", "answer"])
        while n % 1000 or file.tell() < megabytes * 10**6:
            row = {"question": f"{n} {SENTENCE * 3}", "answer": f"#### {n * 12}"}
            table.writerow(row.values()) if path.suffix == ".csv" else file.write(json.dumps(row) + "\n")
            n += 1
    return n


def main(megabytes: int = 41, suffix: str = ".jsonl") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{suffix}"
        n = write_rows(path, megabytes)
        process, start = psutil.Process(), time.monotonic()
        before = process.memory_info().rss
        for split in ("train", "test"):
            Dataset(data=str(path), answer_pattern="#### (.+)", split=split).sample(0, 4)
        growth = (process.memory_info().rss - before) / 1e6
        print(f"{n} rows, {path.stat().st_size / 1e6:.0f} MB: {growth:.0f} MB, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
