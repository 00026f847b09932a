"""Llama and its family (Mistral, Qwen2, Qwen3), written out: weights, and what a layer computes.

One set of layers with two faces: decoding.py continues groups of rows from a KV cache, packed.py scores rollouts with
gradient. Both compute in `dtype` with the residual stream in fp32, so that what was sampled is what is scored.

Left out on purpose: dropout, biases in the MLP, rotary scalings that depend on the length. `fallback_reason` says so,
and such a model goes through transformers instead.

Shapes: N tokens, D hidden size, H query heads, K key heads, d head size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from pellucid.models.elementwise import gated, norm, rotated
from pellucid.models.masters import CastWeights, Matrix

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3")


class Shape(NamedTuple):
    layers: int
    heads: int
    key_heads: int
    head_size: int
    eps: float
    tied: bool
    slides: tuple[bool, ...]
    """Of each layer, whether a token reads no more than the last `window`, itself included."""
    window: int


class Layer(NamedTuple):
    """Weights as `F.linear` takes them; projections that read the same input are one matrix."""

    attention_norm: Tensor
    """[D]"""
    qkv: Tensor
    """[(H + 2K) d, D]"""
    attention_out: Tensor
    """[D, H d]"""
    mlp_norm: Tensor
    """[D]"""
    gate_up: Tensor
    """[2I, D]"""
    down: Tensor
    """[D, I]"""
    qkv_bias: Tensor | None = None
    """[(H + 2K) d], Qwen2"""
    attention_out_bias: Tensor | None = None
    """[D], where the configuration says attention_bias"""
    query_norm: Tensor | None = None
    """[d], Qwen3"""
    key_norm: Tensor | None = None
    """[d], Qwen3"""


class Weights(NamedTuple):
    embedding: Matrix
    layers: list[Layer]
    norm: Tensor
    """[D]"""
    head: Matrix


PARTS = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention_out": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention_out_bias": ("self_attn.o_proj.bias",),
    "query_norm": ("self_attn.q_norm.weight",),
    "key_norm": ("self_attn.k_norm.weight",),
}
"""Which parameters of a Hugging Face checkpoint make up which matrix of a layer."""


class Decoder:
    """Computes with copies of `masters`, parameters under their Hugging Face names; gradients go to the masters."""

    def __init__(self, config: Any, masters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = Shape(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=head_size,
            eps=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            slides=sliding_layers(config),
            window=getattr(config, "sliding_window", None) or 0,
        )
        self.dtype, self.device = dtype, masters["model.norm.weight"].device
        self.may_pack = (
            self.device.type == "cpu"
            and dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self.frequencies = rotary_frequencies(config, head_size).to(self.device)
        self.embedding = CastWeights([masters["model.embed_tokens.weight"]], dtype)
        self.head = self.embedding if self.shape.tied else CastWeights([masters["lm_head.weight"]], dtype)
        self.norm = masters["model.norm.weight"]
        self.layers = [self._layer(masters, f"model.layers.{i}.") for i in range(self.shape.layers)]

    def _layer(self, masters: Mapping[str, Tensor], prefix: str) -> dict[str, CastWeights | Tensor]:
        """Norms are used as they are: the residual stream is not in the compute dtype."""
        parts = {
            name: [masters[prefix + source] for source in sources]
            for name, sources in PARTS.items()
            if prefix + sources[0] in masters
        }
        return {name: x[0] if name.endswith("norm") else CastWeights(x, self.dtype) for name, x in parts.items()}

    def weights(self) -> Weights:
        """As the masters are now; with gradient where that is enabled."""

        def current(part: CastWeights | Tensor) -> Tensor:
            return part.current() if isinstance(part, CastWeights) else part

        layers = [Layer(**{name: current(part) for name, part in layer.items()}) for layer in self.layers]
        embedding, head = (Matrix(part.tensor_now(), part.masters[0]) for part in (self.embedding, self.head))
        return Weights(embedding, layers, self.norm, head)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [N, 1, d] each, for positions [N]; the first half of the sines negative."""
        angles = (positions[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


# ---------------------------------------------------------------- what a layer computes


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [N, H, d], keys and values [N, K, d] of N tokens."""


def heads_of(layer: Layer, hidden: Tensor, rotary: tuple[Tensor, Tensor], shape: Shape) -> Heads:
    x = norm(hidden, layer.attention_norm, shape.eps, layer.qkv.dtype)
    heads = linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, shape.head_size))
    turning, value = heads.split([shape.heads + shape.key_heads, shape.key_heads], -2)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = turning.split([shape.heads, shape.key_heads], -2)
        query = norm(query, layer.query_norm, shape.eps, heads.dtype)
        turning = torch.cat([query, norm(key, layer.key_norm, shape.eps, heads.dtype)], -2)
    query, key = rotated(turning, *rotary).split([shape.heads, shape.key_heads], -2)
    return query, key, value


def after_attention(layer: Layer, hidden: Tensor, attended: Tensor, shape: Shape) -> Tensor:
    """[N, D] of the next layer, from what the heads of this one have read, [N, H d]."""
    hidden = hidden + linear(attended, layer.attention_out, layer.attention_out_bias)
    x = norm(hidden, layer.mlp_norm, shape.eps, layer.gate_up.dtype)
    return hidden + linear(gated(linear(x, layer.gate_up)), layer.down)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, also for weights that `prepacked` has laid out anew. Never of one row alone, which oneDNN adds up in
    another order than among others.
    """
    if len(x) == 1:
        return linear(x.expand(2, -1), weight, bias)[:1]
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def prepacked(weights: Weights, rows: int) -> Weights:
    """Matrices in oneDNN's own layout for products of so many rows; without gradient, on the CPU, in bf16."""

    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    layers = [
        layer._replace(**{name: pack(getattr(layer, name)) for name in ("qkv", "attention_out", "gate_up", "down")})
        for layer in weights.layers
    ]
    return weights._replace(layers=layers, head=weights.head._replace(tensor=pack(weights.head.tensor)))


def rotary_frequencies(config: Any, head_size: int) -> Tensor:
    """[d / 2] radians per position, scaled as the checkpoint says."""
    rope = config.rope_parameters
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_size, 2) / head_size)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        return _stretched(frequencies, rope)
    return frequencies


def _stretched(frequencies: Tensor, rope: Mapping[str, float]) -> Tensor:
    """Llama 3.1: waves longer than the original context are slowed down, short ones not; between, a blend."""
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope["factor"])


# ---------------------------------------------------------------- which checkpoints


def fallback_reason(config: Any) -> str:
    """Why this decoder does not compute what such a checkpoint means; empty where it does."""
    if config.model_type not in FAMILY:
        return f"architecture {config.model_type}"
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    reasons = {
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        f"rotary scaling {rope.get('rope_type')}": rope.get("rope_type") not in ROTARY or "rope_theta" not in rope,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "other layers than attention": not _attends(config),
        "biases in the MLP": getattr(config, "mlp_bias", False),
        "quantised weights": getattr(config, "quantization_config", None) is not None,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def _attends(config: Any) -> bool:
    """Whether each layer is one of attention: to all tokens, or where a checkpoint has a window, to the last ones."""
    window = config.model_type != "llama" and getattr(config, "sliding_window", None)
    known = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    return set(getattr(config, "layer_types", None) or known) <= known


def sliding_layers(config: Any) -> tuple[bool, ...]:
    """Mistral's window is that of every layer, whatever else is said of them."""
    if config.model_type == "mistral":
        return (config.sliding_window is not None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(kind == "sliding_attention" for kind in kinds)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """A checkpoint folder on the CPU, without transformers' model. ValueError where there is a reason to fall back."""
    config = AutoConfig.from_pretrained(folder)
    if reason := fallback_reason(config):
        raise ValueError(f"{folder}: {reason}: not computed by this decoder")
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    weights = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    return Decoder(config, weights, dtype)
