"""Grouped-query attention: in PyTorch for padded rows, compiled for packed sequences on the CPU, and flash on a GPU.

On the CPU a token has the same bits whether it is sampled or scored.

Shapes: B rows, H query heads, K key heads, T queries, S keys, d head size; packed, N tokens of all sequences.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from pellucid.algorithm.batch import copy_to_device
from pellucid.models import native
from pellucid.models.native import (
    KERNEL_HEAD_SIZES,
    KernelUnavailableError,
    KernelVariant,
    add_self_check,
    call_kernel,
    list_variants,
    select_kernels,
)
from pellucid.models.ops import promote_to_fp32

MAX_SCORES_PER_CHUNK = 2**20
"""Scores computed at once, 4 MB in fp32: they then stay in the processor's cache between operators."""


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int = 0) -> Tensor:
    """Compute softmax(q k' / sqrt(d) + bias) v, [B, H, T, d].

    Args:
        query: [B, H, T, d]
        key: [B, K, S, d]
        value: [B, K, S, d]
        bias: [B, 1, T, S], 0 or -inf.
        shared_length: The number of keys, at the start, that belong to the prompt. Sampling multiplies these for all
            rows of a group at once. On the CPU they are a separate product here as well, so that sums are rounded in
            the same places.
    """
    if query.device.type == "cpu":
        return ChunkedAttention.apply(query, key, value, bias, shared_length)  # pyright: ignore[reportReturnType]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


class ChunkedAttention(torch.autograd.Function):
    """Attention as batched matrix products; the backward pass computes the probabilities again.

    PyTorch's attention is slower on CPUs, and its result for a row depends on how many rows there are. Plain attention
    under autograd would keep B H T S probabilities of every layer.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
        ctx.save_for_backward(query, key, value, bias)
        return attend_chunked(query, key, value, bias, shared_length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = zip(
            *(_compute_attention_gradients(*part) for part in _split_rows(*ctx.saved_tensors, grad)), strict=True
        )
        return *(torch.cat(pieces) for pieces in gradients), None, None


def attend_chunked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, shared_length: int) -> Tensor:
    """Compute `attend` on the CPU, in chunks of a few rows, and of a few queries if a row has many."""
    rows = []
    for q, k, v, b in _split_rows(query, key, value, bias):
        queries = max(1, MAX_SCORES_PER_CHUNK // (q.shape[0] * q.shape[1] * k.shape[2]))
        chunks = zip(q.split(queries, 2), b.split(queries, 2), strict=True)
        rows.append(torch.cat([_attend_chunk(*chunk, k, v, shared_length) for chunk in chunks], 2))
    return torch.cat(rows)


def _split_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *others: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors into chunks of one row, or of several with at most MAX_SCORES_PER_CHUNK scores."""
    rows = max(1, MAX_SCORES_PER_CHUNK // (query.shape[1] * bias[0].numel()))
    return zip(*(x.split(rows) for x in (query, key, value, bias, *others)), strict=True)


def _attend_chunk(query: Tensor, bias: Tensor, key: Tensor, value: Tensor, shared_length: int) -> Tensor:
    probs = select_kernels(query, query.dtype, key.shape[2]).softmax(_compute_scores(query, key), bias)
    out = probs[..., shared_length:] @ value[:, :, shared_length:]
    if shared_length:
        out = out + probs[..., :shared_length] @ value[:, :, :shared_length]
    return out.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _compute_scores(query: Tensor, key: Tensor) -> Tensor:
    """Return q k' / sqrt(d), [B, K, H / K * T, S]."""
    return _group_query_heads(query * query.shape[-1] ** -0.5, key.shape[1]) @ key.mT


def _group_query_heads(x: Tensor, key_heads: int) -> Tensor:
    """[B, H, T, d] -> [B, K, H / K * T, d]: all queries of a key head are rows of one product."""
    return x.unflatten(1, (key_heads, -1)).flatten(2, 3)


def _compute_attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, from scores in fp32.

    In bf16, with 8 bits, a score of 30 would be off by up to 1/16, and its probability by 6%.
    """
    key_heads, length, scale = key.shape[1], query.shape[2], query.shape[-1] ** -0.5
    scores = _compute_scores(promote_to_fp32(query), promote_to_fp32(key))
    query, grad = _group_query_heads(query, key_heads), _group_query_heads(grad, key_heads)
    kernels = select_kernels(grad, grad.dtype, key.shape[2])
    probs, scores_grad = kernels.softmax_backward(scores, bias, grad @ value.mT, scale)
    query_grad = (scores_grad @ key).unflatten(2, (-1, length)).flatten(1, 2)
    return query_grad, scores_grad.mT @ query, probs.mT @ grad


# ---------------------------------------------------------------- packed sequences on the CPU
# Attention of packed sequences and its backward pass in C++ (cpp/rollouts.cpp): no row is padded.
#
# Results have the bits of sampling; the self-check compares them with PyTorch's operators for AVX-512 and for AMX.
# Gradients follow the formulas of `_compute_attention_gradients`; only the factors of products are rounded.


class PackedSequences(NamedTuple):
    """P prompts and B rows that follow one another in N tokens; on the CPU."""

    ends: Tensor
    """[P + B] the index after the last token of each sequence."""
    prompt_of: Tensor
    """[B] the prompt of each row."""
    window: int = 0
    """How many tokens a token attends to, itself included; 0 is all."""


class _SequencesStruct(ctypes.Structure):
    """The struct of the same fields in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("prompts", "rows", "heads", "key_heads", "size", "window")),
        *((name, ctypes.c_void_p) for name in ("ends", "prompt_of")),
    )


class _HeadsStruct(ctypes.Structure):
    """The struct of the same fields in cpp/rollouts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_apart", "key_apart", "value_apart")),
    )


def find_attention_kernel(query: Tensor) -> KernelVariant | None:
    """Return the kernel that takes queries [N, H, d] like these; None if PyTorch's operators are used."""
    if query.shape[2] not in KERNEL_HEAD_SIZES or not native.find_kernels(query, query.dtype):
        return None
    return load_attention_kernel()[0]


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, kernel: KernelVariant
) -> Tensor:
    """Compute causal attention of packed sequences: each token attends to its prompt and to its row up to itself.

    Queries [N, H, d], keys and values [N, K, d] -> [N, H d]. The kernel is from `find_attention_kernel`. Raises
    MemoryError.
    """
    return PackedAttention.apply(query, key, value, sequences, kernel)  # pyright: ignore[reportReturnType]


class PackedAttention(torch.autograd.Function):
    """Autograd of `attend_packed`: with g the gradient of probabilities p, that of scores is p (g - sum p g)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, kernel: KernelVariant
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.sequences, ctx.kernel = sequences, kernel
        return _run_attention_forward(query, key, value, sequences, kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        heads = ctx.saved_tensors  # accessed once: a checkpointed layer returns its saved tensors only once
        gradients = [x.new_empty(x.shape) for x in heads]
        outputs = make_heads_struct(gradients)
        call_attention_kernel("attention_backward", ctx.kernel, ctx.sequences, heads, grad.contiguous(), outputs)
        return *gradients, None, None


def _run_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, kernel: KernelVariant
) -> Tensor:
    out = query.new_empty(len(query), query.shape[1] * query.shape[2])
    call_attention_kernel("attention_forward", kernel, sequences, (query, key, value), out)
    return out


def call_attention_kernel(
    name: str, kernel: KernelVariant, sequences: PackedSequences, heads: tuple[Tensor, ...], *others: Any
) -> None:
    """Call a function of the library under its name in torch's profiler. Raises MemoryError."""
    query, key, _ = heads
    sizes = (
        len(sequences.ends) - len(sequences.prompt_of),
        len(sequences.prompt_of),
        query.shape[1],
        *key.shape[1:],
        sequences.window,
    )
    struct = _SequencesStruct(*sizes, sequences.ends.data_ptr(), sequences.prompt_of.data_ptr())
    dense = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in heads]
    function, threads = getattr(kernel.library, name), torch.get_num_threads()
    with record_function(name):
        status = call_kernel(function, struct, make_heads_struct(dense), *others, kernel.uses_amx, threads)
    if status:
        raise MemoryError(f"not enough memory to compute {len(query)} tokens at once")


def make_heads_struct(heads: Sequence[Tensor]) -> _HeadsStruct:
    return _HeadsStruct(*(x.data_ptr() for x in heads), *(x.stride(0) for x in heads))


def _list_attention_kernels() -> list[KernelVariant]:
    kernels, reason = native.load_kernels()
    if not kernels:
        raise KernelUnavailableError(reason)
    return list_variants(kernels.library)


def compare_attention(kernel: KernelVariant) -> Iterable[tuple[str, Any, Any]]:
    """Attend in a prompt of 30 tokens and a row of 31; see `add_self_check`.

    For so few keys the order of sums of oneDNN with AMX is known. It is not that of AVX-512: five of these numbers
    differ.
    """
    heads, prompt_length, row_length, padded_length = (9, 3, 3), 30, 31, 32
    lengths = [prompt_length, row_length]
    x = (torch.randn(sum(lengths), sum(heads), 256, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    sequences = PackedSequences(torch.tensor(lengths).cumsum(0), torch.tensor([0]))

    def pad(heads: Tensor) -> list[Tensor]:
        """The prompt and the row, [1, -, padded_length, d] each."""
        return [F.pad(x, (0, 0, 0, 0, 0, padded_length - len(x)))[None].transpose(1, 2) for x in heads.split(lengths)]

    causal_bias = torch.full((padded_length, padded_length), -torch.inf, dtype=x.dtype).triu(1)
    prompt_bias = torch.zeros_like(causal_bias)
    prompt_bias[:, prompt_length:] = -torch.inf
    row_bias = torch.cat([prompt_bias, causal_bias], 1)[None, None]
    query, key, value = x.split(heads, 1)
    queries, keys, values = map(pad, (query, key, value))
    prompt = attend_chunked(queries[0], keys[0], values[0], causal_bias[None, None], 0)
    row = attend_chunked(queries[1], torch.cat(keys, 2), torch.cat(values, 2), row_bias, padded_length)
    expected = [x[0].transpose(0, 1).flatten(1)[:n] for x, n in zip((prompt, row), lengths, strict=True)]
    yield "attention", _run_attention_forward(query, key, value, sequences, kernel), torch.cat(expected)


load_attention_kernel = add_self_check("attention", _list_attention_kernels, compare_attention)
"""Return the attention kernel, or None and the reason why there is none."""


# ---------------------------------------------------------------- packed sequences on a GPU
# Attention of packed sequences on a GPU, with PyTorch's flash attention for sequences of any lengths: no row is padded,
# and scores are not written to memory.
#
# The operator is called directly: `torch.nn.attention.varlen` takes no grouped heads before torch 2.12. Each device is
# checked once: the kernel is used if its results and gradients are right.
#
# Shapes: S sequences (prompts and rows), M keys that they attend to.


_MAX_FLASH_HEAD_SIZE = 256
_FLASH_TOLERANCE = 2.0**-5
"""The largest error allowed, as a share of the largest number: two roundings to bf16."""


class VarlenSequences(NamedTuple):
    """PackedSequences as the flash kernel takes them, on the device."""

    query_offsets: Tensor
    """[S + 1] int32: where the queries of each sequence begin, and the end of the last."""
    key_offsets: Tensor
    """[S + 1] int32: the same for keys. A row has the keys of its prompt, then its own."""
    key_tokens: Tensor
    """[M] the token of each key."""
    max_query_length: int
    max_key_length: int


def run_flash(query: Tensor, keys: Tensor, values: Tensor, varlen: VarlenSequences, window: int) -> Tensor:
    """Queries [N, H, d], keys and values [M, K, d] -> [N, H, d]; a window of 0 is none."""
    sequences = varlen.query_offsets, varlen.key_offsets, varlen.max_query_length, varlen.max_key_length
    dropout, causal, debug = 0.0, not window, False
    sides = {"window_size_left": window - 1 if window else -1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(query, keys, values, *sequences, dropout, causal, debug, **sides)[0]


def build_varlen_sequences(sequences: PackedSequences, device: torch.device) -> VarlenSequences:
    """Convert PackedSequences for the flash kernel, and copy them to a device."""
    lengths = sequences.ends.diff(prepend=sequences.ends.new_zeros(1))
    starts, prompt_count = sequences.ends - lengths, len(sequences.ends) - len(sequences.prompt_of)
    zeros = lengths.new_zeros(prompt_count)
    shared_lengths = torch.cat([zeros, lengths[sequences.prompt_of]])
    key_lengths = shared_lengths + lengths
    key_ends = key_lengths.cumsum(0)
    index_in_sequence = torch.arange(int(key_ends[-1])) - (key_ends - key_lengths).repeat_interleave(key_lengths)
    prompt_start, own_start, shared_length = (
        x.repeat_interleave(key_lengths)
        for x in (torch.cat([zeros, starts[sequences.prompt_of]]), starts - shared_lengths, shared_lengths)
    )
    tokens = torch.where(index_in_sequence < shared_length, prompt_start, own_start) + index_in_sequence
    offsets = torch.stack([F.pad(sequences.ends, (1, 0)), F.pad(key_ends, (1, 0))])
    query_offsets, key_offsets = copy_to_device(offsets.int(), device)
    max_lengths = int(lengths.max()), int(key_lengths.max())
    return VarlenSequences(query_offsets, key_offsets, copy_to_device(tokens, device), *max_lengths)


def uses_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packed sequences of this dtype have flash attention on this device."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not find_flash_fault(device, dtype)


def supports_flash(head_size: int) -> bool:
    """Return whether the kernel takes heads of this size."""
    return head_size % 8 == 0 and head_size <= _MAX_FLASH_HEAD_SIZE


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, varlen: VarlenSequences, window: int = 0) -> Tensor:
    """Compute what `attend_packed` computes, with flash attention; a window of 0 is none."""
    keys, values = (x.index_select(0, varlen.key_tokens) for x in (key, value))
    return run_flash(query, keys, values, varlen, window).flatten(1)


@functools.cache
def find_flash_fault(device: torch.device, dtype: torch.dtype) -> str:
    """Return why flash attention cannot be used on this device; empty if it can.

    It is compared with attention in fp32 on a prompt of 30 tokens and rows of 5, 0 and 9, with a sliding window of
    12 tokens and without.
    """
    heads, sequences = (6, 2, 2), PackedSequences(torch.tensor([30, 35, 35, 44]), torch.tensor([0, 0, 0]))
    numbers = torch.randn(44, sum(heads) + heads[0], 64, generator=torch.Generator().manual_seed(1))
    x, grad = numbers.to(device, dtype).split([sum(heads), heads[0]], 1)
    flash = partial(attend_varlen, varlen=build_varlen_sequences(sequences, device))
    reference = partial(_attend_by_sequence, sequences=sequences)
    for window in (0, 12):
        try:
            found = _compute_with_gradient(partial(flash, window=window), x, heads, grad.flatten(1))
        except (RuntimeError, AttributeError) as error:  # this GPU or this version of torch lacks the kernel
            return str(error).splitlines()[0]
        expected = _compute_with_gradient(partial(reference, window=window), x.float(), heads, grad.flatten(1).float())
        for name, ours, theirs in zip(("attention", "its gradient"), found, expected, strict=True):
            error_share = float((ours - theirs).abs().max() / theirs.abs().max())
            if not error_share < _FLASH_TOLERANCE:
                return f"{name} is off by {error_share:.1g} of the largest number"
    return ""


@torch.enable_grad()
def _compute_with_gradient(
    attention: Callable[..., Tensor], x: Tensor, heads: Sequence[int], grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries, keys and values that are concatenated in x, and the gradient of x."""
    x = x.detach().requires_grad_()
    out = attention(*x.split(heads, 1))
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


def _attend_by_sequence(query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, window: int) -> Tensor:
    """Compute what `attend_varlen` computes, in PyTorch, sequence by sequence."""
    spans = [range(*span) for span in pairwise([0, *sequences.ends.tolist()])]
    prompt_count, outputs = len(spans) - len(sequences.prompt_of), []
    for i, own in enumerate(spans):
        shared = list(spans[sequences.prompt_of[i - prompt_count]]) if i >= prompt_count else []
        tokens = [*shared, *own]
        distance = torch.arange(len(tokens)) - torch.arange(len(shared), len(tokens))[:, None]  # of a key to its query
        hidden = (distance > 0) | (distance <= -(window or len(tokens) + 1))
        keys, values = (x[tokens].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[list(own)], keys) * query.shape[2] ** -0.5
        probs = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, values).flatten(1))
    return torch.cat(outputs)
