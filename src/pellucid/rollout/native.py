"""The native sampler: our decoder with continuous batching. A prompt is prefilled once for the G rows of its group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.rollout.conversations import ConversationBatch
from pellucid.rollout.groups import (
    build_groups,
    check_prompt_lengths,
    compute_row_seed,
    generate_uniforms,
    sample_tokens,
)
from pellucid.rollout.scheduler import ConversationScheduler, RowState, Scheduler
from pellucid.types import AsyncEnvironments, Group, Prompt, Sampling

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

TOKENS_PER_EOS_CHECK = 8
"""The number of tokens that are sampled on a GPU between two checks for EOS. Each check waits for the GPU."""


@dataclass
class NativeSampler:
    """Samples with our decoder, or with transformers' modules for other architectures."""

    rows: int = 256
    """How many completions are decoded at once."""
    policy: Policy = None  # pyright: ignore[reportAssignmentType] - `sync` sets it
    version: int = 0
    environments: AsyncEnvironments | None = None
    """The environments that answer the policy, if rollouts are conversations."""
    deterministic: bool = False
    """Whether all rows of conversations wait for all replies, so that a seed always gives the same bits."""

    def sync(self, policy: Policy, version: int = 0) -> None:
        """Sample from these weights from now on. Processes that share the parameters call this together."""
        self.policy, self.version = policy, version
        policy.gather()

    @property
    def batches_continuously(self) -> bool:
        """Whether prompts may be added before earlier ones have finished, as in `InFlight`.

        They may not where transformers decodes, which admits rows only to an empty batch. Nor may they in
        conversations: up to 2 * `rows` of them are open at once, each with its own process.
        """
        return bool(self.policy.decoder) and not self.environments

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt.

        Each row has its own random numbers, so that it does not depend on the rows beside it, except for the rounding
        of matrix products (see `check_batch_invariance`).

        Raises:
            DataError: a prompt leaves no room for a completion in the context of the model.
        """
        if self.environments:
            conversations = ConversationBatch(self.policy, self.version, self.environments, prompts, sampling)
            return ConversationScheduler(self.policy, conversations, self.rows, self.deterministic).run()
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_prompt_lengths(contexts, self.policy.context_length - sampling.max_tokens)
        seeds = [compute_row_seed(sampling.seed, prompt, g) for prompt in prompts for g in range(sampling.n)]
        return build_groups(self.policy, self.version, prompts, contexts, *self._decode(contexts, sampling, seeds))

    def _decode(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]], list[list[Tensor]]]:
        """Return tokens, log-probs and sampling masks of the P * G rows; masks are empty without truncation."""
        policy, size = self.policy, sampling.n
        rows = [_CompletionRow(generate_uniforms(seed)) for seed in seeds]

        def append_tokens(row: _CompletionRow, ids: list[int], logprobs: list[float], masks: list[Tensor]) -> RowState:
            n = 1 + next((i for i, token in enumerate(ids) if token in policy.eos_ids), len(ids))
            row.tokens += ids[:n]
            row.logprobs += logprobs[:n]
            row.masks += masks[:n]
            is_finished = n <= len(ids) or len(row.tokens) == sampling.max_tokens
            return RowState.FINISHED if is_finished else RowState.DECODING

        scheduler = Scheduler(
            policy,
            max(self.rows, size),
            lambda _, logits, uniforms: sample_tokens(logits, uniforms, sampling),
            append_tokens,
            compacts_at_once=policy.device.type == "cpu",
        )
        for p, context in enumerate(contexts):
            scheduler.add_request(context, rows[p * size : (p + 1) * size])
        while scheduler.has_requests:
            longest = max((len(row.tokens) for row in scheduler.decoding), default=0)
            scheduler.step(min(self._count_steps_per_check(), sampling.max_tokens - longest))
        return [row.tokens for row in rows], [row.logprobs for row in rows], [row.masks for row in rows]

    def _count_steps_per_check(self) -> int:
        """Return the number of tokens between two checks for EOS. On the CPU, a check causes no wait."""
        return 1 if self.policy.device.type == "cpu" else TOKENS_PER_EOS_CHECK


@dataclass(eq=False)
class _CompletionRow:
    """A completion that is being decoded."""

    uniforms: Iterator[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
