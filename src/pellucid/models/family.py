"""Which checkpoints our decoder computes, and the numbers that it reads from their configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3")


class Shape(NamedTuple):
    layers: int
    heads: int
    key_heads: int
    head_size: int
    eps: float
    tied: bool
    is_sliding: tuple[bool, ...]
    """Of each layer, whether a token reads no more than the last `window`, itself included."""
    window: int


def shape_of(config: Any) -> Shape:
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        is_sliding=sliding_layers(config),
        window=getattr(config, "sliding_window", None) or 0,
    )


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
        "quantised weights": getattr(config, "quantization_config", None) is not None,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def longest(config: Any) -> int:
    """The most tokens that this model reads in one way, whatever stands beside them.

    transformers gives all rows of a batch the rotary frequencies of its longest row, and keeps keys that were turned by
    others: beyond the length that frequencies depend on, a token's log-prob would be that of its neighbours.
    """
    most = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([most, *limits])


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


def rotary_frequencies(config: Any, head_size: int) -> Tensor:
    """[d / 2] radians per position, scaled as the checkpoint says.

    To the last bit those that it was trained with: rounded otherwise, one turns position 2,000 by 1e-4 radians more or
    less. Hence the order of operations is transformers', here and in `_stretched`.
    """
    rope = config.rope_parameters
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, head_size, 2) / head_size)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        return _stretched(frequencies, rope)
    return frequencies


def _stretched(frequencies: Tensor, rope: Mapping[str, float]) -> Tensor:
    """Llama 3.1: waves longer than the original context are slowed down, short ones not; between, a blend."""
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / rope["factor"] + keep * frequencies
