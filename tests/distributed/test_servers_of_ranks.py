"""Test that several processes with shared sampler servers train what one process with one server trains."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from engines import policy_of
from safetensors.torch import load_file
from served_engines import CASES, SGLANG, trained

import sglang_process
from pellucid.distributed.settings import RuntimeConfig
from pellucid.rollout.vllm_client import serialize_model
from pellucid.serve.vllm_server import EngineHost
from runs import in_processes, same_weights
from sampler_process import Beside, served

SCRIPT = Path(__file__).with_name("served_engines.py")


class Counted(Beside):
    """Record the seeds of the requested rows, which differ from row to row."""

    seeds = ()

    def add_request(self, key, ids, most, temperature, seed):
        self.seeds = (*self.seeds, seed)
        super().add_request(key, ids, most, temperature, seed)


@contextmanager
def servers(count):
    """Yield `count` hosts and their addresses."""
    if count == 0:
        yield [], []
        return
    host = EngineHost(Counted)
    with served(host) as url, servers(count - 1) as (hosts, urls):
        yield [host, *hosts], [url, *urls]


@cache
def alone(case):
    """Return the result of one process with one server, and the seeds of its rows."""
    with servers(1) as ([host], urls):
        found = trained(RuntimeConfig(), urls, **CASES[case])
        return found, sorted(host.engine.seeds)


def same_as_alone(found, case, where):
    expected, _ = alone(case)
    assert found["tokens"].tolist() == expected["tokens"].tolist(), where
    assert expected["grad_norm"].min() > 1e-3
    same_weights(found, expected, 1e-6)


def compared(processes, engines, cases, folder, servers_count=2):
    """Train each case on each engine, and compare the result with that of one process."""
    for engine, named in engines.items():
        for case in cases:
            with servers(servers_count) as (hosts, urls):
                in_processes(processes, SCRIPT, folder, ",".join(urls), case, f"{engine}={named}")
                same_as_alone(load_file(folder / f"{engine}-{case}.safetensors"), case, (processes, engine, case))
                drawn = [seed for host in hosts for seed in host.engine.seeds]
                assert sorted(drawn) == alone(case)[1], "each completion is drawn once"
                assert all(host.engine.seeds for host in hosts), "both servers sample"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "engines", "cases"),
    [
        (1, {"sharded": "fsdp2"}, ["llama", "adapter, merged"]),
        (2, {"replicated": "ddp", "sharded": "fsdp2"}, list(CASES)),
        (4, {"replicated": "ddp", "sharded": "fsdp2", "hybrid": "fsdp2/2"}, ["llama", "adapter, alone", "ahead"]),
    ],
    ids=["1", "2", "4"],
)
def test_three_steps_equal_those_of_one_process_with_one_server(processes, engines, cases, tmp_path):
    compared(processes, engines, cases, tmp_path)


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
@pytest.mark.parametrize(
    ("processes", "cases"),
    [(1, ["llama"]), (2, list(CASES)), (4, ["llama", "adapter, alone", "ahead"])],
    ids=["1", "2", "4"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_three_steps_with_zero_equal_those_of_one_process(stage, processes, cases, tmp_path):
    compared(processes, {f"zero{stage}": f"deepspeed/{stage}"}, cases, tmp_path)


class CountedSGLang(sglang_process.Server):
    seeds = ()

    def generate(self, request):
        if request.sampling_params.sampling_seed is not None:
            self.seeds = (*self.seeds, request.sampling_params.sampling_seed)
        return super().generate(request)


@contextmanager
def sglang_servers(count):
    config = json.loads(serialize_model(policy_of()))["config"]
    hosts = [CountedSGLang(config) for _ in range(count)]
    with ExitStack() as stack:
        yield hosts, [stack.enter_context(sglang_process.served(host)) for host in hosts]


@pytest.mark.slow
def test_two_processes_share_sglang_servers(tmp_path):
    for case, facts in SGLANG.items():
        with sglang_servers(1) as ([host], urls):
            expected, seeds = trained(RuntimeConfig(), urls, **facts), sorted(host.seeds)
        for engine in ("ddp", "fsdp2"):
            with sglang_servers(2) as (hosts, urls):
                in_processes(2, SCRIPT, tmp_path, ",".join(urls), case, f"{engine}={engine}")
            found = load_file(tmp_path / f"{engine}-{case}.safetensors")
            assert found["tokens"].tolist() == expected["tokens"].tolist()
            same_weights(found, expected, 1e-6)
            assert sorted(seed for host in hosts for seed in host.seeds) == seeds, "each completion is drawn once"
            assert all(host.seeds for host in hosts), "both servers sample"
