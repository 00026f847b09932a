"""Estimates the memory and the disk space of a run, part by part, before anything is loaded.

Sizes are in GB (1e9 bytes) per device.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.config import Config, PolicyConfig
from pellucid.distributed.settings import REDUCE_BUCKET_ELEMENTS
from pellucid.models.attention import KERNEL_HEAD_SIZES
from pellucid.models.decoder import find_fallback_reason
from pellucid.policy.load import (
    ModelAccess,
    check_causal_model,
    explain_policy_errors,
    has_custom_code,
    locate_model,
)
from pellucid.policy.logprobs import MAX_ELEMENTWISE_LOGITS, MAX_MATMUL_LOGITS
from pellucid.reporting.run_files import list_checkpoints
from pellucid.rewards.grading import find_reward_models
from pellucid.rewards.reward_model import compute_weights_gb
from pellucid.utils.hardware import pick_device

_ASSUMED_PROMPT_TOKENS = 64
"""The assumed length of a prompt in tokens."""
BYTES_PER_4BIT_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit weight, with its share of the scale of its block of 64, and of the scale of 256 blocks."""
LIBRARIES_GB = 0.6
"""The memory of code and libraries."""
_MIN_CHECKPOINTING_SAVING = 0.02
"""The least share of the peak that gradient checkpointing must save to be worth its time."""
_VLLM_OVERHEAD_GB = 1.0
"""The memory of vLLM besides weights and cache, as measured on a CPU."""


class ModelFacts(NamedTuple):
    """The facts of a model on which its memory depends."""

    config: Any
    parameter_count: int
    trained_count: int
    quantized_count: int = 0
    """The number of parameters that are stored in 4 bits."""
    has_own_code: bool = False
    """Whether the model runs Python code from its checkpoint."""


def build_meta_model(name: str, access: ModelAccess) -> tuple[Any, Any]:
    """Return the configuration of a model, and the model with parameters on the meta device, which take no memory.

    Raise UserError if the model cannot be found, or is no language model.
    """
    with explain_policy_errors(name, access):
        config = AutoConfig.from_pretrained(
            locate_model(name, weights=False, revision=access.revision), **access.build_arguments()
        )
        check_causal_model(name, config)
        with torch.device("meta"):
            return config, AutoModelForCausalLM.from_config(config, trust_remote_code=access.trust_remote_code)


def describe_model(policy: PolicyConfig) -> ModelFacts:
    """Return the facts of a model without loading its weights. Raise UserError if it cannot be found."""
    config, model = build_meta_model(policy.model, policy.access)
    count = sum(p.numel() for p in model.parameters())
    if not policy.lora:
        return ModelFacts(config, count, count, has_own_code=has_custom_code(model))
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets = policy.lora_targets
    trained_count = sum(
        policy.lora * (m.in_features + m.out_features)
        for name, m in linear.items()
        if (name.rpartition(".")[2] in targets if targets else not name.endswith("lm_head"))
    )
    frozen = [m.weight.numel() for m in linear.values() if m is not model.get_output_embeddings()]
    quantized_count = sum(frozen) if policy.load_in_4bit else 0
    return ModelFacts(config, count, trained_count, quantized_count, has_custom_code(model))


# ---------------------------------------------------------------- phases and parts


def estimate_peak(model: ModelFacts, cfg: Config, processes: int = 1) -> float:
    """Return the memory of the phase that needs most. Unknown parts are not counted."""
    return max(estimate_phases(model, cfg, processes).values())


def estimate_phases(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """Return the memory of each phase of a run. Unknown parts are not counted.

    In an update of one micro-batch, activations are freed as gradients are computed, so the larger of the two counts.
    From the second micro-batch on, gradients of earlier ones exist beside the activations.
    """
    parts = estimate_parts(model, cfg, processes)
    steady = sum_known(parts) - sum(parts[name] or 0.0 for name in ("gradients", "activations", "logits"))
    gradients, forward = parts["gradients"] or 0.0, (parts["activations"] or 0.0) + (parts["logits"] or 0.0)
    backward = max(gradients, forward) if _has_single_backward_pass(cfg, processes) else gradients + forward
    is_sharded = cfg.runtime.engine in ("fsdp2", "deepspeed")
    unsharded = 4 * model.parameter_count / 1e9 * (1 + _has_reference(cfg) / processes) + LIBRARIES_GB
    return {
        "start": (unsharded if is_sharded else 0.0) + sum(estimate_reward_models(cfg).values()),
        "sampling": steady
        + (_estimate_packed_weights(model, cfg) + (estimate_kv_cache(model.config, cfg, processes) or 0.0)),
        "update": steady + backward,
    }


def estimate_parts(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float | None]:
    """Return the memory of each part on each of `processes` devices; None for a part whose size is unknown.

    Weights, gradients and optimizer state are exact. Not all parts exist at the same time: see `estimate_phases`.
    """
    own_decoder = _uses_own_decoder(model, cfg.policy)
    tokens = _count_backward_tokens(cfg, processes, shares_prompts=own_decoder)
    is_known = not explain_unknown_memory(model.config)
    return {
        **estimate_training_state(model, cfg, processes),
        **estimate_reward_models(cfg),
        **_estimate_vllm(model, cfg),
        "activations": tokens * estimate_activation_bytes(model.config, cfg.policy, own_decoder) / 1e9
        if is_known
        else None,
        "logits": _estimate_logits(model, cfg.policy, tokens),
        "libraries": LIBRARIES_GB,
    }


def sum_known(parts: Mapping[str, float | None]) -> float:
    """Return the sum of the parts whose size is known."""
    return sum(gb for gb in parts.values() if gb is not None)


def explain_unknown_memory(config: Any) -> str:
    """Return why the formulas for activations and KV cache do not apply to a model; empty if they do.

    They assume that each layer consists of attention with keys and values, and one MLP.
    """
    text = config.get_text_config()
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    has_kv_cache = all("attention" in kind and "linear" not in kind for kind in kinds)
    reasons = {
        "layers without attention": not has_kv_cache or not hasattr(text, "num_attention_heads"),
        "experts": any(getattr(text, name, None) for name in experts),
        "compressed keys and values": getattr(text, "kv_lora_rank", None) is not None,
        "no hidden size or layer count": not all(hasattr(text, name) for name in ("hidden_size", "num_hidden_layers")),
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def _get_dtype_bytes(policy: PolicyConfig) -> int:
    """Return the bytes per number in the compute dtype."""
    return 4 if policy.dtype == "float32" else 2


# ---------------------------------------------------------------- gradient checkpointing


def estimate_checkpointing_saving(model: ModelFacts, cfg: Config, processes: int = 1) -> tuple[float, float]:
    """Return by how much policy.gradient_checkpointing lowers the peak of a run, and the peak without it."""
    without, with_it = (
        estimate_peak(model, replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=on)), processes)
        for on in (False, True)
    )
    return without - with_it, without


def describe_checkpointing(model: ModelFacts, cfg: Config, processes: int = 1) -> str:
    """Return a sentence on what policy.gradient_checkpointing saves in this run; empty if that is unknown."""
    if explain_unknown_memory(model.config):
        return ""
    is_on, (saved, peak) = cfg.policy.gradient_checkpointing, estimate_checkpointing_saving(model, cfg, processes)
    if saved >= _MIN_CHECKPOINTING_SAVING * peak:
        return f"policy.gradient_checkpointing {'saves' if is_on else 'would save'} {saved:.1f} of {peak:.1f} GB"
    advice = ": leave it out, it costs time" if is_on else ""
    return f"policy.gradient_checkpointing saves less than {_MIN_CHECKPOINTING_SAVING:.0%} of the memory here{advice}"


def suggest_memory_remedy(model: ModelFacts, cfg: Config, processes: int = 1) -> str:
    """Return what to change if memory runs out in a forward pass of one row."""
    remedy = "set a lower sampler.max_tokens"
    if cfg.policy.gradient_checkpointing or explain_unknown_memory(model.config):
        return remedy
    one_row = replace(cfg, algorithm=replace(cfg.algorithm, micro_batch=1))
    saved, peak = estimate_checkpointing_saving(model, one_row, processes)
    if saved < _MIN_CHECKPOINTING_SAVING * peak:
        return remedy
    return f"set policy.gradient_checkpointing, which saves {saved:.1f} of {peak:.1f} GB, or {remedy}"


# ---------------------------------------------------------------- weights, gradients, optimizer


def estimate_training_state(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """Return the memory of weights, gradients, optimizer and reference.

    With ddp each process has fp32 master weights and a copy in the compute dtype; fsdp2 and deepspeed shard them.
    """
    estimators = {"fsdp2": _estimate_fsdp2_state, "deepspeed": _estimate_zero_state}
    return estimators.get(cfg.runtime.engine, _estimate_ddp_state)(model, cfg, processes)


def _estimate_ddp_state(model: ModelFacts, cfg: Config, _: int) -> dict[str, float]:
    p, t, q = model.parameter_count / 1e9, model.trained_count / 1e9, model.quantized_count / 1e9
    dtype_bytes = _get_dtype_bytes(cfg.policy)
    copy_bytes = 4 - dtype_bytes  # 2 for a half-precision copy beside the masters, 0 in fp32
    reference = (4 + copy_bytes) * p * _has_reference(cfg)
    if cfg.optimizer.offload:
        copied = _count_fused_weights(model.config) if copy_bytes and _uses_own_decoder(model, cfg.policy) else p
        weights = dtype_bytes * p + copy_bytes * copied
        return {"weights": weights, "gradients": dtype_bytes * t, "optimizer": 0.0, "reference": reference}
    masters = 4 * t + dtype_bytes * (p - t)
    if model.quantized_count:
        masters += (BYTES_PER_4BIT_WEIGHT - dtype_bytes) * q - copy_bytes * (p - t)  # frozen weights have no copy
    return {"weights": masters + copy_bytes * p, "gradients": 4 * t, "optimizer": 8 * t, "reference": reference}


def _estimate_fsdp2_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """Return the state, sharded among `runtime.shards` processes, and the weights for sampling, unsharded."""
    p, t, shards = model.parameter_count / 1e9, model.trained_count / 1e9, cfg.runtime.shards or processes
    dtype_bytes = _get_dtype_bytes(cfg.policy)
    is_offloaded = cfg.optimizer.offload and cfg.policy.device != "cpu"
    sharded = {"weights": 4 * t + dtype_bytes * (p - t), "gradients": 4 * t, "optimizer": 8 * t}
    state = {name: 0.0 if is_offloaded else size / shards for name, size in sharded.items()}
    state["weights"] += dtype_bytes * p
    return state | {"reference": 4 * p * _has_reference(cfg) / shards}


def _estimate_zero_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """Return the state with DeepSpeed's ZeRO (arXiv 1910.02054, figure 1) and gradients in fp32.

    A parameter takes 2 bytes of weights in bf16, 4 of gradients and 12 of optimizer state. Stage 2 shards all but the
    weights, and stage 3 also the weights. The weights for sampling are not sharded.
    """
    p, t = model.parameter_count / 1e9, model.trained_count / 1e9
    dtype_bytes, is_stage_3 = _get_dtype_bytes(cfg.policy), cfg.runtime.zero_stage == 3
    is_half, is_offloaded = dtype_bytes == 2, cfg.optimizer.offload and cfg.policy.device != "cpu"
    has_copies = is_half and not is_stage_3 and _uses_own_decoder(model, cfg.policy)
    copied = 2 * _count_fused_weights(model.config) if has_copies else 0.0
    own_masters = is_half or not is_stage_3 or cfg.optimizer.offload  # else the weights are the masters
    return {
        "weights": dtype_bytes * p * (1 + 1 / processes if is_stage_3 else 1) + copied,
        "gradients": 4 * (REDUCE_BUCKET_ELEMENTS / 1e9 + (0.0 if is_offloaded else t / processes)),
        "optimizer": 0.0 if is_offloaded else (8 + 4 * own_masters) * t / processes,
        "reference": _has_reference(cfg) * (dtype_bytes * p / processes if is_stage_3 else (8 - dtype_bytes) * p),
    }


def _has_reference(cfg: Config) -> bool:
    """Whether a reference model is on the policy's device."""
    p = cfg.policy
    if not cfg.algorithm.kl_coef or p.lora:
        return False
    return p.reference == "auto" or pick_device(p.reference) == pick_device(p.device)


def _uses_own_decoder(model: ModelFacts, policy: PolicyConfig) -> bool:
    return not predict_fallback_reason(model, policy)


def predict_fallback_reason(model: ModelFacts, policy: PolicyConfig) -> str:
    """Predict `Policy.find_fallback_reason`: why transformers computes the model instead of our decoder."""
    if policy.engine == "transformers":
        return "policy.engine"
    if model.has_own_code:
        return "custom code"
    if policy.lora:
        return "an adapter on a 4-bit base" if policy.load_in_4bit else "an adapter"
    return find_fallback_reason(model.config)


def _count_fused_weights(config: Any) -> float:
    """Return the number of weights, in billions, in the projections that our decoder fuses.

    Fused weights are a copy even if the master weights have the decoder's dtype.
    """
    heads, key_heads, size = _get_head_sizes(config)
    rows = (heads + 2 * key_heads) * size + 2 * config.intermediate_size
    return rows * config.hidden_size * config.num_hidden_layers / 1e9


def _get_head_sizes(config: Any) -> tuple[int, int, int]:
    """Return the number of query heads, of key heads, and the head size."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


# ---------------------------------------------------------------- activations and logits of the update


def count_backward_rows(cfg: Config, processes: int) -> int:
    """Return the number of completions in one backward pass. Only `micro_batch` splits groups."""
    a = cfg.algorithm
    return a.micro_batch or max(a.group_size, a.prompts_per_step * a.group_size // (a.minibatches * processes))


def _has_single_backward_pass(cfg: Config, processes: int) -> bool:
    """Whether an optimizer step has one micro-batch, during which the engine keeps no gradient buffers."""
    a = cfg.algorithm
    minibatch = a.prompts_per_step * a.group_size // (a.minibatches * processes)
    return cfg.runtime.engine != "deepspeed" and count_backward_rows(cfg, processes) >= minibatch


def _count_backward_tokens(cfg: Config, processes: int, shares_prompts: bool) -> float:
    """Return the number of tokens of one backward pass. A shared prompt counts once per group."""
    rows = count_backward_rows(cfg, processes)
    prompts = rows / cfg.algorithm.group_size if shares_prompts else rows
    return rows * cfg.sampler.max_tokens + prompts * _ASSUMED_PROMPT_TOKENS


def estimate_activation_bytes(config: Any, policy: PolicyConfig, own_decoder: bool) -> float:
    """Return the bytes of activations per token that the backward pass needs.

    All layers keep activations; with gradient checkpointing, only the residual stream and one layer do. The count is
    for our decoder; transformers is assumed to need 1.5 times as much.
    """
    config = config.get_text_config()
    layer, layers = estimate_layer_bytes(config, _get_dtype_bytes(policy)), config.num_hidden_layers
    total = 4 * config.hidden_size * (layers + 1) + layer if policy.gradient_checkpointing else layer * layers
    return total if own_decoder else 1.5 * total


def estimate_layer_bytes(config: Any, dtype_bytes: int) -> int:
    """Return the bytes of activations per token that one layer keeps.

    It keeps the residual stream twice in fp32, and the inputs of matrix products and attention in the compute dtype.
    Attention without the kernel pads rows and repeats a prompt's keys and values for each response; with the kernel
    (half precision only), the layer keeps the output of the heads instead.
    """
    heads, key_heads, size = _get_head_sizes(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    normed, projected, rotated = 2 * config.hidden_size, (heads + 2 * key_heads) * size, (heads + key_heads) * size
    padded = (2 * heads + 4 * key_heads) * size
    attention = projected + rotated + (heads * size if dtype_bytes == 2 and size in KERNEL_HEAD_SIZES else padded)
    return 8 * config.hidden_size + dtype_bytes * (normed + attention + 3 * inner)


def _estimate_logits(model: ModelFacts, policy: PolicyConfig, tokens: float) -> float:
    """Return the memory of the logits that exist at once, and of the gradient of the head.

    The gradient is in fp32. In half precision, the matrix product that is added to it exists beside it.
    """
    config, dtype_bytes = model.config.get_text_config(), _get_dtype_bytes(policy)
    vocabulary, width = getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0)
    logits = tokens * vocabulary
    head_bytes = 0.0 if policy.lora else (4 + dtype_bytes % 4) * vocabulary * width
    return (dtype_bytes * min(logits, MAX_MATMUL_LOGITS) + 12 * min(logits, MAX_ELEMENTWISE_LOGITS) + head_bytes) / 1e9


# ---------------------------------------------------------------- sampling and rewards


def estimate_kv_cache(config: Any, cfg: Config, processes: int) -> float | None:
    """Return the memory of the KV cache, which stores each prompt once; None if it is unknown."""
    if explain_unknown_memory(config):
        return None
    config, a, s = config.get_text_config(), cfg.algorithm, cfg.sampler
    rows = min(s.rows, max(a.group_size, a.prompts_per_step * a.group_size // processes))
    tokens = rows * s.max_tokens + rows / a.group_size * _ASSUMED_PROMPT_TOKENS
    _, key_heads, size = _get_head_sizes(config)
    return 2 * _get_dtype_bytes(cfg.policy) * tokens * config.num_hidden_layers * key_heads * size / 1e9


def _estimate_packed_weights(model: ModelFacts, cfg: Config) -> float:
    """Return the memory of the packed weights for sampling with CPU kernels, beside the weights for the update."""
    is_bf16 = cfg.sampler.name == "native" and cfg.policy.dtype == "bfloat16"
    has_kernels = is_bf16 and _uses_own_decoder(model, cfg.policy)
    return 2 * model.parameter_count / 1e9 if has_kernels and pick_device(cfg.policy.device).type == "cpu" else 0.0


def _estimate_vllm(model: ModelFacts, cfg: Config) -> dict[str, float]:
    """Return the memory of vLLM on the trainer's device; empty without vLLM.

    With servers and sampler.ahead, it is the memory of the pushed weights, which are kept for servers that restart.
    """
    s = cfg.sampler
    if s.name != "vllm" or (s.urls and not s.ahead):
        return {}
    merged = cfg.policy.lora > 0 and s.adapter == "merged"  # always in fp32
    weights = (4 if merged else _get_dtype_bytes(cfg.policy)) * model.parameter_count / 1e9
    return {"pushed weights": weights} if s.urls else {"vLLM": weights + s.cache_gb + _VLLM_OVERHEAD_GB}


def estimate_reward_models(cfg: Config) -> dict[str, float]:
    """Return the memory of the reward models on the policy's device, unsharded; empty if there are none."""
    device = pick_device(cfg.policy.device)
    sizes = [
        compute_weights_gb(source, settings)
        for source, settings in find_reward_models(cfg.task).values()
        if pick_device(settings.device, "reward_model.device") == device
    ]
    return {"reward model": sum(sizes)} if sizes else {}


# ---------------------------------------------------------------- disk space


class DiskPlan(NamedTuple):
    """The disk space of a run, without its logs."""

    max_checkpoints: int
    """The maximum number of checkpoints that exist at once. A new one is complete before the oldest is removed."""
    peak_gb: float
    needed_gb: float
    """The peak minus the existing files that a resumed run replaces."""
    free_gb: float


def plan_disk(cfg: Config, model: ModelFacts, run_dir: Path) -> DiskPlan:
    settings, existing = cfg.checkpoint, len(list_checkpoints(run_dir))
    saves = max(math.ceil(cfg.algorithm.steps / settings.every), existing + (existing > 0)) if settings.every else 0
    max_checkpoints = min(settings.keep_last + 1, saves)
    peak = count_model_bytes(model, cfg) + max_checkpoints * count_checkpoint_bytes(model, cfg)
    replaced = (path for pattern in ("checkpoints/*/*", "model/*", "adapter/*") for path in run_dir.glob(pattern))
    replaced_bytes = sum(path.stat().st_size for path in replaced if path.is_file())
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    return DiskPlan(max_checkpoints, peak / 1e9, (peak - replaced_bytes) / 1e9, shutil.disk_usage(nearest).free / 1e9)


def count_model_bytes(model: ModelFacts, cfg: Config) -> int:
    dtype_bytes = 4 if cfg.policy.save_dtype == "float32" else 2
    return model.parameter_count * dtype_bytes + (4 * model.trained_count if cfg.policy.lora else 0)


def count_checkpoint_bytes(model: ModelFacts, cfg: Config) -> int:
    """Return the bytes of a checkpoint: master weights, two moments, and an updated reference, in fp32."""
    reference = 4 * model.parameter_count if cfg.algorithm.reference_every else 0
    return 12 * model.trained_count + reference
