"""Draws against the exact CDF; what is cut off and how draws are spread is in test_samplers.py."""

from __future__ import annotations

import pytest
import torch

from pellucid.models.sampling import sample_tokens


@pytest.mark.slow
def test_a_large_vocabulary_is_drawn_from_to_the_last_bit_of_its_cdf():
    """Stretches of 1e-5 and a CDF in fp32, off by 1e-7, would give one draw in a hundred to a neighbour."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 100_000, generator=generator)
    uniforms = torch.rand(4096, dtype=torch.float64, generator=generator)
    cdf = logits[0].double().softmax(-1).cumsum(-1)
    drawn, _ = sample_tokens(logits.expand(4096, -1), uniforms, 1.0)
    others = int((drawn != torch.searchsorted(cdf, uniforms, right=True)).sum())
    assert others <= 8
