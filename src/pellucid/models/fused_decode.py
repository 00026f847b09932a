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
    width, inner = _require_tensor(weights.layers[0].down).shape
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
        (width, inner), self.vocabulary = _require_tensor(weights.layers[0].down).shape, len(weights.head.tensor)
        padding = -self.vocabulary % 16
        head = F.pad(weights.head.tensor, (0, 0, 0, padding)) if padding else weights.head.tensor
        self.packed_head = pack_matrix(kernel.library, head)
        self.layers = [self._pack_layer(layer) for layer in weights.layers]
        matrices = [x for layer in weights.layers for x in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
        self.matrix_elements = sum(_require_tensor(x).numel() for x in matrices)
        windows = [shape.window if slides else 0 for slides in shape.is_sliding]
        self.layer_table = torch.tensor(
            [
                [*(0 if x is None else x.data_ptr() for x in layer), window, 0, 0, 0, 0]
                for layer, window in zip(self.layers, windows, strict=True)
            ]
        )
        """[layers, 17], each row a `Layer` of cpp/attention.h: addresses of weights, window, addresses of caches."""
        heads = shape.heads, shape.key_heads, shape.head_size
        self.model_struct = ModelStruct(shape.layers, width, *heads, inner, self.vocabulary, shape.eps)

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
        ]
        return [None if x is None else x.contiguous() for x in tensors]

    def _pack(self, weight: Any, interleaved: bool = False) -> Tensor:
        return pack_matrix(self.kernel.library, _require_tensor(weight), interleaved)

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


def _require_tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)  # without gradient no weight is a TrainedMatrix or MatrixParts
    return x
