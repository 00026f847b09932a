"""Tests for answer prefixes: completions continue them, `prefix_coef` trains them, and advantages never credit them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from test_grpo import distance, gradients_of

from conftest import EOS, CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm import grpo
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import append_demonstrations, collate, collect_grades, concat_batches
from pellucid.algorithm.grpo import TrainingState, train
from pellucid.algorithm.settings import GRPOConfig
from pellucid.models import score
from pellucid.reporting.loggers import compute_group_metrics
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, Group, Prompt, Sampling, grade_groups

F64 = torch.float64
PREFIXES = ("12+3", "", "7", "")
SAMPLERS = {"native": NativeSampler, "hf": HuggingFaceSampler}


@dataclass(frozen=True)
class Begun(CountDigits):
    """Gives every other prompt a prefix, the beginning of an answer."""

    def sample(self, step, n):
        return [replace(prompt, prefix=PREFIXES[i % len(PREFIXES)]) for i, prompt in enumerate(super().sample(step, n))]


def groups_of(policy, sampler="native", task=None):
    drawing = SAMPLERS[sampler]()
    drawing.sync(policy)
    task = task or Begun()
    return grade_groups(task, drawing.generate(task.sample(0, 4), Sampling(3, max_tokens=12, seed="0/0")))


def batch_of(policy):
    groups = groups_of(policy)
    batch = collate(groups)
    return replace(
        batch, advantages=batch.broadcast_to_tokens(ADVANTAGES["grpo"](collect_grades(groups), GRPOConfig()).flatten())
    )


def likelihood(policy, groups):
    """Return the mean of -log pi over all prefix tokens, from transformers' own model, one prompt at a time."""
    total, count = torch.zeros((), dtype=F64), 0
    for group in groups:
        ids, start = (*group.prompt_ids, *group.demonstration), len(group.prompt_ids)
        log_softmax = policy.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total = total - sum(log_softmax[t - 1, ids[t]] for t in range(start, len(ids)))
        count += len(group.demonstration)
    return total / count


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_completion_continues_its_prefix(sampler):
    """Its log-probs are those of the continuation, given the question and the prefix."""
    policy = make_policy()
    for group, prefix in zip(groups_of(policy, sampler), PREFIXES, strict=True):
        n = len(prefix)
        assert policy.decode(group.prompt_ids) == group.prompt.text
        assert policy.decode(group.demonstration) == prefix
        for completion in group.completions:
            assert completion.given_spans == (((0, n),) if n else ())
            assert completion.token_ids[:n] == group.demonstration
            assert completion.logprobs[:n] == (0.0,) * n
            ids = (*group.prompt_ids, *completion.token_ids)
            logprobs = policy.model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
            own = [float(logprobs[t - 1, ids[t]]) for t in range(len(ids) - completion.length, len(ids))]
            assert own == pytest.approx(completion.logprobs[n:], abs=1e-4)
            assert completion.text == policy.decode(completion.token_ids[n:])


def test_prefix_loss_adds_only_the_likelihood_gradient():
    policy = make_policy(dtype=F64)
    batch, coef = batch_of(policy), 0.3
    plain, _ = gradients_of(policy, batch, GRPOConfig())
    both, metrics = gradients_of(policy, batch, GRPOConfig(prefix_coef=coef))
    loss = likelihood(policy, groups_of(policy))
    names = list(policy.trainable())
    alone = dict(zip(names, torch.autograd.grad(loss, [policy.trainable()[n] for n in names]), strict=True))
    assert distance({n: both[n] - plain[n] for n in names}, {n: coef * alone[n] for n in names}) < 1e-6  # fp32 head
    assert metrics["prefix/nll"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_complete_answer_is_trained_with_its_eos_token():
    """The end-of-sequence token after the answer counts as one more prefix token."""
    policy = make_policy(dtype=F64)
    [group] = groups_of(policy)[:1]
    whole = replace(group, demonstration=(*group.demonstration, EOS))
    batch = collate([whole])
    batch = replace(batch, advantages=torch.zeros_like(batch.sampler_logprobs))
    found, metrics = gradients_of(policy, batch, GRPOConfig(prefix_coef=1.0))
    loss = likelihood(policy, [whole])
    assert float((loss - likelihood(policy, [group])).abs().detach()) > 1e-3
    assert metrics["prefix/nll"] == pytest.approx(float(loss.detach()), rel=1e-6)
    expected = torch.autograd.grad(loss, list(policy.trainable().values()))
    assert distance(found, dict(zip(policy.trainable(), expected, strict=True))) < 1e-6


def test_sampler_appends_eos_to_complete_answers():
    @dataclass(frozen=True)
    class Whole(Begun):
        def sample(self, step, n):
            return [replace(prompt, prefix_is_complete=bool(prompt.prefix)) for prompt in super().sample(step, n)]

    policy = make_policy()
    given = [
        group.completions[0].token_ids[: len(prefix)] for group, prefix in zip(groups_of(policy), PREFIXES, strict=True)
    ]
    assert [g.demonstration for g in groups_of(policy)] == given
    assert [g.demonstration for g in groups_of(policy, task=Whole())] == [ids and (*ids, EOS) for ids in given]


def test_prefixes_get_no_gradient_without_prefix_coef():
    """The gradient is the same when the prefix is moved to the end of the prompt."""
    policy = make_policy(dtype=F64)
    batch = batch_of(policy)
    as_prompt = collate([with_prefix_in_prompt(group) for group in groups_of(policy)])
    as_prompt = replace(
        as_prompt, advantages=as_prompt.broadcast_to_tokens(batch.advantages.sum(-1) / batch.action_mask.sum(-1))
    )
    one, other = (gradients_of(policy, b, GRPOConfig()) for b in (batch, as_prompt))
    assert distance(one[0], other[0]) < 1e-12
    assert one[1] == pytest.approx(other[1], rel=1e-12)


def with_prefix_in_prompt(group):
    n = len(group.demonstration)
    completions = [
        replace(c, token_ids=c.token_ids[n:], logprobs=c.logprobs[n:], given_spans=()) for c in group.completions
    ]
    return replace(group, prompt_ids=group.prompt_ids + group.demonstration, completions=tuple(completions))


def test_shared_prefix_is_computed_once_per_group():
    """It is computed with the prompt instead of in each row, so a demonstration adds no tokens."""
    policy = make_policy(dtype=F64)
    batch = batch_of(policy)
    layout = score.build_layout(batch, F64, policy.device)
    assert len(layout.prompts.ids) == sum(len(ids) for ids in batch.prompt_ids) + 4 + 1
    assert len(layout.responses.ids) == int(batch.action_mask.sum()) - len(batch), "the last token predicts nothing"
    with_one = score.build_layout(append_demonstrations(batch, torch.arange(4)), F64, policy.device)
    assert [len(rows.ids) for rows in with_one[:2]] == [len(layout.prompts.ids), len(layout.responses.ids)]


GIVEN = {
    "here and there, and everything": (
        ((1, 2, 3, 4, 5, 6), (1, 2, 7), (1, 3, 2), (1, 2, 3, 4)),
        (((0, 2), (3, 5)), ((0, 2),), ((0, 1),), ((0, 4),)),
    ),
    "beginnings that differ": (((1, 2, 3), (4, 2, 3, 5)), (((0, 2),), ((0, 2),))),
    "the same in the middle": (((1, 2, 3, 4), (5, 2, 3, 6, 1)), (((1, 3),), ((1, 3),))),
}
"""The tokens of each answer, and its spans of given tokens."""


@pytest.mark.parametrize("engine", ["auto", "transformers"])
@pytest.mark.parametrize("name", GIVEN)
def test_given_spans_at_any_position_match_transformers(name, engine):
    """Sampled tokens, and given tokens with a likelihood weight, get the log-probs that transformers computes."""
    policy = make_policy(dtype=F64, engine=engine)
    answers = [Completion(ids, (0.0,) * len(ids), "", True, given_spans=g) for ids, g in zip(*GIVEN[name], strict=True)]
    batch = collate([Group(Prompt("p", "?"), (7, 8, 9), tuple(answers))])
    lengths = [sum(end - start for start, end in answer.given_spans) for answer in answers]
    assert (batch.response_mask & ~batch.action_mask).sum(-1).tolist() == lengths
    wanted = torch.zeros_like(batch.sampler_logprobs)
    for row, answer in enumerate(answers):
        wanted[row, slice(*answer.given_spans[-1])] = 1.0
    batch = replace(batch, likelihood_weights=wanted)
    scores = policy.score(batch).logprobs.detach()
    for row, answer in enumerate(answers):
        ids = (7, 8, 9, *answer.token_ids)
        log_softmax = policy.model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        for t, token in enumerate(answer.token_ids):
            scored = batch.action_mask[row, t] or wanted[row, t]
            assert scored == batch.scored_mask[row, t]
            expected = float(log_softmax[2 + t, token]) if scored else 0.0
            assert float(scores[row, t]) == pytest.approx(expected, abs=1e-6)


def test_prefix_likelihood_covers_full_vocabulary_when_sampling_truncates():
    policy = make_policy(dtype=F64)
    cut = NativeSampler(policy=policy).generate(Begun().sample(0, 4), Sampling(3, max_tokens=12, top_k=3, seed="0/0"))
    batch = collate(cut)
    batch = replace(batch, advantages=torch.zeros_like(batch.sampler_logprobs))
    _, metrics = gradients_of(policy, batch, GRPOConfig(prefix_coef=1.0))
    assert metrics["prefix/nll"] == pytest.approx(float(likelihood(policy, cut).detach()), rel=1e-6)
    assert metrics["entropy"] < math.log(3)


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_micro_batches_do_not_change_the_gradient(micro_batch):
    policy = make_policy(dtype=F64)
    batch, cfg = batch_of(policy), GRPOConfig(prefix_coef=0.5)
    whole, metrics = gradients_of(policy, batch, cfg)
    parts, same = gradients_of(policy, batch, replace(cfg, micro_batch=micro_batch))
    assert distance(whole, parts) < 1e-7
    assert same == pytest.approx(metrics, rel=1e-5)


class Half(OneProcessRuntime):
    def __init__(self, policy, other):
        super().__init__(policy)
        self.other = other

    def sum(self, x):
        return x + self.other.pop(0)


@pytest.mark.parametrize(
    ("order", "prefixes"),
    [
        ([0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11], (5, 0)),  # prompts 0 and 2, which have prefixes, in one process
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], (4, 1)),
    ],
)
def test_two_processes_with_unequal_prefixes_add_up_to_one(order, prefixes):
    policy = make_policy(dtype=F64)
    batch, cfg = batch_of(policy), GRPOConfig(prefix_coef=0.5)
    whole, _ = gradients_of(policy, batch, cfg)
    shared = batch.select_rows(torch.tensor(order))
    halves = [shared.select_rows(slice(0, 6)), shared.select_rows(slice(6, 12))]
    gradients = []
    for mine, other, tokens in (*zip(halves, halves[::-1], prefixes[::-1], strict=True),):
        runtime = Half(policy, [torch.tensor(6), other.action_mask.sum(), torch.tensor(tokens)])
        grpo.update_policy(policy, mine, runtime, cfg)
        gradients.append(runtime.gradients)
    assert distance(whole, {name: gradients[0][name] + gradients[1][name] for name in whole}) < 1e-7


def test_minibatch_trains_only_its_own_prefixes():
    policy = make_policy(dtype=F64)
    batch = batch_of(policy)
    last, _ = gradients_of(policy, batch, GRPOConfig(prefix_coef=0.5, minibatches=2))  # nothing moves: lr is 0
    second, _ = gradients_of(policy, batch.select_rows(slice(6, 12)), GRPOConfig(prefix_coef=0.5))
    assert distance(second, last) < 1e-7


def test_demonstrations_are_appended_as_rows_of_given_tokens():
    policy = make_policy()
    batch = batch_of(policy)
    grown = append_demonstrations(batch.select_rows(slice(0, 6)), torch.arange(2))
    for name, x in batch.select_rows(slice(0, 6)).get_tensors().items():
        mine = grown.select_rows(slice(0, 6)).get_tensors()[name]
        assert torch.equal(mine, x), name
    [last] = grown.split_into_chunks(6)[1:]
    assert policy.decode(last.response_ids[0].tolist()) == "12+3"
    assert last.likelihood_weights.tolist() == [[1.0] * 4]
    assert not last.action_mask.any()
    assert not last.advantages.any()
    assert len(append_demonstrations(batch.select_rows(slice(3, 6)), torch.tensor([1]))) == 3, "this prompt has none"


@pytest.mark.parametrize("dead", [True, False])
def test_prefix_may_be_longer_than_every_remaining_response(dead):
    """With or without dead rows only short responses remain, so the prefix is the widest row of the batch."""
    policy = make_policy(dtype=F64)
    groups = groups_of(policy)
    short = [Completion((4, EOS), (-1.0, -1.0), "1", True), Completion((EOS,), (-1.0,), "", True)]
    groups[0] = replace(groups[0], completions=tuple(short), rewards=groups[0].rewards[:2])
    batch = collate(groups[:1])
    advantages = [0.0, 0.0] if dead else [1.0, -1.0]
    batch = replace(batch, advantages=batch.broadcast_to_tokens(torch.tensor(advantages)))
    plain, _ = gradients_of(policy, batch, GRPOConfig())
    both, metrics = gradients_of(policy, batch, GRPOConfig(prefix_coef=0.3))
    loss = likelihood(policy, groups[:1])
    alone = dict(zip(policy.trainable(), torch.autograd.grad(loss, list(policy.trainable().values())), strict=True))
    assert distance({n: both[n] - plain[n] for n in both}, {n: 0.3 * alone[n] for n in both}) < 1e-6
    assert metrics["prefix/nll"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_replayed_groups_keep_their_prefixes():
    policy = make_policy()
    batch = batch_of(policy)
    twice = concat_batches([batch, batch])
    assert [len(ids) for ids in twice.demonstrations] == [4, 0, 1, 0] * 2
    assert len(append_demonstrations(twice, torch.arange(8))) == 24 + 4


def test_prefix_loss_alone_makes_prefixes_likelier():
    """All groups are dead because no reward differs, so the policy learns from the prefixes alone."""

    @dataclass(frozen=True)
    class Same(Begun):
        def reward(self, prompt, completion):
            return replace(super().reward(prompt, completion), value=0.0)

    policy = make_policy()
    runtime, sampling = OneProcessRuntime(policy, lr=0.3), Sampling(max_tokens=12)
    cfg = GRPOConfig(steps=12, group_size=3, prefix_coef=1.0, max_length=12)
    steps = list(train(Same(), NativeSampler(), policy, runtime, cfg, state=TrainingState(), sampling=sampling))
    assert steps[-1].metrics["prefix/nll"] < 0.5 * steps[0].metrics["prefix/nll"]


def test_metrics_report_mean_prefix_length():
    assert compute_group_metrics(groups_of(make_policy()))["prefix/length_mean"] == 2.5
    assert "prefix/length_mean" not in compute_group_metrics(groups_of(make_policy(), task=CountDigits()))
