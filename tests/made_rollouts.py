"""Random numbers and batches of given lengths, for what an update computes of rollouts."""

from __future__ import annotations

import torch

from pellucid.algorithm.batch import Batch, mask_of, padded


def noise(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch_of(prompts, responses, prompt_of):
    """Responses of these lengths to prompts of these."""
    mask = mask_of(responses)
    ids = [[i % 90 for i in range(7 * n, 7 * n + length)] for n, length in enumerate([*prompts, *responses])]
    return Batch(
        prompt_ids=tuple(map(tuple, ids[: len(prompts)])),
        demonstrations=((),) * len(prompts),
        prompt_of=torch.tensor(prompt_of),
        response_ids=padded(ids[len(prompts) :], torch.long),
        mask=mask,
        sampled=mask,
        finished=torch.zeros(len(responses), dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape),
    )


def off(ours, exact):
    return (ours.double() - exact).square().mean().sqrt().item()
