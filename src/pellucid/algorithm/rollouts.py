"""The first two stages of a step: the sampler generates completions, and the task grades them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pellucid.algorithm.advantages import is_zero_variance
from pellucid.algorithm.batch import collect_task_rewards
from pellucid.algorithm.metrics import StageClock, compute_sampling_metrics
from pellucid.algorithm.protocols import Policy, Runtime
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import (
    ROUND_STRIDE,
    DataError,
    Group,
    Progress,
    Prompt,
    Sampler,
    Sampling,
    Task,
    as_stateful_task,
    get_equal_rewards,
    grade_groups,
)

Rollouts = tuple[Sequence[Group], dict[str, float]]
"""This process's share of the graded groups of one step, and metrics of how they were generated."""


@dataclass
class RolloutCollector:
    """Generates the rollouts of a step when the step begins. async_grpo.py generates them one step ahead."""

    task: Task
    sampler: Sampler
    sampling: Sampling
    runtime: Runtime

    def collect(self, step: int, cfg: GRPOConfig, clock: StageClock) -> Rollouts:
        """Return the rollouts to train on in this step."""
        return collect_rollouts(self.task, self.sampler, self.sampling, self.runtime, step, cfg, clock)

    def sync_sampler(self, policy: Policy, version: int, clock: StageClock) -> None:
        """Give the sampler the updated weights."""
        self.sampler.sync(policy, version)
        clock.record_lap("update")


def collect_rollouts(
    task: Task, sampler: Sampler, sampling: Sampling, runtime: Runtime, step: int, cfg: GRPOConfig, clock: StageClock
) -> Rollouts:
    """Generate and grade the groups of one step.

    With cfg.max_rounds > 1 (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2), more prompts are sampled until
    enough groups have rewards that differ. Round r takes the prompts of step + r * ROUND_STRIDE. If there are
    too few after the last round, zero-variance groups fill the batch.
    """
    useful: list[Group] = []  # both lists hold groups of all processes; spare groups have zero variance
    spare: list[Group] = []
    for round_index in range(cfg.max_rounds):
        prompts = task.sample(step + round_index * ROUND_STRIDE, cfg.prompts_per_step)
        prompts = prompts[: count_missing_prompts(len(useful), len(spare), runtime.world_size, cfg)]
        seed = f"{cfg.seed}/{step}/{round_index}" if round_index else f"{cfg.seed}/{step}"
        groups = generate_groups(sampler, runtime, prompts, replace(sampling, n=cfg.group_size, seed=seed))
        clock.record_lap("generate")
        groups = grade_groups(task, groups, Progress(step, cfg.steps, cfg.prompts_per_step))
        clock.record_lap("reward")
        if cfg.max_rounds == 1:
            return groups, notify_stateful_task(task, step, groups, runtime, cfg)
        for group in runtime.gather(groups):
            is_spare = bool(is_zero_variance(collect_task_rewards([group]), cfg.min_reward_range))
            (spare if is_spare else useful).append(group)
        if len(useful) >= cfg.prompts_per_step:
            break
    generated = useful + spare
    metrics = compute_sampling_metrics(generated, len(spare))
    metrics |= notify_stateful_task(task, step, runtime.shard(generated), runtime, cfg)
    return runtime.shard(generated[: cfg.prompts_per_step]), metrics


def count_missing_prompts(useful: int, spare: int, world_size: int, cfg: GRPOConfig) -> int:
    """Return how many prompts to sample next, from the number of missing groups and the share of useful ones so far."""
    missing = cfg.prompts_per_step - useful
    expected = math.ceil(missing * (useful + spare) / max(useful, 1)) if useful + spare else missing
    return min(cfg.prompts_per_step, math.ceil(expected / world_size) * world_size)


def generate_groups(
    sampler: Sampler, runtime: Runtime, prompts: Sequence[Prompt], sampling: Sampling
) -> Sequence[Group]:
    """Generate the completions of this process's share of the prompts.

    A DataError of one process is raised in all, so that they can end the step and save the run together.
    """
    groups, errors = list[Group](), list[str]()
    try:
        groups = sampler.generate(runtime.shard(prompts), sampling)
    except DataError as error:
        if runtime.world_size == 1:
            raise
        errors = [str(error)]
    if runtime.world_size > 1 and (errors := runtime.gather(errors)):
        raise DataError(errors[0])
    return groups


def notify_stateful_task(
    task: Task, step: int, groups: Sequence[Group], runtime: Runtime, cfg: GRPOConfig
) -> dict[str, float]:
    """Pass the groups of all processes to the stateful task of this process. Return the task's metrics."""
    stateful_task = as_stateful_task(task)
    if not stateful_task:
        return {}
    all_groups = [
        replace(group, is_zero_variance=bool(get_equal_rewards(group, cfg.min_reward_range)))
        for group in runtime.gather(groups)
    ]
    return dict(stateful_task.observe(step, all_groups))
