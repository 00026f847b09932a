"""Rollouts as tensors: records become a Batch to train on, and Grades that advantages are made from.

A response is a sequence of tokens. Each was sampled by the policy or given to it, and the fields [B, T] of a Batch say
what is done with each: whether there is one (`mask`), who chose it (`sampled`), whether the policy gradient acts on it
(`acts`), its advantage, its weight in the loss, and the weight of its likelihood. The loss knows nothing else.
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
    """Rollouts as tensors, on the CPU; each row is one completion.

    Example: prompts of 5 and 6 tokens, G = 2 and completions of 2, 3, 1 and 3 tokens give P = 2, B = 4, T = 3 and
    mask = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]. The end-of-sequence token is a token like any other.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """The prompts of the batch, one for each group."""
    demonstrations: tuple[tuple[int, ...], ...]
    """Of each prompt, the response that may be made likelier; empty where there is none."""
    prompt_indices: Tensor
    """[B] the index of each row's prompt in prompt_ids."""
    response_ids: Tensor
    """[B, T] padded on the right; what the padding holds is never looked at."""
    response_mask: Tensor
    """[B, T] bool: there is a token. Made from lengths, since pad may equal EOS."""
    action_mask: Tensor
    """[B, T] bool: the policy drew this token; the others were given to it."""
    finished: Tensor
    """[B] bool: ended with an end-of-sequence token."""
    sampler_logprobs: Tensor
    """[B, T] log-probs as the sampler reported them; 0 where a token was given."""
    sampling_mask_words: Tensor | None = None
    """[M]: sampling masks, end to end, where the sampler truncates."""
    sampling_mask_spans: Tensor | None = None
    """[B, T, 2]: where in them that of each token begins and ends; empty where every token was in the running."""
    old_logprobs: Tensor | None = None
    """[B, T] log-probs under the policy at the start of the update; None where that is the one being updated."""
    ref_logprobs: Tensor | None = None
    """[B, T] log-probs under the reference."""
    kl: Tensor | None = None
    """[B, T] KL to the reference when the rollouts were drawn, where the reward is charged with it."""
    rollout_indices: Tensor | None = None
    """[B] the rollout p * G + g that each row is a sequence of; None where each row is a rollout."""
    step_row_indices: Tensor | None = None
    """[B] which of its step's rows each is, as `collate` orders them; -1 where it is none of this step's rollouts: a
    replayed one, or a demonstration. Nothing is computed from it: it says what became of a rollout."""
    loss_mask: Tensor | None = None
    """[B, T] bool: the policy gradient acts on this token; None means on all that were sampled."""
    advantages: Tensor | None = None
    """[B, T]; 0 where a token was given. Equal along a response, as a completion has one grade."""
    clip_high: Tensor | None = None
    """[B] the upper clip of each row, where the difficulty of its prompt sets it."""
    token_weights: Tensor | None = None
    """[B, T] share of each sampled token in the loss; 0 where a token was given."""
    likelihood_weights: Tensor | None = None
    """[B, T] weight of each token's negative log-likelihood in the loss; None means none."""

    def __post_init__(self) -> None:
        if not all(self.prompt_ids):
            raise ValueError("a prompt without a token: there is nothing to predict its response from")

    def __len__(self) -> int:
        return len(self.prompt_indices)

    def select_rows(self, index: slice | Tensor) -> Batch:
        """A batch of some rows, cut to the length of their longest response."""
        width = int(self.response_mask[index].sum(-1).max())
        chosen = {name: x[index] for name, x in self.get_tensors().items() if name != "sampling_mask_words"}
        return replace(self, **{name: x[:, :width] if x.dim() > 1 else x for name, x in chosen.items()})

    def get_tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    @property
    def scored_mask(self) -> Tensor:
        """[B, T] bool: tokens whose log-probs are needed. Given ones are, where they are made likelier."""
        return (
            self.action_mask if self.likelihood_weights is None else self.action_mask | (self.likelihood_weights != 0)
        )

    def get_sampling_mask(self, device: torch.device) -> SamplingMask | None:
        """The sampling mask of all scored tokens, row by row; None where the sampler does not truncate."""
        if self.sampling_mask_words is None or self.sampling_mask_spans is None:
            return None
        return SamplingMask(self.sampling_mask_words.to(device), self.sampling_mask_spans[self.scored_mask].to(device))

    def mark_as_replayed(self) -> Batch:
        """The batch as a later step trains on it."""
        return replace(self, step_row_indices=torch.full_like(self.prompt_indices, -1))

    def broadcast_to_tokens(self, x: Tensor) -> Tensor:
        """[B] -> [B, T]: the value of each row at its sampled tokens, 0 elsewhere."""
        return torch.where(self.action_mask, x[:, None], 0.0)

    def split_into_chunks(self, size: int) -> list[Batch]:
        """Consecutive batches of at most `size` rows; 0 means one."""
        return [self.select_rows(slice(i, i + size)) for i in range(0, len(self), size)] if size else [self]

    def split_into_minibatches(self, count: int) -> list[Batch]:
        """Split into `count` consecutive batches of as equal numbers of rollouts as possible; none is cut in two."""
        starts = self.find_rollout_starts()
        ends = [starts[(len(starts) - 1) * i // count] for i in range(count + 1)]
        return [self.select_rows(slice(start, end)) for start, end in pairwise(ends)]

    def find_rollout_starts(self) -> list[int]:
        """Return the first row of each rollout, in the order of the rows, and len(self)."""
        if self.rollout_indices is None:
            return list(range(len(self) + 1))
        changes = (self.rollout_indices[1:] != self.rollout_indices[:-1]).nonzero().flatten() + 1
        return [0, *changes.tolist(), len(self)]

    def compute_rollout_lengths(self) -> Tensor:
        """Return the number of tokens [P * G] of each rollout that count towards sampler.max_tokens, as float64.

        These are all tokens from the first sampled one on: in a conversation also what the policy was told between its
        turns, but neither its question nor a prefix. The longest sequence of a rollout counts.
        """
        positions = self.action_mask.byte().argmax(-1)
        lengths = torch.where(self.action_mask.any(-1), self.response_mask.sum(-1) - positions, 0).double()
        if self.rollout_indices is None:
            return lengths
        longest = lengths.new_zeros(int(self.rollout_indices.max()) + 1)
        return longest.scatter_reduce(0, self.rollout_indices, lengths, "amax")

    def count_rollouts(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Count the tokens of `mask` [B, T] by rollout.

        Returns:
            How many rollouts have such a token [], and the number of such tokens in the rollout of each row [B, 1].
        """
        lengths = mask.sum(-1, keepdim=True)
        if self.rollout_indices is None:
            return mask.any(-1).sum(), lengths
        of_rollouts = lengths.new_zeros(int(self.rollout_indices.max()) + 1).index_add(
            0, self.rollout_indices, lengths[:, 0]
        )
        return (of_rollouts > 0).sum(), of_rollouts[self.rollout_indices][:, None]

    def sum_by_rollout(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] -> its sums over the sampled tokens of each completion [P * G, 1], and a mask of the same shape; where
        each row is a completion, `x` as it is, and its mask.
        """
        if self.rollout_indices is None:
            return x, self.action_mask
        sums = (x.double() * self.action_mask).sum(-1)
        found = sums.new_zeros(int(self.rollout_indices.max()) + 1).index_add(0, self.rollout_indices, sums)[:, None]
        return found, torch.ones_like(found, dtype=torch.bool)


def collate(groups: Sequence[Group]) -> Batch:
    """The Batch of groups. Behind the completions, in their order, stand their branches."""
    rollouts = [(p, c) for p, g in enumerate(groups) for c in g.completions]
    branches = [(p, i, b) for i, (p, c) in enumerate(rollouts) for b in c.branches]
    completions = [*(c for _, c in rollouts), *(b for _, _, b in branches)]
    words, spans = (None, None)
    if completions[0].sampling_mask:
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


def make_given_mask(completions: Sequence[Completion], width: int) -> Tensor:
    """[B, width] bool: tokens that were given."""
    given = torch.zeros(len(completions), width, dtype=torch.bool)
    for row, completion in zip(given, completions, strict=True):
        for start, end in completion.given_spans:
            row[start:end] = True
    return given


def append_demonstrations(batch: Batch, prompts: Tensor) -> Batch:
    """The batch, and behind it a row of given tokens for each of these prompts [n] that has a demonstration.

    Their tokens have likelihood weight 1; everything else is 0 in the new rows.
    """
    batch = replace(batch, likelihood_weights=torch.zeros_like(batch.sampler_logprobs))
    shown = [p for p in prompts.tolist() if batch.demonstrations[p]]
    if not shown:
        return batch
    responses = [batch.demonstrations[p] for p in shown]
    mask = make_length_mask([len(ids) for ids in responses])
    new = {
        "prompt_indices": torch.tensor(shown),
        "response_ids": pad_sequences(responses, torch.long),
        "response_mask": mask,
        "likelihood_weights": mask.to(batch.sampler_logprobs),
        "step_row_indices": torch.full((len(shown),), -1),
    }
    old = {name: x for name, x in batch.get_tensors().items() if name != "sampling_mask_words"}
    nothing = {name: x.new_zeros(len(shown), *x.shape[1:]) for name, x in old.items()}
    width = max(batch.response_mask.shape[1], mask.shape[1])
    return replace(batch, **{name: concat_rows([x, (nothing | new)[name]], width) for name, x in old.items()})


def pad_sequences(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def make_length_mask(lengths: Sequence[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def concat_batches(batches: Sequence[Batch]) -> Batch:
    first, *rest = batches
    if not rest:
        return first
    if any(b.rollout_indices is not None for b in batches):
        # Only a step in which an agent rewrote its history has it.
        alone = [torch.arange(len(b)) if b.rollout_indices is None else b.rollout_indices for b in batches]
        batches = [replace(b, rollout_indices=x) for b, x in zip(batches, alone, strict=True)]
        first = batches[0]
    width = max(b.response_mask.shape[1] for b in batches)
    columns = {name: [b.get_tensors()[name] for b in batches] for name in first.get_tensors()}
    tensors = {name: concat_rows(x, width) for name, x in columns.items()}
    tensors["prompt_indices"] = torch.cat(
        offset_indices(columns["prompt_indices"], [len(b.prompt_ids) for b in batches])
    )
    if "rollout_indices" in columns:
        sizes = [int(x.max()) + 1 for x in columns["rollout_indices"]]
        tensors["rollout_indices"] = torch.cat(offset_indices(columns["rollout_indices"], sizes))
    if "sampling_mask_words" in columns:
        moved_spans = offset_indices(
            columns["sampling_mask_spans"], [len(words) for words in columns["sampling_mask_words"]]
        )
        tensors["sampling_mask_spans"] = concat_token_rows(moved_spans, width)
    return replace(
        first,
        prompt_ids=tuple(ids for b in batches for ids in b.prompt_ids),
        demonstrations=tuple(ids for b in batches for ids in b.demonstrations),
        **tensors,
    )


def concat_rows(tensors: Sequence[Tensor], width: int) -> Tensor:
    """Rows [b, ...] end to end, those of tokens [b, t, ...] padded on the right to [B, width, ...]."""
    return torch.cat(list(tensors)) if tensors[0].dim() == 1 else concat_token_rows(tensors, width)


def offset_indices(indices: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Shift indices into lists of these sizes to indices into their concatenation."""
    return [x + sum(sizes[:i]) for i, x in enumerate(indices)]


def concat_token_rows(tensors: Sequence[Tensor], width: int) -> Tensor:
    """[b, t, ...] each -> [B, width, ...], padded on the right."""
    return torch.cat([F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[1])) for x in tensors])


def collect_task_rewards(groups: Sequence[Group]) -> Tensor:
    """[P, G] float64. A reward that failed counts as the mean of its siblings; 0 where all did."""
    known = [[math.nan if r.failed else r.value for r in g.rewards] for g in groups]
    return fill_with_sibling_mean(torch.tensor(known, dtype=torch.float64)).nan_to_num(0.0)


def fill_with_sibling_mean(known: Tensor) -> Tensor:
    """Replace values [P, G, ...] that are not finite by the mean of their group's others; NaN where there is none."""
    known = known.masked_fill(~known.isfinite(), torch.nan)
    return torch.where(known.isnan(), known.nanmean(1, keepdim=True), known)


def collect_grades(groups: Sequence[Group]) -> Grades:
    """The Grades of one step's groups. A reward term that failed or does not apply counts as its siblings' mean."""

    def each(value: Callable[[Completion, Reward], Any]) -> Tensor:
        rows = [[value(*pair) for pair in zip(g.completions, g.rewards, strict=True)] for g in groups]
        return torch.tensor(rows, dtype=torch.float64)

    rewards = collect_task_rewards(groups)
    names = list({name: None for g in groups for r in g.rewards for name in r.parts})
    terms = each(lambda _, r: [math.nan if r.failed else r.parts.get(name, math.nan) for name in names])  # [P, G, K]
    known = [{name: weight for r in g.rewards for name, weight in r.weights.items()} for g in groups]
    weights = [[of_group.get(name, 1.0) for name in names] or [1.0] for of_group in known]
    return Grades(
        rewards=rewards,
        correct=fill_with_sibling_mean(each(lambda _, r: r.is_correct if r.is_judged else math.nan)),
        lengths=each(lambda c, _: sum(sequence.length for sequence in (c, *c.branches))),
        parts=fill_with_sibling_mean(terms).nan_to_num(0.0) if names else rewards[..., None],
        weights=torch.tensor(weights, dtype=torch.float64),
    )
