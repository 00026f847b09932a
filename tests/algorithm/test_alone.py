"""Tests for `group_advantages` and `policy_loss` on plain tensors: they match the loop and report mistakes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm import group_advantages, grpo, policy_loss
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import collate, collect_grades
from pellucid.algorithm.objectives import OBJECTIVES
from pellucid.algorithm.settings import GRPOConfig
from pellucid.rollout.native import NativeSampler
from pellucid.types import Reward, Sampling, UserError, grade_groups

G = 4


@pytest.fixture(scope="module")
def drawn():
    """Return a policy, two groups of four completions from an older policy, and their batch.

    The rewards are composite, and one of them failed.
    """
    torch.manual_seed(0)
    now, old, reference = (make_policy(seed=seed, entropy_grad=True) for seed in range(3))
    prompts = CountDigits().sample(0, 2)
    sampled = NativeSampler(policy=old).generate(prompts, Sampling(G, max_tokens=9, seed="0/0"))
    ragged = [
        replace(g, completions=tuple(map(cut, g.completions, lengths)))
        for g, lengths in zip(sampled, ([9, 4, 7, 2], [3, 9, 5, 8]), strict=True)
    ]
    groups = grade_groups(CountDigits(), ragged)
    groups = [replace(g, rewards=tuple(composite(r, i) for i, r in enumerate(g.rewards))) for g in groups]
    groups[0] = replace(groups[0], rewards=(Reward(float("nan"), error="broken"), *groups[0].rewards[1:]))
    batch = collate(groups)
    with torch.no_grad():
        old_logprobs, ref_logprobs = old.score(batch).logprobs, reference.score(batch).logprobs
    return now, groups, replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)


def cut(completion, length):
    tokens, logprobs = completion.token_ids[:length], completion.logprobs[:length]
    return replace(completion, token_ids=tokens, logprobs=logprobs, text=completion.text[:length])


def composite(reward, i):
    parts = {"digits": reward.value, "place": i / 10}
    return replace(reward, value=reward.value + 0.2 * i / 10, parts=parts, weights={"digits": 1.0, "place": 0.2})


def arrays(groups):
    """Return the rewards and other grades as plain arrays, as another code base would have them."""
    grades = collect_grades(groups)
    rewards = [[r.value for r in g.rewards] for g in groups]
    terms = [[[r.parts.get(name, float("nan")) for name in ("digits", "place")] for r in g.rewards] for g in groups]
    return np.array(rewards), {
        "lengths": grades.lengths.numpy(),
        "correct": [[float("nan") if r.failed else float(r.is_correct) for r in g.rewards] for g in groups],
        "parts": np.array(terms),
        "weights": [1.0, 0.2],
    }


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_advantages_of_an_array_match_the_loop(advantage, drawn):
    _, groups, batch = drawn
    rewards, others = arrays(groups)
    cfg = GRPOConfig(advantage=advantage, group_size=G, prompts_per_step=2)
    expected, _ = grpo.compute_advantages(collect_grades(groups), batch, None, OneProcessRuntime(), cfg)
    found = group_advantages(rewards, advantage, **others)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.abs().max() > 0.1
    assert group_advantages(torch.tensor(rewards).float(), advantage, **others).dtype == torch.float64


def test_settings_of_an_advantage_are_keywords():
    rewards = [[0.0, 0.05, 0.0, 0.05], [0.0, 1.0, 0.0, 1.0]]
    found = group_advantages(rewards, min_reward_range=0.1)
    assert found.tolist() == [[0.0] * 4, [-1.0, 1.0, -1.0, 1.0]]


LOSSES = {
    **{name: {"objective": name} for name in OBJECTIVES},
    "dual clip": {"dual_clip": 1.5},
    "by sequence": {"aggregate": "sequence"},
    "by a constant": {"aggregate": "constant", "constant_length": 9},
    "entropy": {"entropy_coef": 0.1},
    **{f"KL by {kl}": {"kl": kl, "kl_coef": 0.3} for kl in ("k2", "k3", "k3_weighted")},
    "correction": {"correction": "token", "correction_cap": 1.5},
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("parts", [1, 3])
def test_gradient_of_policy_loss_matches_the_loop(case, parts, drawn):
    """Compare `update_policy` with the loss of given log-probs, in one backward pass or in three."""
    policy, groups, batch = drawn
    settings = LOSSES[case]
    cfg = GRPOConfig(**settings, kl_in="loss", group_size=G, prompts_per_step=2)
    advantages = group_advantages(arrays(groups)[0])
    runtime = OneProcessRuntime(policy)
    with_advantages = replace(batch, advantages=batch.broadcast_to_tokens(advantages.flatten().float()))
    grpo.update_policy(policy, with_advantages, runtime, cfg)

    whole = {"rows": len(batch), "tokens": int(batch.response_mask.sum())} if parts > 1 else {}
    for start in range(0, len(batch), len(batch) // parts + 1):
        rows = slice(start, start + len(batch) // parts + 1)
        part = batch.select_rows(rows)
        scores = policy.score(part)
        unknown = torch.where(part.response_mask, 0.0, -torch.inf)  # padding must be ignored
        loss = policy_loss(
            scores.logprobs + unknown,
            advantages.flatten()[rows],
            part.response_mask,
            old_logprobs=part.old_logprobs + unknown,
            sampler_logprobs=part.sampler_logprobs,
            ref_logprobs=part.ref_logprobs,
            entropy=scores.entropy,
            **settings,
            **whole,
        )
        loss.backward()
    for name, p in policy.trainable().items():
        found, p.grad = p.grad, None
        torch.testing.assert_close(found, runtime.gradients[name], rtol=1e-5, atol=1e-5)
    assert max(float(g.abs().max()) for g in runtime.gradients.values()) > 1e-2


def test_a_first_step_needs_no_old_logprobs(drawn):
    """The ratio of a policy to itself is 1, so the gradient is that of A log pi and the loss is -mean A."""
    policy, _, batch = drawn
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5], [2.0, 0.0, 0.0, -2.0]])
    logprobs = policy.score(batch).logprobs
    loss = policy_loss(logprobs, advantages, batch.response_mask)
    [found] = torch.autograd.grad(loss, logprobs)
    along = advantages.flatten()[:, None] * batch.response_mask
    torch.testing.assert_close(found, -along / batch.response_mask.sum())
    assert float(loss.detach()) == pytest.approx(-float(along.sum() / batch.response_mask.sum()), abs=1e-6)


@pytest.mark.parametrize("case", LOSSES)
def test_padding_gets_no_gradient(case, drawn):
    """Infinities in the padding must not produce a NaN gradient."""
    _, _, batch = drawn
    unknown = torch.where(batch.response_mask, 0.0, -torch.inf)
    logprobs = (batch.sampler_logprobs - 0.1 + unknown).requires_grad_()
    known = {"ref_logprobs": batch.ref_logprobs, "sampler_logprobs": batch.sampler_logprobs, "entropy": logprobs.exp()}
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 0.5, 0.5, -3.0])
    loss = policy_loss(
        logprobs, advantages, batch.response_mask, old_logprobs=batch.sampler_logprobs, **known, **LOSSES[case]
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert not logprobs.grad[~batch.response_mask].any()
    assert (logprobs.grad[batch.response_mask] != 0).any()
    assert not batch.response_mask.all()


@pytest.mark.parametrize("case", LOSSES)
def test_padding_values_are_not_read(case, drawn):
    _, _, batch = drawn
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 0.5, 0.5, -3.0])[:, None].expand_as(batch.sampler_logprobs)
    losses = []
    for padding in (0.0, torch.nan):
        x = batch.sampler_logprobs.masked_fill(~batch.response_mask, padding)
        others = {"old_logprobs": x - 0.2, "ref_logprobs": x + 0.1, "sampler_logprobs": x - 0.1, "entropy": x.exp()}
        within = advantages.masked_fill(~batch.response_mask, padding)
        losses.append(policy_loss(x, within, batch.response_mask, **others, **LOSSES[case]))
    assert losses[0].isfinite()
    assert torch.equal(*losses)


def test_functions_are_accepted_in_place_of_names():
    rewards = [[0.0, 1.0, 1.0, 0.0]]
    mine = group_advantages(rewards, lambda grades, cfg: 2 * grades.rewards)
    assert torch.equal(mine, 2 * torch.tensor(rewards).double())
    loss = policy_loss(ONES, 3 * ONES[:, 0], ONES > 0, objective=lambda tokens, cfg: tokens.advantages)
    assert float(loss) == -3.0


ONES = torch.ones(4, 3)
MISTAKES = {
    "has no setting clip_hihg; did you mean": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, clip_hihg=0.3),
    "has no setting group_size; its settings are": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, group_size=4),
    "clip_low = 'low' must be a number": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, clip_low="low"),
    "aggregate = 'tokens' is unknown": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, aggregate="tokens"),
    "objective = 3 must be a name": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, objective=3),
    "soft_temperature = 1.0 must be two numbers": lambda: policy_loss(
        ONES, ONES[:, 0], ONES > 0, objective="sapo", soft_temperature=1.0
    ),
    "length_buckets = 2.5 must be a whole": lambda: group_advantages([[0.0, 1.0]], length_buckets=2.5),
    "clip_low = -1 must not be negative": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, clip_low=-1),
    "kl_coef = 0.1 needs ref_logprobs=": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, kl_coef=0.1, kl="k3"),
    "kl_coef in a loss needs kl=": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, kl_coef=0.1, ref_logprobs=ONES),
    "entropy_coef = 0.1 needs entropy=": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, entropy_coef=0.1),
    "correction = token needs sampler_logprobs=": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, correction="token"),
    "needs constant_length=": lambda: policy_loss(ONES, ONES[:, 0], ONES > 0, aggregate="constant"),
    "advantages of shape [3] are not one for each of 4": lambda: policy_loss(ONES, ONES[0], ONES > 0),
    "rewards of shape [4] must be [P, G]": lambda: group_advantages([0.0, 1.0, 0.0, 1.0]),
    "rewards of shape [2, 1] must be [P, G]": lambda: group_advantages([[0.0], [1.0]]),
    'advantage = "rlo" is unknown; did you mean "rloo"': lambda: group_advantages([[0.0, 1.0]], "rlo"),
    "give lengths=": lambda: group_advantages([[0.0, 1.0]], "length_grouped"),
    "give parts=": lambda: group_advantages([[0.0, 1.0]], "gdpo"),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_mistakes_raise_a_one_line_error(told):
    with pytest.raises(UserError) as error:
        MISTAKES[told]()
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_algorithm_settings_are_imported_without_torch():
    read = "import sys, pellucid.algorithm.settings; assert 'torch' not in sys.modules"
    used = "pellucid.algorithm.policy_loss; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", f"{read}; {used}"], check=True)
