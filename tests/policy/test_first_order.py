"""The first-order change of log-probs against autograd, token by token, for every way of computing them."""

import pytest
import torch

from conftest import character_tokenizer, make_policy, tiny_llama
from pellucid.algorithm.batch import collate
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.training.token_recorder import copy_trained_weights, predict_logprob_changes
from pellucid.types import Completion, Group, Prompt


def batch_of(lengths=(3, 5, 1, 4)):
    generator = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(0, 27, (n,), generator=generator).tolist()) for n in lengths]
    given = Completion((1, *rows[1]), (0.0, *[-1.0] * 5), "", True, given_spans=((0, 1),))
    completions = tuple(Completion(ids, (-1.0,) * len(ids), "", True) for ids in rows)
    return collate([Group(Prompt("p", "?"), (1, 2, 3, 4), (*completions, given))])


def moved(policy, size=1e-3):
    """Move the weights; return by how much."""
    generator = torch.Generator().manual_seed(2)
    steps = {n: size * torch.randn(p.shape, generator=generator).to(p) for n, p in policy.trainable().items()}
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.add_(steps[name])
    return steps


@pytest.mark.parametrize(
    ("architecture", "engine"), [("llama", "auto"), ("llama", "transformers"), ("gpt2", "auto"), ("gemma", "auto")]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_change_is_the_gradient_times_the_step(architecture, engine, recompute):
    check_change(
        make_policy(architecture, torch.float64, temperature=0.7, gradient_checkpointing=recompute, engine=engine)
    )


def test_an_adapter_s_change_is_that_of_its_own_weights():
    model = tiny_llama().double()
    policy = Policy(model, character_tokenizer(), torch.float64, adapter=add_adapter(model, 2))
    moved(policy, 0.3)  # B is 0 at first, and A then has no gradient
    with torch.no_grad():
        for p in policy.trainable().values():
            p.copy_(p.float())  # as they are kept
    assert all("lora" in name for name in policy.trainable())
    check_change(policy)


def check_change(policy):
    batch, before = batch_of(), copy_trained_weights(policy)
    start = policy.score(batch).logprobs[batch.action_mask]
    parameters = list(policy.trainable().values())
    gradients = [torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True) for x in start]
    steps = moved(policy).values()
    expected = [
        sum(float((g * step).sum()) for g, step in zip(of_token, steps, strict=True) if g is not None)
        for of_token in gradients
    ]
    logprobs, change = predict_logprob_changes(policy, batch, before)
    torch.testing.assert_close(change, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logprobs, start.detach(), rtol=1e-6, atol=1e-6)
    assert change.abs().max() > 0.01


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_policy_is_afterwards_what_it_was_before(architecture, dtype):
    policy = make_policy(architecture, dtype)
    batch, before = batch_of(), copy_trained_weights(policy)
    moved(policy)
    weights = {name: p.detach().clone() for name, p in policy.weights().items()}
    parameters = dict(policy.model.named_parameters())
    scores = policy.score(batch).logprobs
    predict_logprob_changes(policy, batch, before)
    assert torch.equal(policy.score(batch).logprobs, scores)
    for name, p in policy.model.named_parameters():
        assert p is parameters[name]
        assert p.requires_grad
        assert torch.equal(p, weights[name])
    policy.score(batch).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.trainable().values())


def test_the_change_in_bf16_is_no_further_from_that_in_fp32_than_a_backward_pass_would_have_it():
    changes, products = [], []
    for dtype in (torch.float32, torch.bfloat16):
        policy = make_policy("llama", dtype)
        batch, before = batch_of(), copy_trained_weights(policy)
        products.append(of_backward(policy, batch, before))
        changes.append(predict_logprob_changes(policy, batch, before)[1].float())
    assert (changes[0] - products[0]).norm() < 1e-4 * changes[0].norm()
    assert (changes[0] - changes[1]).norm() < 2 * (products[0] - products[1]).norm()


def of_backward(policy, batch, before):
    """[N] gradient times step, token by token; the weights are moved."""
    parameters = list(policy.trainable().values())
    logprobs = policy.score(batch).logprobs[batch.action_mask]
    gradients = [torch.autograd.grad(x, parameters, retain_graph=True) for x in logprobs]
    steps = moved(policy).values()
    return torch.tensor([sum((g * s).sum() for g, s in zip(one, steps, strict=True)) for one in gradients])
