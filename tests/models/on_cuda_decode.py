"""Tests of decode steps by Triton's kernels on a simulated CUDA device.

test_pretended_cuda.py runs this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from conftest import CountDigits, character_tokenizer, tiny_llama
from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.models import fused_check, triton_check
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.training import doctor
from pellucid.types import Sampling
from simulated_device import DEVICE

STEPS, LENGTH = 2, 10


def create_policy(device, dtype=torch.float32):
    torch.manual_seed(0)
    policy = Policy(tiny_llama().to(device), character_tokenizer(), dtype)
    policy.eos_ids = (*range(4), *policy.eos_ids)  # so that rows end at different times
    return policy


def train(policy):
    """Train for some steps; return the tokens and log-probs of each."""
    AcceleratorState._reset_state(True)  # otherwise it keeps the device of the first training
    cfg = GRPOConfig(steps=STEPS, prompts_per_step=2, group_size=3, micro_batch=6)
    runtime = Runtime(policy, AdamWConfig(lr=1e-2), total_updates=STEPS)
    steps = grpo.train(CountDigits(), NativeSampler(rows=3), policy, runtime, cfg, sampling=Sampling(max_tokens=LENGTH))
    completions = [[completion for group in step.groups for completion in group.completions] for step in steps]
    return [([c.token_ids for c in each], [c.logprobs for c in each]) for each in completions]


def test_training_samples_the_tokens_of_the_cpu_with_at_most_two_graphs(gpu, pretended):
    """In both training steps a group takes the slots of another, and rows end at different times."""
    policy = create_policy(DEVICE)
    result, expected = train(policy), train(create_policy("cpu"))
    assert [tokens for tokens, _ in result] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, others) in zip(result, expected, strict=True):
        for row, other in zip(logprobs, others, strict=True):
            assert row == pytest.approx(other, abs=1e-4)
    lengths = {len(ids) for tokens, _ in result for ids in tokens}
    assert LENGTH in lengths
    assert len(lengths) > 2
    assert gpu.kernels["attend_kernel"] > 0
    assert pretended.captured <= 2, "of three rows, and of two or one that are left"
    assert pretended.replayed > LENGTH


def test_weights_at_new_addresses_get_a_new_graph(gpu, pretended):
    policy = create_policy(DEVICE, torch.bfloat16)

    def decode():
        batch = policy.create_decode_batch(2)
        batch.admit([[1, 2, 3]], 2)
        return [batch.step(torch.tensor([4, 5]).to(DEVICE)).cpu() for _ in range(3)]

    first, same = decode(), decode()
    assert pretended.captured == 1
    assert all(torch.equal(x, y) for x, y in zip(first, same, strict=True))
    assert policy.decoder
    for part in policy.decoder.list_cast_weights():
        part.cast_copy, part.copied_version = None, ()
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.5)
    assert not torch.equal(decode()[-1], first[-1])
    assert pretended.captured == 2


def test_gathered_weights_are_freed_with_their_batch(gpu):
    """A graph would keep them in memory."""
    policy = create_policy(DEVICE, torch.bfloat16)
    assert policy.decoder
    policy.decoder.disable_cast_copies()
    before = gpu.memory.allocated
    for _ in range(2):
        batch = policy.create_decode_batch(2)
        batch.admit([[1, 2, 3]], 2)
        for _ in range(3):
            batch.step(torch.tensor([4, 5]).to(DEVICE))
        assert batch.triton_decoder
        del batch
        assert gpu.memory.allocated == before


def test_failed_capture_falls_back_to_kernels_then_to_operators(gpu, pretended):
    policy, pretended.refuse_from = create_policy(DEVICE), 1
    batch = policy.create_decode_batch(2)
    logits = [batch.admit([[1, 2, 3]], 2)]
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        logits += [batch.step(torch.tensor([4, 5]).to(DEVICE)) for _ in range(3)]
    assert policy.decoder
    assert policy.decoder.uses_cuda_graphs is False
    batch = policy.create_decode_batch(2)
    assert not batch.triton_decoder
    for x in (batch.admit([[1, 2, 3]], 2), *(batch.step(torch.tensor([4, 5]).to(DEVICE)) for _ in range(3))):
        torch.testing.assert_close(x.cpu(), logits.pop(0).cpu(), rtol=0, atol=1e-5)


def test_doctor_reports_decoding_by_triton(gpu):
    assert dict(doctor._describe_gpu(torch.device(DEVICE)))["decoding"] == "by Triton and CUDA graphs"
    assert not triton_check.find_decoder_fault(fused_check.build_self_check_decoder(DEVICE))
