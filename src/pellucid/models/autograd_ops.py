"""The operators of a layer besides matrix products, as autograd Functions; without gradient, as plain calls.

Their backward passes are written by hand, because autograd would keep intermediate results. Each call uses the kernel
that `native.select_kernels` finds for the tensor, in C++ or by Triton, else the operator of `ops`, which says what it
computes.

Shapes: N tokens, D hidden size, H heads, d head size, I intermediate size.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pellucid.models import ops
from pellucid.models.native import Kernels, select_kernels


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`ops.norm_forward` with gradient: the RMSNorm of x [..., D] in `dtype`."""
    if torch.is_grad_enabled():  # while decoding on the CPU a Function would cost as much time as its operations
        return RMSNorm.apply(x, weight, eps, dtype)  # pyright: ignore[reportReturnType]
    return select_norm_kernels(x, dtype).norm_forward(x, weight, eps, dtype)


def add_and_rms_norm(
    x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`ops.add_norm_forward` with gradient: x + more [N, D], and its RMSNorm in `dtype`, the dtype of `more`.

    Without `more`, x and its RMSNorm.
    """
    if more is None:
        return x, apply_rms_norm(x, weight, eps, dtype)
    if torch.is_grad_enabled():
        return _AddRMSNorm.apply(x, more, weight, eps, dtype)  # pyright: ignore[reportReturnType]
    kernels = select_norm_kernels(x, dtype) if select_kernels(more, dtype) is not ops else ops
    return kernels.add_norm_forward(x, more, weight, eps)


def select_norm_kernels(x: Tensor, dtype: torch.dtype) -> Kernels | ModuleType:
    is_supported = x.dtype == torch.float32 or x.device.type == "cuda"
    return select_kernels(x, dtype, x.shape[-1] // 2) if is_supported else ops


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rotate_forward` with gradient: the rotary embedding of x [N, H, d]."""
    if torch.is_grad_enabled():
        return _Rotation.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    return select_kernels(x, x.dtype, x.shape[-1] // 2).rotate_forward(x, cos, sin)


def apply_swiglu(gate_up: Tensor) -> Tensor:
    """`ops.swiglu_forward` with gradient: silu(gate) * up of both concatenated, [N, 2I] -> [N, I]."""
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate_up)  # pyright: ignore[reportReturnType]
    return select_kernels(gate_up, gate_up.dtype, gate_up.shape[-1] // 2).swiglu_forward(gate_up)


class RMSNorm(torch.autograd.Function):
    """RMSNorm (arXiv 1910.07467). `forward` runs without gradient, so it calls the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.dtype = eps, dtype
        return apply_rms_norm(x, weight, eps, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return *select_norm_kernels(x, ctx.dtype).norm_backward(x, weight, ctx.eps, grad), None, None


class _AddRMSNorm(torch.autograd.Function):
    """A sum and its RMSNorm; both are outputs, so the gradient of the sum has two parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
        total, y = add_and_rms_norm(x, more, weight, eps, dtype)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, y

    @staticmethod
    def backward(ctx: Any, sum_grad: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return *select_norm_kernels(x, grad.dtype).add_norm_backward(x, weight, ctx.eps, sum_grad, grad), None, None


class _Rotation(torch.autograd.Function):
    """RoPE (arXiv 2104.09864); the halves of a head are the two coordinates. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return apply_rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kernels = select_kernels(grad, grad.dtype, grad.shape[-1] // 2)
        return kernels.rotate_backward(grad, *ctx.saved_tensors), None, None


class _SwiGLU(torch.autograd.Function):
    """SwiGLU (arXiv 2002.05202) without its matrices."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return apply_swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        [gate_up] = ctx.saved_tensors
        return select_kernels(grad, gate_up.dtype, grad.shape[-1]).swiglu_backward(gate_up, grad)
