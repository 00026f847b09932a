"""A token for each row, by the sampling that was asked for."""

from __future__ import annotations

from torch import Tensor

from pellucid.algorithm.sampling_mask import masks_of
from pellucid.models.drawing import Truncation, draw, draw_among
from pellucid.types import Sampling


def drawn(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A token for each row, its log-prob, and its sampling mask where the sampler truncates."""
    if not sampling.truncates:
        return *draw(logits, uniforms, sampling.temperature), []
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    token, logprob, kept = draw_among(logits, uniforms, sampling.temperature, truncation)
    return token, logprob, masks_of(kept)
