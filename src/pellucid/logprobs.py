"""Hidden states -> log-probs, entropy and exact KL of chosen tokens, in chunks: never a [B, T, V] tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def slope(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient [N, V] before scale and softcap, from that of the logits."""
        grad = grad * (1 - (logits / self.softcap).square()) if self.softcap else grad
        return grad * self.scale


class Reading(NamedTuple):
    """How hidden states are read: all that the functions below need besides tensors."""

    head: Head
    temperature: float
    entropy_grad: bool
    ref_hidden: Tensor | None
    ref_head: Head | None

    def distribution(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V] logits at the temperature."""
        logits = self.head.logits(hidden)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def reference(self, rows: slice | Tensor) -> Tensor | None:
        """[n, V] log-probs of the reference."""
        if self.ref_hidden is None or self.ref_head is None:
            return None
        return (self.ref_head.logits(self.ref_hidden[rows]) / self.temperature).log_softmax(-1)


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
    reading = Reading(head, temperature, entropy_grad, *(reference or (None, None)))
    logprobs, entropy, kl = TokenLogprobs.apply(hidden, head.weight, head.bias, tokens, reading)  # pyright: ignore
    return (logprobs, entropy) if reference is None else (logprobs, entropy, kl)


class TokenLogprobs(torch.autograd.Function):
    """With z the logits at the temperature, p their softmax, H its entropy, q the reference:

    d log p[token] / dz = onehot(token) - p
    d H / dz = -p (log p + H)
    d KL / dz = p (log p - log q - KL)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, reading: Reading
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [_read(hidden[rows], tokens[rows], reading, rows) for rows in _chunks(len(tokens), weight)]
        logprobs, entropy, kl, log_normalizer = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, tokens, entropy, kl, log_normalizer)
        ctx.reading = reading
        if not reading.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, tokens, entropy, kl, log_normalizer = ctx.saved_tensors
        reading = ctx.reading._replace(head=ctx.reading.head._replace(weight=weight, bias=bias))
        of_logprob, of_entropy, of_kl = (g[:, None] for g in grads)
        live = (torch.stack(grads) != 0).any(0).nonzero()[:, 0]  # a token that weighs nothing costs nothing
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=log_normalizer.dtype)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=log_normalizer.dtype)
        for rows in live.split(_chunk_size(weight)):
            z = reading.distribution(hidden[rows])
            log_probs = z - log_normalizer[rows, None]
            probs = log_probs.exp()
            of_z = -of_logprob[rows] * probs
            of_z[torch.arange(len(rows), device=z.device), tokens[rows]] += of_logprob[rows, 0]
            if reading.entropy_grad:
                of_z -= of_entropy[rows] * probs * (log_probs + entropy[rows, None])
            if (other := reading.reference(rows)) is not None:
                of_z += of_kl[rows] * probs * (log_probs - other - kl[rows, None])
            of_logits = reading.head.slope(z * reading.temperature, of_z / reading.temperature).to(weight.dtype)
            of_hidden[rows] = of_logits @ weight
            of_weight += of_logits.mT @ hidden[rows]
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight.to(weight.dtype), None if of_bias is None else of_bias.to(weight.dtype), None, None


def _read(hidden: Tensor, tokens: Tensor, reading: Reading, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, KL and log-normaliser, [n] each."""
    z = reading.distribution(hidden)
    log_normalizer = z.logsumexp(-1)
    logprobs = z.gather(-1, tokens[:, None])[:, 0] - log_normalizer
    probs = (z - log_normalizer[:, None]).exp()
    entropy = log_normalizer - (probs * z).sum(-1)
    other = reading.reference(rows)
    kl = torch.zeros_like(entropy) if other is None else -entropy - (probs * other).sum(-1)
    return logprobs, entropy, kl, log_normalizer


def _chunk_size(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // len(weight))


def _chunks(count: int, weight: Tensor) -> list[slice]:
    size = _chunk_size(weight)
    return [slice(i, i + size) for i in range(0, count, size)]
