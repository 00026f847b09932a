"""Scoring: hidden states of rollouts with gradient. Shared tokens are computed once, and padding is not computed.

A group shares its prompt and the prefix that all its responses begin with. The tokens are packed in one dimension:
first those of prompts and shared prefixes, then the other tokens of each response. Only attention works on rows. The
last token of a response predicts nothing and is left out. The layout is computed on the CPU: tensor sizes depend on
it, and the CPU need not wait for the device.

Shapes: N tokens in all, P prompts padded to S tokens, B rows padded to T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.batch import Batch, copy_to_device
from pellucid.models.attention import (
    PackedSequences,
    VarlenSequences,
    attend,
    attend_packed,
    attend_varlen,
    build_varlen_sequences,
    find_attention_kernel,
    supports_flash,
    uses_flash,
)
from pellucid.models.autograd_ops import apply_rms_norm
from pellucid.models.decoder import Decoder, QueryKeyValue, ResidualStream
from pellucid.models.linear import TrainedMatrix, look_up_embeddings

SIMD_LANES = 16
"""The keys of a prompt, and a row's own keys, are padded to a multiple of this. A softmax sums in the vector lanes of
the processor: as long as keys stay in the same lanes, padding does not change the bits of the sum.
"""


# ---------------------------------------------------------------- packed rows


@dataclass
class PackedRows:
    """Tokens of several rows, packed in one dimension, and their indices in rows padded to one length T."""

    ids: Tensor
    """[n]"""
    positions: Tensor
    """[n], counted from the start of the prompt."""
    padded_indices: Tensor
    """[n] indices in the flattened padded rows."""
    padded_shape: tuple[int, int]
    """The number of rows, and T."""
    make_bias: Callable[[], Tensor]

    @cached_property
    def bias(self) -> Tensor:
        """[rows, 1, T, keys]: 0 for a key that is attended to, else -inf; keys are padded.

        It is large for long sequences, so it is made only if the attention operator needs it.
        """
        return self.make_bias()


def pack_prompts(
    prompts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[PackedRows, Tensor]:
    """Pack prompts; return them, and their lengths [P] on the CPU."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    positions = torch.arange(round_up(max(map(len, prompts))))
    is_token = positions < lengths[:, None]
    ids = torch.tensor([token for row in prompts for token in row])

    def make_bias() -> Tensor:
        positions_on_device = torch.arange(len(positions), device=device)
        visible = positions_on_device <= positions_on_device[:, None]
        return make_attention_bias(visible.expand(len(prompts), -1, -1), dtype)

    return pack_rows(ids, positions.expand_as(is_token)[is_token], is_token, device, make_bias), lengths


def pack_rows(
    ids: Tensor, positions: Tensor, is_token: Tensor, device: torch.device, make_bias: Callable[[], Tensor]
) -> PackedRows:
    """Build the PackedRows of tokens, with one copy to the device. `is_token` [rows, T] marks them in padded rows."""
    indices = is_token.flatten().nonzero()[:, 0]
    ids, positions, indices = copy_to_device(torch.stack([ids, positions, indices]), device)
    return PackedRows(ids, positions, indices, (len(is_token), is_token.shape[1]), make_bias)


def pad_rows(heads: Tensor, rows: PackedRows) -> Tensor:
    """[n, H, d] -> [rows, H, T, d], padded with 0."""
    count, length = rows.padded_shape
    padded = heads.new_zeros(count * length, *heads.shape[1:]).index_copy(0, rows.padded_indices, heads)
    return padded.unflatten(0, (count, length)).transpose(1, 2)


def unpad_rows(attended: Tensor, rows: PackedRows) -> Tensor:
    """[rows, H, T, d] -> [n, H d]: the inverse of `pad_rows`."""
    tokens = attended.transpose(1, 2).flatten(2).flatten(0, 1)
    return _SelectRows.apply(tokens, rows.padded_indices)  # pyright: ignore[reportReturnType]


class _SelectRows(torch.autograd.Function):
    """x[indices] for distinct indices; autograd's own backward pass would add the rows one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = len(x)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [indices] = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy(0, indices, grad), None


def round_up(length: int, step: int = SIMD_LANES) -> int:
    return -(-length // step) * step


def make_attention_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, T, keys] bool -> [rows, 1, T, keys]"""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)[:, None]


def mask_beyond_window(bias: Tensor, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Mask keys that are `window` positions or more before their query.

    The bias is [rows, 1, T, keys]; `queries` [rows, T] and `keys` [rows, keys] are positions.
    """
    is_beyond = keys[:, None] <= queries[..., None] - window
    return bias.masked_fill(is_beyond[:, None], -torch.inf)


# ---------------------------------------------------------------- the layout of a batch


class _BatchLayout(NamedTuple):
    """The tokens of a batch, packed: first prompts with shared prefixes, then the rest of each response."""

    prompts: PackedRows
    """Prompts with the prefixes that their responses share."""
    responses: PackedRows
    """The other tokens of responses. Their keys are those of their prompt, then their own."""
    prompt_of: Tensor
    """[B] the prompt of each row."""
    prompt_lengths: Tensor
    """[B] the length of each row's prompt, with the shared prefix."""
    prompt_capacity: int
    """S, the padded length of prompts; keys of a row follow those of its prompt."""
    sequences: PackedSequences
    """The same tokens as sequences for the compiled kernel."""
    varlen_sequences: VarlenSequences | None
    """The same for the flash kernel, if it is used."""
    source_tokens: Tensor
    """The token that predicts each scored token, in the order of batch.scored_mask."""


def build_layout(batch: Batch, dtype: torch.dtype, device: torch.device) -> _BatchLayout:
    used_prompts, prompt_of = batch.prompt_indices.unique(return_inverse=True)
    prefixes = _find_shared_prefixes(batch, prompt_of, len(used_prompts))
    contexts = [(*batch.prompt_ids[p], *ids) for p, ids in zip(used_prompts.tolist(), prefixes, strict=True)]
    prompts, lengths = pack_prompts(contexts, dtype, device)
    prefix_lengths = torch.tensor([len(ids) for ids in prefixes])[prompt_of, None]  # [B, 1]
    mask, own_ids = _shift_rows(batch.response_mask, prefix_lengths), _shift_rows(batch.response_ids, prefix_lengths)
    is_input = mask[:, 1:]  # token t is an input if there is a token t + 1
    starts, capacity = lengths[prompt_of], prompts.padded_shape[1]
    starts_on_device = copy_to_device(starts, device)
    positions = (starts[:, None] + torch.arange(is_input.shape[1]))[is_input]
    make_bias = partial(_compute_response_bias, starts_on_device, capacity, is_input.shape[1], dtype)
    responses = pack_rows(own_ids[:, :-1][is_input], positions, is_input, device, make_bias)
    row_lengths = is_input.sum(-1)
    last_prompt_token = (lengths.cumsum(0) - 1)[prompt_of, None]
    first_own_token = len(prompts.ids) + (row_lengths.cumsum(0) - row_lengths)[:, None]
    offsets = torch.arange(batch.response_mask.shape[1]) - prefix_lengths  # from the first token after the prefix
    sources = torch.where(offsets <= 0, last_prompt_token + offsets, first_own_token + offsets - 1)[batch.scored_mask]
    sequences = PackedSequences(torch.cat([lengths, row_lengths]).cumsum(0), prompt_of)
    return _BatchLayout(
        prompts=prompts,
        responses=responses,
        prompt_of=copy_to_device(prompt_of, device),
        prompt_lengths=starts_on_device,
        prompt_capacity=capacity,
        sequences=sequences,
        varlen_sequences=build_varlen_sequences(sequences, device) if uses_flash(device, dtype) else None,
        source_tokens=copy_to_device(sources, device),
    )


def _compute_response_bias(starts: Tensor, capacity: int, width: int, dtype: torch.dtype) -> Tensor:
    """Compute the bias [B, 1, width, keys] of rows after prompts of lengths `starts` [B], padded to `capacity`."""
    own = torch.arange(round_up(width), device=starts.device)
    prompt_visible = torch.arange(capacity, device=starts.device) < starts[:, None]
    own_visible = own <= own[:width, None]
    visible = [prompt_visible[:, None].expand(-1, width, -1), own_visible.expand(len(starts), -1, -1)]
    return make_attention_bias(torch.cat(visible, -1), dtype)


def _find_shared_prefixes(batch: Batch, prompt_of: Tensor, prompts: int) -> list[list[int]]:
    """Return for each prompt the tokens of the prefix that all its rows begin with."""
    first_rows = _reduce_min_by_prompt(torch.arange(len(batch), device=prompt_of.device), prompt_of, prompts)
    is_prefix, ids = batch.response_mask & ~batch.action_mask, batch.response_ids
    is_shared = is_prefix & is_prefix[first_rows][prompt_of] & (ids == ids[first_rows][prompt_of])
    lengths = _reduce_min_by_prompt(is_shared.long().cumprod(-1).sum(-1), prompt_of, prompts)
    return [ids[row, :length].tolist() for row, length in zip(first_rows.tolist(), lengths.tolist(), strict=True)]


def _reduce_min_by_prompt(x: Tensor, prompt_of: Tensor, prompts: int) -> Tensor:
    """[B] -> [P]: the lowest value among the rows of each prompt."""
    return x.new_zeros(prompts).scatter_reduce(0, prompt_of, x, "amin", include_self=False)


def _shift_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """[B, T] -> [B, T - min(offsets)]: drop the first `offsets` [B, 1] tokens of each row, and pad with 0."""
    indices = torch.arange(x.shape[1] - int(offsets.min()), device=x.device) + offsets
    is_inside = indices < x.shape[1]
    return x.gather(1, indices.clamp(max=x.shape[1] - 1)).masked_fill(~is_inside, 0)


def apply_sliding_window(layout: _BatchLayout, window: int) -> _BatchLayout:
    """Return the layout for a layer with a sliding window."""
    prompts, responses, starts = layout.prompts, layout.responses, layout.prompt_lengths[:, None]
    positions = torch.arange(layout.prompt_capacity, device=starts.device)[None]

    def make_bias() -> Tensor:
        length, keys = responses.bias.shape[2:]
        own = starts + torch.arange(keys - layout.prompt_capacity, device=starts.device)  # [B, own keys]
        key_positions = torch.cat([positions.expand(len(own), -1), own], 1)
        return mask_beyond_window(responses.bias, own[:, :length], key_positions, window)

    return layout._replace(
        sequences=layout.sequences._replace(window=window),
        prompts=replace(prompts, make_bias=lambda: mask_beyond_window(prompts.bias, positions, positions, window)),
        responses=replace(responses, make_bias=make_bias),
    )


# ---------------------------------------------------------------- hidden states


def compute_hidden_states(decoder: Decoder, batch: Batch, recompute: bool = False) -> tuple[Tensor, TrainedMatrix]:
    """Compute the hidden states [n, D], after the last norm, that predict the n scored tokens of a batch, row by row.

    With `recompute` only the residual stream of each layer is kept for the backward pass. Also returns the head [V, D].
    """
    layout, shape = build_layout(batch, decoder.dtype, decoder.device), decoder.shape
    sliding_layout = apply_sliding_window(layout, shape.window) if any(shape.is_sliding) else layout
    embedding, last_norm, head = decoder.collect_outer_weights()
    rotary = decoder.compute_rotary(torch.cat([layout.prompts.positions, layout.responses.positions]))
    ids = torch.cat([layout.prompts.ids, layout.responses.ids])
    # On a GPU, a sparse gradient would wait for the device to return the indices of its rows.
    sparse = decoder.head is decoder.embedding and decoder.device.type == "cpu"
    stream = ResidualStream(look_up_embeddings(ids, embedding, sparse).to(last_norm.dtype))
    for layer, is_sliding in zip(decoder.layers, shape.is_sliding, strict=True):
        attention = partial(attend_groups, layout=sliding_layout if is_sliding else layout)
        stream = layer(stream, rotary, attention, recompute)
    hidden = stream.add_pending().index_select(0, layout.source_tokens)
    return apply_rms_norm(hidden, last_norm, shape.eps, decoder.dtype), head


def attend_groups(heads: QueryKeyValue, layout: _BatchLayout) -> Tensor:
    """Compute attention, [N, H d]: prompts attend to themselves, responses to their prompt and to themselves."""
    if kernel := find_attention_kernel(heads[0]):
        return attend_packed(*heads, layout.sequences, kernel)
    if layout.varlen_sequences and supports_flash(heads[0].shape[2]):
        return attend_varlen(*heads, layout.varlen_sequences, layout.sequences.window)
    prompts, responses = layout.prompts, layout.responses
    count = len(prompts.ids)
    query, key, value = (pad_rows(x[:count], prompts) for x in heads)
    attended = [unpad_rows(attend(query, key, value, prompts.bias), prompts)]
    if len(responses.ids):
        query, own_key, own_value = (pad_rows(x[count:], responses) for x in heads)
        key, value = _concatenate_keys(key, own_key, layout), _concatenate_keys(value, own_value, layout)
        out = attend(query, key, value, responses.bias, shared_length=layout.prompt_capacity)
        attended.append(unpad_rows(out, responses))
    return torch.cat(attended)


def _concatenate_keys(prompt_keys: Tensor, own: Tensor, layout: _BatchLayout) -> Tensor:
    """[P, K, S, d] and [B, K, T, d] -> [B, K, keys, d], padded with 0."""
    padding = layout.responses.bias.shape[-1] - prompt_keys.shape[2] - own.shape[2]
    prompt_keys = prompt_keys.index_select(0, layout.prompt_of)
    return torch.cat([prompt_keys, own, own.new_zeros(*own.shape[:2], padding, own.shape[3])], 2)
