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

from pellucid.models.attention import attend
from pellucid.models.decoder import Decoder, after_attention, heads_of, linear, norm, packed
from pellucid.models.packed import bias_of, in_line, in_rows, prompt_rows


@dataclass
class Cache:
    """Keys and values of one layer. On the CPU in fp32: small products are faster in it, and scores are exact."""

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
        self.decoder, self.rows, self.max_tokens = decoder, rows, max_tokens
        self.weights = self.plain = decoder.weights()
        shape, device = decoder.shape, decoder.device
        dtype = torch.promote_types(decoder.dtype, torch.float32) if device.type == "cpu" else decoder.dtype
        none = torch.empty(0, shape.key_heads, 0, shape.head_size, dtype=dtype, device=device)
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
        hidden = F.embedding(rows.ids, self.plain.embedding).to(self.plain.norm.dtype)
        for layer, cache in zip(self.plain.layers, self.caches, strict=True):
            query, key, value = (in_rows(x, rows) for x in heads_of(layer, hidden, rotary, shape))
            hidden = after_attention(layer, hidden, in_line(attend(query, key, value, rows.bias), rows), shape)
            cache.prompt_keys, cache.prompt_values = joined(cache.prompt_keys, key), joined(cache.prompt_values, value)
            self._make_room(cache, len(self.said) + len(prompts) * copies)
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
            self.weights = packed(self.plain, len(tokens))
        shape = self.decoder.shape
        rotary = self.decoder.rotary(self.prompt_lengths[self.prompt_of] + self.said)
        rows, longest = torch.arange(len(tokens), device=tokens.device), int(self.said.max()) + 1
        bias = self._bias(longest)
        hidden = F.embedding(tokens, self.weights.embedding).to(self.weights.norm.dtype)
        for layer, cache in zip(self.weights.layers, self.caches, strict=True):
            query, key, value = heads_of(layer, hidden, rotary, shape)
            cache.keys[rows, :, self.said], cache.values[rows, :, self.said] = (
                x.to(cache.keys.dtype) for x in (key, value)
            )
            read = self._read(query.unflatten(1, (shape.key_heads, -1)), cache, longest, bias)
            hidden = after_attention(layer, hidden, read.to(query.dtype), shape)
        self.said += 1
        return self._logits(hidden, self.weights.head)

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

    def _make_room(self, cache: Cache, rows: int) -> None:
        """For the first, and where more fly than ever before."""
        if rows > len(cache.keys):
            shape = (
                rows - len(cache.keys),
                self.decoder.shape.key_heads,
                self.max_tokens,
                self.decoder.shape.head_size,
            )
            cache.keys, cache.values = (
                torch.cat([x.view(-1, *shape[1:]), x.new_zeros(shape)]) for x in (cache.keys, cache.values)
            )

    def _bias(self, longest: int) -> Tensor | None:
        """[n, 1, 1, S + T]: -inf where a row has no key; None where all have all."""
        steps = torch.arange(max(longest, int(self.prompt_lengths.max())), device=self.said.device)
        lengths = self.prompt_lengths[self.prompt_of, None]
        seen = torch.cat([steps[: int(self.prompt_lengths.max())] < lengths, steps[:longest] <= self.said[:, None]], 1)
        return None if bool(seen.all()) else bias_of(seen[:, None], self.caches[0].keys.dtype)

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

    def _read(self, query: Tensor, cache: Cache, longest: int, bias: Tensor | None) -> Tensor:
        """[n, K, H / K, d] -> [n, H d]: one softmax over the prompt, read by all of its rows in one product, and over
        what each row has said.
        """
        own, size = slice(len(query)), int(self.prompt_lengths.max())
        query = query.to(cache.keys.dtype) * query.shape[-1] ** -0.5
        of_prompt = self._by_row(self._by_prompt(query) @ cache.prompt_keys[:, :, :size].mT)
        of_said = query @ cache.keys[own, :, :longest].mT
        scores = torch.cat([of_prompt, of_said], -1)
        probs = (scores if bias is None else scores + bias).softmax(-1)
        prompt = self._by_row(self._by_prompt(probs[..., :size]) @ cache.prompt_values[:, :, :size])
        return (probs[..., size:] @ cache.values[own, :, :longest] + prompt).flatten(1)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[n, K, H / K, -] -> [P, K, m H / K, -]"""
        seated = x.unflatten(0, self.seats.shape) if self.in_order else x[self.seats]
        return seated.transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor) -> Tensor:
        """The inverse."""
        rows = x.unflatten(2, (self.seats.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        return rows if self.in_order else rows[self.seat_of]

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return linear(norm(hidden, self.plain.norm, self.decoder.shape.eps).to(self.decoder.dtype), head)


def joined(one: Tensor, other: Tensor) -> Tensor:
    """[P, K, S, d] and [Q, K, R, d] -> [P + Q, K, max(S, R), d] in the dtype of the first."""
    length = max(one.shape[2], other.shape[2])
    return torch.cat([F.pad(x.to(one.dtype), (0, 0, 0, length - x.shape[2])) for x in (one, other)])
