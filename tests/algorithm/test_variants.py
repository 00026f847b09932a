"""Test that every published variant trains a tiny model for three steps on a reward of two terms."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from conftest import CountDigits, OneProcessRuntime, make_policy, mostly_slow
from pellucid import config
from pellucid.algorithm.grpo import TrainingState, train
from pellucid.algorithm.settings import GRPOConfig
from pellucid.rollout.native import NativeSampler
from pellucid.types import Reward, Sampling

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
        policy.set_kl_reference(reference)
    before = {name: p.detach().clone() for name, p in policy.weights().items()}
    runtime = OneProcessRuntime(policy, lr=0.2)
    steps = list(
        train(
            TwoTerms(),
            NativeSampler(),
            policy,
            runtime,
            cfg,
            reference if cfg.kl_coef else None,
            TrainingState(kl_coef=cfg.kl_coef),
            Sampling(max_tokens=24),
        )
    )
    return steps, {name: p.detach() - before[name] for name, p in policy.weights().items()}


def tiny(path):
    cfg = config.load_config(path).algorithm
    return replace(cfg, steps=3, max_length=24, group_size=4)


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_a_variant_trains_three_steps(path):
    steps, change = run(tiny(path))
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        assert all(math.isfinite(value) for value in step.metrics.values()), step.metrics
        assert step.metrics["grad_norm"] > 0
        assert step.metrics["skipped"] == 0
    assert max(float(x.abs().max()) for x in change.values()) > 1e-4


# The settings that are invalid without the key that is left out.
WITH_IT = {
    "kl_coef": {"kl_target": 0.0, "reference_every": 0, "reference_decay": 0.0},
    "reference_every": {"reference_decay": 0.0},
    "kl_in": {"kl": "k1"},
    "objective": {"dual_clip": 0.0},
}
# The keys that have no effect in this small setup.
NO_OCCASION = {
    "dapo": ["max_rounds"],  # no group is dead
    "gspo": ["clip_high"],  # no whole response becomes that much likelier
    "gspo_token": ["clip_high"],
    "length_grouped": ["advantage"],  # groups of four fill no cell
    "rloo": ["objective"],  # on-policy "reinforce" and "ppo_clip" have the same gradient
    "truncated_is": ["correction"],  # the sampler is exact
}


def moved(cfg):
    return torch.cat([x.flatten() for x in run(replace(cfg, steps=2))[1].values()])


@pytest.mark.parametrize("path", mostly_slow(VARIANTS, every=5), ids=lambda path: path.stem)
def test_every_key_of_a_recipe_does_something(path):
    whole, plain = tiny(path), GRPOConfig()
    after = moved(whole)
    keys = tomllib.loads(path.read_text())["algorithm"]
    without = {key: {**WITH_IT.get(key, {}), key: getattr(plain, key)} for key in keys}
    idle = [key for key in keys if torch.allclose(moved(replace(whole, **without[key])), after, rtol=0, atol=1e-6)]
    assert idle == NO_OCCASION.get(path.stem, [])
