"""Rollouts as tensors: records become a Batch to train on, and Grades that advantages are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.algorithm.advantages import Grades
from pellucid.algorithm.sampling_mask import SamplingMask, collated
from pellucid.types import Completion, Group, Reward


@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors; each row is one completion.

    Example: prompts of 5 and 6 tokens, G = 2 and completions of 2, 3, 1 and 3 tokens give P = 2, B = 4, T = 3 and
    mask = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]. The end-of-sequence token is a token like any other.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    """The prompts of the batch, one for each group."""
    prefix_lengths: tuple[int, ...]
    """Of each prompt, how many tokens at its end were given as the beginning of the answer."""
    prefix_ends: tuple[int | None, ...]
    """Of each prompt, the end-of-sequence token that belongs behind its prefix, where that is a whole answer."""
    prompt_of: Tensor
    """[B] the index of each row's prompt in prompt_ids."""
    response_ids: Tensor
    """[B, T] padded on the right; what the padding holds is never looked at."""
    mask: Tensor
    """[B, T] bool: true on the tokens of the response. Made from lengths, since pad may equal EOS."""
    finished: Tensor
    """[B] bool: ended with an end-of-sequence token."""
    sampler_logprobs: Tensor
    """[B, T] log-probs as the sampler reported them."""
    mask_words: Tensor | None = None
    """[M]: sampling masks, end to end, where the sampler truncates."""
    mask_spans: Tensor | None = None
    """[B, T, 2]: where in them that of each token begins and ends."""
    old_logprobs: Tensor | None = None
    """[B, T] log-probs under the policy at the start of the update; None where that is the one being updated."""
    ref_logprobs: Tensor | None = None
    """[B, T] log-probs under the reference."""
    kl: Tensor | None = None
    """[B, T] KL to the reference when the rollouts were drawn, where the reward is charged with it."""
    entropy_mask: Tensor | None = None
    """[B, T] bool: tokens that get the objective's gradient; None means all."""
    advantages: Tensor | None = None
    """[B]"""
    clip_high: Tensor | None = None
    """[B] the upper clip of each row, where the difficulty of its prompt sets it."""
    weights: Tensor | None = None
    """[B, T] share of each token in the loss."""

    def __post_init__(self) -> None:
        if not all(self.prompt_ids):
            raise ValueError("a prompt without a token: there is nothing to predict its response from")

    def __len__(self) -> int:
        return len(self.prompt_of)

    def rows(self, index: slice | Tensor) -> Batch:
        """A batch of some rows, cut to the length of their longest response."""
        width = int(self.mask[index].sum(-1).max())
        chosen = {name: x[index] for name, x in self.tensors().items() if name != "mask_words"}
        return replace(self, **{name: x[:, :width] if x.dim() > 1 else x for name, x in chosen.items()})

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    def sampling_mask(self, device: torch.device) -> SamplingMask | None:
        """The sampling mask of all response tokens, row by row; None where the sampler does not truncate."""
        if self.mask_words is None or self.mask_spans is None:
            return None
        return SamplingMask(self.mask_words.to(device), self.mask_spans[self.mask].to(device))

    def to(self, device: torch.device) -> Batch:
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})

    def chunks(self, size: int) -> list[Batch]:
        """Consecutive batches of at most `size` rows; 0 means one."""
        return [self.rows(slice(i, i + size)) for i in range(0, len(self), size)] if size else [self]


def collate(groups: Sequence[Group], device: torch.device) -> Batch:
    completions = [c for g in groups for c in g.completions]
    words, spans = (None, None)
    if completions[0].sampling_mask:
        words, spans = (x.to(device) for x in collated([c.sampling_mask for c in completions]))
    return Batch(
        prompt_ids=tuple(g.prompt_ids for g in groups),
        prefix_lengths=tuple(g.prefix_length for g in groups),
        prefix_ends=tuple(g.prefix_end for g in groups),
        prompt_of=torch.tensor([p for p, g in enumerate(groups) for _ in g.completions], device=device),
        response_ids=padded([c.token_ids for c in completions], torch.long).to(device),
        mask=mask_of([len(c.token_ids) for c in completions]).to(device),
        finished=torch.tensor([c.finished for c in completions], device=device),
        sampler_logprobs=padded([c.logprobs for c in completions], torch.float32).to(device),
        mask_words=words,
        mask_spans=spans,
    )


def prefix_rows(batch: Batch) -> Batch | None:
    """A batch whose rows are the prefixes of the prompts, as responses to what stands before them; None without any."""
    prompts = [p for p in batch.prompt_of.unique().tolist() if batch.prefix_lengths[p]]
    if not prompts:
        return None
    cuts = [(batch.prompt_ids[p], -batch.prefix_lengths[p], batch.prefix_ends[p]) for p in prompts]
    responses = [ids[cut:] if end is None else (*ids[cut:], end) for ids, cut, end in cuts]
    device, mask = batch.mask.device, mask_of([len(ids) for ids in responses])
    return Batch(
        prompt_ids=tuple(ids[:cut] for ids, cut, _ in cuts),
        prefix_lengths=(0,) * len(prompts),
        prefix_ends=(None,) * len(prompts),
        prompt_of=torch.arange(len(prompts), device=device),
        response_ids=padded(responses, torch.long).to(device),
        mask=mask.to(device),
        finished=torch.tensor([end is not None for _, _, end in cuts], device=device),
        sampler_logprobs=torch.zeros(mask.shape, device=device),
    )


def padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def mask_of(lengths: Sequence[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def concat(batches: Sequence[Batch]) -> Batch:
    first, *rest = batches
    if not rest:
        return first
    width = max(b.mask.shape[1] for b in batches)
    columns = {name: [b.tensors()[name] for b in batches] for name in first.tensors()}
    tensors = {name: stacked(x, width) if x[0].dim() > 1 else torch.cat(x) for name, x in columns.items()}
    tensors["prompt_of"] = torch.cat(moved(columns["prompt_of"], [len(b.prompt_ids) for b in batches]))
    if "mask_words" in columns:
        moved_spans = moved(columns["mask_spans"], [len(words) for words in columns["mask_words"]])
        tensors["mask_spans"] = stacked(moved_spans, width)
    return replace(
        first,
        prompt_ids=tuple(ids for b in batches for ids in b.prompt_ids),
        prefix_lengths=tuple(n for b in batches for n in b.prefix_lengths),
        prefix_ends=tuple(end for b in batches for end in b.prefix_ends),
        **tensors,
    )


def moved(places: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Shift indices into lists of these sizes to indices into their concatenation."""
    return [x + sum(sizes[:i]) for i, x in enumerate(places)]


def stacked(tensors: Sequence[Tensor], width: int) -> Tensor:
    """[b, t, ...] each -> [B, width, ...], padded on the right."""
    return torch.cat([F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[1])) for x in tensors])


def task_rewards(groups: Sequence[Group]) -> Tensor:
    """[P, G] float64. A reward that failed counts as the mean of its siblings; 0 where all did."""
    known = [[math.nan if r.failed else r.value for r in g.rewards] for g in groups]
    return like_siblings(torch.tensor(known, dtype=torch.float64)).nan_to_num(0.0)


def like_siblings(known: Tensor) -> Tensor:
    """Replace values [P, G, ...] that are not finite by the mean of their group's others; NaN where there is none."""
    known = known.masked_fill(~known.isfinite(), torch.nan)
    return torch.where(known.isnan(), known.nanmean(1, keepdim=True), known)


def grades_of(groups: Sequence[Group]) -> Grades:
    """The Grades of one step's groups. A reward term that failed or does not apply counts as its siblings' mean."""

    def each(value: Callable[[Completion, Reward], Any]) -> Tensor:
        rows = [[value(*pair) for pair in zip(g.completions, g.rewards, strict=True)] for g in groups]
        return torch.tensor(rows, dtype=torch.float64)

    rewards = task_rewards(groups)
    names = list({name: None for g in groups for r in g.rewards for name in r.parts})
    terms = each(lambda _, r: [math.nan if r.failed else r.parts.get(name, math.nan) for name in names])  # [P, G, K]
    known = [{name: weight for r in g.rewards for name, weight in r.weights.items()} for g in groups]
    weights = [[of_group.get(name, 1.0) for name in names] or [1.0] for of_group in known]
    return Grades(
        rewards=rewards,
        correct=like_siblings(each(lambda _, r: math.nan if r.failed else r.is_correct)),
        lengths=each(lambda c, _: len(c.token_ids)),
        parts=like_siblings(terms).nan_to_num(0.0) if names else rewards[..., None],
        weights=torch.tensor(weights, dtype=torch.float64),
    )
