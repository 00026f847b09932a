"""Group decoding: each prompt is read once for its G rows; finished rows make room for the next prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.samplers.rollout import check_lengths, completed_groups, row_seed
from pellucid.types import Group, Prompt

BLOCK = 256


@dataclass
class Native:
    """Samples from softmax(logits / temperature), the whole of it; temperature 0 is greedy."""

    temperature: float = 1.0
    max_tokens: int = 64
    rows: int = 256
    """Completions in flight at once."""
    policy: Any = None

    def sync(self, policy: Any) -> None:
        self.policy = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], group_size: int, seed: str) -> list[Group]:
        """Each row draws with its own random numbers, so its completion does not depend on its neighbours."""
        prompt_ids = [self.policy.encode(prompt) for prompt in prompts]
        check_lengths(prompt_ids, self.policy.context_length - self.max_tokens)
        seeds = [row_seed(seed, prompt, g) for prompt in prompts for g in range(group_size)]
        uniforms = torch.stack([_uniforms(s, self.max_tokens) for s in seeds]).to(self.policy.device)
        tokens, logprobs = self._decode(prompt_ids, group_size, uniforms)
        return completed_groups(self.policy, prompts, prompt_ids, tokens, logprobs)

    def _decode(
        self, prompt_ids: Sequence[Sequence[int]], group_size: int, uniforms: Tensor
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and their log-probs for each of the len(prompt_ids) * group_size rows."""
        flight = self.policy.flight(max(self.rows, group_size))
        ends = torch.tensor(self.policy.eos_ids, device=uniforms.device)
        tokens: list[list[int]] = [[] for _ in uniforms]
        logprobs: list[list[float]] = [[] for _ in uniforms]
        waiting, flying = list(range(len(prompt_ids))), []  # prompts; the row that each line of a step belongs to
        logits = uniforms.new_zeros(0)
        while waiting or flying:
            if boarding := waiting[: flight.room() // group_size]:
                waiting = waiting[len(boarding) :]
                flying += [p * group_size + g for p in boarding for g in range(group_size)]
                newcomers = flight.admit([prompt_ids[p] for p in boarding], group_size)
                logits = torch.cat([logits, newcomers]) if len(logits) else newcomers
            said = [len(tokens[row]) for row in flying]
            token, logprob = draw(logits, uniforms[flying, said], self.temperature)
            for row, x, y in zip(flying, token.tolist(), logprob.tolist(), strict=True):
                tokens[row].append(x)
                logprobs[row].append(y)
            full = torch.tensor(said, device=token.device) == self.max_tokens - 1
            stays = (~torch.isin(token, ends) & ~full).nonzero()[:, 0]
            if len(stays) < len(flying):
                flight.keep(stays)
                flying = [flying[i] for i in stays.tolist()]
            logits = flight.step(token[stays]) if flying else logits[:0]
        return tokens, logprobs


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token for each row of `logits` [B, V] and its log-prob, by inverting the CDF at `uniforms` [B] in [0, 1).

    Sums are float64 and in two levels, blocks of tokens and tokens of one block: forty times faster than
    torch.multinomial for a vocabulary of 49152 on a CPU, and a token without probability is never drawn.
    Greedy tokens (temperature 0) carry their log-prob at temperature 1.
    """
    below = logits - logits.amax(-1, keepdim=True).float()  # fp32, and never above 0
    masses = below.mul_(1 / (math.log(2) * (temperature or 1.0))).exp2_()  # a quarter of the time of exp
    blocks = F.pad(masses, (0, -masses.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))  # [B, V / BLOCK, BLOCK]
    block_ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    token = logits.argmax(-1) if temperature == 0.0 else _invert_cdf(blocks, block_ends, uniforms[:, None])
    mass = masses.gather(-1, token[:, None])[:, 0]
    return token, (mass.log() - block_ends[:, -1].log()).float()


def _invert_cdf(blocks: Tensor, block_ends: Tensor, uniforms: Tensor) -> Tensor:
    target = uniforms * block_ends[:, -1:]
    block = _first_beyond(block_ends, target)
    before = F.pad(block_ends, (1, 0)).gather(-1, block)
    inside = blocks.take_along_dim(block[..., None], 1)[:, 0].double().cumsum(-1)  # [B, BLOCK]
    return (block * BLOCK + _first_beyond(inside, target - before))[:, 0]


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """Index of the first cumulative sum above the target; rounding may push the target past the last one with mass."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


def _uniforms(seed: int, n: int) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
