"""The reference sampler: `generate()` of transformers, with every setting given explicitly. It is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from pellucid.algorithm.sampling_mask import pack_masks
from pellucid.rollout.conversations import REPLY_POLL_SECONDS, ConversationBatch
from pellucid.rollout.groups import build_groups, check_prompt_lengths, compute_row_seed, pad_left
from pellucid.types import AsyncEnvironments, Group, Prompt, Sampling

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy


@dataclass
class HuggingFaceSampler:
    """Samples with `generate()` of transformers. Other samplers are tested against it."""

    policy: Policy = None  # pyright: ignore[reportAssignmentType] - `sync` sets it
    version: int = 0
    one_by_one: bool = False
    """Sample one prompt after the other, since the state of this model does not support padding."""
    environments: AsyncEnvironments | None = None
    """The environments that answer the policy, if rollouts are conversations."""

    def sync(self, policy: Policy, version: int = 0) -> None:
        """Sample from these weights from now on."""
        self.policy, self.version, self.model = policy, version, policy.get_inference_model()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group of `sampling.n` completions for each prompt."""
        if self.policy.decoder:
            self.policy.gather()  # `self.model` may be sharded
        if self.environments:
            return self._generate_conversations(
                ConversationBatch(self.policy, self.version, self.environments, prompts, sampling)
            )
        parts = [[prompt] for prompt in prompts] if self.one_by_one else [prompts]
        return [group for part in parts for group in self._generate_batch(part, sampling)]

    def _generate_batch(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        rows = [ids for ids in contexts for _ in range(sampling.n)]
        check_prompt_lengths(rows, self.policy.context_length - sampling.max_tokens)
        sampled = self._sample_rows(rows, sampling, compute_row_seed(sampling.seed, prompts[0], 0))
        return build_groups(self.policy, self.version, prompts, contexts, *zip(*sampled, strict=True))

    def _generate_conversations(self, conversations: ConversationBatch) -> list[Group]:
        """Sample a turn of all rows, then the next turn of those that have a reply. Each turn is prefilled anew."""
        turn, sampling = 0, conversations.sampling
        while not conversations.is_done:
            conversations.start(len(conversations.rows))
            # The rows share a stream of random numbers: which rows are sampled together must not depend on the clock.
            while conversations.pending_replies:
                conversations.poll_replies(REPLY_POLL_SECONDS)
            ready = conversations.take_ready_rows()
            for rows in [[row] for row in ready] if self.one_by_one else [ready] if ready else []:
                seed = compute_row_seed(f"{sampling.seed}/{turn}", conversations.prompts[0], rows[0].number)
                limit = max(map(conversations.get_turn_limit, rows))
                sampled = self._sample_rows([row.context for row in rows], replace(sampling, max_tokens=limit), seed)
                for row, turn_tokens in zip(rows, sampled, strict=True):
                    conversations.add_turn(row, *turn_tokens)
                turn += 1
        return conversations.collect_groups()

    @torch.no_grad()
    def _sample_rows(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, seed: int
    ) -> list[tuple[list[int], list[float], Sequence[Tensor]]]:
        """Return the tokens of each row up to the first EOS token, their log-probs, and their sampling masks."""
        # Seed the global random numbers, and restore their state. A process has one GPU.
        with torch.random.fork_rng([self.model.device] if self.model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            tokens, scores = run_generate(self.model, contexts, self._build_config(sampling))
        # Scores include the temperature; truncated ones are -inf.
        logprobs = scores.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        masks = [pack_masks(row.isfinite()) if sampling.truncates else () for row in scores]
        eos_ids = self.policy.eos_ids  # behind the first of them, `generate()` pads
        ids = [row[: next((t for t, id in enumerate(row, 1) if id in eos_ids), len(row))] for row in tokens.tolist()]
        columns = zip(ids, logprobs.tolist(), masks, strict=True)
        return [(row, row_logprobs[: len(row)], row_masks[: len(row)]) for row, row_logprobs, row_masks in columns]

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
