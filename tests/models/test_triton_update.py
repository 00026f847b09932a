"""Tests of Triton's update kernels without a GPU: in Triton's interpreter, and as machine code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

if not importlib.util.find_spec("triton"):
    pytest.skip("needs Triton, which is there on Linux", allow_module_level=True)

from interpreted import TIMEOUT, run_interpreted
from pellucid.models import triton_update
from pellucid.models.native import LogitStatistics, ScaledLogits, StatisticsGradients
from triton_machine_code import ARCHITECTURES, compile_launch, record_launches

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16


@pytest.mark.timeout(TIMEOUT)
def test_kernels_match_operators():
    run_interpreted(Path(__file__).with_name("on_triton_update.py"))


def norm_gradient(width):
    """Return a call of the gradient of a sum and its norm."""
    x, half = torch.zeros(3072, width), torch.zeros(3072, width, dtype=BF16)
    return lambda: triton_update.add_norm_backward(x, x[0], 1e-6, x, half)


def rotation(heads, size):
    x, angle = torch.zeros(2, heads + 2, size, dtype=BF16)[:, :heads], torch.zeros(2, 1, size, dtype=BF16)
    return lambda: triton_update.rotate_backward(x, angle, angle)


def logit_work(gradients):
    """Return a call of statistics and gradients of logits: of log-probs, of the entropy too (2), of a KL too (3)."""
    logits, tokens = ScaledLogits(torch.zeros(2, 151_936), 0.7), torch.zeros(2, dtype=torch.long)
    statistics = LogitStatistics(*torch.zeros(4, 2))
    weights = StatisticsGradients(*(torch.zeros(2) if i < gradients else None for i in range(3)))
    other, out = logits if gradients == 3 else None, logits.head_output.view(BF16)[:, :151_936]

    def act():
        triton_update.compute_statistics(logits, tokens, other)
        triton_update.compute_product_gradient(logits, tokens, other, statistics, weights, out)

    return act


KERNELS = {
    **{f"a norm of {width}": norm_gradient(width) for width in (896, 1536, 2560, 4096, 8192)},
    "a norm of heads": lambda: triton_update.norm_backward(
        torch.zeros(64, 16, 128, dtype=BF16), torch.zeros(128), 1e-6, torch.zeros(64, 16, 128, dtype=BF16)
    ),
    **{f"a rotation of {heads} x {size}": rotation(heads, size) for heads, size in ((16, 64), (14, 128), (40, 80))},
    "a gate": lambda: triton_update.swiglu_backward(*(torch.zeros(1, 2 * n, dtype=BF16) for n in (9728, 4864))),
    "log-probs": logit_work(1),
    "entropy": logit_work(2),
    "KL": logit_work(3),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("act", KERNELS.values(), ids=KERNELS)
def test_kernels_spill_nothing_and_read_and_write_many_bytes_at_once(act, architecture, tmp_path):
    launches = record_launches(act)
    assert launches
    for launch in launches:
        code = compile_launch(launch, architecture, tmp_path)
        assert not code.stack_bytes
        assert code.registers <= 168, "three blocks of 128 threads fit"
        assert code.count("LDG.E.128") + code.count("LDG.E.64") > 0, code.instructions
        if launch.kernel is not triton_update.statistics_kernel:  # which writes one number per row
            assert code.count("STG.E.128") + code.count("STG.E.64") > 0, code.instructions
