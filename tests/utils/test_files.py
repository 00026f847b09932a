"""Tests of bounded logs, which keep lines that other processes append during a cut, and of lock files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pellucid.utils.files import BoundedLog


class LateWriter(io.BufferedRandom):
    """A file to which another process appends a line as soon as its end has been cut off."""

    path: Path

    def truncate(self, size=None):
        size = super().truncate(size)
        with self.path.open("ab") as file:
            file.write(b"late\n" * 3)
        return size


def test_lines_appended_during_a_cut_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "rewards.log"
    path.write_bytes(b"line\n" * 400)
    opened = Path.open

    def opens(self, mode="r", *about, **more):
        if mode != "r+b":
            return opened(self, mode, *about, **more)
        file = LateWriter(io.FileIO(self, mode))
        file.path = self
        return file

    monkeypatch.setattr(Path, "open", opens)
    BoundedLog(path, 1000, interval_seconds=60).close()
    text = path.read_text()
    assert text.count("late\n") == 3
    assert text.count("[left out") == 1
    assert text.endswith("line\n" * 40)


@pytest.mark.parametrize("content", ["", "who knows"])
def test_lock_file_without_a_process_id_names_another_process(tmp_path, content):
    from pellucid.utils.files import describe_lock_holder  # noqa: PLC0415

    path = tmp_path / ".lock"
    path.write_text(content)
    with path.open() as file:
        assert describe_lock_holder(file, "writes").startswith("another process writes: wait")
