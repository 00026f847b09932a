"""`pellucid export`: the model of the last checkpoint of a run, also of one that has not come to its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from pellucid import config
from pellucid.config import Config
from pellucid.distributed import sharded_checkpoint
from pellucid.policy import lora, policy
from pellucid.policy.chat_template import ChatTemplate
from pellucid.policy.policy import CPU, Policy
from pellucid.reporting import run_files
from pellucid.training import checkpoint
from pellucid.training import run_dir as claim
from pellucid.types import UserError
from pellucid.utils.text import escape_controls


def export_model(run_dir: Path, output: Path) -> int:
    """Save the model of the newest whole checkpoint in a new folder, and print where it is.

    A LoRA adapter is merged into its base and saved by itself, too, in the folder `adapter` of the model's.

    UserError where there is no checkpoint, or the folder is there already.
    """
    if not run_files.find_run_dir(str(run_dir)):
        raise UserError(f"{run_dir} is no run folder (config.json and metrics.jsonl)")
    if not run_files.list_checkpoints(run_dir):
        finished = f": its model is {run_dir / 'model'}" if (run_dir / "model").is_dir() else ""
        raise UserError(f"{run_dir} has no checkpoint to export{finished}")
    if output.exists():
        raise UserError(f"{output} is there already: name another folder with --output")
    claim.check_writable(output)
    cfg = config.load_config(run_dir / "config.json")
    tensors, facts, notes = checkpoint.load_newest_checkpoint(run_dir)
    for note in notes:
        print(escape_controls(f"! {note}"), flush=True)
    learner = load_initial_policy(cfg)
    if "policy" in facts.get("sharded", ()):
        folder = run_dir / "checkpoints" / f"step-{facts['step']:06d}"
        tensors["policy"] = sharded_checkpoint.load_shards(folder / "policy", learner.trainable())
    learner.load_trainable(tensors["policy"])
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        learner.save(partial, dtype=getattr(torch, cfg.policy.save_dtype))
        if learner.adapter:
            lora.save_adapter(learner.adapter, learner.trainable(), partial / "adapter")
        os.rename(partial, output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{output} could not be saved ({error})") from error
    print(escape_controls(f"model of step {facts['step']}: {output}"))
    return 0


def load_initial_policy(cfg: Config) -> Policy:
    """Return the policy of a run on the CPU, before its first step. A base in 4 bits is loaded whole, in fp32."""
    p = cfg.policy
    return policy.load_policy(
        p.model,
        CPU,
        torch.float32 if p.load_in_4bit or p.dtype == "auto" else getattr(torch, p.dtype),
        cfg.sampler.temperature,
        lora_rank=p.lora,
        lora_alpha=p.lora_alpha,
        lora_targets=p.lora_targets,
        template=ChatTemplate(p.template, p.template_kwargs),
        access=p.access,
    )
