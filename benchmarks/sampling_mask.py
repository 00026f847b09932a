"""Measures what top-p in training costs: time of sampling and of scoring with gradients, and bytes of the masks.

    python benchmarks/sampling_mask.py [--top-p 0.9] [--tokens 48] [--repeats 5]

The same prompts are sampled without and with top-p in alternation, with eight completions each that never end early.
The same rollouts are scored without and with their masks.
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
    settings = [Sampling(8, max_tokens=options.tokens, top_p=top_p, seed="mask") for top_p in (1.0, options.top_p)]
    batch = collate(sampler.generate(prompts, settings[1]))
    unmasked = replace(batch, sampling_mask_words=None, sampling_mask_spans=None)
    sampling, scoring = (
        measure_ratio(options.repeats, *functions)
        for functions in (
            [lambda s=s: sampler.generate(prompts, s) for s in settings],
            [lambda b=b: score_with_gradients(learner, b) for b in (unmasked, batch)],
        )
    )
    mask = batch.get_sampling_mask(CPU)
    assert mask is not None
    lengths = (mask.spans[:, 1] - mask.spans[:, 0]).double()
    kept = mask.unpack_ids(learner.model.config.get_text_config().vocab_size)[1].sum(-1).double()
    print(f"{len(kept)} tokens, top_p = {options.top_p:g}, median ratios of {options.repeats} repeats")
    print(f"candidates per token: mean {kept.mean():.0f}, median {kept.median():.0f}, max {kept.max():.0f}")
    print(f"bytes per mask: mean {4 * lengths.mean():.0f}, median {4 * lengths.median():.0f}")
    print(f"time with top-p / without: sampling {sampling:.2f}, scoring with gradients {scoring:.2f}")


def score_with_gradients(learner: Policy, batch: Batch) -> None:
    scores = learner.score(batch)
    scores.logprobs[batch.response_mask].sum().backward()


def measure_ratio(repeats: int, baseline: Callable[[], object], function: Callable[[], object]) -> float:
    """Return the median ratio of the times of a function and of a baseline. The first pair is a warm-up."""
    pairs = [(time_call(baseline), time_call(function)) for _ in range(repeats + 1)]
    return median(b / a for a, b in pairs[1:])


def time_call(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(tyro.cli(Options))
