"""Attention of heads that share keys, with a backward pass that suits the CPU.

Shapes: B rows, H query heads, K key heads, T queries, S keys, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 2**20
"""Scores at once in the backward pass, 4 MB: what is done to each then stays in the processor's cache."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k' / sqrt(d) + bias) v. query [B, H, T, d], key and value [B, K, S, d], bias [B, 1, T, S]."""
    if query.device.type == "cpu":
        return FewProducts.apply(query, key, value, bias)  # pyright: ignore[reportReturnType]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


class FewProducts(torch.autograd.Function):
    """Forward as torch has it. Backward in five batched matrix products, the probabilities made anew: torch's own is
    several times slower on CPUs, and plain attention under autograd would keep B H T S probabilities of every layer.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, bias)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, bias = ctx.saved_tensors
        rows = max(1, FEW // (query.shape[1] * bias[0].numel()))
        parts = zip(*(x.split(rows) for x in (query, key, value, bias, grad)), strict=True)
        gradients = zip(*(gradients_of(*part) for part in parts), strict=True)
        return *(torch.cat(pieces) for pieces in gradients), None


def gradients_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Of query, key and value."""
    heads, key_heads, scale = query.shape[1], key.shape[1], query.shape[-1] ** -0.5

    def grouped(x: Tensor) -> Tensor:
        """[B, H, T, d] -> [B, K, H / K * T, d]: all queries of a key head in one product."""
        return x.unflatten(1, (key_heads, heads // key_heads)).flatten(2, 3)

    query, grad = grouped(query), grouped(grad)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.mT).to(wide) * scale
    scores = scores.unflatten(2, (heads // key_heads, -1)) + bias[:, :, None]
    probs = scores.softmax(-1).flatten(2, 3)
    of_probs = (grad @ value.mT).to(wide)
    of_scores = probs * (of_probs - (probs * of_probs).sum(-1, keepdim=True)) * scale
    probs, of_scores = probs.to(key.dtype), of_scores.to(key.dtype)
    of_query = (of_scores @ key).unflatten(2, (heads // key_heads, -1)).flatten(1, 2)
    return of_query, of_scores.mT @ query, probs.mT @ grad
