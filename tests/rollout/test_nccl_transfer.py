"""Weight transfer over NCCL, here gloo: exact weights, a fallback to HTTP, and no waiting for dead peers."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import transfer_double
from conftest import CountDigits
from pellucid.rollout import nccl_transfer, vllm, vllm_client
from pellucid.rollout.vllm import VLLMEngine, VLLMSampler, get_push_weights
from pellucid.rollout.vllm_client import SamplerClient, ServerLostError, ServerPool, serialize_model
from pellucid.serve import transfer_routes
from pellucid.serve.vllm_server import EngineHost, _WeightlessPolicy
from pellucid.types import Sampling
from sampler_process import Plain, Process, gap_of, served, tiny_policy
from transfer_double import Communicator, Receiving, StandIn

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")
PROCESS = str(Path(__file__).parents[1] / "transfer_process.py")
HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(nccl_transfer, "TRANSFER_DEVICE", "cpu")
    monkeypatch.setattr(vllm, "TRANSFER_DEVICE", "cpu")
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.1)


@pytest.fixture
def double(monkeypatch):
    transfer_double.install(monkeypatch)


@pytest.fixture
def policy():
    return tiny_policy()


@pytest.fixture
def host():
    return EngineHost(Receiving)


@pytest.fixture
def url(host):
    with served(host) as one:
        yield one


def step(policy, by):
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).sign(), alpha=by)


def synced(policy, *urls, timeout=10.0):
    sampler = VLLMSampler(engine=ServerPool(urls, timeout))
    sampler.sync(policy, 1)
    return sampler


def loaded(policy, url, timeout=10.0):
    client = SamplerClient(url, timeout)
    client.load_model(serialize_model(policy))
    return client


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_push_arrives_through_one_group(policy, dtype, host, url, capsys):
    policy = tiny_policy(dtype)
    sampler = synced(policy, url)
    for version, by in enumerate([1e-3, 1.0]):
        step(policy, by)
        sampler.sync(policy, version)
        served_weights = dict(host.engine.model.named_parameters())
        for name, weight in get_push_weights(policy).items():
            assert torch.equal(served_weights[name], weight), name
    assert host.engine.llm.calls == ["init", *["update"] * 3]
    assert capsys.readouterr().out == f"{url}: its weights go over NCCL\n"


@pytest.mark.usefixtures("double")
def test_two_trainers_take_turns_at_one_server(policy, host, url):
    """Each trainer finds the other's group on the server, and forms its own again."""
    clients = [loaded(policy, url), loaded(policy, url)]
    for client in (*clients, *clients):
        step(policy, 1e-2)
        client.push(get_push_weights(policy))
        assert host.version == client.version
        assert torch.equal(host.engine.model.lm_head.weight, policy.model.lm_head.weight)
    assert host.engine.llm.calls == ["init", "update"] * 4


@pytest.mark.usefixtures("double")
def test_policy_on_another_device_pushes_over_http_silently(policy, host, url, monkeypatch, capsys):
    monkeypatch.setattr(nccl_transfer, "TRANSFER_DEVICE", "cuda")
    synced(policy, url)
    assert (host.engine.llm.calls, host.engine.pushed) == ([], 1)
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_trainer_without_vllm_pushes_over_http(policy, host, url, capsys):
    synced(policy, url)
    assert (host.engine.llm.calls, host.engine.pushed) == ([], 1)
    assert capsys.readouterr().out == f"{url}: its weights go over HTTP (vLLM is not installed here)\n"


@pytest.mark.usefixtures("double")
def test_server_without_a_gpu_of_its_own_gets_weights_over_http(policy, url, monkeypatch, capsys):
    with served(EngineHost(Plain)) as other:
        synced(policy, other)
    monkeypatch.setattr(nccl_transfer, "get_gpu_name", lambda device: "GPU-1")
    monkeypatch.setattr(transfer_routes, "get_gpu_name", lambda device: "GPU-1")
    synced(policy, url)
    assert capsys.readouterr().out.splitlines() == [
        f"{other}: its weights go over HTTP (the server's engine is not on a GPU)",
        f"{url}: its weights go over HTTP (the server uses the same GPU, and NCCL needs two)",
    ]


def not_listening(address):
    return nullcontext(SimpleNamespace(getsockname=lambda: (address[0], 1)))


def unreachable(monkeypatch):
    """Give the trainer an address that the server cannot connect to. Return the reason in the message."""
    monkeypatch.setattr(nccl_transfer, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(socket, "create_server", not_listening)
    monkeypatch.setattr(nccl_transfer, "find_own_address", lambda url: "127.0.0.1")
    return "the server cannot reach the trainer at 127.0.0.1:1 (Connection refused)"


def unwilling(monkeypatch):
    def failing(self, request):
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(StandIn, "init_weight_transfer_engine", failing)
    return "HTTP 503, NCCL error: unhandled system error"


def without_library(monkeypatch):
    make = transfer_double.Trainer.trainer_init

    def disabled(*words, **names):
        engine = make(*words, **names)
        engine.model_update_group.disabled = True
        return engine

    monkeypatch.setattr(transfer_double.Trainer, "trainer_init", disabled)
    return "vLLM finds no NCCL library"


def never(monkeypatch):
    monkeypatch.setattr(StandIn, "init_weight_transfer_engine", lambda *_: time.sleep(3))
    return "HTTP 503, not done in 1 s"


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "spoil", [unreachable, unwilling, without_library, pytest.param(never, marks=pytest.mark.slow)]
)
def test_failed_group_falls_back_to_http_and_is_not_retried(spoil, policy, host, url, monkeypatch, capsys):
    reason = spoil(monkeypatch)
    tried, find = [], nccl_transfer.find_own_address
    monkeypatch.setattr(nccl_transfer, "find_own_address", lambda to: tried.append(to) or find(to))
    sampler = synced(policy, url, timeout=1.0)
    step(policy, 1e-2)
    sampler.sync(policy, 2)
    assert torch.equal(host.engine.model.lm_head.weight, policy.model.lm_head.weight)
    assert host.engine.pushed == 2
    notice = f"{url}: its weights go over HTTP (no NCCL group with the server: {reason})\n"
    assert capsys.readouterr().out == notice
    assert tried == [url]


# ---------------------------------------------------------------- peers that die or hang


class Slow(Receiving):
    """An engine whose transfers take seconds."""

    def __init__(self, model):
        super().__init__(model, pause=0.5)


@pytest.fixture
def slow_host():
    return EngineHost(Slow)


@pytest.fixture
def slow_url(slow_host):
    with served(slow_host) as one:
        yield one


def in_transfer(host):
    while not (host.engine and host.engine.llm.is_updating):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_server_that_dies_or_hangs_in_a_transfer_comes_back(policy, blow, url, monkeypatch, capsys):
    monkeypatch.setattr(nccl_transfer, "_ABORT_SECONDS", 1.0)
    process = Process(PROCESS, "PORT", "0.1")
    process.wait()
    try:
        sampler = synced(policy, process.url, url, timeout=5.0)
        stop = process.kill if blow == signal.SIGKILL else lambda: process.process.send_signal(blow)
        struck = threading.Timer(1.0, stop)
        struck.start()
        start = time.monotonic()
        step(policy, 1e-2)
        sampler.sync(policy, 2)
        assert time.monotonic() - start < 60
        struck.join()
        first, second = sampler.engine.servers
        assert (first.is_up, second.is_up) == (False, True)
        assert "a transfer over NCCL failed: " in first.reason
        groups = sampler.generate(CountDigits().sample(0, 4), SAMPLING)
        assert gap_of(policy, groups) < 1e-4
        if blow == signal.SIGKILL:
            process.words[-1] = "0"  # otherwise each short rollout below would end before the transfer
            process.start()
        else:
            process.process.send_signal(signal.SIGCONT)
        for _ in range(100):
            groups = sampler.generate(CountDigits().sample(0, 4), SAMPLING)
            assert gap_of(policy, groups) < 1e-4
            if first.is_up:
                break
        assert first.is_up
        said = capsys.readouterr().out
        # A new process gets its weights over NCCL again; a process whose transfer failed gets them over HTTP.
        ways = [line for line in said.splitlines() if line.startswith(f"{process.url}: its weights go over")]
        assert [("NCCL" in way, "HTTP" in way) for way in ways] == (
            [(True, False)] if blow == signal.SIGKILL else [(True, False), (True, True)]
        )
    finally:
        process.kill()


def until_the_engine_has_failed(host):
    deadline = time.monotonic() + 20
    while host.model_digest and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not host.model_digest  # the server will make a new engine


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_server_serves_others_after_a_trainer_dies_in_a_transfer(policy, slow_host, slow_url):
    """The trainer's connection ends, and the server aborts the broadcast that waits for it."""
    client = loaded(policy, slow_url, timeout=100.0)

    def push():
        with suppress(ServerLostError):
            client.push(get_push_weights(policy))

    thread = threading.Thread(target=push)
    thread.start()
    in_transfer(slow_host)
    group = client._sender._engine.model_update_group
    group.broadcast = lambda *_, **__: time.sleep(3600)
    client._sender._engine.shutdown = lambda: None  # a dead trainer destroys no group
    client.stop()
    until_the_engine_has_failed(slow_host)
    other = loaded(policy, slow_url)
    slow_host.engine.llm.pause = 0.0
    other.push(get_push_weights(policy))
    assert slow_host.version == other.version
    assert torch.equal(slow_host.engine.model.lm_head.weight, policy.model.lm_head.weight)
    thread.join(30)
    assert not thread.is_alive()
    # A transfer that was stopped on purpose does not count as a failure of NCCL.
    client.start()
    client.load_model(serialize_model(policy))
    client.push(get_push_weights(policy))
    assert (slow_host.version, slow_host.engine.llm.calls) == (client.version, ["init", "update"] * 2)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_a_transfer_that_takes_too_long_is_aborted_on_both_sides(policy, slow_host, slow_url, monkeypatch):
    monkeypatch.setattr(nccl_transfer, "_ABORT_SECONDS", 3.0)
    client = loaded(policy, slow_url, timeout=1.0)
    start = time.monotonic()
    with pytest.raises(ServerLostError, match="a transfer over NCCL failed: "):
        client.push(get_push_weights(policy))
    assert time.monotonic() - start < 60
    assert slow_host.version == ""
    until_the_engine_has_failed(slow_host)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_server_does_not_wait_for_a_frozen_trainer(policy, host, url):
    """The connection stays open, but no data arrives."""
    client, weights = loaded(policy, url), get_push_weights(policy)
    client._sender._form_group(weights, torch.device("cpu"))
    told = {
        "names": list(weights),
        "dtype_names": ["float32"] * len(weights),
        "shapes": [list(weight.shape) for weight in weights.values()],
    }
    body = {"group": client._sender._group, "seconds": 1.0, "update_info": told}
    with pytest.raises(ServerLostError, match="HTTP 500"):
        client._request("PUT", "/transfer/v1", json.dumps(body).encode(), timeout=60)
    assert host.version == ""
    until_the_engine_has_failed(host)


# ---------------------------------------------------------------- vLLM's own classes


class _Stream:
    def synchronize(self):
        pass


@pytest.fixture
def vllm_on_the_cpu(monkeypatch):
    """Run vLLM's weight transfer over gloo: only NCCL, streams and the query for the current GPU are replaced."""
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor  # noqa: PLC0415

    def join(host, port, rank, size, device):
        return Communicator(host, port, rank, size)

    monkeypatch.setattr(nccl_common, "stateless_init_process_group", join)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (_Stream(),) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_on_the_cpu")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("buffer", [2**28, 2**12])
def test_vllms_transfer_engines_deliver_the_weights(tied, buffer, monkeypatch, capsys):
    """The weights travel in one part, or in parts as large as the largest weight."""
    monkeypatch.setattr(nccl_transfer, "BUFFER_BYTES", buffer)

    def make_engine(model):
        own = _WeightlessPolicy(model.config, torch.device("cpu"), model.ends)
        return VLLMEngine(own, getattr(torch, model.dtype), 16, 0.1, receives=True)

    policy, prompts, host = tiny_policy(tied=tied), CountDigits().sample(0, 4), EngineHost(make_engine)
    with served(host) as url:
        sampler = synced(policy, url, timeout=120.0)
        for version, by in enumerate([1e-7, 0.05]):
            step(policy, by)
            sampler.sync(policy, version)  # compares columns of each weight bit for bit
            assert gap_of(policy, sampler.generate(prompts, SAMPLING)) < 1e-4
        assert host.engine.receiver.group
    assert f"{url}: its weights go over NCCL\n" in capsys.readouterr().out
