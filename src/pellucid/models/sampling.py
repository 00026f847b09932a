"""Tokens from logits: one random number a token, exact log-probs, and what serving cuts off."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.models.native import select_kernels
from pellucid.models.ops import compute_masses, invert_cdf


class Truncation(NamedTuple):
    """Tokens that are never drawn."""

    top_k: int = 0
    """All but the k likeliest; 0 is off."""
    top_p: float = 1.0
    """All but the likeliest that together reach p (nucleus sampling, arXiv 1904.09751); 1 is off."""
    min_p: float = 0.0
    """Those less than p times as likely as the likeliest (arXiv 2407.01082); 0 is off."""


NO_TRUNCATION = Truncation()


def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float, truncation: Truncation = NO_TRUNCATION
) -> tuple[Tensor, Tensor]:
    """One token for each row of `logits` [B, V] and its log-prob, by inverting the CDF at `uniforms` [B] in [0, 1).

    `uniforms` are float64, and lie where float64 sums are to be made: beside the logits, or on the CPU.

    The log-prob is that of softmax(logits / temperature), the whole of it, truncated or not; greedy tokens
    (temperature 0) carry theirs at temperature 1.

    Its sums are float64 and in two levels, blocks of tokens and tokens of one block: forty times faster than
    torch.multinomial for a vocabulary of 49152 on a CPU, and a token without probability is never drawn.
    """
    if truncation == NO_TRUNCATION or temperature == 0.0:
        token, mass, total = select_kernels(logits, logits.dtype, logits.shape[-1]).sample_with_masses(
            logits, uniforms, temperature
        )
        return token, mass.log() - total.log()
    masses = compute_masses(logits, temperature)
    token = invert_cdf(truncate_masses(masses, truncation, uniforms.device), uniforms)
    return token, masses.gather(-1, token[:, None])[:, 0].log() - masses.sum(-1).log()


def sample_tokens_with_mask(
    logits: Tensor, uniforms: Tensor, temperature: float, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor]:
    """As `draw`, and the log-prob is that of what the token was drawn from: with it, [B, V] bool, what that was."""
    left = truncate_masses(compute_masses(logits, temperature), truncation, uniforms.device)
    token = invert_cdf(left, uniforms)
    mass = left.gather(-1, token[:, None])[:, 0]
    return token, mass.log() - left.sum(-1).log(), left > 0


def find_top_tokens(logits: Tensor, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row [B, k], the likeliest first, and their log-probs as `draw` has them."""
    masses = compute_masses(logits, temperature)
    most = masses.topk(min(k, masses.shape[-1]))
    return most.indices, most.values.log() - masses.sum(-1, keepdim=True).log()


def truncate_masses(masses: Tensor, truncation: Truncation, sum_device: torch.device | None = None) -> Tensor:
    """Unnormalised probabilities [B, V], 0 for tokens that are left out; one after the other, each of what is left.

    sums: where float64 sums are made, if not beside the masses.
    """
    if 0 < truncation.top_k < masses.shape[-1]:
        masses = masses.masked_fill(masses < masses.topk(truncation.top_k).values[:, -1:], 0.0)
    if truncation.top_p < 1.0:
        masses = masses.masked_fill(
            masses < find_top_p_threshold(masses, truncation.top_p, sum_device or masses.device), 0.0
        )
    if truncation.min_p > 0.0:
        masses = masses.masked_fill(masses < truncation.min_p * masses.amax(-1, keepdim=True), 0.0)
    return masses


def find_top_p_threshold(masses: Tensor, top_p: float, sum_device: torch.device) -> Tensor:
    """[B, 1]: of the likeliest tokens that together reach top_p, the mass of the last.

    Sorting all of them takes four times as long as the model does. All below (1 - top_p) / V together have less than
    1 - top_p, and are not needed; the others are put into bins, and the bin in which their sum reaches top_p is sorted.
    """
    total = masses.sum(-1, keepdim=True)
    row, token = (masses >= total * ((1 - top_p) / masses.shape[-1])).nonzero(as_tuple=True)
    highest, mass = masses.amax(-1).float(), masses[row, token].float()
    # The bits of positive floats are in the order of the floats: exponent and three bits more, eight bins a halving.
    bins = (highest.view(torch.int32)[row] - mass.view(torch.int32)) >> 20
    row, mass, bins, wanted = (
        row.to(sum_device),
        mass.to(sum_device),
        bins.to(sum_device),
        top_p * total.to(sum_device, torch.float64),
    )
    rows, width = torch.arange(len(masses), device=sum_device), int(bins.max()) + 1
    of_bins = torch.bincount(row * width + bins, mass.double(), len(masses) * width).view(-1, width)
    before = of_bins.cumsum(-1) - of_bins
    last = torch.where((before < wanted) & (of_bins > 0), torch.arange(width, device=sum_device), 0).amax(-1)
    row, mass = row[bins == last[row]], mass[bins == last[row]]
    counts = row.bincount(minlength=len(masses))
    few = mass.new_zeros(len(masses), int(counts.max()))
    few[row, torch.arange(len(row), device=sum_device) - (counts.cumsum(0) - counts)[row]] = mass
    ordered = few.sort(descending=True).values
    above = before[rows, last][:, None] + ordered.cumsum(-1, dtype=torch.float64) - ordered
    inside = (above < wanted).sum(-1, keepdim=True)
    # Rounding may leave a little to reach where there is nothing more.
    return ordered.gather(-1, torch.minimum(inside, counts[:, None]) - 1).to(masses.device, masses.dtype)
