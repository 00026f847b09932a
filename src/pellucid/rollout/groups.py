"""Functions of all samplers: seeds and random numbers, prompt lengths, sampling a token, and building groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pellucid.algorithm.sampling_mask import pack_masks
from pellucid.models.sampling import Truncation, sample_tokens_with_mask
from pellucid.models.sampling import sample_tokens as sample_untruncated
from pellucid.types import Completion, DataError, Group, Prompt, Sampling, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy


def compute_row_seed(seed: str, prompt: Prompt, g: int) -> int:
    """Return the 63-bit seed of sample g of a prompt: different for every row, the same on every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt.id}/{g}".encode()).digest()[:8], "big") >> 1


def generate_uniforms(seed: int, chunk: int = 64) -> Iterator[float]:
    """Yield the random numbers of one row: float64 in [0, 1), the same for any `chunk`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(chunk, dtype=torch.float64, generator=generator).tolist()


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
    ids = [torch.tensor(row) for row in prompt_ids]
    padded, mask = (
        pad_sequence(rows, batch_first=True, padding_side="left")
        for rows in (ids, [torch.ones_like(row) for row in ids])
    )
    return padded, mask


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
        tokens: [P * G] the sampled tokens of each row, with the EOS token if one was sampled.
        logprobs: [P * G]
        masks: [P * G] sampling masks; empty where nothing was truncated.
    """
    size = len(tokens) // len(prompts)
    rows = list(zip(tokens, logprobs, masks, strict=True))
    return [
        _build_group(policy, version, prompt, context, rows[p * size : (p + 1) * size])
        for p, (prompt, context) in enumerate(zip(prompts, contexts, strict=True))
    ]


def _build_group(
    policy: Policy,
    version: int,
    prompt: Prompt,
    context: tuple[int, ...],
    rows: Sequence[tuple[Sequence[int], Sequence[float], Sequence[Tensor]]],
) -> Group:
    prefix = policy.encode_prefix(prompt)
    n = len(prefix)
    question = context[: len(context) - n]
    thinking = begins_in_thought(policy, question)
    completions = [
        Completion(
            (*prefix, *ids),
            (*(0.0,) * n, *logprobs),
            decode_completion(policy, prefix, ids),
            ids[-1] in policy.eos_ids,
            given_spans=((0, n),) if n else (),
            version=version,
            sampling_mask=[*([torch.empty(0, dtype=torch.int32)] * n), *masks] if masks else (),
            thinking=thinking,
        )
        for ids, logprobs, masks in rows
    ]
    demonstration = (*prefix, policy.end_id) if prompt.prefix_is_complete else prefix
    return Group(prompt, question, tuple(completions), demonstration=demonstration)


THOUGHT_TAG_TOKENS = 8
"""The number of tokens before a completion that are searched for `<think>`, which some tokenizers split."""


def begins_in_thought(policy: Policy, context: Sequence[int]) -> bool:
    """Return whether these token ids end with `<think>`, so that the text after them begins inside a thought.

    Special tokens are skipped, as they are in completions: if the tags are special tokens, no completion shows them.
    """
    return policy.decode(context[-THOUGHT_TAG_TOKENS:]).rstrip().endswith("<think>")


def decode_completion(policy: Policy, prefix: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of a completion, decoded after its prefix: some tokenizers drop the space of a first token."""
    if not prefix:
        return policy.decode(ids)
    return policy.decode([*prefix, *ids]).removeprefix(policy.decode(prefix))


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sample a token for each row of logits [n, V], with uniforms [n] in float64.

    Returns:
        Tokens [n]; their log-probs [n]; and n sampling masks, or none if nothing is truncated.
    """
    if not sampling.truncates:
        return *sample_untruncated(logits, uniforms, sampling.temperature), []
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    tokens, logprobs, mask = sample_tokens_with_mask(logits, uniforms, sampling.temperature, truncation)
    return tokens, logprobs, pack_masks(mask)
