"""The reference sampler: transformers' `generate()`, told everything explicitly. Slow, and nobody doubts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from pellucid.algorithm.sampling_mask import masks_of
from pellucid.models.drawing import WHOLE, Truncation
from pellucid.samplers.rollout import check_lengths, completed_groups, left_padded, row_seed
from pellucid.types import Group, Prompt


@dataclass
class HuggingFace:
    temperature: float = 1.0
    max_tokens: int = 64
    truncation: Truncation = WHOLE
    policy: Any = None

    def sync(self, policy: Any) -> None:
        self.policy, self.model = policy, policy.inference_model()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], group_size: int, seed: str) -> list[Group]:
        self.model.eval()
        prompt_ids = [self.policy.encode(prompt) for prompt in prompts]
        rows = [ids for ids in prompt_ids for _ in range(group_size)]
        check_lengths(rows, self.policy.context_length - self.max_tokens)
        ids, mask = (x.to(self.model.device) for x in left_padded(rows))
        # What the call leaves open is filled in from the checkpoint (top_k, repetition penalty): leave it nothing.
        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # not of all GPUs: a process has one
            torch.manual_seed(row_seed(seed, prompts[0], 0))
            output = self.model.generate(ids, attention_mask=mask, generation_config=self._config())
        self.model.generation_config = own
        sampled = output.sequences[:, ids.shape[1] :]  # [B, T]
        scores = torch.stack(output.scores, 1).float()  # [B, T, V] at the temperature, -inf where cut off
        logprobs = scores.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        lengths = [self._length(row) for row in sampled.tolist()]
        return completed_groups(
            self.policy,
            prompts,
            prompt_ids,
            [row[:n] for row, n in zip(sampled.tolist(), lengths, strict=True)],
            [row[:n] for row, n in zip(logprobs.tolist(), lengths, strict=True)],
            [masks_of(row[:n].isfinite()) if self._cuts() else () for row, n in zip(scores, lengths, strict=True)],
        )

    def _cuts(self) -> bool:
        return self.truncation != WHOLE and self.temperature > 0.0

    def _config(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.max_tokens,
            do_sample=self.temperature > 0.0,
            temperature=self.temperature or None,
            top_k=self.truncation.top_k,
            top_p=self.truncation.top_p,
            min_p=self.truncation.min_p or None,
            repetition_penalty=1.0,
            eos_token_id=list(self.policy.eos_ids),
            pad_token_id=self.policy.eos_ids[0],
            use_cache=True,
            return_dict_in_generate=True,
            output_scores=True,
        )

    def _length(self, row: list[int]) -> int:
        """Up to and with the first end-of-sequence token; behind it `generate()` pads."""
        ends = [t for t, token in enumerate(row) if token in self.policy.eos_ids]
        return ends[0] + 1 if ends else len(row)
