"""The short form of `kill.py`: one run, killed while it saves and, resumed, while it updates."""

from __future__ import annotations

import random

import kill
import pytest
from launch import MARKS

from forked import Forked


def begun(command, **settings):
    """As `python -m pellucid ...`, forked."""
    assert command[1:3] == ["-m", "pellucid"]
    return Forked(MARKS / "marked.py", *command[3:], **settings)


@pytest.mark.slow
def test_a_run_killed_twice_comes_to_the_same_bits(tmp_path):
    row = kill.trial("replay", tmp_path, 2, random.Random(50), ("save", "update"), begin=begun)
    assert row.wrong == []
    assert len(row.resumed) == 2
    assert not {"start", str(kill.STEPS)} & set(row.resumed), "in its midst"
