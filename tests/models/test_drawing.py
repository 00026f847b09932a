"""Tests of draws against the exact CDF. test_samplers.py tests truncation and the distribution of draws."""

from __future__ import annotations

import pytest
import torch

from pellucid.models.sampling import sample_tokens


@pytest.mark.slow
def test_draws_from_a_large_vocabulary_follow_its_fp64_cdf():
    """A token has a probability of 1e-5. A CDF in fp32, off by 1e-7, would give 1% of the draws to a neighbor."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 100_000, generator=generator)
    uniforms = torch.rand(4096, dtype=torch.float64, generator=generator)
    cdf = logits[0].double().softmax(-1).cumsum(-1)
    drawn, _ = sample_tokens(logits.expand(4096, -1), uniforms, 1.0)
    others = int((drawn != torch.searchsorted(cdf, uniforms, right=True)).sum())
    assert others <= 8
