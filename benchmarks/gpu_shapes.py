"""Sampling, and steps by micro-batch, on one GPU: random weights of Qwen2.5's shapes, 8 prompts x 8 completions x 512.

    PYTHONPATH=src python benchmarks/gpu_shapes.py 0.5B 1.5B > shapes.jsonl
    PYTHONPATH=src python benchmarks/gpu_shapes.py --simulated 0.5B        # tiny, on the CPU: shows that it runs

Prints one line of JSON for each finding as soon as it is known. No completion ends before its last token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_place import Place
from torch.profiler import ProfilerActivity, profile

from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import Policy, load_policy
from pellucid.rollout.native import NativeSampler
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.types import Reward, Sampling

PROMPTS, GROUP_SIZE = 8, 8
TURNS = 3
MICRO_BATCHES = {"0.5B": (0, 16, 5), "1.5B": (0, 5)}
"""Rows of a forward pass; 0 takes all 64."""
PROFILED_TOKENS = 64


class GradedArithmetic:
    """Arithmetic whose rewards differ in nearly every group, so that every row has a gradient."""

    seed, split = 0, "train"
    sample = staticmethod(Arithmetic(digits=2, operators=("+", "-")).sample)

    def reward(self, _prompt: Any, completion: Any) -> Reward:
        return Reward(sum(completion.text.encode()) % 97 / 97)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", choices=list(MICRO_BATCHES))
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            measure(size, Place(Path(folder), options.simulated, repeats=1))


def measure(size: str, place: Place) -> None:
    device = torch.device(place.contenders_device)
    path, tokens = place.model(size), 8 if place.simulated else 512
    policy = load(path, device)
    measure_sampling(size, policy, tokens)
    del policy
    for micro_batch in MICRO_BATCHES[size]:
        policy = load(path, device)
        runtime = Runtime(policy, AdamWConfig(lr=1e-6), TURNS)
        cfg = GRPOConfig(
            steps=TURNS,
            prompts_per_step=PROMPTS,
            group_size=GROUP_SIZE,
            max_length=tokens,
            micro_batch=micro_batch,
        )
        sampling = Sampling(max_tokens=tokens)
        for result in grpo.train(GradedArithmetic(), NativeSampler(), policy, runtime, cfg, sampling=sampling):
            times = {k: round(x, 3) for k, x in result.metrics.items() if k.startswith("time/") and x is not None}
            report(what="step", size=size, micro_batch=micro_batch, **times, peak_gb=peak_gb(device))
        del policy, runtime
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def load(path: Path, device: torch.device) -> Policy:
    policy = load_policy(str(path), device, torch.bfloat16, temperature=1.0)
    policy.eos_ids = (-1,)  # no token ends a completion
    return policy


def measure_sampling(size: str, policy: Policy, tokens: int) -> None:
    sampler, task, device = NativeSampler(policy=policy), GradedArithmetic(), policy.device
    for turn in range(TURNS + 1):
        start = clock(device)
        sampler.generate(task.sample(turn, PROMPTS), Sampling(GROUP_SIZE, max_tokens=tokens, seed=str(turn)))
        seconds = clock(device) - start
        rate = PROMPTS * GROUP_SIZE * tokens / seconds
        report(what="sampling", size=size, seconds=round(seconds, 3), tokens_per_s=round(rate), peak_gb=peak_gb(device))
    if device.type != "cuda":
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        sampler.generate(task.sample(0, PROMPTS), Sampling(GROUP_SIZE, max_tokens=PROFILED_TOKENS, seed="profile"))
        torch.cuda.synchronize()
    kernels = [e for e in profiled.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    report(
        what="decode step",
        size=size,
        kernels=round(sum(e.count for e in kernels) / PROFILED_TOKENS),
        gpu_ms=round(sum(e.self_device_time_total for e in kernels) / PROFILED_TOKENS / 1e3, 3),
    )


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gb(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None


def report(**finding: Any) -> None:
    print(json.dumps(finding), flush=True)


if __name__ == "__main__":
    main()
