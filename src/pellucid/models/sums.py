"""Gradients of weights: sums over tokens, unrounded where AMX adds them up (cpp/weights.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from pellucid.models import lines
from pellucid.models.compiling import Operations, call
from pellucid.models.kernels import fitting

BLOCK = 32
"""Widths of a matrix are a multiple of it."""
NAME = "sum_over_tokens"
"""Of such a sum, in torch's profiler."""


def sums_over_tokens(grad: Tensor, x: Tensor, dtype: torch.dtype, accumulator: Tensor | None = None) -> Tensor:
    """grad.mT @ x of grad [n, N] and x [n, K], in the dtype `wide`, or so much more in `into`. By AMX it is not rounded
    on the way. MemoryError where there is no memory.
    """
    by = lines.here()[0] if dtype == torch.float32 and fitting(grad, grad.dtype) else None
    if not by or not by.uses_amx or any(width % BLOCK for width in (grad.shape[1], x.shape[1])):
        sums = grad.mT @ x
        return sums.to(dtype) if accumulator is None else accumulator.add_(sums)
    sums = torch.empty(grad.shape[1], x.shape[1], dtype=dtype) if accumulator is None else accumulator
    sizes = len(grad), grad.shape[1], x.shape[1]
    together = grad.contiguous(), x.contiguous()
    with record_function(NAME):
        fault = call(
            by.library.sum_over_tokens, *together, *sizes, sums, accumulator is not None, torch.get_num_threads()
        )
    if fault:
        raise MemoryError(f"no memory for the gradient of a matrix of {sizes[1]} x {sizes[2]}")
    Operations.count(2.0 * sizes[0] * sizes[1] * sizes[2])
    return sums
