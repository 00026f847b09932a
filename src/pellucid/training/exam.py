"""`pellucid eval`: what a model answers to held-out questions, without training it."""

from __future__ import annotations

import rich

from pellucid.config import Config
from pellucid.machine import hardware
from pellucid.policy import policy
from pellucid.reporting.console import accuracy_table, verdict
from pellucid.tasks.wrappers import with_split
from pellucid.training import preflight
from pellucid.training.compose import evaluation_sampling, pick_sampler, sandboxed, template_of
from pellucid.training.evaluate import OneProcess, evaluate, held_out


def examine(cfg: Config, model: str, show: int) -> int:
    """Print `show` greedy answers to the task's held-out questions, and the accuracy over all."""
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    frozen = policy.load_frozen(model, device, dtype, cfg.sampler.temperature, cfg.policy.engine, template_of(cfg))
    task = sandboxed(with_split(cfg.task, "test"), cfg.reward)
    sampler, sampling, prompts = pick_sampler(cfg, frozen), evaluation_sampling(cfg), held_out(task, cfg.evaluate.n)
    sampler.sync(frozen, 0)
    evaluation, groups, best = evaluate(cfg.task_name, task, prompts, sampler, sampling, cfg.evaluate.k, OneProcess())
    for group in best[:show]:
        rich.print(verdict(group))
    preflight.refuse_failing([*best, *groups])
    rich.print(accuracy_table(model, evaluation))
    return 0
