"""Triton functions that decode steps (`triton_decode`) and updates (`triton_update`) share. They round where `ops`
does.

Triton comes with PyTorch for CUDA. Import this module where it is needed, not at the top of a file.

Shapes: N tokens, D hidden size, I intermediate size.
"""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from pellucid.models.cuda_graphs import select_device

KERNEL_ERRORS = (RuntimeError, OSError, subprocess.SubprocessError, TritonError)
"""The errors that Triton raises if it cannot compile or launch a kernel on this machine."""
LOG2E = tl.constexpr(1.4426950408889634)
_GATE_BLOCK = 1024
_MIN_BLOCK = 16
"""The smallest side of a matrix that `tl.dot` multiplies."""


def describe_error(error: BaseException) -> str:
    """Return an error of Triton in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def round_up_block(size: int) -> int:
    """Return the smallest block that holds `size` elements; Triton's blocks are powers of 2."""
    return max(_MIN_BLOCK, 1 << (size - 1).bit_length())


def count_blocks(size: int, block: int) -> int:
    return -(-size // block)


# ---------------------------------------------------------------- functions of kernels


@triton.jit
def rotate(x, swapped, cos, sin, dtype: tl.constexpr):
    """Rotate x, of which `swapped` has the halves exchanged, as `ops.rotate_forward` does."""
    product = (x.to(tl.float32) * cos.to(tl.float32)).to(dtype)
    return (product.to(tl.float32) + swapped.to(tl.float32) * sin.to(tl.float32)).to(dtype)


@triton.jit
def silu(x, dtype: tl.constexpr):
    wide = x.to(tl.float32)
    return (wide / (1 + tl.exp2(-wide * LOG2E))).to(dtype)


# ---------------------------------------------------------------- kernels


@triton.jit
def add_norm_kernel(x, more, weight, total, y, D, eps, BLOCK: tl.constexpr):
    """One row: its sum with `more`, if there is one, and the RMSNorm of the sum."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < D
    wide = tl.load(x + row * D + i, inside, 0.0).to(tl.float32)
    if more is not None:
        wide += tl.load(more + row * D + i, inside, 0.0).to(tl.float32)
        tl.store(total + row * D + i, wide, inside)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = wide * inverse_rms * tl.load(weight + i, inside, 0.0)
    tl.store(y + row * D + i, normed.to(y.dtype.element_ty), inside)


@triton.jit
def swiglu_kernel(gate_up, y, I, BLOCK: tl.constexpr):
    """A block of one row: silu(gate) * up."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y.dtype.element_ty
    inside = i < I
    gate = tl.load(gate_up + row * 2 * I + i, inside, 0.0)
    up = tl.load(gate_up + row * 2 * I + I + i, inside, 0.0)
    tl.store(y + row * I + i, (silu(gate, dtype).to(tl.float32) * up.to(tl.float32)).to(dtype), inside)


# ---------------------------------------------------------------- the functions of `ops`, by kernels


def norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`ops.norm_forward` of x [N, D]; the weight is in fp32."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device)
    launch(add_norm_kernel, (len(x),), x, None, weight, None, y, x.shape[1], eps, BLOCK=round_up_block(x.shape[1]))
    return y


def add_norm_forward(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.add_norm_forward` of x [N, D] in fp32, as the weight is."""
    x, more = x.contiguous(), more.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(more)
    launch(add_norm_kernel, (len(x),), x, more, weight, total, y, x.shape[1], eps, BLOCK=round_up_block(x.shape[1]))
    return total, y


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """`ops.swiglu_forward` of gate and up [N, 2I]."""
    gate_up = gate_up.contiguous()
    n, width = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty(n, width)
    launch(swiglu_kernel, (n, count_blocks(width, _GATE_BLOCK)), gate_up, y, width, BLOCK=_GATE_BLOCK)
    return y


def launch(kernel, grid: tuple[int, ...], tensor: Tensor, *arguments, **constants) -> None:
    """Launch a kernel on the device of its first argument."""
    with select_device(tensor.device):
        kernel[grid](tensor, *arguments, **constants)
