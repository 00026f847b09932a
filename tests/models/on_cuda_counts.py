"""Kernels, waits, kept bytes and graphs, counted on a device that says it is CUDA. test_pretended_cuda.py runs it.

With Triton its interpreter computes the kernels; TRITON_INTERPRET=0 shows what PyTorch's operators cost.
"""

from __future__ import annotations

import pytest

from counting import SMALL_LAYER, count_decode_step, count_micro_batch, create_policy, sample_batch
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling
from pretended_cuda import interprets_triton

CASE = "Triton" if interprets_triton() else "operators"
ROLLOUTS = {"Triton": (2, 2), "operators": (24, 4)}[CASE]
"""Tokens of a response in an update, and responses of a prompt: Triton's interpreter is slow."""
DECODE_KERNELS = {"Triton": (8, 8), "operators": (30, 57)}[CASE]
"""Of a step with sampling: in a layer, and besides."""
UPDATE_KERNELS = {"Triton": (44, 69), "operators": (89, 98)}[CASE]
"""Of the forward and backward pass of a micro-batch: in a layer, and besides."""
KEPT_BYTES = {"Triton": 31_918, "operators": 31_244}[CASE]
"""For the backward pass, of a token in a layer: of short responses, keys of the prompts are a larger share."""
SAMPLED, GRAPHS = {"Triton": (40, 1), "operators": (512, 14)}[CASE]
"""Tokens of a call in which no row ends, and graphs of two such calls: with Triton one graph serves all lengths."""


def test_kernels_of_a_decode_step(gpu):
    one, two = (count_decode_step(gpu, create_policy(layers)) for layers in (1, 2))
    per_layer = two.kernels.total() - one.kernels.total()
    assert (per_layer, one.kernels.total() - per_layer) == DECODE_KERNELS, two.kernels - one.kernels
    assert not one.waits + one.copies, "a step that is replayed does nothing but launch"


def test_kernels_waits_and_kept_bytes_of_a_micro_batch(gpu):
    passes = []
    for layers in (1, 2):
        policy = create_policy(layers)
        passes.append(count_micro_batch(gpu, policy, sample_batch(policy, *ROLLOUTS)))
    one, two = passes
    kernels = [(x.forward.kernels + x.backward.kernels).total() for x in passes]
    per_layer = kernels[1] - kernels[0]
    assert (per_layer, kernels[0] - per_layer) == UPDATE_KERNELS, [
        getattr(two, name).kernels - getattr(one, name).kernels for name in ("forward", "backward")
    ]
    # Allocations are rounded up to 512 bytes, and each row keeps the keys of its prompt once more.
    assert (two.kept_bytes - one.kept_bytes) / one.tokens == pytest.approx(KEPT_BYTES, rel=0.03)
    assert not one.forward.waits + one.backward.waits


def test_graphs_of_many_tokens(gpu, pretended):
    policy = create_policy(1, SMALL_LAYER)
    for seed in "ab":
        NativeSampler(policy=policy).generate([Prompt("p", "12")], Sampling(2, max_tokens=SAMPLED, seed=seed))
    assert pretended.captured == GRAPHS
    assert pretended.compared
