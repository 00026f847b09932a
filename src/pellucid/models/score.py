"""The scoring face: hidden states of rollouts with gradient, what a group shares computed once, no padding computed.

A group shares its prompt, and the tokens that all its responses were given to begin with. All that is shared stands
first, then what each response has of its own, token after token in one dimension; only attention sees rows. The last
token of a response predicts nothing and is left out. Where tokens stand is worked out on the CPU, as sizes follow from
it: no device is waited for.

Shapes: N tokens in all, P prompts with room for S tokens, B rows with room for T of which they read one less than they
have, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.models import attention as varlen
from pellucid.models.attention import PackedSequences, attend, attend_packed, find_attention_kernel
from pellucid.models.autograd_ops import apply_rms_norm
from pellucid.models.decoder import EAGER_LAYER_FUNCTIONS, Decoder, LayerFunctions, QueryKeyValue, ResidualStream
from pellucid.models.linear import VocabularyMatrix, look_up_embeddings

SIMD_LANES = 16
"""Keys of a prompt, and of what a row has said, are padded to a multiple of so many. A softmax adds up lane by lane of
the processor's vectors: keys that stand in the same lanes, whoever their neighbours are, add up to the same bits.
"""


@dataclass
class PackedRows:
    """Tokens of several rows, one after the other, and where they stand in rows of one length T."""

    ids: Tensor
    """[n]"""
    positions: Tensor
    """[n], counted from the start of the prompt."""
    padded_indices: Tensor
    """[n] in rows * T."""
    padded_shape: tuple[int, int]
    """rows, T"""
    make_bias: Callable[[], Tensor]

    @cached_property
    def bias(self) -> Tensor:
        """[rows, 1, T, keys]: 0 where a key is read, -inf elsewhere. There are keys beyond the last that is read.

        Of long texts it is large: it is made where attention is computed by operators that read it.
        """
        return self.make_bias()


class BatchLayout(NamedTuple):
    """Where each token of a batch stands."""

    prompts: PackedRows
    """What is shared included."""
    responses: PackedRows
    """What is not shared. Their keys are those of their prompt, then their own."""
    prompt_of: Tensor
    """[B]"""
    prompt_lengths: Tensor
    """[B] the lengths of their prompts."""
    prompt_capacity: int
    """S, of the prompts' keys in front of those of a row."""
    sequences: PackedSequences
    """The same tokens as sequences, one behind the other."""
    varlen_sequences: varlen.VarlenSequences | None
    """The same where a GPU reads them so."""
    source_tokens: Tensor
    """The token that predicts each scored token, in the order of batch.scored."""


def pack_prompts(
    prompts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[PackedRows, Tensor]:
    """The Rows of these prompts, and on the CPU their lengths [P]."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    steps = torch.arange(round_up(max(map(len, prompts))))
    real = steps < lengths[:, None]
    ids = torch.tensor([token for row in prompts for token in row])

    def bias() -> Tensor:
        there = torch.arange(len(steps), device=device)
        return make_attention_bias((there <= there[:, None]).expand(len(prompts), -1, -1), dtype)

    return pack_rows(ids, steps.expand_as(real)[real], real, device, bias), lengths


def pack_rows(
    ids: Tensor, positions: Tensor, real: Tensor, device: torch.device, make_bias: Callable[[], Tensor]
) -> PackedRows:
    """The Rows of tokens [n] that stand where `real` [rows, T] is true, taken to the device in one piece."""
    places = real.flatten().nonzero()[:, 0]
    ids, positions, places = torch.stack([ids, positions, places]).to(device)
    return PackedRows(ids, positions, places, (len(real), real.shape[1]), make_bias)


def build_layout(batch: Batch, dtype: torch.dtype, device: torch.device) -> BatchLayout:
    used, prompt_of = batch.prompt_indices.unique(return_inverse=True)
    shared = find_shared_prefixes(batch, prompt_of, len(used))
    contexts = [(*batch.prompt_ids[p], *ids) for p, ids in zip(used.tolist(), shared, strict=True)]
    prompts, lengths = pack_prompts(contexts, dtype, device)
    begun = torch.tensor([len(ids) for ids in shared])[prompt_of, None]  # [B, 1]
    mask, own_ids = shift_rows(batch.response_mask, begun), shift_rows(batch.response_ids, begun)
    read = mask[:, 1:]  # token t is read where there is a token t + 1
    starts, room = lengths[prompt_of], prompts.padded_shape[1]
    starts_there = starts.to(device)
    positions = (starts[:, None] + torch.arange(read.shape[1]))[read]
    bias = partial(compute_response_bias, starts_there, room, read.shape[1], dtype)
    responses = pack_rows(own_ids[:, :-1][read], positions, read, device, bias)
    ends = (lengths.cumsum(0) - 1)[prompt_of, None]
    firsts = len(prompts.ids) + (read.sum(-1).cumsum(0) - read.sum(-1))[:, None]
    further = torch.arange(batch.response_mask.shape[1]) - begun  # tokens of a row's own before this one
    sources = torch.where(further <= 0, ends + further, firsts + further - 1)[batch.scored_mask]
    line = PackedSequences(torch.cat([lengths, read.sum(-1)]).cumsum(0), prompt_of)
    spread = varlen.build_varlen_sequences(line, device) if varlen.find_flash_kernel(device, dtype) else None
    return BatchLayout(prompts, responses, prompt_of.to(device), starts_there, room, line, spread, sources.to(device))


def compute_response_bias(starts: Tensor, size: int, width: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, width, size + room]: rows read their prompts, of these lengths [B] and with room for `size` tokens, and
    their own tokens up to each one.
    """
    own = torch.arange(round_up(width), device=starts.device)
    of_prompt = torch.arange(size, device=starts.device) < starts[:, None]
    read = [of_prompt[:, None].expand(-1, width, -1), (own <= own[:width, None]).expand(len(starts), -1, -1)]
    return make_attention_bias(torch.cat(read, -1), dtype)


def find_shared_prefixes(batch: Batch, prompt_of: Tensor, prompts: int) -> list[list[int]]:
    """Of each prompt the tokens that all its rows were given to begin with."""
    first = reduce_min_by_prompt(torch.arange(len(batch), device=prompt_of.device), prompt_of, prompts)
    given, ids = batch.response_mask & ~batch.action_mask, batch.response_ids
    alike = given & given[first][prompt_of] & (ids == ids[first][prompt_of])
    lengths = reduce_min_by_prompt(alike.long().cumprod(-1).sum(-1), prompt_of, prompts)
    return [ids[row, :length].tolist() for row, length in zip(first.tolist(), lengths.tolist(), strict=True)]


def reduce_min_by_prompt(x: Tensor, prompt_of: Tensor, prompts: int) -> Tensor:
    """[B] -> [P]: the lowest value among the rows of each prompt."""
    return x.new_zeros(prompts).scatter_reduce(0, prompt_of, x, "amin", include_self=False)


def shift_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """[B, T] -> [B, T']: each row from its token by [B, 1] on, 0 behind its end; T' is the width that this leaves."""
    places = torch.arange(x.shape[1] - int(offsets.min()), device=x.device) + offsets
    there = places < x.shape[1]
    return x.gather(1, places.clamp(max=x.shape[1] - 1)).masked_fill(~there, 0)


def round_up(length: int, step: int = SIMD_LANES) -> int:
    return -(-length // step) * step


def make_attention_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, T, keys] bool -> [rows, 1, T, keys]"""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)[:, None]


def mask_beyond_window(bias: Tensor, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """bias [rows, 1, T, keys] for a sliding window: no key is read that stands `window` or more before its query.

    queries [rows, T] and keys [rows, keys]: their positions.
    """
    far = keys[:, None] <= queries[..., None] - window
    return bias.masked_fill(far[:, None], -torch.inf)


def apply_sliding_window(layout: BatchLayout, window: int) -> BatchLayout:
    """The layout as a layer with a sliding window reads it."""
    prompts, responses, starts = layout.prompts, layout.responses, layout.prompt_lengths[:, None]
    steps = torch.arange(layout.prompt_capacity, device=starts.device)[None]

    def bias() -> Tensor:
        length, keys = responses.bias.shape[2:]
        own = starts + torch.arange(keys - layout.prompt_capacity, device=starts.device)  # [B, own keys]
        return mask_beyond_window(
            responses.bias, own[:, :length], torch.cat([steps.expand(len(own), -1), own], 1), window
        )

    return layout._replace(
        sequences=layout.sequences._replace(window=window),
        prompts=replace(prompts, make_bias=lambda: mask_beyond_window(prompts.bias, steps, steps, window)),
        responses=replace(responses, make_bias=bias),
    )


def compute_hidden_states(
    decoder: Decoder, batch: Batch, recompute: bool = False, functions: LayerFunctions = EAGER_LAYER_FUNCTIONS
) -> tuple[Tensor, VocabularyMatrix]:
    """[N, D] states that predict the N scored tokens of a batch, row by row, and the head [V, D] that reads them.

    recompute: keep only the residual stream of each layer for the backward pass.
    """
    layout, shape = build_layout(batch, decoder.dtype, decoder.device), decoder.shape
    near = apply_sliding_window(layout, shape.window) if any(shape.is_sliding) else layout
    embedding, last, head = decoder.collect_outer_weights()
    rotary = decoder.compute_rotary(torch.cat([layout.prompts.positions, layout.responses.positions]))
    ids = torch.cat([layout.prompts.ids, layout.responses.ids])
    # A GPU would have to tell the host which rows were read.
    sparse = decoder.head is decoder.embedding and decoder.device.type == "cpu"
    stream = ResidualStream(look_up_embeddings(ids, embedding, sparse).to(last.dtype))
    for layer, slides in zip(decoder.layers, shape.is_sliding, strict=True):
        attention = partial(attend_groups, layout=near if slides else layout)
        stream = layer(stream, rotary, attention, functions, recompute)
    hidden = stream.add_pending().index_select(0, layout.source_tokens)
    return apply_rms_norm(hidden, last, shape.eps, decoder.dtype), head


def attend_groups(heads: QueryKeyValue, layout: BatchLayout) -> Tensor:
    """[N, H d]: prompts read themselves, responses their prompt and themselves."""
    if by := find_attention_kernel(heads[0]):
        return attend_packed(*heads, layout.sequences, by)
    if layout.varlen_sequences and varlen.supports_flash(heads[0]):
        kernel = varlen.find_flash_kernel(heads[0].device, heads[0].dtype)
        assert kernel
        return varlen.attend_varlen(kernel, *heads, layout.varlen_sequences, layout.sequences.window)
    prompts, responses = layout.prompts, layout.responses
    count = len(prompts.ids)
    query, key, value = (pad_rows(x[:count], prompts) for x in heads)
    read = [unpad_rows(attend(query, key, value, prompts.bias), prompts)]
    if len(responses.ids):
        query, own_key, own_value = (pad_rows(x[count:], responses) for x in heads)
        key, value = concatenate_keys(key, own_key, layout), concatenate_keys(value, own_value, layout)
        read.append(
            unpad_rows(attend(query, key, value, responses.bias, shared_length=layout.prompt_capacity), responses)
        )
    return torch.cat(read)


def concatenate_keys(of_prompts: Tensor, own: Tensor, layout: BatchLayout) -> Tensor:
    """[P, K, S, d] and [B, K, T, d] -> [B, K, keys, d], 0 beyond those that are read."""
    beyond = layout.responses.bias.shape[-1] - of_prompts.shape[2] - own.shape[2]
    of_prompts = of_prompts.index_select(0, layout.prompt_of)
    return torch.cat([of_prompts, own, own.new_zeros(*own.shape[:2], beyond, own.shape[3])], 2)


def pad_rows(heads: Tensor, rows: PackedRows) -> Tensor:
    """[n, H, d] -> [rows, H, T, d], 0 where there is no token."""
    count, length = rows.padded_shape
    padded = heads.new_zeros(count * length, *heads.shape[1:]).index_copy(0, rows.padded_indices, heads)
    return padded.unflatten(0, (count, length)).transpose(1, 2)


def unpad_rows(read: Tensor, rows: PackedRows) -> Tensor:
    """[rows, H, T, d] -> [n, H d]: the inverse."""
    tokens = read.transpose(1, 2).flatten(2).flatten(0, 1)
    if not torch.is_grad_enabled():
        return tokens.index_select(0, rows.padded_indices)
    return SelectRows.apply(tokens, rows.padded_indices)  # pyright: ignore[reportReturnType]


class SelectRows(torch.autograd.Function):
    """x[places] for distinct places: autograd's own backward adds rows up one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [places] = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy(0, places, grad), None
