"""What a layer does besides matrix products, with backward passes derived by hand: autograd would keep their
intermediate results.

Shapes: N tokens, D hidden size, H heads, d head size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of x [..., D] in the dtype of its weight [D], as transformers computes it; the result in `dtype`."""
    if torch.is_grad_enabled():  # on the CPU a Function of its own costs decoding as much as its operations
        return RMSNorm.apply(x, weight, eps, dtype)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, d] by cos and sin [N, 1, d], the first half of the sines negative."""
    if torch.is_grad_enabled():
        return Rotation.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    return torch.addcmul(x * cos, swapped(x), sin)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) up, of both joined, [N, 2I] -> [N, I]."""
    if torch.is_grad_enabled():
        return Gate.apply(gate_up)  # pyright: ignore[reportReturnType]
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


class RMSNorm(torch.autograd.Function):
    """y = w u with u = x / rms(x) (arXiv 1910.07467). With g the gradient of u, that of x is
    (g - u mean(g u)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm(x, weight, eps, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wide, grad = x.to(weight.dtype), grad.to(weight.dtype)
        inverse = wide.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        unit = wide * inverse
        of_unit = grad * weight
        of_weight = grad.mul(unit).flatten(0, -2).sum(0)
        slant = (of_unit * unit).mean(-1, keepdim=True)
        return of_unit.sub_(unit.mul_(slant)).mul_(inverse).to(x.dtype), of_weight, None, None


class Rotation(torch.autograd.Function):
    """RoPE (arXiv 2104.09864), the halves of a head being the two coordinates; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, -sin), None, None


class Gate(torch.autograd.Function):
    """SwiGLU (arXiv 2002.05202) between its matrices."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gated(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        return torch.cat([aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1)


def swapped(x: Tensor) -> Tensor:
    """The halves of the last dimension, the other way round."""
    one, two = x.chunk(2, -1)
    return torch.cat([two, one], -1)
