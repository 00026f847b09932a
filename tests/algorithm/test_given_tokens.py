"""Test that the gradient of conversations comes from sampled tokens alone, never from given ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import OneProcessRuntime, make_policy
from pellucid.algorithm import grpo
from pellucid.algorithm.batch import collate, collect_grades, concat_batches
from pellucid.algorithm.settings import GRPOConfig
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, ConversationOutcome, Group, Prompt, Reward, Sampling
from worlds import TEMPLATE, asked

CFG = GRPOConfig(prompts_per_step=3, group_size=4)
ADVANTAGES = torch.tensor([[1.0, -0.5, 0.25, -0.75], [0.5, -1.5, 2.0, -1.0], [0.1, 0.2, 0.3, -0.6]]).double()


def held(architecture="llama", dtype=torch.float32):
    policy = make_policy(architecture, dtype)
    policy.tokenizer.chat_template = TEMPLATE
    sampler = NativeSampler(policy=policy, environments=InProcessEnvironments(EnvironmentSpec("worlds:Parrot")))
    return policy, sampler.generate(asked(), Sampling(4, max_tokens=80, turns=4, turn_tokens=9, seed="0/0"))


def graded(groups):
    rewards = (Reward(1.0), Reward(0.0), Reward(0.5), Reward(2.0))
    return [replace(g, rewards=rewards[: len(g.completions)]) for g in groups]


def ready(policy, groups, cfg=CFG, advantages=ADVANTAGES):
    runtime = OneProcessRuntime(policy)
    batch = grpo.attach_advantages(collate(groups), collect_grades(graded(groups)), advantages, runtime, cfg)
    return grpo.attach_token_weights(batch, runtime, cfg)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"entropy_coef": 0.1}, {"kl_coef": 0.1}])
def test_given_tokens_get_no_gradient(architecture, settings):
    """The gradient is exactly zero from the objective, the entropy and the KL."""
    policy, groups = held(architecture)
    cfg = replace(CFG, **settings)
    batch = ready(policy, groups, cfg)
    scores = policy.score(batch)
    logprobs = scores.logprobs.detach().requires_grad_()
    entropy = scores.entropy.detach().requires_grad_()
    if cfg.kl_coef:
        batch = replace(batch, ref_logprobs=scores.logprobs.detach() - 0.3)
    loss, metrics = grpo.compute_loss(grpo.Scores(logprobs, entropy), batch, cfg)
    loss.backward()
    assert (~batch.action_mask & batch.response_mask).sum() > 20
    assert (logprobs.grad[~batch.action_mask] == 0).all()
    assert (logprobs.grad[batch.action_mask] != 0).all()
    if cfg.entropy_coef:
        assert (entropy.grad[~batch.action_mask] == 0).all()
        assert (entropy.grad[batch.action_mask] != 0).all()
    assert all(len(x) == int(batch.action_mask.sum()) for name, x in metrics.items() if name != "loss")


def by_hand(model, groups, advantages):
    """Return the gradient of -sum of advantage * log-prob over sampled tokens / their number, sequence by sequence."""
    model.zero_grad()
    model.get_input_embeddings().padding_idx = None  # the token ends a turn here, so its embedding is trained
    total, count = torch.zeros(()), 0
    for group, row in zip(groups, advantages.tolist(), strict=True):
        for completion, advantage in zip(group.completions, row, strict=True):
            ids = [*group.prompt_ids, *completion.token_ids]
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            given = {t for start, end in completion.given_spans for t in range(start, end)}
            for t, token in enumerate(completion.token_ids):
                if t not in given:
                    total = total - advantage * logprobs[len(group.prompt_ids) + t - 1, token]
                    count += 1
    (total / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradient_matches_the_sum_over_sampled_tokens_by_hand(architecture):
    policy, groups = held(architecture, torch.float64)
    cfg = replace(CFG, aggregate="token")
    batch = ready(policy, groups, cfg)
    policy.model.zero_grad()
    grpo.compute_loss(policy.score(batch), batch, cfg)[0].backward()
    ours = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    theirs = by_hand(policy.model, groups, ADVANTAGES)
    assert max(float(grad.abs().max()) for grad in theirs.values()) > 1e-2
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-5)


def branched():
    """Return two groups of two completions; one completion of each group has branches."""

    def completion(ids, *branches):
        return Completion(tuple(ids), (-1.0,) * len(ids), "", True, branches=branches, outcome=ConversationOutcome(1.0))

    branched = completion([1, 2, 3], completion([4, 4]), completion([7]))
    first = Group(Prompt("a", "a"), (5, 6), (branched, completion([2])))
    second = Group(Prompt("b", "b"), (7,), (completion([3, 3]), completion([1, 2], completion([9, 9, 9, 9]))))
    return [first, second]


def test_branches_share_the_advantage_of_their_completion_and_follow_it():
    policy = make_policy()
    cfg = replace(CFG, prompts_per_step=2, group_size=2)
    groups = [replace(group, rewards=(Reward(1.0), Reward(0.0))) for group in branched()]
    advantages = torch.tensor([[1.0, -2.0], [3.0, -4.0]]).double()
    runtime = OneProcessRuntime(policy)
    batch = grpo.attach_advantages(collate(groups), collect_grades(groups), advantages, runtime, cfg)
    rows = [ids[mask].tolist() for ids, mask in zip(batch.response_ids, batch.response_mask, strict=True)]
    assert rows == [[1, 2, 3], [4, 4], [7], [2], [3, 3], [1, 2], [9, 9, 9, 9]]
    assert batch.advantages[:, 0].tolist() == [1.0, 1.0, 1.0, -2.0, 3.0, -4.0, -4.0]
    assert batch.prompt_indices.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert [len(part) for part in batch.split_into_minibatches(2)] == [4, 3], "a minibatch holds whole rollouts"


def one_and_eight():
    """Return a group with a rollout of one sequence and one whose history was rewritten seven times.

    Every sequence has two tokens.
    """

    def completion(*branches):
        return Completion((3, 4), (-1.0, -1.0), "", True, branches=branches, outcome=ConversationOutcome(1.0))

    group = Group(Prompt("a", "a"), (5, 6), (completion(), completion(*[completion() for _ in range(7)])))
    return [replace(group, rewards=(Reward(1.0), Reward(0.0)))]


PLUS_MINUS = torch.tensor([[1.0, -1.0]]).double()
PUSHES = {
    # The weight of each token in the first and in the second rollout, then the summed push on each rollout's tokens.
    "sequence": (1 / 4, 1 / 32, 1 / 2, -1 / 2),
    "constant": (1 / 32, 1 / 32, 1 / 16, -1 / 2),  # divided by 2 rollouts of 16 tokens
    "token": (1 / 18, 1 / 18, 1 / 9, -8 / 9),
}


@pytest.mark.parametrize("aggregate", PUSHES)
def test_a_rollout_of_eight_sequences_counts_as_one_rollout(aggregate):
    policy = make_policy(dtype=torch.float64)
    cfg = replace(CFG, prompts_per_step=1, group_size=2, aggregate=aggregate, constant_length=16)
    batch = ready(policy, one_and_eight(), cfg, PLUS_MINUS)
    first, second, plus, minus = PUSHES[aggregate]
    torch.testing.assert_close(batch.token_weights, torch.tensor([[first] * 2, *[[second] * 2] * 8]))
    logprobs = policy.score(batch).logprobs.detach().requires_grad_()
    grpo.compute_loss(grpo.Scores(logprobs, torch.zeros_like(logprobs)), batch, cfg)[0].backward()
    pushes = (-logprobs.grad).sum(-1)
    assert pushes[0].item() == pytest.approx(plus)
    assert pushes[1:].sum().item() == pytest.approx(minus)


@pytest.mark.parametrize("aggregate", PUSHES)
def test_gradient_of_multi_sequence_rollouts_matches_sum_by_hand(aggregate):
    """The expected gradient uses transformers, one sequence at a time; the package uses micro-batches."""
    policy = make_policy(dtype=torch.float64)
    cfg = replace(CFG, prompts_per_step=2, group_size=2, aggregate=aggregate, constant_length=16, micro_batch=3)
    groups = branched()
    advantages = torch.tensor([[1.0, -2.0], [3.0, -4.0]]).double()
    runtime = OneProcessRuntime(policy)
    batch = grpo.attach_advantages(collate(groups), collect_grades(graded(groups)), advantages, runtime, cfg)
    policy.model.zero_grad()
    weighted = grpo.attach_token_weights(batch, runtime, cfg)
    for micro_batch in weighted.split_into_chunks(cfg.micro_batch):
        grpo.compute_loss(policy.score(micro_batch), micro_batch, cfg)[0].backward()
    ours = {name: p.grad.clone() for name, p in policy.model.named_parameters()}

    policy.model.zero_grad()
    total = torch.zeros(())
    divisors = {  # the rollouts have 6, 1, 2 and 6 tokens, 15 in all
        "sequence": [4 * 6, 4 * 1, 4 * 2, 4 * 6],
        "constant": [4 * 16] * 4,
        "token": [15] * 4,
    }[aggregate]
    rollouts = [(group, c) for group in groups for c in group.completions]
    for (group, c), advantage, divisor in zip(rollouts, advantages.flatten().tolist(), divisors, strict=True):
        for sequence in (c, *c.branches):
            ids = [*group.prompt_ids, *sequence.token_ids]
            logprobs = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for t, token in enumerate(sequence.token_ids):
                total = total - advantage * logprobs[len(group.prompt_ids) + t - 1, token] / divisor
    total.backward()
    for name, p in policy.model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregate", PUSHES)
def test_processes_agree_on_token_weights_of_multi_sequence_rollouts(aggregate):
    """A group has the same weights in its own process as in one process with both groups."""
    cfg = replace(CFG, prompts_per_step=2, group_size=2, aggregate=aggregate, constant_length=16)

    class OfTwo(OneProcessRuntime):
        """Adds the counts of the other process, which `counts` lists."""

        def __init__(self, counts):
            super().__init__()
            self.counts = iter(counts)

        def sum(self, x):
            return x + next(self.counts)

    def attached(groups):
        return grpo.attach_advantages(
            collate(groups), collect_grades(graded(groups)), torch.ones(len(groups), 2), runtime, cfg
        )

    runtime = OneProcessRuntime()
    whole = grpo.compute_token_weights(attached(branched()), runtime, cfg)
    first, second = (attached([group]) for group in branched())
    counts = {"first": (torch.tensor(2), torch.tensor(7)), "second": (torch.tensor(2), torch.tensor(8))}
    alone = [
        grpo.compute_token_weights(first, OfTwo(counts["second"]), cfg),
        grpo.compute_token_weights(second, OfTwo(counts["first"]), cfg),
    ]
    assert whole.flatten().tolist() == [*joined_to(alone[0], 4), *joined_to(alone[1], 4)]


def joined_to(weights, width):
    return torch.nn.functional.pad(weights, (0, width - weights.shape[1])).flatten().tolist()


@pytest.mark.parametrize("first", [0, 1])
def test_replay_joins_steps_with_and_without_rewritten_histories(first):
    """The rollouts of one step have one sequence each; the other step has a rollout of eight."""
    cfg = replace(CFG, prompts_per_step=1, group_size=2, aggregate="sequence")
    runtime = OneProcessRuntime()
    groups = [branched()[:1], one_and_eight()]
    plain = replace(groups[0][0], completions=tuple(replace(c, branches=()) for c in groups[0][0].completions))
    steps = [[plain], groups[1]]
    steps = steps if first == 0 else steps[::-1]
    batches = [
        grpo.attach_advantages(collate(step), collect_grades(graded(step)), PLUS_MINUS, runtime, cfg) for step in steps
    ]
    joined = concat_batches(batches)
    sums = grpo.compute_token_weights(joined, runtime, cfg).sum(-1)
    expected = {0: [1 / 4, 1 / 4], 1: [1 / 4, *[1 / 32] * 8]}
    assert sums.tolist() == pytest.approx(expected[first] + expected[1 - first])


def test_kl_in_the_reward_charges_a_completion_for_its_branches():
    batch = collate(branched())
    kl = torch.arange(28.0).view(7, 4)
    summed, mask = grpo.get_charged_kl(replace(batch, kl=kl))
    rows = {0: [0, 1, 2], 1: [4], 2: [8, 9], 3: [12, 13]}  # then branches: rows 4 and 5 of completion 0, row 6 of 3
    extra = {0: [16, 17, 20], 3: [24, 25, 26, 27]}
    assert summed[:, 0].tolist() == [sum(rows[i]) + sum(extra.get(i, [])) for i in range(4)]
    assert mask.all()


def test_overlong_cache_counts_tokens_given_in_a_conversation():
    """The limit is 10 tokens after the question; rewards fall over the last 4 of them."""

    def completion(n, *given, branches=()):
        return Completion((3,) * n, (0.0,) * n, "", True, given_spans=given, branches=branches)

    completions = (
        completion(10, (3, 8)),  # sampled 3 tokens, was given 5, sampled 2
        completion(8, (2, 6)),
        completion(10, (0, 6)),  # a prefix of 6 tokens is not part of the answer
        completion(2, branches=(completion(9, (1, 7)),)),  # an agent whose first history was longer than its last
    )
    group = Group(Prompt("a", "a"), (5,), completions, rewards=(Reward(1.0),) * 4)
    cfg = replace(CFG, overlong_cache=4, max_length=10)
    shaped = grpo.shape_rewards(collect_grades([group]).rewards, collate([group]), make_policy(), cfg)
    assert shaped.tolist() == [[0.0, 0.5, 1.0, 0.25]]


def test_conversations_train_like_single_answers():
    """Take whole steps with the environment's reward, an old policy and minibatches."""
    policy = make_policy()
    policy.tokenizer.chat_template = TEMPLATE
    world = InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))

    class Talking:
        seed, split = 0, "train"

        def sample(self, step, n):
            return [replace(prompt, id=f"{step}/{prompt.id}") for prompt in asked(n)]

        def reward(self, prompt, completion):
            return Reward(completion.outcome.reward)

    cfg = replace(CFG, steps=2, prompts_per_step=4, minibatches=2, epochs=2, micro_batch=3)
    sampling = Sampling(4, max_tokens=60, turns=3, turn_tokens=8)
    runtime = OneProcessRuntime(policy)
    steps = list(grpo.train(Talking(), NativeSampler(environments=world), policy, runtime, cfg, sampling=sampling))
    assert len(steps) == 2
    assert all(step.metrics["grad_norm"] > 0 for step in steps)
