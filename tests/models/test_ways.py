"""Tests that a machine uses the compiled kernels that it supports. If a self-check fails, their tests are skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pellucid.distributed import optimizer  # noqa: F401 - it adds a self-check
from pellucid.models import attention, fused_check, native  # noqa: F401 - as does fused_check

KNOWN = (
    f"torch=={torch.__version__.partition('+')[0]}"
    in (Path(__file__).parents[2] / "constraints.txt").read_text().split()
)


@pytest.mark.skipif(not KNOWN, reason="this torch may add up in another order")
@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="a CPU without AVX-512 for bfloat16")
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("name", native.SELF_CHECKS)
def test_compiled_kernels_pass_their_self_checks(name):
    if name == "products" and not attention.load_attention_kernel()[0].uses_amx:
        pytest.skip("a CPU without AMX")
    found, why = native.SELF_CHECKS[name]()
    assert found, why


def test_all_self_checks_are_in_the_table():
    fused = {"fused steps", "fused steps with an adapter"}
    assert set(native.SELF_CHECKS) == {"update", "attention", "products", "AdamW", *fused}
