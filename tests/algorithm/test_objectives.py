"""Tests for off-policy values and gradients of objectives, by hand. test_expectations.py covers on-policy gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from pellucid.algorithm.objectives import (
    AGGREGATES,
    OBJECTIVES,
    ObjectiveInputs,
    compute_clip_metrics,
    compute_probability_bounds,
)
from pellucid.algorithm.settings import DUAL_CLIP_OBJECTIVES, GRPOConfig, ObjectiveName

F64 = torch.float64
RATIOS = torch.tensor([[0.7, 0.9, 1.25, 1.4]], dtype=F64)
ALL = torch.ones(1, 4, dtype=torch.bool)


def value_and_gradient(objective, ratios, sign, mask=ALL, **settings):
    """Return the value of each token and the gradient of their sum; all old log-probabilities are log(1/2)."""
    old = torch.full_like(ratios, math.log(0.5))
    logprobs = (old + ratios.log()).requires_grad_()
    advantages = torch.full((len(ratios), 1), sign, dtype=F64)
    cfg = GRPOConfig(objective=objective, **settings)
    value = OBJECTIVES[objective](ObjectiveInputs(logprobs, old, advantages, mask), cfg).value
    return value.detach(), torch.autograd.grad((value * mask).sum(), logprobs)[0]


def measured_at(logprobs, old, advantages, mask, cfg):
    return compute_clip_metrics(OBJECTIVES[cfg.objective](ObjectiveInputs(logprobs, old, advantages, mask), cfg), mask)


def clips(cfg):
    return cfg.clip_low, cfg.clip_high, cfg.clip_cap


def same(measured, expected):
    torch.testing.assert_close(measured, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def test_settings_list_every_objective():
    assert set(get_args(ObjectiveName)) == OBJECTIVES.keys()


def test_clip_removes_the_gradient_only_if_it_leads_further_out():
    for sign, moving in ((1.0, [0.7, 0.9, 1.25, 0]), (-1.0, [0, -0.9, -1.25, -1.4])):
        value, gradient = value_and_gradient("ppo_clip", RATIOS, sign, clip_low=0.2, clip_high=0.3)
        same(gradient, [moving])
    same(value, [[-0.8, -0.9, -1.25, -1.4]])


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    ratios = torch.tensor([[2.9, 3.1, 40.0, 0.5]], dtype=F64)
    value, gradient = value_and_gradient("ppo_clip", ratios, -1.0, dual_clip=3.0)
    same(value, [[-2.9, -3.0, -3.0, -0.8]])
    same(gradient, [[-2.9, 0.0, 0.0, 0.0]])
    value, _ = value_and_gradient("ppo_clip", ratios, 1.0, dual_clip=3.0)
    same(value, [[1.2, 1.2, 1.2, 0.5]])


@pytest.mark.parametrize("q", [1.0, 0.9, 0.7, 0.5, 0.1, 0.01])
def test_dcpo_bounds_solve_their_defining_equation(q):
    cfg = GRPOConfig(objective="dcpo", clip_low=0.16, clip_high=0.2, clip_cap=100.0)
    low, high = (float(x) for x in compute_probability_bounds(torch.tensor(q, dtype=F64).log(), *clips(cfg)))
    assert (high - 1) * high * q == pytest.approx(0.2, abs=1e-12)
    if q > 4 * 0.16:
        assert (1 - low) * low * q == pytest.approx(0.16, abs=1e-12)
    else:
        assert low == 0.5


def test_dcpo_bounds_match_the_paper_and_are_capped():
    cfg = GRPOConfig(objective="dcpo", clip_low=0.16, clip_high=0.2)
    low, high = compute_probability_bounds(torch.tensor([1.0, 0.9, 0.5, 0.1, 0.01, 1e-6], dtype=F64).log(), *clips(cfg))
    assert [round(float(x), 2) for x in low] == [0.8, 0.77, 0.5, 0.5, 0.5, 0.5]
    assert [round(float(x), 2) for x in high] == [1.17, 1.19, 1.31, 2.0, 5.0, 10.0]


def test_dcpo_keeps_the_gradient_of_a_rare_token_beyond_the_fixed_clip():
    old = torch.tensor([[0.9, 0.05]], dtype=F64).log()
    logprobs = (old + math.log(1.5)).requires_grad_()
    cfg = GRPOConfig(objective="dcpo", clip_low=0.16, clip_high=0.2)
    value = OBJECTIVES["dcpo"](ObjectiveInputs(logprobs, old, torch.ones(1, 1, dtype=F64), ALL[:, :2]), cfg).value
    assert torch.autograd.grad(value.sum(), logprobs)[0].tolist() == [[0.0, pytest.approx(1.5)]]


def test_gspo_has_one_ratio_per_response_over_its_own_tokens():
    """The ratios are 2, 1/2 and 1.21 (padding). Their geometric mean is 1 without the padding."""
    ratios = torch.tensor([[2.0, 0.5, 1.21]], dtype=F64)
    mask = torch.tensor([[True, True, False]])
    value, gradient = value_and_gradient("gspo", ratios, 1.0, mask, clip_low=3e-4, clip_high=4e-4)
    same(value[:, :2], [[1.0, 1.0]])
    same(gradient, [[1.0, 1.0, 0.0]])  # two tokens of value s, each with the gradient s / 2 of both
    value, gradient = value_and_gradient("gspo", ratios, 1.0, ALL[:, :3], clip_low=3e-4, clip_high=4e-4)
    same(value, [[1.0004] * 3])
    same(gradient, [[0.0] * 3])


def test_gspo_token_has_the_value_of_gspo_and_a_gradient_per_token():
    ratios = torch.tensor([[1.2, 1.1, 0.9]], dtype=F64)
    s = (1.2 * 1.1 * 0.9) ** (1 / 3)
    value, gradient = value_and_gradient("gspo_token", ratios, -1.0, ALL[:, :3])
    same(value, [[-s] * 3])
    same(gradient, [[-s] * 3])
    whole, _ = value_and_gradient("gspo", ratios, -1.0, ALL[:, :3])
    same(value, whole.tolist())


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    _, gradient = value_and_gradient("cispo", RATIOS, 1.0, clip_high=0.3)
    same(gradient, [[0.7, 0.9, 1.25, 1.3]])


def test_sapo_is_steepest_at_one_and_fades_on_both_sides():
    """The derivative of 4/t sigmoid(t (r - 1)) is 4 s (1 - s) = sech^2(t (r - 1) / 2)."""
    for sign, t in ((1.0, 1.0), (-1.0, 1.05)):
        _, gradient = value_and_gradient("sapo", RATIOS, sign)
        same(gradient, [[sign * r / math.cosh(t * (r - 1) / 2) ** 2 for r in RATIOS[0].tolist()]])


def test_gmpo_is_the_geometric_mean_of_ratios_clipped_on_one_side():
    """With clip_low = clip_high = .4 in log space, a ratio of 3 counts as e^.4 if A > 0 and as 3 if A < 0."""
    ratios = torch.tensor([[3.0, 0.25]], dtype=F64)
    value, gradient = value_and_gradient("gmpo", ratios, 1.0, ALL[:, :2], clip_low=0.4, clip_high=0.4)
    mean = math.sqrt(math.exp(0.4) * 0.25)
    same(value, [[mean, mean]])
    same(gradient, [[0.0, mean]])
    value, gradient = value_and_gradient("gmpo", ratios, -1.0, ALL[:, :2], clip_low=0.4, clip_high=0.4)
    mean = math.sqrt(3 * math.exp(-0.4))
    same(value, [[-mean, -mean]])
    same(gradient, [[-mean, 0.0]])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_stay_finite_for_policies_far_apart(objective):
    old = torch.tensor([[-900.0, -1.0]])
    logprobs = torch.tensor([[-1.0, -900.0]]).requires_grad_()
    cfg = GRPOConfig(objective=objective)
    for sign in (-1.0, 1.0):
        value = OBJECTIVES[objective](ObjectiveInputs(logprobs, old, torch.tensor([[sign]]), ALL[:, :2]), cfg).value
        assert bool(value.isfinite().all())
        assert bool(torch.autograd.grad(value.sum(), logprobs)[0].isfinite().all())
    metrics = measured_at(logprobs.detach(), old, torch.tensor([[1.0]]), ALL[:, :2], cfg)
    whole = objective.startswith("gspo")  # the mean of 899 and -899 is 0
    assert metrics["ratio/overflow"].tolist() == [[not whole, not whole]]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_clip_metrics_mark_tokens_whose_gradient_is_clipped(objective):
    """Each response has one token, so that its ratio is that of the token."""
    settings = {"clip_low": 0.16, "clip_high": 0.2} | ({"dual_clip": 3.0} if objective in DUAL_CLIP_OBJECTIVES else {})
    for ratio in (0.3, 0.845, 0.95, 1.05, 1.21, 1.9, 3.5):
        for sign in (-1.0, 1.0):
            ratios = torch.tensor([[ratio]], dtype=F64)
            _, gradient = value_and_gradient(objective, ratios, sign, ALL[:, :1], **settings)
            old = torch.full((1, 1), math.log(0.5), dtype=F64)
            metrics = measured_at(
                old + ratios.log(),
                old,
                torch.tensor([[sign]]),
                ALL[:, :1],
                GRPOConfig(objective=objective, **settings),
            )
            clipped = bool(metrics["clip/low"]) or bool(metrics["clip/high"])
            if objective == "cispo":
                assert clipped == (abs(float(gradient)) < ratio - 1e-9)
            else:
                assert clipped == (float(gradient) == 0.0), (ratio, sign)


@pytest.mark.parametrize("objective", ["gspo", "gspo_token"])
@pytest.mark.parametrize("padding", [0.0, -5.0, 5.0])
def test_response_ratio_ignores_padding(objective, padding):
    """The geometric mean of 1.5 and 1.2 is above 1 + .3; counting the padding would change it."""
    log_ratio = torch.tensor([[math.log(1.5), math.log(1.2), padding]], dtype=F64)
    mask = torch.tensor([[True, True, False]])
    cfg = GRPOConfig(objective=objective, clip_high=0.3)
    advantages = torch.ones(1, 1, dtype=F64)
    measured = measured_at(log_ratio, torch.zeros_like(log_ratio), advantages, mask, cfg)
    assert measured["ratio/mean"][mask].tolist() == pytest.approx([math.sqrt(1.8)] * 2)
    assert measured["clip/high"][mask].tolist() == [True, True]
    wider = measured_at(log_ratio, torch.zeros_like(log_ratio), advantages, mask, replace(cfg, clip_high=0.35))
    assert wider["clip/high"][mask].tolist() == [False, False]


# ---------------------------------------------------------------- aggregation


def test_token_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    rows, tokens = torch.tensor(2), torch.tensor(5)
    expected = {
        "token": [[0.2, 0.2, 0.2, 0.2], [0.2, 0, 0, 0], [0, 0, 0, 0]],
        "sequence": [[0.125, 0.125, 0.125, 0.125], [0.5, 0, 0, 0], [0, 0, 0, 0]],
        "constant": [[1 / 16, 1 / 16, 1 / 16, 1 / 16], [1 / 16, 0, 0, 0], [0, 0, 0, 0]],
    }
    assert expected.keys() == AGGREGATES.keys()
    for name, weights in expected.items():
        measured = AGGREGATES[name](mask, rows, tokens, GRPOConfig(constant_length=8))
        torch.testing.assert_close(measured, torch.tensor(weights))


# ---------------------------------------------------------------- edge cases


def test_gspo_clamps_the_mean_of_a_response_not_its_tokens():
    """Log-ratios 30 and -29 have a mean of 1/2, which needs no clamping."""
    ratios = torch.tensor([[30.0, -29.0]], dtype=F64).exp()
    value, _ = value_and_gradient("gspo", ratios, -1.0, ALL[:, :2])
    same(value, [[-math.exp(0.5)] * 2])


def test_clip_has_no_effect_without_an_advantage():
    """At q = .01 dcpo's bounds are .5 and 5: ratios of 3 and .6 are within these and beyond the fixed bounds."""
    cfg = GRPOConfig(objective="dcpo", clip_low=0.16, clip_high=0.2)
    old = torch.full((1, 2), 0.01, dtype=F64).log()
    ratio, mask = torch.tensor([[3.0, 0.6]], dtype=F64), ALL[:, :2]
    for advantage, changed in ((0.0, [False, False]), (1.0, [True, False]), (-1.0, [False, True])):
        metrics = measured_at(old + ratio.log(), old, torch.tensor([[advantage]], dtype=F64), mask, cfg)
        assert metrics["effect/clip"].tolist() == [changed]
