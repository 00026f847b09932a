"""The reference sampler: transformers' `generate()`, told everything explicitly. Slow, and nobody doubts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from pellucid.algorithm.sampling_mask import pack_masks
from pellucid.rollout.conversations import REPLY_POLL_SECONDS, ConversationBatch, ConversationRow
from pellucid.rollout.groups import build_groups, check_prompt_lengths, compute_row_seed, pad_left
from pellucid.types import AsyncEnvironments, Group, Prompt, Sampling

if TYPE_CHECKING:
    pass


@dataclass
class HuggingFaceSampler:
    policy: Any = None
    version: int = 0
    one_by_one: bool = False
    """Whether prompts are continued one after the other, since this model's state knows no padding."""
    environments: AsyncEnvironments | None = None
    """Those whom the policy talks with, where its answers are conversations."""

    def sync(self, policy: Any, version: int = 0) -> None:
        self.policy, self.version, self.model = policy, version, policy.get_inference_model()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if self.policy.decoder:
            self.policy.gather()  # the model is the policy's own
        if self.environments:
            return self._generate_conversations(
                ConversationBatch(self.policy, self.version, self.environments, prompts, sampling)
            )
        parts = [[prompt] for prompt in prompts] if self.one_by_one else [prompts]
        return [group for part in parts for group in self._generate_batch(part, sampling)]

    @torch.no_grad()
    def _generate_batch(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        rows = [ids for ids in contexts for _ in range(sampling.n)]
        check_prompt_lengths(rows, self.policy.context_length - sampling.max_tokens)
        with use_seed(self.model.device, compute_row_seed(sampling.seed, prompts[0], 0)):
            sampled, scores = run_generate(self.model, rows, self._build_config(sampling))
        # Scores are at the temperature, -inf where cut off.
        logprobs = scores.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        lengths = [self._find_length(row) for row in sampled.tolist()]
        return build_groups(
            self.policy,
            self.version,
            prompts,
            contexts,
            [row[:n] for row, n in zip(sampled.tolist(), lengths, strict=True)],
            [row[:n] for row, n in zip(logprobs.tolist(), lengths, strict=True)],
            [
                pack_masks(row[:n].isfinite()) if sampling.truncates else ()
                for row, n in zip(scores, lengths, strict=True)
            ],
        )

    @torch.no_grad()
    def _generate_conversations(self, conversations: ConversationBatch) -> list[Group]:
        """All rows speak a turn, each whole conversation being read anew, then all that were answered the next."""
        turn = 0
        while not conversations.is_done:
            conversations.start(len(conversations.rows))
            while (
                conversations.pending_replies
            ):  # one stream of random numbers: who speaks when must not depend on the clock
                conversations.poll_replies(REPLY_POLL_SECONDS)
            rows = [
                row for group in conversations.take_prefill_groups(len(conversations.rows)) for row in group
            ] + conversations.extend_queue
            conversations.extend_queue = []
            for part in [[row] for row in rows] if self.one_by_one else [rows] if rows else []:
                self._sample_turn(conversations, part, turn)
                turn += 1
        return conversations.collect_groups()

    def _sample_turn(self, conversations: ConversationBatch, rows: Sequence[ConversationRow], turn: int) -> None:
        sampling = replace(conversations.sampling, max_tokens=max(map(conversations.get_turn_limit, rows)))
        with use_seed(
            self.model.device, compute_row_seed(f"{sampling.seed}/{turn}", conversations.prompts[0], rows[0].number)
        ):
            sampled, scores = run_generate(self.model, [row.context for row in rows], self._build_config(sampling))
        logprobs = scores.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        for row, tokens, of_tokens, allowed in zip(rows, sampled.tolist(), logprobs.tolist(), scores, strict=True):
            masks = pack_masks(allowed.isfinite()) if sampling.truncates else [None] * len(tokens)
            spoken = zip(tokens, of_tokens, masks, strict=True)
            while not conversations.add_token(row, *next(spoken)):
                pass
            conversations.finish_turn(row)

    def _build_config(self, sampling: Sampling) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=sampling.temperature > 0.0,
            temperature=sampling.temperature or None,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p or None,
            repetition_penalty=1.0,
            eos_token_id=list(self.policy.eos_ids),
            pad_token_id=self.policy.eos_ids[0],
        )

    def _find_length(self, row: list[int]) -> int:
        """Up to and with the first end-of-sequence token; behind it `generate()` pads."""
        ends = [t for t, token in enumerate(row) if token in self.policy.eos_ids]
        return ends[0] + 1 if ends else len(row)


def run_generate(model: Any, rows: Sequence[Sequence[int]], config: GenerationConfig) -> tuple[Tensor, Tensor]:
    """What `generate()` says behind these rows: tokens [B, T], and the scores [B, T, V] that they were drawn by."""
    model.eval()
    ids, mask = (x.to(model.device) for x in pad_left(rows))
    config.update(use_cache=True, return_dict_in_generate=True, output_scores=True)
    # What the call leaves open is filled in from the checkpoint (top_k, repetition penalty): leave it nothing.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(ids, attention_mask=mask, generation_config=config)
    finally:
        model.generation_config = own
    return output.sequences[:, ids.shape[1] :], torch.stack(output.scores, 1).float()


@contextmanager
def use_seed(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers of this seed, whatever was drawn before, and none of them taken from those who come after."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # not of all GPUs: a process has one
        torch.manual_seed(seed)
        yield
