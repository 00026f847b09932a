"""Attention of whole rollouts on a GPU, by torch's flash attention for sequences of any lengths: no row is padded, no
score is written to memory.

The operator is called itself, and not `torch.nn.attention.varlen`, which older versions of torch do not have, or have
without heads that share keys. Each device is tried once: the kernel is used if it computes what attention.py computes,
and its gradients.

Shapes: N tokens, H query heads, K key heads, d head size, S sequences (prompts and rows), M keys that they read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

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

    query_offsets: Tensor
    """[S + 1] int32: where the queries of each sequence begin, and their end."""
    key_offsets: Tensor
    """[S + 1] int32: the same of keys. A row reads its prompt's, then its own."""
    key_tokens: Tensor
    """[M] whose keys these are."""
    max_query_length: int
    max_key_length: int


Kernel = Callable[[Tensor, Tensor, Tensor, Spread, int], Tensor]
"""[N, H, d] of queries [N, H, d], keys and values [M, K, d] of the sequences, and a window, 0 for none."""


def grouped(query: Tensor, keys: Tensor, values: Tensor, varlen: Spread, window: int) -> Tensor:
    """Heads that share keys are passed as they are."""
    sequences = varlen.query_offsets, varlen.key_offsets, varlen.max_query_length, varlen.max_key_length
    dropout, causal, debug = 0.0, not window, False
    sides = {"window_size_left": window - 1 if window else -1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(query, keys, values, *sequences, dropout, causal, debug, **sides)[0]


def repeated(query: Tensor, keys: Tensor, values: Tensor, varlen: Spread, window: int) -> Tensor:
    """Keys and values are copied for each head that reads them."""
    times = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(times, 1) for x in (keys, values))
    return grouped(query, keys, values, varlen, window)


KERNELS: tuple[Kernel, ...] = (grouped, repeated)
"""The ways to call the operator, in the order in which they are tried."""


def spread(sequences: Line, device: torch.device) -> Spread:
    lengths = sequences.ends.diff(prepend=sequences.ends.new_zeros(1))
    begins, prompts = sequences.ends - lengths, len(sequences.ends) - len(sequences.prompt_of)
    none = lengths.new_zeros(prompts)
    shared = torch.cat([none, lengths[sequences.prompt_of]])
    read = shared + lengths
    ends = read.cumsum(0)
    place = torch.arange(int(ends[-1])) - (ends - read).repeat_interleave(read)  # of a key in its sequence
    of_prompt, own, before = (
        x.repeat_interleave(read) for x in (torch.cat([none, begins[sequences.prompt_of]]), begins - shared, shared)
    )
    tokens = torch.where(place < before, of_prompt, own) + place
    zero = ends.new_zeros(1)
    queries, keys = torch.stack([torch.cat([zero, sequences.ends]), torch.cat([zero, ends])]).int().to(device)
    return Spread(queries, keys, tokens.to(device), int(lengths.max()), int(read.max()))


def kernel_of(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """What computes attention in this dtype on this device; None if operators do."""
    halves = dtype in (torch.bfloat16, torch.float16)
    return choice(device, dtype)[0] if device.type == "cuda" and halves else None


def reads(query: Tensor) -> bool:
    """Whether the kernel takes queries [N, H, d] like these: with a forward-mode gradient it does not."""
    size = query.shape[2]
    return size % 8 == 0 and size <= WIDEST and forward_ad.unpack_dual(query).tangent is None


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, by: Spread, window: int = 0) -> Tensor:
    """[N, H d] from queries [N, H, d], keys and values [N, K, d]: each query reads the keys up to its own, or the last
    `window` of them if that is not 0.
    """
    keys, values = (x.index_select(0, by.key_tokens) for x in (key, value))
    return kernel(query, keys, values, by, window).flatten(1)


# ---------------------------------------------------------------- the trial


@functools.cache
def choice(device: torch.device, dtype: torch.dtype) -> tuple[Kernel | None, str]:
    """The first kernel that is right on this device, and why the one before it is not."""
    fault = ""
    for kernel in KERNELS:
        try:
            wrong = trial(kernel, device, dtype)
        except (RuntimeError, AttributeError) as error:  # no such kernel on this GPU, or in this torch
            wrong = str(error).splitlines()[0]
        if not wrong:
            return kernel, fault
        fault = wrong
    return None, fault


def trial(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with a kernel; empty if nothing is. It is tried on a prompt of 30 tokens and rows of 5, none and 9,
    with a sliding window of 12 tokens and without.
    """
    heads, line = (6, 2, 2), Line(torch.tensor([30, 35, 35, 44]), torch.tensor([0, 0, 0]))
    numbers = torch.randn(44, sum(heads) + heads[0], 64, generator=torch.Generator().manual_seed(1))
    x, grad = numbers.to(device, dtype).split([sum(heads), heads[0]], 1)
    of_kernel, by_hand = partial(attend, kernel, by=spread(line, device)), partial(by_sequence, line=line)
    for window in (0, 12):
        found = graded(partial(of_kernel, window=window), x, heads, grad.flatten(1))
        wanted = graded(partial(by_hand, window=window), x.float(), heads, grad.flatten(1).float())
        for name, one, other in zip(("what is read", "its gradient"), found, wanted, strict=True):
            off = float((one - other).abs().max() / other.abs().max())
            if not off < CLOSE:
                return f"{name} is off by {off:.1g} of the largest number"
    return ""


@torch.enable_grad()
def graded(attention: Callable[..., Tensor], x: Tensor, heads: Sequence[int], grad: Tensor) -> tuple[Tensor, Tensor]:
    """What is read by heads that stand side by side in x, and the gradient of x."""
    x = x.detach().requires_grad_()
    found = attention(*x.split(heads, 1))
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
