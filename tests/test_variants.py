"""Every published variant trains: three steps of a tiny model on graded rewards of two terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from conftest import CountDigits, OneProcessRuntime, make_policy
from pellucid import config
from pellucid.grpo import State, train
from pellucid.samplers.native import Native
from pellucid.types import Reward

VARIANTS = sorted(Path("recipes/variants").glob("*.toml"))


@dataclass(frozen=True)
class TwoTerms(CountDigits):
    def reward(self, prompt, completion):
        digits = super().reward(prompt, completion)
        brevity = 1 - len(completion.token_ids) / 24
        parts = {"digits": digits.value, "brevity": brevity}
        return Reward(digits.value + 0.1 * brevity, parts, digits.correct, weights={"brevity": 0.1})


def run(cfg):
    policy, reference = make_policy(), make_policy(seed=1)
    if cfg.kl_coef and cfg.kl == "exact":
        policy.measure_kl(reference)
    before = {name: p.detach().clone() for name, p in policy.weights().items()}
    runtime = OneProcessRuntime(policy, lr=0.2)
    steps = list(
        train(
            TwoTerms(),
            Native(max_tokens=24),
            policy,
            runtime,
            cfg,
            reference if cfg.kl_coef else None,
            State(kl_coef=cfg.kl_coef),
        )
    )
    return steps, {name: p.detach() - before[name] for name, p in policy.weights().items()}


def tiny(path):
    cfg = config.load(path).algorithm
    return replace(cfg, steps=3, constant_length=24, group_size=4)


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_a_variant_trains_three_steps(path):
    steps, change = run(tiny(path))
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        assert all(math.isfinite(value) for value in step.metrics.values()), step.metrics
        assert step.metrics["grad_norm"] > 0
        assert step.metrics["skipped"] == 0
    assert max(float(x.abs().max()) for x in change.values()) > 1e-4


def test_each_variant_is_another_algorithm():
    """No two recipes move the weights alike: every key of a recipe does something."""
    moved = {path.stem: torch.cat([x.flatten() for x in run(tiny(path))[1].values()]) for path in VARIANTS}
    names = sorted(moved)
    alike = [
        (one, other)
        for i, one in enumerate(names)
        for other in names[i + 1 :]
        if torch.allclose(moved[one], moved[other], rtol=0, atol=1e-7)
    ]
    assert alike == []
