"""Training that learns, ours and TRL's: the same questions, rewards, settings and seeds, graded by the same code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import turns
from accelerate.utils import set_seed
from contender_trl import Job, Laps, clock, trainer
from trl_setups import setup_of

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
"""A recipe, or a study of which `VARIANTS` says whose is whose."""
VARIANTS = {"pellucid": "prefixes", "others": "grpo_longer"}
"""With workings as prefixes of some groups; and all the same, steps, rate and room, without: TRL has no prefixes."""


def settings(task: str, peer: str, seed: int, overrides: Sequence[str] = ()) -> Config:
    """What a peer trains by."""
    path = RECIPES / TASKS[task]
    words = ["--algorithm.seed", str(seed), "--evaluate.k", "8", *overrides]
    own = (
        plan.read_study(path).variants[VARIANTS.get(peer, VARIANTS["others"])]
        if task == "two-digit"
        else config.read_settings(path)
    )
    return config.resolve_config(
        resolve_machine_settings(config.build_config(own, str(path), config.parse_setting_flags(words)))
    )


def job_settings(options: argparse.Namespace) -> Config:
    """The main job's, with the numbers that the table has."""
    sizes = {
        "algorithm.prompts-per-step": options.prompts,
        "algorithm.group-size": options.group,
        "sampler.max-tokens": options.tokens,
        "policy.model": options.model,
        "policy.device": options.device,
    }
    return settings("one-digit", "", 0, [word for key, value in sizes.items() for word in (f"--{key}", str(value))])


def composed(cfg: Config) -> tuple[Components, Config]:
    hardware.keep_freed_memory()
    set_seed(cfg.algorithm.seed)
    return build_components(cfg), cfg


def trained(parts: Components, cfg: Config) -> Iterator[StepResult]:
    """The steps of a run, without what a run writes down."""
    objects = (parts.task, parts.sampler, parts.policy, parts.runtime)
    heap = hardware.HeapTrimmer()
    for result in grpo.train(*objects, cfg.algorithm, parts.reference, parts.state, make_training_sampling(cfg)):
        heap.trim_after_step()
        yield result


def seconds_of(step: StepResult) -> dict[str, float]:
    rewards = [reward.value for group in step.groups for reward in group.rewards]
    parts = {"generate": step.metrics["time/generate"], "update": step.metrics["time/update"]}
    return {**parts, "reward": sum(rewards) / len(rewards)}


def trl_job(cfg: Config) -> Job:
    """What a recipe has TRL train."""
    task, a, o = with_split(cfg.task, "train"), cfg.algorithm, cfg.optimizer
    return Job(
        model=locate_model(cfg.policy.model),
        prompts=[p for i in range(a.steps) for p in task.sample(i, a.prompts_per_step)],
        reward=lambda prompt, completion: task.reward(prompt, completion).value,
        per_step=a.prompts_per_step,
        group=a.group_size,
        tokens=cfg.sampler.max_tokens,
        steps=a.steps,
        lr=o.lr,
        schedule=o.schedule,
        warmup=o.warmup,
        temperature=cfg.sampler.temperature,
        seed=a.seed,
        device="cpu" if cfg.policy.device in ("auto", "cpu") else cfg.policy.device,
    )


# ---------------------------------------------------------------- to held-out accuracy


def take(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """The first turn evaluates; each one after it takes `every` steps, which alone are timed, and evaluates."""
    cfg = settings(options.task, options.contender, options.seed, overrides)
    (trl_turns if options.contender.startswith("trl") else our_turns)(options, *composed(cfg))


def our_turns(options: argparse.Namespace, parts: Components, cfg: Config) -> None:
    steps = trained(parts, cfg)

    def unit(i: int) -> dict[str, float]:
        start = clock()
        for _ in range(options.every if i else 0):
            next(steps)
        return {"seconds": clock() - start, **examined(parts, cfg, i * options.every)}

    turns.take(unit, steps=cfg.algorithm.steps)


def trl_turns(options: argparse.Namespace, parts: Components, cfg: Config) -> None:
    laps, taken = Laps(), 0

    def before() -> None:
        if taken == 0:
            laps.began = clock()

    def after(model) -> bool:
        nonlocal taken
        taken += 1
        if taken % options.every == 0:
            told(clock() - laps.began, model)
        return True

    def told(seconds: float, model) -> None:
        parts.policy.update_weights(dict(model.named_parameters()), 0.0)
        turns.answer(seconds=seconds, **examined(parts, cfg, taken))
        turns.wait()
        laps.began = clock()

    made = trainer(trl_job(cfg), setup_of(options.contender), laps, before, after)
    turns.answer(ready=1, steps=cfg.algorithm.steps)
    try:
        turns.wait()
        told(0.0, made.model)
        made.train()
    except EOFError:
        return


def examined(parts: Components, cfg: Config, step: int) -> dict[str, float]:
    parts.sampler.sync(parts.policy, step)
    evaluation, _ = evaluate_policy(cfg, parts)
    return {"step": step, "mean": evaluation.mean_at_k.value, "greedy": evaluation.greedy.value, "k": evaluation.k}
