"""Tests for advantages: values by hand, invariances and limits. Expected gradients are in test_expectations.py."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from pellucid.algorithm.advantages import ADVANTAGES, compute_advantages_from_grades
from pellucid.algorithm.settings import AdvantageName, GRPOConfig
from pellucid.types import UserError
from small_policy import F64, grades

CFG = GRPOConfig()
COMPARING = sorted(ADVANTAGES.keys() - {"raw", "top"})
# A common factor on all rewards does not change these.
SCALE_FREE = {"grpo", "grpo_sample_std", "maxrl", "lead", "length_grouped", "length_grouped_literal", "batch", "gdpo"}
# These weight a group by the level of its rewards.
LEVELLED = {"maxrl", "dgpo"}


def advantages(name, rewards, cfg=CFG, **more):
    return ADVANTAGES[name](grades(rewards, **more), cfg)


def same(measured, expected, tolerance=1e-12):
    torch.testing.assert_close(measured, torch.as_tensor(expected, dtype=F64), rtol=0, atol=tolerance)


def test_settings_list_every_advantage():
    assert set(get_args(AdvantageName)) == ADVANTAGES.keys()


# The population stds are sqrt(3) / 4 and sqrt((4 + 1 + 0 + 9) / 4). S is sqrt(9 (3.5 * 4 / 3) / 4). W / 8 is the std of
# all eight rewards.
ROOT3, SIGMA, S, W = (math.sqrt(x) for x in (3, 3.5, 10.5, 167))
TWO_GROUPS = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 5.0]]
HAND = {
    "grpo": [[ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3], [-2 / SIGMA, -1 / SIGMA, 0, 3 / SIGMA]],
    "grpo_sample_std": [[1.5, -0.5, -0.5, -0.5], [-3 / S, -1.5 / S, 0, 4.5 / S]],
    "centered": [[0.75, -0.25, -0.25, -0.25], [-2, -1, 0, 3]],
    "rloo": [[1, -1 / 3, -1 / 3, -1 / 3], [-8 / 3, -4 / 3, 0, 4]],
    "maxrl": [[3, -1, -1, -1], [-1, -0.5, 0, 1.5]],
    "raw": TWO_GROUPS,
    "top": [[1, 0, 0, 0], [0, 0, 0, 5]],
    # All eight rewards have mean 9/8, mean square 31/8 and variance 167/64.
    "batch": [[6 / W, *[-2 / W] * 3], [-16 / W, -8 / W, 0, 24 / W]],
    # The group means are .25 and 2, the overall mean is 1.125: weights 1.875 and clip(.125) = .5.
    "difficulty": [[1.875 * ROOT3, *[-1.875 / ROOT3] * 3], [-1 / SIGMA, -0.5 / SIGMA, 0, 1.5 / SIGMA]],
}  # fmt: skip


@pytest.mark.parametrize("name", HAND)
def test_advantages_match_values_by_hand(name):
    same(advantages(name, TWO_GROUPS), HAND[name])


def test_dgpo_by_hand():
    """Mean absolute deviations are .375 and 1.5, weights are 2 softmax(-.125, -1), and a dead group takes no share."""
    rewards = [*TWO_GROUPS, [7.0] * 4]
    easy, hard = math.exp(-1.0), math.exp(-0.125)
    weights = [2 * hard / (easy + hard), 2 * easy / (easy + hard)]
    first = [weights[0] * a / 0.375 for a in (0.75, -0.25, -0.25, -0.25)]
    second = [weights[1] * a / 1.5 for a in (-2, -1, 0, 3)]
    measured = advantages("dgpo", rewards)
    same(measured, [first, second, [0.0] * 4])
    same(measured.abs().sum(-1) / torch.tensor([*weights, 1.0], dtype=F64), [4.0, 4.0, 0.0])


def test_lead_by_hand():
    """Half right: both sides have the same weight. A quarter right: the right answer has .4 + 1.1 / (1 + e^-5)."""
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    rare, common = 0.4 + 1.1 / (1 + math.exp(-5)), 0.4 + 1.1 / (1 + math.exp(0))
    half = 0.4 + 1.1 / (1 + math.exp(-2.5))
    same(advantages("lead", rewards), [[rare * ROOT3, *[-common / ROOT3] * 3], [half, half, -half, -half]])


def test_gdpo_standardizes_each_reward_term_separately():
    """Two terms of very different spread are each standardized to +-1, then weighted by 1 and .5."""
    parts = [[[0.0, 10.0], [0.0, -10.0], [1.0, 10.0], [1.0, -10.0]]]
    measured = advantages("gdpo", [[10.0, -10.0, 11.0, -9.0]], parts=parts, weights=[[1.0, 0.5]])
    raw = torch.tensor([[-1 + 0.5, -1 - 0.5, 1 + 0.5, 1 - 0.5]], dtype=F64)
    same(measured, raw / math.sqrt(1.25))
    cancelling = [[[0.1, 0.3], [0.3, 0.1], [0.7, -0.3]], [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]]
    assert advantages("gdpo", [[0.4, 0.4, 0.4], [1.0, 1.0, 1.0]], parts=cancelling).abs().max() == 0.0
    dead_part = advantages("gdpo", [[0.0, 1.0]], parts=[[[0.0, 3.0], [1.0, 3.0]]])
    same(dead_part, [[-1.0, 1.0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_have_exactly_zero_advantage(name):
    """Tested on a million rewards, and on rewards that differ by rounding alone."""
    rewards = torch.rand(125_000, 1, dtype=F64).expand(-1, 8)
    lengths = torch.randint(1, 50, (125_000, 8))
    assert advantages(name, rewards, lengths=lengths).abs().max() == 0.0
    a_rounding_apart = torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3]], dtype=F64)
    assert advantages(name, a_rounding_apart).abs().max() == 0.0
    assert advantages(name, [[1e-6, 0.0, 0.0, 0.0]]).abs().max() > 0.0


@pytest.mark.parametrize("name", sorted(set(COMPARING) - LEVELLED))
def test_shifting_all_rewards_changes_nothing(name):
    rewards, lengths = torch.rand(50, 8, dtype=F64), torch.randint(1, 50, (50, 8))
    correct = (rewards > 0.5).double()
    plain = advantages(name, rewards, lengths=lengths, correct=correct)
    shifted = advantages(name, rewards + 7.0, lengths=lengths, correct=correct)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"difficulty", "dgpo"}))
def test_scaling_rewards_scales_advantages_that_are_not_scale_free(name):
    rewards, lengths = torch.rand(50, 8, dtype=F64), torch.randint(1, 50, (50, 8))
    correct = (rewards > 0.5).double()
    plain = advantages(name, rewards, lengths=lengths, correct=correct)
    scaled = advantages(name, 3.0 * rewards, lengths=lengths, correct=correct)
    torch.testing.assert_close(scaled, (1.0 if name in SCALE_FREE else 3.0) * plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_below_min_reward_range_is_dead_for_other_groups_too(name):
    """Advantages that compare groups must neither weight nor be scaled by rewards without a signal."""
    live, noise = [1.0, 0.0, 0.0, 1.0], [0.8, 0.804, 0.798, 0.798]
    cfg = GRPOConfig(advantage=name, min_reward_range=0.01, group_size=4)
    noisy, equal = grades([live, noise]), grades([live, [0.8] * 4])
    measured = compute_advantages_from_grades(noisy, noisy.rewards, cfg)
    same(measured[0], ADVANTAGES[name](equal, cfg)[0])
    assert measured[0].abs().max() > 0.1
    assert measured[1].abs().max() == 0.0


def test_shaping_does_not_revive_a_dead_group():
    """min_reward_range applies to the rewards of the task, before shaping."""
    task = grades([[1.0, 0.0, 0.0, 1.0], [0.8, 0.804, 0.798, 0.798]])
    shaped = task.rewards - torch.tensor([0.0, 0.5, 0.0, 0.0], dtype=F64)
    measured = compute_advantages_from_grades(task, shaped, GRPOConfig(min_reward_range=0.01, group_size=4))
    same(measured[0], advantages("grpo", [[1.0, -0.5, 0.0, 1.0]])[0])
    assert measured[1].abs().max() == 0.0


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(UserError, match="negative"):
        advantages("maxrl", [[-1.0, 1.0]])


# ---------------------------------------------------------------- difficulty


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"difficulty"}))
def test_difficulty_scales_every_advantage(name):
    """Group means are .25, 2 and .75, the overall mean is 1: with strength .5 the factors are 1.375, .5 and 1.125."""
    measured = grades([*TWO_GROUPS, [1.0, 0.0, 1.0, 1.0]], lengths=[[1, 1, 1, 9]] * 3)
    cfg = GRPOConfig(advantage=name, advantage_difficulty=0.5, group_size=4, length_min_cell=2)
    plain = ADVANTAGES[name](measured, cfg)
    assert all(row.abs().max() > 0.1 for row in plain)
    same(
        compute_advantages_from_grades(measured, measured.rewards, cfg),
        plain * torch.tensor([[1.375], [0.5], [1.125]], dtype=F64),
    )


def test_difficulty_advantage_equals_grpo_with_strength_one():
    rewards = torch.rand(40, 8, dtype=F64)
    both = GRPOConfig(advantage_difficulty=1.0)
    measured = compute_advantages_from_grades(grades(rewards), rewards, both)
    assert torch.equal(measured, advantages("difficulty", rewards))
    with pytest.raises(ValueError, match="advantage_difficulty"):
        GRPOConfig(advantage="difficulty", advantage_difficulty=1.0)


def test_difficulty_uses_shaped_rewards():
    """Both group means are .5 before shaping, .5 and .25 after it. Their mean is .375: factors .875 and 1.125."""
    task = grades([[1.0, 0.0], [1.0, 0.0]])
    shaped = torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=F64)
    cfg = GRPOConfig(advantage="centered", advantage_difficulty=1.0, group_size=2)
    same(compute_advantages_from_grades(task, shaped, cfg), [[0.4375, -0.4375], [0.28125, -0.28125]])


# ---------------------------------------------------------------- length groups


def test_one_length_bucket_is_plain_grpo():
    rewards, lengths = torch.rand(30, 8, dtype=F64), torch.randint(1, 50, (30, 8))
    plain = advantages("grpo", rewards)
    one = GRPOConfig(length_buckets=1, length_shrinkage=0.0, length_min_cell=1)
    torch.testing.assert_close(advantages("length_grouped", rewards, one, lengths=lengths), plain, rtol=0, atol=1e-12)
    large_cells = GRPOConfig(length_min_cell=9)
    torch.testing.assert_close(
        advantages("length_grouped", rewards, large_cells, lengths=lengths), plain, rtol=0, atol=1e-12
    )


def test_length_groups_by_hand():
    """Two buckets of four with shrinkage 4 mix half of each cell's mean and std with half of the group's."""
    rewards = [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]]
    cfg = GRPOConfig(length_buckets=2, length_min_cell=3, length_shrinkage=4.0)
    group_mean, group_std = 5 / 8, math.sqrt(15) / 8
    short = (1 - (1 + group_mean) / 2) / (group_std / 2)
    baseline, std = (0.25 + group_mean) / 2, (math.sqrt(3) / 4 + group_std) / 2
    expected = [[short] * 4 + [-baseline / std] * 3 + [(1 - baseline) / std]]
    same(advantages("length_grouped", rewards, cfg, lengths=[[3, 4, 5, 6, 20, 21, 22, 23]]), expected)


def test_cell_of_exactly_the_minimum_size_counts():
    """Cells of three have one and two right answers. Shrinkage 1 mixes 3/4 of a cell's mean and std with 1/4 of the
    group's.
    """
    cfg = GRPOConfig(length_buckets=2, length_min_cell=3, length_shrinkage=1.0)
    measured = advantages("length_grouped", [[0.0, 0.0, 1.0, 0.0, 1.0, 1.0]], cfg, lengths=[[1, 2, 3, 7, 8, 9]])
    baseline, std = 0.75 / 3 + 0.25 / 2, 0.75 * math.sqrt(2) / 3 + 0.25 / 2
    low, high = -baseline / std, (1 - baseline) / std
    same(measured, [[low, low, high, -high, -low, -low]])


def test_literal_length_groups_may_give_right_answers_no_advantage():
    """Lengths with mean 46 and std 31 form cells of 2, 4 and 2. The shrunk form still favors the right answers."""
    rewards, lengths = [[1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]], [[2, 2, 46, 46, 46, 46, 90, 90]]
    assert advantages("length_grouped_literal", rewards, lengths=lengths).abs().max() == 0.0
    shrunk = advantages("length_grouped", rewards, GRPOConfig(length_buckets=2), lengths=lengths)
    assert float(shrunk[0, 0]) > 0.5 > -0.5 > float(shrunk[0, 7])


def test_length_exactly_one_std_from_the_mean_is_medium():
    """Four answers of 2 tokens and four of 90 have mean 46 and std 44."""
    rewards, lengths = [[1.0] * 4 + [0.0] * 4], [[2] * 4 + [90] * 4]
    same(advantages("length_grouped_literal", rewards, lengths=lengths), [[1.0] * 4 + [-1.0] * 4])


def test_length_groups_use_the_population_std():
    """Lengths 10 - 6, 10 - 5, 10 + 5 and 10 + 6: the population std is 5.5, the sample std 6.4."""
    measured = advantages("length_grouped_literal", [[0.0, 1.0, 0.0, 1.0]], lengths=[[4, 5, 15, 16]])
    same(measured, [[0.0, 1.0, -1.0, 0.0]])


def test_literal_length_groups_by_hand():
    """Lengths 1, 1, 10, 10, 10, 10, 19, 19: mean 10, std 6.4; cells of 2, 4 and 2."""
    rewards = [[1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
    measured = advantages("length_grouped_literal", rewards, lengths=[[1, 1, 10, 10, 10, 10, 19, 19]])
    same(measured, [[1.0, -1.0, ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3, 0.0, 0.0]])


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_rounding_tolerance_scales_with_the_rewards(size):
    """At both scales, real differences give advantages and rounding differences give none."""
    same(advantages("grpo", torch.tensor(TWO_GROUPS, dtype=F64) * size), HAND["grpo"])
    a_rounding_apart = torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3]], dtype=F64) * size
    assert advantages("grpo", a_rounding_apart).abs().max() == 0.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_spread_equal_to_min_reward_range_is_dead_despite_rounding(sign):
    """In floating point, 0.1 + 0.2 is above 0.3, for both signs."""
    group = grades(torch.tensor([[0.0, sign * (0.1 + 0.2)]], dtype=F64))
    measured = compute_advantages_from_grades(group, group.rewards, GRPOConfig(min_reward_range=0.3, group_size=2))
    assert measured.abs().max() == 0.0


def test_gdpo_is_scaled_by_the_batch_not_by_each_group():
    """Two agreeing terms add up to +-2, a single live term to +-1: the std of all four values is sqrt(2.5)."""
    parts = [[[1.0, 5.0], [0.0, 4.0]], [[1.0, 3.0], [0.0, 3.0]]]
    measured = advantages("gdpo", [[6.0, 4.0], [4.0, 3.0]], parts=parts)
    same(measured, torch.tensor([[2.0, -2.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2.5))
