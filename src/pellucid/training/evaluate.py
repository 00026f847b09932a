"""Held-out accuracy and reward with intervals, from one greedy answer and k samples of each prompt."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from statistics import NormalDist, fmean, stdev
from typing import Any, Protocol, TypeVar

from pellucid.reporting.eval_metrics import MIN_INTERVAL_PROMPTS
from pellucid.types import (
    ContinuousBatchingSampler,
    Estimate,
    Evaluation,
    Group,
    Progress,
    Prompt,
    Sampler,
    Sampling,
    Task,
    grade_groups,
    rewards_are_verdicts,
)

T = TypeVar("T")

MAX_GRADED_ROWS = 128
"""How many rows are graded together, and decoded together by a sampler that does not keep rows in flight by itself.

hf is one: it draws all rows of a call from one stream of random numbers, so that parts of its own would change what a
training step draws.
"""


class ProcessGroup(Protocol):
    def shard(self, items: Sequence[Any]) -> Sequence[Any]: ...
    def gather(self, items: Sequence[Any]) -> list[Any]: ...


class SingleProcess:
    """`Shards` of a single process, which has nothing to share out."""

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        return items

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


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
    """The evaluation; the graded groups of sampling.n >= k samples each, from which mean@k and pass@k are estimated;
    and the graded greedy answers.

    `name` is what the settings call the task. With k = 0 there are greedy answers only: mean@k and pass@k are NaN.
    A prompt that no reward applies to is in no mean, as in training, and one whose deciding term returned None is in no
    accuracy; the evaluation says how many there are of each.
    """
    own = processes.shard(prompts)
    best = processes.gather(sample_and_grade(task, sampler, own, make_greedy_sampling(sampling), progress))
    groups = processes.gather(sample_and_grade(task, sampler, own, sampling, progress)) if k else []
    sampled = [group for group in groups if count_decided(group)]
    answered = [group.rewards[0] for group in best]
    answers = sorted(((prompt.key, group) for prompt, group in zip(prompts, best, strict=True)), key=itemgetter(0))
    rewards = [reward for group in (*best, *groups) for reward in group.rewards]
    evaluation = Evaluation(
        task=name,
        split=task.split,
        n=len(prompts),
        k=k,
        greedy=estimate_if_enough(estimate_share, [count_correct(group) for group in best if count_decided(group)]),
        mean_at_k=estimate_if_enough(
            estimate_share, [count_correct(group) / count_decided(group) for group in sampled]
        ),
        pass_at_k=estimate_if_enough(
            estimate_share, [compute_pass_at_k(k, sampling.n, count_correct(group)) for group in sampled]
        ),
        greedy_correct=tuple(count_correct(group) if count_decided(group) else None for _, group in answers),
        questions_digest=digest_questions([question for question, _ in answers]),
        failed=sum(reward.failed and reward.applies for reward in rewards),
        left_out=sum(not reward.applies for reward in answered),
        undecided=sum(reward.applies and not reward.is_decided for reward in answered),
        reward=estimate_mean_reward(best),
        reward_at_k=estimate_mean_reward(groups),
        rewards=tuple(compute_group_mean(group) for _, group in answers),
        has_verdicts=rewards_are_verdicts(rewards),
    )
    return evaluation, groups, best


def sample_held_out_prompts(task: Task, n: int) -> list[Prompt]:
    """Up to n different prompts of the task's split, fewer where it has fewer.

    A question that is asked with several answers in mind, as in a game, is as many prompts.
    """
    return list({(prompt.key, prompt.answer): prompt for prompt in task.sample(0, n)}.values())


def make_greedy_sampling(sampling: Sampling) -> Sampling:
    """One answer of the likeliest tokens, as long as samples may be."""
    return replace(sampling, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def sample_and_grade(
    task: Task,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    progress: Progress = Progress(),  # noqa: B008 - frozen
) -> list[Group]:
    """Graded groups of sampling.n samples each. Every call has the same random numbers: only the policy differs."""
    at_once = max(1, MAX_GRADED_ROWS // sampling.n)
    seeded = replace(sampling, seed=f"evaluate/{task.seed}")
    in_flight = isinstance(sampler, ContinuousBatchingSampler) and sampler.batches_continuously
    return [
        group
        for asked in split_into_chunks(prompts, len(prompts) if in_flight else at_once)
        for groups in split_into_chunks(sampler.generate(asked, seeded), at_once)
        for group in grade_groups(task, groups, progress)
    ]


def split_into_chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in their order, in parts of `size` of which the last may be smaller; none where there are none."""
    return [items[start : start + size] for start in range(0, len(items), max(1, size))]


def count_correct(group: Group) -> int:
    return sum(reward.is_correct for reward in group.rewards)


def count_decided(group: Group) -> int:
    """Return how many answers of a group count as right or wrong. A failed reward counts as wrong; one that does not
    apply, or whose deciding term returned None, does not count.
    """
    return sum(reward.applies and reward.is_decided for reward in group.rewards)


def compute_group_mean(group: Group) -> float:
    """The mean of the rewards of a group that have not failed; NaN where all have."""
    values = [float(reward.value) for reward in group.rewards if not reward.failed]
    return fmean(values) if values else math.nan


def estimate_mean_reward(groups: Sequence[Group]) -> Estimate:
    """The mean reward of one answer to a prompt, over the prompts of which at least one answer was graded."""
    return estimate_if_enough(
        estimate_mean, [mean for group in groups if not math.isnan(mean := compute_group_mean(group))]
    )


def digest_questions(questions: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:16]


def compute_pass_at_k(k: int, samples: int, correct: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that one of k drawn from n samples is right, unbiased for n >= k.

    Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def estimate_if_enough(estimator: Callable[[Sequence[float]], Estimate], values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt; its interval only where there are FEWEST prompts, and their values differ."""
    measured = estimator(values)
    return (
        measured if len(values) >= MIN_INTERVAL_PROMPTS and measured.low < measured.high else Estimate(measured.value)
    )


def estimate_share(values: Sequence[float]) -> Estimate:
    """The mean of one value in [0, 1] per prompt, with Wilson's 95% score interval over the prompts.

    Exact in kind for hits and misses. For shares such as mean@k, whose variance is at most that of hits and misses
    with the same mean, it is wider than need be, and unlike the usual one it does not shrink to a point at 0 and 1.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    n, p, z = len(values), fmean(values), NormalDist().inv_cdf(0.975)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, centre - reach), min(1.0, centre + reach))


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean of one value of any size per prompt, with Student's 95% interval over the prompts.

    It supposes values that are not too far from a bell curve, and shrinks to a point where they are all the same; one
    value has an interval without end.
    """
    if not values:
        return Estimate()
    mean, n = fmean(values), len(values)
    reach = compute_student_quantile(n - 1) * stdev(values, mean) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(mean, mean - reach, mean + reach)


@cache
def compute_student_quantile(freedom: int, probability: float = 0.95) -> float:
    """The t that Student's variable with these degrees of freedom stays within, -t to t, with this probability."""
    low, high = 0.0, 1.0
    while compute_student_probability(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_student_probability(middle, freedom) < probability else (low, middle)
    return high


def compute_student_probability(t: float, freedom: int) -> float:
    """The probability of -t to t: Abramowitz and Stegun 26.7.3 and 26.7.4, finite sums for whole degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
