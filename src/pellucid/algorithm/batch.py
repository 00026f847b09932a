"""Rollouts as tensors: groups become a `Batch` to train on, and `Grades` from which advantages are computed.

A response is a sequence of tokens, each sampled by the policy or given to it. The [B, T] fields of a Batch define what
is done at each position: whether there is a token (`response_mask`), whether the policy sampled it (`action_mask`),
whether it has a policy gradient (`loss_mask`), its advantage, its weight in the loss, and the weight of its likelihood.
The loss depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.algorithm.advantages import Grades
from pellucid.algorithm.sampling_mask import SamplingMask, collate_masks
from pellucid.types import Completion, Group, Reward


@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors, on the CPU. Each row is one sequence: a completion, or a branch of one.

    Example: prompts of 5 and 6 tokens, G = 2 and completions of 2, 3, 1 and 3 tokens give P = 2, B = 4, T = 3 and
    response_mask = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]. The end-of-sequence token is a token like any other.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """The tokens of each prompt, P of them."""
    demonstrations: tuple[tuple[int, ...], ...]
    """For each prompt the response whose likelihood may be raised; empty where there is none."""
    prompt_indices: Tensor
    """[B] the index of each row's prompt in prompt_ids."""
    response_ids: Tensor
    """[B, T] padded on the right with arbitrary values."""
    response_mask: Tensor
    """[B, T] bool: True for tokens, False for padding. Computed from lengths, since padding may equal the EOS token."""
    action_mask: Tensor
    """[B, T] bool: the policy sampled this token; the others were given to it."""
    finished: Tensor
    """[B] bool: ended with an end-of-sequence token."""
    sampler_logprobs: Tensor
    """[B, T] log-probs in nats as the sampler computed them; 0 where a token was given."""
    sampling_mask_words: Tensor | None = None
    """[M] the sampling masks of all tokens, concatenated (sampling_mask.py). None if sampling is not truncated."""
    sampling_mask_spans: Tensor | None = None
    """[B, T, 2] start and end of each token's mask in the words; an empty span allows every token."""
    old_logprobs: Tensor | None = None
    """[B, T] log-probs under the policy at the start of the update. None means those of the policy itself."""
    ref_logprobs: Tensor | None = None
    """[B, T] log-probs under the reference."""
    kl: Tensor | None = None
    """[B, T] KL to the reference at the time of sampling, if it is subtracted from rewards or advantages."""
    rollout_indices: Tensor | None = None
    """[B] the index p * G + g of the rollout to which each row belongs. None if each row is a rollout of its own."""
    step_row_indices: Tensor | None = None
    """[B] the index of the row in its step, in the order of `collate`; -1 for replayed rollouts and demonstrations. The
    algorithm does not use it; the token recorder uses it to find a rollout."""
    loss_mask: Tensor | None = None
    """[B, T] bool: the token has a policy gradient. None means that all sampled tokens have one."""
    advantages: Tensor | None = None
    """[B, T]; 0 where a token was given. Equal along a response, since a completion has one reward."""
    clip_high: Tensor | None = None
    """[B] clip_high of each row, if it depends on the difficulty of the prompt."""
    clip_low: Tensor | None = None
    """[B] clip_low of each row, if it depends on the difficulty of the prompt."""
    token_weights: Tensor | None = None
    """[B, T] the share of each sampled token in the loss; 0 where a token was given."""
    likelihood_weights: Tensor | None = None
    """[B, T] the weight of each token's negative log-likelihood in the loss. None means 0."""

    def __post_init__(self) -> None:
        if not all(self.prompt_ids):
            raise ValueError("a prompt without a token: there is nothing to predict its response from")

    def __len__(self) -> int:
        return len(self.prompt_indices)

    @property
    def scored_mask(self) -> Tensor:
        """[B, T] bool: tokens whose log-probs are needed, the sampled ones and those whose likelihood is raised."""
        if self.likelihood_weights is None:
            return self.action_mask
        return self.action_mask | (self.likelihood_weights != 0)

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    def get_row_tensors(self) -> dict[str, Tensor]:
        """Return the fields [B, ...], by name."""
        return {name: x for name, x in self.get_tensors().items() if name != "sampling_mask_words"}

    def copy_loss_inputs(self, device: torch.device) -> Batch:
        """Return the batch with the fields of tokens that the loss depends on, on a device."""
        if device.type == "cpu":
            return self
        names = {"response_ids", "finished", "sampling_mask_spans"}
        rows = ("clip_low", "clip_high")
        inputs = {name: x for name, x in self.get_row_tensors().items() if x.dim() == 2 or name in rows}
        return replace(self, **{name: copy_to_device(x, device) for name, x in inputs.items() if name not in names})

    def get_sampling_mask(self, device: torch.device) -> SamplingMask | None:
        """Return the sampling mask of all scored tokens, row by row. None if the sampler does not truncate."""
        if self.sampling_mask_words is None or self.sampling_mask_spans is None:
            return None
        return SamplingMask(self.sampling_mask_words.to(device), self.sampling_mask_spans[self.scored_mask].to(device))

    def broadcast_to_tokens(self, x: Tensor) -> Tensor:
        """Return the value of each row [B] at its sampled tokens, and 0 elsewhere. [B, T]"""
        return torch.where(self.action_mask, x[:, None], 0.0)

    def mark_as_replayed(self) -> Batch:
        """Return the batch for training in a later step, with step_row_indices of -1."""
        return replace(self, step_row_indices=torch.full_like(self.prompt_indices, -1))

    def select_rows(self, index: slice | Tensor) -> Batch:
        """Return a batch of some rows, cut to the length of their longest response."""
        width = int(self.response_mask[index].sum(-1).max())
        chosen = {name: x[index] for name, x in self.get_row_tensors().items()}
        return replace(self, **{name: x[:, :width] if x.dim() > 1 else x for name, x in chosen.items()})

    def split_into_chunks(self, size: int) -> list[Batch]:
        """Split into consecutive batches of at most `size` rows; 0 means one batch."""
        return [self.select_rows(slice(i, i + size)) for i in range(0, len(self), size)] if size else [self]

    def split_into_minibatches(self, count: int) -> list[Batch]:
        """Split into `count` consecutive batches of nearly equal numbers of rollouts, without splitting a rollout."""
        starts = [*range(len(self) + 1)]
        if self.rollout_indices is not None:
            changes = (self.rollout_indices[1:] != self.rollout_indices[:-1]).nonzero().flatten() + 1
            starts = [0, *changes.tolist(), len(self)]
        ends = [starts[(len(starts) - 1) * i // count] for i in range(count + 1)]
        return [self.select_rows(slice(start, end)) for start, end in pairwise(ends)]

    def compute_rollout_lengths(self) -> Tensor:
        """Return the number of tokens of each rollout that count towards sampler.max_tokens. [P * G] float64

        All tokens from the first sampled one count: in a conversation also the observations between the turns of the
        policy, but not the question or a prefix. If a rollout has several sequences, the longest one counts.
        """
        starts = self.action_mask.byte().argmax(-1)
        lengths = torch.where(self.action_mask.any(-1), self.response_mask.sum(-1) - starts, 0).double()
        if self.rollout_indices is None:
            return lengths
        longest = lengths.new_zeros(int(self.rollout_indices.max()) + 1)
        return longest.scatter_reduce(0, self.rollout_indices, lengths, "amax")

    def count_rollouts(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Count the tokens of a mask [B, T] by rollout.

        Returns the number of rollouts with at least one such token [], and for each row the number of tokens of its
        rollout [B, 1].
        """
        lengths = mask.sum(-1, keepdim=True)
        if self.rollout_indices is None:
            return mask.any(-1).sum(), lengths
        rollout_lengths = sum_rows(lengths[:, 0], self.rollout_indices)
        return (rollout_lengths > 0).sum(), rollout_lengths[self.rollout_indices][:, None]

    def sum_by_rollout(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Add up x [B, T] over the sampled tokens of each rollout. Return the sums [P * G, 1] and a mask of that shape.

        If each row is a rollout of its own, return x, not summed, and action_mask.
        """
        if self.rollout_indices is None:
            return x, self.action_mask
        sums = sum_rows((x.double() * self.action_mask).sum(-1), self.rollout_indices)[:, None]
        return sums, torch.ones_like(sums, dtype=torch.bool)


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device. The host does not wait for CUDA, which copies from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def find_tokens(mask: Tensor, device: torch.device) -> Tensor:
    """Return the indices [N] of the tokens of a mask [B, T] on the CPU, for `Tensor.take` on a device.

    A mask on a GPU would make the host wait until it knows how many tokens there are.
    """
    return copy_to_device(mask.flatten().nonzero()[:, 0], device)


def sum_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Add up the values [B] of the rows that have the same index [B]."""
    return x.new_zeros(int(indices.max()) + 1).index_add(0, indices, x)


# ---------------------------------------------------------------- groups to a batch


def collate(groups: Sequence[Group]) -> Batch:
    """Convert groups to a Batch: first the rows of all completions, then those of all branches, in the same order."""
    rollouts = [(p, c) for p, g in enumerate(groups) for c in g.completions]
    branches = [(p, i, b) for i, (p, c) in enumerate(rollouts) for b in c.branches]
    completions = [*(c for _, c in rollouts), *(b for _, _, b in branches)]
    words, spans = None, None
    if any(c.sampling_mask for c in completions):
        words, spans = collate_masks([c.sampling_mask for c in completions])
    mask = make_length_mask([len(c.token_ids) for c in completions])
    return Batch(
        prompt_ids=tuple(g.prompt_ids for g in groups),
        demonstrations=tuple(g.demonstration for g in groups),
        prompt_indices=torch.tensor([*(p for p, _ in rollouts), *(p for p, _, _ in branches)]),
        response_ids=pad_sequences([c.token_ids for c in completions], torch.long),
        response_mask=mask,
        action_mask=mask & ~make_given_mask(completions, mask.shape[1]),
        finished=torch.tensor([c.finished for c in completions]),
        sampler_logprobs=pad_sequences([c.logprobs for c in completions], torch.float32),
        sampling_mask_words=words,
        sampling_mask_spans=spans,
        rollout_indices=torch.tensor([*range(len(rollouts)), *(i for _, i, _ in branches)]) if branches else None,
        step_row_indices=torch.arange(len(completions)),
    )


def make_length_mask(lengths: Sequence[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def make_given_mask(completions: Sequence[Completion], width: int) -> Tensor:
    """Mark the tokens that were given. [B, width] bool"""
    mask = torch.zeros(len(completions), width, dtype=torch.bool)
    for row, completion in zip(mask, completions, strict=True):
        for start, end in completion.given_spans:
            row[start:end] = True
    return mask


def pad_sequences(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


# ---------------------------------------------------------------- joining batches


def append_demonstrations(batch: Batch, prompts: Tensor) -> Batch:
    """Append a row of given tokens for each of these prompts (indices [n]) that has a demonstration.

    The tokens of the new rows have likelihood weight 1; all other values there are 0.
    """
    batch = replace(batch, likelihood_weights=torch.zeros_like(batch.sampler_logprobs))
    demonstrated = [p for p in prompts.tolist() if batch.demonstrations[p]]
    if not demonstrated:
        return batch
    responses = [batch.demonstrations[p] for p in demonstrated]
    mask = make_length_mask([len(ids) for ids in responses])
    old = batch.get_row_tensors()
    new = {name: x.new_zeros(len(demonstrated), *x.shape[1:]) for name, x in old.items()} | {
        "prompt_indices": torch.tensor(demonstrated),
        "response_ids": pad_sequences(responses, torch.long),
        "response_mask": mask,
        "likelihood_weights": mask.to(batch.sampler_logprobs),
        "step_row_indices": torch.full((len(demonstrated),), -1),
    }
    width = max(batch.response_mask.shape[1], mask.shape[1])
    return replace(batch, **{name: _concat_rows([x, new[name]], width) for name, x in old.items()})


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Join batches that have the same fields, padded to the longest response."""
    first, *rest = batches
    if not rest:
        return first
    if any(b.rollout_indices is not None for b in batches):  # set only if an agent rewrote its history
        indices = [torch.arange(len(b)) if b.rollout_indices is None else b.rollout_indices for b in batches]
        batches = [replace(b, rollout_indices=x) for b, x in zip(batches, indices, strict=True)]
        first = batches[0]
    width = max(b.response_mask.shape[1] for b in batches)
    columns = {name: [b.get_tensors()[name] for b in batches] for name in first.get_tensors()}
    sizes = {
        "prompt_indices": [len(b.prompt_ids) for b in batches],
        "rollout_indices": [int(x.max()) + 1 for x in columns.get("rollout_indices", ())],
        "sampling_mask_spans": [len(words) for words in columns.get("sampling_mask_words", ())],
    }
    columns |= {name: offset_indices(columns[name], sizes[name]) for name in sizes if name in columns}
    return replace(
        first,
        prompt_ids=tuple(ids for b in batches for ids in b.prompt_ids),
        demonstrations=tuple(ids for b in batches for ids in b.demonstrations),
        **{name: _concat_rows(x, width) for name, x in columns.items()},
    )


def offset_indices(indices: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Shift indices into lists of these sizes to indices into their concatenation."""
    return [x + sum(sizes[:i]) for i, x in enumerate(indices)]


def _concat_rows(tensors: Sequence[Tensor], width: int) -> Tensor:
    """Concatenate rows [b, ...]. Rows of tokens [b, t, ...] are padded on the right to [B, width, ...]."""
    return torch.cat(list(tensors)) if tensors[0].dim() == 1 else concat_token_rows(tensors, width)


def concat_token_rows(tensors: Sequence[Tensor], width: int) -> Tensor:
    """Concatenate [b, t, ...], padded on the right to [B, width, ...]."""
    return torch.cat([F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[1])) for x in tensors])


# ---------------------------------------------------------------- groups to grades


def collect_grades(groups: Sequence[Group]) -> Grades:
    """Return the grades of some groups. A reward term that failed or does not apply gets the mean of its siblings."""

    def make_tensor(value: Callable[[Completion, Reward], Any]) -> Tensor:
        rows = [[value(*pair) for pair in zip(g.completions, g.rewards, strict=True)] for g in groups]
        return torch.tensor(rows, dtype=torch.float64)

    rewards = collect_task_rewards(groups)
    names = list({name: None for g in groups for r in g.rewards for name in r.parts})
    terms = make_tensor(lambda _, r: [math.nan if r.failed else r.parts.get(name, math.nan) for name in names])
    group_weights = [{name: weight for r in g.rewards for name, weight in r.weights.items()} for g in groups]
    weights = [[by_name.get(name, 1.0) for name in names] or [1.0] for by_name in group_weights]
    return Grades(
        rewards=rewards,
        correct=fill_with_sibling_mean(make_tensor(lambda _, r: r.is_correct if r.is_judged else math.nan)),
        lengths=make_tensor(lambda c, _: sum(sequence.length for sequence in (c, *c.branches))),
        parts=fill_with_sibling_mean(terms).nan_to_num(0.0) if names else rewards[..., None],
        weights=torch.tensor(weights, dtype=torch.float64),
    )


def collect_task_rewards(groups: Sequence[Group]) -> Tensor:
    """Return the rewards [P, G], float64. A failed reward gets the mean of its siblings, or 0 if all failed."""
    values = [[math.nan if r.failed else r.value for r in g.rewards] for g in groups]
    return fill_with_sibling_mean(torch.tensor(values, dtype=torch.float64)).nan_to_num(0.0)


def fill_with_sibling_mean(values: Tensor) -> Tensor:
    """Replace values [P, G, ...] that are not finite by the mean of the others of their group; NaN if there is none."""
    values = values.masked_fill(~values.isfinite(), torch.nan)
    return torch.where(values.isnan(), values.nanmean(1, keepdim=True), values)
