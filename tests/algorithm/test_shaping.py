"""Tests for the shaping of rewards and token weights: limits, identities and values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.settings import GRPOConfig
from pellucid.algorithm.shaping import (
    compute_importance_weights,
    discount_similar_rewards,
    find_corrected_tokens,
    find_entropy_threshold,
    penalize_overlong,
    smooth_rewards,
)
from small_policy import F64, grades

# ---------------------------------------------------------------- similarity


def test_smoothing_at_a_high_temperature_does_not_change_grpo():
    """Uniform smoothing is affine in the reward, and standardizing undoes an affine map."""
    rewards, states = torch.rand(20, 8, dtype=F64), torch.randn(20, 8, 5)
    cfg = GRPOConfig(similarity="smooth", similarity_temperature=1e6, similarity_mix=0.5)
    plain = ADVANTAGES["grpo"](grades(rewards), cfg)
    smoothed = ADVANTAGES["grpo"](grades(smooth_rewards(rewards, states, cfg)), cfg)
    torch.testing.assert_close(smoothed, plain, rtol=0, atol=1e-5)
    sharp = GRPOConfig(similarity="smooth", similarity_temperature=0.05, similarity_mix=0.5)
    assert (ADVANTAGES["grpo"](grades(smooth_rewards(rewards, states, sharp)), cfg) - plain).abs().max() > 0.1


def test_answer_similar_to_a_right_one_gets_a_share_of_its_reward():
    """The states are two pairs in opposite directions, so each answer shares with its twin alone."""
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]])
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=F64)
    cfg = GRPOConfig(similarity_mix=0.4, similarity_temperature=0.02)
    torch.testing.assert_close(
        smooth_rewards(rewards, states, cfg), torch.tensor([[0.6, 0.4, 0.0, 0.0]], dtype=F64), rtol=0, atol=1e-12
    )


def test_smoothing_is_bounded_and_leaves_equal_rewards_alone():
    rewards, states = torch.rand(20, 8, dtype=F64), torch.randn(20, 8, 5)
    cfg = GRPOConfig(similarity_mix=0.3)
    moved = (smooth_rewards(rewards, states, cfg) - rewards).abs().amax(-1)
    assert bool((moved <= 0.3 * (rewards.amax(-1) - rewards.amin(-1)) + 1e-12).all())
    equal = torch.full((20, 8), 0.3, dtype=F64)
    assert ADVANTAGES["grpo"](grades(smooth_rewards(equal, states, cfg)), cfg).abs().max() == 0.0


def test_common_part_of_all_states_is_subtracted_first():
    rewards, states = torch.rand(4, 8, dtype=F64), torch.randn(4, 8, 5, dtype=F64)
    cfg = GRPOConfig()
    far = states + 100 * torch.randn(4, 1, 5, dtype=F64)
    torch.testing.assert_close(
        smooth_rewards(rewards, far, cfg), smooth_rewards(rewards, states, cfg), rtol=0, atol=1e-9
    )


def test_diversity_divides_the_reward_of_similar_answers():
    """Three answers are alike and get a third each; the fourth is different and keeps its whole reward."""
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    cfg = GRPOConfig()
    one = discount_similar_rewards(torch.tensor([[1.0, 1.0, 0.0, 1.0]], dtype=F64), states, cfg)
    torch.testing.assert_close(one, torch.tensor([[1 / 3, 1 / 3, 0.0, 1.0]], dtype=F64))
    shifted = discount_similar_rewards(torch.tensor([[-1.0, -1.0, -2.0, -1.0]], dtype=F64), states, cfg)
    torch.testing.assert_close(shifted, one - 2.0)


def test_opposite_answer_does_not_reduce_similarity():
    """Two answers are alike and one is opposite: the cosines are 1, 1 and -1, and -1 counts as 0."""
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]])
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=F64)
    shared = discount_similar_rewards(rewards, states, GRPOConfig())
    torch.testing.assert_close(shared, torch.tensor([[0.5, 0.5, 1.0, 0.0]], dtype=F64))


def test_state_of_zeros_is_similar_to_no_other():
    """It has no direction, so its cosine even with itself is 0."""
    states = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    assert discount_similar_rewards(torch.tensor([[1.0, 0.0]], dtype=F64), states, GRPOConfig()).tolist() == [
        [1.0, 0.0]
    ]


# ---------------------------------------------------------------- overlong


def test_overlong_penalty_rises_over_the_cache():
    cfg = GRPOConfig(max_length=100, overlong_cache=20)
    lengths = torch.tensor([[10.0, 80.0, 85.0, 100.0]], dtype=F64)
    measured = penalize_overlong(torch.ones(1, 4, dtype=F64), lengths, cfg)
    torch.testing.assert_close(measured, torch.tensor([[1.0, 1.0, 0.75, 0.0]], dtype=F64))
    assert penalize_overlong(torch.ones(1, 4, dtype=F64), lengths, GRPOConfig()).tolist() == [[1.0] * 4]
    with pytest.raises(ValueError, match="max_length must be given"):
        penalize_overlong(torch.ones(1, 4, dtype=F64), lengths, GRPOConfig(overlong_cache=20))


# ---------------------------------------------------------------- tokens

OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0]], dtype=F64)
GAP = torch.tensor([[math.log(3.0), math.log(0.5), math.log(1.2)], [math.log(1.5), math.log(1.1), 99.0]], dtype=F64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [[1.0, 1.0, 1.0], [1.0, 1.0]]),
        ("token", [[1.6, 0.5, 1.2], [1.5, 1.1]]),
        ("sequence", [[0.0, 0.0, 0.0], [0.0, 0.0]]),
        ("geometric", [[1.0, 1.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_importance_weights_by_hand(correction, expected):
    """The rows have products 1.8 and 1.65 and geometric means 1.22 and 1.28; the padding holds junk."""
    cfg = GRPOConfig(correction=correction, correction_cap=1.6)
    measured = compute_importance_weights(OLD, OLD - GAP, MASK, cfg)
    for row, values in zip(measured, expected, strict=True):
        assert row[: len(values)].tolist() == pytest.approx(values)


def test_a_sequence_below_the_cap_gets_its_product():
    cfg = GRPOConfig(correction="sequence", correction_cap=1.7)
    measured = compute_importance_weights(OLD, OLD - GAP, MASK, cfg)
    assert measured[:, 0].tolist() == pytest.approx([0.0, 1.65])


@pytest.mark.parametrize("correction", ["token", "sequence", "geometric"])
def test_ratio_exactly_at_the_cap_is_kept(correction):
    """Log-probs are fp32, and so is the logarithm of the cap they are compared with."""
    gap = torch.tensor([[2.0]]).log()
    cfg = GRPOConfig(correction=correction, correction_cap=2.0)
    one = torch.ones(1, 1, dtype=torch.bool)
    above, below = (float(compute_importance_weights(sign * gap, torch.zeros_like(gap), one, cfg)) for sign in (1, -1))
    assert (above, below) == ((1.0, 1.0) if correction == "geometric" else (2.0, 0.5))


def test_geometric_correction_masks_drift_in_both_directions():
    cfg = GRPOConfig(correction="geometric", correction_cap=1.25)
    assert compute_importance_weights(OLD, OLD - GAP, MASK, cfg)[:, 0].tolist() == [1.0, 0.0]
    assert compute_importance_weights(OLD, OLD + GAP, MASK, cfg)[:, 0].tolist() == [1.0, 0.0]


def test_importance_weights_restore_the_expectation_of_the_policy():
    """E_sampler[w f] = E_policy[f] if nothing is truncated; exact over a vocabulary of three."""
    policy, sampler = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.4, 0.4, 0.2], dtype=F64)
    f = torch.tensor([1.0, -2.0, 5.0], dtype=F64)
    weights = compute_importance_weights(
        policy.log()[:, None],
        sampler.log()[:, None],
        torch.ones(3, 1, dtype=torch.bool),
        GRPOConfig(correction="token"),
    )[:, 0]
    assert float((sampler * weights * f).sum()) == pytest.approx(float((policy * f).sum()))


def test_corrected_tokens_are_found():
    for correction, limit, expected in (
        ("token", 1.6, [True, False, False]),
        ("sequence", 1.7, [True] * 3),
        ("geometric", 1.25, [False] * 3),
    ):
        cfg = GRPOConfig(correction=correction, correction_cap=limit)
        assert find_corrected_tokens(compute_importance_weights(OLD, OLD - GAP, MASK, cfg), cfg)[0].tolist() == expected


def test_entropy_threshold_selects_the_highest_share():
    entropy = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3])
    assert float(find_entropy_threshold(entropy, 0.4)) == pytest.approx(0.7)
    assert float(find_entropy_threshold(entropy, 1.0)) == pytest.approx(0.1)
    assert float(find_entropy_threshold(entropy, 1e-6)) == pytest.approx(0.9)
