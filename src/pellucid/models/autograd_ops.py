"""What a layer does besides matrix products, with backward passes derived by hand: autograd would keep their
intermediate results. One pass over memory each where kernels.py has them, else by operators.py.

Shapes: N tokens, D hidden size, H heads, d head size, I intermediate size.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pellucid.models import ops
from pellucid.models.native import Kernels, find_kernels, select_kernels


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of x [..., D] in the dtype of its weight [D], as transformers computes it; the result in `dtype`."""
    if torch.is_grad_enabled():  # on the CPU a Function of its own costs decoding as much as its operations
        return RMSNorm.apply(x, weight, eps, dtype)  # pyright: ignore[reportReturnType]
    return select_norm_kernels(x, dtype).norm_forward(x, weight, eps, dtype)


def add_and_rms_norm(
    x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + more [N, D], and RMSNorm of it in `dtype`, which is that of `more`."""
    if more is None:
        return x, apply_rms_norm(x, weight, eps, dtype)
    if torch.is_grad_enabled():
        return AddRMSNorm.apply(x, more, weight, eps, dtype)  # pyright: ignore[reportReturnType]
    by = select_norm_kernels(x, dtype) if find_kernels(more, dtype) else ops
    return by.add_norm_forward(x, more, weight, eps)


def select_norm_kernels(x: Tensor, dtype: torch.dtype) -> Kernels | ModuleType:
    return select_kernels(x, dtype, x.shape[-1] // 2) if x.dtype == torch.float32 else ops


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, d] by cos and sin [N, 1, d], the first half of the sines negative."""
    if torch.is_grad_enabled():
        return Rotation.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    return select_kernels(x, x.dtype, x.shape[-1] // 2).rotate_forward(x, cos, sin)


def apply_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) up, of both joined, [N, 2I] -> [N, I]."""
    if torch.is_grad_enabled():
        return SwiGLU.apply(gate_up)  # pyright: ignore[reportReturnType]
    return select_kernels(gate_up, gate_up.dtype, gate_up.shape[-1] // 2).swiglu_forward(gate_up)


class RMSNorm(torch.autograd.Function):
    """y = w u with u = x / rms(x) (arXiv 1910.07467). With g the gradient of u, that of x is
    (g - u mean(g u)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.dtype = eps, dtype
        return apply_rms_norm(x, weight, eps, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return *select_norm_kernels(x, ctx.dtype).norm_backward(x, weight, ctx.eps, grad), None, None


class AddRMSNorm(torch.autograd.Function):
    """RMSNorm of a sum, which goes on to be added to: its gradient comes from both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
        together, y = add_and_rms_norm(x, more, weight, eps, dtype)
        ctx.save_for_backward(together, weight)
        ctx.eps = eps
        return together, y

    @staticmethod
    def backward(ctx: Any, beyond: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return *select_norm_kernels(x, grad.dtype).add_norm_backward(x, weight, ctx.eps, beyond, grad), None, None


class Rotation(torch.autograd.Function):
    """RoPE (arXiv 2104.09864), the halves of a head being the two coordinates; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return apply_rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (
            select_kernels(grad, grad.dtype, grad.shape[-1] // 2).rotate_backward(grad, *ctx.saved_tensors),
            None,
            None,
        )


class SwiGLU(torch.autograd.Function):
    """SwiGLU (arXiv 2002.05202) between its matrices."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return apply_swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        [gate_up] = ctx.saved_tensors
        return select_kernels(grad, gate_up.dtype, grad.shape[-1]).swiglu_backward(gate_up, grad)
