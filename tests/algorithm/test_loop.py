"""Tests for what the loop passes between stages: weights to the sampler, seeds to sampling, rounds to the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_grpo import Coin, distance, four_groups, gradients_of, kl_run, rollouts, run_rollout

from conftest import CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm import grpo
from pellucid.algorithm.batch import collate, collect_grades, collect_task_rewards
from pellucid.algorithm.grpo import Scores, TrainingState, train
from pellucid.algorithm.metrics import StageClock
from pellucid.algorithm.rollouts import collect_rollouts
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.algorithm.shaping import smooth_rewards
from pellucid.distributed.runtime import Runtime
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, Group, Prompt, Reward, Sampling, grade_groups


def test_every_step_samples_with_the_weights_of_the_last_update():
    """The sampler keeps a copy of the last weights it received, as an engine does."""

    versions = []

    class Copied(NativeSampler):
        def sync(self, policy, version):
            super().sync(policy, version)
            self.told = {name: p.detach().clone() for name, p in policy.weights().items()}

        def generate(self, prompts, sampling):
            assert all(torch.equal(p, self.told[name]) for name, p in self.policy.weights().items())
            versions.append(self.version)
            return super().generate(prompts, sampling)

    policy = make_policy()
    before = {name: p.detach().clone() for name, p in policy.weights().items()}
    cfg = GRPOConfig(steps=3, group_size=4)
    runtime, sampling = OneProcessRuntime(policy, lr=0.5), Sampling(max_tokens=6)
    sampler, state = Copied(), TrainingState(step=1)
    results = list(train(CountDigits(), sampler, policy, runtime, cfg, state=state, sampling=sampling))
    assert versions == [1, 2], "the steps that there were before"
    assert [{c.version for g in result.groups for c in g.completions} for result in results] == [{1}, {2}]
    assert not all(torch.equal(p, before[name]) for name, p in policy.weights().items())


def test_every_seed_step_and_round_has_its_own_samples():
    """All of them have the same prompts with the same ids."""

    class Same(Coin):
        def sample(self, step, n):
            return [Prompt(str(i), "1+1?", columns={"dead": self.dead(step, i)}) for i in range(n)]

    sampler, sampling = NativeSampler(policy=make_policy()), Sampling(max_tokens=8)

    def drawn(step, dead=lambda step, i: False, **settings):
        cfg = GRPOConfig(group_size=4, **settings)
        groups, _ = collect_rollouts(Same(dead), sampler, sampling, OneProcessRuntime(), step, cfg, StageClock())
        return [[c.token_ids for c in group.completions] for group in groups]

    assert drawn(0) == drawn(0)
    assert len({str(drawn(step, seed=seed)) for step in range(3) for seed in range(3)}) == 9
    rounds = drawn(0, lambda step, i: i > 1, max_rounds=2)  # prompts 0 and 1 of both rounds
    assert rounds[:2] != rounds[2:]


def test_rounds_continue_until_the_last_dead_group_is_replaced():
    """One of four groups is missing and three of four were live, so two more are sampled. The second one is live."""
    groups, drawn = run_rollout(Coin(lambda step, i: i == 0), max_rounds=5, steps=10)
    assert [g.prompt.id.split("/")[-1] for g in groups] == ["1", "2", "3", "1"]
    assert not any(g.prompt.columns["dead"] for g in groups)
    assert (drawn["groups/drawn"], drawn["groups/drawn_dead"]) == (6, pytest.approx(1 / 3))


def test_rewards_are_compared_in_double_precision():
    """In fp32 these rewards would be equal."""
    answer = Completion((1,), (0.0,), "", True)
    group = Group(Prompt("p", "?"), (0,), (answer, answer), (Reward(1.0), Reward(1.0 + 1e-8)))
    assert collect_task_rewards([group]).tolist() == [[1.0, 1.0 + 1e-8]]


def test_padding_does_not_affect_the_loss():
    """The padding holds infinities in entropy, sampler and reference log-probs, and junk in the old log-probs."""
    policy = make_policy(dtype=torch.float64)
    batch = rollouts(policy)
    cfg = GRPOConfig(kl="k2", kl_in="loss", kl_coef=0.1, entropy_coef=0.1, objective="gspo_token", epochs=2)
    batch = grpo.add_old_and_reference_logprobs(
        batch, policy, make_policy(dtype=torch.float64, seed=3), OneProcessRuntime(), cfg
    )
    batch = replace(batch, token_weights=grpo.compute_token_weights(batch, OneProcessRuntime(), cfg))
    scores = policy.score(batch)

    def rubbish(x):
        return x.masked_fill(~batch.response_mask, -math.inf)

    expected, _ = grpo.compute_loss(scores, batch, cfg)
    spoilt = replace(
        batch,
        sampler_logprobs=rubbish(batch.sampler_logprobs),
        ref_logprobs=rubbish(batch.ref_logprobs),
        old_logprobs=batch.old_logprobs.masked_fill(~batch.response_mask, 7.0),
    )
    loss, _ = grpo.compute_loss(Scores(scores.logprobs, rubbish(scores.entropy)), spoilt, cfg)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_dead_groups_still_get_the_gradient_of_kl_in_the_loss(kl):
    """Without any advantage the gradient is that of the mean KL over all tokens."""
    policy, reference = make_policy(dtype=torch.float64), make_policy(dtype=torch.float64, seed=3)
    cfg = GRPOConfig(kl=kl, kl_in="loss", kl_coef=0.1)
    batch = rollouts(policy)
    batch = replace(batch, advantages=torch.zeros_like(batch.sampler_logprobs, dtype=torch.float64))
    batch = grpo.add_old_and_reference_logprobs(batch, policy, reference, OneProcessRuntime(), cfg)
    measured, _ = gradients_of(policy, batch, cfg)
    gap = (batch.ref_logprobs - policy.score(batch).logprobs)[batch.response_mask]
    loss = 0.1 * (gap.square() / 2 if kl == "k2" else gap.exp() - 1 - gap).mean()
    names = list(measured)
    expected = torch.autograd.grad(loss, [policy.trainable()[name] for name in names])
    assert distance(measured, dict(zip(names, expected, strict=True))) < 1e-6  # fp32 weights


def test_rows_are_clipped_at_their_own_bounds():
    """Both rows have a ratio of 1.25, which is beyond the bound of the second row alone."""
    logprobs = torch.full((2, 1), math.log(1.25)).requires_grad_()
    answer = Completion((1,), (0.0,), "", True)
    batch = replace(
        collate([Group(Prompt("p", "?"), (0,), (answer, answer))]),
        old_logprobs=torch.zeros(2, 1),
        advantages=torch.ones(2, 1),
        token_weights=torch.full((2, 1), 0.5),
        clip_high=torch.tensor([0.3, 0.1]),
    )
    loss, metrics = grpo.compute_loss(Scores(logprobs, torch.zeros(2, 1)), batch, GRPOConfig(clip_difficulty=1.0))
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [[pytest.approx(-0.625)], [0.0]]
    assert metrics["clip/high"].tolist() == [False, True]


def test_moving_reference_keeps_a_share_of_its_weights():
    policy, reference = make_policy(), make_policy(seed=3)
    before = {name: p.detach().clone() for name, p in reference.weights().items()}
    kl_run(policy, reference, reference_every=4, reference_decay=0.75)
    for name, p in reference.weights().items():
        torch.testing.assert_close(p, 0.75 * before[name] + 0.25 * policy.weights()[name])


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_similarity_uses_the_configured_layer(layer):
    policy = make_policy()
    groups = grade_groups(CountDigits(), four_groups(policy))
    batch, grades = collate(groups), collect_grades(groups)
    cfg = GRPOConfig(group_size=4, similarity="smooth", similarity_layer=layer, micro_batch=3)
    shaped = grpo.shape_rewards(grades.rewards, batch, policy, cfg)
    states = policy.embed(batch, layer).view(4, 4, -1)
    torch.testing.assert_close(shaped, smooth_rewards(grades.rewards, states, cfg), rtol=0, atol=1e-3)
    elsewhere = smooth_rewards(grades.rewards, policy.embed(batch, {0: 1, 1: 0, -1: 0}[layer]).view(4, 4, -1), cfg)
    assert (shaped - elsewhere).abs().max() > 1e-2


def test_overlong_penalty_and_kl_are_subtracted_from_rewards():
    """Two of four tokens of the cache are used, which costs 1/2. The answers have KL 3 and 1, which costs a tenth."""
    answers = tuple(Completion((1,) * n, (0.0,) * n, "", True) for n in (8, 4))
    groups = [Group(Prompt("p", "?"), (0,), answers, (Reward(1.0), Reward(1.0)))]
    batch = collate(groups)
    kl = torch.zeros(2, 8)
    kl[0, :3], kl[1, 0] = 1.0, 1.0
    cfg = GRPOConfig(group_size=2, max_length=10, overlong_cache=4, kl_in="raw_reward", kl_coef=0.1)
    shaped = grpo.shape_rewards(collect_grades(groups).rewards, replace(batch, kl=kl), None, cfg)
    torch.testing.assert_close(shaped, torch.tensor([[0.2, 0.9]], dtype=torch.float64), rtol=0, atol=1e-7)


def test_out_of_memory_repeats_the_step_with_smaller_micro_batches():
    """The third forward pass of eight rows runs out of memory; the step starts again with four rows at a time."""
    weights, metrics, sizes = [], [], []
    for limit in (8, 4):
        policy = make_policy()
        batch, score = rollouts(policy), policy.score

        def scored(part, score=score):
            sizes.append(len(part))
            if len(part) == 8 and sizes.count(8) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return score(part)

        policy.score = scored
        runtime = Runtime(policy, AdamWConfig(lr=1e-2), total_updates=1)
        metrics.append(grpo.update_policy(policy, batch, runtime, GRPOConfig(micro_batch=limit, entropy_coef=1e-30)))
        weights.append(policy.weights())
    assert sizes == [8, 8, 8, *[4] * 6, *[4] * 6]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-9)
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())


def test_errors_other_than_out_of_memory_are_raised():
    policy = make_policy()

    def broken(part):
        raise RuntimeError("no such thing")

    batch, policy.score = rollouts(policy), broken
    with pytest.raises(RuntimeError, match="no such thing"):
        grpo.update_policy(policy, batch, Runtime(policy, AdamWConfig(), total_updates=1), GRPOConfig())
