"""The decoder: weights and layers of Llama and its family (Mistral, Qwen2, Qwen3).

`decode` samples with these layers and a KV cache, `score` computes log-probs with gradient. Both compute in `dtype`
with the residual stream in fp32, so that a token is scored as it was sampled.

Dropout is always off. Rotary scalings that depend on the sequence length are not supported on purpose:
`find_fallback_reason` reports them, and transformers computes such a model.

Shapes: N tokens, D hidden size, H query heads, K key heads, d head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pellucid.models import linear
from pellucid.models.autograd_ops import add_and_rms_norm, apply_rms_norm, apply_rotary, apply_swiglu
from pellucid.models.linear import (
    AdaptedLinear,
    AdaptedMatrix,
    CastAdapter,
    CastWeights,
    JoinedLinear,
    MatrixParts,
    Recomputation,
    TrainedLinear,
    TrainedMatrix,
)
from pellucid.models.ops import promote_to_fp32

if TYPE_CHECKING:
    from pellucid.models.triton_decode import TritonDecoder

# ---------------------------------------------------------------- configuration

_SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_SUPPORTED_ROTARY_SCALINGS = ("default", "linear", "llama3")


class ModelShape(NamedTuple):
    """The sizes of a model, from its configuration."""

    layers: int
    heads: int
    key_heads: int
    head_size: int
    eps: float
    """The epsilon of RMSNorm."""
    tied: bool
    """Whether the head shares the weights of the embedding."""
    is_sliding: tuple[bool, ...]
    """For each layer, whether a token attends only to the last `window` tokens, itself included."""
    window: int


def find_fallback_reason(config: Any) -> str:
    """Return why this decoder cannot compute a model, from its configuration; empty if it can."""
    if config.model_type not in _SUPPORTED_ARCHITECTURES:
        return f"architecture {config.model_type}"
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    reasons = {
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        f"rotary scaling {rope.get('rope_type')}": rope.get("rope_type") not in _SUPPORTED_ROTARY_SCALINGS
        or "rope_theta" not in rope,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "other layers than attention": not _has_only_attention(config),
        "quantized weights": getattr(config, "quantization_config", None) is not None,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def get_context_length(config: Any) -> int:
    """Return the length up to which the log-probs of a row do not depend on the other rows of its batch.

    transformers gives all rows of a batch the rotary frequencies of the longest row, and its KV cache keeps keys that
    were rotated by other frequencies. LongRoPE changes them at a length; from there on, log-probs depend on other rows.
    """
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    longrope = [s["original_max_position_embeddings"] for s in scalings if s.get("rope_type") == "longrope"]
    return min([limit, *longrope])


def _has_only_attention(config: Any) -> bool:
    """Return whether all layers are full attention, or sliding attention if the architecture has windows."""
    window = config.model_type != "llama" and getattr(config, "sliding_window", None)
    known = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    return set(getattr(config, "layer_types", None) or known) <= known


def find_sliding_layers(config: Any) -> tuple[bool, ...]:
    """Return whether each layer has a sliding window. In Mistral all or none have one, whatever layer_types says."""
    if config.model_type == "mistral":
        return (config.sliding_window is not None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(kind == "sliding_attention" for kind in kinds)


# ---------------------------------------------------------------- weights


class PrepackedAdaptedMatrix(NamedTuple):
    """An AdaptedMatrix that `prepack_weights` has converted."""

    a: Tensor
    joined: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.joined.dtype


_FrozenMatrix = Tensor | AdaptedMatrix | PrepackedAdaptedMatrix
_Matrix = _FrozenMatrix | TrainedMatrix | MatrixParts


class LayerWeights(NamedTuple):
    """The weights of a layer as `F.linear` takes them. Projections of the same input are joined into one matrix.

    Qwen2 has `qkv_bias`, and Qwen3 has norms of queries and keys. The settings attention_bias and mlp_bias of the
    configuration add biases.
    """

    attention_norm: Tensor
    qkv: _Matrix
    """[(H + 2K) d, D]"""
    attention_out: _FrozenMatrix | TrainedMatrix
    """[D, H d]"""
    mlp_norm: Tensor
    gate_up: _Matrix
    """[2I, D]"""
    down: _FrozenMatrix | TrainedMatrix
    """[D, I]"""
    qkv_bias: Tensor | None = None
    attention_out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


class DecoderWeights(NamedTuple):
    embedding: TrainedMatrix
    layers: list[LayerWeights]
    norm: Tensor
    """[D]"""
    head: TrainedMatrix


_CHECKPOINT_PARAMETERS = {
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
"""The parameters of a Hugging Face checkpoint that make up each weight of a layer."""
JOINED_LAYERS = {
    name: tuple(source.split(".")[-2] for source in _CHECKPOINT_PARAMETERS[name])
    for name in ("qkv", "attention_out", "gate_up", "down")
}
"""The layers of a checkpoint that make up each projection of a layer."""
ADAPTABLE_LAYERS = frozenset(layer for layers in JOINED_LAYERS.values() for layer in layers)
"""The layers that may have an adapter."""


# ---------------------------------------------------------------- layers


QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""Queries [N, H, d], keys and values [N, K, d] of N tokens."""
_CosSin = tuple[Tensor, Tensor]
"""cos and sin, [N, 1, d] each, the first half of sin negated."""


class ResidualStream(NamedTuple):
    """The residual stream between layers."""

    hidden: Tensor
    """[N, D]"""
    pending: Tensor | None = None
    """[N, D] in the compute dtype: the output of the last layer. The next norm adds it in the same pass."""

    def add_pending(self) -> Tensor:
        return self.hidden if self.pending is None else self.hidden + self.pending


def compute_qkv(
    layer: LayerWeights, stream: ResidualStream, rotary: _CosSin, shape: ModelShape
) -> tuple[Tensor, QueryKeyValue]:
    """Compute the part of a layer before attention: the residual stream [N, D], and queries, keys and values."""
    dtype = layer.attention_out.dtype
    hidden, x = add_and_rms_norm(*stream, layer.attention_norm, shape.eps, dtype)
    recomputation = _recompute_norm(hidden, layer.attention_norm, shape, dtype)
    heads = project(x, layer.qkv, layer.qkv_bias, recomputation).unflatten(-1, (-1, shape.head_size))
    rotated, value = heads.split([shape.heads + shape.key_heads, shape.key_heads], -2)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = rotated.split([shape.heads, shape.key_heads], -2)
        query = apply_rms_norm(query, layer.query_norm, shape.eps, heads.dtype)
        rotated = torch.cat([query, apply_rms_norm(key, layer.key_norm, shape.eps, heads.dtype)], -2)
    query, key = apply_rotary(rotated, *rotary).split([shape.heads, shape.key_heads], -2)
    return hidden, (query, key, value)


def compute_layer_output(layer: LayerWeights, hidden: Tensor, attended: Tensor, shape: ModelShape) -> ResidualStream:
    """Compute the part of a layer after attention, whose output `attended` is [N, H d]."""
    attention_output = project(attended, layer.attention_out, layer.attention_out_bias)
    hidden, x = add_and_rms_norm(hidden, attention_output, layer.mlp_norm, shape.eps, layer.down.dtype)
    recomputation = _recompute_norm(hidden, layer.mlp_norm, shape, layer.down.dtype)
    gate_up = project(x, layer.gate_up, layer.gate_up_bias, recomputation)
    gated = apply_swiglu(gate_up)
    recomputation = Recomputation(apply_swiglu, (gate_up,))
    return ResidualStream(hidden, project(gated, layer.down, layer.down_bias, recomputation))


def _recompute_norm(hidden: Tensor, weight: Tensor, shape: ModelShape, dtype: torch.dtype) -> Recomputation:
    return Recomputation(lambda x, w: apply_rms_norm(x, w, shape.eps, dtype), (hidden, weight))


def project(
    x: Tensor, weight: _Matrix, bias: Tensor | None = None, recomputation: Recomputation | None = None
) -> Tensor:
    """Compute F.linear of x [n, K] by any kind of weight, also one that `prepack_weights` has converted.

    With `recomputation` x may be computed again in the backward pass.
    A single row is computed as two: oneDNN sums it in another order than a row among others.
    """
    if len(x) == 1:
        return project(x.expand(2, -1), weight, bias)[:1]
    if isinstance(weight, TrainedMatrix):
        return TrainedLinear.apply(x, bias, recomputation, weight.tensor, *weight.masters)  # pyright: ignore[reportReturnType]
    if isinstance(weight, MatrixParts):
        return JoinedLinear.apply(x, bias, *weight.parts)  # pyright: ignore[reportReturnType]
    if isinstance(weight, AdaptedMatrix):
        return AdaptedLinear.apply(x, bias, recomputation, weight, *weight.adapter.masters)  # pyright: ignore[reportReturnType]
    if isinstance(weight, PrepackedAdaptedMatrix):
        x, weight = torch.cat([x, project(x, weight.a)], 1), weight.joined
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return linear.apply_linear(x, weight, bias)


class _DecoderLayer(nn.Module):
    """A layer that looks up the parameters of `block`, a layer of transformers, in each call."""

    def __init__(self, block: nn.Module, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.block, self.shape = block, shape
        modules, parts, adapters = dict(block.named_modules()), {}, {}
        for name, sources in _CHECKPOINT_PARAMETERS.items():
            layers = [modules.get(path) for path, _, _ in (x.rpartition(".") for x in sources)]
            leaf, bases = sources[0].rpartition(".")[2], [getattr(x, "base_layer", x) for x in layers]
            if getattr(bases[0], leaf, None) is not None:
                parts[name] = [(base, leaf) for base in bases]
                if leaf == "weight" and any(hasattr(layer, "lora_A") for layer in layers):
                    adapters[name] = CastAdapter(layers, dtype)
        # Norms are not cast: the residual stream is not in the compute dtype.
        self.norms = {name: locations[0] for name, locations in parts.items() if name.endswith("norm")}
        self.cast_weights = {
            name: CastWeights(locations, dtype, adapters.get(name))
            for name, locations in parts.items()
            if name not in self.norms
        }

    def collect_weights(self) -> LayerWeights:
        """Return the current weights, with gradient if it is enabled."""
        weights: dict[str, Any] = {name: part.get_weights() for name, part in self.cast_weights.items()}
        norms = {name: promote_to_fp32(getattr(*location)) for name, location in self.norms.items()}
        return LayerWeights(**weights, **norms)

    def forward(
        self,
        stream: ResidualStream,
        rotary: _CosSin,
        attention: Callable[[QueryKeyValue], Tensor],
        recompute: bool,
    ) -> ResidualStream:
        """Compute the layer; with `recompute` only the residual stream is kept for the backward pass."""

        def compute(hidden: Tensor, pending: Tensor | None = None) -> ResidualStream:
            weights = self.collect_weights()
            hidden, heads = compute_qkv(weights, ResidualStream(hidden, pending), rotary, self.shape)
            return compute_layer_output(weights, hidden, attention(heads), self.shape)

        return checkpoint(compute, stream.add_pending(), use_reentrant=False) if recompute else compute(*stream)


class Decoder(nn.Module):
    """The decoder of a transformers `model`. It looks up the parameters in each call, and computes in `dtype`."""

    def __init__(self, config: Any, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.shape = ModelShape(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            eps=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            is_sliding=find_sliding_layers(config),
            window=getattr(config, "sliding_window", None) or 0,
        )
        body = model.get_submodule("model")
        self.embed_tokens, self.final_norm = body.get_submodule("embed_tokens"), body.get_submodule("norm")
        # A tied head is not used. It is here for engines, which must find the parameter under both of its names.
        self.lm_head = (
            getattr(model, "lm_head", self.embed_tokens) if self.shape.tied else model.get_submodule("lm_head")
        )
        blocks = [body.get_submodule(f"layers.{i}") for i in range(self.shape.layers)]
        self.layers: Sequence[_DecoderLayer] = cast(
            Any, nn.ModuleList(_DecoderLayer(block, self.shape, dtype) for block in blocks)
        )
        self.embedding = CastWeights([(self.embed_tokens, "weight")], dtype)
        self.head = self.embedding if self.shape.tied else CastWeights([(self.lm_head, "weight")], dtype)
        self.final_norm_location = self.final_norm, "weight"
        self.device = getattr(*self.final_norm_location).device
        self.uses_cuda_graphs: bool | None = None if self.device.type == "cuda" else False
        """Whether decode steps are CUDA graphs; None until the first was compared."""
        self.triton_decoder: TritonDecoder | None = None
        """Decode steps by Triton's kernels, whose graphs outlive batches."""
        # transformers' to the last bit: rounded otherwise, they rotate position 2,000 by 1e-4 radians more or less.
        self.frequencies = LlamaRotaryEmbedding(config).inv_freq.to(self.device)
        self.can_prepack = (
            self.device.type == "cpu"
            and dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    @property
    def is_adapted(self) -> bool:
        """Whether there is an adapter."""
        return any(part.adapter for part in self.list_cast_weights())

    def list_cast_weights(self) -> list[CastWeights]:
        return [self.embedding, self.head, *(part for layer in self.layers for part in layer.cast_weights.values())]

    def disable_cast_copies(self) -> None:
        """Keep no cast copies from now on, for an engine that gathers parameters around each call."""
        for part in self.list_cast_weights():
            part.is_uncached = True

    def collect_outer_weights(self) -> tuple[TrainedMatrix, Tensor, TrainedMatrix]:
        """Return the current embedding, last norm [D] and head."""
        embedding, head = (
            TrainedMatrix(part.get_cast_copy(), tuple(part.get_masters())) for part in (self.embedding, self.head)
        )
        return embedding, promote_to_fp32(getattr(*self.final_norm_location)), head

    def collect_weights(self) -> DecoderWeights:
        """Return all current weights, with gradient if it is enabled."""
        embedding, norm, head = self.collect_outer_weights()
        return DecoderWeights(embedding, [layer.collect_weights() for layer in self.layers], norm, head)

    def compute_rotary(self, positions: Tensor) -> _CosSin:
        """Return cos and sin of positions [N]."""
        angles = (positions[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def prepack_weights(weights: DecoderWeights, rows: int) -> DecoderWeights:
    """Convert matrices to oneDNN's layout for products of `rows` rows: on the CPU, in bf16, without gradient."""

    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def pack_matrix(weight: Tensor | AdaptedMatrix) -> Tensor | PrepackedAdaptedMatrix:
        if isinstance(weight, AdaptedMatrix):
            return PrepackedAdaptedMatrix(pack(weight.adapter.a), pack(weight.join()))
        return pack(weight)

    matrices = "qkv", "attention_out", "gate_up", "down"
    layers = [
        layer._replace(**{name: pack_matrix(getattr(layer, name)) for name in matrices}) for layer in weights.layers
    ]
    return weights._replace(layers=layers, head=weights.head._replace(tensor=pack(weights.head.tensor)))
