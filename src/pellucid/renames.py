"""Accept the former names of settings in recipes, runs and command lines, and print the new ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pellucid.machine.harmless import harmless

KEYS = {("algorithm", "min_spread"): "min_reward_range"}
VALUES = {
    ("algorithm", "objective"): {
        "naive": "reinforce",
        "unclipped": "importance_weighted",
        "clipped": "ppo_clip",
        "dynamic": "dcpo",
    },
}

TRL = {
    "args": "each setting by its own name",
    "beta": "kl_coef",
    "bf16": 'dtype = "bfloat16"',
    "delta": "dual_clip",
    "epsilon": "clip_low and clip_high",
    "epsilon_high": "clip_high",
    "eval_dataset": "test_data, a file",
    "eval_steps": "evaluate.every",
    "fp16": 'dtype = "float16"',
    "gradient_accumulation_steps": "micro_batch, which bounds memory alone",
    "importance_sampling_level": 'objective = "gspo"',
    "learning_rate": "lr",
    "logging_steps": "nothing: every step is logged",
    "loss_type": "aggregate and objective",
    "lr_scheduler_type": "schedule",
    "mask_truncated_completions": "overlong_filter",
    "max_completion_length": "max_tokens",
    "max_prompt_length": "nothing: prompts are never cut",
    "max_steps": "steps",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "num_train_epochs": "steps",
    "output_dir": "run",
    "peft_config": "lora, lora_alpha and lora_targets",
    "per_device_train_batch_size": "prompts_per_step, groups a step in all",
    "processing_class": "nothing: the tokenizer is the model's",
    "report_to": "tensorboard or wandb",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "reward",
    "reward_weights": "a weight beside each reward",
    "save_steps": "checkpoint.every",
    "save_total_limit": "keep_last",
    "scale_rewards": "advantage",
    "sync_ref_model": "reference_every",
    "top_entropy_quantile": "entropy_share",
    "train_dataset": "data",
    "use_vllm": "sampler.name",
    "warmup_steps": "warmup",
}
"""The names that TRL has for settings, and what does the same here."""


def of_trl(name: str) -> str:
    """Return a hint where a name is one of TRL's; empty where it is not. Example: of_trl("learning_rate")"""
    here = TRL.get(name.replace("-", "_"))
    return f"; TRL's {name} is {here} here (docs/library.md)" if here else ""


def renamed(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the sections of a recipe with keys and values by their new names.

    Print a line for each old name, unless `source`, which says where it stands, is empty.
    """
    return {section: _section(section, keys, source) for section, keys in values.items()}


def _section(section: str, keys: Any, source: str) -> Any:
    if not isinstance(keys, Mapping):
        return keys
    now = {}
    for key, value in keys.items():
        new_key, new_value = new_names(section, key, value)
        if source and (new_key, new_value) != (key, value):
            tell(source, f'{section}.{key} = "{shown(value)}"', f'{new_key} = "{shown(new_value)}"')
        now[new_key] = new_value
    return now


def new_names(section: str, key: str, value: Any) -> tuple[str, Any]:
    """Return key and value by their new names. The value may be the words of a flag."""
    known = VALUES.get((section, key), {})
    if isinstance(value, tuple):
        value = type(value)(known.get(word, word) for word in value)
    return KEYS.get((section, key), key), known.get(value, value) if isinstance(value, str) else value


def shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def tell(source: str, old: str, new: str) -> None:
    print(harmless(f"{source}: {old} is now called {new}"), file=sys.stderr)
