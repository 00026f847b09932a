"""Attention of heads that share keys: the same bits whether a token is sampled or scored, and a backward pass for CPUs.

Shapes: B rows, H query heads, K key heads, T queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.models.kernels import way
from pellucid.models.operators import unrounded

FEW = 2**20
"""Scores at once, 4 MB in fp32: what is done to each then stays in the processor's cache."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int = 0) -> Tensor:
    """softmax(q k' / sqrt(d) + bias) v. query [B, H, T, d], key and value [B, K, S, d], bias [B, 1, T, S].

    shared: so many of the keys stand first and are a prompt's, which sampling reads for all rows of a group at once.
    On the CPU they are read in a product of their own here, too, and rounded where sampling rounds.
    """
    if query.device.type == "cpu" and not torch.is_grad_enabled():
        return by_few(query, key, value, bias, shared_length)
    if query.device.type == "cpu":
        return FewProducts.apply(query, key, value, bias, shared_length)  # pyright: ignore[reportReturnType]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


class FewProducts(torch.autograd.Function):
    """A few batched matrix products, and backward a few more, the probabilities made anew: torch's own are slower on
    CPUs and compute a row in a way that depends on how many there are, and plain attention under autograd would keep
    B H T S probabilities of every layer.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared: int) -> Tensor:
        ctx.save_for_backward(query, key, value, bias)
        return by_few(query, key, value, bias, shared)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = zip(*(gradients_of(*part) for part in few(*ctx.saved_tensors, grad)), strict=True)
        return *(torch.cat(pieces) for pieces in gradients), None, None


def by_few(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    """`attend` on the CPU, a few rows at a time."""
    return torch.cat([read(q, k, v, b, shared_length) for q, k, v, b in few(query, key, value, bias)])


def few(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows of each at a time."""
    rows = max(1, FEW // (query.shape[1] * bias[0].numel()))
    return zip(*(x.split(rows) for x in (query, key, value, bias, *others)), strict=True)


def read(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    """[B, H, T, d], a few queries at a time where one row has many."""
    queries = max(1, FEW // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = zip(query.split(queries, 2), bias.split(queries, 2), strict=True)
    return torch.cat([read_few(q, key, value, b, shared_length) for q, b in parts], 2)


def read_few(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    probs = way(query, query.dtype, key.shape[2]).softmax(scores_of(query, key), bias)
    out = probs[..., shared_length:] @ value[:, :, shared_length:]
    if shared_length:
        out = out + probs[..., :shared_length] @ value[:, :, :shared_length]
    return out.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    """q k' / sqrt(d), [B, K, H / K * T, S]."""
    return grouped(query * query.shape[-1] ** -0.5, key.shape[1]) @ key.mT


def grouped(x: Tensor, key_heads: int) -> Tensor:
    """[B, H, T, d] -> [B, K, H / K * T, d]: all queries of a key head in one product."""
    return x.unflatten(1, (key_heads, -1)).flatten(2, 3)


def gradients_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Of query, key and value.

    Of a score bf16 keeps 8 bits: at 30 it is off by up to 1/16, and its probability by as much. These are not rounded.
    """
    key_heads, length, scale = key.shape[1], query.shape[2], query.shape[-1] ** -0.5
    scores = scores_of(unrounded(query), unrounded(key))
    query, grad = grouped(query, key_heads), grouped(grad, key_heads)
    computed = way(grad, grad.dtype, key.shape[2])
    probs, of_scores = computed.softmax_backward(scores, bias, grad @ value.mT, scale)
    of_query = (of_scores @ key).unflatten(2, (-1, length)).flatten(1, 2)
    return of_query, of_scores.mT @ query, probs.mT @ grad
