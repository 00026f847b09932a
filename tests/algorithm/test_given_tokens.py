"""The gradient of conversations: that of what was sampled, by hand and by autograd, and of nothing that was given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import OneProcessRuntime, make_policy
from pellucid.algorithm import grpo
from pellucid.algorithm.batch import collate
from pellucid.algorithm.settings import GRPOConfig
from pellucid.environments.here import Here
from pellucid.environments.talk import Talk
from pellucid.samplers.native import Native
from pellucid.types import Completion, Group, Outcome, Prompt, Reward, Sampling
from worlds import TEMPLATE, asked

CFG = GRPOConfig(prompts_per_step=3, group_size=4)
ADVANTAGES = torch.tensor([[1.0, -0.5, 0.25, -0.75], [0.5, -1.5, 2.0, -1.0], [0.1, 0.2, 0.3, -0.6]]).double()


def held(architecture="llama", dtype=torch.float32):
    policy = make_policy(architecture, dtype)
    policy.tokenizer.chat_template = TEMPLATE
    sampler = Native(policy=policy, world=Here(Talk("worlds:Parrot")))
    return policy, sampler.generate(asked(), Sampling(4, max_tokens=80, turns=4, turn_tokens=9, seed="0/0"))


def graded(groups):
    return [replace(g, rewards=(Reward(1.0), Reward(0.0), Reward(0.5), Reward(2.0))) for g in groups]


def ready(policy, groups, cfg=CFG, advantages=ADVANTAGES):
    runtime = OneProcessRuntime(policy)
    batch = grpo.attach_advantages(collate(groups), graded(groups), advantages, runtime, cfg)
    return grpo.with_weights(batch, runtime, cfg)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"entropy_coef": 0.1}, {"kl_coef": 0.1}])
def test_no_gradient_comes_to_what_was_given(architecture, settings):
    """Exactly none: not from the objective, nor from the entropy, nor from the KL."""
    policy, groups = held(architecture)
    cfg = replace(CFG, **settings)
    batch = ready(policy, groups, cfg)
    scores = policy.score(batch)
    logprobs = scores.logprobs.detach().requires_grad_()
    entropy = scores.entropy.detach().requires_grad_()
    if cfg.kl_coef:
        batch = replace(batch, ref_logprobs=scores.logprobs.detach() - 0.3)
    loss, metrics = grpo.loss_terms(grpo.Scores(logprobs, entropy), batch, cfg)
    loss.backward()
    assert (~batch.sampled & batch.mask).sum() > 20
    assert (logprobs.grad[~batch.sampled] == 0).all()
    assert (logprobs.grad[batch.sampled] != 0).all()
    if cfg.entropy_coef:
        assert (entropy.grad[~batch.sampled] == 0).all()
        assert (entropy.grad[batch.sampled] != 0).all()
    assert all(len(x) == int(batch.sampled.sum()) for name, x in metrics.items() if name != "loss")


def by_hand(model, groups, advantages):
    """The gradient of -sum of advantage * log-prob over sampled tokens / their number, a sequence at a time."""
    model.zero_grad()
    model.get_input_embeddings().padding_idx = None  # it is the end of a turn here, and read like any other token
    total, count = torch.zeros(()), 0
    for group, row in zip(groups, advantages.tolist(), strict=True):
        for completion, advantage in zip(group.completions, row, strict=True):
            ids = [*group.prompt_ids, *completion.token_ids]
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            given = {t for start, end in completion.given for t in range(start, end)}
            for t, token in enumerate(completion.token_ids):
                if t not in given:
                    total = total - advantage * logprobs[len(group.prompt_ids) + t - 1, token]
                    count += 1
    (total / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_gradient_is_that_of_the_sampled_tokens_summed_by_hand(architecture):
    policy, groups = held(architecture, torch.float64)
    cfg = replace(CFG, aggregate="token")
    batch = ready(policy, groups, cfg)
    policy.model.zero_grad()
    grpo.loss_terms(policy.score(batch), batch, cfg)[0].backward()
    ours = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    theirs = by_hand(policy.model, groups, ADVANTAGES)
    assert max(float(grad.abs().max()) for grad in theirs.values()) > 1e-2
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-5)


def branched():
    """Two prompts of two completions, of which one has a branch."""

    def completion(ids, *branches):
        return Completion(tuple(ids), (-1.0,) * len(ids), "", True, branches=branches, outcome=Outcome(1.0))

    branched = completion([1, 2, 3], completion([4, 4]), completion([7]))
    first = Group(Prompt("a", "a"), (5, 6), (branched, completion([2])))
    second = Group(Prompt("b", "b"), (7,), (completion([3, 3]), completion([1, 2], completion([9, 9, 9, 9]))))
    return [first, second]


def test_branches_have_the_advantage_of_their_completion_and_stand_beside_it():
    policy = make_policy()
    cfg = replace(CFG, prompts_per_step=2, group_size=2)
    groups = [replace(group, rewards=(Reward(1.0), Reward(0.0))) for group in branched()]
    advantages = torch.tensor([[1.0, -2.0], [3.0, -4.0]]).double()
    runtime = OneProcessRuntime(policy)
    batch = grpo.attach_advantages(collate(groups), groups, advantages, runtime, cfg)
    rows = [ids[mask].tolist() for ids, mask in zip(batch.response_ids, batch.mask, strict=True)]
    assert rows == [[1, 2, 3], [4, 4], [7], [2], [3, 3], [1, 2], [9, 9, 9, 9]]
    assert batch.advantages[:, 0].tolist() == [1.0, 1.0, 1.0, -2.0, 3.0, -4.0, -4.0]
    assert batch.prompt_of.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert [len(part) for part in batch.parts(2)] == [3, 4]


def test_a_kl_in_the_reward_charges_a_completion_for_its_branches():
    batch = collate(branched())
    kl = torch.arange(28.0).view(7, 4)
    summed, mask = grpo.charged(replace(batch, kl=kl))
    rows = {0: [0, 1, 2], 1: [4], 2: [8, 9], 3: [12, 13]}  # completions, then branches: of 0 rows 4 and 5, of 3 row 6
    extra = {0: [16, 17, 20], 3: [24, 25, 26, 27]}
    assert summed[:, 0].tolist() == [sum(rows[i]) + sum(extra.get(i, [])) for i in range(4)]
    assert mask.all()


def test_conversations_train_as_answers_do():
    """A whole step, with a reward in the environment, an old policy and minibatches."""
    policy = make_policy()
    policy.tokenizer.chat_template = TEMPLATE
    world = Here(Talk("worlds:Parrot"))

    class Talking:
        seed, split = 0, "train"

        def sample(self, step, n):
            return [replace(prompt, id=f"{step}/{prompt.id}") for prompt in asked(n)]

        def reward(self, prompt, completion):
            return Reward(completion.outcome.reward)

    cfg = replace(CFG, steps=2, prompts_per_step=4, minibatches=2, epochs=2, micro_batch=3)
    sampling = Sampling(4, max_tokens=60, turns=3, turn_tokens=8)
    runtime = OneProcessRuntime(policy)
    steps = list(grpo.train(Talking(), Native(world=world), policy, runtime, cfg, sampling=sampling))
    assert len(steps) == 2
    assert all(step.metrics["grad_norm"] > 0 for step in steps)
