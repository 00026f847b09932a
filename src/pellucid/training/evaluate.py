"""Estimates held-out accuracy and reward with intervals, from a greedy answer and k samples of each prompt."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, TypeVar

from pellucid.reporting.eval_metrics import MIN_INTERVAL_PROMPTS
from pellucid.tasks.wrappers import get_innermost_task
from pellucid.types import (
    Estimate,
    Evaluation,
    Group,
    Progress,
    Prompt,
    Sampler,
    Sampling,
    Task,
    UserError,
    grade_groups,
    rewards_are_verdicts,
)

if TYPE_CHECKING:  # it imports torch, and commands that import this module must start without
    from pellucid.distributed.process_group import ProcessGroup

T = TypeVar("T")

MAX_GRADED_ROWS = 128
"""The most rows that are graded together, and generated together by a sampler without continuous batching.

hf is such a sampler. It samples all rows of a call from one stream of random numbers, so it cannot split a call into
batches by itself without changing what a training step samples.
"""


def evaluate(
    name: str,
    task: Task,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    sampling: Sampling,
    k: int,
    processes: ProcessGroup,
    progress: Progress = Progress(),  # noqa: B008 - frozen
) -> tuple[Evaluation, list[Group], list[Group]]:
    """Evaluate the policy of a sampler on held-out prompts.

    As in training, a prompt to which no reward applies counts in no mean, and one whose deciding term returned None in
    no accuracy. The evaluation counts both.

    Args:
        name: The name of the task in the settings.
        task: Computes the rewards.
        prompts: The held-out prompts.
        sampler: Generates the answers.
        sampling: How the samples are drawn; sampling.n >= k of each prompt.
        k: The k of mean@k and pass@k. With 0 there are only greedy answers, and both are NaN.
        processes: They share the prompts.
        progress: The progress of the run, for rewards that depend on it.

    Returns:
        The evaluation, the graded groups of samples, and the graded groups of one greedy answer each.
    """
    own_prompts = processes.shard(prompts)
    greedy_groups = processes.gather(
        sample_and_grade(task, sampler, own_prompts, make_greedy_sampling(sampling), progress)
    )
    groups = processes.gather(sample_and_grade(task, sampler, own_prompts, sampling, progress)) if k else []
    decided_groups = [group for group in groups if _count_decided(group)]
    greedy_rewards = [group.rewards[0] for group in greedy_groups]
    by_key = sorted(zip((prompt.key for prompt in prompts), greedy_groups, strict=True), key=itemgetter(0))
    rewards = [reward for group in (*greedy_groups, *groups) for reward in group.rewards]
    share = partial(estimate_if_enough, estimate_share)
    evaluation = Evaluation(
        task=name,
        split=task.split,
        n=len(prompts),
        k=k,
        greedy=share(list(map(_count_correct, filter(_count_decided, greedy_groups)))),
        mean_at_k=share([_count_correct(group) / _count_decided(group) for group in decided_groups]),
        pass_at_k=share([compute_pass_at_k(k, sampling.n, _count_correct(group)) for group in decided_groups]),
        greedy_correct=tuple(_count_correct(group) if _count_decided(group) else None for _, group in by_key),
        questions_digest=digest_questions([question for question, _ in by_key]),
        failed=sum(reward.failed and reward.applies for reward in rewards),
        left_out=sum(not reward.applies for reward in greedy_rewards),
        undecided=sum(reward.applies and not reward.is_decided for reward in greedy_rewards),
        reward=_estimate_mean_reward(greedy_groups),
        reward_at_k=_estimate_mean_reward(groups),
        rewards=tuple(_compute_group_mean(group) for _, group in by_key),
        has_verdicts=rewards_are_verdicts(rewards),
    )
    return evaluation, groups, greedy_groups


def sample_held_out_prompts(task: Task, n: int) -> list[Prompt]:
    """Return up to n different prompts of the split of the task; all of them if n is 0.

    The same question with another gold answer, as in a game, is another prompt. Raise UserError if n is 0 and the task
    has no number of prompts.
    """
    sampled = task.sample(0, n or count_all_prompts(task))
    return list({(prompt.key, prompt.answer): prompt for prompt in sampled}.values())


def count_all_prompts(task: Task) -> int:
    """Return the number of prompts of the split of a task. Raise UserError if the task makes as many as are asked."""
    count = getattr(get_innermost_task(task), "question_count", None)
    if count is None:
        raise UserError(
            "evaluate.n = 0 asks all held-out prompts, and this task makes as many as it is asked for: set a number,"
            " such as evaluate.n = 100"
        )
    return count


def make_greedy_sampling(sampling: Sampling) -> Sampling:
    """Return greedy sampling of one answer, with the token limits of `sampling`."""
    return replace(sampling, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def sample_and_grade(
    task: Task,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    progress: Progress = Progress(),  # noqa: B008 - frozen
) -> list[Group]:
    """Return graded groups of sampling.n samples each. All calls use the same random numbers, so that only the policy
    makes a difference.
    """
    chunk_size = max(1, MAX_GRADED_ROWS // sampling.n)
    seeded = replace(sampling, seed=f"evaluate/{task.seed}")
    is_continuous = getattr(sampler, "batches_continuously", False)
    return [
        group
        for chunk in split_into_chunks(prompts, len(prompts) if is_continuous else chunk_size)
        for groups in split_into_chunks(sampler.generate(chunk, seeded), chunk_size)
        for group in grade_groups(task, groups, progress)
    ]


def split_into_chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return consecutive chunks of `size` items, the last of which may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), max(1, size))]


def _count_correct(group: Group) -> int:
    return sum(reward.is_correct for reward in group.rewards)


def _count_decided(group: Group) -> int:
    """Return how many answers of a group are right or wrong.

    An answer is wrong if its reward failed, and neither if no reward applies or the deciding term returned None.
    """
    return sum(reward.applies and reward.is_decided for reward in group.rewards)


def _compute_group_mean(group: Group) -> float:
    """Return the mean of the rewards of a group that have not failed; NaN if all have."""
    values = [float(reward.value) for reward in group.rewards if not reward.failed]
    return fmean(values) if values else math.nan


def _estimate_mean_reward(groups: Sequence[Group]) -> Estimate:
    """Return the mean reward over the prompts for which at least one answer was graded."""
    means = [mean for group in groups if not math.isnan(mean := _compute_group_mean(group))]
    return estimate_if_enough(estimate_mean, means)


def digest_questions(questions: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:16]


def compute_pass_at_k(k: int, samples: int, correct: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), an unbiased estimate of the probability that one of k samples is right.

    Of n = `samples` >= k samples, c = `correct` were right. Source: Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def estimate_if_enough(estimator: Callable[[Sequence[float]], Estimate], values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with an interval if there are enough prompts and their values differ."""
    estimate = estimator(values)
    has_interval = len(values) >= MIN_INTERVAL_PROMPTS and estimate.low < estimate.high
    return estimate if has_interval else Estimate(estimate.value)


def estimate_share(values: Sequence[float]) -> Estimate:
    """Return the mean of one value in [0, 1] per prompt, with Wilson's 95% score interval over the prompts.

    The interval is made for values that are 0 or 1. For shares such as mean@k, whose variance is at most that of 0/1
    values with the same mean, it is conservative. Unlike the normal interval it does not shrink to a point at 0 and 1.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    n, p, z = len(values), fmean(values), NormalDist().inv_cdf(0.975)
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, center - half_width), min(1.0, center + half_width))


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with Student's 95% interval over the prompts.

    The interval assumes values that are roughly normal. It is a point if all values are the same, and infinite for a
    single value.
    """
    if not values:
        return Estimate()
    mean, n = fmean(values), len(values)
    half_width = compute_student_quantile(n - 1) * stdev(values, mean) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(mean, mean - half_width, mean + half_width)


@cache
def compute_student_quantile(freedom: int, probability: float = 0.95) -> float:
    """Return the t for which a Student variable with these degrees of freedom is in [-t, t] with this probability."""
    low, high = 0.0, 1.0
    while _compute_student_probability(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_student_probability(middle, freedom) < probability else (low, middle)
    return high


def _compute_student_probability(t: float, freedom: int) -> float:
    """Return the probability of [-t, t] for integer degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
