"""Counts of kernels, waits, kept bytes and graphs on a simulated CUDA device. test_pretended_cuda.py runs this file.

Triton's kernels run in its interpreter. TRITON_INTERPRET=0 shows what PyTorch's operators cost.
"""

from __future__ import annotations

import pytest

from counting import SMALL_LAYER, count_decode_step, count_micro_batch, create_policy, sample_batch
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling
from pretended_cuda import interprets_triton

CASE = "Triton" if interprets_triton() else "operators"
ROLLOUTS = {"Triton": (2, 2), "operators": (24, 4)}[CASE]
"""Tokens of a response in an update, and responses per prompt. Both are small since Triton's interpreter is slow."""
DECODE_KERNELS = {"Triton": (8, 8), "operators": (30, 57)}[CASE]
"""Kernels of a decode step with sampling: per layer, and outside the layers."""
UPDATE_KERNELS = {"Triton": (44, 69), "operators": (89, 98)}[CASE]
"""Kernels of the forward and backward pass of a micro-batch: per layer, and outside the layers."""
KEPT_BYTES = {"Triton": 31_918, "operators": 31_244}[CASE]
"""Bytes kept for the backward pass, per token and layer. Short responses have a larger share of prompt keys."""
SAMPLED, GRAPHS = {"Triton": (40, 1), "operators": (512, 14)}[CASE]
"""Tokens of a call in which no row ends, and graphs of two such calls. With Triton one graph serves all lengths."""


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
    # Allocations are rounded up to 512 bytes, and each row keeps another copy of its prompt's keys.
    assert (two.kept_bytes - one.kept_bytes) / one.tokens == pytest.approx(KEPT_BYTES, rel=0.03)
    assert not one.forward.waits + one.backward.waits


def test_graphs_of_many_tokens(gpu, pretended):
    policy = create_policy(1, SMALL_LAYER)
    for seed in "ab":
        NativeSampler(policy=policy).generate([Prompt("p", "12")], Sampling(2, max_tokens=SAMPLED, seed=seed))
    assert pretended.captured == GRAPHS
    assert pretended.compared
