"""The cost of pushing weights to sampler servers: `python benchmarks/pushing.py [MODEL]`, with vLLM or without.

Two processes under FSDP2 train in fp32 and sample from servers. The first table has the peak memory of each process in
two steps, with a push in each step, and in the same steps without one, as if the servers had the weights already. The
second has the tokens per second that both processes sample together, from one server and from two. Without vLLM, the
servers of the tests take its place.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.distributed.settings import RuntimeConfig
from pellucid.policy.policy import Policy, load_policy
from pellucid.rollout.vllm import VLLMSampler
from pellucid.rollout.vllm_client import SamplerClient, ServerLostError, ServerPool
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.types import Sampling

HAS_VLLM = importlib.util.find_spec("vllm") is not None
TEST_SERVER = Path(__file__).parents[1] / "tests" / "sampler_process.py"
RANKS, STEPS, PROMPTS, GROUP, TOKENS = 2, 2, 8, 4, 32 if HAS_VLLM else 8


class Still(VLLMSampler):
    """Pushes once, and then leaves the servers as they are."""

    def sync(self, policy: Policy, version: int = 0) -> None:
        if self.policy is None:
            super().sync(policy, version)
        self.policy, self.version = policy, version


def read_status(name: str) -> float:
    """Return a number of /proc/self/status in MB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def measure_rank(model: str, way: str, urls: Sequence[str]) -> dict[str, float]:
    """Return the peak memory in MB of this process in training steps, and the tokens per second of all processes."""
    policy = load_policy(model, torch.device("cpu"), torch.float32, 1.0)
    sampler = (VLLMSampler if way == "push" else Still)(engine=ServerPool(urls, 600.0))
    runtime = Runtime(policy, AdamWConfig(lr=1e-6), STEPS, RuntimeConfig("fsdp2"))
    assert isinstance(sampler.engine, ServerPool)
    sampler.ranks = sampler.engine.ranks = runtime
    cfg = GRPOConfig(steps=STEPS, prompts_per_step=PROMPTS, group_size=GROUP, micro_batch=1, correction="token")
    task, sampling = Arithmetic(), Sampling(GROUP, max_tokens=TOKENS, seed="0")
    list(grpo.train(task, sampler, policy, runtime, cfg, sampling=sampling))  # optimizer state, buffers and engines
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is a new peak
    list(grpo.train(task, sampler, policy, runtime, cfg, sampling=sampling))
    peak, rates = read_status("VmHWM"), []
    for _ in range(3):
        runtime.any_rank(False)
        start = time.perf_counter()
        groups = sampler.generate(runtime.shard(task.sample(0, PROMPTS)), sampling)
        tokens = sum(runtime.gather([sum(c.length for group in groups for c in group.completions)]))
        rates.append(tokens / (time.perf_counter() - start))
    sampler.close()
    return {"before": before, "peak": peak, "rate": max(rates)}


@contextmanager
def start_server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [str(TEST_SERVER), port, "1"]
    if HAS_VLLM:
        words = ["-m", "pellucid", "sampler", "--port", port, "--rows", "32", "--cache-gb", "0.5"]
    paths = os.pathsep.join([str(TEST_SERVER.parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": paths}
    process = subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                SamplerClient(url, 5.0).get_state()
                break
            except ServerLostError:
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def measure(model: str, way: str, server_count: int) -> list[dict[str, Any]]:
    """Return what each process measures."""
    with ExitStack() as servers:
        urls = [servers.enter_context(start_server()) for _ in range(server_count)]
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = {"WORLD_SIZE": f"{RANKS}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}"}
        where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, model, way, *urls],
                env={**os.environ, **where, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        answers = [rank.communicate()[0] for rank in ranks]
        return [json.loads(answer.splitlines()[-1]) for answer in answers]


def main(model: str = "smollm2-135m", *rank: str) -> None:
    if rank:
        way, *urls = rank
        print(json.dumps(measure_rank(model, way, urls)), flush=True)
        return
    engine = "vLLM" if HAS_VLLM else "transformers, as in the tests"
    print(f"{model} in fp32, {RANKS} processes under FSDP2; servers by {engine}\n")
    print("| rank | steps | MB before | MB at the peak |\n| --- | --- | --- | --- |")
    found = {(way, 1): measure(model, way, 1) for way in ("push", "no push")} | {("push", 2): measure(model, "push", 2)}
    for rank_index in range(RANKS):
        for way in ("no push", "push"):
            of_rank = found[way, 1][rank_index]
            print(f"| {rank_index} | with {way} | {of_rank['before']:.0f} | {of_rank['peak']:.0f} |")
    rates = {count: found["push", count][0]["rate"] for count in (1, 2)}
    print("\n| servers | tokens/s | ratio |\n| --- | --- | --- |")
    for count, rate in rates.items():
        print(f"| {count} | {rate:.0f} | {rate / rates[1]:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
