"""Products of many rows and a matrix, by AMX (cpp/products.cpp): each row has the bits that it has among few, as in
sampling. oneDNN adds up inputs of many rows in another order, which depends on how many there are, and for some numbers
of rows it takes twice as long. Elsewhere, and where this processor or this torch rounds otherwise, operators multiply.

Shapes: n rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from pellucid.models import lines
from pellucid.models.compiling import Operations, call
from pellucid.models.kernels import fitting
from pellucid.models.lines import Way

MANY = 32
"""Rows at least; inputs and outputs are multiples of it."""
WIDEST = 2**14
"""Outputs of whose gradient that of inputs is taken; of more, as a head has, oneDNN is faster."""
NAME = "multiply_rows"
"""Of such a product, in torch's profiler."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [n, K], a weight [N, K] and a bias [N]. MemoryError where there is no memory."""
    if not (by := way(x, weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return Linear.apply(x, weight, bias, by)  # pyright: ignore[reportReturnType]
    return multiplied(by, x, weight, bias, transposed=False)


class Linear(torch.autograd.Function):
    """With a gradient, which weights that are `Trained` have of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: Way) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiplied(by, x, weight, bias, transposed=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            of_inputs(grad, weight) if of_x else None,
            grad.mT @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


def of_inputs(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient [n, K] of the inputs of a product, from that of its outputs [n, N]. MemoryError as `linear`."""
    by = way(grad, weight) if len(weight) <= WIDEST else None
    return multiplied(by, grad, weight, None, transposed=True) if by else grad @ weight


def way(x: Tensor, weight: Tensor) -> Way | None:
    """What multiplies rows like these by a matrix; None where operators do."""
    if x.ndim != 2 or len(x) < MANY or any(size % MANY for size in weight.shape) or not weight.is_contiguous():
        return None
    by = lines.here()[0] if fitting(x, x.dtype) and fitting(weight, weight.dtype) else None
    return by if by and by.uses_amx and has_bits_of_few(by) else None


def multiplied(kernel: Way, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    (n, width), outputs = x.shape, weight.shape[1 if transposed else 0]
    y = x.new_empty(n, outputs)
    with record_function(NAME):
        sizes, threads = (x.stride(0), n, width), torch.get_num_threads()
        fault = call(kernel.library.multiply_rows, x, *sizes, weight, outputs, bias, int(transposed), y, threads)
    if fault:
        raise MemoryError(f"no memory for a product with a matrix of {weight.shape[0]} x {weight.shape[1]}")
    Operations.count(2.0 * n * width * outputs)
    return y


@functools.cache
def has_bits_of_few(kernel: Way) -> bool:
    """Whether rows have the bits that oneDNN gives so few of them."""
    numbers = torch.randn(MANY + 65, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, weight, bias = numbers[:MANY], numbers[MANY:-1], numbers[-1, :64]
    found = (
        multiplied(kernel, x, weight, bias, transposed=False),
        multiplied(kernel, x[:, :64], weight, None, transposed=True),
    )
    wanted = F.linear(x, weight, bias), x[:, :64] @ weight
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
