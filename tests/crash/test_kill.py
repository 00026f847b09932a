"""Test one run that is killed while it saves and, after a resume, while it updates: the short form of `kill.py`."""

from __future__ import annotations

import random

import kill
import pytest
from launch import MARKS

from forked import Forked


def begun(command, **settings):
    """Run `python -m pellucid ...` in a fork."""
    assert command[1:3] == ["-m", "pellucid"]
    return Forked(MARKS / "marked.py", *command[3:], **settings)


@pytest.mark.slow
def test_run_killed_twice_gives_identical_results(tmp_path):
    row = kill.trial("replay", tmp_path, 2, random.Random(50), ("save", "update"), begin=begun)
    assert row.wrong == []
    assert len(row.resumed) == 2
    assert not {"start", str(kill.STEPS)} & set(row.resumed), "in its midst"
