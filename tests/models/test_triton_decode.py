"""Tests of Triton's decoding and sampling kernels without a GPU: in Triton's interpreter, and as machine code."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from pellucid.models.decoder import LayerWeights, ModelShape

if not importlib.util.find_spec("triton"):
    pytest.skip("needs Triton, which is there on Linux", allow_module_level=True)

from interpreted import TIMEOUT, run_interpreted
from pellucid.models import triton_decode, triton_ops
from triton_machine_code import ARCHITECTURES, compile_launch, record_launches

pytestmark = pytest.mark.slow


@pytest.mark.timeout(TIMEOUT)
def test_kernels_match_operators():
    run_interpreted(Path(__file__).with_name("on_triton_decode.py"))


# ---------------------------------------------------------------- machine code


def shape_of(heads, key_heads, size):
    return ModelShape(1, heads, key_heads, size, 1e-6, True, (False,), 0)


ATTENTION = {
    "0.5B": (torch.bfloat16, shape_of(14, 2, 64), False, 0),
    "1.5B": (torch.bfloat16, shape_of(12, 2, 128), False, 0),
    "norms of heads": (torch.bfloat16, shape_of(16, 8, 128), True, 0),
    "a window, heads of 80": (torch.bfloat16, shape_of(32, 8, 80), False, 4096),
    "float16": (torch.float16, shape_of(32, 4, 128), False, 0),
    "float32": (torch.float32, shape_of(9, 3, 64), False, 0),
}


MAX_STACK_BYTES = 0 if Version(version("triton")) >= Version("3.7") else 8
"""Triton 3.6, which torch 2.11 installs, spills two registers with heads of 64 and of 80 on an H100."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_reads_keys_ahead_and_multiplies_in_tensor_cores(case, architecture, tmp_path):
    dtype, shape, has_norms, window = ATTENTION[case]
    norm = torch.ones(shape.head_size) if has_norms else None
    layer = LayerWeights(*[torch.ones(1)] * 6, query_norm=norm, key_norm=norm)
    qkv = torch.zeros(1, (shape.heads + 2 * shape.key_heads) * shape.head_size, dtype=dtype)
    table = torch.zeros(16, dtype=torch.long)
    [launch] = record_launches(lambda: triton_decode.attend_step(qkv, table, table, layer, shape, window))
    code = compile_launch(launch, architecture, tmp_path)
    assert code.stack_bytes <= MAX_STACK_BYTES
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") > 0, "ahead, and 16 bytes at once"
    assert (code.count("HMMA") > 0) == (dtype != torch.float32)
    assert code.shared_bytes < 99 * 1024, "a GeForce has so much"


HIDDEN, MORE, LOGITS = torch.zeros(1, 896), torch.zeros(1, 896, dtype=torch.bfloat16), torch.zeros(1, 151_936)
OTHERS = {
    "a norm": lambda: triton_ops.norm_forward(HIDDEN, HIDDEN[0], 1e-6, torch.bfloat16),
    "a sum and its norm": lambda: triton_ops.add_norm_forward(HIDDEN, MORE, HIDDEN[0], 1e-6),
    "a gate": lambda: triton_ops.swiglu_forward(torch.zeros(1, 9728, dtype=torch.bfloat16)),
    "sampling": lambda: triton_decode.sample_tokens(LOGITS, torch.zeros(1, dtype=torch.float64), 1.0),
    "greedy": lambda: triton_decode.sample_tokens(LOGITS, torch.zeros(1, dtype=torch.float64), 0.0),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("act", OTHERS.values(), ids=OTHERS)
def test_other_kernels_spill_nothing_and_read_16_bytes_at_once(act, architecture, tmp_path):
    for launch in record_launches(act):
        code = compile_launch(launch, architecture, tmp_path)
        assert not code.stack_bytes
        assert code.count("LDG.E.128") > 0
