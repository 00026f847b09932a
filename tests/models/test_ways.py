"""Where this machine can have what is compiled, it is used: where its trial fails, the tests of it are passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pellucid.models import attention, fused_check, native

KNOWN = (
    f"torch=={torch.__version__.partition('+')[0]}"
    in (Path(__file__).parents[2] / "constraints.txt").read_text().split()
)


@pytest.mark.skipif(not KNOWN, reason="this torch may add up in another order")
@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="a CPU without AVX-512 for bfloat16")
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("way", [fused_check.load_fused_kernel, native.load_kernels, attention.load_checked_library])
def test_what_is_compiled_has_the_bits_of_the_operators(way):
    found, why = way()
    assert found, why
