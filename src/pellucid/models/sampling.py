"""Sampling tokens from logits, with one random number per token, exact log-probs, and truncation."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.models import ops
from pellucid.models.native import select_kernels
from pellucid.models.ops import compute_masses, invert_cdf


class Truncation(NamedTuple):
    """Which tokens are never sampled."""

    top_k: int = 0
    """Keep the k most probable tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach p (nucleus sampling, arXiv 1904.09751); 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least p times as probable as the most probable one (arXiv 2407.01082); 0 is off."""


NO_TRUNCATION = Truncation()


def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float, truncation: Truncation = NO_TRUNCATION
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    It is 40 times as fast as torch.multinomial for a vocabulary of 49152 on a CPU, and never samples a token without
    probability.

    Args:
        logits: [B, V]
        uniforms: [B] random numbers in [0, 1), float64. Cumulative sums are computed on their device, which
            is that of the logits or the CPU.
        temperature: 0 for the most probable token.
        truncation: Which tokens are never sampled.

    Returns:
        The tokens [B] and their log-probs [B] in softmax(logits / temperature), without truncation; at temperature 0,
        those of temperature 1.
    """
    if truncation == NO_TRUNCATION or temperature == 0.0:
        can_use_triton = logits.dtype == torch.float32 and logits.device.type == uniforms.device.type == "cuda"
        if can_use_triton and (sample := _load_triton_sampler(logits.device)):
            return sample(logits, uniforms, temperature)
        return _sample_by_masses(logits, uniforms, temperature)
    masses = compute_masses(logits, temperature)
    token = invert_cdf(truncate_masses(masses, truncation, uniforms.device), uniforms)
    return token, masses.gather(-1, token[:, None])[:, 0].log() - masses.sum(-1).log()


def _sample_by_masses(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    kernels = ops if logits.device.type == "cuda" else select_kernels(logits, logits.dtype, logits.shape[-1])
    token, mass, total = kernels.sample_with_masses(logits, uniforms, temperature)
    return token, mass.log() - total.log()


@functools.cache
def _load_triton_sampler(device: torch.device) -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None:
    """Return `triton_decode.sample_tokens`; None, after a warning, if it does not sample as `ops` does on this GPU."""
    try:
        from pellucid.models import triton_decode, triton_ops  # noqa: PLC0415 - Triton is imported only on a GPU
    except ImportError:
        return None
    logits = 4 * torch.randn(16, 8528, generator=torch.Generator().manual_seed(0))
    logits[3, 100:] = -torch.inf
    uniforms = torch.linspace(0, 1, len(logits) + 1, dtype=torch.float64)[:-1].to(device)
    logits, fault = logits.to(device), ""
    try:
        for temperature in (1.0, 0.7, 0.0):
            tokens, logprobs = triton_decode.sample_tokens(logits, uniforms, temperature)
            expected_tokens, expected = _sample_by_masses(logits, uniforms, temperature)
            if not torch.equal(tokens, expected_tokens) or not bool((logprobs - expected).abs().max() < 1e-4):
                fault = f"other tokens or log-probs at temperature {temperature}"
    except triton_ops.KERNEL_ERRORS as error:
        fault = triton_ops.describe_error(error)
    if not fault:
        return triton_decode.sample_tokens
    warnings.warn(f"tokens are sampled without Triton's kernels: {fault}", stacklevel=2)
    return None


def sample_tokens_with_mask(
    logits: Tensor, uniforms: Tensor, temperature: float, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample as `sample_tokens` does, with log-probs in the truncated distribution.

    Also return which tokens have probability after truncation, [B, V] bool.
    """
    remaining = truncate_masses(compute_masses(logits, temperature), truncation, uniforms.device)
    token = invert_cdf(remaining, uniforms)
    mass = remaining.gather(-1, token[:, None])[:, 0]
    return token, mass.log() - remaining.sum(-1).log(), remaining > 0


def find_top_tokens(logits: Tensor, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of each row [B, k] in descending order, and their log-probs."""
    masses = compute_masses(logits, temperature)
    top = masses.topk(min(k, masses.shape[-1]))
    return top.indices, top.values.log() - masses.sum(-1, keepdim=True).log()


def truncate_masses(masses: Tensor, truncation: Truncation, sum_device: torch.device | None = None) -> Tensor:
    """Set the masses [B, V] of truncated tokens to 0: top-k, then top-p of the rest, then min-p of the rest.

    Sums in float64 are computed on `sum_device`, or else on that of the masses.
    """
    if 0 < truncation.top_k < masses.shape[-1]:
        masses = masses.masked_fill(masses < masses.topk(truncation.top_k).values[:, -1:], 0.0)
    if truncation.top_p < 1.0:
        masses = masses.masked_fill(
            masses < _find_top_p_threshold(masses, truncation.top_p, sum_device or masses.device), 0.0
        )
    if truncation.min_p > 0.0:
        masses = masses.masked_fill(masses < truncation.min_p * masses.amax(-1, keepdim=True), 0.0)
    return masses


def _find_top_p_threshold(masses: Tensor, top_p: float, sum_device: torch.device) -> Tensor:
    """Return the smallest mass [B, 1] among the most probable tokens that together reach top_p.

    Sorting all tokens would take four times as long as the model. Tokens below (1 - top_p) / V together have less than
    1 - top_p, and are not needed. The others are put into bins, and only the bin in which their sum reaches top_p is
    sorted.
    """
    total = masses.sum(-1, keepdim=True)
    row, token = (masses >= total * ((1 - top_p) / masses.shape[-1])).nonzero(as_tuple=True)
    highest, mass = masses.amax(-1).float(), masses[row, token].float()
    # Bit patterns of positive floats have the order of the floats: exponent and 3 more bits make 8 bins per octave.
    bins = (highest.view(torch.int32)[row] - mass.view(torch.int32)) >> 20
    row, mass, bins = (x.to(sum_device) for x in (row, mass, bins))
    target = top_p * total.to(sum_device, torch.float64)
    rows, width = torch.arange(len(masses), device=sum_device), int(bins.max()) + 1
    bin_masses = torch.bincount(row * width + bins, mass.double(), len(masses) * width).view(-1, width)
    before = bin_masses.cumsum(-1) - bin_masses
    last_bin = torch.where((before < target) & (bin_masses > 0), torch.arange(width, device=sum_device), 0).amax(-1)
    row, mass = row[bins == last_bin[row]], mass[bins == last_bin[row]]
    counts = row.bincount(minlength=len(masses))
    candidates = mass.new_zeros(len(masses), int(counts.max()))
    candidates[row, torch.arange(len(row), device=sum_device) - (counts.cumsum(0) - counts)[row]] = mass
    ordered = candidates.sort(descending=True).values
    above = before[rows, last_bin][:, None] + ordered.cumsum(-1, dtype=torch.float64) - ordered
    inside = (above < target).sum(-1, keepdim=True)
    # Because of rounding, all candidates together may stay below the target.
    return ordered.gather(-1, torch.minimum(inside, counts[:, None]) - 1).to(masses.device, masses.dtype)
