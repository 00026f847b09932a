"""How much memory training takes, part by part, before anything is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.config import Config
from pellucid.logprobs import MANY
from pellucid.pretrained import locate
from pellucid.types import UserError

PROMPT_TOKENS = 64
"""What a prompt is taken to be long."""
LIBRARIES = 0.6
"""GB of code."""


class Model(NamedTuple):
    """What of a model counts."""

    config: Any
    parameters: int
    trained: int


def from_name(name: str, lora: int) -> Model:
    """A folder, which needs no more than its config.json, or a name that leads to one. Nothing is loaded."""
    try:
        config = AutoConfig.from_pretrained(locate(name))
    except (OSError, ValueError) as error:
        raise UserError(f"policy.model = {name!r} has no readable config.json: {str(error).splitlines()[0]}") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    if not lora:
        return Model(config, parameters, parameters)
    inner = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not name.endswith("lm_head")]
    return Model(config, parameters, sum(lora * (m.in_features + m.out_features) for m in inner))


def parts(model: Model, cfg: Config, processes: int = 1, zero: int = 0) -> dict[str, float]:
    """GB of each of `processes`. Weights, gradients and optimizer are exact, activations a rule of thumb.

    zero 0 is Pellucid's own: fp32 masters and a copy in the compute dtype, all on every process. 1 to 3 are the stages
    of DeepSpeed's ZeRO (arXiv 1910.02054) in bf16: of 2 bytes of weights, 2 of gradients and 12 of fp32 state a
    parameter, 1 shards the state, 2 the gradients too, 3 the weights too.
    """
    p, t = model.parameters / 1e9, model.trained / 1e9
    half = cfg.policy.dtype != "float32"
    if zero:
        state = {
            "weights": 2 * p / (processes if zero == 3 else 1),
            "gradients": 2 * t / (processes if zero >= 2 else 1),
            "optimizer": 12 * t / processes,
            "reference": 2 * p * bool(cfg.algorithm.kl_coef) / (processes if zero == 3 else 1),
        }
    else:
        state = {
            "weights": 4 * p + 2 * p * half,
            "gradients": 4 * t,
            "optimizer": 8 * t,
            "reference": (4 + 2 * half) * p * bool(cfg.algorithm.kl_coef and not cfg.policy.lora),
        }
    return state | {
        "activations": activations(model.config, cfg, processes),
        "logits": 4 * MANY / 1e9,
        "KV cache": cache(model.config, cfg, processes),
        "libraries": LIBRARIES,
    }


def activations(config: Any, cfg: Config, processes: int) -> float:
    """What the backward pass needs: all layers, or the residual stream and one layer where they are recomputed."""
    a = cfg.algorithm
    rows = a.micro_batch or a.prompts_per_step * a.group_size // (a.minibatches * processes)
    tokens = rows * cfg.sampler.max_tokens + rows / a.group_size * PROMPT_TOKENS
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layer = 28 * config.hidden_size + 8 * inner
    layers = config.num_hidden_layers
    a_token = 4 * config.hidden_size * layers + layer if cfg.policy.gradient_checkpointing else layer * layers
    return tokens * a_token / 1e9


def cache(config: Any, cfg: Config, processes: int) -> float:
    """Keys and values of the rows in flight; each prompt once."""
    a, s = cfg.algorithm, cfg.sampler
    rows = min(s.rows, a.prompts_per_step * a.group_size // processes)
    tokens = rows * s.max_tokens + rows / a.group_size * PROMPT_TOKENS
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_each = 4 if cfg.policy.device == "cpu" or not torch.cuda.is_available() else 2
    return 2 * bytes_each * tokens * config.num_hidden_layers * heads * size / 1e9
