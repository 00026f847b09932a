"""Tests of attention over packed sequences on a GPU, by a kernel in Python. test_cuda.py uses the real kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from architectures import FAMILY, batch_of, model_of, weighted
from conftest import character_tokenizer
from made_rollouts import CASES, both_ways, by_hand, case
from pellucid.models import attention as varlen
from pellucid.models import score
from pellucid.models.score import attend_groups
from pellucid.policy.policy import Policy

CPU = torch.device("cpu")
F64 = torch.float64


def kernel(query, keys, values, by, window, beyond=0):
    """Return flash attention as torch defines it: the last query of a sequence has the position of its last key."""
    assert by.query_offsets.dtype == by.key_offsets.dtype == torch.int32
    read = []
    for (begin, end), (first, last) in zip(
        *(pairwise(x.tolist()) for x in (by.query_offsets, by.key_offsets)), strict=True
    ):
        assert end - begin <= by.max_query_length
        assert last - first <= by.max_key_length
        at = torch.arange(last - first - (end - begin), last - first)[:, None]
        there = torch.arange(last - first)
        seen = (there <= at + beyond) & (there > at - window if window else True)
        share = query.shape[1] // keys.shape[1]
        k, v = (x[first:last].repeat_interleave(share, 1).transpose(0, 1) for x in (keys, values))
        scores = query[begin:end].transpose(0, 1) @ k.mT / query.shape[2] ** 0.5
        read.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(read)


@pytest.fixture
def there(monkeypatch):
    """Use `kernel`, and not the C++ kernel of the CPU."""
    monkeypatch.setattr(varlen, "run_flash", kernel)
    monkeypatch.setattr(score, "uses_flash", lambda device, dtype: True)
    monkeypatch.setattr(score, "find_attention_kernel", lambda query: None)


@pytest.mark.parametrize("name", CASES)
def test_kernel_gets_the_keys_that_each_token_reads(name, there):
    joined, split, layout, grad = case(name)
    joined = joined.detach().double().requires_grad_()
    found = both_ways(joined, split, lambda heads: attend_groups(heads, layout), grad.double())
    exact = both_ways(joined, split, lambda heads: by_hand(*heads, layout.sequences), grad.double())
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILY)
def test_scores_and_gradients_by_the_kernel_match_operators(name, there, monkeypatch):
    """The kernel needs no attention bias, which would be large for long sequences."""
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(score, "uses_flash", lambda *_, by_kernel=by_kernel: by_kernel)
        made = []
        monkeypatch.setattr(
            score, "make_attention_bias", lambda *about, m=made, f=score.make_attention_bias: m.append(1) or f(*about)
        )
        policy = Policy(model_of(name).double(), character_tokenizer(), F64)
        logprobs = policy.score(batch_of()).logprobs
        weighted(policy, 1.0).backward()
        found.append([logprobs, *(p.grad for p in policy.trainable().values())])
        fits = policy.decoder.shape.head_size % 8 == 0
        assert bool(made) != (by_kernel and fits)
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


def test_flash_supports_head_sizes_up_to_256_in_multiples_of_8():
    query = torch.zeros(4, 2, 64)
    assert varlen.supports_flash(query.shape[2])
    assert not varlen.supports_flash(60)
    assert not varlen.supports_flash(264)


def shifted(*about):
    return kernel(*about, beyond=1)


def far(query, keys, values, by, window):
    return kernel(query, keys, values, by, window and window + 1)


def refused(*about):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def halved(*about):
    read = kernel(*about)
    return read.detach() + (read - read.detach()) / 2


FAULTS = {
    kernel: "",
    shifted: "attention is off by",
    far: "attention is off by",
    halved: "its gradient is off by 0.5 of",
    refused: "FlashAttention only supports Ampere GPUs or newer.",
}


@pytest.mark.parametrize("attention", FAULTS, ids=lambda f: f.__name__)
def test_self_check_finds_faults_of_a_kernel(attention, monkeypatch):
    monkeypatch.setattr(varlen, "run_flash", attention)
    with torch.no_grad():
        fault = varlen.find_flash_fault.__wrapped__(CPU, torch.bfloat16)
    assert fault.startswith(FAULTS[attention])
    assert bool(fault) == bool(FAULTS[attention])


def test_torch_has_the_flash_operator_and_a_cpu_does_not_use_it():
    """Its arguments have the names and positions that this version expects."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:10] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask"),
    ]
    assert {"scale", "window_size_left", "window_size_right"} < set(names[10:])
    assert not varlen.uses_flash(CPU, torch.bfloat16)
