"""Measures the sampling speed of conversations against single turns of as many tokens.

    python benchmarks/conversations.py --turns 4 --tokens 64 --repeats 5

The single turn samples turns * tokens tokens. The conversation samples as many in `turns` turns, with a short reply of
an environment between them. Completions never end early, so all rows have the same length. Single turns and
conversations alternate, and the median ratio is over these pairs.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from pellucid.environments.pool import EnvironmentPool
from pellucid.environments.spec import EnvironmentSpec
from pellucid.policy import policy
from pellucid.rewards.settings import RewardConfig
from pellucid.rollout.native import NativeSampler
from pellucid.types import Group, Prompt, Sampling
from pellucid.utils import hardware


def reply(messages: list[dict[str, str]]) -> str:  # noqa: ARG001
    """Return a short reply that does not depend on the messages."""
    return "Higher."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="sampled in each turn")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    hardware.keep_freed_memory()
    device = hardware.pick_device("auto")
    model = policy.load_frozen_policy(options.model, device, hardware.pick_dtype("auto", device), 1.0)
    model.eos_ids = (model.tokenizer.vocab_size - 1,)
    prompts = [Prompt(f"p{i}", ({"role": "user", "content": f"Guess {i}."},)) for i in range(options.prompts)]
    environments = EnvironmentPool(EnvironmentSpec(f"{__file__}:reply"), RewardConfig())
    tokens = options.turns * options.tokens
    single = Sampling(options.group, max_tokens=tokens)
    several = Sampling(options.group, max_tokens=2 * tokens, turns=options.turns, turn_tokens=options.tokens)
    rates: list[tuple[float, float]] = []
    for repeat in range(options.repeats + 1):
        baseline = measure_rate(NativeSampler(policy=model), prompts, single)
        rate = measure_rate(NativeSampler(policy=model, environments=environments), prompts, several)
        if repeat:  # the first is a warm-up
            rates.append((baseline, rate))
            print(f"single turn {baseline:.0f}, conversations {rate:.0f} tokens/s, ratio {rate / baseline:.2f}")
    environments.close()
    print(f"median ratio {median(b / a for a, b in rates):.2f} ({options.turns} turns of {options.tokens} tokens)")


@torch.no_grad()
def measure_rate(sampler: NativeSampler, prompts: list[Prompt], sampling: Sampling) -> float:
    """Return the sampled tokens per second."""
    sampler.sync(sampler.policy)
    start = time.perf_counter()
    groups: list[Group] = sampler.generate(prompts, sampling)
    tokens = sum(completion.length for group in groups for completion in group.completions)
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
