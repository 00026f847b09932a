"""Run tests on a simulated cuda:0 in separate processes, because torch cannot unregister such a device."""

from __future__ import annotations

import pytest

import pretended_cuda
from simulated_device import HAS_REAL_DEVICE

pytestmark = [pytest.mark.skipif(HAS_REAL_DEVICE, reason="there is a real one"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = pretended_cuda.compile_library(tmp_path_factory.mktemp("pretended"))
    if path is None:
        pytest.skip("needs g++, and a torch without CUDA with its headers")
    return path


def run_on_cuda(library, *arguments, interpret=False):
    done = pretended_cuda.run_pytest(library, arguments, interpret, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("interpret", [False, True], ids=["operators", "Triton"])
def test_counts_on_cuda(interpret, library):
    """Counts kernels, waits, saved bytes and graphs."""
    run_on_cuda(library, "tests/models/on_cuda_counts.py", interpret=interpret)


@pytest.mark.slow
def test_the_memory_plan_of_an_update_on_cuda(library):
    run_on_cuda(library, "tests/models/on_cuda_plan.py")


@pytest.mark.slow
@pytest.mark.timeout(900)  # three minutes on a quiet machine
def test_decode_steps_by_triton_on_cuda(library):
    run_on_cuda(library, "tests/models/on_cuda_decode.py", interpret=True)


@pytest.mark.slow
def test_runs_on_cuda(library):
    """The runs use graphs and flash attention but not Triton, whose interpreter takes minutes for a run."""
    run_on_cuda(library, "tests/distributed/on_cuda_runs.py")


@pytest.mark.slow
def test_trainings_on_cuda(library):
    """Metrics and weights are compared with those of the CPU."""
    run_on_cuda(library, "tests/distributed/on_cuda_trainings.py")


@pytest.mark.slow
def test_graphs_and_waits_on_cuda(library):
    tests = ("tests/models/test_graphs.py", "tests/distributed/test_waits.py")
    run_on_cuda(library, *tests, "-k", "device or refuses or waits")


@pytest.mark.slow
def test_an_update_on_cuda(library):
    """Gradients of Triton are compared with those of the CPU."""
    run_on_cuda(library, "tests/models/on_cuda_update.py", interpret=True)


@pytest.mark.slow
def test_lora_on_cuda(library):
    run_on_cuda(library, "tests/models/on_cuda_lora.py", interpret=True)
