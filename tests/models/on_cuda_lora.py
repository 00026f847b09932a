"""Tests of LoRA on a simulated CUDA device, with Triton's interpreter. test_pretended_cuda.py runs this file."""

from __future__ import annotations

import pytest
import torch

from architectures import adapted, batch_of
from conftest import CountDigits, character_tokenizer
from pellucid.models.linear import accumulate_in_place
from pellucid.policy.load import move_to_device
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling
from simulated_device import DEVICE

BATCH = batch_of(lengths=((2, 1), (3, 4)), prompts=(3, 2))


def create_policy(device, dtype=torch.float32, **settings):
    made = adapted("qwen2", dtype)
    move_to_device(made.model, torch.device(device))
    made.model.tie_weights()
    return Policy(made.model, character_tokenizer(), dtype, adapter=made.adapter, **settings)


def gradients_of(policy):
    logprobs = policy.score(BATCH).logprobs
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(BATCH.response_mask) * BATCH.response_mask
    with accumulate_in_place(True):
        (logprobs * weights.to(logprobs.device)).sum().backward()
    return {name: p.grad.cpu() for name, p in policy.trainable().items()}


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["", "with layers recomputed"])
def test_gradients_match_the_cpu(settings, gpu):
    found, expected = (gradients_of(create_policy(device, **settings)) for device in (DEVICE, "cpu"))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm(), name
    assert gpu.kernels["swiglu_kernel"] > 0


def test_samples_match_the_cpu_and_follow_the_adapter_in_the_same_graph(gpu, pretended):
    there, here = create_policy(DEVICE), create_policy("cpu")
    asked = CountDigits().sample(0, 1)

    def sampled(policy):
        [group] = NativeSampler(4, policy).generate(asked, Sampling(2, max_tokens=5, seed="0"))
        return [completion.token_ids for completion in group.completions], [c.logprobs for c in group.completions]

    def same(ours, theirs):
        assert ours[0] == theirs[0]
        for row, other in zip(ours[1], theirs[1], strict=True):
            assert row == pytest.approx(other, abs=1e-4)

    first = sampled(there)
    same(first, sampled(here))
    captured = pretended.captured
    for policy in (there, here):
        for p in policy.trainable().values():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(policy.trainable().values(), lr=0.05).step()
    moved = sampled(there)
    assert moved != first
    same(moved, sampled(here))
    assert pretended.captured == captured
    with there.adapter.disable_adapter(), here.adapter.disable_adapter():
        base = sampled(there)
        same(base, sampled(here))
    assert base not in (first, moved)
    same(sampled(there), moved)
