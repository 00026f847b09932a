"""The sampling face: rows continued token by token; those of a group share the keys and values of their prompt.

Shapes: P prompts of at most S tokens, n rows in flight, m rows of the largest group, H query heads, K key heads, d head
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.models.attention import attend, attend_and_weigh
from pellucid.models.decoder import Decoder, after_attention, heads_of, norm
from pellucid.models.packed import bias_of, in_line, in_rows, prompt_rows


@dataclass
class Cache:
    """Keys and values of one layer."""

    prompt_keys: Tensor
    """[P, K, S, d]"""
    prompt_values: Tensor
    keys: Tensor
    """[rows, K, max_tokens, d]: of what each row has said; rows beyond n are free."""
    values: Tensor


class Flight:
    """Rows in flight: `admit` prompts, `step` with a token for every row, `keep` some rows; in any order."""

    def __init__(self, decoder: Decoder, rows: int, max_tokens: int) -> None:
        """Room for `rows` rows that say at most `max_tokens` tokens each."""
        self.decoder, self.weights, self.rows = decoder, decoder.weights(), rows
        shape, device = decoder.shape, decoder.device
        own = (rows, shape.key_heads, max_tokens, shape.head_size)
        none = torch.empty(0, shape.key_heads, 0, shape.head_size, dtype=decoder.dtype, device=device)
        self.caches = [Cache(none, none, none.new_zeros(own), none.new_zeros(own)) for _ in self.weights.layers]
        self.prompt_lengths = torch.zeros(0, dtype=torch.long, device=device)
        """[P]"""
        self.prompt_of = torch.zeros(0, dtype=torch.long, device=device)
        """[n]"""
        self.said = torch.zeros(0, dtype=torch.long, device=device)
        """[n] tokens of each row in the cache."""

    def room(self) -> int:
        """Rows that may be admitted."""
        return self.rows - len(self.said)

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], copies: int) -> Tensor:
        """[len(prompts) * copies, V] logits behind each prompt, of as many rows that join those in flight."""
        rows, lengths = prompt_rows(prompts, self.decoder.dtype, self.decoder.device)
        shape, rotary = self.decoder.shape, self.decoder.rotary(rows.positions)
        hidden = F.embedding(rows.ids, self.weights.embedding).to(self.weights.norm.dtype)
        for layer, cache in zip(self.weights.layers, self.caches, strict=True):
            query, key, value = in_rows(heads_of(layer, hidden, rotary, shape), rows, shape)
            cache.prompt_keys = joined(cache.prompt_keys, key)
            cache.prompt_values = joined(cache.prompt_values, value)
            hidden = after_attention(layer, hidden, in_line(attend(query, key, value, rows.bias), rows), shape)
        newcomers = torch.arange(len(prompts), device=lengths.device) + len(self.prompt_lengths)
        self.prompt_of = torch.cat([self.prompt_of, newcomers.repeat_interleave(copies)])
        self.prompt_lengths = torch.cat([self.prompt_lengths, lengths])
        self.said = torch.cat([self.said, self.said.new_zeros(len(prompts) * copies)])
        self._seat()
        return self._logits(hidden[lengths.cumsum(0) - 1]).repeat_interleave(copies, 0)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """[n, V] logits behind one more token [n] of each row."""
        shape = self.decoder.shape
        rotary = self.decoder.rotary(self.prompt_lengths[self.prompt_of] + self.said)
        rows, longest = torch.arange(len(tokens), device=tokens.device), int(self.said.max()) + 1
        level = int(self.said.min()) + 1 == longest
        seen = torch.arange(longest, device=tokens.device) <= self.said[:, None]
        own_bias = None if level else bias_of(seen[:, None], self.decoder.dtype)
        hidden = F.embedding(tokens, self.weights.embedding).to(self.weights.norm.dtype)
        for layer, cache in zip(self.weights.layers, self.caches, strict=True):
            heads = heads_of(layer, hidden, rotary, shape)
            query, key, value = heads.split([shape.heads, shape.key_heads, shape.key_heads], 1)
            cache.keys[rows, :, self.said], cache.values[rows, :, self.said] = key, value
            query = query.unflatten(1, (shape.key_heads, -1))  # [n, K, H / K, d]
            keys, values = cache.keys[: len(rows), :, :longest], cache.values[: len(rows), :, :longest]
            own, own_weight = attend_and_weigh(query, keys, values, own_bias)
            prompt, prompt_weight = self._read_prompts(query, cache)
            # Two softmaxes over parts become one over all by the shares of their normalisers.
            share = torch.sigmoid(prompt_weight - own_weight)[..., None].to(own.dtype)
            hidden = after_attention(layer, hidden, torch.lerp(own, prompt, share).flatten(1), shape)
        self.said += 1
        return self._logits(hidden)

    def keep(self, rows: Tensor) -> None:
        """Only these rows, [<= n] ascending, fly on; prompts without rows are forgotten."""
        longest = int(self.said.max())
        used, self.prompt_of = self.prompt_of[rows].unique(return_inverse=True)
        self.said, self.prompt_lengths = self.said[rows], self.prompt_lengths[used]
        for cache in self.caches:
            for own in (cache.keys, cache.values):
                own[: len(rows), :, :longest] = own[rows, :, :longest]
            cache.prompt_keys, cache.prompt_values = cache.prompt_keys[used], cache.prompt_values[used]
        self._seat()

    def _seat(self) -> None:
        """Which rows read which prompt: `seats` [P, m] of rows, the first again where there are fewer; and back."""
        sizes = self.prompt_of.bincount(minlength=len(self.prompt_lengths))
        if not len(sizes):
            return
        order = self.prompt_of.argsort(stable=True)
        place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[self.prompt_of[order]]
        most = int(sizes.max())
        self.seats = torch.zeros(len(sizes), most, dtype=torch.long, device=order.device)
        self.seats[self.prompt_of[order], place] = order
        self.seat_of = torch.empty_like(order)
        self.seat_of[order] = self.prompt_of[order] * most + place
        steps = torch.arange(int(self.prompt_lengths.max()), device=order.device)
        self.prompt_bias = bias_of((steps < self.prompt_lengths[:, None])[:, None], self.decoder.dtype)

    def _read_prompts(self, query: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """All rows of a prompt read it in one product: [n, K, H / K, d] -> what they read, and how much it weighs."""
        grouped = query[self.seats].transpose(1, 2)  # [P, K, m, H / K, d]
        length = len(self.prompt_bias[0, 0, 0])
        read, weight = attend_and_weigh(
            grouped.flatten(2, 3),
            cache.prompt_keys[:, :, :length],
            cache.prompt_values[:, :, :length],
            self.prompt_bias,
        )

        def by_row(x: Tensor) -> Tensor:
            return x.unflatten(2, grouped.shape[2:4]).transpose(1, 2).flatten(0, 1)[self.seat_of]

        return by_row(read), by_row(weight)

    def _logits(self, hidden: Tensor) -> Tensor:
        states = norm(hidden, self.weights.norm, self.decoder.shape.eps).to(self.weights.head.dtype)
        return F.linear(states, self.weights.head)


def joined(one: Tensor, other: Tensor) -> Tensor:
    """[P, K, S, d] and [Q, K, R, d] -> [P + Q, K, max(S, R), d]"""
    length = max(one.shape[2], other.shape[2])
    return torch.cat([F.pad(x, (0, 0, 0, length - x.shape[2])) for x in (one, other)])
