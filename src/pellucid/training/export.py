"""`pellucid export`: saves the model of the last checkpoint of a run, which need not be finished."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from pellucid.config import Config, load_config
from pellucid.distributed.sharded_checkpoint import load_shards
from pellucid.policy.lora import save_adapter
from pellucid.policy.policy import CPU, Policy, load_policy
from pellucid.reporting.run_files import find_run_dir, list_checkpoints
from pellucid.training.build import make_template
from pellucid.training.checkpoint import get_checkpoint_dir, load_newest_checkpoint
from pellucid.training.run_dir import check_writable
from pellucid.types import UserError
from pellucid.utils.text import escape_controls, print_notes


def export_model(run_dir: Path, output: Path) -> int:
    """Save the model of the newest undamaged checkpoint in a new folder, and print the path. Return the exit status, 0.

    A LoRA adapter is merged into its base, and is also saved by itself in the subfolder `adapter/`.
    """
    if not find_run_dir(str(run_dir)):
        raise UserError(f"{run_dir} is not a run folder: it needs config.json and metrics.jsonl")
    if not list_checkpoints(run_dir):
        finished = f": its model is {run_dir / 'model'}" if (run_dir / "model").is_dir() else ""
        raise UserError(f"{run_dir} has no checkpoint to export{finished}")
    if output.exists():
        raise UserError(f"{output} already exists: name another folder with --output")
    check_writable(output)
    cfg = load_config(run_dir / "config.json")
    tensors, facts, notes = load_newest_checkpoint(run_dir)
    print_notes(*notes)
    learner = _load_initial_policy(cfg)
    if "policy" in facts.get("sharded", ()):
        folder = get_checkpoint_dir(run_dir, facts["step"]) / "policy"
        tensors["policy"] = load_shards(folder, learner.trainable())
    learner.load_trainable(tensors["policy"])
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        learner.save(partial, dtype=getattr(torch, cfg.policy.save_dtype))
        if learner.adapter:
            save_adapter(learner.adapter, learner.trainable(), partial / "adapter")
        os.rename(partial, output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{output} could not be saved ({error})") from error
    print(escape_controls(f"model of step {facts['step']}: {output}"))
    return 0


def _load_initial_policy(cfg: Config) -> Policy:
    """Return the policy of a run before its first step, on the CPU. A 4-bit base is loaded in fp32."""
    p = cfg.policy
    return load_policy(
        p.model,
        CPU,
        torch.float32 if p.load_in_4bit or p.dtype == "auto" else getattr(torch, p.dtype),
        cfg.sampler.temperature,
        lora_rank=p.lora,
        lora_alpha=p.lora_alpha,
        lora_targets=p.lora_targets,
        template=make_template(p),
        access=p.access,
    )
