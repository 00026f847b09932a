"""Test the suite's time limit: a hanging test fails with a stack, and ends the run only if no signal reaches it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HANGS = """
import threading
from concurrent.futures import Future

def test_waits():
    Future().result()

def test_goes_on():
    pass
"""
DEAF = """
import signal
import time

def test_never_comes_back():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1000)
"""


def run(tmp_path, test, *settings):
    path = tmp_path / "test_hanging.py"
    path.write_text(test)
    options = [option for setting in settings for option in ("-o", setting)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "pyproject.toml", *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_hanging_test_fails_with_a_stack_and_the_others_run(tmp_path):
    ended = run(tmp_path, HANGS, "timeout=1")
    assert ended.returncode == 1
    assert "1 failed, 1 passed" in ended.stdout
    assert "Future().result()" in ended.stdout


@pytest.mark.slow
def test_run_ends_with_a_stack_if_signals_are_blocked(tmp_path):
    ended = run(tmp_path, DEAF, "timeout=1", "faulthandler_timeout=3")
    assert ended.returncode != 0
    assert "in test_never_comes_back" in ended.stderr


def test_every_test_has_a_time_limit(request):
    assert 0 < float(request.config.getini("timeout")) < float(request.config.getini("faulthandler_timeout"))
