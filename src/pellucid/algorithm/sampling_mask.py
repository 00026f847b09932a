"""Sampling masks: the tokens that were in the running where each response token was drawn by top-k, top-p or min-p.

What drew the token is the policy's softmax over those tokens alone. Ratio, KL and entropy of such rollouts are those of
policies that are truncated to the same tokens: otherwise the log-probs that are trained on are a distribution's that
nobody sampled from (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, keeps such masks). The threshold that cut the others
off would be shorter to keep, but it cuts the logits of the weights that sampled, which the first optimizer step moves.

The mask of a token is a run of int32 words: its ids in ascending order, or where that would be no shorter, a bit for
every token of the vocabulary; none where all were in the running. All runs of a batch lie end to end, `words` [M];
`spans` [..., 2] says where each begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WORD_BITS = 32
"""Bits."""


class SamplingMask(NamedTuple):
    """Of N tokens."""

    words: Tensor
    """[M] int32"""
    spans: Tensor
    """[N, 2]"""

    def select_tokens(self, rows: Tensor) -> SamplingMask:
        return self._replace(spans=self.spans[rows])

    def unpack_ids(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """[N, K] ids of the tokens, ascending, behind them 0; and [N, K] bool, which of them are there."""
        words, (start, end) = self.words, self.spans.unbind(-1)
        width, whole = count_bitmap_words(vocabulary), end == start
        as_bits = whole | (end - start == width)
        runs = words[(start[as_bits, None] + arange_like(width, words)).clamp(max=len(words) - 1)]
        bits = unpack_bits(runs)[:, :vocabulary] | whole[as_bits, None]
        counts = (end - start).masked_scatter(as_bits, bits.sum(-1))
        place = arange_like(int(counts.max()) if len(counts) else 1, words)
        there = place < counts[:, None]
        ids = words[(start[:, None] + place).clamp(max=len(words) - 1)].long()
        row, ids_of_bits = bits.nonzero(as_tuple=True)
        before = counts[as_bits].cumsum(0) - counts[as_bits]
        ids[as_bits.nonzero()[:, 0][row], arange_like(len(row), words) - before[row]] = ids_of_bits
        return ids.masked_fill_(~there, 0), there


def pack_masks(allowed: Tensor) -> list[Tensor]:
    """Words of each row of [B, V] bool, on the CPU."""
    row, ids = allowed.nonzero(as_tuple=True)
    runs = ids.to("cpu", torch.int32).split(row.bincount(minlength=len(allowed)).tolist())
    return [
        run if len(run) < count_bitmap_words(allowed.shape[-1]) else pack_bits(allowed[i]).cpu()
        for i, run in enumerate(runs)
    ]


def collate_masks(masks: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """words [M] and spans [B, T, 2] of rows of tokens; behind the end of a row spans are empty."""
    lengths = pad_sequence([torch.tensor([len(run) for run in row]) for row in masks], batch_first=True)
    ends = lengths.flatten().cumsum(0).view_as(lengths)
    return torch.cat([run for row in masks for run in row]), torch.stack([ends - lengths, ends], -1)


def count_bitmap_words(vocabulary: int) -> int:
    return -(-vocabulary // WORD_BITS)


def pack_bits(bits: Tensor) -> Tensor:
    """[V] bool -> [V / 32] int32"""
    bits = F.pad(bits.to(torch.uint8), (0, -len(bits) % WORD_BITS)).unflatten(0, (-1, 8))
    return (bits << arange_like(8, bits).to(torch.uint8)).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """[m, W] int32 -> [m, 32 W] bool"""
    eights = words.contiguous().view(torch.uint8)[..., None]
    return (eights >> arange_like(8, eights).to(torch.uint8) & 1).bool().flatten(1)


def arange_like(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)
