"""Distributions of chosen tokens, looked into: the likeliest tokens, the entropy, and how hard a loss pulls at them.

In chunks as logprobs.py does: never an [N, V] tensor of all tokens. N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.policy.logprobs import FEW, Reading, measured, of_logits_into, rows_at_once

LIKELIEST = 5
"""How many of the likeliest tokens are named, where there are as many."""


class Examined(NamedTuple):
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


class Gradients(NamedTuple):
    """Of a loss, with respect to what a distribution is read for; [N] each."""

    logprob_grad: Tensor
    entropy_grad: Tensor
    kl_grad: Tensor


@torch.no_grad()
def examined(hidden: Tensor, tokens: Tensor, context: Reading, gradients: Gradients | None = None) -> Examined:
    """Examine the distributions that these tokens [N] were chosen from, by the hidden states [N, D] before them.

    The norm is of the whole loss: all of it comes to the logits through these gradients.
    """
    parts = []
    for rows in torch.arange(len(tokens), device=tokens.device).split(rows_at_once(context.head.weight, FEW)):
        of_rows = None if gradients is None else Gradients(*(x[rows] for x in gradients))
        parts.append(of_few(hidden[rows], tokens[rows], rows_of(context, rows), of_rows))
    return Examined(*(torch.cat(column) for column in zip(*parts, strict=True)))


def rows_of(context: Reading, rows: Tensor) -> Reading:
    """How these rows, by index or mask, are read when they stand alone."""
    ref_hidden = None if context.ref_hidden is None else context.ref_hidden[rows]
    among = None if context.sampling_mask is None else context.sampling_mask.select_tokens(rows)
    return context._replace(ref_hidden=ref_hidden, sampling_mask=among)


def of_few(hidden: Tensor, tokens: Tensor, context: Reading, gradients: Gradients | None) -> Examined:
    every = torch.arange(len(tokens), device=tokens.device)
    product = context.head.project(hidden)
    product = product.to(torch.promote_types(product.dtype, torch.float32))
    among = context.get_candidates(every)
    places = tokens if among is None else among.find_indices(tokens)
    z = context.compute_logits(product if gradients is None else product.clone(), among)
    logprobs, entropy, kl, log_normalizer = measured(z, places, context.compute_ref_logprobs(every, among))
    highest, ids = z.topk(min(LIKELIEST, z.shape[-1]))
    likeliest = ids if among is None else among.ids.gather(-1, ids)
    known = highest - log_normalizer[:, None]
    known = known if among is None else known.masked_fill(~among.is_valid.gather(-1, ids), -torch.inf)
    lacking = LIKELIEST - known.shape[1]
    likeliest, known = (
        torch.nn.functional.pad(x, (0, lacking), value=value) for x, value in ((likeliest, 0), (known, -torch.inf))
    )
    if gradients is None:
        return Examined(logprobs, entropy, likeliest, known, torch.zeros_like(logprobs))
    of_logits_into(product, every, context, (tokens, entropy, kl, log_normalizer), gradients)
    return Examined(logprobs, entropy, likeliest, known, product.norm(dim=-1))
