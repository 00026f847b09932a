"""Decode steps on a GPU by Triton kernels: attention of one token per row with its KV cache, and sampling from logits.

A step is eight kernels per layer, of which four are cuBLAS's matrix products. It is captured as a CUDA graph once for
each number of rows: the kernels read where a batch has its rows, lengths and caches from a table on the device, so a
graph is valid for all batches, prompts and lengths, as long as the weights stay where they are.

Shapes: n rows, P prompts of at most S tokens, H query heads, K key heads, d head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pellucid.models import triton_ops
from pellucid.models.cuda_graphs import StepGraph
from pellucid.models.decoder import Decoder, DecoderWeights, LayerWeights, ModelShape, project
from pellucid.models.ops import compute_exponent_factor
from pellucid.models.score import round_up
from pellucid.models.triton_ops import LOG2E, count_blocks, launch, rotate, round_up_block

if TYPE_CHECKING:
    from pellucid.models.decode import DecodeBatch

ROWS_STEP = 16
"""Numbers of rows are rounded up to multiples of this, and below it to powers of 2, so that there are few graphs."""
_ROTARY_TABLE_STEP = 256
"""The rotary table grows in steps of this size."""
_KEY_BLOCK_BYTES = 2**14
"""The size of the blocks of keys and of values that a program reads; it reads the next two meanwhile."""
_SAMPLING_BLOCK = 4096
"""The number of logits in a block."""

# ---------------------------------------------------------------- the table of a batch
# Sizes, then addresses of tensors, in int64. The addresses of each layer's caches follow those of the batch.

_ROWS = tl.constexpr(0)
_PROMPTS = tl.constexpr(1)
_PROMPT_CAPACITY = tl.constexpr(2)
_CACHE_ROWS = tl.constexpr(3)
_CAPACITY = tl.constexpr(4)
_PROMPT_LENGTHS = tl.constexpr(5)
_LENGTHS = tl.constexpr(6)
_PROMPT_OF = tl.constexpr(7)
_CACHE_ROW_OF = tl.constexpr(8)
_COS = tl.constexpr(9)
_SIN = tl.constexpr(10)
_HEADER_SIZE = 12
"""One more than is used, so that the addresses of each layer begin at a multiple of 16 bytes."""
_ADDRESSES_PER_LAYER = 4


# ---------------------------------------------------------------- attention


@triton.jit
def _load_pointer(address, dtype: tl.constexpr):
    return tl.load(address).to(tl.pointer_type(dtype))  # pyright: ignore[reportArgumentType]


@triton.jit
def _load_array(address, dtype: tl.constexpr):
    """Load the address of a tensor that PyTorch allocated: those are aligned. A hint about a call would be lost."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), 16)  # pyright: ignore[reportArgumentType]


@triton.jit
def _load_rotated(heads, h, inside, norm, cos, sin, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load heads h of one row, [., BLOCK_D]: normed if there is a weight, and rotated."""
    dtype: tl.constexpr = heads.dtype.element_ty
    i = tl.arange(0, BLOCK_D)[None, :]
    i_swapped = (i + D // 2) % D
    x = tl.load(heads + h * D + i, inside, 0.0)
    swapped = tl.load(heads + h * D + i_swapped, inside, 0.0)
    if norm is not None:
        wide = x.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / D + eps)
        x = (wide * inverse_rms * tl.load(norm + i, i < D, 0.0)).to(dtype)
        swapped = (swapped.to(tl.float32) * inverse_rms * tl.load(norm + i_swapped, i < D, 0.0)).to(dtype)
    return rotate(x, swapped, cos, sin, dtype)


@triton.jit
def _attend_to_keys(
    query, keys, values, first, end, highest, mass, output, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Continue the softmax of a query block over keys [first, end) of one sequence, in fp32."""
    dtype: tl.constexpr = query.dtype
    i = tl.arange(0, BLOCK_D)[None, :]
    for block in range(first, end, BLOCK):
        j = block + tl.arange(0, BLOCK)
        inside = (j < end)[:, None] & (i < D)
        key = tl.load(keys + j[:, None] * D + i, inside, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((j < end)[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        masses = tl.exp2(scores - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
        mass = mass * fade + tl.sum(masses, 1)
        value = tl.load(values + j[:, None] * D + i, inside, 0.0)
        output = output * fade[:, None] + tl.dot(masses.to(dtype), value, input_precision="ieee")
        highest = new_highest
    return highest, mass, output


@triton.jit
def attend_kernel(
    qkv, header, addresses, output, query_norm, key_norm, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One key head of one row: rotate queries and key, write key and value to the cache, and attend.

    The keys of a row are those of its prompt, its own, and the new one, which is not read from memory. Rows beyond
    those of the batch write nothing to the cache.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = qkv.dtype.element_ty
    GROUP: tl.constexpr = H // K
    is_row = row < tl.load(header + _ROWS)
    start = tl.load(_load_pointer(header + _PROMPT_LENGTHS, tl.int64) + row, is_row, 0).to(tl.int32)
    length = tl.load(_load_pointer(header + _LENGTHS, tl.int64) + row, is_row, 0).to(tl.int32)
    prompt = tl.load(_load_pointer(header + _PROMPT_OF, tl.int64) + row, is_row, 0)
    cache_row = tl.load(_load_pointer(header + _CACHE_ROW_OF, tl.int64) + row, is_row, 0)
    shared = (head * tl.load(header + _PROMPTS) + prompt) * tl.load(header + _PROMPT_CAPACITY) * D
    own = (head * tl.load(header + _CACHE_ROWS) + cache_row) * tl.load(header + _CAPACITY) * D
    keys = _load_array(addresses + 2, dtype) + own
    values = _load_array(addresses + 3, dtype) + own

    i = tl.arange(0, BLOCK_D)[None, :]
    g = tl.arange(0, BLOCK_GROUP)
    heads, has_size = qkv + row * (H + 2 * K) * D, i < D
    cos = tl.load(_load_array(header + _COS, dtype) + (start + length) * D + i, has_size, 0.0)
    sin = tl.load(_load_array(header + _SIN, dtype) + (start + length) * D + i, has_size, 0.0)
    in_group = (g < GROUP)[:, None] & has_size
    query_heads = (head * GROUP + g)[:, None]
    query = _load_rotated(heads, query_heads, in_group, query_norm, cos, sin, eps, D, BLOCK_D)
    new_key = _load_rotated(heads, H + head, has_size, key_norm, cos, sin, eps, D, BLOCK_D)
    new_value = tl.load(heads + (H + K + head) * D + i, has_size, 0.0)
    tl.store(keys + length * D + i, new_key, has_size & is_row)
    tl.store(values + length * D + i, new_value, has_size & is_row)

    scale = D**-0.5 * LOG2E
    first = tl.maximum(start + length - WINDOW + 1, 0) if WINDOW else 0
    highest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    attended = tl.zeros([BLOCK_GROUP, BLOCK_D], tl.float32)
    highest, mass, attended = _attend_to_keys(
        query, _load_array(addresses, dtype) + shared, _load_array(addresses + 1, dtype) + shared, first, start,
        highest, mass, attended, scale, D, BLOCK_D, BLOCK,
    )  # fmt: skip
    highest, mass, attended = _attend_to_keys(
        query, keys, values, tl.maximum(first - start, 0), length,
        highest, mass, attended, scale, D, BLOCK_D, BLOCK,
    )  # fmt: skip
    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
    new_highest = tl.maximum(highest, score)
    fade, new_mass = tl.exp2(highest - new_highest), tl.exp2(score - new_highest)
    mass = mass * fade + new_mass
    attended = attended * fade[:, None] + new_mass.to(dtype).to(tl.float32)[:, None] * new_value.to(tl.float32)
    tl.store(output + (row * H + query_heads) * D + i, (attended / mass[:, None]).to(dtype), in_group)


def attend_step(
    qkv: Tensor, header: Tensor, addresses: Tensor, layer: LayerWeights, shape: ModelShape, window: int
) -> Tensor:
    """Rotate queries and keys of new tokens, write keys and values to the caches, and attend.

    Args:
        qkv: [n, (H + 2K) d]
        header: The table of the batch.
        addresses: The addresses of the layer's caches, in the order of `DecodeBatch.list_cache_tensors`.
        layer: The weights with the norms of queries and keys, if the model has them.
        window: To how many tokens a token attends; 0 is all.

    Returns:
        The output [n, H d] of attention.
    """
    heads, key_heads, size = shape.heads, shape.key_heads, shape.head_size
    output, block_size = qkv.new_empty(len(qkv), heads * size), round_up_block(size)
    tensors = qkv.contiguous(), header, addresses, output, layer.query_norm, layer.key_norm
    launch(
        attend_kernel, (len(qkv), key_heads), *tensors, shape.eps,
        H=heads, K=key_heads, D=size, BLOCK_D=block_size, BLOCK_GROUP=round_up_block(heads // key_heads),
        BLOCK=round_up_block(_KEY_BLOCK_BYTES // (block_size * qkv.element_size())), WINDOW=window,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return output


# ---------------------------------------------------------------- sampling
# `ops.sample_with_masses` in two passes over blocks of logits: the first sums masses, the second finds the block at the
# quantile, and in it the token. Cumulative sums are in fp64.


@triton.jit
def block_mass_kernel(logits, block_highest, block_mass, V, factor, BLOCK: tl.constexpr):
    """The highest logit of a block, and the mass of the block relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + i, i < V, float("-inf"))
    highest = tl.max(z, 0)
    finite = tl.maximum(highest, -1e38)  # in a block of impossible tokens, whose masses are 0
    at = row * tl.num_programs(1) + block
    tl.store(block_highest + at, highest)
    tl.store(block_mass + at, tl.sum(tl.exp2((z - finite) * factor), 0))


@triton.jit
def _find_first_above(masses, target, SIZE: tl.constexpr):
    """The index of the first cumulative sum above the target, but not past the last entry with mass."""
    last = tl.max(tl.where(masses > 0, tl.arange(0, SIZE), 0), 0)
    return tl.minimum(tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0), last)


@triton.jit
def _find_first_equal(x, value, SIZE: tl.constexpr):
    return tl.min(tl.where(x == value, tl.arange(0, SIZE), SIZE - 1), 0)


@triton.jit
def sample_kernel(
    logits, block_highest, block_mass, uniforms, tokens, logprobs, V, factor, blocks,
    GREEDY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of one row and its log-prob."""
    row, b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    highest_of = tl.load(block_highest + row * blocks + b, b < blocks, float("-inf"))
    highest = tl.max(highest_of, 0)
    shares = tl.exp2((highest_of - highest) * factor)
    masses = (tl.load(block_mass + row * blocks + b, b < blocks, 0.0) * shares).to(tl.float64)
    total = tl.sum(masses, 0)
    target = tl.load(uniforms + row) * total
    block = _find_first_equal(highest_of, highest, BLOCKS) if GREEDY else _find_first_above(masses, target, BLOCKS)
    at = block * BLOCK + i
    z = tl.load(logits + row * V + at, at < V, float("-inf"))
    if GREEDY:
        token = _find_first_equal(z, highest, BLOCK)
    else:
        before = tl.sum(tl.where(b < block, masses, 0.0), 0)
        token = _find_first_above(tl.exp2((z - highest) * factor).to(tl.float64), target - before, BLOCK)
    tl.store(tokens + row, tl.minimum(block * BLOCK + token, V - 1).to(tl.int64))
    logit = tl.sum(tl.where(i == token, z, 0.0), 0)
    tl.store(logprobs + row, (logit - highest) * factor / LOG2E - tl.log(total.to(tl.float32)))


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample a token per row of logits [n, V] in fp32, by uniforms [n] in fp64; temperature 0 is greedy.

    Returns the tokens [n] and their log-probs [n]; see `sampling.sample_tokens`.
    """
    logits, (n, vocabulary) = logits.contiguous(), logits.shape
    blocks, factor = count_blocks(vocabulary, _SAMPLING_BLOCK), compute_exponent_factor(temperature)
    highest, mass = logits.new_empty(2, n, blocks)
    tokens, logprobs = torch.empty(n, dtype=torch.long, device=logits.device), logits.new_empty(n)
    sizes = {"BLOCK": _SAMPLING_BLOCK, "num_warps": 8}
    launch(block_mass_kernel, (n, blocks), logits, highest, mass, vocabulary, factor, **sizes)
    launch(
        sample_kernel, (n,), logits, highest, mass, uniforms.contiguous(), tokens, logprobs, vocabulary, factor, blocks,
        GREEDY=temperature == 0.0, BLOCKS=round_up_block(blocks), **sizes,
    )  # fmt: skip
    return tokens, logprobs


# ---------------------------------------------------------------- decode steps


class TritonDecoder:
    """Decode steps by kernels, and their graphs, one for each number of rows.

    A graph computes with the weights from which it was captured. If those of a batch have other addresses, all graphs
    are captured again; the optimizer changes weights where they are.
    """

    def __init__(self, decoder: Decoder) -> None:
        shape, device = decoder.shape, decoder.device
        self.shape, self.dtype, self.device = shape, decoder.dtype, device
        self.windows = [shape.window if is_sliding else 0 for is_sliding in shape.is_sliding]
        table = torch.zeros(_HEADER_SIZE + _ADDRESSES_PER_LAYER * shape.layers, dtype=torch.long, device=device)
        self.table, self.header = table, table[:_HEADER_SIZE]
        self.layer_addresses = table[_HEADER_SIZE:].split(_ADDRESSES_PER_LAYER)
        self.table_contents: list[int] = []
        self.rotary_table = decoder.compute_rotary(torch.arange(0, device=device))
        """cos and sin of the first positions, [positions, 1, d] each."""
        self.weights: DecoderWeights | None = None
        """The weights from which graphs were captured."""
        self.batch_weights: DecoderWeights | None = None
        """The weights of the last batch, which have the same addresses."""
        self.graphs: dict[int, StepGraph] = {}

    def step(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Write keys and values of tokens [n] to the caches. Return the normed hidden states [n, D].

        The next step overwrites them. The first step with a number of rows launches the kernels one by one, the second
        captures their graph.
        """
        self._set_weights(batch.unpacked_weights)
        padding = _round_up_rows(len(tokens)) - len(tokens)
        padded = F.pad(tokens, (0, padding)) if padding else tokens
        self._update_table(batch)
        graph = self.graphs.setdefault(len(padded), StepGraph())
        return graph.step(batch.decoder, self._compute, padded)[: len(tokens)]

    def _set_weights(self, weights: DecoderWeights) -> None:
        if weights is self.batch_weights:
            return
        if self.weights is None or _list_addresses(weights) != _list_addresses(self.weights):
            self.weights, self.graphs = weights, {}
        self.batch_weights = weights

    def _update_table(self, batch: DecodeBatch) -> None:
        first = batch.caches[0]
        positions = first.prompt_keys.shape[2] + first.keys.shape[2]
        if len(self.rotary_table[0]) < positions:
            length = round_up(positions, _ROTARY_TABLE_STEP)
            self.rotary_table = batch.decoder.compute_rotary(torch.arange(length, device=self.device))
        sizes = len(batch.cached_lengths), *first.prompt_keys.shape[1:3], *first.keys.shape[1:3]
        rows = batch.start_positions, batch.cached_lengths, batch.device_prompt_of, batch.device_cache_rows
        caches = [x for tensors in batch.list_cache_tensors() for x in tensors]
        header = [*sizes, *(x.data_ptr() for x in (*rows, *self.rotary_table))]
        contents = [*header, *[0] * (_HEADER_SIZE - len(header)), *(x.data_ptr() for x in caches)]
        if contents != self.table_contents:
            assert all(x.is_contiguous() for x in caches)
            self.table.copy_(torch.tensor(contents), non_blocking=True)
            self.table_contents = contents

    def _compute(self, tokens: Tensor) -> Tensor:
        """[n] -> [n, D]: launch the kernels of a step."""
        weights, shape, pending = self.weights, self.shape, None
        assert weights
        hidden = F.embedding(tokens, weights.embedding.tensor).to(weights.norm.dtype)
        for layer, addresses, window in zip(weights.layers, self.layer_addresses, self.windows, strict=True):
            hidden, x = self._add_and_norm(hidden, pending, layer.attention_norm)
            qkv = project(x, layer.qkv, layer.qkv_bias)
            attended = attend_step(qkv, self.header, addresses, layer, shape, window)
            attention_output = project(attended, layer.attention_out, layer.attention_out_bias)
            hidden, x = self._add_and_norm(hidden, attention_output, layer.mlp_norm)
            gated = triton_ops.swiglu_forward(project(x, layer.gate_up, layer.gate_up_bias))
            pending = project(gated, layer.down, layer.down_bias)
        return self._add_and_norm(hidden, pending, weights.norm)[1]

    def _add_and_norm(self, hidden: Tensor, pending: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if pending is None:
            return hidden, triton_ops.norm_forward(hidden, weight, self.shape.eps, self.dtype)
        return triton_ops.add_norm_forward(hidden, pending, weight, self.shape.eps)


def _round_up_rows(n: int) -> int:
    """Return the number of rows of the graph that computes n rows; `project` computes a single row as two."""
    return round_up(n, ROWS_STEP) if n > ROWS_STEP else max(2, 1 << (n - 1).bit_length())


def _list_addresses(weights: DecoderWeights) -> list[int]:
    return [x.data_ptr() for x in tree_leaves(weights) if isinstance(x, Tensor)]
