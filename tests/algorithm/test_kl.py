"""Tests for the KL penalty of a response, by hand. test_expectations.py covers estimators and gradients."""

from __future__ import annotations

import pytest
import torch

from pellucid.algorithm import kl
from pellucid.algorithm.settings import GRPOConfig

F64 = torch.float64
KL = torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0]])
MASK = torch.tensor([[True, True, False], [True, True, True]])


def paying(kl_in):
    return GRPOConfig(group_size=2, kl_coef=0.5, kl_in=kl_in)


def test_kl_penalty_covers_the_response_but_not_padding():
    """The KL sums are 3 and 12. Rewards lose half of each, or advantages change by half of their difference."""
    raw = kl.subtract_kl_from_rewards(torch.tensor([[1.0, 1.0]], dtype=F64), KL, MASK, paying("raw_reward"))
    assert raw.tolist() == [[-0.5, -5.0]]
    assert kl.compute_kl_penalty(KL, MASK, paying("reward")).tolist() == [[-4.5, 4.5]]
    assert kl.compute_kl_cost(KL, MASK, paying("reward"), list) == {"reward/kl": pytest.approx(-3.75)}


def test_kl_is_charged_in_one_place_only():
    rewards = torch.tensor([[1.0, 1.0]], dtype=F64)
    for kl_in in ("reward", "loss"):
        assert kl.subtract_kl_from_rewards(rewards, KL, MASK, paying(kl_in)) is rewards
    for kl_in in ("raw_reward", "loss"):
        assert kl.compute_kl_penalty(KL, MASK, paying(kl_in)) == 0.0
