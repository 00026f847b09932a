"""Attention of whole rollouts on a GPU, by torch's flash attention for sequences of any lengths: no row is padded, no
score is written to memory.

Each device is tried once: the kernel is used where it reads what attention.py reads, and has its gradients.

Shapes: N tokens, H query heads, K key heads, d head size, S sequences (prompts and rows), M keys that they read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pellucid.models.lines import Line

WIDEST = 256
"""The largest head."""
CLOSE = 2.0**-5
"""How far what is read may be off, of the largest number: rounding to bf16, twice."""


class Spread(NamedTuple):
    """The sequences of a Line as the kernel takes them, on the device."""

    queries: Tensor
    """[S + 1] int32: where the queries of each sequence begin, and their end."""
    keys: Tensor
    """[S + 1] int32: the same of keys. A row reads its prompt's, then its own."""
    tokens: Tensor
    """[M] whose keys these are."""
    most_queries: int
    most_keys: int


@functools.cache
def kernel() -> Callable[..., Any] | None:
    """torch's, where it has one for heads that share keys (from 2.12 on)."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - half a second, for GPUs alone
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


def spread(line: Line, device: torch.device) -> Spread:
    lengths = line.ends.diff(prepend=line.ends.new_zeros(1))
    begins, prompts = line.ends - lengths, len(line.ends) - len(line.prompt_of)
    none = lengths.new_zeros(prompts)
    shared = torch.cat([none, lengths[line.prompt_of]])
    read = shared + lengths
    ends = read.cumsum(0)
    place = torch.arange(int(ends[-1])) - (ends - read).repeat_interleave(read)  # of a key in its sequence
    of_prompt, own, before = (
        x.repeat_interleave(read) for x in (torch.cat([none, begins[line.prompt_of]]), begins - shared, shared)
    )
    tokens = torch.where(place < before, of_prompt, own) + place
    zero = ends.new_zeros(1)
    queries, keys = torch.stack([torch.cat([zero, line.ends]), torch.cat([zero, ends])]).int().to(device)
    return Spread(queries, keys, tokens.to(device), int(lengths.max()), int(read.max()))


def there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel reads in such a dtype on this device."""
    halves = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and halves and not fault_at(device, dtype)


def reads(query: Tensor) -> bool:
    """Whether it reads by queries [N, H, d] like these: with a forward-mode gradient it does not."""
    size = query.shape[2]
    return size % 8 == 0 and size <= WIDEST and forward_ad.unpack_dual(query).tangent is None


def attend(query: Tensor, key: Tensor, value: Tensor, by: Spread, window: int = 0) -> Tensor:
    """[N, H d] of what queries [N, H, d] read of keys and values [N, K, d], up to their own; of the last `window` of
    them where it is not 0.
    """
    read = kernel()
    assert read
    keys, values = (x.index_select(0, by.tokens) for x in (key, value))
    far = window - 1 if window else -1
    return read(
        query,
        keys,
        values,
        by.queries,
        by.keys,
        by.most_queries,
        by.most_keys,
        window_size=(far, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    ).flatten(1)


# ---------------------------------------------------------------- the trial


@functools.cache
def fault_at(device: torch.device, dtype: torch.dtype) -> str:
    """Why attention is not computed so on this device; empty where it is."""
    return trial(device, dtype) if kernel() else "this torch has no attention for sequences of any lengths"


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """On a prompt of 30 tokens and rows of 5, none and 9, with a sliding window of 12 tokens and without."""
    heads, line = (6, 2, 2), Line(torch.tensor([30, 35, 35, 44]), torch.tensor([0, 0, 0]))
    numbers = torch.randn(44, sum(heads) + heads[0], 64, generator=torch.Generator().manual_seed(1))
    x, grad = numbers.to(device, dtype).split([sum(heads), heads[0]], 1)
    of_kernel, by_hand = partial(attend, by=spread(line, device)), partial(by_sequence, line=line)
    for window in (0, 12):
        try:
            found = graded(partial(of_kernel, window=window), x, heads, grad.flatten(1))
        except RuntimeError as error:  # so a GPU says that it has no such kernel
            return str(error)
        wanted = graded(partial(by_hand, window=window), x.float(), heads, grad.flatten(1).float())
        for name, one, other in zip(("what is read", "its gradient"), found, wanted, strict=True):
            off = float((one - other).abs().max() / other.abs().max())
            if not off < CLOSE:
                return f"{name} is off by {off:.1g} of the largest number"
    return ""


@torch.enable_grad()
def graded(read: Callable[..., Tensor], x: Tensor, heads: Sequence[int], grad: Tensor) -> tuple[Tensor, Tensor]:
    """What is read by heads that stand side by side in x, and the gradient of x."""
    x = x.detach().requires_grad_()
    found = read(*x.split(heads, 1))
    return found.detach(), torch.autograd.grad(found, x, grad)[0]


def by_sequence(query: Tensor, key: Tensor, value: Tensor, line: Line, window: int) -> Tensor:
    """[N, H d] by torch's operators, one sequence after the other."""
    spans = [range(*span) for span in pairwise([0, *line.ends.tolist()])]
    prompts, read = len(spans) - len(line.prompt_of), []
    for i, own in enumerate(spans):
        shared = list(spans[line.prompt_of[i - prompts]]) if i >= prompts else []
        tokens = [*shared, *own]
        behind = torch.arange(len(tokens)) - torch.arange(len(shared), len(tokens))[:, None]  # of a key to its query
        unseen = (behind > 0) | (behind <= -(window or len(tokens) + 1))
        keys, values = (x[tokens].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[list(own)], keys) * query.shape[2] ** -0.5
        probs = scores.masked_fill(unseen.to(scores.device), -torch.inf).softmax(-1)
        read.append(torch.einsum("hqk,khd->qhd", probs, values).flatten(1))
    return torch.cat(read)
