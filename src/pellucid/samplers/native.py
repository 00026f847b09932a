"""Group decoding: each prompt is read once for its G rows; finished rows make room for the next prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.algorithm.sampling_mask import masks_of
from pellucid.machine import hardware
from pellucid.models.drawing import Truncation, draw, draw_among
from pellucid.samplers.rollout import check_lengths, completed_groups, row_seed
from pellucid.types import Group, Prompt, Sampling


@dataclass
class Native:
    """Decodes by our own decoder, or for other architectures by transformers a token at a time."""

    rows: int = 256
    """How many completions are decoded at once."""
    policy: Any = None
    version: int = 0

    def sync(self, policy: Any, version: int = 0) -> None:
        self.policy, self.version = policy, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt. Each row has random numbers of its own, so that its neighbours do not matter,
        but for the rounding of matrix products: see models/invariance.py.
        """
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_lengths(contexts, self.policy.context_length - sampling.max_tokens)
        seeds = [row_seed(sampling.seed, prompt, g) for prompt in prompts for g in range(sampling.n)]
        place = hardware.place_of_sums(self.policy.device)
        uniforms = torch.stack([_uniforms(s, sampling.max_tokens) for s in seeds]).to(place)
        return completed_groups(
            self.policy, self.version, prompts, contexts, *self._decode(contexts, sampling, uniforms)
        )

    def _decode(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, uniforms: Tensor
    ) -> tuple[list[list[int]], list[list[float]], list[list[Tensor]]]:
        """Tokens, their log-probs and sampling masks for each of the len(prompt_ids) * sampling.n rows."""
        group_size = sampling.n
        flight = self.policy.decode_batch(max(self.rows, group_size))
        ends = torch.tensor(self.policy.eos_ids, device=self.policy.device)
        tokens: list[list[int]] = [[] for _ in uniforms]
        logprobs: list[list[float]] = [[] for _ in uniforms]
        masks: list[list[Tensor]] = [[] for _ in uniforms]
        waiting, flying = list(range(len(prompt_ids))), []  # prompts; the row that each line of a step belongs to
        logits = torch.zeros(0)
        while waiting or flying:
            if boarding := waiting[: flight.room() // group_size]:
                waiting = waiting[len(boarding) :]
                flying += [p * group_size + g for p in boarding for g in range(group_size)]
                newcomers = flight.admit([prompt_ids[p] for p in boarding], group_size)
                logits = torch.cat([logits, newcomers]) if len(logits) else newcomers
            said = [len(tokens[row]) for row in flying]
            token, logprob, mask = _drawn(logits, uniforms[flying, said], sampling)
            for row, kept in zip(flying, mask, strict=False):
                masks[row].append(kept)
            for row, x, y in zip(flying, token.tolist(), logprob.tolist(), strict=True):
                tokens[row].append(x)
                logprobs[row].append(y)
            full = torch.tensor(said, device=token.device) == sampling.max_tokens - 1
            stays = (~torch.isin(token, ends) & ~full).nonzero()[:, 0]
            if len(stays) < len(flying):
                flight.keep(stays)
                flying = [flying[i] for i in stays.tolist()]
            logits = flight.step(token[stays]) if flying else logits[:0]
        return tokens, logprobs, masks


def _drawn(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A token for each row, its log-prob, and its sampling mask where the sampler truncates."""
    if not sampling.truncates:
        return *draw(logits, uniforms, sampling.temperature), []
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    token, logprob, kept = draw_among(logits, uniforms, sampling.temperature, truncation)
    return token, logprob, masks_of(kept)


def _uniforms(seed: int, n: int) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
