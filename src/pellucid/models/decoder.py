"""Llama and its family (Mistral, Qwen2, Qwen3), written out: weights, and what a layer computes.

One set of layers with two faces: decoding.py continues groups of rows from a KV cache, packed.py scores rollouts with
gradient. Both compute in `dtype` with the residual stream in fp32, so that what was sampled is what is scored.

Left out on purpose: dropout, rotary scalings that depend on the length. `fallback_reason` in
family.py says so, and such a model goes through transformers instead.

Shapes: N tokens, D hidden size, H query heads, K key heads, d head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from pellucid.models import linear
from pellucid.models.autograd_ops import add_and_rms_norm, apply_rms_norm, apply_rotary, apply_swiglu
from pellucid.models.linear import (
    CastWeights,
    JoinedLinear,
    MatrixParts,
    TrainedLinear,
    TrainedMatrix,
    VocabularyMatrix,
)
from pellucid.models.ops import promote_to_fp32


class LayerWeights(NamedTuple):
    """Weights as `F.linear` takes them; projections that read the same input are one matrix."""

    attention_norm: Tensor
    """[D]"""
    qkv: Tensor | MatrixParts | TrainedMatrix
    """[(H + 2K) d, D]"""
    attention_out: Tensor | TrainedMatrix
    """[D, H d]"""
    mlp_norm: Tensor
    """[D]"""
    gate_up: Tensor | MatrixParts | TrainedMatrix
    """[2I, D]"""
    down: Tensor | TrainedMatrix
    """[D, I]"""
    qkv_bias: Tensor | None = None
    """[(H + 2K) d], Qwen2"""
    attention_out_bias: Tensor | None = None
    """[D], where the configuration says attention_bias"""
    gate_up_bias: Tensor | None = None
    """[2I], where it says mlp_bias"""
    down_bias: Tensor | None = None
    """[D], where it says mlp_bias"""
    query_norm: Tensor | None = None
    """[d], Qwen3"""
    key_norm: Tensor | None = None
    """[d], Qwen3"""


class DecoderWeights(NamedTuple):
    embedding: VocabularyMatrix
    layers: list[LayerWeights]
    norm: Tensor
    """[D]"""
    head: VocabularyMatrix


CHECKPOINT_PARAMETERS = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention_out": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention_out_bias": ("self_attn.o_proj.bias",),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down_bias": ("mlp.down_proj.bias",),
    "query_norm": ("self_attn.q_norm.weight",),
    "key_norm": ("self_attn.k_norm.weight",),
}
"""Which parameters of a Hugging Face checkpoint make up which weight of a layer."""


def locate_parameters(block: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """The modules in which these parameters stand, and their names there."""
    return [(block.get_submodule(path), leaf) for path, _, leaf in (source.rpartition(".") for source in names)]


QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""Queries [N, H, d], keys and values [N, K, d] of N tokens."""
CosSin = tuple[Tensor, Tensor]
"""cos and sin, [N, 1, d] each, the first half of the sines negative."""


class ResidualStream(NamedTuple):
    """The residual stream between layers."""

    hidden: Tensor
    """[N, D]"""
    pending: Tensor | None = None
    """[N, D] in the compute dtype: what the last layer adds to it, in the pass over memory that norms their sum."""

    def add_pending(self) -> Tensor:
        return self.hidden if self.pending is None else self.hidden + self.pending


class LayerFunctions(NamedTuple):
    """The parts of a layer that work on single tokens, before and after its attention."""

    compute_qkv: Callable[..., tuple[Tensor, QueryKeyValue]]
    compute_output: Callable[..., ResidualStream]


class DecoderLayer(nn.Module):
    """A layer. It computes with the parameters of `block`, as they stand there in each call."""

    def __init__(self, block: nn.Module, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.block, self.shape = block, shape
        known = dict(block.named_parameters())
        parts = {
            name: locate_parameters(block, sources)
            for name, sources in CHECKPOINT_PARAMETERS.items()
            if sources[0] in known
        }
        # Norms are used as they are: the residual stream is not in the compute dtype.
        self.norms = {name: places[0] for name, places in parts.items() if name.endswith("norm")}
        self.cast_weights = {
            name: CastWeights(places, dtype) for name, places in parts.items() if name not in self.norms
        }

    def collect_weights(self) -> LayerWeights:
        """As the parameters are now; with gradient where that is enabled."""
        weights: dict[str, Any] = {name: part.get_weights() for name, part in self.cast_weights.items()}
        norms = {name: promote_to_fp32(getattr(*place)) for name, place in self.norms.items()}
        return LayerWeights(**weights, **norms)

    def forward(
        self,
        stream: ResidualStream,
        rotary: CosSin,
        attention: Callable[[QueryKeyValue], Tensor],
        functions: LayerFunctions,
        recompute: bool,
    ) -> ResidualStream:
        """Hidden states -> those behind this layer. `attention` is [N, H d] of what the heads read.

        recompute: keep only the residual stream for the backward pass.
        """
        if recompute:

            def anew(hidden: Tensor) -> ResidualStream:
                return self._compute(ResidualStream(hidden), rotary, attention, functions)

            return checkpoint(anew, stream.add_pending(), use_reentrant=False)
        return self._compute(stream, rotary, attention, functions)

    def _compute(
        self,
        stream: ResidualStream,
        rotary: CosSin,
        attention: Callable[[QueryKeyValue], Tensor],
        functions: LayerFunctions,
    ) -> ResidualStream:
        weights = self.collect_weights()
        hidden, heads = functions.compute_qkv(weights, stream, rotary, self.shape)
        return functions.compute_output(weights, hidden, attention(heads), self.shape)


class Decoder(nn.Module):
    """Computes with the parameters of `model`, transformers' or `module_of`, as they stand there in each call."""

    def __init__(self, config: Any, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = get_model_shape(config), dtype
        body = model.get_submodule("model")
        self.embed_tokens, self.final_norm = body.get_submodule("embed_tokens"), body.get_submodule("norm")
        # A tied head is not read: it stands here for engines, which must find the one parameter in both of its places.
        self.lm_head = (
            getattr(model, "lm_head", self.embed_tokens) if self.shape.tied else model.get_submodule("lm_head")
        )
        blocks = [body.get_submodule(f"layers.{i}") for i in range(self.shape.layers)]
        self.layers: Sequence[DecoderLayer] = cast(
            Any, nn.ModuleList(DecoderLayer(block, self.shape, dtype) for block in blocks)
        )
        self.embedding = CastWeights([(self.embed_tokens, "weight")], dtype)
        self.head = self.embedding if self.shape.tied else CastWeights([(self.lm_head, "weight")], dtype)
        self.final_norm_location = self.final_norm, "weight"
        self.device = getattr(*self.final_norm_location).device
        self.uses_cuda_graphs: bool | None = None if self.device.type == "cuda" else False
        """Whether a token is decoded as a CUDA graph; None until it was tried."""
        self.frequencies = compute_rotary_frequencies(config, self.shape.head_size).to(self.device)
        self.can_prepack = (
            self.device.type == "cpu"
            and dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def list_cast_weights(self) -> list[CastWeights]:
        return [self.embedding, self.head, *(part for layer in self.layers for part in layer.cast_weights.values())]

    def disable_cast_copies(self) -> None:
        """Keep no cast weights from now on: an engine gathers parameters around each call."""
        for part in self.list_cast_weights():
            part.is_uncached = True

    def collect_outer_weights(self) -> tuple[VocabularyMatrix, Tensor, VocabularyMatrix]:
        """Embedding, last norm [D] and head, as they are now."""
        embedding, head = (
            VocabularyMatrix(part.get_cast_copy(), part.get_masters()[0]) for part in (self.embedding, self.head)
        )
        return embedding, promote_to_fp32(getattr(*self.final_norm_location)), head

    def collect_weights(self) -> DecoderWeights:
        """All weights as they are now; with gradient where that is enabled."""
        embedding, norm, head = self.collect_outer_weights()
        return DecoderWeights(embedding, [layer.collect_weights() for layer in self.layers], norm, head)

    def compute_rotary(self, positions: Tensor) -> CosSin:
        """Of positions [N]."""
        angles = (positions[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


# ---------------------------------------------------------------- what a layer computes


def compute_qkv(
    layer: LayerWeights, stream: ResidualStream, rotary: CosSin, shape: ModelShape
) -> tuple[Tensor, QueryKeyValue]:
    """The whole stream [N, D], and what the heads of this layer make of it."""
    hidden, x = add_and_rms_norm(*stream, layer.attention_norm, shape.eps, layer.attention_out.dtype)
    heads = project(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, shape.head_size))
    turning, value = heads.split([shape.heads + shape.key_heads, shape.key_heads], -2)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = turning.split([shape.heads, shape.key_heads], -2)
        query = apply_rms_norm(query, layer.query_norm, shape.eps, heads.dtype)
        turning = torch.cat([query, apply_rms_norm(key, layer.key_norm, shape.eps, heads.dtype)], -2)
    query, key = apply_rotary(turning, *rotary).split([shape.heads, shape.key_heads], -2)
    return hidden, (query, key, value)


def compute_layer_output(layer: LayerWeights, hidden: Tensor, attended: Tensor, shape: ModelShape) -> ResidualStream:
    """The stream of the next layer, from what the heads of this one have read, [N, H d]."""
    read = project(attended, layer.attention_out, layer.attention_out_bias)
    hidden, x = add_and_rms_norm(hidden, read, layer.mlp_norm, shape.eps, layer.down.dtype)
    return ResidualStream(
        hidden, project(apply_swiglu(project(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
    )


EAGER_LAYER_FUNCTIONS = LayerFunctions(compute_qkv, compute_layer_output)


@cache
def compile_layer_functions(backend: str = "inductor") -> LayerFunctions:
    """Pieces compiled by torch.compile, which needs a C++ compiler, and most of a minute at first use."""
    options = {"dynamic": True, "backend": backend}
    return LayerFunctions(torch.compile(compute_qkv, **options), torch.compile(compute_layer_output, **options))


def project(x: Tensor, weight: Tensor | MatrixParts | TrainedMatrix, bias: Tensor | None = None) -> Tensor:
    """F.linear, also for weights that `prepacked` has laid out anew. Never of one row alone, which oneDNN adds up in
    another order than among others.
    """
    if len(x) == 1:
        return project(x.expand(2, -1), weight, bias)[:1]
    if isinstance(weight, TrainedMatrix):
        return TrainedLinear.apply(x, bias, weight.tensor, *weight.masters)  # pyright: ignore[reportReturnType]
    if isinstance(weight, MatrixParts):
        return JoinedLinear.apply(x, bias, *weight.parts)  # pyright: ignore[reportReturnType]
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return linear.apply_linear(x, weight, bias)


def prepack_weights(weights: DecoderWeights, rows: int) -> DecoderWeights:
    """Matrices in oneDNN's own layout for products of so many rows; without gradient, on the CPU, in bf16."""

    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    layers = [
        layer._replace(**{name: pack(getattr(layer, name)) for name in ("qkv", "attention_out", "gate_up", "down")})
        for layer in weights.layers
    ]
    return weights._replace(layers=layers, head=weights.head._replace(tensor=pack(weights.head.tensor)))


# ---------------------------------------------------------------- from a checkpoint


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """A checkpoint folder on the CPU, without transformers' model. ValueError where there is a reason to fall back."""
    config = AutoConfig.from_pretrained(folder)
    if reason := find_fallback_reason(config):
        raise ValueError(f"{folder}: {reason}: not computed by this decoder")
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    weights = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    return Decoder(config, build_module(weights), dtype)


def build_module(weights: Mapping[str, Tensor]) -> nn.Module:
    """Modules in which these weights stand under their names, frozen."""
    root = nn.Module()
    for name, weight in weights.items():
        *path, leaf = name.split(".")
        module = root
        for child in path:
            if child not in module._modules:
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        module.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
    return root


# ---------------------------------------------------------------- family
# Which checkpoints our decoder computes, and the numbers that it reads from their configuration.


SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROTARY_SCALINGS = ("default", "linear", "llama3")


class ModelShape(NamedTuple):
    layers: int
    heads: int
    key_heads: int
    head_size: int
    eps: float
    tied: bool
    is_sliding: tuple[bool, ...]
    """Of each layer, whether a token reads no more than the last `window`, itself included."""
    window: int


def get_model_shape(config: Any) -> ModelShape:
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        is_sliding=find_sliding_layers(config),
        window=getattr(config, "sliding_window", None) or 0,
    )


def find_fallback_reason(config: Any) -> str:
    """Why this decoder does not compute what such a checkpoint means; empty where it does."""
    if config.model_type not in SUPPORTED_ARCHITECTURES:
        return f"architecture {config.model_type}"
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    reasons = {
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        f"rotary scaling {rope.get('rope_type')}": rope.get("rope_type") not in SUPPORTED_ROTARY_SCALINGS
        or "rope_theta" not in rope,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "other layers than attention": not _has_only_attention(config),
        "quantised weights": getattr(config, "quantization_config", None) is not None,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def get_context_length(config: Any) -> int:
    """The most tokens that this model reads in one way, whatever stands beside them.

    transformers gives all rows of a batch the rotary frequencies of its longest row, and keeps keys that were turned by
    others: beyond the length that frequencies depend on, a token's log-prob would be that of its neighbours.
    """
    most = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([most, *limits])


def _has_only_attention(config: Any) -> bool:
    """Whether each layer is one of attention: to all tokens, or where a checkpoint has a window, to the last ones."""
    window = config.model_type != "llama" and getattr(config, "sliding_window", None)
    known = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    return set(getattr(config, "layer_types", None) or known) <= known


def find_sliding_layers(config: Any) -> tuple[bool, ...]:
    """Mistral's window is that of every layer, whatever else is said of them."""
    if config.model_type == "mistral":
        return (config.sliding_window is not None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(kind == "sliding_attention" for kind in kinds)


def compute_rotary_frequencies(config: Any, head_size: int) -> Tensor:
    """[d / 2] radians per position, scaled as the checkpoint says.

    To the last bit those that it was trained with: rounded otherwise, one turns position 2,000 by 1e-4 radians more or
    less. Hence the order of operations is transformers', here and in `_stretched`.
    """
    rope = config.rope_parameters
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, head_size, 2) / head_size)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        return _apply_llama3_scaling(frequencies, rope)
    return frequencies


def _apply_llama3_scaling(frequencies: Tensor, rope: Mapping[str, float]) -> Tensor:
    """Llama 3.1: waves longer than the original context are slowed down, short ones not; between, a blend."""
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / rope["factor"] + keep * frequencies
