"""Trains a recipe with Pellucid or TRL, and evaluates both on held-out problems with the same code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import turns
from accelerate.utils import set_seed
from contender_trl import Job, StepRecord, make_trainer, read_clock
from trl_setups import get_setup

from pellucid import config
from pellucid.algorithm import grpo
from pellucid.algorithm.grpo import StepResult
from pellucid.config import Config
from pellucid.policy.load import locate_model
from pellucid.study import plan
from pellucid.training.build import Components, build_components, make_training_sampling, resolve_machine_settings
from pellucid.training.run import evaluate_policy
from pellucid.types import with_split
from pellucid.utils import hardware

RECIPES = Path(__file__).parents[1] / "recipes"
TASKS = {"one-digit": "arithmetic.toml", "two-digit": "study/off_the_floor.toml"}
"""The recipe of each task. For two digits it is a study, of which VARIANTS selects a variant."""
VARIANTS = {"pellucid": "prefixes", "others": "grpo_longer"}
"""The variant of each peer. TRL has no prefixes, so the others train with the same settings, but without them."""


def make_config(task: str, peer: str, seed: int, overrides: Sequence[str] = ()) -> Config:
    """Return the settings with which a peer trains a task."""
    path = RECIPES / TASKS[task]
    flags = config.parse_setting_flags(["--algorithm.seed", str(seed), "--evaluate.k", "8", *overrides])
    if task == "two-digit":
        settings = plan.read_study(path).variants[VARIANTS.get(peer, VARIANTS["others"])]
    else:
        settings = config.read_settings(path)
    return config.resolve_config(resolve_machine_settings(config.build_config(settings, str(path), flags)))


def make_job_config(options: argparse.Namespace) -> Config:
    """Return the settings of `make train`, with the sizes that the options name."""
    sizes = {
        "algorithm.prompts-per-step": options.prompts,
        "algorithm.group-size": options.group,
        "sampler.max-tokens": options.tokens,
        "policy.model": options.model,
        "policy.device": options.device,
    }
    return make_config("one-digit", "", 0, [word for key, value in sizes.items() for word in (f"--{key}", str(value))])


def build_parts(cfg: Config) -> Components:
    hardware.keep_freed_memory()
    set_seed(cfg.algorithm.seed)
    return build_components(cfg)


def train(parts: Components, cfg: Config) -> Iterator[StepResult]:
    """Train like `pellucid train`, but write no files."""
    objects = (parts.task, parts.sampler, parts.policy, parts.runtime)
    heap = hardware.HeapTrimmer()
    for result in grpo.train(*objects, cfg.algorithm, parts.reference, parts.state, make_training_sampling(cfg)):
        heap.trim_after_step()
        yield result


def summarize_step(step: StepResult) -> dict[str, float]:
    """Return the seconds of generation and of the update, and the mean reward."""
    rewards = [reward.value for group in step.groups for reward in group.rewards]
    parts = {"generate": step.metrics["time/generate"], "update": step.metrics["time/update"]}
    return {**parts, "reward": sum(rewards) / len(rewards)}


def make_trl_job(cfg: Config) -> Job:
    """Return TRL's job for the settings of a recipe."""
    task, a, o = with_split(cfg.task, "train"), cfg.algorithm, cfg.optimizer
    return Job(
        model=locate_model(cfg.policy.model),
        prompts=[p for i in range(a.steps) for p in task.sample(i, a.prompts_per_step)],
        reward=lambda prompt, completion: task.reward(prompt, completion).value,
        prompts_per_step=a.prompts_per_step,
        group_size=a.group_size,
        max_tokens=cfg.sampler.max_tokens,
        steps=a.steps,
        lr=o.lr,
        schedule=o.schedule,
        warmup=o.warmup,
        temperature=cfg.sampler.temperature,
        seed=a.seed,
        device="cpu" if cfg.policy.device in ("auto", "cpu") else cfg.policy.device,
    )


# ---------------------------------------------------------------- held-out accuracy


def run_accuracy(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Evaluate in the first turn. In each later turn train `every` steps, whose seconds are reported, and evaluate."""
    cfg = make_config(options.task, options.contender, options.seed, overrides)
    run = run_trl if options.contender.startswith("trl") else run_pellucid
    run(options, build_parts(cfg), cfg)


def run_pellucid(options: argparse.Namespace, parts: Components, cfg: Config) -> None:
    steps = train(parts, cfg)

    def run_unit(i: int) -> dict[str, float]:
        start = read_clock()
        for _ in range(options.every if i else 0):
            next(steps)
        return {"seconds": read_clock() - start, **evaluate(parts, cfg, i * options.every)}

    turns.take_turns(run_unit, steps=cfg.algorithm.steps)


def run_trl(options: argparse.Namespace, parts: Components, cfg: Config) -> None:
    record, steps = StepRecord(), 0

    def start_step() -> None:
        if steps == 0:
            record.start = read_clock()

    def finish_step(model) -> bool:
        nonlocal steps
        steps += 1
        if steps % options.every == 0:
            report_evaluation(read_clock() - record.start, model)
        return True

    def report_evaluation(seconds: float, model) -> None:
        parts.policy.update_weights(dict(model.named_parameters()), 0.0)
        turns.send_answer(seconds=seconds, **evaluate(parts, cfg, steps))
        turns.wait_for_turn()
        record.start = read_clock()

    trainer = make_trainer(make_trl_job(cfg), get_setup(options.contender), record, start_step, finish_step)
    turns.send_answer(ready=1, steps=cfg.algorithm.steps)
    try:
        turns.wait_for_turn()
        report_evaluation(0.0, trainer.model)
        trainer.train()
    except EOFError:
        return


def evaluate(parts: Components, cfg: Config, step: int) -> dict[str, float]:
    parts.sampler.sync(parts.policy, step)
    evaluation, _ = evaluate_policy(cfg, parts)
    return {"step": step, "mean": evaluation.mean_at_k.value, "greedy": evaluation.greedy.value, "k": evaluation.k}
