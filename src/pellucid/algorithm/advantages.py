"""How much better a completion did than others: [P, G] rewards -> [P, G] advantages, an axis of pure functions.

P is here every prompt of the step, of all processes: some members compare groups with each other. A group whose rewards
are equal says nothing about any of its completions: its advantages are exactly 0 (but for `raw` and `top`, which
compare nothing). There is no epsilon under any division: a group is dead or has a spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import UserError
from pellucid.utils.plugins import load_function


class Grades(NamedTuple):
    """What the advantages of a step are made from; float64."""

    rewards: Tensor
    """[P, G]"""
    correct: Tensor
    """[P, G] 1 where the answer counts as right, else 0; of a failed reward its siblings' mean, NaN where all did."""
    lengths: Tensor
    """[P, G] tokens."""
    parts: Tensor
    """[P, G, K] the terms of a composite reward before their weights; K = 1, the reward itself, where it has none."""
    weights: Tensor
    """[P, K] of the terms."""


def is_zero_variance(rewards: Tensor, min_reward_range: float = 0.0) -> Tensor:
    """[..., 1]: groups without signal, max - min <= spread, up to float64 rounding: 0.1 + 0.2 is the reward 0.3."""
    low, high = rewards.aminmax(dim=-1, keepdim=True)
    return high - low <= min_reward_range + 1e-9 * torch.maximum(low.abs(), high.abs())


def equalize_rewards(grades: Grades, silent: Tensor) -> Grades:
    """The groups of a mask [P, 1] with equal rewards, for members that look beyond one group."""
    means = grades.rewards.mean(-1, keepdim=True)
    return grades._replace(
        rewards=torch.where(silent, means, grades.rewards), parts=grades.parts.masked_fill(silent[:, :, None], 0.0)
    )


def subtract_mean(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)).masked_fill(is_zero_variance(rewards), 0.0)


def standardize(rewards: Tensor, correction: int = 0) -> Tensor:
    std = rewards.std(-1, correction=correction, keepdim=True)
    return subtract_mean(rewards) / std.masked_fill(is_zero_variance(rewards), 1.0)


def subtract_leave_one_out_mean(rewards: Tensor) -> Tensor:
    size = rewards.shape[-1]
    return subtract_mean(rewards) * (size / (size - 1))


# ---------------------------------------------------------------- within a group


def grpo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / std with the population std (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    return standardize(grades.rewards)


def grpo_sample_std(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / std with the sample std, as TRL has it: sqrt(1 - 1/G) times `grpo`."""
    return standardize(grades.rewards, correction=1)


def centered(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r - mean (Dr. GRPO, arXiv 2503.20783). The mean includes r itself: (1 - 1/G) of the unbiased gradient."""
    return subtract_mean(grades.rewards)


def rloo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r - mean of the others (arXiv 2402.14740), an unbiased baseline: G / (G - 1) times `centered`."""
    return subtract_leave_one_out_mean(grades.rewards)


def maxrl(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / mean (MaxRL, arXiv 2602.02710): rewards of 0 and 1 then climb log-likelihood, not accuracy.

    A group of mean 0 is dead. UserError where a reward is negative: the mean would not measure success.
    """
    if bool((grades.rewards < 0).any()):
        raise UserError('advantage = "maxrl" divides by the mean reward: give no negative rewards, or use "grpo"')
    mean = grades.rewards.mean(-1, keepdim=True)
    return subtract_mean(grades.rewards) / mean.masked_fill(is_zero_variance(grades.rewards), 1.0)


def raw_rewards(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r: no baseline, unbiased and noisy."""
    return grades.rewards


def top_rewards(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r where it is the highest of its group, ties included, else 0 (CS336, lecture 17)."""
    return grades.rewards * (grades.rewards == grades.rewards.amax(-1, keepdim=True))


def gdpo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """Each term standardised in its group, then the weighted sum, over its std in the batch (GDPO, arXiv 2601.05242).

    A term of large spread cannot drown the others, as it does where the sum is standardised. Terms that cancel, but for
    rounding, add up to 0: the std of the batch would make something of nothing.
    """
    terms = standardize(grades.parts.mT) * grades.weights[:, :, None]  # [P, K, G]
    advantages, size = terms.sum(1), terms.abs().sum(1)
    advantages = advantages.masked_fill(advantages.abs() <= 1e-9 * size, 0.0)
    std = advantages.std(correction=0)  # their mean is 0 already
    return advantages / std.masked_fill(std == 0, 1.0)


# ---------------------------------------------------------------- across groups


def batch_std(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean of the group) / std of all rewards of the step: no group is blown up for being nearly dead."""
    everything = grades.rewards.flatten()
    std = everything.std(correction=0).masked_fill(is_zero_variance(everything)[0], 1.0)
    return subtract_mean(grades.rewards) / std


def difficulty_weighted(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """`grpo` times clip(1 + mean of the batch - mean of the group, 0.5, 2): hard prompts weigh more (mathgrpo)."""
    means = grades.rewards.mean(-1, keepdim=True)
    return standardize(grades.rewards) * (1 + means.mean() - means).clamp(0.5, 2.0)


def grpo_lead(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """`grpo` times w(p) where positive and w(1 - p) where negative, p the share of right answers.

    w(p) = 0.4 + 1.1 / (1 + exp(10 (p - 0.75))) (GRPO-LEAD, arXiv 2504.09696, section 3.3).
    """
    right = grades.correct.mean(-1, keepdim=True).nan_to_num(0.5)
    advantages = standardize(grades.rewards)
    return advantages * torch.where(advantages > 0, logistic_weight(right), logistic_weight(1 - right))


def logistic_weight(p: Tensor) -> Tensor:
    return 0.4 + 1.1 * torch.sigmoid(10 * (0.75 - p))


def dgpo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / mean absolute deviation, live groups weighed by softmax(-mean / 2) (DGPO, arXiv 2601.20614).

    sum |A| of a group is then G whatever its accuracy, but for the weights, whose mean over live groups is 1.
    """
    live = ~is_zero_variance(grades.rewards)
    deviations = subtract_mean(grades.rewards)
    size = deviations.abs().mean(-1, keepdim=True).masked_fill(~live, 1.0)
    hardness = (-grades.rewards.mean(-1, keepdim=True) / 2.0).masked_fill(~live, -torch.inf)
    weights = hardness.softmax(0).nan_to_num(0.0) * live.sum()
    return weights * deviations / size


# ---------------------------------------------------------------- completions of like length


def length_grouped(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """Standardised among siblings of like length, shrunk towards the whole group.

    A cell is a quantile bucket of the lengths in one group. Its mean and std count for n / (n + length_shrinkage), the
    group's for the rest; below length_min_cell completions the group's alone. Comparing only within a cell would take
    away all credit for choosing a better length (docs/sharp-edges.md).
    """
    shorter = grades.lengths[:, None, :] < grades.lengths[:, :, None]  # [P, G, G]
    buckets = shorter.sum(-1) * cfg.length_buckets // grades.lengths.shape[-1]
    same = buckets[:, :, None] == buckets[:, None, :]
    size = same.sum(-1).double()
    share = (size / (size + cfg.length_shrinkage)).masked_fill(size < cfg.length_min_cell, 0.0)
    return standardize_within_cells(grades.rewards, same, share)


def length_grouped_literal(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """Standardised among siblings that are all short, all medium or all long (mathgrpo).

    That is below, within or above mean -+ std of the lengths of the batch.
    """
    mean, std = grades.lengths.mean(), grades.lengths.std(correction=0)
    buckets = (grades.lengths >= mean - std).long() + (grades.lengths > mean + std).long()
    same = buckets[:, :, None] == buckets[:, None, :]
    return standardize_within_cells(grades.rewards, same, torch.ones_like(grades.rewards))


def standardize_within_cells(rewards: Tensor, same: Tensor, share: Tensor) -> Tensor:
    """(r - mean) / std, both `share` of the cell's and the rest of the group's. same: [P, G, G] bool, share: [P, G]."""
    own = rewards[:, None, :].expand(same.shape)  # [P, G, G]: the siblings of each completion
    size = same.sum(-1)
    mean = (own * same).sum(-1) / size
    std = (((own - mean[:, :, None]) ** 2 * same).sum(-1) / size).sqrt()
    equal = is_zero_variance(torch.where(same, own, rewards[:, :, None]))[:, :, 0]
    std = std.masked_fill(equal, 0.0)
    group_mean, group_std = rewards.mean(-1, keepdim=True), rewards.std(-1, correction=0, keepdim=True)
    baseline = share * mean + (1 - share) * group_mean
    scale = share * std + (1 - share) * group_std
    silent = is_zero_variance(rewards) | (equal & (share == 1))
    return ((rewards - baseline) / scale.masked_fill(silent, 1.0)).masked_fill(silent, 0.0)


AdvantageFunction = Callable[[Grades, GRPOConfig], Tensor]

ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "grpo_sample_std": grpo_sample_std,
    "centered": centered,
    "rloo": rloo,
    "batch": batch_std,
    "maxrl": maxrl,
    "raw": raw_rewards,
    "top": top_rewards,
    "difficulty": difficulty_weighted,
    "lead": grpo_lead,
    "dgpo": dgpo,
    "length_grouped": length_grouped,
    "length_grouped_literal": length_grouped_literal,
    "gdpo": gdpo,
}


def get_advantage_function(name: str) -> AdvantageFunction:
    """One of ADVANTAGES, or the user's own; UserError where `file.py:function` leads to none."""
    return ADVANTAGES[name] if name in ADVANTAGES else load_function(name, "advantage")


def compute_advantages_from_grades(grades: Grades, shaped: Tensor, cfg: GRPOConfig) -> Tensor:
    """[P, G], from the task's grades of a step and the rewards [P, G] that were made of them."""
    if not cfg.min_reward_range:
        return get_advantage_function(cfg.advantage)(grades._replace(rewards=shaped), cfg)
    silent = is_zero_variance(grades.rewards, cfg.min_reward_range)
    leveled_out = equalize_rewards(grades._replace(rewards=shaped), silent)
    return get_advantage_function(cfg.advantage)(leveled_out, cfg).masked_fill(silent, 0.0)
