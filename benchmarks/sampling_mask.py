"""What sampling by top-p in training costs: time of sampling and of scoring with gradients, and bytes of the masks.

    python benchmarks/sampling_mask.py [--top-p 0.9] [--tokens 48] [--repeats 5]

The same prompts, eight completions each, none of which may end early; from the whole and truncated turn by turn. Scored
are the same rollouts without their masks and with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import tyro

from pellucid.algorithm.batch import Batch, collate
from pellucid.policy import policy
from pellucid.policy.policy import Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling
from pellucid.utils import hardware

CPU = torch.device("cpu")
QUESTIONS = (
    "What is 7 + 8?",
    "用三句话介绍北京。",
    "Say something about rain.",
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell?",
)


@dataclass
class Options:
    model: str = "smollm2-135m"
    top_p: float = 0.9
    tokens: int = 48
    repeats: int = 5


def main(options: Options) -> None:
    hardware.keep_freed_memory()
    learner = policy.load_policy(options.model, CPU, hardware.pick_dtype("auto", CPU), temperature=1.0)
    learner.eos_ids = ()
    prompts = [Prompt(str(i), ({"role": "user", "content": text},)) for i, text in enumerate(QUESTIONS)]
    sampler = NativeSampler(policy=learner)
    ways = [Sampling(8, max_tokens=options.tokens, top_p=top_p, seed="mask") for top_p in (1.0, options.top_p)]
    batch = collate(sampler.generate(prompts, ways[1]))
    plain = replace(batch, sampling_mask_words=None, sampling_mask_spans=None)
    sampling, scoring = (
        turns(options.repeats, *works)
        for works in (
            [lambda way=way: sampler.generate(prompts, way) for way in ways],
            [lambda b=b: score(learner, b) for b in (plain, batch)],
        )
    )
    mask = batch.get_sampling_mask(CPU)
    assert mask is not None
    lengths = (mask.spans[:, 1] - mask.spans[:, 0]).double()
    kept = mask.unpack_ids(learner.model.config.get_text_config().vocab_size)[1].sum(-1).double()
    print(f"{len(kept)} tokens, top_p = {options.top_p:g}; ratios of neighbouring turns, median of {options.repeats}")
    print(f"tokens in the running: mean {kept.mean():.0f}, median {kept.median():.0f}, most {kept.max():.0f}")
    print(f"bytes of a token's mask: mean {4 * lengths.mean():.0f}, median {4 * lengths.median():.0f}")
    print(f"sampling: {sampling:.2f} of the time from the whole; scoring with gradients: {scoring:.2f}")


def score(learner: Policy, batch: Batch) -> None:
    scores = learner.score(batch)
    scores.logprobs[batch.response_mask].sum().backward()


def turns(repeats: int, one: Callable[[], object], other: Callable[[], object]) -> float:
    """The median of the ratios; one turn of each to warm up."""
    pairs = [(seconds(one), seconds(other)) for _ in range(repeats + 1)]
    return median(b / a for a, b in pairs[1:])


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(tyro.cli(Options))
