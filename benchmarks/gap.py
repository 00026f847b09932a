"""Measures how far the log-probs of the sampler, the scorer, and the same model in fp32 are apart.

    python benchmarks/gap.py [--model smollm2-135m] [--tokens 64]

Prints the mean and maximum differences in nats per token, over 4 prompts x 8 completions of two-digit sums. The last
line applies an fp32 head to the scorer's hidden states, which shows how much of its error is the rounding of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

from pellucid.algorithm.batch import collate
from pellucid.policy import policy
from pellucid.policy.logprobs import LMHead, compute_token_logprobs
from pellucid.rollout.native import NativeSampler
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.types import Sampling

CPU = torch.device("cpu")


@dataclass
class Options:
    model: str = "smollm2-135m"
    tokens: int = 64


@torch.no_grad()
def main(options: Options) -> None:
    rounded, exact = (
        policy.load_frozen_policy(options.model, CPU, dtype, temperature=1.0)
        for dtype in (torch.bfloat16, torch.float32)
    )
    sampling = Sampling(8, max_tokens=options.tokens, seed="gap")
    groups = NativeSampler(policy=rounded).generate(Arithmetic(digits=2).sample(0, 4), sampling)
    batch = collate(groups)
    sampled = batch.sampler_logprobs[batch.response_mask]
    scored, reference = (p.score(batch).logprobs[batch.response_mask] for p in (rounded, exact))
    hidden, head = rounded.compute_hidden_states(batch)
    fp32_head = LMHead(head.weight.float(), head.weight.float())
    rescored, _ = compute_token_logprobs(hidden.float(), fp32_head, batch.response_ids[batch.response_mask])
    for name, difference in {
        "sampler - scorer": sampled - scored,
        "sampler - fp32": sampled - reference,
        "scorer - fp32": scored - reference,
        "scorer, head in fp32 - fp32": rescored - reference,
    }.items():
        print(f"{name:28} {format_difference(difference)}")


def format_difference(difference: Tensor) -> str:
    return f"mean {difference.abs().mean():.1e}, max {difference.abs().max():.1e}"


if __name__ == "__main__":
    main(tyro.cli(Options))
