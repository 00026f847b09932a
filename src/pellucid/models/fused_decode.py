"""Fused decoding on the CPU: one call of C++ (cpp/decode.cpp) per step in place of a thousand operators.

`fused_check` decides where it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from pellucid.models.decoder import DecoderWeights, LayerWeights, ModelShape
from pellucid.models.linear import AdaptedMatrix
from pellucid.models.native import KERNEL_HEAD_SIZES, KernelVariant, OperationCounter, call_kernel

_OUTPUT_BLOCK = 32
"""The number of outputs stored together; widths of matrices are multiples of it."""
FUSED_STEP_PROFILER_NAME = "fused_step"
LayerCacheTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys and values of prompts, [K, P, S, d] each, then of rows, [K, n, capacity, d] each."""


class ModelStruct(ctypes.Structure):
    """The struct of the same fields in cpp/attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "width", "heads", "key_heads", "size", "inner", "vocabulary")),
        ("eps", ctypes.c_float),
        ("rank", ctypes.c_int64),
    )


class TokensStruct(ctypes.Structure):
    """The struct of the same fields in cpp/attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "rows", "prompts", "prompt_capacity", "capacity", "logit_count")),
        *(
            (name, ctypes.c_void_p)
            for name in ("row_of", "positions", "prompt_of", "prompt_lengths", "logit_tokens", "cos", "sin")
        ),
    )


class TokenPositions(NamedTuple):
    """The positions of N tokens in the caches of n rows, in ascending order within a row; on the CPU."""

    row_of: Tensor
    """[N] the row of each token."""
    positions: Tensor
    """[N] the position of each token in its row."""
    prompt_of: Tensor
    """[n] the prompt of each row."""
    prompt_lengths: Tensor
    """[P]"""
    logit_tokens: Tensor
    """[m] the tokens whose logits are computed."""


def find_fused_fault(weights: DecoderWeights, shape: ModelShape) -> str:
    """Return why the kernel cannot compute a model; empty if it can."""
    width, inner = _get_base(weights.layers[0].down).shape
    if shape.head_size not in KERNEL_HEAD_SIZES:
        return f"heads of {shape.head_size}"
    if weights.norm.dtype != torch.float32:
        return f"norms in {weights.norm.dtype}"
    return f"width {width} or {inner}" if width % _OUTPUT_BLOCK or inner % _OUTPUT_BLOCK else ""


def pack_matrix(library: Any, weight: Tensor, interleaved: bool = False) -> Tensor:
    """Convert a matrix [outputs, width] in bf16 to the layout of the C++.

    With `interleaved` the two halves of the outputs, gate and up, are stored alternately.
    """
    (outputs, width), weight = weight.shape, weight.contiguous()
    blocks = -(-outputs // _OUTPUT_BLOCK)
    packed = torch.empty(blocks * _OUTPUT_BLOCK, width, dtype=weight.dtype)
    call_kernel(library.pack, weight, outputs, width, interleaved, packed, torch.get_num_threads())
    return packed


class FusedDecoder:
    """The weights of a model in the layout of the C++, and the fused step."""

    def __init__(self, kernel: KernelVariant, weights: DecoderWeights, shape: ModelShape) -> None:
        self.kernel = kernel
        self.weights, self.threads = weights, torch.get_num_threads()
        (width, inner), self.vocabulary = _get_base(weights.layers[0].down).shape, len(weights.head.tensor)
        padding = -self.vocabulary % 16
        head = F.pad(weights.head.tensor, (0, 0, 0, padding)) if padding else weights.head.tensor
        self.packed_head = pack_matrix(kernel.library, head)
        self.layers = [self._pack_layer(layer) for layer in weights.layers]
        matrices = [[layer.qkv, layer.attention_out, layer.gate_up, layer.down] for layer in weights.layers]
        ranks = [[x.adapter.a.shape[0] if isinstance(x, AdaptedMatrix) else 0 for x in layer] for layer in matrices]
        self.matrix_elements = sum(
            base.numel() + rank * sum(base.shape)
            for layer, layer_ranks in zip(matrices, ranks, strict=True)
            for base, rank in zip(map(_get_base, layer), layer_ranks, strict=True)
        )
        windows = [shape.window if slides else 0 for slides in shape.is_sliding]
        self.layer_table = torch.tensor(
            [
                [*(0 if x is None else x.data_ptr() for x in layer), window, *layer_ranks, 0, 0, 0, 0]
                for layer, window, layer_ranks in zip(self.layers, windows, ranks, strict=True)
            ]
        )
        """[layers, 25], each row a `Layer` of cpp/attention.h: addresses of weights, window, ranks of adapters, and the
        addresses of caches."""
        heads = shape.heads, shape.key_heads, shape.head_size
        sizes = shape.layers, width, *heads, inner, self.vocabulary
        self.model_struct = ModelStruct(*sizes, shape.eps, max(map(max, ranks)))

    def _pack_layer(self, layer: LayerWeights) -> list[Tensor | None]:
        """Return the weights of a layer in the order of a `Layer`; the list keeps their memory alive."""
        bias = layer.gate_up_bias
        tensors = [
            layer.attention_norm,
            self._pack(layer.qkv),
            layer.qkv_bias,
            self._pack(layer.attention_out),
            layer.attention_out_bias,
            layer.mlp_norm,
            self._pack(layer.gate_up, interleaved=True),
            None if bias is None else bias.view(2, -1, 16).transpose(0, 1).flatten(),
            self._pack(layer.down),
            layer.down_bias,
            layer.query_norm,
            layer.key_norm,
            *map(self._pack_a, (layer.qkv, layer.attention_out, layer.gate_up, layer.down)),
        ]
        return [None if x is None else x.contiguous() for x in tensors]

    def _pack(self, weight: Any, interleaved: bool = False) -> Tensor:
        matrix = weight.join() if isinstance(weight, AdaptedMatrix) else weight
        return pack_matrix(self.kernel.library, matrix, interleaved)

    def _pack_a(self, weight: Any) -> Tensor | None:
        return pack_matrix(self.kernel.library, weight.adapter.a) if isinstance(weight, AdaptedMatrix) else None

    def step(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        positions: TokenPositions,
        caches: Sequence[LayerCacheTensors],
    ) -> Tensor:
        """Compute the layers for N tokens. Return the logits [m, V] after `positions.logit_tokens`. Raises MemoryError.

        Args:
            hidden: [N, D] in fp32, the embeddings of the tokens; overwritten.
            rotary: cos and sin of all positions up to the last, [positions, 1, d] each.
            positions: The rows and positions of the tokens.
            caches: The caches of each layer. The keys and values of the tokens are written to those of the rows.
        """
        (prompt_keys, _, keys, _), (cos, sin) = caches[0], rotary
        self.layer_table[:, -4:] = torch.tensor([[x.data_ptr() for x in cache] for cache in caches])
        n, outputs = len(hidden), len(positions.logit_tokens)
        sizes = n, len(positions.prompt_of), *prompt_keys.shape[1:3], keys.shape[2], outputs
        tokens = TokensStruct(*sizes, *(x.data_ptr() for x in (*positions, cos, sin)))
        logits = torch.empty(outputs, self.vocabulary, dtype=cos.dtype)
        with record_function(FUSED_STEP_PROFILER_NAME):
            model = self.model_struct, self.layer_table, tokens, self.weights.norm, self.packed_head
            status = call_kernel(self.kernel.library.step, *model, hidden, logits, self.kernel.uses_amx, self.threads)
        if status:
            raise MemoryError(f"not enough memory to compute {n} tokens at once")
        OperationCounter.count(2.0 * (n * self.matrix_elements + outputs * self.packed_head.numel()))
        return logits


def _get_base(x: Any) -> Tensor:
    base = x.base if isinstance(x, AdaptedMatrix) else x
    assert isinstance(base, Tensor)  # without gradient no weight is a TrainedMatrix or MatrixParts
    return base
