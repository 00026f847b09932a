"""Run tests of Triton's kernels in a separate process, in which Triton interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT = 900
"""Seconds. Each file takes two minutes on an idle machine."""


def run_interpreted(tests):
    """Run a file of tests, and assert that all of them pass."""
    path = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
