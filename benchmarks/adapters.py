"""Measures pushing a LoRA adapter to vLLM, merged into its base and by itself: megabytes, seconds, tokens per second.

    .venv-vllm/bin/python benchmarks/adapters.py --repeats 3

Each repeat creates two engines, one after the other, since a process has room for one. The second push of an engine is
measured, as in all steps after the first: preparing, loading, and checking the weights. Figures are medians.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Literal, get_args

import torch

from pellucid.policy import policy
from pellucid.policy.policy import Policy
from pellucid.rollout.vllm import VLLMSampler, copy_adapter_weights, get_push_weights
from pellucid.types import Prompt, Sampling
from pellucid.utils import hardware

Mode = Literal["merged", "request"]
"""How an adapter is pushed: the values of `sampler.adapter`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = hardware.pick_device("auto")
    learner = policy.load_policy(options.model, device, torch.bfloat16, 1.0, lora_rank=options.rank)
    prompts = [Prompt(f"{i}", f"Count from {i} to a hundred:") for i in range(options.prompts)]
    sampling = Sampling(options.group, max_tokens=options.tokens, seed="0")
    results = defaultdict[Mode, list[tuple[float, float]]](list)
    for _ in range(options.repeats):
        for mode in get_args(Mode):
            results[mode].append(measure_push(mode, learner, prompts, sampling))
    for mode, pairs in results.items():
        weights = get_push_weights(learner) if mode == "merged" else copy_adapter_weights(learner)
        megabytes = sum(x.nbytes for x in weights.values()) / 1e6
        seconds, rate = (median(column) for column in zip(*pairs, strict=True))
        print(f"{mode:8} {megabytes:7.1f} MB per push, {seconds:.2f} s with the check, {rate:.0f} tokens per second")


def measure_push(mode: Mode, learner: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[float, float]:
    """Return the seconds of the second push, and the tokens per second of sampling after it."""
    sampler = VLLMSampler(len(prompts) * sampling.n, 1.0, adapter=mode)
    sampler.sync(learner, 0)
    sampler.generate(prompts, sampling)
    change_adapter(learner)
    start = time.perf_counter()
    sampler.sync(learner, 1)
    synced = time.perf_counter()
    groups = sampler.generate(prompts, sampling)
    sampled = sum(completion.length for group in groups for completion in group.completions)
    return synced - start, sampled / (time.perf_counter() - synced)


@torch.no_grad()
def change_adapter(learner: Policy) -> None:
    """Change the adapter a little, like a training step."""
    for p in learner.trainable().values():
        p.add_(1e-3 * torch.randn_like(p))


if __name__ == "__main__":
    main()
