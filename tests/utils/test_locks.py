"""Tests of file locks: errors name the process that holds a lock, and its death releases the lock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pellucid.types import UserError
from pellucid.utils.files import hold_lock

HOLD = "import sys; from pathlib import Path; from pellucid.utils.files import hold_lock\n"
HOLD += "with hold_lock(Path(sys.argv[1]), 'reads'): print('held', flush=True); sys.stdin.read()"


def test_lock_error_names_the_holder_until_it_dies(tmp_path):
    path = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=f"process {holder.pid} writes the file: wait"),
            hold_lock(path, "writes the file"),
        ):
            pass
        holder.kill()
    with hold_lock(path, "writes the file"):
        assert path.read_text() == f"{os.getpid()}\n"
