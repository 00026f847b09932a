"""Attention of rollouts as a GPU reads them, by a kernel that is written out here; test_cuda.py has the real one."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from architectures import FAMILY, batch_of, model_of, weighted
from conftest import character_tokenizer
from made_rollouts import CASES, both_ways, by_hand, case
from pellucid.models import packed, varlen
from pellucid.models.packed import group_attention
from pellucid.policy.policy import Policy

CPU = torch.device("cpu")
F64 = torch.float64


def kernel(query, key, value, queries, keys, most_queries, most_keys, window_size, enable_gqa):
    """As torch describes it. The last query of a sequence stands at its last key."""
    assert queries.dtype == keys.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    read, (left, right) = [], window_size
    for (begin, end), (first, last) in zip(*(pairwise(x.tolist()) for x in (queries, keys)), strict=True):
        assert end - begin <= most_queries
        assert last - first <= most_keys
        at = torch.arange(last - first - (end - begin), last - first)[:, None]
        there = torch.arange(last - first)
        seen = (there <= at + right) & (there >= at - left if left >= 0 else True)
        share = query.shape[1] // key.shape[1]
        k, v = (x[first:last].repeat_interleave(share, 1).transpose(0, 1) for x in (key, value))
        scores = query[begin:end].transpose(0, 1) @ k.mT / query.shape[2] ** 0.5
        read.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(read)


@pytest.fixture
def there(monkeypatch):
    """The kernel is, and what is C++ is not."""
    monkeypatch.setattr(varlen, "kernel", lambda: kernel)
    monkeypatch.setattr(varlen, "there", lambda device, dtype: True)
    monkeypatch.setattr(packed, "way", lambda query: None)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_told_what_each_token_reads(name, there):
    joined, split, layout, grad = case(name)
    joined = joined.detach().double().requires_grad_()
    found = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad.double())
    exact = both_ways(joined, split, lambda heads: by_hand(*heads, layout.line), grad.double())
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILY)
def test_a_model_scores_and_learns_by_it_what_it_does_by_operators(name, there, monkeypatch):
    """And makes no bias, which would be large where texts are long."""
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(varlen, "there", lambda *_, by_kernel=by_kernel: by_kernel)
        made = []
        monkeypatch.setattr(packed, "bias_of", lambda *about, m=made, f=packed.bias_of: m.append(1) or f(*about))
        policy = Policy(model_of(name).double(), character_tokenizer(), F64)
        logprobs = policy.score(batch_of()).logprobs
        weighted(policy, 1.0).backward()
        found.append([logprobs, *(p.grad for p in policy.trainable().values())])
        fits = policy.decoder.shape.head_size % 8 == 0
        assert bool(made) != (by_kernel and fits)
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


def test_a_forward_gradient_and_heads_that_do_not_fit_go_by_the_operators():
    query = torch.zeros(4, 2, 64)
    assert varlen.reads(query)
    assert not varlen.reads(query[..., :60])
    assert not varlen.reads(torch.zeros(4, 2, 264))
    with forward_ad.dual_level():
        assert not varlen.reads(forward_ad.make_dual(query, query))


def shifted(*about, window_size, **more):
    left, right = window_size
    return kernel(*about, window_size=(left, right + 1), **more)


def far(*about, window_size, **more):
    left, right = window_size
    return kernel(*about, window_size=(left + 1 if left > 0 else left, right), **more)


def refused(*about, **more):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def halved(*about, **more):
    read = kernel(*about, **more)
    return read.detach() + (read - read.detach()) / 2


FAULTS = {
    kernel: "",
    shifted: "what is read is off by",
    far: "what is read is off by",
    halved: "its gradient is off by 0.5 of",
    refused: "FlashAttention only supports Ampere GPUs or newer.",
}


@pytest.mark.parametrize("attention", FAULTS, ids=lambda f: f.__name__)
def test_the_trial_finds_what_is_wrong_with_a_kernel(attention, monkeypatch):
    monkeypatch.setattr(varlen, "kernel", lambda: attention)
    with torch.no_grad():
        fault = varlen.trial(CPU, torch.bfloat16)
    assert fault.startswith(FAULTS[attention])
    assert bool(fault) == bool(FAULTS[attention])


@pytest.mark.parametrize("old", [None, lambda query, key, value, is_causal=False: query], ids=["none", "an older one"])
def test_an_older_torch_has_no_such_kernel(old, monkeypatch):
    monkeypatch.setattr(
        torch.nn.attention, "varlen", SimpleNamespace(**{"varlen_attn": old} if old else {}), raising=False
    )
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", torch.nn.attention.varlen)
    assert varlen.kernel.__wrapped__() is None
    monkeypatch.setattr(varlen, "kernel", lambda: None)
    assert (
        varlen.fault_at.__wrapped__(CPU, torch.bfloat16) == "this torch has no attention for sequences of any lengths"
    )


def test_this_torch_has_it_and_on_a_cpu_it_is_not_asked_for():
    assert varlen.kernel() is not None
    assert not varlen.there(CPU, torch.bfloat16)
