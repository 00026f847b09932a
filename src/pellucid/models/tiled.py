"""What an update multiplies besides activations by weights, by AMX in C++: attention of whole rollouts and its backward
pass (cpp/rollouts.cpp), where no row is padded, and gradients of weights (cpp/weights.cpp).

What tokens read has the bits of sampling. Gradients are those of the same formulas as in attention.py, nothing rounded
but what is multiplied.

Shapes: N tokens, H query heads, K key heads, d head size.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.models.compiling import call, has_tiles
from pellucid.models.kernels import Kernels, fitting

BLOCK = 32
"""Widths of a matrix are a multiple of it."""
HEADS = range(64, 257, 64)
"""Sizes of a head."""


class Line(NamedTuple):
    """Tokens of prompts and of rows, each sequence's together, one behind the other; on the CPU."""

    ends: Tensor
    """[P + B] the token behind each."""
    prompt_of: Tensor
    """[B]"""
    window: int = 0
    """How many tokens one reads, itself included; 0 is all."""


class LineOf(ctypes.Structure):
    """As in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("prompts", "rows", "heads", "key_heads", "size", "window")),
        *((name, ctypes.c_void_p) for name in ("ends", "prompt_of")),
    )


class Projected(ctypes.Structure):
    """As in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_apart", "key_apart", "value_apart")),
    )


def tiles(query: Tensor) -> Kernels | None:
    """What reads by queries [N, H, d] in AMX; None where operators do."""
    return fitting(query, query.dtype) if query.shape[2] in HEADS and has_tiles() else None


def attend_in_line(query: Tensor, key: Tensor, value: Tensor, line: Line) -> Tensor:
    """[N, H d] of what queries [N, H, d] read of keys and values [N, K, d]: their prompt's and their row's up to
    their own.
    """
    if torch.is_grad_enabled():
        return InLine.apply(query, key, value, line)  # pyright: ignore[reportReturnType]
    return read(query, key, value, line)


class InLine(torch.autograd.Function):
    """With p the probabilities, g their gradient: that of the scores is p (g - sum p g)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, line: Line) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.line = line
        return read(query, key, value, line)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = [x.new_empty(x.shape) for x in ctx.saved_tensors]
        run("attention_backward", ctx.line, ctx.saved_tensors, grad.contiguous(), projected(gradients))
        return *gradients, None


def read(query: Tensor, key: Tensor, value: Tensor, line: Line) -> Tensor:
    out = query.new_empty(len(query), query.shape[1] * query.shape[2])
    run("attention_forward", line, (query, key, value), out)
    return out


def run(name: str, line: Line, heads: tuple[Tensor, ...], *others: Any) -> None:
    """MemoryError where there is none."""
    query, key, _ = heads
    sizes = len(line.ends) - len(line.prompt_of), len(line.prompt_of), query.shape[1], *key.shape[1:], line.window
    about = LineOf(*sizes, line.ends.data_ptr(), line.prompt_of.data_ptr())
    kernels = tiles(query)
    assert kernels
    together = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in heads]
    if call(getattr(kernels.library, name), about, projected(together), *others, torch.get_num_threads()):
        raise MemoryError(f"no memory to read {len(query)} tokens at once")


def projected(heads: list[Tensor]) -> Projected:
    return Projected(*(x.data_ptr() for x in heads), *(x.stride(0) for x in heads))


# ---------------------------------------------------------------- gradients of weights


def sums_over_tokens(grad: Tensor, x: Tensor, wide: torch.dtype, into: Tensor | None = None) -> Tensor:
    """grad.mT @ x of grad [n, N] and x [n, K], in the dtype `wide`, or so much more in `into`. By AMX it is not rounded
    on the way. MemoryError where there is no memory.
    """
    kernels = fitting(grad, grad.dtype) if wide == torch.float32 and has_tiles() else None
    if not kernels or any(width % BLOCK for width in (grad.shape[1], x.shape[1])):
        sums = grad.mT @ x
        return sums.to(wide) if into is None else into.add_(sums)
    sums = torch.empty(grad.shape[1], x.shape[1], dtype=wide) if into is None else into
    sizes = len(grad), grad.shape[1], x.shape[1]
    together = grad.contiguous(), x.contiguous()
    if call(kernels.library.sum_over_tokens, *together, *sizes, sums, into is not None, torch.get_num_threads()):
        raise MemoryError(f"no memory for the gradient of a matrix of {sizes[1]} x {sizes[2]}")
    return sums
