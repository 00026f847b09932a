"""Attention of whole rollouts and its backward pass in C++ (cpp/rollouts.cpp): tokens stay in line, no row is padded.

What is read has the bits of sampling. Each process tries it once, by AVX-512 and by AMX, against torch's operators,
which go on where it has others (with AMX for so few keys that these add up in its order). Gradients are those of
attention.py, by the same formulas, and nothing is rounded but what is multiplied.

Shapes: N tokens, H query heads, K key heads, d head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from pellucid.models import kernels
from pellucid.models.attention import by_few
from pellucid.models.compiling import call, has_tiles

HEADS = range(64, 257, 64)
"""Sizes of a head."""


class Line(NamedTuple):
    """Tokens of P prompts and of B rows, each sequence's together, one behind the other; on the CPU."""

    ends: Tensor
    """[P + B] the token behind each."""
    prompt_of: Tensor
    """[B]"""
    window: int = 0
    """How many tokens one reads, itself included; 0 is all."""


class Way(NamedTuple):
    """What computes attention here."""

    library: Any
    uses_amx: bool
    """Whether by AMX, and in its order of sums."""


class LineOf(ctypes.Structure):
    """As in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("prompts", "rows", "heads", "key_heads", "size", "window")),
        *((name, ctypes.c_void_p) for name in ("ends", "prompt_of")),
    )


class Projected(ctypes.Structure):
    """As in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_apart", "key_apart", "value_apart")),
    )


def way(query: Tensor) -> Way | None:
    """What computes attention by queries [N, H, d]; None where operators do."""
    return here()[0] if query.shape[2] in HEADS and kernels.fitting(query, query.dtype) else None


def attend_in_line(query: Tensor, key: Tensor, value: Tensor, sequences: Line, kernel: Way) -> Tensor:
    """[N, H d] of what queries [N, H, d] read of keys and values [N, K, d]: their prompt's and their row's up to
    their own.
    """
    if torch.is_grad_enabled():
        return InLine.apply(query, key, value, sequences, kernel)  # pyright: ignore[reportReturnType]
    return read(query, key, value, sequences, kernel)


class InLine(torch.autograd.Function):
    """With p the probabilities, g their gradient: that of the scores is p (g - sum p g)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, line: Line, by: Way) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.line, ctx.by = line, by
        return read(query, key, value, line, by)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        heads = ctx.saved_tensors  # read once: a checkpointed layer hands each of them out once
        gradients = [x.new_empty(x.shape) for x in heads]
        run("attention_backward", ctx.by, ctx.line, heads, grad.contiguous(), projected(gradients))
        return *gradients, None, None


def read(query: Tensor, key: Tensor, value: Tensor, sequences: Line, kernel: Way) -> Tensor:
    out = query.new_empty(len(query), query.shape[1] * query.shape[2])
    run("attention_forward", kernel, sequences, (query, key, value), out)
    return out


def run(name: str, kernel: Way, sequences: Line, heads: tuple[Tensor, ...], *others: Any) -> None:
    """A function of the library, by this name in torch's profiler. MemoryError where there is no memory."""
    query, key, _ = heads
    sizes = (
        len(sequences.ends) - len(sequences.prompt_of),
        len(sequences.prompt_of),
        query.shape[1],
        *key.shape[1:],
        sequences.window,
    )
    about = LineOf(*sizes, sequences.ends.data_ptr(), sequences.prompt_of.data_ptr())
    together = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in heads]
    function, threads = getattr(kernel.library, name), torch.get_num_threads()
    with record_function(name):
        fault = call(function, about, projected(together), *others, kernel.uses_amx, threads)
    if fault:
        raise MemoryError(f"no memory to read {len(query)} tokens at once")


def projected(heads: Sequence[Tensor]) -> Projected:
    return Projected(*(x.data_ptr() for x in heads), *(x.stride(0) for x in heads))


# ---------------------------------------------------------------- the trial


@functools.cache
def here() -> tuple[Way | None, str]:
    """What computes attention, and why nothing does."""
    found, why = kernels.here()
    if not found:
        return None, why
    for tiles in (False, True) if has_tiles() else (False,):
        if has_bits_of_operators(by := Way(found.library, tiles)):
            return by, ""
    return None, "this processor or this torch rounds otherwise (attention)"


@torch.no_grad()
def has_bits_of_operators(kernel: Way) -> bool:
    """On a prompt of 30 tokens and a row of 31: so few AMX adds up in one order, and it is another one than that of
    AVX-512, which five of these numbers show.
    """
    heads, prompt, own, room = (9, 3, 3), 30, 31, 32
    x = (torch.randn(prompt + own, sum(heads), 256, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    query, key, value = x.split(heads, 1)
    found = read(query, key, value, Line(torch.tensor([prompt, prompt + own]), torch.tensor([0])), kernel)

    def in_rows(heads: Tensor) -> list[Tensor]:
        """Of the prompt and of the row, [1, -, room, d] each."""
        return [F.pad(x, (0, 0, 0, 0, 0, room - len(x)))[None].transpose(1, 2) for x in heads.split([prompt, own])]

    past = torch.full((room, room), -torch.inf, dtype=x.dtype).triu(1)
    beyond = torch.zeros_like(past)
    beyond[:, prompt:] = -torch.inf
    queries, keys, values = map(in_rows, (query, key, value))
    of_prompt = by_few(queries[0], keys[0], values[0], past[None, None], 0)
    bias = torch.cat([beyond, past], 1)[None, None]
    of_row = by_few(queries[1], torch.cat(keys, 2), torch.cat(values, 2), bias, room)
    wanted = [x[0].transpose(0, 1).flatten(1) for x in (of_prompt, of_row)]
    return torch.equal(found, torch.cat([wanted[0][:prompt], wanted[1][:own]]))
