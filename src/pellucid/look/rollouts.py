"""rollouts.jsonl by its steps: where each begins is found once, and what is written later is found when it is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pellucid.reporting.run_folder import Record, parsed

STEP = re.compile(rb' *\{"step": (\d+)[,}]')
BLOCK = 1 << 24
"""Bytes that are read at a time."""


class Rollouts:
    """The groups of the steps of a file that may be larger than memory, and may grow.

    size: of a group, where it is known: neighbours may have one id.
    """

    def __init__(self, path: Path, group_size: int = 0):
        self.path, self.group_size = path, group_size
        self.byte_ranges: dict[int, tuple[int, int]] = {}
        """Of each step its first byte and the byte after its last one."""
        self.indexed_bytes = 0

    def locate_steps(self) -> Mapping[int, tuple[int, int]]:
        """Where the steps lie by now. A file that has become shorter, as at a resume, is read anew."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.indexed_bytes:
            self.byte_ranges, self.indexed_bytes = {}, 0
        if size > self.indexed_bytes:
            self.index_new_lines()
        return self.byte_ranges

    def index_new_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.indexed_bytes)
            for lines in iter(lambda: file.readlines(BLOCK), []):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return  # half-written: the next time reads it whole
                    end = self.indexed_bytes + len(line)
                    if found := STEP.match(line):
                        step = int(found[1])
                        self.byte_ranges[step] = self.byte_ranges.get(step, (self.indexed_bytes, end))[0], end
                    self.indexed_bytes = end

    def read_groups(self, step: int) -> list[list[Record]]:
        """The groups of a step, each the records of its completions; none where they were not written."""
        if step not in self.locate_steps():
            return []
        start, end = self.byte_ranges[step]
        with self.path.open("rb") as file:
            file.seek(start)
            text = file.read(end - start).decode("utf-8", "replace")
        groups: list[list[Record]] = []
        for record in parsed(text.splitlines()):
            if record.get("step") != step:
                continue
            last = groups[-1] if groups else []
            if not last or last[0].get("id") != record.get("id") or len(last) == self.group_size:
                groups.append([])
            groups[-1].append(record)
        return groups
