"""Distributions of chosen tokens, looked into: the likeliest tokens, the entropy, and how hard a loss pulls at them.

In chunks as logprobs.py does: never an [N, V] tensor of all tokens. N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.policy.logprobs import (
    MAX_ELEMENTWISE_LOGITS,
    ScoreContext,
    count_chunk_rows,
    score_logits,
    write_product_gradients,
)

TOP_TOKEN_COUNT = 5
"""How many of the likeliest tokens are named, where there are as many."""


class TokenStatistics(NamedTuple):
    """What N distributions look like; nats."""

    logprobs: Tensor
    """[N] of the tokens that were chosen."""
    entropy: Tensor
    """[N]"""
    top_ids: Tensor
    """[N, LIKELIEST] ids, likeliest first."""
    top_logprobs: Tensor
    """[N, LIKELIEST]; -inf where a distribution is truncated to fewer tokens."""
    gradient_norm: Tensor
    """[N] the norm of the gradient with respect to the logits, as the head gives them, before the temperature; 0 where
    there is no loss."""


class LossGradients(NamedTuple):
    """Of a loss, with respect to what a distribution is read for; [N] each."""

    logprob_grad: Tensor
    entropy_grad: Tensor
    kl_grad: Tensor


@torch.no_grad()
def compute_token_statistics(
    hidden: Tensor, tokens: Tensor, context: ScoreContext, gradients: LossGradients | None = None
) -> TokenStatistics:
    """Examine the distributions that these tokens [N] were chosen from, by the hidden states [N, D] before them.

    The norm is of the whole loss: all of it comes to the logits through these gradients.
    """
    parts = []
    for rows in torch.arange(len(tokens), device=tokens.device).split(
        count_chunk_rows(context.head.weight, MAX_ELEMENTWISE_LOGITS)
    ):
        of_rows = None if gradients is None else LossGradients(*(x[rows] for x in gradients))
        parts.append(compute_chunk_statistics(hidden[rows], tokens[rows], select_rows(context, rows), of_rows))
    return TokenStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def select_rows(context: ScoreContext, rows: Tensor) -> ScoreContext:
    """How these rows, by index or mask, are read when they stand alone."""
    ref_hidden = None if context.ref_hidden is None else context.ref_hidden[rows]
    among = None if context.sampling_mask is None else context.sampling_mask.select_tokens(rows)
    return context._replace(ref_hidden=ref_hidden, sampling_mask=among)


def compute_chunk_statistics(
    hidden: Tensor, tokens: Tensor, context: ScoreContext, gradients: LossGradients | None
) -> TokenStatistics:
    every = torch.arange(len(tokens), device=tokens.device)
    product = context.head.project(hidden)
    product = product.to(torch.promote_types(product.dtype, torch.float32))
    among = context.get_candidates(every)
    places = tokens if among is None else among.find_indices(tokens)
    z = context.compute_logits(product if gradients is None else product.clone(), among)
    logprobs, entropy, kl, log_normalizer = score_logits(z, places, context.compute_ref_logprobs(every, among))
    highest, ids = z.topk(min(TOP_TOKEN_COUNT, z.shape[-1]))
    likeliest = ids if among is None else among.ids.gather(-1, ids)
    known = highest - log_normalizer[:, None]
    known = known if among is None else known.masked_fill(~among.is_valid.gather(-1, ids), -torch.inf)
    lacking = TOP_TOKEN_COUNT - known.shape[1]
    likeliest, known = (
        torch.nn.functional.pad(x, (0, lacking), value=value) for x, value in ((likeliest, 0), (known, -torch.inf))
    )
    if gradients is None:
        return TokenStatistics(logprobs, entropy, likeliest, known, torch.zeros_like(logprobs))
    write_product_gradients(product, every, context, (tokens, entropy, kl, log_normalizer), gradients)
    return TokenStatistics(logprobs, entropy, likeliest, known, product.norm(dim=-1))
