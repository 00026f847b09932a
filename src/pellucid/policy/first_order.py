"""What an update should have done to log-probs if they were linear in the weights: grad log pi . (after - before)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from pellucid.algorithm.batch import Batch
from pellucid.models.packed import hidden_states
from pellucid.policy.examined import rows_of
from pellucid.policy.head import Head
from pellucid.policy.logprobs import FEW, Reading, read, rows_at_once
from pellucid.policy.policy import Policy
from pellucid.policy.scorer import Scorer


def kept(policy: Policy) -> dict[str, Tensor]:
    """A copy of the trained weights, unrounded, in the memory of the CPU."""
    return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in policy.masters().items()}


@torch.no_grad()
def first_order(policy: Policy, batch: Batch, before: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[N] the log-probs of the N sampled tokens at these weights, and [N] their change to first order, from these
    weights to those of now.

    One forward pass at the weights before, with what they have moved by as the direction of a forward-mode gradient.
    The policy's own weights are left as they are. In one process: not for parameters that are shared out.
    """
    names, now = {id(p): name for name, p in policy.trainable().items()}, policy.masters()
    with forward_ad.dual_level(), in_place(policy.scorer), sdpa_kernel(SDPBackend.MATH):
        moving = {}
        for place, p in policy.scorer.named_parameters():
            if name := names.get(id(p)):
                step = now[name].detach() - before[name].to(now[name].device)
                moving[place] = forward_ad.make_dual(before[name].to(p), step.to(p))
        logprobs = functional_call(policy.scorer, moving, (logprobs_of, policy.scorer, batch))
        primal, tangent = forward_ad.unpack_dual(logprobs)
        assert tangent is not None
        return primal.clone(), tangent.clone()


@contextmanager
def in_place(scorer: Scorer) -> Iterator[None]:
    """The decoder reads the parameters that stand in its modules, and none of the copies that it keeps. Nothing is
    recomputed: a forward pass keeps no activations, and torch 2.8 has no forward-mode gradient of a recomputed one.
    """
    parts = scorer.decoder.list_cast_weights() if scorer.decoder else []
    recomputes, scorer.gradient_checkpointing = scorer.gradient_checkpointing, False
    for part in parts:
        part.is_uncached = True
    try:
        yield
    finally:
        scorer.gradient_checkpointing = recomputes
        for part in parts:
            part.is_uncached = False


def logprobs_of(scorer: Scorer, batch: Batch) -> Tensor:
    """[N] of the sampled tokens, by operations that have forward-mode gradients."""
    if scorer.decoder:
        hidden, matrix = hidden_states(scorer.decoder, batch)
        head = Head(*matrix)
    else:
        hidden, head = scorer.compute_hidden_states(batch)
    head = head._replace(weight=head.master.to(hidden.dtype))
    tokens = batch.response_ids[batch.scored_mask].to(hidden.device)
    reading = Reading(head, scorer.temperature, False, None, None, batch.get_sampling_mask(hidden.device))
    found = []
    for rows in torch.arange(len(tokens), device=tokens.device).split(rows_at_once(head.weight, FEW)):
        every = torch.arange(len(rows), device=rows.device)
        found.append(read(head.project(hidden[rows]), tokens[rows], rows_of(reading, rows), every)[0])
    return torch.cat(found)
