"""Statistics of token distributions: the likeliest tokens, entropy, and the norm of the gradient.

They are computed in chunks, as log-probs are. N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.policy.logprobs import (
    ScoreContext,
    count_elementwise_rows,
    score_logits,
    write_product_gradients,
)

_TOP_TOKEN_COUNT = 5
"""How many of the likeliest tokens are listed."""


class TokenStatistics(NamedTuple):
    """Statistics of N distributions, in nats."""

    logprobs: Tensor
    """[N] of the given tokens."""
    entropy: Tensor
    """[N]"""
    top_ids: Tensor
    """[N, _TOP_TOKEN_COUNT] ids, the likeliest first."""
    top_logprobs: Tensor
    """[N, _TOP_TOKEN_COUNT]; -inf after the last token of a truncated distribution."""
    gradient_norm: Tensor
    """[N] the norm of the gradient with respect to the head's output, before the temperature; 0 without a loss."""


class LossGradients(NamedTuple):
    """Gradients of a loss with respect to log-probs, entropy and KL, [N] each."""

    logprob_grad: Tensor
    entropy_grad: Tensor
    kl_grad: Tensor


@torch.no_grad()
def compute_token_statistics(
    hidden: Tensor, tokens: Tensor, context: ScoreContext, gradients: LossGradients | None = None
) -> TokenStatistics:
    """Compute statistics of the distributions of tokens.

    Args:
        hidden: [N, D] the hidden states that the tokens are predicted from.
        tokens: [N]
        context: how hidden states become log-probs.
        gradients: of a loss that depends on the logits only through these, so the norm is that of the whole loss.
    """
    parts = []
    for rows in torch.arange(len(tokens), device=tokens.device).split(count_elementwise_rows(context.head.weight)):
        row_gradients = None if gradients is None else LossGradients(*(x[rows] for x in gradients))
        parts.append(_compute_chunk_statistics(hidden[rows], tokens[rows], select_rows(context, rows), row_gradients))
    return TokenStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def select_rows(context: ScoreContext, rows: Tensor) -> ScoreContext:
    """Return the context of some rows, by index or mask."""
    ref_hidden = None if context.ref_hidden is None else context.ref_hidden[rows]
    mask = None if context.sampling_mask is None else context.sampling_mask.select_tokens(rows)
    return context._replace(ref_hidden=ref_hidden, sampling_mask=mask)


def _compute_chunk_statistics(
    hidden: Tensor, tokens: Tensor, context: ScoreContext, gradients: LossGradients | None
) -> TokenStatistics:
    every = torch.arange(len(tokens), device=tokens.device)
    product = context.head.project(hidden)
    product = product.to(torch.promote_types(product.dtype, torch.float32))
    candidates = context.get_candidates(every)
    indices = tokens if candidates is None else candidates.find_indices(tokens)
    z = context.compute_logits(product, candidates)  # may be the product itself, which is overwritten at the end
    logprobs, entropy, kl, log_normalizer = score_logits(z, indices, context.compute_ref_logprobs(every, candidates))
    highest, ids = z.topk(min(_TOP_TOKEN_COUNT, z.shape[-1]))
    top_ids, top_logprobs = ids, highest - log_normalizer[:, None]
    if candidates is not None:
        top_ids = candidates.ids.gather(-1, ids)
        top_logprobs = top_logprobs.masked_fill(~candidates.is_valid.gather(-1, ids), -torch.inf)
    lacking = _TOP_TOKEN_COUNT - top_logprobs.shape[1]
    top_ids, top_logprobs = (
        torch.nn.functional.pad(x, (0, lacking), value=value) for x, value in ((top_ids, 0), (top_logprobs, -torch.inf))
    )
    if gradients is None:
        return TokenStatistics(logprobs, entropy, top_ids, top_logprobs, torch.zeros_like(logprobs))
    write_product_gradients(product, product, every, context, (tokens, entropy, kl, log_normalizer), gradients)
    return TokenStatistics(logprobs, entropy, top_ids, top_logprobs, product.norm(dim=-1))
