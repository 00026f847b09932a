"""How much memory training takes, part by part, before anything is loaded."""

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

ASSUMED_PROMPT_TOKENS = 64
"""The length that a prompt is taken to have, in tokens."""
BYTES_PER_4BIT_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit number, with its share of a block's scale and of the scale of 256 such."""
LIBRARIES_GB = 0.6
"""GB that code and libraries take."""
MIN_CHECKPOINTING_SAVING = 0.02
"""The least share of the peak for which gradient checkpointing, which costs time, is recommended."""
VLLM_OVERHEAD_GB = 1.0
"""GB that vLLM takes besides weights and cache, for its code and what it computes; as it was on a CPU."""


class ModelFacts(NamedTuple):
    """The facts of a model that its memory depends on."""

    config: Any
    parameter_count: int
    trained_count: int
    quantized_count: int = 0
    """Of the parameters, those that are 4-bit numbers."""
    has_own_code: bool = False
    """Whether it is computed by Python code of the checkpoint's."""


def describe_policy_model(policy: PolicyConfig) -> ModelFacts:
    """The facts of the model that these settings name."""
    return describe_model(policy.model, policy.lora, policy.lora_targets, policy.access, policy.load_in_4bit)


def build_meta_model(name: str, access: ModelAccess = DEFAULT_ACCESS) -> tuple[Any, Any]:
    """The configuration of a model, and the model with parameters that have no memory. UserError as in loading it."""
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
    """The facts of a model by its name, or by its folder, where config.json is enough. No weights are loaded."""
    config, model = build_meta_model(name, access)
    parameters = sum(p.numel() for p in model.parameters())
    if not lora:
        return ModelFacts(config, parameters, parameters, has_own_code=has_custom_code(model))
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    inner = [
        m
        for name, m in linear.items()
        if (name.rpartition(".")[2] in targets if targets else not name.endswith("lm_head"))
    ]
    narrow = [m.weight.numel() for m in linear.values() if in_4bit and m is not model.get_output_embeddings()]
    trained = sum(lora * (m.in_features + m.out_features) for m in inner)
    return ModelFacts(config, parameters, trained, sum(narrow), has_custom_code(model))


def estimate_parts(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float | None]:
    """GB on each of `processes` devices by part; None where they are unknown. Those of weights, gradients and optimizer
    are exact.

    With ddp fp32 masters and a copy in the compute dtype in every process; with fsdp2 and deepspeed shared out. Not all
    are there at the same time: `peak` says how much is.
    """
    ours = uses_own_decoder(model, cfg)
    tokens = count_backward_tokens(cfg, processes, shares_prompts=ours)
    counted = not explain_unknown_memory(model.config)
    kept = estimate_training_state(model, cfg, processes) | estimate_reward_models(cfg) | estimate_vllm(model, cfg)
    return kept | {
        "activations": tokens * estimate_activation_bytes(model.config, cfg, ours) / 1e9 if counted else None,
        "logits": estimate_logits(model, cfg, tokens),
        "libraries": LIBRARIES_GB,
    }


def estimate_peak(model: ModelFacts, cfg: Config, processes: int = 1) -> float:
    """GB on each device in the phase that needs most. What is unknown is not counted."""
    return max(estimate_phases(model, cfg, processes).values())


def estimate_phases(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """GB on each device in each phase of a run. What is unknown is not counted.

    In an update of one micro-batch activations are freed as gradients come: the more of both is needed. From the second
    micro-batch on, gradients of those before stand beside the activations. The microscope's predictions keep the
    weights before the update and, behind it, how far each has moved.
    """
    found = estimate_parts(model, cfg, processes)
    steady = sum_known(found) - sum(found[name] or 0.0 for name in ("gradients", "activations", "logits"))
    gradients, passing = found["gradients"] or 0.0, (found["activations"] or 0.0) + (found["logits"] or 0.0)
    at_once = max(gradients, passing) if has_single_backward_pass(cfg, processes) else gradients + passing
    predicted = bool(cfg.log.tokens and cfg.log.predictions) and pick_device(cfg.policy.device).type == "cpu"
    copy = 4 * model.trained_count / 1e9 if predicted else 0.0
    during = copy if cfg.algorithm.steps >= cfg.log.predictions else 0.0  # before the first step there are no moments
    p = model.parameter_count / 1e9
    sharded = cfg.runtime.engine in ("fsdp2", "deepspeed")
    start = 4 * p * (1 + has_reference(cfg) / processes) + LIBRARIES_GB if sharded else 0.0
    return {
        "start": start + sum(estimate_reward_models(cfg).values()),
        "sampling": steady
        + (estimate_packed_weights(model, cfg) + (estimate_kv_cache(model.config, cfg, processes) or 0.0)),
        "update": steady + at_once + during,
        "microscope": steady + 2 * copy + (found["logits"] or 0.0) if predicted else 0.0,
    }


def has_single_backward_pass(cfg: Config, processes: int) -> bool:
    """Whether an optimizer step has one micro-batch, and its engine keeps no buffers of gradients meanwhile."""
    a = cfg.algorithm
    minibatch = a.prompts_per_step * a.group_size // (a.minibatches * processes)
    return cfg.runtime.engine != "deepspeed" and count_backward_rows(cfg, processes) >= minibatch


def estimate_packed_weights(model: ModelFacts, cfg: Config) -> float:
    """GB of the matrices as the compiled kernels of sampling read them, beside those of the update."""
    by_kernels = cfg.sampler.name == "native" and cfg.policy.dtype == "bfloat16" and uses_own_decoder(model, cfg)
    return 2 * model.parameter_count / 1e9 if by_kernels and pick_device(cfg.policy.device).type == "cpu" else 0.0


def estimate_logits(model: ModelFacts, cfg: Config, tokens: float) -> float:
    """GB of the logits that are held at once, and of the head's gradient before it is added to that of others: in fp32,
    and in half precision once more as the product that is added up.
    """
    config, wide = model.config.get_text_config(), 4 if cfg.policy.dtype == "float32" else 2
    vocabulary, width = getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0)
    read, of_head = tokens * vocabulary, 0.0 if cfg.policy.lora else (4 + wide % 4) * vocabulary * width
    return (wide * min(read, MAX_MATMUL_LOGITS) + 12 * min(read, MAX_ELEMENTWISE_LOGITS) + of_head) / 1e9


def estimate_checkpointing_saving(model: ModelFacts, cfg: Config, processes: int = 1) -> float:
    """GB by which policy.gradient_checkpointing lowers the peak of this run; 0.0 where another phase needs as much."""
    without, with_it = (
        estimate_peak(model, replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=on)), processes)
        for on in (False, True)
    )
    return without - with_it


def describe_checkpointing(model: ModelFacts, cfg: Config, processes: int = 1) -> str:
    """What policy.gradient_checkpointing does for the memory of this run, in a sentence; empty where it is unknown."""
    if explain_unknown_memory(model.config):
        return ""
    saved, is_on = estimate_checkpointing_saving(model, cfg, processes), cfg.policy.gradient_checkpointing
    without = estimate_peak(model, replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=False)), processes)
    if saved < MIN_CHECKPOINTING_SAVING * without:
        mend = ": leave it out, it costs time" if is_on else ""
        return f"policy.gradient_checkpointing saves less than {MIN_CHECKPOINTING_SAVING:.0%} of the memory here{mend}"
    return f"policy.gradient_checkpointing {'saves' if is_on else 'would save'} {saved:.1f} of {without:.1f} GB"


def suggest_memory_remedy(model: ModelFacts, cfg: Config, processes: int = 1) -> str:
    """What a run can change whose memory runs out with one row in a forward pass."""
    one = replace(cfg, algorithm=replace(cfg.algorithm, micro_batch=1))
    remedies = ["set a lower sampler.max_tokens"]
    if not cfg.policy.gradient_checkpointing and not explain_unknown_memory(model.config):
        without = estimate_peak(model, one, processes)
        saved = estimate_checkpointing_saving(model, one, processes)
        if saved >= MIN_CHECKPOINTING_SAVING * without:
            remedies.insert(0, f"set policy.gradient_checkpointing, which saves {saved:.1f} of {without:.1f} GB")
    return ", or ".join(remedies)


def sum_known(counted: Mapping[str, float | None]) -> float:
    """GB of all parts that are known."""
    return sum(gb for gb in counted.values() if gb is not None)


def format_gb(size: float | None) -> str:
    """As it is printed."""
    return "unknown" if size is None else f"{size:.1f}"


def format_peak(model: ModelFacts, cfg: Config, processes: int) -> str:
    """The peak as it is printed: at least so many GB where a part is unknown."""
    unknown = None in estimate_parts(model, cfg, processes).values()
    return ("at least " if unknown else "") + format_gb(estimate_peak(model, cfg, processes))


def explain_unknown_memory(config: Any) -> str:
    """What keeps the formulas for activations and cache from describing such a model; empty where they do.

    They count layers of attention over keys and values with one MLP behind it.
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


def count_backward_tokens(cfg: Config, processes: int, shares_prompts: bool) -> float:
    """How many tokens one backward pass goes through. A shared prompt counts once a group."""
    rows = count_backward_rows(cfg, processes)
    return (
        rows * cfg.sampler.max_tokens
        + (rows / cfg.algorithm.group_size if shares_prompts else rows) * ASSUMED_PROMPT_TOKENS
    )


def count_backward_rows(cfg: Config, processes: int) -> int:
    """How many completions are in one backward pass. Groups are not split."""
    a = cfg.algorithm
    return a.micro_batch or max(a.group_size, a.prompts_per_step * a.group_size // (a.minibatches * processes))


def estimate_training_state(model: ModelFacts, cfg: Config, processes: int = 1) -> dict[str, float]:
    """GB of weights, gradients, optimizer and reference."""
    by_engine = {"fsdp2": estimate_fsdp2_state, "deepspeed": estimate_zero_state}
    return by_engine.get(cfg.runtime.engine, estimate_ddp_state)(model, cfg, processes)


def estimate_reward_models(cfg: Config) -> dict[str, float]:
    """GB of the reward models on the policy's device, each of which is whole in every process; empty without any."""
    device = pick_device(cfg.policy.device)
    sizes = [
        compute_weights_gb(source, settings)
        for source, settings in find_reward_models(cfg.task).values()
        if pick_device(settings.device, "reward_model.device") == device
    ]
    return {"reward model": sum(sizes)} if sizes else {}


def estimate_vllm(model: ModelFacts, cfg: Config) -> dict[str, float]:
    """GB of vLLM beside the trainer, or of what its servers were given, which a run a step ahead keeps for those that
    come back; empty without either.
    """
    merged = cfg.policy.lora > 0 and cfg.sampler.adapter == "merged"  # always in fp32
    weights = (4 if merged or cfg.policy.dtype == "float32" else 2) * model.parameter_count / 1e9
    if cfg.sampler.name != "vllm" or (cfg.sampler.urls and not cfg.sampler.ahead):
        return {}
    return (
        {"pushed weights": weights} if cfg.sampler.urls else {"vLLM": weights + cfg.sampler.cache_gb + VLLM_OVERHEAD_GB}
    )


def has_reference(cfg: Config) -> bool:
    return bool(cfg.algorithm.kl_coef and not cfg.policy.lora and cfg.policy.reference == "auto")


def estimate_ddp_state(model: ModelFacts, cfg: Config, _: int) -> dict[str, float]:
    p, t, q = model.parameter_count / 1e9, model.trained_count / 1e9, model.quantized_count / 1e9
    half = cfg.policy.dtype != "float32"
    if cfg.optimizer.offload:
        copied = count_fused_weights(model.config) if half and uses_own_decoder(model, cfg) else p * half
        kept = {"weights": (4 - 2 * half) * p + 2 * copied, "gradients": (4 - 2 * half) * t, "optimizer": 0.0}
    else:
        base = 4 * t + (4 - 2 * half) * (p - t) if cfg.policy.lora else 4 * p
        if model.quantized_count:
            base += (BYTES_PER_4BIT_WEIGHT - 4 + 2 * half) * q - 2 * half * (p - t)  # what is frozen has no second copy
        kept = {"weights": base + 2 * p * half, "gradients": 4 * t, "optimizer": 8 * t}
    return kept | {"reference": (4 + 2 * half) * p * has_reference(cfg)}


def estimate_fsdp2_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """What is kept is shared out, among `runtime.shards`; what samples is whole."""
    p, t, shards = model.parameter_count / 1e9, model.trained_count / 1e9, cfg.runtime.shards or processes
    half = cfg.policy.dtype != "float32"
    base = 4 * t + (4 - 2 * half) * (p - t) if cfg.policy.lora else 4 * p
    away = cfg.optimizer.offload and cfg.policy.device != "cpu"
    kept = {"weights": base, "gradients": 4 * t, "optimizer": 8 * t}
    each = {name: 0.0 if away else size / shards for name, size in kept.items()}
    each["weights"] += (4 - 2 * half) * p
    return each | {"reference": 4 * p * has_reference(cfg) / shards}


def estimate_zero_state(model: ModelFacts, cfg: Config, processes: int) -> dict[str, float]:
    """DeepSpeed's ZeRO (arXiv 1910.02054, figure 1), with gradients added up in fp32: of 2 bytes of weights in bf16, 4
    of gradients and 12 of optimizer state a parameter, stage 2 shares out all but the weights, 3 the weights, too. What
    samples is whole.
    """
    p, t = model.parameter_count / 1e9, model.trained_count / 1e9
    half, sharded = cfg.policy.dtype != "float32", cfg.runtime.zero_stage == 3
    wide, away = 4 - 2 * half, cfg.optimizer.offload and cfg.policy.device != "cpu"
    copied = 2 * count_fused_weights(model.config) if half and not sharded and uses_own_decoder(model, cfg) else 0.0
    own_masters = half or not sharded or cfg.optimizer.offload  # else the weights are the masters
    return {
        "weights": wide * p * (1 + 1 / processes if sharded else 1) + copied,
        "gradients": 4 * (REDUCE_BUCKET_ELEMENTS / 1e9 + (0.0 if away else t / processes)),
        "optimizer": 0.0 if away else (8 + 4 * own_masters) * t / processes,
        "reference": has_reference(cfg) * (wide * p / processes if sharded else (4 + 2 * half) * p),
    }


def uses_own_decoder(model: ModelFacts, cfg: Config) -> bool:
    return not predict_fallback_reason(model, cfg)


def predict_fallback_reason(model: ModelFacts, cfg: Config) -> str:
    """Why transformers will compute and not our decoder, as `Policy.fallback_reason` says once it is loaded."""
    if cfg.policy.engine == "transformers":
        return "policy.engine"
    if model.has_own_code:
        return "code of its own"
    if cfg.policy.lora:
        return "an adapter on a 4-bit base" if cfg.policy.load_in_4bit else "an adapter"
    return find_fallback_reason(model.config)


def count_fused_weights(config: Any) -> float:
    """1e9 weights of projections that our decoder joins, in a copy even where the masters have its dtype."""
    heads, key_heads, size = get_head_sizes(config)
    rows = (heads + 2 * key_heads) * size + 2 * config.intermediate_size
    return rows * config.hidden_size * config.num_hidden_layers / 1e9


def get_head_sizes(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads and head size."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def estimate_activation_bytes(config: Any, cfg: Config, own_decoder: bool) -> float:
    """Bytes that the backward pass needs of one token: of all layers, or the residual stream and one layer where they
    are recomputed. Counted for our own decoder; through transformers half as much again, as a rule of thumb.
    """
    config = config.get_text_config()
    layer, layers = estimate_layer_bytes(config, 4 if cfg.policy.dtype == "float32" else 2), config.num_hidden_layers
    kept = 4 * config.hidden_size * (layers + 1) + layer if cfg.policy.gradient_checkpointing else layer * layers
    return kept if own_decoder else 1.5 * kept


def estimate_layer_bytes(config: Any, dtype_bytes: int) -> int:
    """Bytes that one layer keeps of one token: the residual stream twice in fp32, and in `wide` bytes what its matrices
    and its attention read. Attention by operators pads rows, and there a prompt's keys and values stand once more
    beside those of each response; attention in one call, in half precision, keeps what the heads have read instead.
    """
    heads, key_heads, size = get_head_sizes(config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    normed, projected, turned = 2 * config.hidden_size, (heads + 2 * key_heads) * size, (heads + key_heads) * size
    padded = (2 * heads + 4 * key_heads) * size
    attention = projected + turned + (heads * size if dtype_bytes == 2 and size in KERNEL_HEAD_SIZES else padded)
    return 8 * config.hidden_size + dtype_bytes * (normed + attention + 3 * inner)


def estimate_kv_cache(config: Any, cfg: Config, processes: int) -> float | None:
    """GB of keys and values of the rows while they are sampled, each prompt once; None where they are unknown. The
    update needs more.
    """
    if explain_unknown_memory(config):
        return None
    config, a, s = config.get_text_config(), cfg.algorithm, cfg.sampler
    rows = min(s.rows, max(a.group_size, a.prompts_per_step * a.group_size // processes))
    tokens = rows * s.max_tokens + rows / a.group_size * ASSUMED_PROMPT_TOKENS
    _, key_heads, size = get_head_sizes(config)
    wide = 4 if cfg.policy.dtype == "float32" else 2
    return 2 * wide * tokens * config.num_hidden_layers * key_heads * size / 1e9


# ---------------------------------------------------------------- room
# How much room a run takes on its disk: while it trains, and when it is finished.


@dataclass(frozen=True)
class DiskPlan:
    """Sizes in GB. Logs come on top of them."""

    model_gb: float
    checkpoint_gb: float
    max_checkpoints: int
    """The most checkpoints that lie side by side: a new one is whole before the oldest goes."""
    final_checkpoints: int
    """The checkpoints that are left when the run is finished."""
    replaced_gb: float
    """What a resumed run has there already, and replaces."""
    free_gb: float

    @property
    def peak_gb(self) -> float:
        return self.model_gb + self.max_checkpoints * self.checkpoint_gb

    @property
    def final_gb(self) -> float:
        return self.model_gb + self.final_checkpoints * self.checkpoint_gb

    @property
    def needed_gb(self) -> float:
        """How much must be free."""
        return self.peak_gb - self.replaced_gb

    def describe(self, is_saved: bool) -> str:
        """One line. is_saved: the run writes checkpoints, and not only where it is stopped."""
        kept = {0: "the model", 1: "the model and the newest checkpoint"}.get(
            self.final_checkpoints, f"the model and {self.final_checkpoints} checkpoints"
        )
        stopped = "" if is_saved else f", {self.checkpoint_gb:.1f} more where it is stopped"
        most = f"up to {self.peak_gb:.1f} GB of {self.free_gb:.0f} GB free{stopped}"
        return f"{most}; left at the end: {self.final_gb:.1f} GB, {kept}"


def plan_disk(cfg: Config, model: ModelFacts, run_dir: Path) -> DiskPlan:
    settings, found = cfg.checkpoint, len(list_checkpoints(run_dir))
    saves = max(math.ceil(cfg.algorithm.steps / settings.every), found + (found > 0)) if settings.every else 0
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    return DiskPlan(
        model_gb=count_model_bytes(model, cfg) / 1e9,
        checkpoint_gb=count_checkpoint_bytes(model, cfg) / 1e9,
        max_checkpoints=min(settings.keep_last + 1, saves),
        final_checkpoints=min({"newest": 1, "all": settings.keep_last, "none": 0}[settings.keep_finished], saves),
        replaced_gb=count_replaced_bytes(run_dir) / 1e9,
        free_gb=shutil.disk_usage(place).free / 1e9,
    )


def count_model_bytes(model: ModelFacts, cfg: Config) -> int:
    narrow = cfg.policy.save_dtype != "float32"
    return model.parameter_count * (2 if narrow else 4) + (4 * model.trained_count if cfg.policy.lora else 0)


def count_checkpoint_bytes(model: ModelFacts, cfg: Config) -> int:
    """Bytes of a checkpoint: weights, or their masters, and two moments in fp32."""
    moving = 4 * model.parameter_count if cfg.algorithm.reference_every else 0
    return 12 * model.trained_count + moving


def count_replaced_bytes(run_dir: Path) -> int:
    """Bytes on disk that a resumed run will replace."""
    old = [*run_dir.glob("checkpoints/*/*"), *run_dir.glob("model/*"), *run_dir.glob("adapter/*")]
    return sum(os.path.getsize(path) for path in old if path.is_file())
