"""A LoRA adapter pushed to vLLM merged into its base, beside one pushed by itself: megabytes, seconds, tokens a second.

    .venv-vllm/bin/python benchmarks/adapters.py --repeats 3

Each repeat makes the engines anew, one after the other, as a process has room for one. A push is what a step after the
first costs: the weights made ready, taken by the engine, and proved. Medians.
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

Way = Literal["merged", "request"]


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
    found = defaultdict[Way, list[tuple[float, float]]](list)
    for _ in range(options.repeats):
        for way in get_args(Way):
            found[way].append(measured(way, learner, prompts, sampling))
    for way, pairs in found.items():
        pushed = get_push_weights(learner) if way == "merged" else copy_adapter_weights(learner)
        megabytes = sum(x.nbytes for x in pushed.values()) / 1e6
        seconds, rate = (median(column) for column in zip(*pairs, strict=True))
        print(f"{way:8} {megabytes:7.1f} MB a push, {seconds:.2f} s with its proof, {rate:.0f} tokens a second")


def measured(way: Way, learner: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[float, float]:
    """Seconds of the second push, and tokens a second of sampling after it."""
    sampler = VLLMSampler(len(prompts) * sampling.n, 1.0, adapter=way)
    sampler.sync(learner, 0)
    sampler.generate(prompts, sampling)
    moved(learner)
    start = time.perf_counter()
    sampler.sync(learner, 1)
    synced = time.perf_counter()
    groups = sampler.generate(prompts, sampling)
    sampled = sum(completion.length for group in groups for completion in group.completions)
    return synced - start, sampled / (time.perf_counter() - synced)


@torch.no_grad()
def moved(learner: Policy) -> None:
    """Change the adapter a little, as a step does."""
    for p in learner.trainable().values():
        p.add_(1e-3 * torch.randn_like(p))


if __name__ == "__main__":
    main()
