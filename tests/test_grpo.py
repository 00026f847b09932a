"""The algorithm against exact sums over every sequence of a small policy, autograd, identities, numbers by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from conftest import EOS, CountDigits, OneProcessRuntime, make_policy
from pellucid import grpo
from pellucid.grpo import ADVANTAGES, AGGREGATES, KL, OBJECTIVES, Batch, Scores, collate, loss_terms, train, update
from pellucid.samplers.native import Native
from pellucid.types import Completion, Group, GRPOConfig, Prompt, Reward

F64 = torch.float64
AXES = [{"aggregate": "token"}, {"aggregate": "sequence"}, {"aggregate": "constant"}]


def rollouts(policy, size=6, n=4, max_tokens=24):
    sampler = Native(temperature=1.0, max_tokens=max_tokens)
    sampler.sync(policy)
    groups, rewards = grpo.grade(CountDigits(), sampler.generate(CountDigits().sample(0, n), size, seed="0/0"))
    batch = collate(groups, policy.device)
    assert not bool(batch.mask.all()), "completions must differ in length"
    return replace(batch, advantages=ADVANTAGES["grpo"](rewards).flatten())


def gradients_of(policy, batch, cfg):
    runtime = OneProcessRuntime(policy)
    metrics = update(policy, batch, runtime, cfg)
    return runtime.gradients, metrics


def distance(one, other):
    norm = math.sqrt(sum(float(g.square().sum()) for g in one.values()))
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one)) / norm


# ---------------------------------------------------------------- advantages


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 5.0]], dtype=F64)
    root3 = math.sqrt(3)
    sigma = math.sqrt((4 + 1 + 0 + 9) / 4)
    expected = {
        "grpo": [[root3, -1 / root3, -1 / root3, -1 / root3], [-2 / sigma, -1 / sigma, 0, 3 / sigma]],
        "centered": [[0.75, -0.25, -0.25, -0.25], [-2, -1, 0, 3]],
        "rloo": [[1, -1 / 3, -1 / 3, -1 / 3], [-8 / 3, -4 / 3, 0, 4]],
    }
    assert expected.keys() == ADVANTAGES.keys()
    for name, values in expected.items():
        torch.testing.assert_close(ADVANTAGES[name](rewards), torch.tensor(values, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_have_exactly_no_advantage(name):
    rewards = torch.rand(100_000, 1, dtype=F64).expand(-1, 12)
    assert ADVANTAGES[name](rewards).abs().max() == 0.0
    a_rounding_apart = torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3]], dtype=F64)
    assert ADVANTAGES[name](a_rounding_apart).abs().max() == 0.0
    tiny_but_real = torch.tensor([[1e-6, 0.0, 0.0, 0.0]], dtype=F64)
    assert ADVANTAGES[name](tiny_but_real).abs().max() > 0.0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_do_not_feel_a_shift_and_grpo_no_scale(name):
    rewards = torch.rand(50, 8, dtype=F64)
    plain = ADVANTAGES[name](rewards)
    torch.testing.assert_close(ADVANTAGES[name](rewards + 7.0), plain, rtol=0, atol=1e-12)
    scale = 1.0 if name == "grpo" else 3.0
    torch.testing.assert_close(ADVANTAGES[name](3.0 * rewards), scale * plain, rtol=1e-12, atol=0)


# ------------------------------------- expected gradients: every sequence of a small policy is summed over

STOP, WORDS, LENGTH = 2, 3, 2  # tokens 0, 1 and STOP; at most two tokens


def sequences():
    yield (STOP,)
    yield from ((a, b) for a in range(WORDS - 1) for b in range(WORDS))


def logits_of(theta, ids):
    """[T, V]: free logits for the first token, and for the second given the first."""
    return torch.stack([theta[0] if t == 0 else theta[1 + ids[0]] for t in range(len(ids))])


def token_scores(theta, ids):
    return logits_of(theta, ids).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def probability(theta, ids):
    return token_scores(theta, ids).sum().exp()


REWARDS = dict(zip(sequences(), [0.3, 1.0, 0.0, 0.7, 0.2, 1.0, 0.4], strict=True))


def expected_gradient(theta, cfg, ref=None):
    """E over all groups of two of the gradient of the package's loss; minus it is the direction of ascent."""
    cfg = replace(cfg, group_size=2)
    total = torch.zeros_like(theta)
    for pair in itertools.product(sequences(), repeat=2):
        chance = float(probability(theta.detach(), pair[0]) * probability(theta.detach(), pair[1]))
        batch = batch_of(pair, theta, ref)
        rewards = torch.tensor([[REWARDS[ids] for ids in pair]], dtype=F64)
        advantages = ADVANTAGES[cfg.advantage](rewards) - grpo.kl_penalty(batch, cfg)
        batch = replace(batch, advantages=advantages.flatten())
        batch = replace(batch, weights=AGGREGATES[cfg.aggregate](batch.mask, OneProcessRuntime(), cfg))
        logprobs = torch.nn.utils.rnn.pad_sequence([token_scores(theta, ids) for ids in pair], batch_first=True)
        loss, _ = loss_terms(Scores(logprobs, torch.zeros_like(logprobs)), batch, cfg)
        total += chance * torch.autograd.grad(loss, theta)[0]
    return total


def batch_of(pair, theta, ref):
    def padded(rows):
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    return Batch(
        prompt_ids=((0,),),
        prompt_of=torch.zeros(2, dtype=torch.long),
        response_ids=padded(torch.tensor(ids) for ids in pair),
        mask=padded(torch.ones(len(ids), dtype=torch.bool) for ids in pair),
        sampler_logprobs=padded(token_scores(theta.detach(), ids) for ids in pair),
        old_logprobs=padded(token_scores(theta.detach(), ids) for ids in pair),
        ref_logprobs=None if ref is None else padded(token_scores(ref, ids) for ids in pair),
    )


def thetas():
    generator = torch.Generator().manual_seed(5)
    theta, ref = (torch.randn(WORDS, WORDS, dtype=F64, generator=generator) for _ in range(2))
    return theta.requires_grad_(), ref


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("advantage", "factor"), [("rloo", 1.0), ("centered", 0.5)])
def test_the_expected_step_is_the_gradient_of_the_expected_reward(objective, advantage, factor):
    """Constant aggregation divides by B * length: E[-grad loss] = factor * grad J / length; the mean costs 1/G."""
    theta, _ = thetas()
    value = sum(probability(theta, ids) * REWARDS[ids] for ids in sequences())
    exact = torch.autograd.grad(value, theta)[0]
    cfg = GRPOConfig(advantage=advantage, objective=objective, aggregate="constant", constant_length=LENGTH)
    torch.testing.assert_close(-expected_gradient(theta, cfg), factor * exact / LENGTH, rtol=0, atol=1e-12)


def per_token_kl(theta, ref, reverse):
    """E over pi's own prefixes of sum_t KL at t, prefixes held fixed: what a token-level loss can see."""
    total = 0.0
    for ids in sequences():
        mine, other = logits_of(theta, ids).log_softmax(-1), logits_of(ref, ids).log_softmax(-1)
        p, q = (mine, other) if reverse else (other, mine)
        total = total + probability(theta, ids).detach() * (p.exp() * (p - q)).sum()
    return total


@pytest.mark.parametrize(("kl", "reverse"), [("k2", True), ("k3", False)])
def test_kl_in_the_loss_has_the_gradient_of_kl_pi_ref_for_k2_and_of_kl_ref_pi_for_k3(kl, reverse):
    theta, ref = thetas()
    cfg = GRPOConfig(kl=kl, kl_in="loss", kl_coef=1.0, aggregate="constant", constant_length=1)
    without = replace(cfg, kl_coef=0.0)
    measured = expected_gradient(theta, cfg, ref) - expected_gradient(theta, without)
    exact = torch.autograd.grad(per_token_kl(theta, ref, reverse), theta)[0]
    torch.testing.assert_close(measured, exact, rtol=0, atol=1e-12)
    wrong = torch.autograd.grad(per_token_kl(theta, ref, not reverse), theta)[0]
    assert (measured - wrong).abs().max() > 1e-2


def test_k1_in_the_loss_does_nothing_but_noise():
    theta, ref = thetas()
    cfg = GRPOConfig(kl="k1", kl_in="loss", kl_coef=1.0, aggregate="constant", constant_length=1)
    measured = expected_gradient(theta, cfg, ref) - expected_gradient(theta, replace(cfg, kl_coef=0.0))
    assert measured.abs().max() < 1e-12


@pytest.mark.parametrize("advantage", ["rloo", "grpo"])
def test_k1_in_the_reward_has_the_gradient_of_the_sequence_kl(advantage):
    """Also with advantages divided by a std: the penalty stands outside, so kl_coef keeps its meaning."""
    theta, ref = thetas()
    cfg = GRPOConfig(kl_coef=0.3, advantage=advantage, aggregate="constant", constant_length=1)
    measured = expected_gradient(theta, cfg, ref) - expected_gradient(theta, replace(cfg, kl_coef=0.0))
    kl = sum(probability(theta, ids) * (token_scores(theta, ids) - token_scores(ref, ids)).sum() for ids in sequences())
    torch.testing.assert_close(measured, 0.3 * torch.autograd.grad(kl, theta)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_kl_estimators_are_unbiased(kl):
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.2, 0.2, 0.6], dtype=F64)
    exact = (p * (p.log() - q.log())).sum()
    torch.testing.assert_close((p * KL[kl](p.log(), q.log())).sum(), exact, rtol=0, atol=1e-12)


def test_kl_of_far_apart_policies_stays_finite():
    for kl in KL.values():
        assert bool(kl(torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, -1.0])).isfinite().all())


# ---------------------------------------------------------------- objectives


def test_the_clip_takes_the_gradient_only_where_it_would_lead_further_out():
    cfg = GRPOConfig(clip_low=0.2, clip_high=0.3)
    ratios = torch.tensor([0.7, 0.9, 1.25, 1.4], dtype=F64)
    for sign, moving in ((1.0, [True, True, True, False]), (-1.0, [False, True, True, True])):
        logprobs = ratios.log().requires_grad_()
        value = OBJECTIVES["clipped"](logprobs, torch.zeros(4, dtype=F64), torch.tensor(sign, dtype=F64), cfg)
        gradient = torch.autograd.grad(value.sum(), logprobs)[0]
        expected = torch.where(torch.tensor(moving), sign * ratios, torch.zeros(4, dtype=F64))
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert OBJECTIVES["clipped"](torch.tensor(math.log(1.4)), torch.tensor(0.0), 1.0, cfg) == pytest.approx(1.3)
    assert OBJECTIVES["clipped"](torch.tensor(math.log(0.7)), torch.tensor(0.0), -1.0, cfg) == pytest.approx(-0.8)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_policy_every_objective_has_the_gradient_of_the_naive_one(objective):
    """The ratio is exp of a difference, so its gradient points up where the advantage is positive (E4-1)."""
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    naive, _ = gradients_of(policy, batch, GRPOConfig(objective="naive"))
    this, metrics = gradients_of(policy, batch, GRPOConfig(objective=objective))
    assert distance(naive, this) < 1e-12
    assert metrics["grad_norm"] > 1e-3
    assert metrics["ratio/mean"] == 1.0


# ---------------------------------------------------------------- aggregation


def test_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    cfg = GRPOConfig(constant_length=8)
    expected = {
        "token": [[0.2, 0.2, 0.2, 0.2], [0.2, 0, 0, 0]],
        "sequence": [[0.125, 0.125, 0.125, 0.125], [0.5, 0, 0, 0]],
        "constant": [[1 / 16, 1 / 16, 1 / 16, 1 / 16], [1 / 16, 0, 0, 0]],
    }
    assert expected.keys() == AGGREGATES.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(AGGREGATES[name](mask, OneProcessRuntime(), cfg), torch.tensor(weights))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_the_gradient_does_not_depend_on_the_micro_batch(axis, micro_batch):
    policy = make_policy(dtype=F64)
    batch = replace(rollouts(policy), ref_logprobs=None)
    cfg = GRPOConfig(**axis, constant_length=24, entropy_coef=0.1)
    whole, metrics = gradients_of(policy, batch, cfg)
    split, split_metrics = gradients_of(policy, batch, replace(cfg, micro_batch=micro_batch))
    assert distance(whole, split) < 1e-10
    assert split_metrics == pytest.approx(metrics, rel=1e-9)


def widened(batch, extra):
    """The same rollouts with `extra` columns of rubbish on the right."""

    def pad(x):
        if not isinstance(x, torch.Tensor) or x.dim() == 1:
            return x
        rubbish = torch.full((len(x), extra), EOS, dtype=x.dtype) if x.dtype != torch.bool else None
        return torch.cat([x, torch.zeros(len(x), extra, dtype=torch.bool) if rubbish is None else rubbish], 1)

    return replace(batch, **{name: pad(getattr(batch, name)) for name in batch.__dataclass_fields__})


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("extra", [1, 7])
def test_the_gradient_does_not_depend_on_padding(axis, extra):
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    cfg = GRPOConfig(**axis, constant_length=24)
    plain, metrics = gradients_of(policy, batch, cfg)
    padded, padded_metrics = gradients_of(policy, widened(batch, extra), cfg)
    assert distance(plain, padded) < 1e-12
    assert padded_metrics == pytest.approx(metrics, rel=1e-9)


def test_the_stop_is_trained_and_the_padding_is_not():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    row, t = (batch.response_ids == EOS).logical_and(batch.mask).nonzero()[0].tolist()
    leaf = policy.score(batch).logprobs.detach().requires_grad_()
    weights = AGGREGATES["token"](batch.mask, OneProcessRuntime(), GRPOConfig())
    loss, _ = loss_terms(Scores(leaf, torch.zeros_like(leaf)), replace(batch, weights=weights), GRPOConfig())
    gradient = torch.autograd.grad(loss, leaf)[0]
    assert gradient[row, t] != 0.0
    assert bool((gradient[~batch.mask] == 0.0).all())


def test_the_loss_is_zero_on_policy_while_the_gradient_is_not():
    policy = make_policy(dtype=F64)
    _, metrics = gradients_of(policy, rollouts(policy), GRPOConfig(aggregate="sequence"))
    assert abs(metrics["loss"]) < 1e-8  # the weights are fp32
    assert metrics["grad_norm"] > 1e-3


def test_the_entropy_bonus_raises_entropy():
    policy = make_policy(dtype=F64, entropy_grad=True)
    batch = rollouts(policy)
    batch = replace(batch, advantages=torch.zeros(len(batch), dtype=F64))
    before = update(policy, batch, OneProcessRuntime(policy, lr=0.05), GRPOConfig(entropy_coef=1.0))["entropy"]
    after = update(policy, batch, OneProcessRuntime(policy), GRPOConfig(entropy_coef=1.0))["entropy"]
    assert after > before + 1e-4


@pytest.mark.parametrize("axis", AXES)
def test_rows_without_advantage_are_left_out_and_change_nothing(axis):
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    advantages = batch.advantages.clone()
    advantages[6:18] = 0.0
    batch = replace(batch, advantages=advantages)
    cfg = GRPOConfig(**axis, constant_length=24)
    assert len(grpo.with_gradient(batch, cfg)) == int((advantages != 0).sum()) < len(batch)
    skipped, _ = gradients_of(policy, batch, cfg)
    # With a bonus of next to nothing every row is computed.
    computed, _ = gradients_of(policy, batch, replace(cfg, entropy_coef=1e-300))
    assert distance(skipped, computed) < 1e-10


def test_where_all_are_dead_a_step_is_taken_all_the_same():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    _, metrics = gradients_of(policy, replace(batch, advantages=torch.zeros(len(batch), dtype=F64)), GRPOConfig())
    assert metrics["grad_norm"] == 0.0
    assert math.isfinite(metrics["entropy"])


def test_the_sampler_gap_is_seen_where_it_is():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    batch.sampler_logprobs[3, 0] += 0.25
    batch.sampler_logprobs[7, 0] -= 0.5
    metrics = gradients_of(policy, batch, GRPOConfig(micro_batch=4, entropy_coef=1e-300))[1]
    assert metrics["sampler/gap_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["sampler/gap_mean"] == pytest.approx(0.75 / float(batch.mask.sum()), abs=1e-5)


# ---------------------------------------------------------------- several inner steps


def test_off_policy_steps_read_the_old_policy():
    """Second epoch: old_logprobs are of the policy before the first, so the ratio has moved and the clip can act."""
    policy = make_policy(dtype=F64)
    cfg = GRPOConfig(epochs=3, clip_low=0.01, clip_high=0.01)
    batch = grpo.score_fixed(rollouts(policy), policy, None, cfg)
    assert batch.old_logprobs is not None
    metrics = update(policy, batch, OneProcessRuntime(policy, lr=0.5), cfg)
    assert metrics["clip/low"] + metrics["clip/high"] > 0.05


def test_minibatches_are_whole_groups_and_each_takes_a_step():
    policy = make_policy(dtype=F64)
    batch = rollouts(policy)
    batch = replace(batch, advantages=torch.ones_like(batch.advantages))
    cfg = GRPOConfig(minibatches=2, prompts_per_step=4)
    runtime = OneProcessRuntime(policy, lr=0.1)
    seen = []
    runtime.accumulate = lambda micro_batches: seen.append([len(m) for m in micro_batches]) or iter(micro_batches)
    update(policy, grpo.score_fixed(batch, policy, None, cfg), runtime, cfg)
    assert seen == [[12], [12]]


# ---------------------------------------------------------------- between the stages


def group_of(values, errors=False):
    completions = tuple(Completion((i, EOS), (-1.0, -1.0), str(i), True) for i in range(len(values)))
    return Group(Prompt("p", "q"), (1, 2), completions), values


class Scripted:
    seed, split = 0, "train"

    def __init__(self, values):
        self.values = values

    def reward(self, prompt, completion):
        return Reward(self.values[completion.token_ids[0]])


def test_a_failed_reward_is_neutral_not_zero():
    group, values = group_of([1.0, math.nan, 0.0, 0.5])
    graded, rewards = grpo.grade(Scripted(values), [group])
    assert rewards.tolist() == [[1.0, 0.5, 0.0, 0.5]]
    assert math.isnan(graded[0].rewards[1].value), "the record keeps what happened"
    assert ADVANTAGES["grpo"](rewards)[0, 1] == 0.0
    _, all_failed = grpo.grade(Scripted([math.nan] * 2), [group_of([0, 0])[0]])
    assert ADVANTAGES["grpo"](all_failed).abs().max() == 0.0


def test_a_batch_is_made_from_lengths():
    short, long = Completion((EOS,), (-0.5,), "", True), Completion((4, EOS, 5), (-1.0, -2.0, -3.0), "x", False)
    batch = collate([Group(Prompt("p", "q"), (1, 2), (short, long))], torch.device("cpu"))
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.prompt_of.tolist() == [0, 0]
    assert batch.sampler_logprobs[1].tolist() == [-1.0, -2.0, -3.0]


def test_rows_keep_what_belongs_together():
    policy = make_policy()
    batch = rollouts(policy)
    part = batch.rows(slice(5, 7))
    assert part.mask.shape == (2, int(batch.mask[5:7].sum(-1).max()))
    assert part.prompt_of.tolist() == [0, 1]
    torch.testing.assert_close(part.advantages, batch.advantages[5:7])
    torch.testing.assert_close(policy.score(part).logprobs, policy.score(batch).logprobs[5:7, : part.mask.shape[1]])


# ---------------------------------------------------------------- the loop


def test_the_loop_teaches_a_tiny_model():
    policy = make_policy()
    cfg = GRPOConfig(steps=30, prompts_per_step=4, group_size=8)
    runtime = OneProcessRuntime(policy, lr=0.5)
    rewards = [
        sum(r.value for g in groups for r in g.rewards) / 32
        for _, _, groups in train(CountDigits(), Native(max_tokens=12), policy, runtime, cfg)
    ]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_every_step_reports_what_the_design_promises():
    policy = make_policy()
    reference = make_policy()
    cfg = GRPOConfig(steps=1, group_size=4, kl="k2", kl_in="loss", kl_coef=0.1)
    [(step, metrics, groups)] = train(
        CountDigits(), Native(max_tokens=6), policy, OneProcessRuntime(policy), cfg, reference
    )
    assert step == 1
    promised = {"kl", "entropy", "clip/low", "clip/high", "ratio/mean", "sampler/gap_mean", "sampler/gap_max"}
    promised |= {"grad_norm", "lr", "loss", "skipped"}
    promised |= {f"time/{stage}" for stage in ("generate", "reward", "score", "update", "step")}
    assert metrics.keys() == promised
    assert abs(metrics["kl"]) < 1e-12, "the reference is the policy itself"
    assert metrics["sampler/gap_max"] < 1e-4
    advantages = [a for g in groups for a in g.advantages]
    assert len(advantages) == 16
    assert abs(sum(advantages)) < 1e-9


def test_the_settings_name_every_member_of_every_axis():
    hints = get_type_hints(GRPOConfig)
    for key, axis in {"advantage": ADVANTAGES, "objective": OBJECTIVES, "aggregate": AGGREGATES, "kl": KL}.items():
        assert set(get_args(hints[key])) == axis.keys()


@pytest.mark.parametrize(
    ("wrong", "mend"),
    [
        ({"group_size": 1}, "at least 2"),
        ({"minibatches": 3}, "must divide"),
        ({"objective": "naive", "epochs": 2}, "epochs = 1"),
        ({"kl": "k3"}, 'kl_in = "loss"'),
        ({"clip_low": -0.1}, "negative"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong, mend):
    with pytest.raises(ValueError, match=mend):
        GRPOConfig(**wrong)
