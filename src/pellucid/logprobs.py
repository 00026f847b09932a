"""Hidden states -> log-probs, entropy and exact KL of chosen tokens, in chunks: never a [B, T, V] tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25
"""Logits held at once: 128 MB in fp32, however many tokens there are and however large the vocabulary is."""


class Head(NamedTuple):
    """Hidden state -> logits. D hidden size, V vocabulary."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """Logits are multiplied by it (Cohere's logit_scale, Granite's 1 / logits_scaling)."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap) (Gemma 2); 0 is off."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V], reduced precision ends here: fp32 from now on."""
        logits = F.linear(hidden, self.weight, self.bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits * self.scale if self.scale != 1.0 else logits
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def token_logprobs(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    reference: tuple[Tensor, Head] | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of `tokens` [N] and entropy of their distributions, both [N], in nats.

    The distribution is softmax(logits / temperature), the whole of it. `hidden` [N, D] is where each token was
    predicted from. Logits are recomputed in the backward pass; the entropy has a gradient only if asked for. With the
    hidden states and the head of a reference, a third: KL(distribution, reference's), summed over the vocabulary.
    """
    size = max(1, CHUNK_ELEMENTS // head.weight.shape[0])
    others = (
        [(None, None)] * len(tokens) if reference is None else [(h, reference[1]) for h in reference[0].split(size)]
    )
    chunks = [
        checkpoint(_chunk, h, head, t, temperature, entropy_grad, *other, use_reentrant=False, preserve_rng_state=False)
        for h, t, other in zip(hidden.split(size), tokens.split(size), others, strict=False)
    ]
    return tuple(torch.cat(column) for column in zip(*chunks, strict=True))


def _chunk(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    temperature: float,
    entropy_grad: bool,
    ref_hidden: Tensor | None,
    ref_head: Head | None,
) -> tuple[Tensor, ...]:
    logits = head.logits(hidden) / temperature
    log_normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - log_normalizer
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probs = (logits - log_normalizer[:, None]).exp()
        entropy = log_normalizer - (probs * logits).sum(-1)
    if ref_hidden is None or ref_head is None:
        return logprobs, entropy
    with torch.no_grad():
        ref_distribution = (ref_head.logits(ref_hidden) / temperature).log_softmax(-1).to(logits)
    distribution = logits - log_normalizer[:, None]
    return logprobs, entropy, (distribution.exp() * (distribution - ref_distribution)).sum(-1)
