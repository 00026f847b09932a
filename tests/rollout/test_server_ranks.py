"""Ranks of a run as clients of the same servers: each gets its own rows, and only rank 0 pushes weights."""

from __future__ import annotations

import resource
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import pytest
import torch

from conftest import CountDigits
from pellucid.rollout import vllm_client
from pellucid.rollout.vllm import VLLMSampler, get_push_weights
from pellucid.rollout.vllm_client import (
    InvalidAnswerError,
    SamplerClient,
    SampleRequest,
    ServerLostError,
    ServerPool,
    serialize_model,
)
from pellucid.rollout.weight_spool import spool_weights
from pellucid.serve.vllm_server import EngineHost
from pellucid.types import Sampling, UserError
from sampler_process import Plain, served, tiny_policy

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")


@pytest.fixture
def policy():
    return tiny_policy()


@pytest.fixture
def held():
    return [EngineHost(Plain), EngineHost(Plain)]


@pytest.fixture
def urls(held):
    with served(held[0]) as first, served(held[1]) as second:
        yield first, second


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.1)


# ---------------------------------------------------------------- clients of one server


@pytest.fixture
def clients(policy, urls):
    """Return two clients of the first server: one has pushed weights, and the other follows it."""
    pushing, following = SamplerClient(urls[0], 10.0), SamplerClient(urls[0], 10.0)
    model = serialize_model(policy)
    pushing.load_model(model)
    pushing.push(get_push_weights(policy))
    pushing.rename_version("abc")
    following.follow(model, "abc")
    return pushing, following


def rows_of(client, numbers, most=8):
    """Return the tokens of these rows by number. The number is also the seed."""
    found = {}
    answers = client.step([SampleRequest(n, [1, 2], most, 1.0, n) for n in numbers])
    while len(found) < len(numbers):
        found |= {answer.key: answer.tokens for answer in answers}
        answers = client.step([])
    assert not answers
    return found


def test_clients_get_their_own_rows_despite_equal_numbers(clients):
    numbers = [0, 1, 2], [2, 3]
    right = list(map(rows_of, clients, numbers))
    assert right[0][2] == right[1][2]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rows_of, clients, numbers)) == right


def test_released_rows_stop_decoding_and_late_requests_are_refused(clients, held):
    one, other = clients
    held[0].engine.pause = 0.05
    other.step([SampleRequest(n, [1, 2], 400, 1e-6, n) for n in range(3)])
    one.step([SampleRequest(7, [1, 2], 400, 1e-6, 7)])
    late = other.client_id
    other.release_rows()
    assert [key for key in held[0].engine.unfinished if key[0] == late] == []
    assert [key[1] for key in held[0].engine.unfinished] == [7], "those of another client are decoded on"
    other.client_id, now = late, other.client_id
    with pytest.raises(ServerLostError, match="409, this client has released its rows"):
        other.step([SampleRequest(9, [1, 2], 8, 1.0, 9)])
    other.client_id = now
    held[0].engine.pause = 0.0
    assert len(rows_of(other, [1])) == 1


class OneByOne(Plain):
    """An engine that decodes only the oldest row."""

    def step(self):
        waiting = self.unfinished
        first = next(iter(waiting))
        self.unfinished = {first: waiting[first]}
        ended = super().step()
        self.unfinished = {key: waiting[key] for key in waiting if key != first or not ended}
        return ended


@pytest.mark.slow
def test_row_may_wait_for_the_steps_of_another_client(policy):
    """It may wait no longer than that: an engine that makes steps without the row is still detected."""
    host = EngineHost(OneByOne)
    with served(host) as url:
        one, other = SamplerClient(url, 10.0), SamplerClient(url, 10.0)
        one.load_model(serialize_model(policy))
        one.push(get_push_weights(policy))
        other.follow(serialize_model(policy), one.version)
        slow = [SampleRequest(n, [1, 2], 100, 1e-6, n) for n in range(3)]
        host.engine.pause = 0.002
        one.step(slow)
        assert len(rows_of(other, [5], most=3)[5]) <= 3
        host.steps, host.engine.step = 0, list
        one.release_rows()
        with pytest.raises(InvalidAnswerError, match="more steps than the rows can need"):
            rows_of(other, [6], most=3)


# ---------------------------------------------------------------- ranks, as threads


class Ranks:
    """One of several ranks in threads, which exchange items as processes do."""

    def __init__(self, rank, barrier, brought):
        self.rank, self.world_size, self.barrier, self.brought = rank, len(brought), barrier, brought

    def gather(self, items):
        self.brought[self.rank] = list(items)
        self.barrier.wait()
        everything = [item for own in self.brought for item in own]
        self.barrier.wait()
        return everything


@contextmanager
def samplers_of(urls, count=2, timeout=5.0, ahead=False):
    barrier, brought = Barrier(count, timeout=60), [None] * count
    samplers = [VLLMSampler(engine=ServerPool(urls, timeout, ahead)) for _ in range(count)]
    for rank, sampler in enumerate(samplers):
        sampler.ranks = sampler.engine.ranks = Ranks(rank, barrier, brought)
    try:
        yield samplers
    finally:
        for sampler in samplers:
            sampler.close()


def together(samplers, act):
    """Return the result of `act` on each rank, or the error that it raised."""

    def acted(sampler):
        try:
            return act(sampler)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(samplers)) as threads:
        return list(threads.map(acted, samplers))


def own_prompts(sampler, count=6):
    return CountDigits().sample(0, count)[sampler.ranks.rank :: sampler.ranks.world_size]


@pytest.mark.slow
def test_ranks_sample_like_one_process_and_start_on_different_servers(policy, urls, held):
    whole = VLLMSampler(engine=ServerPool(urls[:1], 5.0))
    whole.sync(policy, 3)
    right = whole.generate(CountDigits().sample(0, 6), SAMPLING)
    held[0].engine.seen.clear()
    with samplers_of(urls) as samplers:
        together(samplers, lambda sampler: sampler.sync(policy, 3))
        assert [host.engine.pushed for host in held] == [2, 1], "no rank but the first pushes"
        found = together(samplers, lambda sampler: sampler.generate(own_prompts(sampler), SAMPLING))
        assert [found[i % 2][i // 2] for i in range(6)] == right
        assert [len(host.engine.seen) for host in held] == [12, 12], "three groups of four rows each"


def test_few_groups_per_rank_do_not_all_go_to_the_first_server(policy, urls, held):
    with samplers_of(urls) as samplers:
        together(samplers, lambda sampler: sampler.sync(policy, 3))
        until(lambda: all(server.is_up for sampler in samplers for server in sampler.engine.servers))
        together(samplers, lambda sampler: sampler.generate(own_prompts(sampler, 2), SAMPLING))
        assert [len(host.engine.seen) for host in held] == [4, 4]


@pytest.mark.slow
def test_server_gets_lost_weights_from_a_rank_without_rows(policy, urls, held, capsys):
    with samplers_of(urls[:1]) as samplers:
        together(samplers, lambda sampler: sampler.sync(policy, 3))
        right = samplers[1].generate(own_prompts(samplers[1]), SAMPLING)
        held[0].version = ""
        assert samplers[1].generate(own_prompts(samplers[1]), SAMPLING) == right
        assert held[0].engine.pushed == 2
        told = capsys.readouterr().out
        assert f"! rank 1: {urls[0]}: " in told
        assert f"! {urls[0]} is back with the current weights" in told


@pytest.mark.slow
def test_no_rank_samples_from_unchecked_weights(policy, urls, held, monkeypatch):
    """A returning server has other weights. Rank 0 detects it, and no rank uses the server until then."""
    with samplers_of(urls[:1]) as samplers:
        together(samplers, lambda sampler: sampler.sync(policy, 3))
        held[0].version, held[0].engine.push = "", lambda weights: None
        with torch.no_grad():
            next(iter(held[0].engine.model.parameters())).add_(1.0)
        seen = len(held[0].engine.seen)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(samplers[1].generate, own_prompts(samplers[1]), SAMPLING)
            until(lambda: any(future.done() for future in samplers[0].engine.futures))
            time.sleep(0.5)
            assert len(held[0].engine.seen) == seen
            samplers[1].engine.futures.append(failed("the run ends"))
            with pytest.raises(UserError, match="the run ends"):
                asked.result()
        told = together(samplers, lambda sampler: sampler.sync(policy, 4))
        assert [str(error) for error in told] == [str(told[0])] * 2
        assert "old weights" in str(told[0])


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def failed(message):
    future = Future()
    future.set_exception(UserError(message))
    return future


@pytest.mark.slow
def test_slow_push_sends_heartbeats_to_waiting_ranks(policy, urls, held, monkeypatch):
    """Without heartbeats, the other ranks would give up on a silent rank."""
    monkeypatch.setattr(vllm_client, "_HEARTBEAT_SECONDS", 0.1)
    with samplers_of(urls) as samplers:
        gathered, gather = [], Ranks.gather
        monkeypatch.setattr(Ranks, "gather", lambda self, items: gathered.append(self.rank) or gather(self, items))
        make = held[1].make_engine
        held[1].make_engine = lambda model: time.sleep(1.0) or make(model)
        together(samplers, lambda sampler: sampler.sync(policy, 3))
        assert gathered.count(1) > 4
        assert all(server.is_up for sampler in samplers for server in sampler.engine.servers)


@pytest.mark.parametrize("ahead", [False, True])
def test_failed_write_on_rank_0_ends_all_ranks_with_one_line(policy, urls, ahead):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with samplers_of(urls, 1 if ahead else 2, ahead=ahead) as samplers:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            told = together(samplers, lambda sampler: sampler.sync(policy, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for error in told:
        assert f"{tempfile.gettempdir()} has no room for the weights" in str(error)
        assert "File too large" in str(error)
        assert "set the environment variable TMPDIR" in str(error)
        assert "\n" not in str(error)


# ---------------------------------------------------------------- weights on disk


def test_spooled_weights_can_be_read_in_any_order_by_any_thread():
    weights = {
        "table": torch.randn(400, 1000),
        "head": torch.randn(400, 1000),
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(6, 4).T,
        "empty": torch.empty(0, 3),
        "scale": torch.tensor(2.5),
    }
    spool = spool_weights(weights.items())
    more = spool_weights({"table": torch.ones(2)}.items())
    assert spool.get_sizes() == {name: weight.nbytes for name, weight in weights.items()}
    with ThreadPoolExecutor(4) as threads:
        names = [*weights] * 20
        for name, found in zip(names, threads.map(spool.__getitem__, names), strict=True):
            assert found.dtype == weights[name].dtype
            assert torch.equal(found, weights[name])
    both = spool | more
    assert list(both) == list(weights)
    assert torch.equal(both["table"], torch.ones(2))
    assert torch.equal(both["half"], weights["half"])
    both.close()
    with pytest.raises(ValueError, match="closed file"):
        spool["half"]


def test_weights_are_spooled_one_at_a_time_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def gathered():
        for i in range(5):
            yield f"{i}", torch.full((1000,), float(i))
            assert not list(tmp_path.iterdir())

    spool = spool_weights(gathered())
    assert not list(tmp_path.iterdir())
    assert [float(spool[f"{i}"][999]) for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    spool.close()
