"""Count the cost of a decode step and an update on a simulated GPU: kernels, waits, bytes and graphs.

Layers have the widths of Qwen2.5-0.5B, in bf16, and the vocabulary is small. The counts of a layer are the
differences between two depths.

    python tests/pretended_cuda.py tests/models/on_cuda_counts.py         as tests; TRITON_INTERPRET=0 hides Triton
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from conftest import CHARACTERS, character_tokenizer
from pellucid.algorithm.batch import collate
from pellucid.models.linear import accumulate_in_place, compute_weight_gradient
from pellucid.models.sampling import sample_tokens
from pellucid.policy.policy import Policy
from pellucid.types import Completion, Group, Prompt
from simulated_device import DEVICE

VOCABULARY = 512
PROMPTS = [Prompt(str(i), CHARACTERS[i : i + 9 + i]) for i in range(4)]


class Work(NamedTuple):
    """The work that the host requested from a device."""

    kernels: Counter[str]
    waits: Counter[str]
    copies: Counter[str]


@contextmanager
def counted(device):
    """Yield a Work that is filled when the block ends."""
    counters = device.kernels, device.waits, device.copies
    before = [Counter(counter) for counter in counters]
    work = Work(Counter(), Counter(), Counter())
    yield work
    for result, counter, old in zip(work, counters, before, strict=True):
        result.update(counter - old)


LAYER = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
SMALL_LAYER = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def create_policy(layers, layer=LAYER, **settings):
    """Return a bf16 model on the device with `layers` layers, none of whose tokens ends a completion."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=True, **layer)
    model = Qwen2ForCausalLM(config).to(DEVICE)
    policy = Policy(model, character_tokenizer(size=VOCABULARY), torch.bfloat16, **settings)
    policy.eos_ids = (-1,)
    ones = torch.ones(16, 16, dtype=torch.bfloat16).to(DEVICE)
    compute_weight_gradient(ones, ones, torch.float32, ones.float())  # runs the one-time check of the operator
    return policy


def count_decode_step(device, policy, rows=8):
    """Return the work of a decode step with sampling, after warm-up, so that a graph computes it if there is one."""
    batch = policy.create_decode_batch(rows)
    logits = batch.admit([policy.encode(prompt) for prompt in PROMPTS], rows // len(PROMPTS))
    uniforms = torch.full((rows,), 0.5, dtype=torch.float64).to(DEVICE)
    for _ in range(5):
        with counted(device) as work:
            tokens, _ = sample_tokens(logits, uniforms, 1.0)
            logits = batch.step(tokens)
    return work


def sample_batch(policy, tokens, group_size):
    """Return random responses to the prompts as a batch."""
    random = torch.Generator().manual_seed(0)
    groups = []
    for prompt in PROMPTS:
        rows = torch.randint(VOCABULARY, (group_size, tokens), generator=random).tolist()
        completions = tuple(Completion(tuple(ids), (-1.0,) * tokens, "", finished=False) for ids in rows)
        groups.append(Group(prompt, tuple(policy.encode(prompt)), completions))
    return collate(groups)


class Pass(NamedTuple):
    """A forward and backward pass over a micro-batch."""

    forward: Work
    backward: Work
    tokens: int
    """Tokens of prompts, each counted once, and of responses without their last token."""
    kept_bytes: int
    """Memory that is held between the passes."""
    peak_bytes: int
    """Peak memory of the passes, beyond what was allocated before."""


def count_micro_batch(device, policy, batch):
    """Score a batch with gradients twice. Return the second pass, which accumulates gradients as in a run."""
    weights = batch.action_mask.float()
    batch = replace(batch, token_weights=weights, advantages=weights)
    for _ in range(2):
        before, device.memory.peak = device.memory.allocated, device.memory.allocated
        with counted(device) as forward:
            scores = policy.score(batch)
        kept = device.memory.allocated - before
        with counted(device) as backward, accumulate_in_place(enabled=True):
            scores.logprobs.sum().backward()
        del scores
    tokens = sum(map(len, batch.prompt_ids)) + int(batch.response_mask[:, 1:].sum())
    return Pass(forward, backward, tokens, kept, device.memory.peak - before)
