"""Test how often the host waits for a device in a training step, counted on a simulated device.

Waits for copies to the device count only on CUDA, for which the package makes copies that do not wait.
test_pretended_cuda.py runs this file, too.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from conftest import CountDigits, character_tokenizer, tiny_llama
from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import Policy
from pellucid.rollout.native import TOKENS_PER_EOS_CHECK, NativeSampler
from pellucid.types import Sampling
from simulated_device import DEVICE, NAME

LENGTH, MICRO_BATCHES = 24, 4
SETTINGS = {
    "plain": {},
    "entropy": {"entropy_coef": 0.01},
    "charged with a KL": {"kl_coef": 0.1, "kl_in": "reward"},
    "clipped": {"epochs": 2, "minibatches": 2, "correction": "token"},
}


def count_waits(gpu):
    return Counter(gpu.waits) if NAME == "cuda" else gpu.waits - gpu.copies


class Counted:
    """Count the waits of each call of a function."""

    def __init__(self, monkeypatch, gpu, owner, name):
        self.calls = []
        act = getattr(owner, name)

        def counted(*arguments):
            before = count_waits(gpu)
            result = act(*arguments)
            self.calls.append(count_waits(gpu) - before)
            return result

        monkeypatch.setattr(owner, name, counted)


def policy_there(model):
    torch.manual_seed(0)
    return Policy(model().to(DEVICE), character_tokenizer(), torch.float32)


def steps(policy, count, **settings):
    cfg = GRPOConfig(steps=count, prompts_per_step=4, group_size=6, micro_batch=24 // MICRO_BATCHES, **settings)
    runtime = Runtime(policy, AdamWConfig(lr=1e-3), total_updates=count)
    reference, sampling = policy_there(tiny_llama) if cfg.kl_coef else None, Sampling(max_tokens=LENGTH)
    return list(grpo.train(CountDigits(), NativeSampler(), policy, runtime, cfg, reference, sampling=sampling))


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_micro_batch_waits_at_most_twice_and_never_on_cuda(settings, gpu, monkeypatch):
    """The two waits are for the parts of the loss and for those of them with a gradient. A step waits for its norm, and
    an update on CUDA waits for its metrics.
    """
    updates = Counted(monkeypatch, gpu, grpo, "update_policy")
    steps(policy_there(tiny_llama), 2, **settings)
    cfg = GRPOConfig(**settings)
    for waits in updates.calls:
        for_micro_batches = 1 if NAME == "cuda" else 2 * MICRO_BATCHES * cfg.epochs
        assert 0 < waits.total() <= for_micro_batches + cfg.epochs * cfg.minibatches, waits


def test_sampling_waits_once_in_eight_tokens(gpu, monkeypatch):
    sampled = Counted(monkeypatch, gpu, NativeSampler, "generate")
    [step] = steps(policy_there(tiny_llama), 1)
    lengths = [len(c.token_ids) for g in step.groups for c in g.completions]
    assert max(lengths) == LENGTH
    assert any(length % TOKENS_PER_EOS_CHECK for length in lengths), "some end between two looks"
    [waits] = sampled.calls
    waits = Counter({line: n for line, n in waits.items() if not line.startswith("models/cuda_graphs.py")})  # one trial
    assert 0 < waits.total() <= math.ceil(LENGTH / TOKENS_PER_EOS_CHECK), waits
