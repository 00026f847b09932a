"""Estimates the memory and the disk space of a run, part by part, before anything is loaded.

Sizes are in GB, 1e9 bytes, on each device.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.config import Config, PolicyConfig
from pellucid.distributed.settings import REDUCE_BUCKET_ELEMENTS
from pellucid.models.attention import KERNEL_HEAD_SIZES
from pellucid.models.decoder import find_fallback_reason
from pellucid.policy.load import (
    DEFAULT_ACCESS,
    ModelAccess,
    build_access_arguments,
    check_causal_model,
    explain_load_errors,
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
"""Bytes of a 4-bit number, with its share of the scale of its block, and of the scale of 256 blocks."""
LIBRARIES_GB = 0.6
"""The memory of code and libraries."""
_MIN_CHECKPOINTING_SAVING = 0.02
"""The share of the peak from which gradient checkpointing, which costs time, is recommended."""
_VLLM_OVERHEAD_GB = 1.0
"""The memory of vLLM besides weights and cache, as measured on a CPU."""


class ModelFacts(NamedTuple):
    """The facts of a model on which its memory depends."""

    config: Any
    parameter_count: int
    trained_count: int
    quantized_count: int = 0
    """How many of the parameters are 4-bit numbers."""
    has_own_code: bool = False
    """Whether Python code of the checkpoint computes it."""


def describe_policy_model(policy: PolicyConfig) -> ModelFacts:
    """Return the facts of the model that these settings name. Raise UserError if it cannot be found."""
    return describe_model(policy.model, policy.lora, policy.lora_targets, policy.access, policy.load_in_4bit)


def build_meta_model(name: str, access: ModelAccess = DEFAULT_ACCESS) -> tuple[Any, Any]:
    """Return the configuration of a model, and the model with parameters on the meta device, which take no memory.

    Raises:
        UserError: The model cannot be found, or is no language model.
    """
    with explain_load_errors(name, access):
        config = AutoConfig.from_pretrained(
            locate_model(name, weights=False, revision=access.revision), **build_access_arguments(access)
        )
        check_causal_model(name, config)
        with torch.device("meta"):
            return config, AutoModelForCausalLM.from_config(config, trust_remote_code=access.trust_remote_code)


def describe_model(
    name: str, lora: int, targets: Sequence[str] = (), access: ModelAccess = DEFAULT_ACCESS, in_4bit: bool = False
) -> ModelFacts:
    """Return the facts of a model without loading its weights.

    Args:
        name: Its name, or a folder, in which config.json is enough.
        lora: The rank of the adapter; 0 to train all parameters.
        targets: The names of the modules that are adapted; empty for all linear layers but the head.
        access: How the model is accessed.
        in_4bit: Whether the base is in 4 bits.
    """
    config, model = build_meta_model(name, access)
    parameters = sum(p.numel() for p in model.parameters())
    if not lora:
        return ModelFacts(config, parameters, parameters, has_own_code=has_custom_code(model))
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    adapted = [
        m
        for name, m in linear.items()
        if (name.rpartition(".")[2] in targets if targets else not name.endswith("lm_head"))
    ]
    quantized = [m.weight.numel() for m in linear.values() if in_4bit and m is not model.get_output_embeddings()]
    trained = sum(lora * (m.in_features + m.out_features) for m in adapted)
    return ModelFacts(config, parameters, trained, sum(quantized), has_custom_code(model))


def estimate_parts(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float | None]:
    """Return the memory of each part on each of `processes` devices; None for a part whose size is unknown.

    Weights, gradients and optimizer are exact. With ddp every process has fp32 masters and a copy in the compute dtype;
    with fsdp2 and deepspeed they are sharded. The parts do not all exist at the same time: see `estimate_peak`.
    """
    own_decoder = _uses_own_decoder(model, cfg)
    tokens = _count_backward_tokens(cfg, processes, shares_prompts=own_decoder)
    is_known = not explain_unknown_memory(model.config)
    state = estimate_training_state(model, cfg, processes) | estimate_reward_models(cfg) | _estimate_vllm(model, cfg)
    return state | {
        "activations": tokens * estimate_activation_bytes(model.config, cfg, own_decoder) / 1e9 if is_known else None,
        "logits": _estimate_logits(model, cfg, tokens),
        "libraries": LIBRARIES_GB,
    }


def estimate_peak(model: ModelFacts, cfg: Config, processes: int = 1) -> float:
    """Return the memory of the phase that needs most. Unknown parts are not counted."""
    return max(estimate_phases(model, cfg, processes).values())


def estimate_phases(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """Return the memory of each phase of a run. Unknown parts are not counted.

    In an update of a single micro-batch, activations are freed as gradients are computed, so the larger of both counts.
    From the second micro-batch on, gradients of earlier ones exist beside the activations. The predictions of the token
    microscope keep the weights before the update and then the change of each.
    """
    parts = estimate_parts(model, cfg, processes)
    steady = sum_known(parts) - sum(parts[name] or 0.0 for name in ("gradients", "activations", "logits"))
    gradients, forward = parts["gradients"] or 0.0, (parts["activations"] or 0.0) + (parts["logits"] or 0.0)
    backward = max(gradients, forward) if _has_single_backward_pass(cfg, processes) else gradients + forward
    predicts = bool(cfg.log.tokens and cfg.log.predictions) and pick_device(cfg.policy.device).type == "cpu"
    copy = 4 * model.trained_count / 1e9 if predicts else 0.0
    # The copy of the first step exists before the moments do, so only a later one adds to the peak.
    update_copy = copy if cfg.algorithm.steps >= cfg.log.predictions else 0.0
    p = model.parameter_count / 1e9
    is_sharded = cfg.runtime.engine in ("fsdp2", "deepspeed")
    start = 4 * p * (1 + _has_reference(cfg) / processes) + LIBRARIES_GB if is_sharded else 0.0
    return {
        "start": start + sum(estimate_reward_models(cfg).values()),
        "sampling": steady
        + (_estimate_packed_weights(model, cfg) + (estimate_kv_cache(model.config, cfg, processes) or 0.0)),
        "update": steady + backward + update_copy,
        "microscope": steady + 2 * copy + (parts["logits"] or 0.0) if predicts else 0.0,
    }


def _has_single_backward_pass(cfg: Config, processes: int) -> bool:
    """Whether an optimizer step has a single micro-batch, and the engine keeps no gradient buffers during it."""
    a = cfg.algorithm
    minibatch = a.prompts_per_step * a.group_size // (a.minibatches * processes)
    return cfg.runtime.engine != "deepspeed" and count_backward_rows(cfg, processes) >= minibatch


def _estimate_packed_weights(model: ModelFacts, cfg: Config) -> float:
    """Return the memory of the packed weights that the CPU kernels sample with, beside those of the update."""
    has_kernels = cfg.sampler.name == "native" and cfg.policy.dtype == "bfloat16" and _uses_own_decoder(model, cfg)
    return 2 * model.parameter_count / 1e9 if has_kernels and pick_device(cfg.policy.device).type == "cpu" else 0.0


def _estimate_logits(model: ModelFacts, cfg: Config, tokens: float) -> float:
    """Return the memory of the logits that exist at once, and of the gradient of the head.

    The gradient is in fp32, and in half precision once more as the matrix product that is added to it.
    """
    config, dtype_bytes = model.config.get_text_config(), 4 if cfg.policy.dtype == "float32" else 2
    vocabulary, width = getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0)
    logits = tokens * vocabulary
    head_bytes = 0.0 if cfg.policy.lora else (4 + dtype_bytes % 4) * vocabulary * width
    return (dtype_bytes * min(logits, MAX_MATMUL_LOGITS) + 12 * min(logits, MAX_ELEMENTWISE_LOGITS) + head_bytes) / 1e9


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
    if saved < _MIN_CHECKPOINTING_SAVING * peak:
        advice = ": leave it out, it costs time" if is_on else ""
        return (
            f"policy.gradient_checkpointing saves less than {_MIN_CHECKPOINTING_SAVING:.0%} of the memory here{advice}"
        )
    return f"policy.gradient_checkpointing {'saves' if is_on else 'would save'} {saved:.1f} of {peak:.1f} GB"


def suggest_memory_remedy(model: ModelFacts, cfg: Config, processes: int = 1) -> str:
    """Return what to change in a run whose memory runs out with one row in a forward pass."""
    remedies = ["set a lower sampler.max_tokens"]
    if not cfg.policy.gradient_checkpointing and not explain_unknown_memory(model.config):
        one_row = replace(cfg, algorithm=replace(cfg.algorithm, micro_batch=1))
        saved, peak = estimate_checkpointing_saving(model, one_row, processes)
        if saved >= _MIN_CHECKPOINTING_SAVING * peak:
            remedies.insert(0, f"set policy.gradient_checkpointing, which saves {saved:.1f} of {peak:.1f} GB")
    return ", or ".join(remedies)


def sum_known(parts: Mapping[str, float | None]) -> float:
    """Return the sum of the parts whose size is known."""
    return sum(gb for gb in parts.values() if gb is not None)


def format_gb(size: float | None) -> str:
    return "unknown" if size is None else f"{size:.1f}"


def format_peak(model: ModelFacts, cfg: Config, processes: int) -> str:
    """Return the peak as text, with "at least" if a part is unknown."""
    has_unknown = None in estimate_parts(model, cfg, processes).values()
    return ("at least " if has_unknown else "") + format_gb(estimate_peak(model, cfg, processes))


def explain_unknown_memory(config: Any) -> str:
    """Return why the formulas for activations and cache do not describe such a model; empty if they do.

    They count layers of attention over keys and values, each with one MLP.
    """
    text = config.get_text_config()
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    reasons = {
        "layers without attention": not all(map(_uses_kv_cache, kinds)) or not hasattr(text, "num_attention_heads"),
        "experts": any(getattr(text, name, None) for name in experts),
        "compressed keys and values": getattr(text, "kv_lora_rank", None) is not None,
        "sizes of its own": not all(hasattr(text, name) for name in ("hidden_size", "num_hidden_layers")),
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def _uses_kv_cache(kind: str) -> bool:
    return "attention" in kind and "linear" not in kind


def _count_backward_tokens(cfg: Config, processes: int, shares_prompts: bool) -> float:
    """Return the number of tokens of one backward pass. A shared prompt counts once for a group."""
    rows = count_backward_rows(cfg, processes)
    return (
        rows * cfg.sampler.max_tokens
        + (rows / cfg.algorithm.group_size if shares_prompts else rows) * _ASSUMED_PROMPT_TOKENS
    )


def count_backward_rows(cfg: Config, processes: int) -> int:
    """Return the number of completions in one backward pass. Groups are not split."""
    a = cfg.algorithm
    return a.micro_batch or max(a.group_size, a.prompts_per_step * a.group_size // (a.minibatches * processes))


def estimate_training_state(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """Return the memory of weights, gradients, optimizer and reference."""
    estimators = {"fsdp2": _estimate_fsdp2_state, "deepspeed": _estimate_zero_state}
    return estimators.get(cfg.runtime.engine, _estimate_ddp_state)(model, cfg, processes)


def estimate_reward_models(cfg: Config) -> dict[str, float]:
    """Return the memory of the reward models on the device of the policy, which are not sharded; empty without any."""
    device = pick_device(cfg.policy.device)
    sizes = [
        compute_weights_gb(source, settings)
        for source, settings in find_reward_models(cfg.task).values()
        if pick_device(settings.device, "reward_model.device") == device
    ]
    return {"reward model": sum(sizes)} if sizes else {}


def _estimate_vllm(model: ModelFacts, cfg: Config) -> dict[str, float]:
    """Return the memory of vLLM beside the trainer; empty without it.

    With servers and sampler.ahead it is that of the pushed weights, which are kept for servers that restart.
    """
    merged = cfg.policy.lora > 0 and cfg.sampler.adapter == "merged"  # always in fp32
    weights = (4 if merged or cfg.policy.dtype == "float32" else 2) * model.parameter_count / 1e9
    if cfg.sampler.name != "vllm" or (cfg.sampler.urls and not cfg.sampler.ahead):
        return {}
    if cfg.sampler.urls:
        return {"pushed weights": weights}
    return {"vLLM": weights + cfg.sampler.cache_gb + _VLLM_OVERHEAD_GB}


def _has_reference(cfg: Config) -> bool:
    """Whether there is a reference on the device of the policy."""
    p = cfg.policy
    if not cfg.algorithm.kl_coef or p.lora:
        return False
    return p.reference == "auto" or pick_device(p.reference) == pick_device(p.device)


def _estimate_ddp_state(model: ModelFacts, cfg: Config, _: int) -> dict[str, float]:
    p, t, q = model.parameter_count / 1e9, model.trained_count / 1e9, model.quantized_count / 1e9
    half = cfg.policy.dtype != "float32"
    if cfg.optimizer.offload:
        copied = _count_fused_weights(model.config) if half and _uses_own_decoder(model, cfg) else p * half
        state = {"weights": (4 - 2 * half) * p + 2 * copied, "gradients": (4 - 2 * half) * t, "optimizer": 0.0}
    else:
        base = 4 * t + (4 - 2 * half) * (p - t) if cfg.policy.lora else 4 * p
        if model.quantized_count:
            base += (BYTES_PER_4BIT_WEIGHT - 4 + 2 * half) * q - 2 * half * (p - t)  # frozen weights have no copy
        state = {"weights": base + 2 * p * half, "gradients": 4 * t, "optimizer": 8 * t}
    return state | {"reference": (4 + 2 * half) * p * _has_reference(cfg)}


def _estimate_fsdp2_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """The state is sharded among `runtime.shards` processes; the weights for sampling are not."""
    p, t, shards = model.parameter_count / 1e9, model.trained_count / 1e9, cfg.runtime.shards or processes
    half = cfg.policy.dtype != "float32"
    base = 4 * t + (4 - 2 * half) * (p - t) if cfg.policy.lora else 4 * p
    is_offloaded = cfg.optimizer.offload and cfg.policy.device != "cpu"
    total = {"weights": base, "gradients": 4 * t, "optimizer": 8 * t}
    state = {name: 0.0 if is_offloaded else size / shards for name, size in total.items()}
    state["weights"] += (4 - 2 * half) * p
    return state | {"reference": 4 * p * _has_reference(cfg) / shards}


def _estimate_zero_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """DeepSpeed's ZeRO (arXiv 1910.02054, figure 1), with gradients in fp32.

    A parameter has 2 bytes of weights in bf16, 4 of gradients and 12 of optimizer state. Stage 2 shards all but the
    weights, stage 3 the weights, too. The weights for sampling are not sharded.
    """
    p, t = model.parameter_count / 1e9, model.trained_count / 1e9
    half, is_stage_3 = cfg.policy.dtype != "float32", cfg.runtime.zero_stage == 3
    dtype_bytes, is_offloaded = 4 - 2 * half, cfg.optimizer.offload and cfg.policy.device != "cpu"
    has_copies = half and not is_stage_3 and _uses_own_decoder(model, cfg)
    copied = 2 * _count_fused_weights(model.config) if has_copies else 0.0
    own_masters = half or not is_stage_3 or cfg.optimizer.offload  # else the weights are the masters
    return {
        "weights": dtype_bytes * p * (1 + 1 / processes if is_stage_3 else 1) + copied,
        "gradients": 4 * (REDUCE_BUCKET_ELEMENTS / 1e9 + (0.0 if is_offloaded else t / processes)),
        "optimizer": 0.0 if is_offloaded else (8 + 4 * own_masters) * t / processes,
        "reference": _has_reference(cfg) * (dtype_bytes * p / processes if is_stage_3 else (4 + 2 * half) * p),
    }


def _uses_own_decoder(model: ModelFacts, cfg: Config) -> bool:
    return not predict_fallback_reason(model, cfg)


def predict_fallback_reason(model: ModelFacts, cfg: Config) -> str:
    """Return why transformers will compute and not our decoder, as `Policy.find_fallback_reason` does later."""
    if cfg.policy.engine == "transformers":
        return "policy.engine"
    if model.has_own_code:
        return "code of its own"
    if cfg.policy.lora:
        return "an adapter on a 4-bit base" if cfg.policy.load_in_4bit else "an adapter"
    return find_fallback_reason(model.config)


def _count_fused_weights(config: Any) -> float:
    """Return the number of weights, in 1e9, of projections that our decoder fuses.

    They are a copy even if the masters have the dtype of the decoder.
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


def estimate_activation_bytes(config: Any, cfg: Config, own_decoder: bool) -> float:
    """Return the bytes of activations that the backward pass needs for one token.

    They are those of all layers, or with gradient checkpointing the residual stream and one layer. The count is of our
    decoder; for transformers, 1.5 times as many are assumed.
    """
    config = config.get_text_config()
    layer, layers = estimate_layer_bytes(config, 4 if cfg.policy.dtype == "float32" else 2), config.num_hidden_layers
    total = 4 * config.hidden_size * (layers + 1) + layer if cfg.policy.gradient_checkpointing else layer * layers
    return total if own_decoder else 1.5 * total


def estimate_layer_bytes(config: Any, dtype_bytes: int) -> int:
    """Return the bytes that one layer keeps for one token.

    They are the residual stream twice in fp32, and in the compute dtype the inputs of the matrices and of attention.
    Attention by operators pads rows and repeats the keys and values of a prompt for each response. The kernel,
    in half precision, keeps the output of the heads instead.
    """
    heads, key_heads, size = _get_head_sizes(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    normed, projected, rotated = 2 * config.hidden_size, (heads + 2 * key_heads) * size, (heads + key_heads) * size
    padded = (2 * heads + 4 * key_heads) * size
    attention = projected + rotated + (heads * size if dtype_bytes == 2 and size in KERNEL_HEAD_SIZES else padded)
    return 8 * config.hidden_size + dtype_bytes * (normed + attention + 3 * inner)


def estimate_kv_cache(config: Any, cfg: Config, processes: int) -> float | None:
    """Return the memory of the KV cache, with each prompt once; None if it is unknown."""
    if explain_unknown_memory(config):
        return None
    config, a, s = config.get_text_config(), cfg.algorithm, cfg.sampler
    rows = min(s.rows, max(a.group_size, a.prompts_per_step * a.group_size // processes))
    tokens = rows * s.max_tokens + rows / a.group_size * _ASSUMED_PROMPT_TOKENS
    _, key_heads, size = _get_head_sizes(config)
    dtype_bytes = 4 if cfg.policy.dtype == "float32" else 2
    return 2 * dtype_bytes * tokens * config.num_hidden_layers * key_heads * size / 1e9


# ---------------------------------------------------------------- disk space


@dataclass(frozen=True)
class DiskPlan:
    """The disk space of a run, without its logs."""

    model_gb: float
    checkpoint_gb: float
    max_checkpoints: int
    """The most checkpoints that exist at once: a new one is complete before the oldest is removed."""
    final_checkpoints: int
    """The number of checkpoints of the finished run."""
    replaced_gb: float
    """The size of existing files that a resumed run replaces."""
    free_gb: float

    @property
    def peak_gb(self) -> float:
        return self.model_gb + self.max_checkpoints * self.checkpoint_gb

    @property
    def final_gb(self) -> float:
        return self.model_gb + self.final_checkpoints * self.checkpoint_gb

    @property
    def needed_gb(self) -> float:
        """The disk space that must be free."""
        return self.peak_gb - self.replaced_gb

    def describe(self, is_saved: bool) -> str:
        """Return one line. `is_saved` says whether the run writes checkpoints, and not only when it is stopped."""
        remaining = {0: "the model", 1: "the model and the newest checkpoint"}.get(
            self.final_checkpoints, f"the model and {self.final_checkpoints} checkpoints"
        )
        stopped = "" if is_saved else f", {self.checkpoint_gb:.1f} more where it is stopped"
        peak = f"up to {self.peak_gb:.1f} GB of {self.free_gb:.0f} GB free{stopped}"
        return f"{peak}; left at the end: {self.final_gb:.1f} GB, {remaining}"


def plan_disk(cfg: Config, model: ModelFacts, run_dir: Path) -> DiskPlan:
    """Plan the disk space of a run from the facts of its model."""
    settings, existing = cfg.checkpoint, len(list_checkpoints(run_dir))
    saves = max(math.ceil(cfg.algorithm.steps / settings.every), existing + (existing > 0)) if settings.every else 0
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    return DiskPlan(
        model_gb=count_model_bytes(model, cfg) / 1e9,
        checkpoint_gb=count_checkpoint_bytes(model, cfg) / 1e9,
        max_checkpoints=min(settings.keep_last + 1, saves),
        final_checkpoints=min({"newest": 1, "all": settings.keep_last, "none": 0}[settings.keep_finished], saves),
        replaced_gb=_count_replaced_bytes(run_dir) / 1e9,
        free_gb=shutil.disk_usage(nearest).free / 1e9,
    )


def count_model_bytes(model: ModelFacts, cfg: Config) -> int:
    dtype_bytes = 4 if cfg.policy.save_dtype == "float32" else 2
    return model.parameter_count * dtype_bytes + (4 * model.trained_count if cfg.policy.lora else 0)


def count_checkpoint_bytes(model: ModelFacts, cfg: Config) -> int:
    """Return the bytes of a checkpoint: weights, or their masters, and two moments in fp32."""
    reference = 4 * model.parameter_count if cfg.algorithm.reference_every else 0
    return 12 * model.trained_count + reference


def _count_replaced_bytes(run_dir: Path) -> int:
    """Return the bytes on disk that a resumed run will replace."""
    paths = [*run_dir.glob("checkpoints/*/*"), *run_dir.glob("model/*"), *run_dir.glob("adapter/*")]
    return sum(os.path.getsize(path) for path in paths if path.is_file())
