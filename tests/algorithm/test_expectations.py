"""Tests of exact expected gradients, summed over every group a small policy can sample (docs/explanation/kl.md)."""

from __future__ import annotations

from dataclasses import replace
from math import comb, exp, sqrt

import pytest
import torch

from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.objectives import AGGREGATES, OBJECTIVES
from pellucid.algorithm.settings import GRPOConfig
from small_policy import (
    F64,
    LENGTH,
    LENGTHS,
    MASK,
    SEQUENCES,
    chances,
    distributions,
    exact_kl,
    expected_gradient,
    groups,
    thetas,
    token_scores,
)

REWARDS = [0.3, 1.0, 0.0, 0.7, 0.2, 1.0, 0.4]
BINARY = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
PER_ROW = {"aggregate": "constant", "constant_length": 1}


def close(measured, exact, tolerance=1e-9):
    assert exact.abs().max() > 1e-3, "an oracle of nothing"
    torch.testing.assert_close(measured, exact, rtol=0, atol=tolerance)


def gradient(value, theta):
    return torch.autograd.grad(value, theta)[0]


def accuracy(theta, rewards):
    return (chances(theta) * torch.tensor(rewards, dtype=F64)).sum()


def test_sequences_cover_the_whole_distribution():
    assert len(SEQUENCES) == 7
    assert float(chances(thetas()[0].detach()).sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("advantage", "factor"), [("rloo", 1.0), ("centered", 2 / 3), ("raw", 1.0)])
def test_expected_step_is_the_gradient_of_the_expected_reward(objective, advantage, factor):
    """rloo and raw are unbiased; a mean that includes the completion itself adds a factor of 1 - 1/G."""
    theta, _ = thetas()
    cfg = GRPOConfig(
        advantage=advantage, objective=objective, group_size=3, aggregate="constant", constant_length=LENGTH
    )
    exact = factor * gradient(accuracy(theta, REWARDS), theta) / LENGTH
    close(-expected_gradient(theta, cfg, REWARDS), exact, 1e-12)


# The advantage of a right or wrong completion in a group of n with k right ones, by hand.
BY_HAND = {
    "grpo": lambda right, k, n: sqrt((n - k) / k) if right else -sqrt(k / (n - k)),
    "grpo_sample_std": lambda right, k, n: sqrt((n - 1) / n) * BY_HAND["grpo"](right, k, n),
    "centered": lambda right, k, n: right - k / n,
    "rloo": lambda right, k, n: (n - k) / (n - 1) if right else -k / (n - 1),
    "maxrl": lambda right, k, n: (n - k) / k if right else -1.0,
    "dgpo": lambda right, k, n: n / (2 * k) if right else -n / (2 * (n - k)),
    "lead": lambda right, k, n: BY_HAND["grpo"](right, k, n) * lead_weight(k / n if right else 1 - k / n),
}
# With one group and one bucket these equal grpo.
BY_HAND |= dict.fromkeys(["batch", "difficulty", "gdpo", "length_grouped", "length_grouped_literal"], BY_HAND["grpo"])


def lead_weight(p):
    return 0.4 + 1.1 / (1 + exp(10 * (p - 0.75)))


def by_hand(advantage, right, k, size):
    if advantage in ("raw", "top"):
        return right
    return 0.0 if k in (0, size) else BY_HAND[advantage](right, k, size)


def score_matrix(theta):
    """Return the gradient of every token's log-probability, of shape [N, T, W * W]."""
    rows = [
        [gradient(token_scores(theta)[n, t], theta).flatten() for t in range(LENGTH)] for n in range(len(SEQUENCES))
    ]
    return torch.stack([torch.stack(row) for row in rows]) * MASK[..., None]


def reinforce(theta, advantage, aggregate, size):
    """Return sum over groups of P(group) sum over i, t of w A grad log pi, from counts of right answers and tokens."""
    scores = score_matrix(theta).sum(1)  # every token of a response has the same weight
    total = torch.zeros(theta.numel(), dtype=F64)
    p = chances(theta.detach())
    for members in groups(size).tolist():
        tokens = sum(int(LENGTHS[n]) for n in members)
        chance = float(p[members].prod())
        for n in members:
            # In literal length groups of three completions, lengths of one and of two tokens never share a bucket.
            alike = [m for m in members if advantage != "length_grouped_literal" or LENGTHS[m] == LENGTHS[n]]
            k = sum(BINARY[m] for m in alike)
            weight = {"token": 1 / tokens, "sequence": 1 / (size * int(LENGTHS[n])), "constant": 1 / (size * LENGTH)}
            total += chance * weight[aggregate] * by_hand(advantage, BINARY[n], k, len(alike)) * scores[n]
    return total.view_as(theta)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_first_inner_step_of_every_combination_is_reinforce(advantage, aggregate):
    """All nine objectives agree while the ratio is 1."""
    theta, _ = thetas()
    exact = reinforce(theta, advantage, aggregate, 3)
    for objective in OBJECTIVES:
        cfg = GRPOConfig(
            advantage=advantage,
            objective=objective,
            aggregate=aggregate,
            constant_length=LENGTH,
            group_size=3,
            length_buckets=1,
        )
        close(-expected_gradient(theta, cfg, BINARY), exact)


def closed_form(p, size):
    """Return E[A | right] - E[A | wrong], the factor by which `grpo` multiplies the gradient of the accuracy."""
    others = [comb(size - 1, k) * p**k * (1 - p) ** (size - 1 - k) for k in range(size)]
    right = sum(chance * by_hand("grpo", 1, k + 1, size) for k, chance in enumerate(others))
    return right - sum(chance * by_hand("grpo", 0, k, size) for k, chance in enumerate(others))


def test_dividing_by_the_std_changes_the_objective():
    """With binary rewards the gradient is c_G(p) grad p, which tends to that of 2 arcsin sqrt(p) as G grows."""
    theta, _ = thetas()
    slope = gradient(accuracy(theta, BINARY), theta)
    p = accuracy(theta, BINARY).item()
    close(-expected_gradient(theta, GRPOConfig(group_size=3, **PER_ROW), BINARY), closed_form(p, 3) * slope)
    arcsine = gradient(2 * torch.asin(torch.sqrt(accuracy(theta, BINARY))), theta)
    torch.testing.assert_close(closed_form(p, 800) * slope, arcsine, rtol=5e-3, atol=0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_follows_a_truncated_log_likelihood(size):
    """A share of 1 - (1 - p)^G of all groups have right answers, whose mean score is E[score | right] = grad p / p. The
    baseline subtracts the mean score of these groups. It is minus that of the groups without right answers, which is
    (1 - p)^G E[score | wrong]. As G grows, the slope tends to 1 / p, the slope of log p.
    """
    theta, _ = thetas()
    p = accuracy(theta, BINARY).item()
    slope = (1 - (1 - p) ** size) / p - (1 - p) ** (size - 1)
    cfg = GRPOConfig(advantage="maxrl", group_size=size, **PER_ROW)
    close(-expected_gradient(theta, cfg, BINARY), slope * gradient(accuracy(theta, BINARY), theta))


def test_literal_length_groups_remove_all_credit_for_length():
    """Only answers of one token are right: there is everything to learn, and the gradient is zero."""
    theta, _ = thetas()
    brevity = [float(length == 1) for length in LENGTHS]
    literal, shrunk, plain = (
        expected_gradient(theta, GRPOConfig(advantage=name, group_size=3, length_buckets=2, **PER_ROW), brevity)
        for name in ("length_grouped_literal", "length_grouped", "grpo")
    )
    assert literal.abs().max() == 0.0
    close(shrunk, plain)  # three completions fill no cell


# ---------------------------------------------------------------- KL: each placement has its gradient


def kl_part(theta, ref, cfg, old=None):
    """Return what the penalty adds to the expected gradient of the loss."""
    with_kl = expected_gradient(theta, cfg, REWARDS, ref, old)
    return with_kl - expected_gradient(theta, replace(cfg, kl_coef=0.0), REWARDS, ref, old)


def sequence_kl(theta, ref):
    return (chances(theta) * (token_scores(theta) - token_scores(ref.detach())).sum(-1)).sum()


def state_kl(theta, ref, forward, old):
    """Return the expected KL at each state over the prefixes of `old`, held fixed: what a token-level loss can see."""
    kl = forward_kl(theta, ref) if forward else exact_kl(theta, ref.detach())
    return (chances(old.detach())[:, None] * kl).sum()


def forward_kl(theta, ref):
    mine, other = distributions(theta), distributions(ref.detach())
    return (other.exp() * (other - mine)).sum(-1).masked_fill(~MASK, 0.0)


@pytest.mark.parametrize(("advantage", "kl_in"), [("rloo", "reward"), ("grpo", "reward"), ("rloo", "raw_reward")])
def test_k1_in_the_reward_has_the_gradient_of_the_sequence_kl(advantage, kl_in):
    """This also holds for advantages divided by a std, as long as the penalty is not divided."""
    theta, ref = thetas()
    cfg = GRPOConfig(kl_in=kl_in, kl_coef=0.3, advantage=advantage, group_size=2, **PER_ROW)
    close(kl_part(theta, ref, cfg), 0.3 * gradient(sequence_kl(theta, ref), theta))


def test_exact_kl_in_the_reward_ignores_the_choice_of_the_token_itself():
    """It charges a token for the states it leads to; at its own state the sum is the same for every token."""
    theta, ref = thetas()
    cfg = GRPOConfig(kl="exact", kl_coef=0.3, advantage="rloo", group_size=2, **PER_ROW)
    measured = kl_part(theta, ref, cfg)
    value = (chances(theta) * exact_kl(theta, ref).detach().sum(-1)).sum()
    close(measured, 0.3 * gradient(value, theta))
    assert measured[1:].abs().max() < 1e-12, "the last token leads nowhere"
    assert (measured - 0.3 * gradient(sequence_kl(theta, ref), theta)).abs().max() > 1e-2


def test_off_policy_k1_in_the_reward_is_a_reward_like_any_other():
    theta, ref, old = thetas(3)
    cfg = GRPOConfig(kl_coef=0.3, advantage="rloo", group_size=2, objective="importance_weighted", **PER_ROW)
    charge = (token_scores(old) - token_scores(ref)).sum(-1).tolist()
    as_reward = expected_gradient(theta, replace(cfg, kl_coef=0.0), [-0.3 * k for k in charge], ref, old)
    close(kl_part(theta, ref, cfg, old), as_reward)


def test_kl_coef_in_the_raw_reward_cancels_if_rewards_are_equal():
    """norm(R - beta K) hardly depends on beta if the rewards R are equal."""
    theta, ref = thetas()
    parts = []
    for coef in (0.01, 1.0):
        cfg = GRPOConfig(kl="k1", kl_in="raw_reward", kl_coef=coef, group_size=2, **PER_ROW)
        parts.append(expected_gradient(theta, cfg, [1.0] * 7, ref))
    torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=1e-9)
    assert parts[0].abs().max() > 1e-2
    small, large = (
        expected_gradient(theta, GRPOConfig(kl_coef=coef, group_size=2, **PER_ROW), [1.0] * 7, ref)
        for coef in (0.01, 1.0)
    )
    close(large, 100 * small)


@pytest.mark.parametrize(
    ("kl", "forward"), [("k2", False), ("exact", False), ("k3_weighted", False), ("k3", True)], ids=str
)
def test_kl_in_the_loss_has_the_gradient_of_a_token_kl(kl, forward):
    theta, ref = thetas()
    cfg = GRPOConfig(kl=kl, kl_in="loss", kl_coef=1.0, group_size=2, **PER_ROW)
    measured = kl_part(theta, ref, cfg)
    close(measured, gradient(state_kl(theta, ref, forward, theta), theta))
    other = gradient(state_kl(theta, ref, not forward, theta), theta)
    assert (measured - other).abs().max() > 1e-2


def test_k1_in_the_loss_has_no_expected_gradient():
    theta, ref = thetas()
    cfg = GRPOConfig(kl="k1", kl_in="loss", kl_coef=1.0, group_size=2, **PER_ROW)
    assert kl_part(theta, ref, cfg).abs().max() < 1e-12


def test_k1_in_a_loss_of_response_means_favors_length():
    """E[1/T sum of scores] = grad E[1/T]: minimizing it makes responses longer, for any reference."""
    theta, ref = thetas()
    cfg = GRPOConfig(kl="k1", kl_in="loss", kl_coef=1.0, group_size=2, aggregate="sequence")
    brevity = (chances(theta) / LENGTHS).sum()
    close(kl_part(theta, ref, cfg), gradient(brevity, theta))


def test_off_policy_k1_in_the_loss_makes_sampled_tokens_unlikely():
    """For any reference it increases KL(pi_old, pi)."""
    theta, ref, old = thetas(3)
    cfg = GRPOConfig(kl="k1", kl_in="loss", kl_coef=1.0, group_size=2, objective="importance_weighted", **PER_ROW)
    away = (chances(old.detach()) * (token_scores(old.detach()) - token_scores(theta)).sum(-1)).sum()
    close(kl_part(theta, ref, cfg, old), -gradient(away, theta))


@pytest.mark.parametrize("kl", ["k3_weighted", "exact"])
def test_k3_weighted_and_exact_kl_keep_their_gradient_off_policy(kl):
    theta, ref, old = thetas(3)
    cfg = GRPOConfig(kl=kl, kl_in="loss", kl_coef=1.0, group_size=2, objective="importance_weighted", **PER_ROW)
    close(kl_part(theta, ref, cfg, old), gradient(state_kl(theta, ref, False, old), theta))


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_k2_and_k3_lose_their_gradient_off_policy(kl):
    theta, ref, old = thetas(3)
    cfg = GRPOConfig(kl=kl, kl_in="loss", kl_coef=1.0, group_size=2, objective="importance_weighted", **PER_ROW)
    exact = gradient(state_kl(theta, ref, kl == "k3", old), theta)
    assert (kl_part(theta, ref, cfg, old) - exact).abs().max() > 1e-2


def mean_k2(theta, ref):
    squares = 0.5 * (token_scores(theta) - token_scores(ref.detach())).square()
    return (chances(theta) * squares.sum(-1)).sum()


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_kl_in_the_reward_is_the_gradient_of_its_mean_minus_the_loss_one(kl):
    """k3 has grad KL(pi, ref) - grad KL(ref, pi), which pulls away from the reference. This explains the collapse that
    others report. k2 has grad E[k2] - grad KL(pi, ref).
    """
    theta, ref = thetas()
    cfg = GRPOConfig(kl=kl, kl_coef=1.0, advantage="rloo", group_size=2, **PER_ROW)
    measured = expected_gradient(theta, cfg, [0.0] * 7, ref)
    mean = state_kl(theta, ref, False, theta) if kl == "k3" else mean_k2(theta, ref)
    exact = gradient(mean, theta) - gradient(state_kl(theta, ref, kl == "k3", theta), theta)
    # The effect of a token on later states counts as well, so compare only the last token's logits.
    close(measured[1:], exact[1:])
