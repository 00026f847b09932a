"""Hints for users of TRL: what its settings are called here, or why they do not exist."""

from __future__ import annotations

import re
from collections.abc import Callable

_SETTING_PLACEHOLDER = re.compile(r"\{([a-z0-9_.]+)\}")

TRL_COUNTERPARTS = {
    "activation_checkpointing": "{policy.gradient_checkpointing}",
    "adam_beta1": "the first of {optimizer.betas}",
    "adam_beta2": "the second of {optimizer.betas}",
    "adam_epsilon": "{optimizer.eps}",
    "args": "each field of it by a name of its own, such as {algorithm.steps} and {optimizer.lr}",
    "beta": '{algorithm.kl_coef}, with {algorithm.kl} "k3_weighted" and {algorithm.kl_in} "loss" for the same penalty',
    "bf16": '{policy.dtype} "bfloat16", with weights, moments and logits in fp32',
    "chat_template_kwargs": "{policy.template_kwargs}",
    "data_seed": "{task.seed}; without it the order of the rows follows {algorithm.seed}",
    "dataset_name": "{task.data}",
    "ddp_timeout": "{runtime.timeout}, in minutes",
    "deepspeed": '{runtime.engine} "deepspeed" with {runtime.zero_stage}',
    "delta": "{algorithm.dual_clip}",
    "dtype": "{policy.dtype}",
    "entropy_coef": "{algorithm.entropy_coef}",
    "environment_factory": 'task "environment" with {task.environment} "file.py:Class", the same class as in TRL',
    "epsilon": "{algorithm.clip_low}, and {algorithm.clip_high}, which does not follow it",
    "epsilon_high": "{algorithm.clip_high}",
    "eval_dataset": "{task.test_data}, a file or a split of the Hub data set; else {task.test_share} of the rows",
    "eval_delay": "{evaluate.every} alone: the policy is evaluated before step 1, then every so many steps",
    "eval_on_start": "always so: the policy is evaluated before step 1 unless {evaluate.every} is 0",
    "eval_steps": "{evaluate.every}",
    "eval_strategy": '{evaluate.every}: 0 for "no", and steps, not epochs, for the others',
    "fp16": '{policy.dtype} "float16"',
    "fsdp": '{runtime.engine} "fsdp2"',
    "fsdp_config": '{runtime.engine} "fsdp2" with {runtime.shards}',
    "full_determinism": "{policy.deterministic}",
    "generation_batch_size": "{algorithm.prompts_per_step} = generation_batch_size / num_generations",
    "gradient_accumulation_steps": "{algorithm.micro_batch}, rows in one backward pass; it bounds memory alone and"
    " changes no gradient, while {algorithm.prompts_per_step} is the batch",
    "gradient_checkpointing": "{policy.gradient_checkpointing}",
    "hub_model_id": "`pellucid push RUN USER/NAME` after training",
    "hub_private_repo": "`pellucid push RUN USER/NAME --private` after training",
    "importance_sampling_level": '{algorithm.objective} "gspo" for "sequence", and "ppo_clip" for "token"',
    "learning_rate": "{optimizer.lr}",
    "load_in_4bit": "{policy.load_in_4bit} with {policy.lora}",
    "log_completions": "{log.rollouts}: completions are in rollouts.jsonl and report.html of the run",
    "log_completions_hub_repo": "{log.rollouts}, in the run folder; `huggingface-cli upload` brings them to the Hub",
    "logging_steps": "nothing to set: every step is logged",
    "lora_alpha": "{policy.lora_alpha}",
    "lora_r": "{policy.lora}",
    "lora_target_modules": "{policy.lora_targets}",
    "loss_type": '{algorithm.aggregate} "sequence" for "grpo", "token" for "dapo", "constant" for "dr_grpo"; and'
    ' {algorithm.objective} "cispo", "sapo" or "gspo" for the losses of these names',
    "lr_scheduler_type": "{optimizer.schedule}",
    "mask_truncated_completions": "{algorithm.overlong_filter}",
    "max_completion_length": "{sampler.max_tokens}",
    "max_grad_norm": "{optimizer.max_grad_norm}",
    "max_steps": "{algorithm.steps}, which counts generations: max_steps is {algorithm.steps} * {algorithm.epochs} *"
    " {algorithm.minibatches}",
    "max_tool_calling_iterations": "{sampler.turns}, the turns of the policy, one more than its rounds of calls",
    "min_p": "{sampler.min_p}",
    "model": "{policy.model}",
    "model_init_kwargs": "{policy.dtype}, {policy.revision} and {policy.trust_remote_code}; attention needs no choice",
    "model_name_or_path": "{policy.model}",
    "multi_objective_aggregation": '{algorithm.advantage} "gdpo" for "normalize_then_sum"',
    "num_completions_to_print": "{log.traces}: report.html shows the best and the worst",
    "num_generations": "{algorithm.group_size}",
    "num_generations_eval": "{evaluate.k}, samples beside the greedy answer",
    "num_iterations": "{algorithm.epochs}",
    "num_train_epochs": "{algorithm.steps} = num_train_epochs * rows / {algorithm.prompts_per_step}",
    "off_policy_mask_threshold": '{algorithm.correction} "geometric" with {algorithm.correction_cap}, which leaves out'
    " sequences of either sign",
    "output_dir": "{run}",
    "peft_config": "{policy.lora} (the rank), {policy.lora_alpha} and {policy.lora_targets}",
    "per_device_eval_batch_size": "{sampler.rows}, completions that are decoded at once",
    "per_device_train_batch_size": "{algorithm.prompts_per_step} = per_device_train_batch_size *"
    " gradient_accumulation_steps * devices / num_generations; {algorithm.micro_batch} bounds memory",
    "project": "{log.project}",
    "push_to_hub": "`pellucid push RUN USER/NAME` after training",
    "quantization_config": "{policy.load_in_4bit} with {policy.lora}",
    "ref_model_mixup_alpha": "1 - {algorithm.reference_decay}",
    "ref_model_sync_steps": "{algorithm.reference_every}",
    "report_to": '{log.tensorboard}, or {log.wandb} "online"',
    "resume_from_checkpoint": "{resume}, the run folder",
    "reward_funcs": "{task.rewards}",
    "reward_weights": "a weight beside each of {task.rewards}",
    "rollout_func": 'task "environment" for turns and tools, task "agent" for a loop of your own',
    "run_name": "the name of the folder {run}",
    "sapo_temperature_neg": "the second of {algorithm.soft_temperature}",
    "sapo_temperature_pos": "the first of {algorithm.soft_temperature}",
    "save_steps": "{checkpoint.every}",
    "save_strategy": '{checkpoint.every}: 0 for "no", and steps, not epochs, for the others',
    "save_total_limit": "{checkpoint.keep_last}",
    "scale_rewards": '{algorithm.advantage} "grpo_sample_std" for "group", "batch" for "batch", "centered" for "none"',
    "seed": "{algorithm.seed}",
    "steps_per_generation": "{algorithm.minibatches} = steps_per_generation / gradient_accumulation_steps, by which"
    " {algorithm.prompts_per_step} is multiplied",
    "sync_ref_model": "{algorithm.reference_every}",
    "temperature": "{sampler.temperature}",
    "tools": 'task "environment" with {task.tools}, names of functions such as "tools.py:search"',
    "top_entropy_quantile": "{algorithm.entropy_share}",
    "top_k": "{sampler.top_k}",
    "top_p": "{sampler.top_p}",
    "torch_compile": '{policy.engine} "compiled"',
    "torch_dtype": "{policy.dtype}",
    "train_dataset": "{task.data}",
    "trust_remote_code": "{policy.trust_remote_code}",
    "use_bias_correction_kl": '{algorithm.kl} "k3_weighted" for True and "k3" for False, with {algorithm.kl_in} "loss"',
    "use_cpu": '{policy.device} "cpu"',
    "use_peft": "{policy.lora}, the rank of the adapter",
    "use_vllm": '{sampler.name} "vllm"; the default "native" needs no other library',
    "vllm_importance_sampling_correction": '{algorithm.correction}, "token" with vLLM unless it is stated',
    "vllm_importance_sampling_mode": '{algorithm.correction} "token" for "token_truncate", "sequence" for'
    ' "sequence_mask"',
    "vllm_mode": '{sampler.urls} for "server"; {sampler.name} "vllm" alone for "colocate"',
    "vllm_server_timeout": "{sampler.timeout}",
    "warmup_ratio": "{optimizer.warmup} = warmup_ratio * {algorithm.steps}",
    "warmup_steps": "{optimizer.warmup}",
    "weight_decay": "{optimizer.weight_decay}",
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "vllm_server_port"), "{sampler.urls}"),
    **dict.fromkeys(
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"), "{algorithm.correction_cap}"
    ),
    "vllm_gpu_memory_utilization": "{sampler.cache_gb}, in GB",
}
"""Settings of TRL and its scripts, and what does the same here. {section.key} is a setting of this package."""

READ_OUTPUTS_ADVICE = "a loop over `pellucid.train` has each step, and metrics.jsonl has every number"
LEAVE_OUT_ADVICE = "leave it out"
TRL_WITHOUT_COUNTERPART = {
    "attn_implementation": ("attention is by our decoder, or by what transformers picks", LEAVE_OUT_ADVICE),
    "average_tokens_across_devices": ("the loss always divides by the tokens of all devices", LEAVE_OUT_ADVICE),
    "auto_find_batch_size": (
        "memory is planned before a run",
        "`pellucid doctor --plan RECIPE` names the {algorithm.micro_batch} that fits",
    ),
    "callbacks": ("no hooks are called", READ_OUTPUTS_ADVICE),
    "cast_lm_head_to_fp32": ("logits are always reduced in fp32", LEAVE_OUT_ADVICE),
    "disable_dropout": ("dropout is always off, in sampling and in the update", LEAVE_OUT_ADVICE),
    "enable_jit_checkpoint": ("a run always saves its state at SIGTERM", LEAVE_OUT_ADVICE),
    "generation_kwargs": (
        "the distribution that is sampled from must be the one that is trained",
        "{sampler.temperature}, {sampler.top_k}, {sampler.top_p} and {sampler.min_p} are read by both",
    ),
    "hub_strategy": ("nothing is uploaded while a run trains", "`pellucid push RUN USER/NAME` afterwards"),
    "label_smoothing_factor": ("GRPO has no labels", LEAVE_OUT_ADVICE),
    "load_best_model_at_end": (
        "choosing the best of many evaluations overstates it",
        'keep {checkpoint.keep_finished} "all", and evaluate on other questions',
    ),
    "max_prompt_length": ("prompts are never cut", "a row that is too long is refused with its name"),
    "metric_for_best_model": (
        "choosing the best of many evaluations overstates it",
        'keep {checkpoint.keep_finished} "all", and evaluate on other questions',
    ),
    "neftune_noise_alpha": ("with noise, the policy that is updated is not the one that sampled", LEAVE_OUT_ADVICE),
    "optim": (
        "the optimizer is AdamW on fp32 weights",
        "{optimizer.betas}, {optimizer.eps}, {optimizer.weight_decay} and {optimizer.offload} are its settings;"
        " examples/own_loop.py has a loop with any other",
    ),
    "optimizers": ("the optimizer is AdamW on fp32 weights", "examples/own_loop.py has a loop with any other"),
    "processing_class": (
        "the tokenizer is that of the model, so that both fit",
        "{policy.template} and {policy.template_kwargs} change its chat template",
    ),
    "lora_dropout": (
        "dropout would make the policy that is updated differ from the one that sampled",
        LEAVE_OUT_ADVICE,
    ),
    "repetition_penalty": (
        "log-probs of the update would not be of the distribution that was sampled from",
        "a term of {task.rewards} can punish repetition",
    ),
    "reward_processing_classes": (
        "a reward model is read with its own tokenizer",
        '{task.rewards} "model:FOLDER_OR_HUB_ID" names one',
    ),
    "router_aux_loss_coef": (
        "the loss is that of the policy, by which routers are trained, too",
        'a function of your own may be {algorithm.objective} "file.py:function"',
    ),
    "save_only_model": (
        "a checkpoint without the optimizer could not be resumed to the same numbers",
        "{checkpoint.every} 0 saves the final model alone",
    ),
    "shuffle_dataset": (
        "each pass over the rows is a new shuffle, so that a resumed run needs no replay",
        "a task of your own may ask in any order",
    ),
    "train_sampling_strategy": (
        "each pass over the rows is a new shuffle",
        'task "curriculum" orders questions by difficulty; a task of your own may ask in any order',
    ),
    "vllm_structured_outputs_regex": (
        "constrained decoding changes the distribution that is trained",
        '{task.rewards} "regex" rewards the form',
    ),
    "vllm_tensor_parallel_size": (
        "vLLM samples on one device of a run",
        "{sampler.urls} may be several servers, one a device",
    ),
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ("layers are recomputed one by one", "{policy.gradient_checkpointing} turns it on"),
    ),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), ("evaluation is in the dtype of training", "{policy.dtype}")),
    **dict.fromkeys(("tf32", "torch_empty_cache_steps"), ("it is left to torch", "torch's own switches hold here too")),
    **dict.fromkeys(
        ("torch_compile_backend", "torch_compile_mode"),
        ("one way of compiling is tried and tested", '{policy.engine} "compiled" is that'),
    ),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        ("log-probs are always computed in chunks, without all logits in memory", LEAVE_OUT_ADVICE),
    ),
    **dict.fromkeys(
        (
            "use_cache",
            "cache_implementation",
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "use_transformers_paged",
        ),
        ("the native sampler keeps keys and values and fills freed rows by itself", "{sampler.rows} bounds it"),
    ),
    **dict.fromkeys(
        (
            "logging_strategy",
            "logging_first_step",
            "log_on_each_node",
            "logging_nan_inf_filter",
            "include_num_input_tokens_seen",
            "log_unique_prompts",
        ),
        ("every step is logged once, as it is", "metrics.jsonl and rollouts.jsonl of the run can be filtered"),
    ),
    **dict.fromkeys(
        ("log_level", "log_level_replica", "disable_tqdm", "debug"),
        ("a run prints a line a step, or one live display in a terminal", "redirect its output to silence it"),
    ),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        ("there is no logger for Trackio", '{log.tensorboard} or {log.wandb} "online"'),
    ),
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "label_names",
            "do_train",
            "do_eval",
            "do_predict",
        ),
        (
            "evaluation samples answers and grades them; it computes no loss",
            "{evaluate.n} and {evaluate.k} size it, and `pellucid eval` evaluates alone",
        ),
    ),
    **dict.fromkeys(
        ("save_on_each_node", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        ("a resumed run always goes on to the same numbers, from the first process's folder", "{resume}"),
    ),
    **dict.fromkeys(
        ("hub_token", "hub_always_push", "hub_revision"),
        ("nothing is uploaded while a run trains", "`hf auth login`, then `pellucid push RUN USER/NAME`"),
    ),
    **dict.fromkeys(("greater_is_better",), ("no model is chosen by a metric", "`pellucid compare` compares runs")),
    **dict.fromkeys(
        ("optim_args", "optim_target_modules", "lr_scheduler_kwargs"),
        ("the optimizer is AdamW, its schedule constant, linear or cosine", "{optimizer.schedule} and {optimizer.lr}"),
    ),
    **dict.fromkeys(
        (
            "accelerator_config",
            "parallelism_config",
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ds3_gather_for_generation",
            "local_rank",
        ),
        ("processes are set up by the engine", "{runtime.engine}, and torchrun or accelerate launch start them"),
    ),
    **dict.fromkeys(
        (
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
        ),
        ("rows are read on demand, without loader processes", LEAVE_OUT_ADVICE),
    ),
    "remove_unused_columns": ("reward functions are given every column", LEAVE_OUT_ADVICE),
    "length_column_name": ("batches are not sorted by length, and nothing is padded for them", LEAVE_OUT_ADVICE),
    "pad_to_multiple_of": ("rows are packed without padding where our decoder computes", LEAVE_OUT_ADVICE),
    "skip_memory_metrics": ("memory is logged at no cost, as memory/peak_gb", LEAVE_OUT_ADVICE),
    "log_multimodal": ("models read text alone", LEAVE_OUT_ADVICE),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        ("there is no VESPO", 'a function of your own may be {algorithm.objective} "file.py:function"'),
    ),
    **dict.fromkeys(
        (
            "use_adaptive_entropy",
            "entropy_coef_min",
            "entropy_coef_max",
            "entropy_coef_delta",
            "entropy_target",
        ),
        ("the entropy bonus has a constant weight", "{algorithm.entropy_coef}"),
    ),
    **dict.fromkeys(
        ("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_group_port", "vllm_max_model_length"),
        (
            "the run sizes and starts vLLM by itself",
            "{sampler.cache_gb}; `pellucid sampler` starts a server of its own",
        ),
    ),
    "vllm_importance_sampling_clip_min": (
        "ratios are bounded from above alone",
        '{algorithm.correction_cap}; {algorithm.correction} "geometric" also leaves out those that are too small',
    ),
}
"""Settings of TRL without a counterpart: why there is none, and what to do instead."""


def _format_setting_key(setting: str) -> str:
    """Return a setting as recipes have it. A name without a section, such as `run`, is an option of the command."""
    return setting if "." in setting else f"--{setting}"


def explain_trl_name(name: str, format_key: Callable[[str], str] = _format_setting_key) -> str:
    """Return a hint if a name is the name of a setting of TRL, such as "learning_rate"; else an empty text.

    Args:
        name: The unknown name.
        format_key: Writes a setting of ours, such as "optimizer.lr", as the reader of the hint would.
    """
    key = name.replace("-", "_")
    if key in TRL_COUNTERPARTS:
        return f"; TRL's {key} is here {_fill_placeholders(TRL_COUNTERPARTS[key], format_key)} (docs/library.md)"
    if key in TRL_WITHOUT_COUNTERPART:
        reason, advice = (_fill_placeholders(text, format_key) for text in TRL_WITHOUT_COUNTERPART[key])
        return f"; TRL's {key} has no counterpart, as {reason}: {advice} (docs/library.md)"
    return ""


def _fill_placeholders(text: str, format_key: Callable[[str], str]) -> str:
    return _SETTING_PLACEHOLDER.sub(lambda match: format_key(match[1]), text)
