"""Tests that every autograd.Function of the package reads each saved tensor once and can run backward twice.

`torch.utils.checkpoint` returns a saved tensor once, and hooks such as `save_on_cpu` copy it each time.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import pellucid
from architectures import adapted
from conftest import AT_KERNEL_SHAPE, character_tokenizer, make_policy, tiny_llama
from pellucid.algorithm.batch import collate
from pellucid.models import attention
from pellucid.policy.policy import Policy
from pellucid.types import Completion, Group, Prompt

BF16 = torch.bfloat16


def batch_of(rows: int = 4):
    """Return two groups with prompts and completions of several lengths, together more than 32 tokens."""
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return tuple(torch.randint(0, 27, (n,), generator=generator).tolist())

    def completions(most):
        return tuple(Completion(x, (-1.0,) * len(x), "", True) for x in (ids(most - i) for i in range(rows)))

    return collate([Group(Prompt("p", "?"), ids(n), completions(n + 4)) for n in (6, 9)])


def sharded(policy: Policy) -> Policy:
    """Make a policy read its parameters in place without cast copies, as engines do that shard parameters."""
    policy.decoder.disable_cast_copies()
    return policy


def small(**how) -> Policy:
    """Return a policy of a shape that operators compute."""
    torch.manual_seed(0)
    return Policy(tiny_llama(), character_tokenizer(), BF16, **how)


POLICIES = {
    "bf16, heads of 64": partial(make_policy, "llama", BF16),
    "bf16, biases, heads of 64": partial(make_policy, "qwen2.5, heads of 64", BF16, entropy_grad=True),
    "bf16, heads of 64, read in place": lambda **how: sharded(make_policy("llama, heads of 64", BF16, **how)),
    "bf16, an adapter, heads of 64": partial(adapted, "qwen2.5, heads of 64", BF16),
    "bf16, an adapter, heads of 64, read in place": lambda **how: sharded(adapted("llama, heads of 64", BF16, **how)),
    "fp32, heads of 64": partial(make_policy, "llama, heads of 64"),
    "bf16, heads of 8": small,
}


def functions_of(package) -> set[str]:
    """Return the names of all autograd.Functions that a package defines."""
    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.rpartition(".")[2] != "__main__":
            with suppress(ModuleNotFoundError):  # a module of an extra may not be installed
                importlib.import_module(module.name)
    todo = [torch.autograd.Function]
    while todo:
        for cls in todo.pop().__subclasses__():
            todo.append(cls)
            if cls.__module__.startswith(f"{package.__name__}."):
                found.add(cls.__name__)
    return found


def nodes_below(x) -> set[str]:
    """Return the names of all functions in the graph of a tensor."""
    seen, todo = set(), [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [below for below, _ in node.next_functions]
    return {node.name().removesuffix("Backward") for node in seen}


def loss_of(policy, batch):
    torch.manual_seed(2)
    scores = policy.score(batch)
    loss = (scores.logprobs * torch.randn(batch.response_mask.shape) * batch.response_mask).sum()
    return loss + 0.1 * scores.entropy[batch.response_mask].sum() if scores.entropy.requires_grad else loss


def gradients(policy, loss, **how):
    return torch.autograd.grad(loss, list(policy.trainable().values()), **how)


@pytest.mark.parametrize("name", POLICIES)
def test_saved_tensors_are_read_once_per_backward_pass_with_the_same_bits(name):
    policy, batch = POLICIES[name](), batch_of()
    expected = gradients(policy, loss_of(policy, batch))
    reads = []

    def pack(x):
        reads.append(0)
        return len(reads) - 1, x

    def unpack(packed):
        number, x = packed
        reads[number] += 1
        return x.clone()  # a new tensor each time, as after a copy to another device and back

    with saved_tensors_hooks(pack, unpack):
        loss = loss_of(policy, batch)
    for most in (1, 2):
        found = gradients(policy, loss, retain_graph=most == 1)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert reads
        assert max(reads) <= most, f"a tensor was read {max(reads)} times in {most} backward passes"


@pytest.mark.parametrize("name", POLICIES)
def test_recomputing_layers_changes_no_bit_of_a_gradient(name):
    batch, policy = batch_of(), POLICIES[name]()
    expected = gradients(policy, loss_of(policy, batch))
    recomputing = POLICIES[name](gradient_checkpointing=True)
    found = gradients(recomputing, loss_of(recomputing, batch))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_graphs_of_these_policies_have_every_function():
    reached = set().union(*(nodes_below(loss_of(make(), batch_of())) for make in POLICIES.values()))
    missing = functions_of(pellucid) - reached
    if attention.load_attention_kernel()[0] is None:
        missing -= {"PackedAttention"}
    assert not missing


def test_models_of_these_tests_have_head_sizes_of_the_kernels():
    for make in AT_KERNEL_SHAPE.values():
        assert make().config.head_dim in attention.KERNEL_HEAD_SIZES
