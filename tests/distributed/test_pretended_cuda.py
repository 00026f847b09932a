"""Runs and tests on a device that says it is cuda:0, in a process of its own: torch takes one such device for good."""

from __future__ import annotations

import os
import sys

import pytest

import pretended_cuda
from forked import ran
from simulated_device import A_REAL_ONE

pytestmark = pytest.mark.skipif(A_REAL_ONE, reason="there is a real one")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = pretended_cuda.compiled(tmp_path_factory.mktemp("pretended"))
    if path is None:
        pytest.skip("needs g++, and a torch without CUDA with its headers")
    return path


def run_on_cuda(library, *arguments):
    environment = {**os.environ, pretended_cuda.ASKED: str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    quiet = ("-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    done = ran("-m", "pytest", *quiet, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_a_run_on_cuda_trains_from_the_first_step_to_the_report(library):
    """By graphs and flash attention, without compiling C++ for the CPU."""
    run_on_cuda(library, "tests/distributed/on_pretended_cuda.py", "-k", "first_step")


@pytest.mark.slow
def test_doctor_resumes_graphs_and_waits_on_cuda(library):
    tests = ("tests/distributed/on_pretended_cuda.py", "tests/models/test_graphs.py", "tests/distributed/test_waits.py")
    run_on_cuda(library, *tests, "-k", "doctor or resume or refuses or device or waits")
