"""Attention of heads that share keys: the same bits whether a token is sampled or scored, and a backward pass for CPUs.

Shapes: B rows, H query heads, K key heads, T queries, S keys, d head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.profiler import record_function

from pellucid.models import native
from pellucid.models.native import call_kernel, has_amx, select_kernels
from pellucid.models.ops import promote_to_fp32

MAX_SCORES_PER_CHUNK = 2**20
"""Scores at once, 4 MB in fp32: what is done to each then stays in the processor's cache."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int = 0) -> Tensor:
    """softmax(q k' / sqrt(d) + bias) v. query [B, H, T, d], key and value [B, K, S, d], bias [B, 1, T, S].

    shared: so many of the keys stand first and are a prompt's, which sampling reads for all rows of a group at once.
    On the CPU they are read in a product of their own here, too, and rounded where sampling rounds.
    """
    if query.device.type == "cpu" and not torch.is_grad_enabled():
        return attend_chunked(query, key, value, bias, shared_length)
    if query.device.type == "cpu":
        return ChunkedAttention.apply(query, key, value, bias, shared_length)  # pyright: ignore[reportReturnType]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


class ChunkedAttention(torch.autograd.Function):
    """A few batched matrix products, and backward a few more, the probabilities made anew: torch's own are slower on
    CPUs and compute a row in a way that depends on how many there are, and plain attention under autograd would keep
    B H T S probabilities of every layer.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared: int) -> Tensor:
        ctx.save_for_backward(query, key, value, bias)
        return attend_chunked(query, key, value, bias, shared)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = zip(
            *(compute_attention_gradients(*part) for part in split_rows(*ctx.saved_tensors, grad)), strict=True
        )
        return *(torch.cat(pieces) for pieces in gradients), None, None


def attend_chunked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    """`attend` on the CPU, a few rows at a time."""
    return torch.cat([attend_rows(q, k, v, b, shared_length) for q, k, v, b in split_rows(query, key, value, bias)])


def split_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *others: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """A few rows of each at a time."""
    rows = max(1, MAX_SCORES_PER_CHUNK // (query.shape[1] * bias[0].numel()))
    return zip(*(x.split(rows) for x in (query, key, value, bias, *others)), strict=True)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    """[B, H, T, d], a few queries at a time where one row has many."""
    queries = max(1, MAX_SCORES_PER_CHUNK // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = zip(query.split(queries, 2), bias.split(queries, 2), strict=True)
    return torch.cat([attend_chunk(q, key, value, b, shared_length) for q, b in parts], 2)


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    probs = select_kernels(query, query.dtype, key.shape[2]).softmax(compute_scores(query, key), bias)
    out = probs[..., shared_length:] @ value[:, :, shared_length:]
    if shared_length:
        out = out + probs[..., :shared_length] @ value[:, :, :shared_length]
    return out.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def compute_scores(query: Tensor, key: Tensor) -> Tensor:
    """q k' / sqrt(d), [B, K, H / K * T, S]."""
    return group_query_heads(query * query.shape[-1] ** -0.5, key.shape[1]) @ key.mT


def group_query_heads(x: Tensor, key_heads: int) -> Tensor:
    """[B, H, T, d] -> [B, K, H / K * T, d]: all queries of a key head in one product."""
    return x.unflatten(1, (key_heads, -1)).flatten(2, 3)


def compute_attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """Of query, key and value.

    Of a score bf16 keeps 8 bits: at 30 it is off by up to 1/16, and its probability by as much. These are not rounded.
    """
    key_heads, length, scale = key.shape[1], query.shape[2], query.shape[-1] ** -0.5
    scores = compute_scores(promote_to_fp32(query), promote_to_fp32(key))
    query, grad = group_query_heads(query, key_heads), group_query_heads(grad, key_heads)
    computed = select_kernels(grad, grad.dtype, key.shape[2])
    probs, of_scores = computed.softmax_backward(scores, bias, grad @ value.mT, scale)
    of_query = (of_scores @ key).unflatten(2, (-1, length)).flatten(1, 2)
    return of_query, of_scores.mT @ query, probs.mT @ grad


# ---------------------------------------------------------------- lines
# Attention of whole rollouts and its backward pass in C++ (cpp/rollouts.cpp): tokens stay in line, no row is padded.
#
# What is read has the bits of sampling. Each process tries it once, by AVX-512 and by AMX, against torch's operators,
# which go on where it has others (with AMX for so few keys that these add up in its order). Gradients are those of
# attention.py, by the same formulas, and nothing is rounded but what is multiplied.
#
# Shapes: N tokens, H query heads, K key heads, d head size.


KERNEL_HEAD_SIZES = range(64, 257, 64)
"""Sizes of a head."""


class PackedSequences(NamedTuple):
    """Tokens of P prompts and of B rows, each sequence's together, one behind the other; on the CPU."""

    ends: Tensor
    """[P + B] the token behind each."""
    prompt_of: Tensor
    """[B]"""
    window: int = 0
    """How many tokens one reads, itself included; 0 is all."""


class CheckedLibrary(NamedTuple):
    """What computes attention here."""

    library: Any
    uses_amx: bool
    """Whether by AMX, and in its order of sums."""


class SequencesStruct(ctypes.Structure):
    """As in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("prompts", "rows", "heads", "key_heads", "size", "window")),
        *((name, ctypes.c_void_p) for name in ("ends", "prompt_of")),
    )


class HeadsStruct(ctypes.Structure):
    """As in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_apart", "key_apart", "value_apart")),
    )


def find_attention_kernel(query: Tensor) -> CheckedLibrary | None:
    """What computes attention by queries [N, H, d]; None where operators do."""
    return (
        load_checked_library()[0]
        if query.shape[2] in KERNEL_HEAD_SIZES and native.find_kernels(query, query.dtype)
        else None
    )


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, kernel: CheckedLibrary
) -> Tensor:
    """[N, H d] of what queries [N, H, d] read of keys and values [N, K, d]: their prompt's and their row's up to
    their own.
    """
    if torch.is_grad_enabled():
        return PackedAttention.apply(query, key, value, sequences, kernel)  # pyright: ignore[reportReturnType]
    return run_attention_forward(query, key, value, sequences, kernel)


class PackedAttention(torch.autograd.Function):
    """With p the probabilities, g their gradient: that of the scores is p (g - sum p g)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, line: PackedSequences, by: CheckedLibrary
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.line, ctx.by = line, by
        return run_attention_forward(query, key, value, line, by)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        heads = ctx.saved_tensors  # read once: a checkpointed layer hands each of them out once
        gradients = [x.new_empty(x.shape) for x in heads]
        call_attention_kernel(
            "attention_backward", ctx.by, ctx.line, heads, grad.contiguous(), make_heads_struct(gradients)
        )
        return *gradients, None, None


def run_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, kernel: CheckedLibrary
) -> Tensor:
    out = query.new_empty(len(query), query.shape[1] * query.shape[2])
    call_attention_kernel("attention_forward", kernel, sequences, (query, key, value), out)
    return out


def call_attention_kernel(
    name: str, kernel: CheckedLibrary, sequences: PackedSequences, heads: tuple[Tensor, ...], *others: Any
) -> None:
    """A function of the library, by this name in torch's profiler. MemoryError where there is no memory."""
    query, key, _ = heads
    sizes = (
        len(sequences.ends) - len(sequences.prompt_of),
        len(sequences.prompt_of),
        query.shape[1],
        *key.shape[1:],
        sequences.window,
    )
    about = SequencesStruct(*sizes, sequences.ends.data_ptr(), sequences.prompt_of.data_ptr())
    together = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in heads]
    function, threads = getattr(kernel.library, name), torch.get_num_threads()
    with record_function(name):
        fault = call_kernel(function, about, make_heads_struct(together), *others, kernel.uses_amx, threads)
    if fault:
        raise MemoryError(f"no memory to read {len(query)} tokens at once")


def make_heads_struct(heads: Sequence[Tensor]) -> HeadsStruct:
    return HeadsStruct(*(x.data_ptr() for x in heads), *(x.stride(0) for x in heads))


# ---------------------------------------------------------------- the trial


@functools.cache
def load_checked_library() -> tuple[CheckedLibrary | None, str]:
    """What computes attention, and why nothing does."""
    found, why = native.load_kernels()
    if not found:
        return None, why
    for tiles in (False, True) if has_amx() else (False,):
        if passes_attention_self_check(by := CheckedLibrary(found.library, tiles)):
            return by, ""
    return None, "this processor or this torch rounds otherwise (attention)"


@torch.no_grad()
def passes_attention_self_check(kernel: CheckedLibrary) -> bool:
    """On a prompt of 30 tokens and a row of 31: so few AMX adds up in one order, and it is another one than that of
    AVX-512, which five of these numbers show.
    """
    heads, prompt, own, room = (9, 3, 3), 30, 31, 32
    x = (torch.randn(prompt + own, sum(heads), 256, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    query, key, value = x.split(heads, 1)
    found = run_attention_forward(
        query, key, value, PackedSequences(torch.tensor([prompt, prompt + own]), torch.tensor([0])), kernel
    )

    def in_rows(heads: Tensor) -> list[Tensor]:
        """Of the prompt and of the row, [1, -, room, d] each."""
        return [F.pad(x, (0, 0, 0, 0, 0, room - len(x)))[None].transpose(1, 2) for x in heads.split([prompt, own])]

    past = torch.full((room, room), -torch.inf, dtype=x.dtype).triu(1)
    beyond = torch.zeros_like(past)
    beyond[:, prompt:] = -torch.inf
    queries, keys, values = map(in_rows, (query, key, value))
    of_prompt = attend_chunked(queries[0], keys[0], values[0], past[None, None], 0)
    bias = torch.cat([beyond, past], 1)[None, None]
    of_row = attend_chunked(queries[1], torch.cat(keys, 2), torch.cat(values, 2), bias, room)
    wanted = [x[0].transpose(0, 1).flatten(1) for x in (of_prompt, of_row)]
    return torch.equal(found, torch.cat([wanted[0][:prompt], wanted[1][:own]]))


# ---------------------------------------------------------------- varlen
# Attention of whole rollouts on a GPU, by torch's flash attention for sequences of any lengths: no row is padded, no
# score is written to memory.
#
# The operator is called itself, and not `torch.nn.attention.varlen`, which older versions of torch do not have, or have
# without heads that share keys. Each device is tried once: the kernel is used if it computes what attention.py computes,
# and its gradients.
#
# Shapes: N tokens, H query heads, K key heads, d head size, S sequences (prompts and rows), M keys that they read.


MAX_FLASH_HEAD_SIZE = 256
"""The largest head."""
FLASH_TOLERANCE = 2.0**-5
"""How far what is read may be off, of the largest number: rounding to bf16, twice."""


class VarlenSequences(NamedTuple):
    """The sequences of a Line as the kernel takes them, on the device."""

    query_offsets: Tensor
    """[S + 1] int32: where the queries of each sequence begin, and their end."""
    key_offsets: Tensor
    """[S + 1] int32: the same of keys. A row reads its prompt's, then its own."""
    key_tokens: Tensor
    """[M] whose keys these are."""
    max_query_length: int
    max_key_length: int


FlashKernel = Callable[[Tensor, Tensor, Tensor, VarlenSequences, int], Tensor]
"""[N, H, d] of queries [N, H, d], keys and values [M, K, d] of the sequences, and a window, 0 for none."""


def run_flash_grouped(query: Tensor, keys: Tensor, values: Tensor, varlen: VarlenSequences, window: int) -> Tensor:
    """Heads that share keys are passed as they are."""
    sequences = varlen.query_offsets, varlen.key_offsets, varlen.max_query_length, varlen.max_key_length
    dropout, causal, debug = 0.0, not window, False
    sides = {"window_size_left": window - 1 if window else -1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(query, keys, values, *sequences, dropout, causal, debug, **sides)[0]


def run_flash_repeated(query: Tensor, keys: Tensor, values: Tensor, varlen: VarlenSequences, window: int) -> Tensor:
    """Keys and values are copied for each head that reads them."""
    times = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(times, 1) for x in (keys, values))
    return run_flash_grouped(query, keys, values, varlen, window)


FLASH_KERNELS: tuple[FlashKernel, ...] = (run_flash_grouped, run_flash_repeated)
"""The ways to call the operator, in the order in which they are tried."""


def build_varlen_sequences(sequences: PackedSequences, device: torch.device) -> VarlenSequences:
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
    return VarlenSequences(queries, keys, tokens.to(device), int(lengths.max()), int(read.max()))


def find_flash_kernel(device: torch.device, dtype: torch.dtype) -> FlashKernel | None:
    """What computes attention in this dtype on this device; None if operators do."""
    halves = dtype in (torch.bfloat16, torch.float16)
    return choose_flash_kernel(device, dtype)[0] if device.type == "cuda" and halves else None


def supports_flash(query: Tensor) -> bool:
    """Whether the kernel takes queries [N, H, d] like these: with a forward-mode gradient it does not."""
    size = query.shape[2]
    return size % 8 == 0 and size <= MAX_FLASH_HEAD_SIZE and forward_ad.unpack_dual(query).tangent is None


def attend_varlen(
    kernel: FlashKernel, query: Tensor, key: Tensor, value: Tensor, by: VarlenSequences, window: int = 0
) -> Tensor:
    """[N, H d] from queries [N, H, d], keys and values [N, K, d]: each query reads the keys up to its own, or the last
    `window` of them if that is not 0.
    """
    keys, values = (x.index_select(0, by.key_tokens) for x in (key, value))
    return kernel(query, keys, values, by, window).flatten(1)


# ---------------------------------------------------------------- the trial


@functools.cache
def choose_flash_kernel(device: torch.device, dtype: torch.dtype) -> tuple[FlashKernel | None, str]:
    """The first kernel that is right on this device, and why the one before it is not."""
    fault = ""
    for kernel in FLASH_KERNELS:
        try:
            wrong = find_flash_fault(kernel, device, dtype)
        except (RuntimeError, AttributeError) as error:  # no such kernel on this GPU, or in this torch
            wrong = str(error).splitlines()[0]
        if not wrong:
            return kernel, fault
        fault = wrong
    return None, fault


def find_flash_fault(kernel: FlashKernel, device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with a kernel; empty if nothing is. It is tried on a prompt of 30 tokens and rows of 5, none and 9,
    with a sliding window of 12 tokens and without.
    """
    heads, line = (6, 2, 2), PackedSequences(torch.tensor([30, 35, 35, 44]), torch.tensor([0, 0, 0]))
    numbers = torch.randn(44, sum(heads) + heads[0], 64, generator=torch.Generator().manual_seed(1))
    x, grad = numbers.to(device, dtype).split([sum(heads), heads[0]], 1)
    of_kernel, by_hand = (
        partial(attend_varlen, kernel, by=build_varlen_sequences(line, device)),
        partial(attend_by_sequence, line=line),
    )
    for window in (0, 12):
        found = compute_with_gradient(partial(of_kernel, window=window), x, heads, grad.flatten(1))
        wanted = compute_with_gradient(partial(by_hand, window=window), x.float(), heads, grad.flatten(1).float())
        for name, one, other in zip(("what is read", "its gradient"), found, wanted, strict=True):
            off = float((one - other).abs().max() / other.abs().max())
            if not off < FLASH_TOLERANCE:
                return f"{name} is off by {off:.1g} of the largest number"
    return ""


@torch.enable_grad()
def compute_with_gradient(
    attention: Callable[..., Tensor], x: Tensor, heads: Sequence[int], grad: Tensor
) -> tuple[Tensor, Tensor]:
    """What is read by heads that stand side by side in x, and the gradient of x."""
    x = x.detach().requires_grad_()
    found = attention(*x.split(heads, 1))
    return found.detach(), torch.autograd.grad(found, x, grad)[0]


def attend_by_sequence(query: Tensor, key: Tensor, value: Tensor, line: PackedSequences, window: int) -> Tensor:
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
