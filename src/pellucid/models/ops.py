"""Sampling, and all operators of a layer except matrix products, forward and backward, in PyTorch.

`native.Kernels` has the same functions in C++, with the same bits. `autograd_ops` chooses between them.

Shapes: N tokens, D hidden size, H heads, d head size, I intermediate size, B rows, C query heads, K key heads,
T queries, S keys; n tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
CDF_BLOCK_TOKENS = 256
"""The number of tokens in a block of `invert_cdf`."""


def norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the RMSNorm of x [..., D] in `dtype`, computed in the dtype of the weight [D], as transformers does."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(dtype)


def norm_backward(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight.

    With u = x / rms(x) and its gradient g, the gradient of x is (g - u mean(g u)) / rms(x).
    """
    wide, grad = x.to(weight.dtype), grad.to(weight.dtype)
    inverse_rms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    unit = wide * inverse_rms
    unit_grad = grad * weight
    weight_grad = grad.mul(unit).flatten(0, -2).sum(0)
    projection = (unit_grad * unit).mean(-1, keepdim=True)
    return unit_grad.sub_(unit.mul_(projection)).mul_(inverse_rms).to(x.dtype), weight_grad


def add_norm_forward(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + more in the dtype of x, and the RMSNorm of this sum in the dtype of `more`."""
    total = x + more
    return total, norm_forward(total, weight, eps, more.dtype)


def add_norm_backward(
    x: Tensor, weight: Tensor, eps: float, sum_grad: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of both summands and of the weight.

    x is the sum, `sum_grad` its gradient from its other uses, and `grad` that of the norm's output.
    """
    x_grad, weight_grad = norm_backward(x, weight, eps, grad)
    x_grad += sum_grad
    return x_grad, x_grad.to(grad.dtype), weight_grad


def rotate_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [N, H, d]; cos and sin are [N, 1, d], the first half of sin negated."""
    return torch.addcmul(x * cos, _swap_halves(x), sin)


def rotate_backward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_forward(x, cos, -sin)


def _swap_halves(x: Tensor) -> Tensor:
    """Exchange the halves of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate and up concatenated, [N, 2I] -> [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient [N, 2I] of gate and up."""
    gate, up = gate_up.chunk(2, -1)
    return torch.cat([aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1)


def softmax_in_fp32(scores: Tensor) -> Tensor:
    """Return the softmax, computed in fp32 at least and rounded at the end. PyTorch's own in bf16 is slower."""
    return promote_to_fp32(scores).softmax(-1).to(scores.dtype)


def softmax(scores: Tensor, bias: Tensor) -> Tensor:
    """Return softmax(scores + bias) of scores [B, K, C / K * T, S], which are overwritten, and bias [B, 1, T, S]."""
    return softmax_in_fp32(_add_bias(scores, bias))


def softmax_backward(scores: Tensor, bias: Tensor, probs_grad: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities of `softmax` and the gradient of scores / scale, both in the dtype of probs_grad.

    The scores are in fp32 at least, and are overwritten; `scale` is already in them.
    """
    probs, dtype = _add_bias(scores, bias).softmax(-1), probs_grad.dtype
    probs_grad = probs_grad.to(probs.dtype)
    scores_grad = probs * (probs_grad - (probs * probs_grad).sum(-1, keepdim=True)) * scale
    return probs.to(dtype), scores_grad.to(dtype)


def _add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    return scores.unflatten(2, (-1, bias.shape[2])).add_(bias[:, :, None]).flatten(2, 3)


def promote_to_fp32(x: Tensor) -> Tensor:
    """Cast half precision to fp32; leave fp32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def supports_fp32_product(x: Tensor) -> bool:
    """Return whether the sums of a product of half-precision x can be returned in fp32, without rounding."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


def multiply_to_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [N, D] and weight [V, D] to [N, V] in fp32; see `supports_fp32_product`."""
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def add_fp32_product(x: Tensor, y: Tensor, total: Tensor | None = None) -> Tensor:
    """Multiply x [n, K] and y [K, N] to [n, N] in fp32, or add their product to a total; see `supports_fp32_product`.

    The product is not written to memory before it is added, if this PyTorch can add it to a matrix in fp32.
    """
    if total is None:
        return torch.mm(x, y, out_dtype=torch.float32)
    if not _can_add_fp32_product(x.device, x.dtype):
        return total.add_(torch.mm(x, y, out_dtype=torch.float32))
    return torch.addmm(total, x, y, out_dtype=torch.float32, out=total)


@functools.cache
def _can_add_fp32_product(device: torch.device, dtype: torch.dtype) -> bool:
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        total = torch.addmm(ones.float(), ones, ones, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return bool((total == 17).all())


# ---------------------------------------------------------------- sampling
# A mass is an unnormalized probability.


def compute_masses(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature) up to a factor per row, [n, V] in fp32; temperature 0 counts as 1."""
    differences = logits - logits.amax(-1, keepdim=True).float()  # fp32, and never above 0
    return differences.mul_(compute_exponent_factor(temperature)).exp2_()  # a quarter of the time of exp


def compute_exponent_factor(temperature: float) -> float:
    """Return the factor that makes a difference of logits an exponent of 2."""
    return 1 / (math.log(2) * (temperature or 1.0))


def sample_with_masses(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token per row of logits [n, V], by uniforms [n] (see `sampling.sample_tokens`); temperature 0 is greedy.

    Returns the tokens, their masses, and the mass of all tokens of each row, [n] each.
    """
    masses = compute_masses(logits, temperature)
    token = logits.argmax(-1) if temperature == 0.0 else invert_cdf(masses, uniforms)
    return token, masses.gather(-1, token[:, None])[:, 0], masses.sum(-1)


def invert_cdf(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens [n] at the quantiles `uniforms` [n] of the distribution of masses [n, V].

    The search has two levels: blocks of tokens, then the tokens of one block. Cumulative sums are float64, on the
    device of `uniforms`.
    """
    uniforms = uniforms[:, None]
    padded = F.pad(masses, (0, -masses.shape[-1] % CDF_BLOCK_TOKENS))
    blocks = padded.unflatten(-1, (-1, CDF_BLOCK_TOKENS))  # [n, V / CDF_BLOCK_TOKENS, CDF_BLOCK_TOKENS]
    block_ends = blocks.sum(-1).to(uniforms.device).cumsum(-1, dtype=torch.float64)
    target = uniforms * block_ends[:, -1:]
    block = _find_first_above(block_ends, target)
    block_start = F.pad(block_ends, (1, 0)).gather(-1, block)
    masses = blocks.take_along_dim(block[..., None].to(blocks.device), 1)[:, 0]  # [n, CDF_BLOCK_TOKENS]
    token_ends = masses.to(uniforms.device).double().cumsum(-1)
    return (block * CDF_BLOCK_TOKENS + _find_first_above(token_ends, target - block_start))[:, 0].to(blocks.device)


def _find_first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first cumulative sum above the target, but not past the last entry with mass."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)
