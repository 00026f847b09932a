"""Tests of decoding with a simulated CUDA graph against decoding without one. test_cuda.py uses a real graph."""

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
from simulated_device import DEVICE, HAS_REAL_DEVICE

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]


def decoder_of(model, uses_graphs):
    decoder = Decoder(model.config, model, torch.float32)
    decoder.uses_cuda_graphs = uses_graphs
    return decoder


def batches(name="llama"):
    """Return two batches: the first may use graphs, the second may not."""
    model = model_of(name)
    return [DecodeBatch(decoder_of(model, uses_graphs), 8) for uses_graphs in (None, False)]


def both(pair, act):
    one, other = (act(batch) for batch in pair)
    assert torch.equal(one, other)


def steps(pair, rows, count):
    for i in range(count):
        tokens = (torch.arange(rows) * 5 + 3 * i) % 11
        both(pair, lambda batch, tokens=tokens: batch.step(tokens))


@pytest.mark.parametrize("name", mostly_slow(FAMILY, every=5))
def test_graph_steps_have_the_bits_of_eager_steps(name, pretended):
    """Rows join, leave, pause and need more room in the cache, with and without sliding windows."""
    pair = batches(name)
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    steps(pair, 4, 5)
    both(pair, lambda batch: batch.admit([[7, 8]], 3))
    steps(pair, 7, 4)
    active = torch.tensor([True, False] * 3 + [True])
    for _ in range(3):
        both(pair, lambda batch: batch.step(torch.arange(7), active)[active])
    for batch in pair:
        batch.keep_rows(torch.tensor([0, 3, 4, 6]))
    steps(pair, 4, CACHE_GROWTH_TOKENS)
    for one, other in zip(*(batch.caches for batch in pair), strict=True):
        room = other.keys.shape[2]
        assert torch.equal(one.keys[:, :, :room], other.keys)
        assert torch.equal(one.values[:, :, :room], other.values)
    assert pretended.captured == 4, "one for each layout"
    assert pretended.compared == 4
    assert pretended.replayed > 5 + 7 + CACHE_GROWTH_TOKENS - 6


@pytest.mark.slow
def test_cache_grows_by_more_if_each_growth_costs_a_graph(pretended):
    pair = batches()
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    steps(pair, 4, 5 * CACHE_GROWTH_TOKENS + 2)
    with_graphs, without = (batch.caches[0].keys.shape[2] for batch in pair)
    assert (with_graphs, without) == (8 * CACHE_GROWTH_TOKENS, 6 * CACHE_GROWTH_TOKENS)
    assert pretended.captured == 5, "room for 32, 64, 96, 160 and 256 tokens"


def test_logits_of_a_step_are_not_overwritten_by_the_next_step(pretended):
    logits = []
    for batch in batches():
        first = batch.admit(PROMPTS, 2)
        logits.append(torch.stack([first, *(batch.step(torch.arange(4) + i) for i in range(6))]))
    assert torch.equal(*logits)


def test_graph_with_wrong_results_is_not_used(pretended, monkeypatch):
    capture = cuda_graphs.capture_step
    monkeypatch.setattr(cuda_graphs, "capture_step", lambda *about: lambda tokens: capture(*about)(tokens) * 1.1)
    pair = batches()
    both(pair, lambda batch: batch.admit(PROMPTS, 2))
    steps(pair, 4, 1)
    with pytest.warns(UserWarning, match="without a CUDA graph: its results are off by 0.1 of the largest"):
        steps(pair, 4, 1)
    steps(pair, 4, 3)
    assert pair[0].decoder.uses_cuda_graphs is False
    assert pretended.captured == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_failed_capture_falls_back_to_operators_and_warns_once(number, pretended):
    """The first capture is the self-check. The second and third belong to two layouts."""
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
    assert pretended.captured == number - 1
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
    """On a GPU its KV cache is most of the memory of sampling."""
    batch, _ = batches()
    batch.admit(PROMPTS, 2)
    for _ in range(4):
        batch.step(torch.arange(4))
    assert pretended.captured == 1
    reference = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert reference() is None
    finally:
        gc.enable()


def policy_at(device, uses_graphs=False):
    torch.manual_seed(0)
    policy = Policy(tiny_llama().to(device), character_tokenizer(), torch.float32)
    assert policy.decoder
    policy.decoder.uses_cuda_graphs = uses_graphs
    return policy


@pytest.mark.slow
@pytest.mark.skipif(HAS_REAL_DEVICE, reason="there is a real one")
def test_graph_on_a_device_adds_no_waits_and_changes_no_token(pretended, gpu):
    """The host waits once in eight tokens with and without graphs, and once for the self-check. Ended rows stay."""
    prompts, sampling = [Prompt(name, "a" * (i + 1)) for i, name in enumerate("pqrst")], Sampling(6, max_tokens=40)
    sampled, waits = [], []
    for policy in (policy_at("cpu"), *(policy_at(DEVICE, uses_graphs) for uses_graphs in (False, True, None))):
        before = gpu.waits.total(), pretended.captured, pretended.replayed
        groups = NativeSampler(rows=12, policy=policy).generate(prompts, sampling)
        sampled.append([c.token_ids for group in groups for c in group.completions])
        waits.append(gpu.waits.total() - before[0])
        recorded, replayed = pretended.captured - before[1], pretended.replayed - before[2]
        assert (policy.decoder.uses_cuda_graphs is True) == (0 < recorded < replayed / 4)
    assert all(tokens == sampled[0] for tokens in sampled)
    on_cpu, without, with_graphs, tried = waits
    assert on_cpu == 0
    assert without == with_graphs == tried - 1
    lengths = {len(ids) for ids in sampled[0]}
    assert 40 in lengths
    assert any(length % TOKENS_PER_EOS_CHECK for length in lengths)


@pytest.mark.slow
@pytest.mark.skipif(HAS_REAL_DEVICE, reason="there is a real one")
def test_ended_rows_on_a_device_are_dropped_as_soon_as_a_group_waits(gpu, monkeypatch):
    """If no group waits, all rows stay until half have ended: each drop costs a copy of the KV cache, and a graph."""
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
    NativeSampler(rows=12, policy=policy_at(DEVICE)).generate(prompts, sampling)
    assert before[0] == 0
    assert max(before) > 12 / 2
    last = kept[len(before) - 1 :]
    assert len(last) > 1
    assert all(2 * stay <= stood for stay, stood in last)


REFUSES = {
    "waits": lambda x: x + x.sum().item(),
    "copies": lambda x: x + torch.tensor([1.0] * 3, device=DEVICE),
    "copies that are not blocking": lambda x: x + torch.ones(3).to(DEVICE, non_blocking=True),
    "first calls": lambda x: x.atan2(x),
    "first calls with a dtype": lambda x: x.double() + x.double(),
}


@pytest.mark.skipif(HAS_REAL_DEVICE, reason="there is a real one")
@pytest.mark.parametrize("act", REFUSES.values(), ids=REFUSES)
def test_simulated_graph_refuses_what_a_real_graph_refuses(act, gpu):
    x = torch.ones(3, device=DEVICE)
    x + x.sum(), x.double()
    with Capture():
        x + x.sum()
    with pytest.raises(RuntimeError, match=REFUSED), Capture():
        act(x)


class Step:
    """A step that a graph cannot replay: `fault` says what changes on the host from step to step."""

    def __init__(self, fault):
        self.fault, self.count, self.buffer, self.earlier = fault, 0, torch.ones(3), []

    def compute(self, tokens):
        return tokens + self.buffer * (self.count if self.fault == "number" else 2) + self.buffer[: 1 + self.size].sum()

    def advance(self):
        self.count += 1
        if self.fault == "tensor":
            self.earlier.append(self.buffer)
            self.buffer = self.buffer.clone()

    @property
    def size(self):
        return self.count if self.fault == "size" else 1


@pytest.mark.parametrize("fault", [None, "number", "size", "tensor"])
def test_step_that_changes_on_the_host_fails_the_check_of_its_graph(fault, pretended):
    """The step is captured again before its second replay, and the two captures are compared."""
    step, tokens = Step(fault), torch.ones(3)
    replay = cuda_graphs.capture_step(step.compute, tokens)
    for i in range(3):
        if fault and i == 1:
            with pytest.raises(AssertionError, match="a graph keeps what changes from step to step"):
                replay(tokens)
            return
        assert torch.equal(replay(tokens + i), step.compute(tokens + i))
        step.advance()
    assert pretended.compared == 1
