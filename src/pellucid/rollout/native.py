"""Group decoding: each prompt is read once for its G rows; finished rows make room for the next prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.models.decode import RunningBatch
from pellucid.rollout.conversations import ConversationBatch
from pellucid.rollout.groups import build_groups, check_prompt_lengths, compute_row_seed, sample_tokens
from pellucid.rollout.scheduler import MultiTurnScheduler
from pellucid.types import AsyncEnvironments, Group, Prompt, Sampling
from pellucid.utils import hardware

if TYPE_CHECKING:
    pass

TOKENS_PER_EOS_CHECK = 8
"""Tokens that are drawn before a GPU is asked whose rows have ended: each time the host waits for it, and the other way
round. Rows that have ended go on to the end of theirs, for nothing.
"""


@dataclass
class NativeSampler:
    """Decodes by our own decoder, or for other architectures by transformers a token at a time."""

    rows: int = 256
    """How many completions are decoded at once."""
    policy: Any = None
    version: int = 0
    environments: AsyncEnvironments | None = None
    """Those whom the policy talks with, where its answers are conversations."""
    int8: bool = False
    """Whether tokens are decoded in int8, of whose log-probs those of the scorer are then some hundredths off."""
    deterministic: bool = False
    """Whether all rows wait for every reply, so that the same seed gives the same bits."""

    def sync(self, policy: Any, version: int = 0) -> None:
        self.policy, self.version = policy, version
        policy.gather()

    @property
    def batches_continuously(self) -> bool:
        """As in `InFlight`. Where transformers decodes, nobody is let in before all have ended; and of conversations,
        each with a process of its own, twice as many as rows would be begun.
        """
        return bool(self.policy.decoder) and not self.environments

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt. Each row has random numbers of its own, so that its neighbours do not matter,
        but for the rounding of matrix products: see models/invariance.py.
        """
        if self.environments:
            talks = ConversationBatch(self.policy, self.version, self.environments, prompts, sampling)
            return MultiTurnScheduler(self.policy, talks, self.rows, self.deterministic, self.int8).run()
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_prompt_lengths(contexts, self.policy.context_length - sampling.max_tokens)
        seeds = [compute_row_seed(sampling.seed, prompt, g) for prompt in prompts for g in range(sampling.n)]
        return build_groups(self.policy, self.version, prompts, contexts, *self._decode(contexts, sampling, seeds))

    def _decode(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]], list[list[Tensor]]]:
        """Tokens, their log-probs and sampling masks for each of the len(contexts) * sampling.n rows."""
        size = sampling.n
        running: RunningBatch[int] = RunningBatch(self.policy.create_decode_batch(max(self.rows, size), self.int8))
        tokens: list[list[int]] = [[] for _ in seeds]
        logprobs: list[list[float]] = [[] for _ in seeds]
        masks: list[list[Tensor]] = [[] for _ in seeds]
        uniforms: dict[int, list[float]] = {}  # of rows that have not ended
        waiting = list(range(len(contexts)))
        while waiting or running.requests:
            if joining := waiting[: running.count_free_slots() // size]:
                waiting = waiting[len(joining) :]
                rows = [p * size + g for p in joining for g in range(size)]
                uniforms |= {row: _draw_uniforms(seeds[row], sampling.max_tokens) for row in rows}
                running.admit([contexts[p] for p in joining], rows)
            going = [row for row in running.requests if row in uniforms]
            k = min(self._count_steps_per_check(), sampling.max_tokens - max(len(tokens[row]) for row in going))
            chances = [_slice_uniforms(uniforms.get(row), len(tokens[row]), k) for row in running.requests]
            last, *drawn_by = self._draw(running, torch.tensor(chances, dtype=torch.float64), sampling)
            for row, ids, of_ids, kept in zip(running.requests, *drawn_by, strict=True):
                if row not in uniforms:
                    continue
                n = 1 + next((i for i, token in enumerate(ids) if token in self.policy.eos_ids), k)
                tokens[row] += ids[:n]
                logprobs[row] += of_ids[:n]
                masks[row] += kept[:n]
                if n <= k or len(tokens[row]) == sampling.max_tokens:
                    del uniforms[row]
            stays = [place for place, row in enumerate(running.requests) if row in uniforms]
            if self._should_compact(running, len(stays), size if waiting else 0):
                places = torch.tensor(stays, dtype=torch.long)
                running.keep_rows(places)
                last = last[places.to(last.device)]
            running.step(last)
        return tokens, logprobs, masks

    def _should_compact(self, running: RunningBatch[int], stays: int, wanted: int) -> bool:
        """Whether rows that have ended are dropped at once. On a GPU others are hardly faster without them, while to
        drop them costs a copy and a new graph: there half of all must have ended, or make room for so many others.
        """
        rows = len(running.requests)
        if self.policy.device.type == "cpu":
            return True
        return 2 * stays <= rows or 0 < wanted <= running.count_free_slots() + rows - stays

    def _count_steps_per_check(self) -> int:
        """Of how many tokens it is seen together whether they end a row: on the CPU nobody waits for one."""
        return 1 if self.policy.device.type == "cpu" else TOKENS_PER_EOS_CHECK

    def _draw(
        self, running: RunningBatch[int], chances: Tensor, sampling: Sampling
    ) -> tuple[Tensor, list[list[int]], list[list[float]], list[list[Tensor]]]:
        """As many tokens of each row as there are random numbers for it [n, k], its end passed over: the last of them
        [n], not yet appended, and row by row all tokens, their log-probs and sampling masks.
        """
        tokens: list[Tensor] = []
        logprobs, masks = [], [[] for _ in running.requests]
        for column in chances.to(hardware.pick_float64_device(self.policy.device)).unbind(1):
            if tokens:
                running.step(tokens[-1])
            token, logprob, kept = sample_tokens(running.logits, column, sampling)
            tokens.append(token)
            logprobs.append(logprob)
            for of_row, mask in zip(masks, kept, strict=False):
                of_row.append(mask)
        of_tokens = torch.stack(logprobs, 1)
        # In one piece, so that it is waited for once; floats hold the ids of any vocabulary exactly.
        ids, values = torch.stack([torch.stack(tokens, 1).to(of_tokens), of_tokens]).cpu()
        return tokens[-1], ids.long().tolist(), values.tolist(), masks


def _slice_uniforms(uniforms: list[float] | None, n: int, k: int) -> list[float]:
    """k random numbers of a row, the first n being used; any of one that has ended."""
    return [0.0] * k if uniforms is None else uniforms[n : n + k]


def _draw_uniforms(seed: int, n: int) -> list[float]:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
