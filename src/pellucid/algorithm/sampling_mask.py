"""Sampling masks: the tokens among which each response token was sampled by top-k, top-p or min-p.

A token is sampled from the softmax of the policy over only these tokens. Ratio, KL and entropy of such rollouts are
computed with all policies truncated to the same tokens; otherwise training would use log-probs of a distribution that
was not sampled from (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, stores such masks). Storing only the truncation
threshold would take less space, but it is valid only for the logits of the weights that sampled, and these change with
the first optimizer step.

The mask of a token is a segment of int32 words: the allowed ids in ascending order or, unless it is longer, a bitmap
with one bit for each token of the vocabulary. An empty segment allows every token. `words` [M] concatenates all
segments of a batch, and `spans` [..., 2] holds the start and the end of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_WORD_BITS = 32


class SamplingMask(NamedTuple):
    """The sampling masks of N tokens."""

    words: Tensor
    """[M] int32"""
    spans: Tensor
    """[N, 2]"""

    def select_tokens(self, rows: Tensor) -> SamplingMask:
        return self._replace(spans=self.spans[rows])

    def unpack_ids(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return the ids of the allowed tokens [N, K], ascending and padded with 0, and which are valid [N, K]."""
        words, (start, end) = self.words, self.spans.unbind(-1)
        width, allows_all = count_bitmap_words(vocabulary), end == start
        is_bitmap = allows_all | (end - start == width)
        segments = words[(start[is_bitmap, None] + arange_like(width, words)).clamp(max=len(words) - 1)]
        bits = _unpack_bits(segments)[:, :vocabulary] | allows_all[is_bitmap, None]
        counts = (end - start).masked_scatter(is_bitmap, bits.sum(-1))
        column = arange_like(int(counts.max()) if len(counts) else 1, words)
        is_id = column < counts[:, None]
        ids = words[(start[:, None] + column).clamp(max=len(words) - 1)].long()
        row, bitmap_ids = bits.nonzero(as_tuple=True)
        offsets = counts[is_bitmap].cumsum(0) - counts[is_bitmap]
        ids[is_bitmap.nonzero()[:, 0][row], arange_like(len(row), words) - offsets[row]] = bitmap_ids
        return ids.masked_fill_(~is_id, 0), is_id


def pack_masks(allowed: Tensor) -> list[Tensor]:
    """Return the words of each row of [B, V] bool, on the CPU."""
    row, ids = allowed.nonzero(as_tuple=True)
    segments = ids.to("cpu", torch.int32).split(row.bincount(minlength=len(allowed)).tolist())
    return [
        segment if len(segment) < count_bitmap_words(allowed.shape[-1]) else _pack_bits(allowed[i]).cpu()
        for i, segment in enumerate(segments)
    ]


def collate_masks(masks: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the masks of B rows of tokens: words [M], and spans [B, T, 2], empty after the end of a row."""
    lengths = [torch.tensor([len(segment) for segment in row], dtype=torch.long) for row in masks]
    padded = pad_sequence(lengths, batch_first=True)
    ends = padded.flatten().cumsum(0).view_as(padded)
    return torch.cat([segment for row in masks for segment in row]), torch.stack([ends - padded, ends], -1)


def count_bitmap_words(vocabulary: int) -> int:
    return -(-vocabulary // _WORD_BITS)


def _pack_bits(bits: Tensor) -> Tensor:
    """[V] bool -> [V / 32] int32"""
    bits = F.pad(bits.to(torch.uint8), (0, -len(bits) % _WORD_BITS)).unflatten(0, (-1, 8))
    return (bits << arange_like(8, bits).to(torch.uint8)).sum(-1, dtype=torch.uint8).view(torch.int32)


def _unpack_bits(words: Tensor) -> Tensor:
    """[m, W] int32 -> [m, 32 W] bool"""
    octets = words.contiguous().view(torch.uint8)[..., None]
    return (octets >> arange_like(8, octets).to(torch.uint8) & 1).bool().flatten(1)


def arange_like(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)
