"""What becomes of a prefix: it is read, it is made likelier where that is asked for, and it is never credited."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from test_grpo import distance, gradients_of

from conftest import EOS, CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm import grpo
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import collate, concat, grades_of, prefix_rows
from pellucid.algorithm.grpo import State, train
from pellucid.algorithm.settings import GRPOConfig
from pellucid.reporting.metrics import describe
from pellucid.samplers.hf import HuggingFace
from pellucid.samplers.native import Native
from pellucid.types import Sampling

F64 = torch.float64
PREFIXES = ("12+3", "", "7", "")
SAMPLERS = {"native": Native, "hf": HuggingFace}


@dataclass(frozen=True)
class Begun(CountDigits):
    """Every other question has an answer begun."""

    def sample(self, step, n):
        return [replace(prompt, prefix=PREFIXES[i % len(PREFIXES)]) for i, prompt in enumerate(super().sample(step, n))]


def groups_of(policy, sampler="native", task=None):
    drawing = SAMPLERS[sampler]()
    drawing.sync(policy)
    task = task or Begun()
    return grpo.grade(task, drawing.generate(task.sample(0, 4), Sampling(3, max_tokens=12, seed="0/0")))


def batch_of(policy):
    groups = groups_of(policy)
    batch = collate(groups, policy.device)
    return replace(batch, advantages=ADVANTAGES["grpo"](grades_of(groups), GRPOConfig()).flatten())


def likelihood(policy, groups):
    """The mean of -log pi over all prefix tokens, one prompt at a time, by transformers' own model."""
    total, count = torch.zeros((), dtype=F64), 0
    for group in groups:
        n = group.prefix_length
        if n:
            logits = policy.model(torch.tensor([group.prompt_ids])).logits[0]
            log_softmax = logits.double().log_softmax(-1)
            start = len(group.prompt_ids) - n
            total = total - sum(log_softmax[t - 1, group.prompt_ids[t]] for t in range(start, start + n))
            count += n
    return total / count


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_completion_goes_on_from_its_prefix(sampler):
    """Its log-probs are those of the continuation, given question and prefix."""
    policy = make_policy()
    for group, prefix in zip(groups_of(policy, sampler), PREFIXES, strict=True):
        assert group.prefix_length == len(prefix)
        assert policy.decode(group.prompt_ids) == group.prompt.text + prefix
        for completion in group.completions:
            ids = (*group.prompt_ids, *completion.token_ids)
            logprobs = policy.model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
            start = len(group.prompt_ids)
            own = [float(logprobs[start - 1 + t, ids[start + t]]) for t in range(len(completion.token_ids))]
            assert own == pytest.approx(completion.logprobs, abs=1e-4)


def test_the_prefix_loss_has_the_gradient_of_the_likelihood_and_nothing_else_changes():
    policy = make_policy(dtype=F64)
    batch, coef = batch_of(policy), 0.3
    plain, _ = gradients_of(policy, batch, GRPOConfig())
    both, metrics = gradients_of(policy, batch, GRPOConfig(prefix_coef=coef))
    loss = likelihood(policy, groups_of(policy))
    names = list(policy.trainable())
    alone = dict(zip(names, torch.autograd.grad(loss, [policy.trainable()[n] for n in names]), strict=True))
    assert distance({n: both[n] - plain[n] for n in names}, {n: coef * alone[n] for n in names}) < 1e-6  # fp32 head
    assert metrics["prefix/nll"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_a_whole_answer_is_learnt_with_its_end():
    """The likelihood of the end-of-sequence token behind it counts as one more of its tokens."""
    policy = make_policy(dtype=F64)
    [group] = groups_of(policy)[:1]
    whole = replace(group, prefix_end=EOS)
    batch = replace(collate([whole], policy.device), advantages=torch.zeros(3))
    rows = prefix_rows(batch)
    assert rows.response_ids.tolist() == [[*group.prompt_ids[-4:], EOS]]
    assert rows.prompt_ids == (group.prompt_ids[:-4],)
    logits = policy.model(torch.tensor([[*group.prompt_ids, EOS]])).logits[0].detach().double().log_softmax(-1)
    ids = [*group.prompt_ids[-4:], EOS]
    expected = -sum(float(logits[len(group.prompt_ids) - 5 + t, ids[t]]) for t in range(5)) / 5
    _, metrics = gradients_of(policy, batch, GRPOConfig(prefix_coef=1.0))
    assert metrics["prefix/nll"] == pytest.approx(expected, rel=1e-6)


def test_the_sampler_says_where_a_whole_answer_ends():
    @dataclass(frozen=True)
    class Whole(Begun):
        def sample(self, step, n):
            return [replace(prompt, prefix_whole=bool(prompt.prefix)) for prompt in super().sample(step, n)]

    assert [g.prefix_end for g in groups_of(make_policy(), task=Whole())] == [EOS, None, EOS, None]
    assert [g.prefix_end for g in groups_of(make_policy())] == [None] * 4


def test_without_a_coefficient_prefixes_get_no_gradient():
    """The same completions as continuations of a longer prompt: prefix or prompt, the gradient is one."""
    policy = make_policy(dtype=F64)
    batch = batch_of(policy)
    as_prompt = replace(batch, prefix_lengths=(0, 0, 0, 0))
    one, other = (gradients_of(policy, b, GRPOConfig()) for b in (batch, as_prompt))
    assert distance(one[0], other[0]) < 1e-12
    assert one[1] == other[1]


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
def test_two_processes_add_up_to_one_though_one_has_fewer_prefixes_or_none(order, prefixes):
    policy = make_policy(dtype=F64)
    batch, cfg = batch_of(policy), GRPOConfig(prefix_coef=0.5)
    whole, _ = gradients_of(policy, batch, cfg)
    shared = batch.rows(torch.tensor(order))
    halves = [shared.rows(slice(0, 6)), shared.rows(slice(6, 12))]
    gradients = []
    for mine, other, tokens in (*zip(halves, halves[::-1], prefixes[::-1], strict=True),):
        runtime = Half(policy, [torch.tensor(6), other.mask.sum(), torch.tensor(tokens)])
        grpo.update(policy, mine, runtime, cfg)
        gradients.append(runtime.gradients)
    assert distance(whole, {name: gradients[0][name] + gradients[1][name] for name in whole}) < 1e-7


def test_a_minibatch_learns_its_own_prefixes_alone():
    policy = make_policy(dtype=F64)
    batch = batch_of(policy)
    last, _ = gradients_of(policy, batch, GRPOConfig(prefix_coef=0.5, minibatches=2))  # nothing moves: lr is 0
    second, _ = gradients_of(policy, batch.rows(slice(6, 12)), GRPOConfig(prefix_coef=0.5))
    assert distance(second, last) < 1e-7


def test_each_minibatch_has_the_prefixes_of_its_own_groups():
    policy = make_policy()
    batch = batch_of(policy)
    first, second = (prefix_rows(chunk) for chunk in batch.chunks(6))
    assert [policy.decode(ids[:n]) for ids, n in zip(first.response_ids, first.mask.sum(-1), strict=True)] == ["12+3"]
    assert [policy.decode(ids[:n]) for ids, n in zip(second.response_ids, second.mask.sum(-1), strict=True)] == ["7"]
    assert prefix_rows(batch.rows(slice(3, 6))) is None


def test_replayed_groups_keep_their_prefixes():
    policy = make_policy()
    batch = batch_of(policy)
    assert concat([batch, batch]).prefix_lengths == (4, 0, 1, 0, 4, 0, 1, 0)
    assert len(prefix_rows(concat([batch, batch]))) == 4


def test_a_prefix_that_is_made_likelier_is_soon_said():
    """Dead groups included: here no reward differs, and the policy learns from the prefix alone."""

    @dataclass(frozen=True)
    class Same(Begun):
        def reward(self, prompt, completion):
            return replace(super().reward(prompt, completion), value=0.0)

    policy = make_policy()
    runtime, sampling = OneProcessRuntime(policy, lr=0.3), Sampling(max_tokens=12)
    cfg = GRPOConfig(steps=12, group_size=3, prefix_coef=1.0, max_length=12)
    steps = list(train(Same(), Native(), policy, runtime, cfg, state=State(), sampling=sampling))
    assert steps[-1].metrics["prefix/nll"] < 0.5 * steps[0].metrics["prefix/nll"]


def test_the_metrics_say_how_long_they_are():
    assert describe(groups_of(make_policy()))["prefix/length_mean"] == 2.5
    assert "prefix/length_mean" not in describe(groups_of(make_policy(), task=CountDigits()))
