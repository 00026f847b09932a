"""Tokens through all layers by one call of C++ (cpp/decode.cpp), not some thousand operators. fusing.py says where."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from pellucid.models.decoder import DecoderWeights, LayerWeights, ModelShape
from pellucid.models.native import OperationCounter, call_kernel

OUTPUT_BLOCK = 32
"""Outputs of a matrix that lie together; widths are a multiple of it."""
INT8_INPUT_BLOCK = 64
"""In int8 matrices are filled up to a multiple of so many inputs."""
FUSED_STEP_PROFILER_NAME = "fused_step"
"""Of a step, in torch's profiler."""
FUSED_HEAD_SIZES = range(64, 257, 64)
"""Sizes of a head."""
LayerCacheTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys and values of prompts, keys and values of rows."""


class ModelStruct(ctypes.Structure):
    """As in cpp/attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "width", "heads", "key_heads", "size", "inner", "vocabulary")),
        ("eps", ctypes.c_float),
    )


class TokensStruct(ctypes.Structure):
    """As in cpp/attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "rows", "prompts", "prompt_room", "room", "asked")),
        *(
            (name, ctypes.c_void_p)
            for name in ("row_of", "places", "prompt_of", "prompt_lengths", "last", "cos", "sin")
        ),
    )


class TokenPositions(NamedTuple):
    """Where N tokens stand in the caches of n rows, those of a row in their order; all on the CPU."""

    row_of: Tensor
    """[N]"""
    positions: Tensor
    """[N] in its row."""
    prompt_of: Tensor
    """[n]"""
    prompt_lengths: Tensor
    """[P]"""
    logit_tokens: Tensor
    """[m] tokens behind which logits are wanted."""


def find_fused_fault(weights: DecoderWeights, shape: ModelShape) -> str:
    """Why the C++ does not compute such a model; empty where it does."""
    width, inner = require_tensor(weights.layers[0].down).shape
    if shape.head_size not in FUSED_HEAD_SIZES:
        return f"heads of {shape.head_size}"
    if weights.norm.dtype != torch.float32:
        return f"norms in {weights.norm.dtype}"
    return f"width {width} or {inner}" if width % OUTPUT_BLOCK or inner % OUTPUT_BLOCK else ""


class FusedKernel(NamedTuple):
    """What computes a step."""

    library: Any
    uses_amx: bool
    """Whether by AMX, and in its order of sums."""
    int8: bool = False
    """Whether the matrices of the layers are multiplied in int8."""


def pack_matrix(library: Any, weight: Tensor, interleaved: bool = False, int8: bool = False) -> Tensor:
    """A matrix [outputs, width] in bf16 as the C++ reads it, in bf16 or in int8 with scales.

    joined: its halves are gates and what they let through.
    """
    (outputs, width), weight = weight.shape, weight.contiguous()
    blocks = -(-outputs // OUTPUT_BLOCK)
    if int8:
        depth = -(-width // INT8_INPUT_BLOCK) * INT8_INPUT_BLOCK
        to, pack = torch.empty(blocks, OUTPUT_BLOCK * (depth + 8), dtype=torch.int8), library.pack_bytes
    else:
        to, pack = torch.empty(blocks * OUTPUT_BLOCK, width, dtype=weight.dtype), library.pack
    call_kernel(pack, weight, outputs, width, interleaved, to, torch.get_num_threads())
    return to


class FusedDecoder:
    """Weights as the C++ reads them, and a step by them."""

    def __init__(self, kernel: FusedKernel, weights: DecoderWeights, shape: ModelShape) -> None:
        self.kernel = kernel
        self.weights, self.threads = weights, torch.get_num_threads()
        (width, inner), self.vocabulary = require_tensor(weights.layers[0].down).shape, len(weights.head.tensor)
        beyond = -self.vocabulary % 16
        head = F.pad(weights.head.tensor, (0, 0, 0, beyond)) if beyond else weights.head.tensor
        self.packed_head = pack_matrix(kernel.library, head)
        self.layers = [self._pack_layer(layer) for layer in weights.layers]
        matrices = [x for layer in weights.layers for x in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
        self.matrix_elements = sum(require_tensor(x).numel() for x in matrices)
        windows = [shape.window if slides else 0 for slides in shape.is_sliding]
        self.layer_table = torch.tensor(
            [
                [*(0 if x is None else x.data_ptr() for x in layer), window, 0, 0, 0, 0]
                for layer, window in zip(self.layers, windows, strict=True)
            ]
        )
        """[layers, 17], each a `Layer` of cpp/attention.h."""
        self.model_struct = ModelStruct(
            shape.layers,
            width,
            shape.heads,
            shape.key_heads,
            shape.head_size,
            inner,
            self.vocabulary,
            shape.eps,
        )

    def _pack_layer(self, layer: LayerWeights) -> list[Tensor | None]:
        """In the order of a `Layer`, so that what is made here lives as long as its address is used."""
        bias = layer.gate_up_bias
        kept = [
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
        return [None if x is None else x.contiguous() for x in kept]

    def _pack(self, weight: Any, interleaved: bool = False) -> Tensor:
        return pack_matrix(self.kernel.library, require_tensor(weight), interleaved, self.kernel.int8)

    def step(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        positions: TokenPositions,
        caches: Sequence[LayerCacheTensors],
    ) -> Tensor:
        """Return logits [m, V] behind the last of tokens of these embeddings [N, D] fp32, which are written over.
        MemoryError where there is none.

        rotary: cos and sin of all positions up to the last, [positions, 1, d] each.
        caches: of each layer keys and values of the prompts, [K, P, S, d], and of the rows, [K, n, room, d], which get
        those of the tokens at their places.
        """
        (prompt_keys, _, keys, _), (cos, sin) = caches[0], rotary
        self.layer_table[:, -4:] = torch.tensor([[x.data_ptr() for x in cache] for cache in caches])
        sizes = (
            len(hidden),
            len(positions.prompt_of),
            *prompt_keys.shape[1:3],
            keys.shape[2],
            len(positions.logit_tokens),
        )
        tokens = TokensStruct(*sizes, *(x.data_ptr() for x in (*positions, cos, sin)))
        logits = torch.empty(len(positions.logit_tokens), self.vocabulary, dtype=cos.dtype)
        with record_function(FUSED_STEP_PROFILER_NAME):
            about = self.model_struct, self.layer_table, tokens, self.weights.norm, self.packed_head
            fault = call_kernel(
                self.kernel.library.step, *about, hidden, logits, self.kernel.uses_amx, self.kernel.int8, self.threads
            )
        if fault:
            raise MemoryError(f"no memory to read {len(hidden)} tokens at once")
        OperationCounter.count(
            2.0 * (len(hidden) * self.matrix_elements + len(positions.logit_tokens) * self.packed_head.numel())
        )
        return logits


def require_tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)  # without gradient matrices are joined
    return x
