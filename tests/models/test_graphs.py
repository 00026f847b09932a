"""Tokens decoded by a recorded graph, against the same without: by a pretended one. test_cuda.py has a real one."""

from __future__ import annotations

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch

from architectures import FAMILY, model_of
from conftest import character_tokenizer, mostly_slow, tiny_llama
from pellucid.models import cuda_graphs
from pellucid.models.decode import CACHE_GROWTH_TOKENS, DecodeBatch
from pellucid.models.decoder import Decoder
from pellucid.policy.policy import Policy
from pellucid.rollout.native import TOKENS_PER_EOS_CHECK, NativeSampler
from pellucid.types import Prompt, Sampling
from pretended_graph import REFUSED, Capture
from simulated_device import A_REAL_ONE, WHERE

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]


def decoder_of(model, recordable):
    decoder = Decoder(model.config, model, torch.float32)
    decoder.uses_cuda_graphs = recordable
    return decoder


def batches(name="llama"):
    """One that may be recorded, and one that may not."""
    model = model_of(name)
    return [DecodeBatch(decoder_of(model, recordable), 8) for recordable in (None, False)]


def both(pair, act):
    one, other = (act(batch) for batch in pair)
    assert torch.equal(one, other)


def steps(pair, rows, count):
    for i in range(count):
        tokens = (torch.arange(rows) * 5 + 3 * i) % 11
        both(pair, lambda batch, tokens=tokens: batch.step(tokens))


@pytest.mark.parametrize("name", mostly_slow(FAMILY, every=5))
def test_a_graph_has_the_bits_of_what_it_was_recorded_from(name, pretended):
    """Through rows that come, are dropped, stand still and need more room, with sliding windows and without."""
    pair = batches(name)
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    steps(pair, 4, 5)
    both(pair, lambda batch: batch.admit([[7, 8]], 3))
    steps(pair, 7, 4)
    speaks = torch.tensor([True, False] * 3 + [True])
    for _ in range(3):
        both(pair, lambda batch: batch.step(torch.arange(7), speaks)[speaks])
    for batch in pair:
        batch.keep_rows(torch.tensor([0, 3, 4, 6]))
    steps(pair, 4, CACHE_GROWTH_TOKENS)
    for one, other in zip(*(batch.caches for batch in pair), strict=True):
        room = other.keys.shape[2]
        assert torch.equal(one.keys[:, :, :room], other.keys)
        assert torch.equal(one.values[:, :, :room], other.values)
    # Of four layouts one each, and the one that is tried.
    assert pretended.recorded == 5
    assert pretended.replayed > 5 + 7 + CACHE_GROWTH_TOKENS - 6


@pytest.mark.slow
def test_room_grows_by_more_where_each_growth_costs_a_graph(pretended):
    pair = batches()
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    steps(pair, 4, 5 * CACHE_GROWTH_TOKENS + 2)
    recorded, plain = (batch.caches[0].keys.shape[2] for batch in pair)
    assert (recorded, plain) == (8 * CACHE_GROWTH_TOKENS, 6 * CACHE_GROWTH_TOKENS)
    assert pretended.recorded == 1 + 5, "room for 32, 64, 96, 160 and 256 tokens; and the one that is tried"


def test_what_was_said_is_not_written_over_by_what_is_said_next(pretended):
    said = []
    for batch in batches():
        behind = batch.admit(PROMPTS, 2)
        said.append(torch.stack([behind, *(batch.step(torch.arange(4) + i) for i in range(6))]))
    assert torch.equal(*said)


def test_a_graph_that_says_otherwise_is_not_used(pretended, monkeypatch):
    record = cuda_graphs.capture_step
    monkeypatch.setattr(cuda_graphs, "capture_step", lambda *about: lambda tokens: record(*about)(tokens) * 1.1)
    pair = batches()
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    steps(pair, 4, 1)
    with pytest.warns(UserWarning, match="without a CUDA graph: its logits are off by 0.1 of the largest"):
        steps(pair, 4, 1)
    steps(pair, 4, 3)
    assert pair[0].decoder.uses_cuda_graphs is False
    assert pretended.recorded == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_capture_that_fails_at_any_time_leaves_the_operators_and_warns_once(number, pretended):
    """The first capture is the trial; the second and third are those of two layouts."""
    pretended.refuse_from = number
    pair = batches()
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        steps(pair, 4, 4)
        both(pair, lambda batch: batch.admit([[7, 8]], 3))
        steps(pair, 7, 4)
        for batch in pair:
            batch.keep_rows(torch.tensor([0, 3]))
        steps(pair, 2, 4)
    assert [str(one.message) for one in warned] == [f"tokens are decoded without a CUDA graph: {REFUSED}"]
    assert pair[0].decoder.uses_cuda_graphs is False
    assert pretended.recorded == number - 1
    assert pretended.streams[-1] == pretended.streams[0]


def test_the_pretended_graph_refuses_a_pool_whose_last_graph_is_gone(pretended):
    y, pool = torch.ones(3), torch.cuda.graph_pool_handle()
    captured(lambda: y + 1, pool)
    with pytest.raises(RuntimeError, match="use_count > 0 INTERNAL ASSERT FAILED"):
        captured(lambda: y + 1, pool)


def test_the_pretended_graph_refuses_inputs_that_were_freed(pretended):
    x, y = torch.ones(3), torch.ones(3)
    graph = captured(partial(y.add_, x))
    graph.replay()
    del x
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        graph.replay()


def test_the_pretended_graph_refuses_memory_that_a_later_graph_uses(pretended):
    y, pool = torch.ones(3), torch.cuda.graph_pool_handle()
    first, last = (captured(lambda: y + 1, pool) for _ in range(2))
    last.replay()
    with pytest.raises(RuntimeError, match="has written over"):
        first.replay()


def captured(act, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        act()
    return graph


def test_a_batch_is_freed_with_its_last_owner(pretended):
    """On a GPU its caches are most of the memory of sampling."""
    batch, _ = batches()
    batch.admit(PROMPTS, 2)
    for _ in range(4):
        batch.step(torch.arange(4))
    assert pretended.recorded == 2
    there = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert there() is None
    finally:
        gc.enable()


def policy_at(device, recordable=False):
    torch.manual_seed(0)
    policy = Policy(tiny_llama().to(device), character_tokenizer(), torch.float32)
    assert policy.decoder
    policy.decoder.uses_cuda_graphs = recordable
    return policy


@pytest.mark.slow
@pytest.mark.skipif(A_REAL_ONE, reason="there is a real one")
def test_on_a_device_a_graph_waits_for_nothing_and_changes_nothing(pretended, gpu):
    """Nor is the host waited for more often than without: once in eight tokens. Rows that have ended stand on."""
    prompts, sampling = [Prompt(name, "a" * (i + 1)) for i, name in enumerate("pqrst")], Sampling(6, max_tokens=40)
    drawn, waits = [], []
    for policy in (policy_at("cpu"), *(policy_at(WHERE, recordable) for recordable in (False, True, None))):
        before = gpu.waits.total(), pretended.recorded, pretended.replayed
        groups = NativeSampler(rows=12, policy=policy).generate(prompts, sampling)
        drawn.append([c.token_ids for group in groups for c in group.completions])
        waits.append(gpu.waits.total() - before[0])
        recorded, replayed = pretended.recorded - before[1], pretended.replayed - before[2]
        assert (policy.decoder.uses_cuda_graphs is True) == (0 < recorded < replayed / 4)
    assert all(tokens == drawn[0] for tokens in drawn)
    on_cpu, without, with_graphs, tried = waits
    assert on_cpu == 0
    assert without == with_graphs == tried - 1
    lengths = {len(ids) for ids in drawn[0]}
    assert 40 in lengths
    assert any(length % TOKENS_PER_EOS_CHECK for length in lengths)


@pytest.mark.slow
@pytest.mark.skipif(A_REAL_ONE, reason="there is a real one")
def test_on_a_device_rows_that_have_ended_make_room_as_soon_as_a_group_waits(gpu, monkeypatch):
    """And where nobody waits, all stand until half have ended: to drop each costs a copy of all caches, and a graph."""
    admit, keep, before, kept = DecodeBatch.admit, DecodeBatch.keep_rows, [], []

    def admitted(batch, prompts, copies):
        before.append(len(batch.generated_lengths))
        return admit(batch, prompts, copies)

    def dropped(batch, rows):
        kept.append((len(rows), len(batch.generated_lengths)))
        keep(batch, rows)

    monkeypatch.setattr(DecodeBatch, "admit", admitted)
    monkeypatch.setattr(DecodeBatch, "keep_rows", dropped)
    prompts, sampling = [Prompt(str(i), "a") for i in range(16)], Sampling(2, max_tokens=40)
    NativeSampler(rows=12, policy=policy_at(WHERE)).generate(prompts, sampling)
    assert before[0] == 0
    assert max(before) > 12 / 2
    last = kept[len(before) - 1 :]
    assert len(last) > 1
    assert all(2 * stay <= stood for stay, stood in last)


REFUSES = {"waits": lambda x: x + x.sum().item(), "copies": lambda x: x + torch.tensor([1.0] * 3, device=WHERE)}


@pytest.mark.skipif(A_REAL_ONE, reason="there is a real one")
@pytest.mark.parametrize("act", REFUSES.values(), ids=REFUSES)
def test_what_stands_in_for_a_graph_refuses_what_a_real_one_does(act, gpu):
    x = torch.ones(3, device=WHERE)
    with Capture():
        x + x
    with pytest.raises(RuntimeError, match=REFUSED), Capture():
        act(x)
