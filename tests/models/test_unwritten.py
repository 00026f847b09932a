"""Tests that results do not depend on uninitialized memory, which is NaN here.

In a small process new memory is 0, and would hide such a fault.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import EOS, CountDigits, character_tokenizer
from made_rollouts import batch_of
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling

SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHAPES = {
    "of any lengths": ([5, 40], [8, 1, 3, 71, 2], [0, 0, 0, 1, 1]),
    "one token": ([1], [1], [0]),
    "one token each": ([3], [1, 1, 1], [0, 0, 0]),
    "many": ([50] * 4, [24] * 64, [row // 16 for row in range(64)]),
    "long": ([700], [300] * 3, [0, 0, 0]),
}


@pytest.fixture
def policy():
    torch.manual_seed(0)
    shape = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    shape.eos_token_id = shape.pad_token_id = EOS
    return Policy(LlamaForCausalLM(shape), character_tokenizer(size=96), torch.bfloat16)


@pytest.fixture
def both_ways():
    """Yield a function that returns two results of its argument: as usual, and with uninitialized memory set to NaN."""

    def call(function):
        usual = function()
        torch.use_deterministic_algorithms(True)
        return usual, function()

    yield call
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("every", [1, 7, 0])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_do_not_depend_on_uninitialized_memory(policy, both_ways, shape, every):
    """All tokens have weight, every seventh, or none, as in a step whose groups are all dead."""
    batch = batch_of(*SHAPES[shape])

    def gradients():
        policy.model.zero_grad()
        logprobs = policy.score(batch).logprobs
        weights = torch.zeros_like(logprobs)
        if every:
            weights[::every] = 1
        (logprobs * weights).sum().backward()
        return {name: p.grad.clone() for name, p in policy.model.named_parameters()}

    usual, found = both_ways(gradients)
    for name, gradient in usual.items():
        assert torch.equal(found[name], gradient), name
    assert any(x.any() for x in found.values()) == bool(every)


def test_completions_do_not_depend_on_uninitialized_memory(policy, both_ways):
    prompts, sampling = CountDigits().sample(0, 5), Sampling(7, max_tokens=40, seed="0/0")
    sampler = NativeSampler()
    sampler.sync(policy, 0)
    usual, found = both_ways(lambda: sampler.generate(prompts, sampling))
    assert found == usual
