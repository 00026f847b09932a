"""Decode rows token by token with a KV cache. The rows of a group share the cache of their prompt.

The lengths of rows and their indices in the cache are on the CPU, because sizes depend on them. The lengths are copied
to the device when they change by more than one token per row.

Shapes: P prompts of at most S tokens, n rows, m rows of the largest group, T tokens of the longest row, H query heads,
K key heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.algorithm.batch import copy_to_device
from pellucid.models.attention import attend
from pellucid.models.autograd_ops import apply_rms_norm
from pellucid.models.cuda_graphs import EagerStepGraphs
from pellucid.models.decoder import (
    Decoder,
    DecoderWeights,
    ModelShape,
    ResidualStream,
    compute_layer_output,
    compute_qkv,
    prepack_weights,
    project,
)
from pellucid.models.fused_decode import FusedDecoder, LayerCacheTensors, TokenPositions, find_fused_fault
from pellucid.models.hf_decode import FallbackDecodeBatch
from pellucid.models.linear import TrainedMatrix
from pellucid.models.ops import multiply_to_fp32, softmax_in_fp32, supports_fp32_product
from pellucid.models.score import (
    SIMD_LANES,
    PackedRows,
    make_attention_bias,
    mask_beyond_window,
    pack_prompts,
    pack_rows,
    pad_rows,
    round_up,
    unpad_rows,
)

if TYPE_CHECKING:
    from pellucid.models.triton_decode import TritonDecoder

CACHE_GROWTH_TOKENS = 2 * SIMD_LANES
"""Tokens by which a full cache grows."""
_ROTARY_TABLE_STEP = 256
"""The rotary table grows in steps of this size."""


# ---------------------------------------------------------------- the KV cache


_KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


@dataclass
class _LayerKVCache:
    """The KV cache of one layer. Products use its full capacity: a slice would first be copied on the CPU."""

    prompt_keys: Tensor
    """[K, P, S, d]"""
    prompt_values: Tensor
    keys: Tensor
    """[K, cache rows, capacity >= T, d] of the generated tokens, padded with 0. Rows that were dropped stay until
    `compact`."""
    values: Tensor

    def compact(self, rows: Tensor, capacity: int, prompts: Tensor, prompt_capacity: int) -> None:
        """Keep only these rows and prompts, with these capacities."""
        self.keys, self.values = (x[:, :, :capacity].index_select(1, rows) for x in (self.keys, self.values))
        if len(prompts) < self.prompt_keys.shape[1] or prompt_capacity < self.prompt_keys.shape[2]:
            self.prompt_keys, self.prompt_values = (
                x[:, :, :prompt_capacity].index_select(1, prompts) for x in (self.prompt_keys, self.prompt_values)
            )


def _pad_and_concatenate(first: Tensor, second: Tensor) -> Tensor:
    """[K, P, S, d] and [K, Q, R, d] -> [K, P + Q, max(S, R), d] in the dtype of the first."""
    length = max(first.shape[2], second.shape[2])
    return torch.cat([F.pad(x.to(first.dtype), (0, 0, 0, length - x.shape[2])) for x in (first, second)], 1)


# ---------------------------------------------------------------- the decode batch


class DecodeBatch:
    """Rows that are decoded together: `admit` prompts, `step` all rows by one token, `keep_rows`; in any order.

    `make_fused`, if given, returns a fused decoder, which computes a step on the CPU in one call with the same bits.
    `triton_decoder`, if given, computes steps on a GPU.
    """

    can_append = True
    """Whether rows can wait for the environment, and continue after `append_tokens`."""

    def __init__(
        self,
        decoder: Decoder,
        max_rows: int,
        make_fused: Callable[[DecoderWeights, ModelShape], FusedDecoder] | None = None,
        triton_decoder: TritonDecoder | None = None,
    ) -> None:
        self.decoder, self.max_rows, self.make_fused = decoder, max_rows, make_fused
        self.triton_decoder = triton_decoder
        with torch.no_grad():
            self.step_weights = self.unpacked_weights = decoder.collect_weights()
        self.rotary_table = decoder.compute_rotary(torch.arange(0, device=decoder.device))
        """cos and sin of the first positions, for fused steps."""
        self.caches = [_LayerKVCache(*(self._allocate(0, 0) for _ in range(4))) for _ in self.step_weights.layers]
        self.prompt_lengths = torch.zeros(0, dtype=torch.long)
        """[P]"""
        self.prompt_ids: list[int] = []
        """[P] the number of each prompt, which no other prompt ever gets."""
        self.admitted_prompts = 0
        self.prompt_of = torch.zeros(0, dtype=torch.long)
        """[n] the prompt of each row."""
        self.generated_lengths = torch.zeros(0, dtype=torch.long)
        """[n] tokens of each row in the cache."""
        self.cache_rows = torch.zeros(0, dtype=torch.long)
        """[n] the index of each row in the cache, ascending."""
        self.graphs = EagerStepGraphs()

    @cached_property
    def fused_decoder(self) -> FusedDecoder | None:
        """The fused decoder, which packs the weights at first use; None if there is none for this model."""
        shape = self.decoder.shape
        if not self.make_fused or find_fused_fault(self.unpacked_weights, shape):
            return None
        return self.make_fused(self.unpacked_weights, shape)

    @property
    def may_have_gaps(self) -> bool:
        """Whether dropped rows may stay in the cache: steps find the others by `cache_rows`."""
        return self.triton_decoder is not None or self.fused_decoder is not None

    def count_free_slots(self) -> int:
        return self.max_rows - len(self.generated_lengths)

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], copies: int) -> Tensor:
        """Add `copies` rows for each prompt. Return the logits [len(prompts) * copies, V] of their first tokens."""
        self.compact()
        lengths = torch.tensor([len(ids) for ids in prompts])
        layers, logits = self._prefill_fused(prompts, lengths) if self.fused_decoder else self._prefill_eager(prompts)
        for cache, (keys, values) in zip(self.caches, layers, strict=True):
            cache.prompt_keys = _pad_and_concatenate(cache.prompt_keys, keys)
            cache.prompt_values = _pad_and_concatenate(cache.prompt_values, values)
            empty = keys.new_zeros(len(keys), len(prompts) * copies, 0, keys.shape[-1])
            cache.keys, cache.values = (_pad_and_concatenate(x, empty) for x in (cache.keys, cache.values))
        new_prompts = torch.arange(len(prompts)) + len(self.prompt_lengths)
        self.prompt_of = torch.cat([self.prompt_of, new_prompts.repeat_interleave(copies)])
        self.prompt_lengths = torch.cat([self.prompt_lengths, lengths])
        self.prompt_ids += range(self.admitted_prompts, self.admitted_prompts + len(prompts))
        self.admitted_prompts += len(prompts)
        self.generated_lengths = F.pad(self.generated_lengths, (0, len(prompts) * copies))
        self.cache_rows = torch.arange(len(self.generated_lengths))
        self.refresh_row_index()
        return logits.repeat_interleave(copies, 0)

    def _prefill_fused(self, prompts: Sequence[Sequence[int]], lengths: Tensor) -> tuple[list[_KeyValue], Tensor]:
        """Return the keys and values [K, P, S, d] of prompts for each layer, and the logits [P, V] that follow."""
        assert self.fused_decoder
        size, count = round_up(int(lengths.max())), len(prompts)
        layers = [(self._allocate(count, size), self._allocate(count, size)) for _ in self.caches]
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        zeros = torch.zeros(count, dtype=torch.long)  # here each prompt is a row of one empty prompt
        rows, last_tokens = torch.arange(count).repeat_interleave(lengths), lengths.cumsum(0) - 1
        token_positions = TokenPositions(rows, positions, zeros, zeros, last_tokens)
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        empty = self._allocate(0, 0)
        return layers, self.run_fused(ids, token_positions, [(empty, empty, *pair) for pair in layers])

    def _prefill_eager(self, prompts: Sequence[Sequence[int]]) -> tuple[list[_KeyValue], Tensor]:
        """Do the same as `_prefill_fused` in PyTorch."""
        rows, lengths = pack_prompts(prompts, self.decoder.dtype, self.decoder.device)
        shape, rotary = self.decoder.shape, self.decoder.compute_rotary(rows.positions)
        stream, layers = ResidualStream(self.embed(rows.ids)), []
        offsets = torch.arange(rows.bias.shape[-1], device=self.decoder.device)[None]
        sliding_bias = (
            mask_beyond_window(rows.bias, offsets, offsets, shape.window) if any(shape.is_sliding) else rows.bias
        )
        for layer, is_sliding in zip(self.unpacked_weights.layers, shape.is_sliding, strict=True):
            hidden, heads = compute_qkv(layer, stream, rotary, shape)
            query, key, value = (pad_rows(x, rows) for x in heads)
            attended = attend(query, key, value, sliding_bias if is_sliding else rows.bias)
            stream = compute_layer_output(layer, hidden, unpad_rows(attended, rows), shape)
            layers.append((key.transpose(0, 1), value.transpose(0, 1)))
        last = copy_to_device(lengths.cumsum(0) - 1, self.decoder.device)
        return layers, self.compute_logits(stream.add_pending()[last], self.unpacked_weights.head)

    def _allocate(self, rows: int, size: int) -> Tensor:
        """Return keys or values [K, rows, size, d] of zeros."""
        shape = self.decoder.shape
        sizes = shape.key_heads, rows, size, shape.head_size
        return torch.zeros(sizes, dtype=self.decoder.dtype, device=self.decoder.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, D]"""
        return F.embedding(tokens, self.unpacked_weights.embedding.tensor).to(self.unpacked_weights.norm.dtype)

    @torch.no_grad()
    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Append one token [n] to each row. Return the logits [n, V] of the next tokens.

        `active` is [n] bool on the CPU, None for all. Other rows stay as they were; their logits are undefined.
        """
        self._prepack(len(tokens))
        if int(self.generated_lengths.max()) == self.caches[0].keys.shape[2]:
            self.grow_cache()
        if self.fused_decoder:
            prompts = self.prompt_of.new_zeros(self.caches[0].keys.shape[1])
            prompts[self.cache_rows] = self.prompt_of
            rows = self.cache_rows, self.generated_lengths, prompts, self.prompt_lengths
            positions = TokenPositions(*rows, torch.arange(len(tokens)))
            logits = self.run_fused(tokens, positions, self.list_cache_tensors())
        elif self.triton_decoder:
            logits = self._multiply_head(self.triton_decoder.step(self, tokens), self.unpacked_weights.head)
        elif self.decoder.uses_cuda_graphs is False:
            logits = self.step_eager(tokens)
        else:
            logits = self.graphs.step(self, tokens)
        self.generated_lengths += 1 if active is None else active  # inactive rows overwrite their token later
        self.cached_lengths += 1 if active is None else active.to(self.cached_lengths.device)
        return logits

    def run_fused(self, tokens: Tensor, token_positions: TokenPositions, caches: Sequence[LayerCacheTensors]) -> Tensor:
        """Call `FusedDecoder.step` for tokens [N]; return logits [m, V]."""
        assert self.fused_decoder
        prompt_keys, _, keys, _ = caches[0]
        positions = prompt_keys.shape[2] + keys.shape[2]
        if len(self.rotary_table[0]) < positions:
            self.rotary_table = self.decoder.compute_rotary(torch.arange(round_up(positions, _ROTARY_TABLE_STEP)))
        return self.fused_decoder.step(self.embed(tokens), self.rotary_table, token_positions, caches)

    def _prepack(self, rows: int) -> None:
        """Convert the weights to oneDNN's layout, once, if eager steps profit from it."""
        if not self.fused_decoder and self.step_weights is self.unpacked_weights and self.decoder.can_prepack:
            self.step_weights = prepack_weights(self.unpacked_weights, rows)

    def list_cache_tensors(self) -> list[LayerCacheTensors]:
        return [(c.prompt_keys, c.prompt_values, c.keys, c.values) for c in self.caches]

    def get_captured_buffers(self) -> tuple[Tensor, ...]:
        """Return two tensors. If any tensor that `step_eager` uses is replaced, so is one of these."""
        return self.start_positions, self.caches[-1].keys

    def step_eager(self, tokens: Tensor) -> Tensor:
        """Compute a step with PyTorch's operators: write keys and values of tokens [n], return logits [n, V]."""
        shape, index, biases = self.decoder.shape, self._get_write_index(), self._compute_biases()
        rotary = self.decoder.compute_rotary(self.start_positions + self.cached_lengths)
        stream = ResidualStream(self.embed(tokens))
        for layer, cache, bias in zip(self.step_weights.layers, self.caches, biases, strict=True):
            hidden, (query, key, value) = compute_qkv(layer, stream, rotary, shape)
            cache.keys[index], cache.values[index] = key.transpose(0, 1), value.transpose(0, 1)
            stream = compute_layer_output(layer, hidden, self._attend(query, cache, bias), shape)
        return self.compute_logits(stream.add_pending(), self.step_weights.head)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these: indices [<= n], ascending, on the CPU."""
        self.cache_rows, self.generated_lengths, self.prompt_of = (
            x[rows] for x in (self.cache_rows, self.generated_lengths, self.prompt_of)
        )
        if self.may_have_gaps and 2 * len(rows) > self.caches[0].keys.shape[1]:
            self.copy_lengths_to_device()
        else:
            self.compact()

    def compact(self) -> None:
        """Remove dropped rows, and prompts without rows, from the cache."""
        if len(self.cache_rows) == self.caches[0].keys.shape[1]:
            return
        used_prompts, self.prompt_of = self.prompt_of.unique(return_inverse=True)
        self.prompt_ids = [self.prompt_ids[p] for p in used_prompts.tolist()]
        self.prompt_lengths = self.prompt_lengths[used_prompts]
        prompt_capacity = round_up(int(self.prompt_lengths.max())) if len(used_prompts) else 0
        capacity = round_up(int(self.generated_lengths.max()), CACHE_GROWTH_TOKENS) if len(self.cache_rows) else 0
        rows, used_prompts = (copy_to_device(x, self.decoder.device) for x in (self.cache_rows, used_prompts))
        for cache in self.caches:
            cache.compact(rows, capacity, used_prompts, prompt_capacity)
        self.cache_rows = torch.arange(len(rows))
        self.refresh_row_index()

    def grow_cache(self) -> None:
        """Grow the cache by CACHE_GROWTH_TOKENS; with CUDA graphs, which are captured again, at least by half."""
        self.compact()
        growth = CACHE_GROWTH_TOKENS
        if self.decoder.uses_cuda_graphs is not False:
            growth = max(growth, round_up(self.caches[0].keys.shape[2] // 2, CACHE_GROWTH_TOKENS))
        for cache in self.caches:
            cache.keys, cache.values = (F.pad(x, (0, 0, 0, growth)) for x in (cache.keys, cache.values))

    def _get_write_index(self) -> tuple[slice | Tensor | int, ...]:
        """Return the cache index of each row's next token; without graphs, one number for rows of equal length."""
        shortest, longest = int(self.generated_lengths.min()), int(self.generated_lengths.max())
        if shortest == longest and self.decoder.uses_cuda_graphs is False:
            return slice(None), slice(None), longest
        rows = torch.arange(len(self.cached_lengths), device=self.cached_lengths.device)
        return slice(None), rows, self.cached_lengths

    def _compute_biases(self) -> list[Tensor]:
        """Return the attention bias of each layer, [n, 1, S + capacity]: -inf for padding and beyond windows."""
        first, starts, shape = self.caches[0], self.start_positions[:, None], self.decoder.shape
        prompt_offsets, own_offsets = (
            torch.arange(x.shape[2], device=x.device) for x in (first.prompt_keys, first.keys)
        )
        visible = torch.cat([prompt_offsets < starts, own_offsets < self.cached_lengths[:, None] + 1], -1)
        sliding_bias = bias = make_attention_bias(visible[:, None], first.keys.dtype)
        if any(shape.is_sliding):
            keys = torch.cat([prompt_offsets.expand(len(starts), -1), starts + own_offsets], -1)
            sliding_bias = mask_beyond_window(bias, starts + self.cached_lengths[:, None], keys, shape.window)
        return [(sliding_bias if is_sliding else bias)[:, 0] for is_sliding in shape.is_sliding]

    def refresh_row_index(self) -> None:
        """Compute the rows of each prompt, `rows_by_prompt` [P, m] padded with row 0, and its inverse.

        The lengths are copied to the device as well. Until a row is dropped the rows are in this order already, and
        `is_in_prompt_order` saves the lookups.
        """
        self.copy_lengths_to_device()
        sizes = self.prompt_of.bincount(minlength=len(self.prompt_lengths))
        if not len(sizes):
            return
        order = self.prompt_of.argsort(stable=True)
        index_in_group = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[self.prompt_of[order]]
        largest = int(sizes.max())
        rows_by_prompt = torch.zeros(len(sizes), largest, dtype=torch.long)
        rows_by_prompt[self.prompt_of[order], index_in_group] = order
        grouped_index = torch.empty_like(order)
        grouped_index[order] = self.prompt_of[order] * largest + index_in_group
        has_no_padding = len(order) == rows_by_prompt.numel()
        self.is_in_prompt_order = has_no_padding and bool((grouped_index == torch.arange(len(order))).all())
        self.rows_by_prompt = copy_to_device(rows_by_prompt, self.decoder.device)
        self.grouped_index = copy_to_device(grouped_index, self.decoder.device)

    def copy_lengths_to_device(self) -> None:
        """Copy prompt length, number of generated tokens, prompt, and index in the cache of each row to the device."""
        starts = self.prompt_lengths[self.prompt_of]
        rows = torch.stack([starts, self.generated_lengths, self.prompt_of, self.cache_rows])
        self.start_positions, self.cached_lengths, self.device_prompt_of, self.device_cache_rows = rows.to(
            self.decoder.device, copy=True, non_blocking=True
        )

    def _attend(self, query: Tensor, cache: _LayerKVCache, bias: Tensor) -> Tensor:
        """Compute attention, [n, H, d] -> [n, H d]. Rows of a prompt are multiplied with its keys in one product."""
        size = cache.prompt_keys.shape[2]
        queries = query.unflatten(1, (len(cache.keys), -1)).transpose(0, 1)  # [K, n, H / K, d]
        queries = queries.contiguous() * query.shape[-1] ** -0.5
        prompt_scores = self._ungroup(self._group_by_prompt(queries) @ cache.prompt_keys.mT)
        probs = softmax_in_fp32(torch.cat([prompt_scores, queries @ cache.keys.mT], -1).add_(bias))
        prompt_output = self._ungroup(self._group_by_prompt(probs[..., :size]) @ cache.prompt_values)
        attended = probs[..., size:] @ cache.values + prompt_output
        return attended.transpose(0, 1).flatten(1)

    def _group_by_prompt(self, x: Tensor) -> Tensor:
        """[K, n, H / K, -] -> [K, P, m H / K, -]"""
        rows = x if self.is_in_prompt_order else x.index_select(1, self.rows_by_prompt.flatten())
        return rows.unflatten(1, self.rows_by_prompt.shape).flatten(2, 3)

    def _ungroup(self, x: Tensor) -> Tensor:
        """[K, P, m H / K, -] -> [K, n, H / K, -]: the inverse of `_group_by_prompt`."""
        rows = x.unflatten(2, (self.rows_by_prompt.shape[1], -1)).flatten(1, 2)
        return rows if self.is_in_prompt_order else rows.index_select(1, self.grouped_index)

    def compute_logits(self, hidden: Tensor, head: TrainedMatrix) -> Tensor:
        """[N, D] -> [N, V]"""
        x = apply_rms_norm(hidden, self.unpacked_weights.norm, self.decoder.shape.eps, self.decoder.dtype)
        return self._multiply_head(x, head)

    def _multiply_head(self, x: Tensor, head: TrainedMatrix) -> Tensor:
        """Multiply normed hidden states [N, D] and the head to logits [N, V]."""
        return multiply_to_fp32(x, head.tensor) if supports_fp32_product(x) else project(x, head.tensor)


# ---------------------------------------------------------------- running requests


RequestT = TypeVar("RequestT")


class RunningBatch(Generic[RequestT]):
    """The requests in a decode batch and the logits from which their next tokens are sampled.

    A loop calls `admit` while there are free slots, samples a token per row, then `keep_rows` of the unfinished rows,
    and `step`.
    """

    def __init__(self, batch: DecodeBatch | FallbackDecodeBatch) -> None:
        self.batch = batch
        self.requests: list[RequestT] = []
        self.logits = torch.zeros(0)
        """[n, V]"""

    def count_free_slots(self) -> int:
        return self.batch.count_free_slots()

    def admit(self, prompts: Sequence[Sequence[int]], requests: Sequence[RequestT]) -> None:
        """Add a row per request: the same number for each prompt, in the order of the prompts."""
        self.requests += requests  # before the prefill: if it fails, callers find the requests here
        logits = self.batch.admit(prompts, len(requests) // len(prompts))
        self.logits = torch.cat([self.logits, logits]) if len(self.logits) else logits

    def keep_rows(self, slots: Tensor) -> None:
        """Drop all rows but those in these slots [<= n], ascending, on the CPU."""
        if len(slots) < len(self.requests):
            self.batch.keep_rows(slots)
            self.requests = [self.requests[slot] for slot in slots.tolist()]

    def step(self, tokens: Tensor) -> None:
        """Append one token [n] to each row."""
        self.logits = self.batch.step(tokens) if self.requests else self.logits[:0]

    def step_active(self, tokens: Tensor, active: Tensor) -> None:
        """Append one token [n] to each active row, [n] bool on the CPU; the others stay as they are."""
        assert isinstance(self.batch, DecodeBatch)
        self.logits = self.batch.step(tokens, active)

    def append_tokens(self, slots: Tensor, tokens: Sequence[Sequence[int]]) -> None:
        """Append several tokens to each row. `slots` [r] are on the CPU."""
        assert isinstance(self.batch, DecodeBatch)
        logits = append_tokens(self.batch, slots, tokens)
        self.logits[slots.to(logits.device)] = logits

    def evict(self, slots: Tensor) -> list[EvictedRow]:
        """Drop the rows in these slots, ascending, on the CPU. Return what `restore` needs."""
        assert isinstance(self.batch, DecodeBatch)
        evicted = evict_rows(self.batch, slots.tolist())
        stays = torch.ones(len(self.requests), dtype=torch.bool)
        stays[slots] = False
        self.keep_rows_and_logits(stays.nonzero()[:, 0])
        return evicted

    def keep_rows_and_logits(self, slots: Tensor) -> None:
        """Drop all rows but those in these slots, as `keep_rows` does, and their logits."""
        self.logits = self.logits[copy_to_device(slots, self.logits.device)]
        self.keep_rows(slots)

    def restore(self, evicted: Sequence[EvictedRow], requests: Sequence[RequestT]) -> None:
        """Add evicted rows. Their logits are 0 until `append_tokens`."""
        assert isinstance(self.batch, DecodeBatch)
        restore_rows(self.batch, evicted)
        self.requests += requests
        head = self.batch.unpacked_weights.head.tensor
        dtype = torch.float32 if supports_fp32_product(head) else head.dtype
        unknown = head.new_zeros(len(requests), len(head), dtype=dtype)
        self.logits = torch.cat([self.logits, unknown]) if len(self.logits) else unknown


# ---------------------------------------------------------------- turns of an environment
# Appending an observation to rows, and evicting rows that wait for one.
#
# Shapes: r rows to which tokens are appended, N tokens in all, at most L per row.


@torch.no_grad()
def append_tokens(batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Append several tokens to each of these rows [r], on the CPU. Return the logits [r, V] that follow."""
    batch.compact()
    lengths = torch.tensor([len(ids) for ids in tokens])
    while int((batch.generated_lengths[rows] + lengths).max()) > batch.caches[0].keys.shape[2]:
        batch.grow_cache()
    logits = (_append_tokens_fused if batch.fused_decoder else _append_tokens_eager)(batch, rows, tokens, lengths)
    batch.generated_lengths[rows] += lengths
    batch.copy_lengths_to_device()
    return logits


def _append_tokens_fused(batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Compute `append_tokens` with the fused decoder."""
    row_of = rows.repeat_interleave(lengths)
    positions = batch.generated_lengths[row_of] + torch.cat([torch.arange(length) for length in lengths.tolist()])
    token_positions = TokenPositions(row_of, positions, batch.prompt_of, batch.prompt_lengths, lengths.cumsum(0) - 1)
    ids = torch.tensor([token for row in tokens for token in row])
    return batch.run_fused(ids, token_positions, batch.list_cache_tensors())


def _append_tokens_eager(batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]], lengths: Tensor) -> Tensor:
    """Compute `append_tokens` with PyTorch's operators."""
    shape, (new, sliding_bias, columns) = batch.decoder.shape, _build_appended_rows(batch, rows, tokens, lengths)
    rotary, size = batch.decoder.compute_rotary(new.positions), batch.caches[0].prompt_keys.shape[2]
    device = new.ids.device
    index = slice(None), rows.repeat_interleave(lengths).to(device), columns
    rows_on_device, prompts = rows.to(device), batch.prompt_of[rows].to(device)
    stream = ResidualStream(batch.embed(new.ids))
    for layer, cache, is_sliding in zip(batch.unpacked_weights.layers, batch.caches, shape.is_sliding, strict=True):
        hidden, (query, key, value) = compute_qkv(layer, stream, rotary, shape)
        cache.keys[index], cache.values[index] = key.transpose(0, 1), value.transpose(0, 1)
        keys, values = (
            torch.cat([shared[:, prompts], own[:, rows_on_device]], 2).transpose(0, 1)
            for shared, own in ((cache.prompt_keys, cache.keys), (cache.prompt_values, cache.values))
        )
        bias = sliding_bias if is_sliding else new.bias
        attended = attend(pad_rows(query, new), keys, values, bias, shared_length=size)
        stream = compute_layer_output(layer, hidden, unpad_rows(attended, new), shape)
    last_tokens = (lengths.cumsum(0) - 1).to(device)
    return batch.compute_logits(stream.add_pending()[last_tokens], batch.unpacked_weights.head)


def _build_appended_rows(
    batch: DecodeBatch, rows: Tensor, tokens: Sequence[Sequence[int]], lengths: Tensor
) -> tuple[PackedRows, Tensor, Tensor]:
    """Pack appended tokens. Also return their bias in layers with a window, and the cache column of each token [N]."""
    first, window, device = batch.caches[0], batch.decoder.shape.window, batch.decoder.device
    starts, offsets = batch.prompt_lengths[batch.prompt_of[rows], None], torch.arange(round_up(int(lengths.max())))
    is_token, columns = offsets < lengths[:, None], batch.generated_lengths[rows, None] + offsets  # [r, L]
    ids, positions = torch.tensor([token for row in tokens for token in row]), (starts + columns)[is_token]
    device_starts, device_columns = starts.to(device), columns.to(device)
    prompt_offsets, own_offsets = (torch.arange(x.shape[2], device=device) for x in (first.prompt_keys, first.keys))
    prompt_visible = (prompt_offsets < device_starts)[:, None].expand(-1, len(offsets), -1)
    visible = torch.cat([prompt_visible, own_offsets <= device_columns[..., None]], -1)
    sliding_bias = bias = make_attention_bias(visible, first.keys.dtype)
    if any(batch.decoder.shape.is_sliding):
        keys = torch.cat([prompt_offsets.expand(len(rows), -1), device_starts + own_offsets], -1)
        sliding_bias = mask_beyond_window(bias, device_starts + device_columns, keys, window)
    packed = pack_rows(ids, positions, is_token, device, lambda: bias)
    return packed, sliding_bias, columns[is_token].to(device)


@dataclass
class EvictedRow:
    """The KV cache of a row that was moved out of the batch, for each layer."""

    prompt_id: int
    prompt_cache: list[_KeyValue]
    row_cache: list[_KeyValue]


def evict_rows(batch: DecodeBatch, rows: Sequence[int]) -> list[EvictedRow]:
    """Copy the KV cache of these rows and of their prompts, so that the batch can drop the rows."""
    batch.compact()
    prompts = batch.prompt_of.tolist()
    prompt_caches = {
        p: _copy_cache([(cache.prompt_keys, cache.prompt_values) for cache in batch.caches], p, batch.prompt_lengths[p])
        for p in {prompts[row] for row in rows}
    }
    own = [(cache.keys, cache.values) for cache in batch.caches]
    return [
        EvictedRow(
            batch.prompt_ids[prompts[row]],
            prompt_caches[prompts[row]],
            _copy_cache(own, row, batch.generated_lengths[row]),
        )
        for row in rows
    ]


def _copy_cache(layers: Sequence[_KeyValue], row: int, length: Tensor) -> list[_KeyValue]:
    return [(keys[:, row, : int(length)].clone(), values[:, row, : int(length)].clone()) for keys, values in layers]


def restore_rows(batch: DecodeBatch, rows: Sequence[EvictedRow]) -> None:
    """Append evicted rows to the batch."""
    batch.compact()
    for row in rows:
        if row.prompt_id not in batch.prompt_ids:
            _restore_prompt(batch, row)
    for i, cache in enumerate(batch.caches):
        cache.keys = _append_cache_rows(cache.keys, [row.row_cache[i][0] for row in rows])
        cache.values = _append_cache_rows(cache.values, [row.row_cache[i][1] for row in rows])
    prompts = batch.prompt_of.new_tensor([batch.prompt_ids.index(row.prompt_id) for row in rows])
    lengths = batch.generated_lengths.new_tensor([row.row_cache[0][0].shape[1] for row in rows])
    batch.prompt_of = torch.cat([batch.prompt_of, prompts])
    batch.generated_lengths = torch.cat([batch.generated_lengths, lengths])
    batch.cache_rows = torch.arange(len(batch.generated_lengths))
    batch.refresh_row_index()


def _restore_prompt(batch: DecodeBatch, row: EvictedRow) -> None:
    length = row.prompt_cache[0][0].shape[1]
    batch.prompt_ids.append(row.prompt_id)
    batch.prompt_lengths = torch.cat([batch.prompt_lengths, batch.prompt_lengths.new_tensor([length])])
    for cache, (keys, values) in zip(batch.caches, row.prompt_cache, strict=True):
        padding = (0, 0, 0, round_up(length) - length)
        cache.prompt_keys = _pad_and_concatenate(cache.prompt_keys, F.pad(keys[:, None], padding))
        cache.prompt_values = _pad_and_concatenate(cache.prompt_values, F.pad(values[:, None], padding))


def _append_cache_rows(cache: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """[K, n, T, d] and rows of [K, t, d] each -> [K, n + len(rows), T', d], padded with 0."""
    capacity = max(cache.shape[2], *(round_up(x.shape[1], CACHE_GROWTH_TOKENS) for x in rows))
    new = [F.pad(x, (0, 0, 0, capacity - x.shape[1]))[:, None] for x in rows]
    return torch.cat([F.pad(cache, (0, 0, 0, capacity - cache.shape[2])), *new], 1)
