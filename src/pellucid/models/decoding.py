"""The sampling face: rows continued token by token; those of a group share the keys and values of their prompt.

Shapes: P prompts of at most S tokens, n rows in flight, m rows of the largest group, T tokens said by the row that has
said most, H query heads, K key heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.models.attention import attend, softmax
from pellucid.models.decoder import Decoder, after_attention, heads_of, linear, prepacked
from pellucid.models.elementwise import norm
from pellucid.models.masters import Matrix
from pellucid.models.packed import LANES, bias_of, in_line, in_rows, nearby, prompt_rows, roomy

GROWTH = 2 * LANES
"""Tokens of room that a cache has more each time it is full."""


@dataclass
class Cache:
    """Keys and values of one layer. Products read the whole room: a slice of it would be copied first on the CPU."""

    prompt_keys: Tensor
    """[K, P, S, d]"""
    prompt_values: Tensor
    keys: Tensor
    """[K, n, room >= T, d]: of what each row has said, 0 behind it."""
    values: Tensor


class DecodeBatch:
    """Rows in flight: `admit` prompts, `step` with a token for every row, `keep` some rows; in any order."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        """Room for `rows` rows."""
        self.decoder, self.rows = decoder, rows
        self.weights = self.plain = decoder.weights()
        shape, device = decoder.shape, decoder.device
        none = torch.empty(shape.key_heads, 0, 0, shape.head_size, dtype=decoder.dtype, device=device)
        self.caches = [Cache(none, none, none, none) for _ in self.weights.layers]
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
        hidden = F.embedding(rows.ids, self.plain.embedding.tensor).to(self.plain.norm.dtype)
        steps = torch.arange(rows.bias.shape[-1], device=lengths.device)[None]
        near = nearby(rows.bias, steps, steps, shape.window) if any(shape.slides) else rows.bias
        for layer, cache, slides in zip(self.plain.layers, self.caches, shape.slides, strict=True):
            query, key, value = (in_rows(x, rows) for x in heads_of(layer, hidden, rotary, shape))
            attended = attend(query, key, value, near if slides else rows.bias)
            hidden = after_attention(layer, hidden, in_line(attended, rows), shape)
            cache.prompt_keys = joined(cache.prompt_keys, key.transpose(0, 1))
            cache.prompt_values = joined(cache.prompt_values, value.transpose(0, 1))
            silent = cache.keys.new_zeros(shape.key_heads, len(prompts) * copies, 0, shape.head_size)
            cache.keys, cache.values = joined(cache.keys, silent), joined(cache.values, silent)
        newcomers = torch.arange(len(prompts), device=lengths.device) + len(self.prompt_lengths)
        self.prompt_of = torch.cat([self.prompt_of, newcomers.repeat_interleave(copies)])
        self.prompt_lengths = torch.cat([self.prompt_lengths, lengths])
        self.said = torch.cat([self.said, self.said.new_zeros(len(prompts) * copies)])
        self._seat()
        return self._logits(hidden[lengths.cumsum(0) - 1], self.plain.head).repeat_interleave(copies, 0)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """[n, V] logits behind one more token [n] of each row."""
        if self.weights is self.plain and self.decoder.may_pack:
            self.weights = prepacked(self.plain, len(tokens))
        if int(self.said.max()) == self.caches[0].keys.shape[2]:
            self._grow()
        shape, place, biases = self.decoder.shape, self._place(), self._biases()
        rotary = self.decoder.rotary(self.prompt_lengths[self.prompt_of] + self.said)
        hidden = F.embedding(tokens, self.weights.embedding.tensor).to(self.weights.norm.dtype)
        for layer, cache, bias in zip(self.weights.layers, self.caches, biases, strict=True):
            query, key, value = heads_of(layer, hidden, rotary, shape)
            cache.keys[place], cache.values[place] = key.transpose(0, 1), value.transpose(0, 1)
            hidden = after_attention(layer, hidden, self._read(query, cache, bias), shape)
        self.said += 1
        return self._logits(hidden, self.weights.head)

    def keep(self, rows: Tensor) -> None:
        """Only these rows, [<= n] ascending, fly on; prompts without rows are forgotten."""
        used, self.prompt_of = self.prompt_of[rows].unique(return_inverse=True)
        self.said, self.prompt_lengths = self.said[rows], self.prompt_lengths[used]
        size = roomy(int(self.prompt_lengths.max())) if len(used) else 0
        room = roomy(int(self.said.max()), GROWTH) if len(rows) else 0
        for cache in self.caches:
            cache.keys, cache.values = (x[:, :, :room].index_select(1, rows) for x in (cache.keys, cache.values))
            cache.prompt_keys, cache.prompt_values = (
                x[:, :, :size].index_select(1, used) for x in (cache.prompt_keys, cache.prompt_values)
            )
        self._seat()

    def _grow(self) -> None:
        for cache in self.caches:
            cache.keys, cache.values = (F.pad(x, (0, 0, 0, GROWTH)) for x in (cache.keys, cache.values))

    def _place(self) -> tuple[slice | Tensor | int, ...]:
        """Where in a cache the next token of each row belongs: one place for all, while all have said as much."""
        first, last = int(self.said.min()), int(self.said.max())
        if first == last:
            return slice(None), slice(None), last
        return slice(None), torch.arange(len(self.said), device=self.said.device), self.said

    def _biases(self) -> list[Tensor]:
        """Of each layer, [n, 1, S + room]: -inf behind the prompt of a row, and behind what it has said."""
        first, starts, shape = self.caches[0], self.prompt_lengths[self.prompt_of, None], self.decoder.shape
        of_prompt, own = (torch.arange(x.shape[2], device=x.device) for x in (first.prompt_keys, first.keys))
        read = torch.cat([of_prompt < starts, own < self.said[:, None] + 1], -1)
        near = bias = bias_of(read[:, None], first.keys.dtype)
        if any(shape.slides):
            keys = torch.cat([of_prompt.expand(len(starts), -1), starts + own], -1)
            near = nearby(bias, starts + self.said[:, None], keys, shape.window)
        return [(near if slides else bias)[:, 0] for slides in shape.slides]

    def _seat(self) -> None:
        """Which rows read which prompt: `seats` [P, m] of rows, the first again where there are fewer; and back. Before
        the first row has finished they stand in order, and there is nothing to look up.
        """
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
        whole = len(order) == self.seats.numel()
        self.in_order = whole and bool((self.seat_of == torch.arange(len(order), device=order.device)).all())

    def _read(self, query: Tensor, cache: Cache, bias: Tensor) -> Tensor:
        """[n, H, d] -> [n, H d]: one softmax over the prompt, read by all of its rows in one product, and over what
        each row has said.
        """
        size = cache.prompt_keys.shape[2]
        queries = query.unflatten(1, (len(cache.keys), -1)).transpose(0, 1)  # [K, n, H / K, d]
        queries = queries.contiguous() * query.shape[-1] ** -0.5
        of_prompt = self._by_row(self._by_prompt(queries) @ cache.prompt_keys.mT)
        probs = softmax(torch.cat([of_prompt, queries @ cache.keys.mT], -1).add_(bias))
        prompt = self._by_row(self._by_prompt(probs[..., :size]) @ cache.prompt_values)
        read = probs[..., size:] @ cache.values + prompt
        return read.transpose(0, 1).flatten(1)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[K, n, H / K, -] -> [K, P, m H / K, -]"""
        rows = x if self.in_order else x.index_select(1, self.seats.flatten())
        return rows.unflatten(1, self.seats.shape).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """The inverse."""
        rows = x.unflatten(2, (self.seats.shape[1], -1)).flatten(1, 2)
        return rows if self.in_order else rows.index_select(1, self.seat_of)

    def _logits(self, hidden: Tensor, head: Matrix) -> Tensor:
        return linear(norm(hidden, self.plain.norm, self.decoder.shape.eps, self.decoder.dtype), head.tensor)


def joined(one: Tensor, other: Tensor) -> Tensor:
    """[K, P, S, d] and [K, Q, R, d] -> [K, P + Q, max(S, R), d] in the dtype of the first."""
    length = max(one.shape[2], other.shape[2])
    return torch.cat([F.pad(x.to(one.dtype), (0, 0, 0, length - x.shape[2])) for x in (one, other)], 1)
