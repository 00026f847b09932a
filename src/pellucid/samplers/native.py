"""Group decoding: each prompt is read once for its G rows; finished rows make room for the next prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.machine import hardware
from pellucid.models.running import Running
from pellucid.protocols import World
from pellucid.samplers.drawn import drawn
from pellucid.samplers.rollout import check_lengths, completed_groups, row_seed
from pellucid.samplers.talks import Talks
from pellucid.samplers.turns import Hall
from pellucid.types import Group, Prompt, Sampling


@dataclass
class Native:
    """Decodes by our own decoder, or for other architectures by transformers a token at a time."""

    rows: int = 256
    """How many completions are decoded at once."""
    policy: Any = None
    version: int = 0
    world: World | None = None
    """Those whom the policy talks with, where its answers are conversations."""
    patient: bool = False
    """Whether all rows wait for every reply, so that the same seed gives the same bits."""

    def sync(self, policy: Any, version: int = 0) -> None:
        self.policy, self.version = policy, version
        policy.gather()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt. Each row has random numbers of its own, so that its neighbours do not matter,
        but for the rounding of matrix products: see models/invariance.py.
        """
        if self.world:
            talks = Talks(self.policy, self.version, self.world, prompts, sampling)
            return Hall(self.policy, talks, self.rows, self.patient).hold()
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_lengths(contexts, self.policy.context_length - sampling.max_tokens)
        seeds = [row_seed(sampling.seed, prompt, g) for prompt in prompts for g in range(sampling.n)]
        place = hardware.place_of_sums(self.policy.device)
        uniforms = torch.stack([_uniforms(s, sampling.max_tokens) for s in seeds]).to(place)
        return completed_groups(
            self.policy, self.version, prompts, contexts, *self._decode(contexts, sampling, uniforms)
        )

    def _decode(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, uniforms: Tensor
    ) -> tuple[list[list[int]], list[list[float]], list[list[Tensor]]]:
        """Tokens, their log-probs and sampling masks for each of the len(contexts) * sampling.n rows."""
        size = sampling.n
        running: Running[int] = Running(self.policy.decode_batch(max(self.rows, size)))
        ends = torch.tensor(self.policy.eos_ids, device=self.policy.device)
        tokens: list[list[int]] = [[] for _ in uniforms]
        logprobs: list[list[float]] = [[] for _ in uniforms]
        masks: list[list[Tensor]] = [[] for _ in uniforms]
        waiting = list(range(len(contexts)))
        while waiting or running.rows:
            if joining := waiting[: running.room() // size]:
                waiting = waiting[len(joining) :]
                running.admit([contexts[p] for p in joining], [p * size + g for p in joining for g in range(size)])
            counts = [len(tokens[row]) for row in running.rows]
            token, logprob, mask = drawn(running.logits, uniforms[running.rows, counts], sampling)
            for row, kept in zip(running.rows, mask, strict=False):
                masks[row].append(kept)
            for row, x, y in zip(running.rows, token.tolist(), logprob.tolist(), strict=True):
                tokens[row].append(x)
                logprobs[row].append(y)
            full = torch.tensor(counts, device=token.device) == sampling.max_tokens - 1
            stays = (~torch.isin(token, ends) & ~full).nonzero()[:, 0]
            running.keep(stays)
            running.step(token[stays])
        return tokens, logprobs, masks


def _uniforms(seed: int, n: int) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
