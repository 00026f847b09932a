"""Advantages: how much better a completion is than its siblings.

Each advantage is a pure function of the `Grades` of a step and the settings, and returns a [P, G] float64 tensor. P is
the number of prompts of all processes, since some functions compare groups with each other. In a zero-variance group,
all rewards are equal and all advantages are exactly 0, except for "raw" and "top", which have no baseline. Divisions
need no epsilon, since zero-variance groups are handled separately.

Notation: r is the reward of a completion, mean and std are those of its group.
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
    """The inputs from which the advantages of a step are computed, in float64."""

    rewards: Tensor
    """[P, G]"""
    correct: Tensor
    """[P, G] 1 if the answer counts as right, else 0. For a failed reward it is the mean of the siblings, or NaN if all
    rewards of the group failed."""
    lengths: Tensor
    """[P, G] in tokens."""
    parts: Tensor
    """[P, G, K] the terms of a composite reward before weighting. A reward without terms is the only term, K = 1."""
    weights: Tensor
    """[P, K] the weight of each term."""


_AdvantageFunction = Callable[[Grades, GRPOConfig], Tensor]


# ---------------------------------------------------------------- building blocks


def is_zero_variance(rewards: Tensor, min_reward_range: float = 0.0) -> Tensor:
    """Find the groups of rewards [..., G] that are all equal: max - min <= min_reward_range. [..., 1] bool

    Float64 rounding errors are ignored: 0.1 + 0.2 counts as equal to 0.3.
    """
    low, high = rewards.aminmax(dim=-1, keepdim=True)
    return high - low <= min_reward_range + 1e-9 * torch.maximum(low.abs(), high.abs())


def subtract_mean(rewards: Tensor) -> Tensor:
    """r - mean, exactly 0 in zero-variance groups. [..., G]"""
    return (rewards - rewards.mean(-1, keepdim=True)).masked_fill(is_zero_variance(rewards), 0.0)


def subtract_leave_one_out_mean(rewards: Tensor) -> Tensor:
    """r - mean of the siblings without r itself. [..., G]"""
    size = rewards.shape[-1]
    return subtract_mean(rewards) * (size / (size - 1))


def standardize(rewards: Tensor, correction: int = 0) -> Tensor:
    """(r - mean) / std; correction = 0 is the population std, 1 the sample std. [..., G]"""
    std = rewards.std(-1, correction=correction, keepdim=True)
    return subtract_mean(rewards) / std.masked_fill(is_zero_variance(rewards), 1.0)


def equalize_rewards(grades: Grades, has_zero_variance: Tensor) -> Grades:
    """Set the rewards of groups with `has_zero_variance` [P, 1] bool to their mean, and their parts to 0.

    Functions that compare groups with each other then see groups without differences.
    """
    means = grades.rewards.mean(-1, keepdim=True)
    return grades._replace(
        rewards=torch.where(has_zero_variance, means, grades.rewards),
        parts=grades.parts.masked_fill(has_zero_variance[:, :, None], 0.0),
    )


# ---------------------------------------------------------------- within a group


def grpo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / std, with the population std (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    return standardize(grades.rewards)


def grpo_sample_std(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / std, with the sample std: sqrt(1 - 1/G) times `grpo` (TRL's GRPOTrainer)."""
    return standardize(grades.rewards, correction=1)


def centered(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r - mean (Dr. GRPO, arXiv 2503.20783).

    The mean includes r itself, so the expected gradient is 1 - 1/G times the unbiased one.
    """
    return subtract_mean(grades.rewards)


def rloo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r - mean of the siblings, an unbiased baseline: G / (G - 1) times `centered` (RLOO, arXiv 2402.14740)."""
    return subtract_leave_one_out_mean(grades.rewards)


def maxrl(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / mean, and 0 in groups of mean 0 (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1, the gradient is that of the log-likelihood, not of the accuracy. Raises UserError if a
    reward is negative, since the mean then does not measure success.
    """
    if bool((grades.rewards < 0).any()):
        raise UserError('advantage = "maxrl" divides by the mean reward: give no negative rewards, or use "grpo"')
    mean = grades.rewards.mean(-1, keepdim=True)
    return subtract_mean(grades.rewards) / mean.masked_fill(is_zero_variance(grades.rewards), 1.0)


def raw_rewards(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r, without a baseline: unbiased and noisy (REINFORCE, R. J. Williams, 1992).

    Zero-variance groups are not 0.
    """
    return grades.rewards


def top_rewards(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """r where it is the highest of its group, ties included, else 0 (Stanford CS336, lecture 17).

    Zero-variance groups are not 0.
    """
    return grades.rewards * (grades.rewards == grades.rewards.amax(-1, keepdim=True))


def gdpo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """Standardize each reward term in its group, add them up and standardize the sums (GDPO, arXiv 2601.05242).

    The sums are divided by the std of the batch. A term with a large spread cannot dominate the others, as it would if
    their sum were standardized. If terms cancel up to rounding errors, their sum is set to exactly 0, since dividing by
    the std of the batch would magnify them.
    """
    terms = standardize(grades.parts.mT) * grades.weights[:, :, None]  # [P, K, G]
    advantages, size = terms.sum(1), terms.abs().sum(1)
    advantages = advantages.masked_fill(advantages.abs() <= 1e-9 * size, 0.0)
    std = advantages.std(correction=0)  # their mean is 0 already
    return advantages / std.masked_fill(std == 0, 1.0)


# ---------------------------------------------------------------- across groups


def batch_std(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / std of all rewards of the step (TRL's GRPOTrainer, scale_rewards = "batch", with the sample std).

    Groups of little variance are not magnified.
    """
    all_rewards = grades.rewards.flatten()
    std = all_rewards.std(correction=0).masked_fill(is_zero_variance(all_rewards)[0], 1.0)
    return subtract_mean(grades.rewards) / std


def difficulty_weighted(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """`grpo` with cfg.advantage_difficulty = 1: hard prompts weigh more (mathgrpo)."""
    return standardize(grades.rewards) * compute_difficulty_weights(grades.rewards)


def grpo_lead(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """`grpo` times w(p) where positive and w(1 - p) where negative (GRPO-LEAD, arXiv 2504.09696, section 3.3).

    p is the share of right answers in the group, and w(p) = 0.4 + 1.1 / (1 + exp(10 (p - 0.75))).
    """
    accuracy = grades.correct.mean(-1, keepdim=True).nan_to_num(0.5)
    advantages = standardize(grades.rewards)
    return advantages * torch.where(advantages > 0, logistic_weight(accuracy), logistic_weight(1 - accuracy))


def logistic_weight(p: Tensor) -> Tensor:
    return 0.4 + 1.1 * torch.sigmoid(10 * (0.75 - p))


def dgpo(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """(r - mean) / mean absolute deviation, times softmax(-mean / 2) over useful groups (DGPO, arXiv 2601.20614).

    Useful groups are those whose rewards differ. Without the softmax, the sum of |A| over a group is G at any accuracy.
    The mean of the softmax factor over useful groups is 1.
    """
    has_signal = ~is_zero_variance(grades.rewards)
    deviations = subtract_mean(grades.rewards)
    mean_deviation = deviations.abs().mean(-1, keepdim=True).masked_fill(~has_signal, 1.0)
    hardness = (-grades.rewards.mean(-1, keepdim=True) / 2.0).masked_fill(~has_signal, -torch.inf)
    weights = hardness.softmax(0).nan_to_num(0.0) * has_signal.sum()
    return weights * deviations / mean_deviation


# ---------------------------------------------------------------- among completions of similar length


def length_grouped(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """Standardize among siblings of similar length, shrunk towards the group (mathgrpo, corrected).

    A cell is a quantile bucket of the lengths in one group. The mean and std of a cell of n completions have the weight
    n / (n + length_shrinkage), and those of the group have the rest. A cell of fewer than length_min_cell completions
    has weight 0. Comparing only within cells would give no credit for choosing a better length
    (docs/explanation/sharp-edges.md).
    """
    is_shorter = grades.lengths[:, None, :] < grades.lengths[:, :, None]  # [P, G, G]
    buckets = is_shorter.sum(-1) * cfg.length_buckets // grades.lengths.shape[-1]
    same_cell = buckets[:, :, None] == buckets[:, None, :]
    size = same_cell.sum(-1).double()
    share = (size / (size + cfg.length_shrinkage)).masked_fill(size < cfg.length_min_cell, 0.0)
    return standardize_within_cells(grades.rewards, same_cell, share)


def length_grouped_literal(grades: Grades, cfg: GRPOConfig) -> Tensor:
    """Standardize among siblings that are all short, all medium or all long (mathgrpo).

    A medium length is between mean - std and mean + std of the lengths of the batch.
    """
    mean, std = grades.lengths.mean(), grades.lengths.std(correction=0)
    buckets = (grades.lengths >= mean - std).long() + (grades.lengths > mean + std).long()
    same_cell = buckets[:, :, None] == buckets[:, None, :]
    return standardize_within_cells(grades.rewards, same_cell, torch.ones_like(grades.rewards))


def standardize_within_cells(rewards: Tensor, same_cell: Tensor, share: Tensor) -> Tensor:
    """(r - mean) / std, where mean and std are weighted averages of those of the cell and those of the group.

    `same_cell` [P, G, G] says whether two completions are in the same cell. The cell has the weight `share` [P, G], and
    the group has the rest.
    """
    siblings = rewards[:, None, :].expand(same_cell.shape)  # [P, G, G]
    size = same_cell.sum(-1)
    mean = (siblings * same_cell).sum(-1) / size
    std = (((siblings - mean[:, :, None]) ** 2 * same_cell).sum(-1) / size).sqrt()
    is_equal = is_zero_variance(torch.where(same_cell, siblings, rewards[:, :, None]))[:, :, 0]
    std = std.masked_fill(is_equal, 0.0)
    group_mean, group_std = rewards.mean(-1, keepdim=True), rewards.std(-1, correction=0, keepdim=True)
    baseline = share * mean + (1 - share) * group_mean
    scale = share * std + (1 - share) * group_std
    has_zero_variance = is_zero_variance(rewards) | (is_equal & (share == 1))
    return ((rewards - baseline) / scale.masked_fill(has_zero_variance, 1.0)).masked_fill(has_zero_variance, 0.0)


ADVANTAGES: dict[str, _AdvantageFunction] = {
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


def get_advantage_function(name: str) -> _AdvantageFunction:
    """Return a function of ADVANTAGES or of "file.py:function". Raises UserError if there is none."""
    return ADVANTAGES[name] if name in ADVANTAGES else load_function(name, "advantage")


def compute_difficulty_weights(rewards: Tensor, strength: float = 1.0) -> Tensor:
    """clip(1 + strength (mean of the batch - mean), 0.5, 2): the factor of each group's advantages. [P, 1]"""
    means = rewards.mean(-1, keepdim=True)
    return (1 + strength * means.mean() - strength * means).clamp(0.5, 2.0)


def compute_advantages_from_grades(grades: Grades, shaped: Tensor, cfg: GRPOConfig) -> Tensor:
    """Compute the advantages [P, G] of a step from shaped rewards [P, G], with the function named by cfg.advantage.

    cfg.advantage_difficulty multiplies whatever that function returns. The rewards in `grades`, before shaping, say
    which groups have zero variance under cfg.min_reward_range.
    """
    compute, shaped_grades = get_advantage_function(cfg.advantage), grades._replace(rewards=shaped)
    if cfg.min_reward_range:
        has_zero_variance = is_zero_variance(grades.rewards, cfg.min_reward_range)
        equalized = equalize_rewards(shaped_grades, has_zero_variance)
        advantages = compute(equalized, cfg).masked_fill(has_zero_variance, 0.0)
    else:
        advantages = compute(shaped_grades, cfg)
    if cfg.advantage_difficulty:
        advantages = advantages * compute_difficulty_weights(shaped, cfg.advantage_difficulty)
    return advantages
