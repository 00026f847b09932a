"""What all samplers share: seeds and random numbers, prompt lengths, sampling a token, and groups made of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.algorithm.sampling_mask import pack_masks
from pellucid.models.sampling import Truncation, sample_tokens_with_mask
from pellucid.models.sampling import sample_tokens as sample_untruncated
from pellucid.types import Completion, DataError, Group, Prompt, Sampling, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy


def compute_row_seed(seed: str, prompt: Prompt, g: int) -> int:
    """Return the 63-bit seed of sample g of a prompt: different for every row, the same on every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt.id}/{g}".encode()).digest()[:8], "big") >> 1


class UniformStream:
    """The random numbers of one row: float64 in [0, 1), the same whichever rows are decoded beside it."""

    def __init__(self, seed: int, chunk: int = 64) -> None:
        """Create a stream that draws `chunk` numbers at a time. The numbers do not depend on `chunk`."""
        self.seed, self.chunk = seed, chunk
        self._generator: torch.Generator | None = None
        self._values: list[float] = []
        self._next = 0

    def take(self, n: int) -> list[float]:
        """Return the next n numbers."""
        while self._next + n > len(self._values):
            self._generator = self._generator or torch.Generator().manual_seed(self.seed)
            new = torch.rand(self.chunk, dtype=torch.float64, generator=self._generator)
            self._values, self._next = self._values[self._next :] + new.tolist(), 0
        self._next += n
        return self._values[self._next - n : self._next]


def check_prompt_lengths(prompt_ids: Sequence[Sequence[int]], max_length: int) -> None:
    """Raise DataError for a prompt of more than `max_length` tokens."""
    width = max(map(len, prompt_ids))
    if max_length < 1:
        raise UserError("sampler.max_tokens leaves no room for a prompt in the context of this model: lower it")
    if width > max_length:
        raise DataError(
            f"a prompt of {width} tokens leaves no room for the completion: this model's context holds prompts of"
            f" {max_length}; shorten the prompts or sampler.max_tokens"
        )


def pad_left(prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts padded on the left [P, S], and the mask of their tokens."""
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompt_ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompt_ids])
    return ids, mask


def build_groups(
    policy: Policy,
    version: int,
    prompts: Sequence[Prompt],
    contexts: Sequence[tuple[int, ...]],
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    masks: Sequence[Sequence[Tensor]],
) -> list[Group]:
    """Build the groups of sampled rows.

    Args:
        prompts: [P]
        contexts: [P] the token ids of each prompt and its prefix.
        tokens: [P * G] the sampled tokens of each row, in the order p * G + g, with the EOS token if one was sampled.
        logprobs: [P * G] their log-probs.
        masks: [P * G] their sampling masks; empty where nothing was truncated.
    """
    size = len(tokens) // len(prompts)
    prefixes = [policy.encode_prefix(prompt) for prompt in prompts]
    questions = [context[: len(context) - len(prefix)] for context, prefix in zip(contexts, prefixes, strict=True)]
    thinking = [begins_in_thought(policy, question) for question in questions]
    completions = [
        _build_completion(policy, version, prefixes[row // size], *sampled, thinking=thinking[row // size])
        for row, sampled in enumerate(zip(tokens, logprobs, masks, strict=True))
    ]
    return [
        Group(
            prompt,
            question,
            tuple(completions[p * size : (p + 1) * size]),
            demonstration=(*prefix, policy.end_id) if prompt.prefix_is_complete else prefix,
        )
        for p, (prompt, question, prefix) in enumerate(zip(prompts, questions, prefixes, strict=True))
    ]


def _build_completion(
    policy: Policy,
    version: int,
    prefix: tuple[int, ...],
    ids: Sequence[int],
    logprobs: Sequence[float],
    mask: Sequence[Tensor],
    thinking: bool = False,
) -> Completion:
    """Build the completion of a row whose prefix was given, and the rest sampled."""
    n = len(prefix)
    return Completion(
        (*prefix, *ids),
        (*(0.0,) * n, *logprobs),
        decode_completion(policy, prefix, ids),
        ids[-1] in policy.eos_ids,
        given_spans=((0, n),) if n else (),
        version=version,
        sampling_mask=[*([torch.empty(0, dtype=torch.int32)] * n), *mask] if mask else (),
        thinking=thinking,
    )


def begins_in_thought(policy: Policy, context: Sequence[int]) -> bool:
    """Return whether the text after these token ids begins inside a thought, since they end with `<think>`.

    Special tokens are skipped, as they are in completions: if the tags are special tokens, no completion shows them.
    """
    return policy.decode(context[-8:]).rstrip().endswith("<think>")


def decode_completion(policy: Policy, prefix: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of a completion, decoded after its prefix: some tokenizers drop the space of a first token."""
    if not prefix:
        return policy.decode(ids)
    return policy.decode([*prefix, *ids]).removeprefix(policy.decode(prefix))


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sample a token for each row.

    Args:
        logits: [n, V]
        uniforms: [n] float64 in [0, 1).

    Returns:
        Tokens [n]; their log-probs [n]; and n sampling masks, or none if nothing is truncated.
    """
    if not sampling.truncates:
        return *sample_untruncated(logits, uniforms, sampling.temperature), []
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    tokens, logprobs, mask = sample_tokens_with_mask(logits, uniforms, sampling.temperature, truncation)
    return tokens, logprobs, pack_masks(mask)
