"""Estimates the memory and the disk space of a run, part by part, before anything is loaded.

Sizes are in GB (1e9 bytes) per device.
"""

from __future__ import annotations

import bisect
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pellucid.config import Config, PolicyConfig
from pellucid.distributed.settings import REDUCE_BUCKET_ELEMENTS
from pellucid.models.attention import KERNEL_HEAD_SIZES, supports_flash
from pellucid.models.decoder import ADAPTABLE_LAYERS, JOINED_LAYERS, find_fallback_reason
from pellucid.models.linear import GEMM_BLOCK
from pellucid.policy.load import (
    ModelAccess,
    check_causal_model,
    explain_policy_errors,
    has_custom_code,
    locate_model,
)
from pellucid.policy.logprobs import (
    MAX_ELEMENTWISE_LOGITS,
    MAX_GPU_ELEMENTWISE_LOGITS,
    MAX_GPU_LOGITS,
    MAX_MATMUL_LOGITS,
)
from pellucid.reporting.run_files import BEST_MODEL_DIR, list_checkpoints
from pellucid.rewards.grading import find_reward_models
from pellucid.rewards.reward_model import compute_weights_gb
from pellucid.types import UserError
from pellucid.utils.hardware import pick_device

MEMORY_SHARE = 0.85
"""The share of the available memory that a plan may need."""
ASSUMED_PROMPT_TOKENS = 64
"""The assumed length of a prompt in tokens, where it is not known."""
BYTES_PER_4BIT_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit number, with its share of the scale of its block, and of the scale of 256 blocks."""
_FRAGMENTED_SHARE = 0.5
"""The share of the memory of sampling that an update on a CPU cannot use again, as measured: it is free in pieces."""
_WITH_HEAD_NORMS = ("qwen3",)
"""Architectures that normalize queries and keys, which needs them as they were projected."""
LIBRARIES_GB = 0.6
"""The memory of code and libraries."""
_MIN_SAVING = 0.02
"""The share of the peak from which a change that costs time is recommended."""
_SUGGESTED_SAMPLER_ROWS = 32
"""How many completions are sampled at once, in what is suggested if their KV cache is too large."""
_SUGGESTED_LORA_RANK = 16
"""The rank of the adapter that is suggested if training the whole model does not fit."""
_VLLM_OVERHEAD_GB = 1.0
"""The memory of vLLM besides weights and cache, as measured on a CPU."""


class ModelFacts(NamedTuple):
    """The facts of a model and of its prompts on which memory depends."""

    config: Any
    parameter_count: int
    trained_count: int
    quantized_count: int = 0
    """The number of parameters that are stored in 4 bits."""
    has_own_code: bool = False
    """Whether Python code of the checkpoint computes it."""
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS
    """The length of the longest prompt in tokens."""


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
    sampling = _estimate_sampling_weights(model, cfg) + _estimate_sampling_logits(model, cfg, processes)
    sampling += estimate_kv_cache(model, cfg, processes) or 0.0
    heap = _FRAGMENTED_SHARE * sampling if _is_on_cpu(cfg) else 0.0
    return {
        "start": _estimate_start(model, cfg, processes) + sum(estimate_reward_models(cfg).values()),
        "sampling": steady + sampling,
        "update": steady + _estimate_gathered_layers(model, cfg) + backward + heap,
    }


def _estimate_start(model: ModelFacts, cfg: Config, processes: int) -> float:
    """Return the memory while an engine loads models, the reference after the policy.

    A model of our decoder is read shard by shard if the engine shards weights. DeepSpeed also creates gradients and
    optimizer state, and each process has memory for the largest parameter. Any other model is whole in fp32 at first.
    """
    if cfg.runtime.engine not in ("fsdp2", "deepspeed"):
        return 0.0
    if cfg.runtime.shards_weights and _uses_own_decoder(model, cfg.policy):
        state = estimate_training_state(model, cfg, processes)
        if cfg.runtime.engine == "fsdp2":
            return state["weights"] + state["reference"] + LIBRARIES_GB
        largest = _get_dtype_bytes(cfg.policy) * _count_embedding_weights(model.config) / 1e9
        return sum(state.values()) + largest + LIBRARIES_GB
    whole = 4 * model.parameter_count / 1e9
    return whole * (1 + has_reference(cfg) / processes) + LIBRARIES_GB


def describe_loading(model: ModelFacts, cfg: Config) -> str:
    """Return a sentence on what engines that shard a model load before they shard it."""
    if reason := predict_fallback_reason(model, cfg.policy):
        whole, why = "Before fsdp2, ZeRO-2 or ZeRO-3 shards", f" (transformers computes it: {reason})"
    else:
        whole, why = "fsdp2 and ZeRO-3 read the model shard by shard. Before ZeRO-2 shards", ""
    return f"{whole} the state, each process loads the whole model in fp32{why}, so the peak is at least that."


def estimate_parts(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float | None]:
    """Return the memory of each part on each of `processes` devices; None for a part whose size is unknown.

    Weights, gradients and optimizer state are exact. Not all parts exist at the same time: see `estimate_phases`.
    """
    own_decoder = _uses_own_decoder(model, cfg.policy)
    sizes = _compute_backward_sizes(cfg, processes, own_decoder, model.prompt_tokens)
    is_known = not explain_unknown_memory(model.config)
    return {
        **estimate_training_state(model, cfg, processes),
        **estimate_reward_models(cfg),
        **_estimate_vllm(model, cfg),
        "activations": estimate_activation_bytes(model.config, cfg, own_decoder, sizes) / 1e9 if is_known else None,
        "logits": _estimate_logits(model, cfg, sizes.tokens),
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


# ---------------------------------------------------------------- what fits


def choose_micro_batch(model: ModelFacts, cfg: Config, available_gb: float, processes: int = 1) -> int:
    """Return the most rows of a forward pass with which a run fits into the available memory of each device.

    It is 0 if it fits with all rows of an optimizer step, or if the memory of the model is unknown. Raise UserError,
    which says what would fit, if it does not fit with one.
    """
    if explain_unknown_memory(model.config):
        return 0
    rows = find_micro_batch(model, cfg, available_gb, processes)
    if rows is None:
        raise UserError(_explain_what_fits(model, cfg, available_gb, processes))
    return rows


def find_micro_batch(model: ModelFacts, cfg: Config, available_gb: float, processes: int = 1) -> int | None:
    """Return the most rows that fit, as `choose_micro_batch` does; None if not even one does."""

    def estimate_with(rows: int) -> float:
        return estimate_changed_peak(model, cfg, {"algorithm.micro_batch": rows}, processes)

    if fits(estimate_with(0), available_gb):
        return 0
    # All rows at once may need less than all but one, which are two micro-batches.
    fewer = range(1, count_minibatch_rows(cfg, processes))
    return bisect.bisect_right(fewer, MEMORY_SHARE * available_gb, key=estimate_with) or None


def fits(peak_gb: float, available_gb: float) -> bool:
    """Whether a planned peak leaves enough of the available memory free."""
    return peak_gb <= MEMORY_SHARE * available_gb


def format_limit(available_gb: float) -> str:
    return f"{MEMORY_SHARE * available_gb:.1f} GB, {MEMORY_SHARE:.0%} of {available_gb:.1f}"


def format_settings(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in changes.items())


def _explain_what_fits(model: ModelFacts, cfg: Config, available_gb: float, processes: int) -> str:
    """Return what a run needs that does not fit with one row in a forward pass, what would fit, and what it saves."""
    one_row = change_settings(cfg, {"algorithm.micro_batch": 1})
    needed, limit = estimate_peak(model, one_row, processes), format_limit(available_gb)
    savings, fitting = [], []
    for changes in suggest_smaller_settings(one_row):
        gb = estimate_changed_peak(model, one_row, changes, processes)
        text = format_settings(changes)
        if len(changes) == 1 and needed - gb >= _MIN_SAVING * needed:
            savings.append(f"{text} saves {needed - gb:.1f} GB")
        if fits(gb, available_gb):
            fitting.append(f"{text}: {gb:.1f} GB")
    advice = [f"it fits with {fitting[0]}"] if fitting else ["nothing below is enough: choose a smaller model"]
    return (
        f"memory: with one row in a forward pass, about {needed:.1f} GB are needed, and a run plans with at most"
        f" {limit}; {'; '.join([*advice, *savings])}; algorithm.micro_batch = 1 starts it all the same"
    )


def suggest_smaller_settings(cfg: Config) -> Iterator[dict[str, Any]]:
    """Yield settings by dotted key that need less memory, the smallest change first.

    Each change is made alone at first; then they are added up one by one.
    """
    p, is_on_cpu, is_sharded = cfg.policy, _is_on_cpu(cfg), cfg.runtime.engine in ("fsdp2", "deepspeed")
    rows, changes = max(_SUGGESTED_SAMPLER_ROWS, cfg.algorithm.group_size), dict[str, Any]()
    if not p.gradient_checkpointing:
        changes["policy.gradient_checkpointing"] = True
    if not (is_on_cpu or p.lora or p.dtype == "float16" or cfg.optimizer.offload):
        changes["optimizer.offload"] = True
    if has_reference(cfg) and not is_on_cpu and not is_sharded:
        changes["policy.reference"] = "cpu"
    if rows < cfg.sampler.rows:
        changes["sampler.rows"] = rows
    yield from ({key: value} for key, value in changes.items())
    yield from (dict(islice(changes.items(), count)) for count in range(2, len(changes) + 1))
    if not p.lora:
        adapter = {"policy.lora": _SUGGESTED_LORA_RANK} | (
            {"optimizer.offload": False} if cfg.optimizer.offload else {}
        )
        more = {key: changes[key] for key in ("policy.gradient_checkpointing", "sampler.rows") if key in changes}
        yield from (adapter | dict(islice(more.items(), count)) for count in range(len(more) + 1))
        if not is_on_cpu and not is_sharded and not cfg.sampler.uses_engine:
            yield from (adapter | {"policy.load_in_4bit": True} | extra for extra in ({}, more))
    yield from ({"sampler.max_tokens": max(1, cfg.sampler.max_tokens // share)} for share in (2, 4))


def estimate_changed_peak(model: ModelFacts, cfg: Config, changes: Mapping[str, Any], processes: int = 1) -> float:
    """Return the peak of a run with settings changed by dotted key."""
    return estimate_peak(*apply_changes(model, cfg, changes), processes)


def apply_changes(model: ModelFacts, cfg: Config, changes: Mapping[str, Any]) -> tuple[ModelFacts, Config]:
    """Return the facts of the model and the settings with changes by dotted key."""
    changed = change_settings(cfg, changes)
    if (changed.policy.lora, changed.policy.load_in_4bit) != (cfg.policy.lora, cfg.policy.load_in_4bit):
        model = describe_model(changed.policy)._replace(prompt_tokens=model.prompt_tokens)
    return model, changed


def change_settings(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """Return the settings with changes by dotted key."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{name: value})})
    return cfg


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
    if saved >= _MIN_SAVING * peak:
        return f"policy.gradient_checkpointing {'saves' if is_on else 'would save'} {saved:.1f} of {peak:.1f} GB"
    advice = ": leave it out, it costs time" if is_on else ""
    return f"policy.gradient_checkpointing saves less than {_MIN_SAVING:.0%} of the memory here{advice}"


def suggest_memory_remedy(model: ModelFacts, cfg: Config, processes: int = 1) -> str:
    """Return what to change if memory runs out in a forward pass of one row."""
    remedy = "set a lower sampler.max_tokens"
    if cfg.policy.gradient_checkpointing or explain_unknown_memory(model.config):
        return remedy
    one_row = replace(cfg, algorithm=replace(cfg.algorithm, micro_batch=1))
    saved, peak = estimate_checkpointing_saving(model, one_row, processes)
    if saved < _MIN_SAVING * peak:
        return remedy
    return f"set policy.gradient_checkpointing, which saves {saved:.1f} of {peak:.1f} GB, or {remedy}"


# ---------------------------------------------------------------- weights, gradients, optimizer


def estimate_training_state(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """Return the memory of weights, gradients, optimizer and reference.

    With ddp each process has fp32 master weights and a copy in the compute dtype; fsdp2 and deepspeed shard them.
    """
    estimators = {"fsdp2": _estimate_fsdp2_state, "deepspeed": _estimate_zero_state}
    return estimators.get(cfg.runtime.engine, _estimate_ddp_state)(model, cfg, processes)


def _estimate_ddp_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """Frozen weights, and with offloading all weights, are in the compute dtype, and without a copy."""
    p, t, q = model.parameter_count / 1e9, model.trained_count / 1e9, model.quantized_count / 1e9
    dtype_bytes, own_decoder = _get_dtype_bytes(cfg.policy), _uses_own_decoder(model, cfg.policy)
    copy_bytes = dtype_bytes if dtype_bytes < 4 else 0
    frozen = dtype_bytes * (p - t) + (BYTES_PER_4BIT_WEIGHT - dtype_bytes) * q
    buckets = 2 if processes > 1 else 1  # DDP copies gradients to exchange them
    reference = _estimate_whole_reference(model, cfg)
    if cfg.optimizer.offload:
        weights = frozen + dtype_bytes * t + (0 if own_decoder else copy_bytes * t)
        host_gb = 16 * t if _is_on_cpu(cfg) else 0.0
        return {
            "weights": weights,
            "gradients": dtype_bytes * t * buckets,
            "optimizer": host_gb,
            "reference": reference,
        }
    weights = frozen + (4 + copy_bytes) * t
    return {"weights": weights, "gradients": 4 * t * buckets, "optimizer": 8 * t, "reference": reference}


def _estimate_fsdp2_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """The state is sharded among `runtime.shards` processes."""
    p, t, shards = model.parameter_count / 1e9, model.trained_count / 1e9, cfg.runtime.shards or processes
    is_offloaded = cfg.optimizer.offload and not _is_on_cpu(cfg)
    sharded = {"weights": 4 * t + _get_dtype_bytes(cfg.policy) * (p - t), "gradients": 4 * t, "optimizer": 8 * t}
    state = {name: 0.0 if is_offloaded else size / shards for name, size in sharded.items()}
    return state | {"reference": 4 * p * has_reference(cfg) / shards}


def _estimate_zero_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """Return the state with DeepSpeed's ZeRO (arXiv 1910.02054, figure 1) and gradients in fp32.

    A parameter has 2 bytes of weights in bf16, 4 of gradients and 12 of optimizer state. Stage 2 shards all but the
    weights, stage 3 the weights, too.
    """
    p, t = model.parameter_count / 1e9, model.trained_count / 1e9
    dtype_bytes, is_stage_3 = _get_dtype_bytes(cfg.policy), cfg.runtime.zero_stage == 3
    is_half, is_offloaded = dtype_bytes == 2, cfg.optimizer.offload and not _is_on_cpu(cfg)
    has_copies = not is_stage_3 and _uses_own_decoder(model, cfg.policy)
    copied = dtype_bytes * _count_fused_weights(model.config) if has_copies else 0.0
    own_masters = is_half or not is_stage_3 or cfg.optimizer.offload  # else the weights are the masters
    reference = has_reference(cfg) * dtype_bytes * p / processes
    return {
        "weights": (dtype_bytes * p / processes if is_stage_3 else dtype_bytes * p) + copied,
        "gradients": 4 * (REDUCE_BUCKET_ELEMENTS / 1e9 + (0.0 if is_offloaded else t / processes)),
        "optimizer": 0.0 if is_offloaded else (8 + 4 * own_masters) * t / processes,
        "reference": reference if is_stage_3 else _estimate_whole_reference(model, cfg),
    }


def _estimate_whole_reference(model: ModelFacts, cfg: Config) -> float:
    """A frozen one is in the compute dtype; one that moves, and one of transformers, is in fp32 with a copy."""
    dtype_bytes = _get_dtype_bytes(cfg.policy)
    is_cast = is_reference_cast(cfg) and _uses_own_decoder(model, cfg.policy)
    masters = 0 if is_cast or dtype_bytes == 4 else 4
    return has_reference(cfg) * (masters + dtype_bytes) * model.parameter_count / 1e9


def is_reference_cast(cfg: Config) -> bool:
    """Whether the reference is kept in the compute dtype: if it stays as it is, and FSDP2, which takes parameters of
    one dtype, does not shard it."""
    return not cfg.algorithm.reference_every and cfg.runtime.engine != "fsdp2"


def has_reference(cfg: Config) -> bool:
    """Whether a reference model is on the policy's device."""
    p = cfg.policy
    if not cfg.algorithm.kl_coef or p.lora:
        return False
    return p.reference == "auto" or _get_device_type(p.reference) == _get_device_type(p.device)


def _get_device_type(name: str) -> str:
    """Return the type of a device; a plan may be for a GPU that this machine does not have."""
    return "cuda" if name.startswith("cuda") else pick_device(name).type


def _is_on_cpu(cfg: Config) -> bool:
    return _get_device_type(cfg.policy.device) == "cpu"


def _is_cuda(cfg: Config) -> bool:
    return _get_device_type(cfg.policy.device) == "cuda"


def _estimate_gathered_layers(model: ModelFacts, cfg: Config) -> float:
    """Return the memory of the weights that an engine has gathered in an update, and of their gradients in fp32: the
    embedding and the head, and of the layers the present one, whose gradients are exchanged, and the next."""
    if not cfg.runtime.shards_weights:
        return 0.0
    config, dtype_bytes = model.config.get_text_config(), _get_dtype_bytes(cfg.policy)
    outer = _count_embedding_weights(config) * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    layer = (model.parameter_count - outer) / (getattr(config, "num_hidden_layers", 0) or 1)
    gradients = 0.0 if cfg.policy.lora else 4 * (outer + layer)
    return (dtype_bytes * (outer + 2 * layer) + gradients) / 1e9


def _count_embedding_weights(config: Any) -> int:
    """Return the number of weights of the embedding, the largest parameter."""
    text = config.get_text_config()
    return getattr(text, "vocab_size", 0) * getattr(text, "hidden_size", 0)


def _uses_own_decoder(model: ModelFacts, policy: PolicyConfig) -> bool:
    return not predict_fallback_reason(model, policy)


def predict_fallback_reason(model: ModelFacts, policy: PolicyConfig) -> str:
    """Predict `Policy.find_fallback_reason`: why transformers computes the model instead of our decoder."""
    if policy.engine == "transformers":
        return "policy.engine"
    if model.has_own_code:
        return "custom code"
    if policy.load_in_4bit:
        return "an adapter on a 4-bit base"
    unknown = sorted(set(policy.lora_targets) - ADAPTABLE_LAYERS)
    return find_fallback_reason(model.config) or (f"an adapter of {unknown[0]}" if unknown else "")


def _count_fused_weights(config: Any) -> float:
    """Return the number of weights, in billions, in the projections that our decoder fuses.

    Fused weights are a copy even if the master weights have the decoder's dtype.
    """
    heads, key_heads, size = get_head_sizes(config)
    rows = (heads + 2 * key_heads) * size + 2 * config.intermediate_size
    return rows * config.hidden_size * config.num_hidden_layers / 1e9


def get_head_sizes(config: Any) -> tuple[int, int, int]:
    """Return the number of query heads, of key heads, and the head size."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


# ---------------------------------------------------------------- activations and logits of the update


def count_minibatch_rows(cfg: Config, processes: int) -> int:
    """Return the number of completions of an optimizer step in one process, those of replayed steps included."""
    a = cfg.algorithm
    return max(a.group_size, a.prompts_per_step * a.group_size // (a.minibatches * processes)) * a.max_staleness


def count_backward_rows(cfg: Config, processes: int) -> int:
    """Return the number of completions in one backward pass."""
    rows = count_minibatch_rows(cfg, processes)
    return min(cfg.algorithm.micro_batch_rows or rows, rows)


def _has_single_backward_pass(cfg: Config, processes: int) -> bool:
    """Whether an optimizer step has a single micro-batch, and the engine keeps no gradient buffers during it."""
    rows = count_minibatch_rows(cfg, processes)
    return cfg.runtime.engine != "deepspeed" and count_backward_rows(cfg, processes) == rows


class BackwardSizes(NamedTuple):
    """The sizes of one backward pass, on which its memory depends."""

    tokens: float
    keys: float
    """The keys of all rows. A response also has those of its prompt."""
    scores: float
    """The pairs of a query and a key."""


def _compute_backward_sizes(cfg: Config, processes: int, shares_prompts: bool, prompt_tokens: int) -> BackwardSizes:
    """Return the sizes of one backward pass, where a group may share the tokens of its prompt."""
    rows, response_tokens = count_backward_rows(cfg, processes), cfg.sampler.max_tokens
    row_tokens = response_tokens + prompt_tokens
    if not shares_prompts:
        return BackwardSizes(rows * row_tokens, rows * row_tokens, rows * row_tokens**2)
    prompts = rows / cfg.algorithm.group_size
    return BackwardSizes(
        tokens=rows * response_tokens + prompts * prompt_tokens,
        keys=rows * row_tokens + prompts * prompt_tokens,
        scores=rows * response_tokens * row_tokens + prompts * prompt_tokens**2,
    )


def estimate_activation_bytes(config: Any, cfg: Config, own_decoder: bool, sizes: BackwardSizes) -> float:
    """Return the bytes of activations that a backward pass needs.

    All layers keep activations; with gradient checkpointing, only the residual stream and one layer do. transformers is
    assumed to need 1.5 times as much as our decoder on a CPU.
    """
    config, dtype_bytes, on_gpu = config.get_text_config(), _get_dtype_bytes(cfg.policy), own_decoder and _is_cuda(cfg)
    estimate_layer = _estimate_gpu_layer_bytes if on_gpu else _estimate_cpu_layer_bytes
    layer = estimate_layer(config, cfg, sizes) + sizes.tokens * dtype_bytes * _count_adapter_inputs(cfg.policy)
    stream = 4 * sizes.tokens * config.hidden_size * (config.num_hidden_layers + 1)
    total = stream + layer if cfg.policy.gradient_checkpointing else layer * config.num_hidden_layers
    if on_gpu:
        return total + _estimate_gpu_gradient_bytes(config, dtype_bytes, sizes)
    return total if own_decoder else 1.5 * total


def _estimate_cpu_layer_bytes(config: Any, cfg: Config, sizes: BackwardSizes) -> float:
    return sizes.tokens * estimate_layer_bytes(config, _get_dtype_bytes(cfg.policy))


def estimate_layer_bytes(config: Any, dtype_bytes: int) -> int:
    """Return the bytes of activations per token that one layer keeps on a CPU.

    It keeps the residual stream twice in fp32, and the inputs of matrix products and attention in the compute dtype.
    Attention without the kernel pads rows and repeats a prompt's keys and values for each response; with the kernel
    (half precision only), the layer keeps the output of the heads instead.
    """
    heads, key_heads, size = get_head_sizes(config)
    normed, projected, rotated = 2 * config.hidden_size, (heads + 2 * key_heads) * size, (heads + key_heads) * size
    padded = (2 * heads + 4 * key_heads) * size
    attention = projected + rotated + (heads * size if dtype_bytes == 2 and size in KERNEL_HEAD_SIZES else padded)
    return 8 * config.hidden_size + dtype_bytes * (normed + attention + 3 * _get_inner_size(config))


def _estimate_gpu_layer_bytes(config: Any, cfg: Config, sizes: BackwardSizes) -> float:
    """Return the bytes of activations that one layer of our decoder keeps on a GPU, which may have flash attention."""
    (heads, key_heads, size), dtype_bytes = get_head_sizes(config), _get_dtype_bytes(cfg.policy)
    projected, rotated = (heads + 2 * key_heads) * size, (heads + key_heads) * size
    inner, attended = _get_inner_size(config), heads * size
    values = rotated + attended + 2 * inner
    if cfg.runtime.shards_weights and not cfg.policy.lora:  # else normed and gated values are computed again
        values += 2 * config.hidden_size + inner
    if _has_flash(config, dtype_bytes):
        # Flash attention keeps a copy of the keys and values of each row, and normalizers in fp32.
        values += projected if config.model_type in _WITH_HEAD_NORMS else 0
        attention = 4 * sizes.tokens * heads + dtype_bytes * sizes.keys * 2 * key_heads * size
    else:
        # PyTorch's operators keep queries, keys and values of each head and all probabilities, in fp32.
        values += projected
        attention = 4 * (sizes.tokens * attended + sizes.keys * 2 * attended + sizes.scores * heads)
    return sizes.tokens * (8 * config.hidden_size + dtype_bytes * values) + attention


def _estimate_gpu_gradient_bytes(config: Any, dtype_bytes: int, sizes: BackwardSizes) -> float:
    """Return the bytes that the backward pass of the last layer takes beside the activations of all layers."""
    # Those of PyTorch's operators; the kernels of Triton need less.
    mlp = dtype_bytes * 5 * sizes.tokens * _get_inner_size(config)
    attention = 0 if _has_flash(config, dtype_bytes) else 8 * sizes.scores * get_head_sizes(config)[0]
    return sizes.tokens * (4 + dtype_bytes) * config.hidden_size + max(mlp, attention)


def _has_flash(config: Any, dtype_bytes: int) -> bool:
    return dtype_bytes == 2 and supports_flash(get_head_sizes(config)[2])


def _count_adapter_inputs(policy: PolicyConfig) -> int:
    """Return how many numbers an adapter keeps per token and layer: the padded rank of each projection."""
    targets = set(policy.lora_targets or ADAPTABLE_LAYERS)
    ranks = (policy.lora * len(targets.intersection(layers)) for layers in JOINED_LAYERS.values())
    return sum(-(-rank // GEMM_BLOCK) * GEMM_BLOCK for rank in ranks)


def _get_inner_size(config: Any) -> int:
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _estimate_logits(model: ModelFacts, cfg: Config, tokens: float) -> float:
    """Return the memory of the logits that exist at once, and of the gradient of the head.

    The gradient is in fp32. On the CPU each part of it is a matrix product in the compute dtype at first; on a GPU
    the logits are in fp32, and their gradient in the compute dtype.
    """
    config, dtype_bytes = model.config.get_text_config(), _get_dtype_bytes(cfg.policy)
    vocabulary, width = getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0)
    logits = tokens * vocabulary
    if _is_on_cpu(cfg):
        products = dtype_bytes * min(logits, MAX_MATMUL_LOGITS) + 12 * min(logits, MAX_ELEMENTWISE_LOGITS)
        is_split = dtype_bytes < 4 or logits > MAX_MATMUL_LOGITS
        head_bytes = 4 + (dtype_bytes if is_split else 0)
    else:
        products = (4 + dtype_bytes % 4) * min(logits, MAX_GPU_LOGITS) + 8 * min(logits, MAX_GPU_ELEMENTWISE_LOGITS)
        head_bytes = 4
    return (products + (0 if cfg.policy.lora else head_bytes * vocabulary * width)) / 1e9


# ---------------------------------------------------------------- sampling and rewards


def _count_sampled_rows(cfg: Config, processes: int) -> int:
    """Return the most rows that this process decodes at once, for training or for an evaluation."""
    a, e = cfg.algorithm, cfg.evaluate
    if cfg.sampler.uses_engine:
        return 0
    evaluated = (e.n or cfg.sampler.rows) * max(1, e.samples or e.k) // processes if e.every else 0
    return max(a.group_size, min(cfg.sampler.rows, max(a.prompts_per_step * a.group_size // processes, evaluated)))


def estimate_kv_cache(model: ModelFacts, cfg: Config, processes: int) -> float | None:
    """Return the memory of the KV cache, with each prompt once; None if it is unknown."""
    if explain_unknown_memory(model.config):
        return None
    config, rows = model.config.get_text_config(), _count_sampled_rows(cfg, processes)
    tokens = rows * cfg.sampler.max_tokens + rows / cfg.algorithm.group_size * model.prompt_tokens
    _, key_heads, size = get_head_sizes(config)
    return 2 * _get_dtype_bytes(cfg.policy) * tokens * config.num_hidden_layers * key_heads * size / 1e9


def _estimate_sampling_logits(model: ModelFacts, cfg: Config, processes: int) -> float:
    """Return the memory of a token's logits and, on a GPU, of their sums in fp32 and fp64."""
    rows, vocabulary = _count_sampled_rows(cfg, processes), getattr(model.config.get_text_config(), "vocab_size", 0)
    element_bytes = _get_dtype_bytes(cfg.policy) if _is_on_cpu(cfg) else 16
    return rows * vocabulary * element_bytes / 1e9


def _estimate_sampling_weights(model: ModelFacts, cfg: Config) -> float:
    """Return the memory of weights that exist only while the native sampler samples: those that an engine gathers, and
    those that the CPU kernels have in a layout of their own."""
    weights, dtype_bytes = model.parameter_count / 1e9, _get_dtype_bytes(cfg.policy)
    gathered = dtype_bytes * weights if cfg.runtime.shards_weights and not cfg.sampler.uses_engine else 0.0
    is_bf16 = cfg.sampler.name == "native" and cfg.policy.dtype == "bfloat16"
    has_kernels = is_bf16 and _uses_own_decoder(model, cfg.policy) and _is_on_cpu(cfg)
    return gathered + (2 * weights if has_kernels else 0.0)


def _estimate_vllm(model: ModelFacts, cfg: Config) -> dict[str, float]:
    """Return the memory of vLLM on the trainer's device; empty without vLLM, or with servers."""
    s = cfg.sampler
    if not s.uses_engine or s.urls:
        return {}
    merged = cfg.policy.lora > 0 and s.adapter == "merged"  # always in fp32
    weights = (4 if merged else _get_dtype_bytes(cfg.policy)) * model.parameter_count / 1e9
    return {"vLLM": weights + s.cache_gb + _VLLM_OVERHEAD_GB}


def estimate_reward_models(cfg: Config) -> dict[str, float]:
    """Return the memory of the reward models on the device of the policy, which are not sharded; empty without any."""
    sizes = [
        compute_weights_gb(source, settings)
        for source, settings in find_reward_models(cfg.task).values()
        if _get_device_type(settings.device) == _get_device_type(cfg.policy.device)
    ]
    return {"reward model": sum(sizes)} if sizes else {}


# ---------------------------------------------------------------- disk space


class DiskPlan(NamedTuple):
    """The disk space of a run, without its logs."""

    max_checkpoints: int
    """The maximum number of checkpoints that exist at once. A new one is complete before the oldest is removed."""
    best_model_gb: float
    """The space of the model of the best evaluation (checkpoint.keep_best)."""
    peak_gb: float
    needed_gb: float
    """The peak minus the existing files that a resumed run replaces."""
    free_gb: float


def plan_disk(cfg: Config, model: ModelFacts, run_dir: Path) -> DiskPlan:
    settings, existing = cfg.checkpoint, len(list_checkpoints(run_dir))
    saves = max(math.ceil(cfg.algorithm.steps / settings.every), existing + (existing > 0)) if settings.every else 0
    max_checkpoints = min(settings.keep_last + 1, saves)
    # The model of the best evaluation is complete before it replaces one, and the last model is written beside it. One
    # of the last evaluation shares its files with the last model.
    is_kept = settings.keep_best and 0 < cfg.evaluate.every < cfg.algorithm.steps
    model_bytes = count_model_bytes(model, cfg)
    best_bytes = model_bytes if is_kept else 0
    peak = model_bytes + best_bytes + max_checkpoints * count_checkpoint_bytes(model, cfg)
    patterns = ("checkpoints/*/*", "model/*", "adapter/*", f"{BEST_MODEL_DIR}/**/*")
    replaced = (path.stat() for pattern in patterns for path in run_dir.glob(pattern) if path.is_file())
    replaced_bytes = sum({stat.st_ino: stat.st_size for stat in replaced}.values())  # linked files are there once
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    return DiskPlan(max_checkpoints, best_bytes / 1e9, peak / 1e9, (peak - replaced_bytes) / 1e9, free / 1e9)


def count_model_bytes(model: ModelFacts, cfg: Config) -> int:
    dtype_bytes = 4 if cfg.policy.save_dtype == "float32" else 2
    return model.parameter_count * dtype_bytes + (4 * model.trained_count if cfg.policy.lora else 0)


def count_checkpoint_bytes(model: ModelFacts, cfg: Config) -> int:
    """Return the bytes of a checkpoint: master weights, two moments, and an updated reference, in fp32."""
    reference = 4 * model.parameter_count if cfg.algorithm.reference_every else 0
    return 12 * model.trained_count + reference
