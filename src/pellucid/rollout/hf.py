"""The reference sampler: `generate()` of transformers, with every setting given explicitly. It is slow."""

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
    """Samples with `generate()` of transformers. Other samplers are tested against it."""

    policy: Any = None
    version: int = 0
    one_by_one: bool = False
    """Sample one prompt after the other, since the state of this model does not support padding."""
    environments: AsyncEnvironments | None = None
    """The environments that answer the policy, if rollouts are conversations."""

    def sync(self, policy: Any, version: int = 0) -> None:
        """Sample from these weights from now on."""
        self.policy, self.version, self.model = policy, version, policy.get_inference_model()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group of `sampling.n` completions for each prompt."""
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
        with _use_seed(self.model.device, compute_row_seed(sampling.seed, prompts[0], 0)):
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
        """Sample a turn of all rows, then the next turn of those that have a reply. Each turn is prefilled anew."""
        turn = 0
        while not conversations.is_done:
            conversations.start(len(conversations.rows))
            # The rows share a stream of random numbers: which rows are sampled together must not depend on the clock.
            while conversations.pending_replies:
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
        with _use_seed(
            self.model.device, compute_row_seed(f"{sampling.seed}/{turn}", conversations.prompts[0], rows[0].number)
        ):
            sampled, scores = run_generate(self.model, [row.context for row in rows], self._build_config(sampling))
        logprobs = scores.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        for row, ids, row_logprobs, row_scores in zip(rows, sampled.tolist(), logprobs.tolist(), scores, strict=True):
            masks = pack_masks(row_scores.isfinite()) if sampling.truncates else [None] * len(ids)
            tokens = zip(ids, row_logprobs, masks, strict=True)
            while not conversations.add_token(row, *next(tokens)):
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
        """Return the length up to the first EOS token and with it; `generate()` pads behind it."""
        ends = [t for t, token in enumerate(row) if token in self.policy.eos_ids]
        return ends[0] + 1 if ends else len(row)


def run_generate(model: Any, rows: Sequence[Sequence[int]], config: GenerationConfig) -> tuple[Tensor, Tensor]:
    """Continue these rows with `generate()`. Return tokens [B, T], and the scores [B, T, V] they were sampled from."""
    model.eval()
    ids, mask = (x.to(model.device) for x in pad_left(rows))
    config.update(use_cache=True, return_dict_in_generate=True, output_scores=True)
    # Settings that the call does not give would come from the checkpoint (top_k, repetition penalty).
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(ids, attention_mask=mask, generation_config=config)
    finally:
        model.generation_config = own
    return output.sequences[:, ids.shape[1] :], torch.stack(output.scores, 1).float()


@contextmanager
def _use_seed(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global random numbers, and restore their state at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a process has one GPU
        torch.manual_seed(seed)
        yield
