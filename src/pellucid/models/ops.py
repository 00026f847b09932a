"""What a layer does besides matrix products, by operators of torch: on every device, in every dtype, compiled or not.

kernels.py has the same functions, to the same bits, in C++.

A forward pass must not return the result of an in-place operation, nor cast a tensor to the dtype it already has:
torch.compile of torch 2.11 drops the gradient of such a result in an autograd.Function.

Shapes: N tokens, D hidden size, H heads, d head size, I intermediate size, B rows, C query heads, K key heads,
T queries, S keys; n tokens, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

aten = torch.ops.aten
CDF_BLOCK_TOKENS = 256
"""Tokens that are added up by themselves to be drawn from."""


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of x [..., D] in the dtype of its weight [D], as transformers computes it; the result in `dtype`."""
    return _cast(F.rms_norm(_cast(x, weight.dtype), weight.shape, weight, eps), dtype)


def norm_backward(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    wide, grad = x.to(weight.dtype), grad.to(weight.dtype)
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    unit = wide * inverse
    of_unit = grad * weight
    of_weight = grad.mul(unit).flatten(0, -2).sum(0)
    slant = (of_unit * unit).mean(-1, keepdim=True)
    return of_unit.sub_(unit.mul_(slant)).mul_(inverse).to(x.dtype), of_weight


def add_norm_forward(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + more in the dtype of x, and RMSNorm of it in that of `more`."""
    together = x + more
    return together, norm_forward(together, weight, eps, more.dtype)


def add_norm_backward(
    x: Tensor, weight: Tensor, eps: float, beyond: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both that were added up, and of the weight, from those of their sum x and of its norm."""
    of_x, of_weight = norm_backward(x, weight, eps, grad)
    of_x += beyond
    return of_x, of_x.to(grad.dtype), of_weight


def rotate_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, d] by cos and sin [N, 1, d], the first half of the sines negative."""
    return torch.addcmul(x * cos, swap_halves(x), sin)


def rotate_backward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_forward(x, cos, -sin)


def swap_halves(x: Tensor) -> Tensor:
    """The halves of the last dimension, the other way round."""
    one, two = x.chunk(2, -1)
    return torch.cat([two, one], -1)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """silu(gate) up, of both joined, [N, 2I] -> [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """[N, 2I]"""
    gate, up = gate_up.chunk(2, -1)
    return torch.cat([aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1)


def softmax_in_fp32(scores: Tensor) -> Tensor:
    """In fp32 at least, rounded at its end; torch's own in bf16 is no more exact and slower."""
    return promote_to_fp32(scores).softmax(-1).to(scores.dtype)


def softmax(scores: Tensor, bias: Tensor) -> Tensor:
    """Of scores [B, K, C / K * T, S], which are written over, plus bias [B, 1, T, S]."""
    return softmax_in_fp32(add_bias(scores, bias))


def softmax_backward(scores: Tensor, bias: Tensor, of_probs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same probabilities, of scores in fp32 at least, and the gradient of scores / scale, in its dtype."""
    probs, dtype = add_bias(scores, bias).softmax(-1), of_probs.dtype
    of_probs = of_probs.to(probs.dtype)
    of_scores = probs * (of_probs - (probs * of_probs).sum(-1, keepdim=True)) * scale
    return probs.to(dtype), of_scores.to(dtype)


def add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    return scores.unflatten(2, (-1, bias.shape[2])).add_(bias[:, :, None]).flatten(2, 3)


def promote_to_fp32(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def supports_fp32_product(x: Tensor) -> bool:
    """Whether products of tensors like x, in half precision, are had in fp32, as they were summed: CUDA has such ones,
    but none with a forward-mode gradient.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.device.type == "cuda" and half and forward_ad.unpack_dual(x).tangent is None


def multiply_to_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, D] times weight [V, D], [N, V] in fp32, where `widens` says so."""
    return torch.mm(x, weight.T, out_dtype=torch.float32)


# ---------------------------------------------------------------- drawing


def compute_masses(logits: Tensor, temperature: float) -> Tensor:
    """[n, V] fp32 probabilities, up to a factor, of softmax(logits / temperature), at 1 in place of 0."""
    below = logits - logits.amax(-1, keepdim=True).float()  # fp32, and never above 0
    return below.mul_(compute_exponent_factor(temperature)).exp2_()  # a quarter of the time of exp


def compute_exponent_factor(temperature: float) -> float:
    """What a difference of logits is multiplied by to be an exponent of 2."""
    return 1 / (math.log(2) * (temperature or 1.0))


def sample_with_masses(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """A token for each row [n], its unnormalised probability, and that of all tokens together; see drawing.py."""
    masses = compute_masses(logits, temperature)
    token = logits.argmax(-1) if temperature == 0.0 else invert_cdf(masses, uniforms)
    return token, masses.gather(-1, token[:, None])[:, 0], masses.sum(-1)


def invert_cdf(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [n] at `uniforms` [n] of the CDF of masses [n, V], in two levels: blocks, and tokens of one block."""
    uniforms = uniforms[:, None]
    blocks = F.pad(masses, (0, -masses.shape[-1] % CDF_BLOCK_TOKENS)).unflatten(
        -1, (-1, CDF_BLOCK_TOKENS)
    )  # [B, V / BLOCK, BLOCK]
    block_ends = blocks.sum(-1).to(uniforms.device).cumsum(-1, dtype=torch.float64)
    target = uniforms * block_ends[:, -1:]
    block = find_first_above(block_ends, target)
    before = F.pad(block_ends, (1, 0)).gather(-1, block)
    masses = blocks.take_along_dim(block[..., None].to(blocks.device), 1)[:, 0]  # [B, BLOCK]
    inside = masses.to(uniforms.device).double().cumsum(-1)
    return (block * CDF_BLOCK_TOKENS + find_first_above(inside, target - before))[:, 0].to(blocks.device)


def find_first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Index of the first cumulative sum above the target; rounding may push the target past the last one with mass."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)
