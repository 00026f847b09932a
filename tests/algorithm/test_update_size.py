"""Tests for `update/kl`, which measures how far an update moved the policy, and the learning rate that adapts to it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from conftest import CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm.batch import collate
from pellucid.algorithm.grpo import train
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig, LRAdaptation
from pellucid.algorithm.update_size import UpdateProbe, choose_probe_rows, compute_update_kl
from pellucid.distributed.runtime import Runtime
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling

SAMPLING = Sampling(max_tokens=6)


def make_batch(rows):
    groups = NativeSampler(policy=make_policy()).generate(CountDigits().sample(0, 1), Sampling(rows, 6, seed="0/0"))
    return collate(groups)


def test_update_kl_is_exact_if_token_counts_match_probabilities():
    """Among four tokens, each occurs as often as the old distribution (1/2, 1/4, 1/4) says."""
    old, new = torch.tensor([0.5, 0.5, 0.25, 0.25]), torch.tensor([0.2, 0.2, 0.7, 0.1])
    batch = make_batch(4)
    mask = torch.zeros_like(batch.action_mask)
    mask[:2, :2] = mask[3] = True  # the last row is not counted
    probe = UpdateProbe(
        replace(batch, action_mask=mask), torch.full(mask.shape, math.nan), torch.tensor([True, True, True, False])
    )
    probe.logprobs[:2, :2] = old.log().view(2, 2)
    logprobs = torch.full(mask.shape, math.nan)
    logprobs[:2, :2] = new.log().view(2, 2)
    exact = 0.5 * math.log(0.5 / 0.2) + 0.25 * math.log(0.25 / 0.7) + 0.25 * math.log(0.25 / 0.1)
    assert compute_update_kl(probe, logprobs, OneProcessRuntime()) == pytest.approx(exact, rel=1e-6)


def test_update_kl_compares_token_logprobs_before_and_after_a_step():
    policy = make_policy()
    cfg = GRPOConfig(steps=1, prompts_per_step=6, group_size=4)
    before = {name: p.clone() for name, p in policy.weights().items()}
    [step] = train(CountDigits(), NativeSampler(), policy, OneProcessRuntime(policy, lr=5.0), cfg, sampling=SAMPLING)
    after = make_policy()
    for name, p in after.weights().items():
        p.data.copy_(policy.weights()[name])
        policy.weights()[name].data.copy_(before[name])
    terms = []
    for row in (0, 16):  # two of 24 completions
        group, i = step.groups[row // 4], row % 4
        context, ids = group.prompt_ids, group.completions[i].token_ids
        x = torch.tensor([[*context, *ids]])
        old, new = (
            model.model(x).logits[0].log_softmax(-1)[len(context) - 1 : -1].gather(1, torch.tensor(ids)[:, None])
            for model in (policy, after)
        )
        terms.append((new - old).exp() - 1 - (new - old))
    assert step.metrics["update/kl"] == pytest.approx(float(torch.cat(terms).mean().detach()), rel=1e-4)
    assert step.metrics["update/kl"] > 1e-4


def test_update_kl_is_zero_when_nothing_changes():
    policy = make_policy(dtype=torch.bfloat16)
    cfg = GRPOConfig(steps=1, group_size=4)
    [step] = train(CountDigits(), NativeSampler(), policy, OneProcessRuntime(policy), cfg, sampling=SAMPLING)
    assert step.metrics["update/kl"] == 0


class OneOfTwo(OneProcessRuntime):
    """One of two processes that share a step of `prompts` prompts."""

    def __init__(self, rank, prompts):
        super().__init__()
        self.rank, self.prompts = rank, prompts

    def shard(self, items):
        return items[self.rank :: 2]

    def sum(self, x):
        return torch.full_like(x, self.prompts)


def choose(group_size, prompts, runtime, most=0, replayed=0):
    """Return the chosen completions that count and those that do not, as indices within the step."""
    own = runtime.shard(range(prompts))
    batch = make_batch(len(own) * group_size + replayed)
    rows = torch.arange(len(batch))
    is_new = rows < len(batch) - replayed
    labels = [own[row // group_size] * group_size + row % group_size for row in range(len(batch) - replayed)]
    labels = torch.tensor([*labels, *[-1] * replayed])
    batch = replace(
        batch,
        prompt_indices=rows // group_size,
        response_ids=labels[:, None].expand_as(batch.response_ids),
        step_row_indices=rows.where(is_new, -1),
    )
    chosen, counted = choose_probe_rows(batch, group_size, runtime, most)
    labels = chosen.response_ids[:, 0]
    return labels[counted].tolist(), labels[~counted].tolist()


def test_one_in_sixteen_completions_is_scored_for_any_process_count():
    assert choose(8, 5, OneProcessRuntime()) == ([0, 16, 32], [])
    assert choose(8, 5, OneProcessRuntime(), most=2) == ([0, 16], [])
    assert choose(8, 5, OneOfTwo(0, 5)) == ([0, 16, 32], [])
    assert choose(8, 4, OneOfTwo(1, 4)) == ([], [8])
    assert choose(24, 3, OneOfTwo(0, 3)) == ([0, 16, 48, 64], [])
    assert choose(24, 3, OneOfTwo(1, 3)) == ([32], [])


def test_replayed_completions_are_not_scored():
    assert choose(8, 4, OneProcessRuntime(), replayed=16) == ([0, 16], [])


def adapt(cfg, kls, factor=1.0, first=1):
    """Return the factor after each step, given how far each moves the policy at a factor of 1."""
    adaptation, factors = LRAdaptation(factor), []
    for update, kl in enumerate(kls, first):
        adaptation = cfg.adapt_lr(adaptation, kl * adaptation.factor**2, update)
        factors.append(adaptation.factor)
    return factors


def test_one_step_far_from_desired_kl_changes_the_learning_rate():
    cfg = AdamWConfig(desired_kl=1e-3, warmup=3)
    assert adapt(cfg, [2.1e-3]) == adapt(cfg, [math.inf], first=9) == [1 / 1.5]
    assert adapt(cfg, [1.9e-3], first=9) == adapt(cfg, [0.6e-3], first=9) == [1.0]
    assert [adapt(cfg, [0.4e-3], first=update) for update in (2, 3)] == [[1.0], [1.5]], "it rises after the warmup"
    assert adapt(cfg, [0.0, math.nan], first=9) == [1.0, 1.0]
    assert adapt(AdamWConfig(), [1.0]) == [1.0]
    with pytest.raises(ValueError, match='schedule = "constant"'):
        AdamWConfig(desired_kl=1e-3, schedule="cosine")


def test_learning_rate_stays_between_its_limits():
    cfg = AdamWConfig(desired_kl=1e-3)
    assert min(adapt(cfg, [1e9] * 30)) == pytest.approx(0.01)
    assert max(adapt(cfg, [1e-12] * 30)) == pytest.approx(100)


@pytest.mark.parametrize(("kl", "changes"), [(0.05, 4), (5e-7, 9)])
def test_learning_rate_stops_as_soon_as_steps_have_the_desired_size(kl, changes):
    """(2 / 3)^8 and (3 / 2)^18 are the first powers by which KL comes within a factor of two of 0.001."""
    factors = adapt(AdamWConfig(desired_kl=1e-3), [kl] * 40)
    assert factors[changes - 1 :] == [factors[changes - 1]] * (41 - changes)
    assert factors[changes - 1] == pytest.approx(1.5 ** (changes if kl < 1e-3 else -changes))


def test_learning_rate_follows_the_running_mean():
    """Steps of 4.8 times the desired size, of which each is a quarter of the mean: 1.95 times, then 2.66 times."""
    cfg = AdamWConfig(desired_kl=1e-3)
    assert adapt(cfg, [1e-3] * 20 + [4.8e-3, 4.8e-3])[-2:] == [1.0, 1 / 1.5]


def test_learning_rate_recovers_from_an_infinite_step():
    factors = adapt(AdamWConfig(desired_kl=1e-3), [1e-3] * 4 + [math.inf] + [1e-3] * 40)
    assert min(factors) < 0.5
    assert 0.5 <= factors[-1] ** 2 <= 2


def test_learning_rate_does_not_drift_if_few_steps_are_large():
    """Three steps of four hardly move the policy, and the fourth moves it by almost four times the desired KL."""
    factors = adapt(AdamWConfig(desired_kl=1e-3), [3e-5, 3e-5, 3e-5, 3.9e-3] * 50)
    assert max(factors[20:]) <= 1.5 * min(factors[20:]) <= 1.5**2


@pytest.mark.slow
def test_run_reaches_desired_kl_from_too_high_and_too_low_rates():
    last = {}
    for lr in (0.005, 3e-5):
        policy = make_policy()
        cfg = GRPOConfig(steps=30, prompts_per_step=8, group_size=4)
        runtime = Runtime(policy, AdamWConfig(lr=lr, desired_kl=1e-3), total_updates=30)
        steps = list(train(CountDigits(), NativeSampler(), policy, runtime, cfg, sampling=SAMPLING))
        rates = [step.metrics["lr"] for step in steps]
        assert {round(max(x, y) / min(x, y), 6) for x, y in pairwise(rates)} == {1.0, 1.5}
        last[lr] = sorted(step.metrics["update/kl"] for step in steps[-7:])[3]
    assert all(3e-4 < kl < 3e-3 for kl in last.values()), last
