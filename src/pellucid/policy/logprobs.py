"""Hidden states -> log-probs, entropy and exact KL of chosen tokens, in chunks: never a [B, T, V] tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.sampling_mask import SamplingMask
from pellucid.models import linear
from pellucid.models.linear import compute_input_gradient, compute_weight_gradient
from pellucid.models.native import Kernels, LogitStatistics, ScaledLogits, StatisticsGradients, find_kernels
from pellucid.models.ops import multiply_to_fp32, supports_fp32_product

MAX_MATMUL_LOGITS, MAX_ELEMENTWISE_LOGITS = 2**26, 2**23
"""Logits held at once, however many tokens there are and however large the vocabulary is: 128 MB in bf16 for a matrix
product, 32 MB in fp32 for what is done to each."""
PADDING_LOGIT = -1e15
"""Logit of a token that is not there: no probability, and its square is still a number."""


class Candidates(NamedTuple):
    """Tokens that a distribution is truncated to."""

    ids: Tensor
    """[n, K] ascending, and 0 behind them."""
    is_valid: Tensor
    """[n, K] bool: not behind them."""

    def gather_logits(self, logits: Tensor) -> Tensor:
        """[n, V] -> [n, K]"""
        return logits.gather(-1, self.ids).masked_fill_(~self.is_valid, PADDING_LOGIT)

    def find_indices(self, tokens: Tensor) -> Tensor:
        """[n] ids -> [n] where they stand among these."""
        return (self.ids == tokens[:, None]).byte().argmax(-1)


class ScoreContext(NamedTuple):
    """How hidden states are read: all that the functions below need besides tensors."""

    head: LMHead
    temperature: float
    entropy_grad: bool
    ref_hidden: Tensor | None
    ref_head: LMHead | None
    sampling_mask: SamplingMask | None = None
    """What each distribution is truncated to."""
    needs_backward: bool = False
    """Whether there may be a backward pass."""

    def get_candidates(self, rows: Tensor) -> Candidates | None:
        """Of these rows; None is the vocabulary."""
        return (
            None
            if self.sampling_mask is None
            else Candidates(*self.sampling_mask.select_tokens(rows).unpack_ids(len(self.head.weight)))
        )

    def compute_logits(self, product: Tensor, candidates: Candidates | None) -> Tensor:
        """[n, V] of the head's matrix -> [n, V or K] logits at the temperature."""
        logits = self.head.to_logits(product)
        if self.temperature != 1.0:  # a product that is kept is read once more
            logits = logits / self.temperature if logits is product else logits.div_(self.temperature)
        return logits if candidates is None else candidates.gather_logits(logits)

    @property
    def logit_scale(self) -> float:
        """Of what the head's matrix gives, where there is no softcap."""
        return self.head.scale / self.temperature

    def pick_kernels(self, product: Tensor) -> Kernels | None:
        """What reads these logits in one pass; None where operators do."""
        heads = [self.head] if self.ref_head is None else [self.head, self.ref_head]
        plain = all(head.weight.dtype == torch.bfloat16 and not head.softcap for head in heads)
        return find_kernels(product, product.dtype) if plain and self.sampling_mask is None else None

    def compute_ref_logits(self, rows: Tensor) -> ScaledLogits | None:
        """The reference's logits."""
        if self.ref_hidden is None or self.ref_head is None:
            return None
        return ScaledLogits(self.ref_head.project(self.ref_hidden[rows]), self.ref_head.scale / self.temperature)

    def compute_slope(self, z: Tensor) -> Tensor | float:
        """dz / d of what the head's matrix gives: [n, V] with a softcap, else the same for all."""
        cap = self.head.softcap / self.temperature
        return self.logit_scale * (1 - (z / cap).square()) if cap else self.logit_scale

    def compute_ref_logprobs(self, rows: Tensor, candidates: Candidates | None) -> Tensor | None:
        """[n, V or K] log-probs of the reference."""
        if self.ref_hidden is None or self.ref_head is None:
            return None
        logits = self.ref_head.compute_logits(self.ref_hidden[rows]) / self.temperature
        return (logits if candidates is None else candidates.gather_logits(logits)).log_softmax(-1)


def compute_token_logprobs(
    hidden: Tensor,
    head: LMHead,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    reference: tuple[Tensor, LMHead] | None = None,
    sampling_mask: SamplingMask | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of `tokens` [N] and entropy of their distributions, both [N], in nats.

    The distribution is softmax(logits / temperature), the whole of it or among the tokens of a mask. `hidden` [N, D] is
    where each token was predicted from. For the backward pass logits are kept, where they are in half precision and as
    far as the room goes that their gradient takes there, and others made again; the entropy has a gradient only if
    asked for. With the hidden states and the head of a reference, a third: KL(distribution, reference's), the sum.
    """
    reading = ScoreContext(
        head, temperature, entropy_grad, *(reference or (None, None)), sampling_mask, torch.is_grad_enabled()
    )
    logprobs, entropy, kl = TokenLogprobs.apply(hidden, head.master, head.bias, tokens, reading)  # pyright: ignore
    return (logprobs, entropy) if reference is None else (logprobs, entropy, kl)


class TokenLogprobs(torch.autograd.Function):
    """With z the logits at the temperature, p their softmax, H its entropy, q the reference:

        d log p[token] / dz = onehot(token) - p
        d H / dz = -p (log p + H)
        d KL / dz = p (log p - log q - KL)

    What is done to each logit is done a few rows at a time, in the processor's cache; matrix products take many.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, master: Tensor, bias: Tensor | None, tokens: Tensor, context: ScoreContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, every = context.head, torch.arange(len(tokens), device=tokens.device)
        room = _count_saved_tokens(head.weight, len(tokens) if context.needs_backward else 0)
        kept, parts = [], []
        for rows in (every[:room], *every[room:].split(count_chunk_rows(head.weight, MAX_MATMUL_LOGITS // 2))):
            product = head.project(hidden[rows])
            if not parts and room:
                kept.append(product)
            parts.append(score_products(product, tokens[rows], context, rows))
            del product
        logprobs, entropy, kl, log_normalizer = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head.weight, bias, tokens, entropy, kl, log_normalizer)
        ctx.kept = kept
        ctx.reading, ctx.master = context, master.dtype
        if not context.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, *about = ctx.saved_tensors
        reading = ctx.reading
        live = (torch.stack(grads) != 0).any(0).cpu().nonzero()[:, 0]  # a token that weighs nothing costs nothing
        wide = about[-1].dtype
        of_hidden, of_weight = torch.zeros_like(hidden), None
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for many, products in _iterate_products(live, ctx.kept, hidden, reading.head):
            few = count_chunk_rows(weight, MAX_ELEMENTWISE_LOGITS)
            for rows, into in zip(many.split(few), products.split(few), strict=True):
                write_product_gradients(into, rows, reading, about, grads)
                del into
            of_logits = products.to(weight.dtype)
            del products
            of_hidden[many] = compute_input_gradient(of_logits, weight)
            if ctx.needs_input_grad[1]:  # the head of a base with an adapter is frozen
                of_weight = compute_weight_gradient(of_logits, hidden[many], wide, of_weight)
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=wide)
            del of_logits  # there is room for one such part, not for two
        of_master = None if of_weight is None else of_weight.to(ctx.master)
        return of_hidden, of_master, None if of_bias is None else of_bias.to(weight.dtype), None, None


def _count_saved_tokens(weight: Tensor, tokens: int) -> int:
    """Of how many tokens, of so many, products are kept; of none where weights are as wide as what is done to each."""
    return min(tokens, _count_matmul_rows(weight)) if weight.dtype in (torch.bfloat16, torch.float16) else 0


def _count_matmul_rows(weight: Tensor) -> int:
    """Tokens whose products are held at once."""
    return count_chunk_rows(weight, MAX_MATMUL_LOGITS // 2 if supports_fp32_product(weight) else MAX_MATMUL_LOGITS)


def _iterate_products(
    live: Tensor, kept: list[Tensor], hidden: Tensor, head: LMHead
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens, many at a time, and their products [n, V], which gradients are written over.

    Products that were kept are given away: nobody holds them any longer.
    """
    products = kept.pop() if kept else head.weight[:0]
    count = int((live < len(products)).sum())
    live, ours = live.to(hidden.device), live[:count].to(hidden.device)
    if 0 < len(ours) < len(products):
        _compact_rows(products, ours)
    room = [products[: len(ours)]]
    del products
    if len(ours):
        yield ours, room.pop()
    for many in live[len(ours) :].split(_count_matmul_rows(head.weight)):
        if len(many) or not len(ours):
            yield many, head.project(hidden[many])


def _compact_rows(products: Tensor, rows: Tensor) -> None:
    """Moves these rows [n], ascending, to the front, in place: none moves to where another has yet to move from."""
    at = 0
    for few in rows.split(64):
        products[at : at + len(few)] = products[few]
        at += len(few)


def score_products(product: Tensor, tokens: Tensor, context: ScoreContext, rows: Tensor) -> tuple[Tensor, ...]:
    """Log-probs, entropy, KL and log-normaliser, [n] each."""
    few = count_chunk_rows(context.head.weight, MAX_ELEMENTWISE_LOGITS)
    parts = zip(product.split(few), tokens.split(few), rows.split(few), strict=True)
    return tuple(
        torch.cat(column) for column in zip(*(score_chunk(p, t, context, r) for p, t, r in parts), strict=True)
    )


def score_chunk(product: Tensor, tokens: Tensor, context: ScoreContext, rows: Tensor) -> LogitStatistics:
    if kernels := context.pick_kernels(product):
        return kernels.compute_statistics(
            ScaledLogits(product, context.logit_scale), tokens, context.compute_ref_logits(rows)
        )
    among = context.get_candidates(rows)
    places = tokens if among is None else among.find_indices(tokens)
    return score_logits(context.compute_logits(product, among), places, context.compute_ref_logprobs(rows, among))


def score_logits(logits: Tensor, indices: Tensor, ref_logprobs: Tensor | None) -> LogitStatistics:
    """The same of logits z [n, V or K], the places of the tokens among them, and the log-probs of a reference."""
    highest = logits.amax(-1, keepdim=True)
    below = logits - highest
    masses = below.exp()
    total = masses.sum(-1)
    log_total = total.log()
    log_normalizer = highest[:, 0] + log_total
    logprobs = logits.gather(-1, indices[:, None])[:, 0] - log_normalizer
    entropy = log_total - compute_row_dots(masses, below) / total  # by logits of 20 a sum would lose a digit
    kl = (
        torch.zeros_like(entropy) if ref_logprobs is None else -entropy - compute_row_dots(masses, ref_logprobs) / total
    )
    return LogitStatistics(logprobs, entropy, kl, log_normalizer)


def write_product_gradients(
    product: Tensor, rows: Tensor, context: ScoreContext, saved: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """Puts the gradient of the head's product [n, V] of these rows in its place."""
    tokens, entropy, kl, log_normalizer = (x[rows] for x in saved)
    if kernels := context.pick_kernels(product):
        of_logprob, of_entropy, of_kl = (g[rows] for g in grads)
        weight = StatisticsGradients(of_logprob, of_entropy if context.entropy_grad else None, of_kl)
        known = LogitStatistics(of_logprob, entropy, kl, log_normalizer)
        kernels.compute_product_gradient(
            ScaledLogits(product, context.logit_scale), tokens, context.compute_ref_logits(rows), known, weight
        )
        return
    of_logprob, of_entropy, of_kl = (g[rows, None] for g in grads)
    among = context.get_candidates(rows)
    z, other = context.compute_logits(product, among), context.compute_ref_logprobs(rows, among)
    slope, log_probs = context.compute_slope(z), z.sub_(log_normalizer[:, None])
    weights = -of_logprob
    if context.entropy_grad:
        weights = weights - of_entropy * (log_probs + entropy[:, None])
    if other is not None:
        weights = weights + of_kl * (log_probs - other - kl[:, None])
    grad = log_probs.exp_().mul_(weights)
    places = tokens if among is None else among.find_indices(tokens)
    grad[torch.arange(len(rows), device=z.device), places] += of_logprob[:, 0]
    grad = grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)
    if among is None:
        product.copy_(grad)
    else:
        product.zero_().scatter_add_(-1, among.ids, grad.to(product.dtype))


def compute_row_dots(x: Tensor, y: Tensor) -> Tensor:
    """[n, V] and [n, V] -> [n] inner products, without a product of their size."""
    return (x[:, None] @ y[:, :, None])[:, 0, 0]


def count_chunk_rows(weight: Tensor, elements: int) -> int:
    """Whole tiles of matrix products, where there is room for one."""
    rows = elements // len(weight)
    return max(1, rows // 64 * 64 or rows)


# ---------------------------------------------------------------- head
# The head of a model: what hidden states say of the next token.


class LMHead(NamedTuple):
    """Hidden state -> logits. D hidden size, V vocabulary."""

    weight: Tensor
    """[V, D] to compute with, without gradient."""
    master: Tensor
    """[V, D] the parameter that it is a copy of, or the same: it gets the gradient, in its own dtype."""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """Logits are multiplied by it (Cohere's logit_scale, Granite's 1 / logits_scaling)."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap) (Gemma 2); 0 is off."""

    def project(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V] in the dtype of the weight, or in fp32 where a GPU gives it."""
        if not supports_fp32_product(hidden):
            return linear.apply_linear(hidden, self.weight, self.bias)
        product = multiply_to_fp32(hidden, self.weight)
        return product if self.bias is None else product + self.bias

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]"""
        return self.to_logits(self.project(hidden))

    def to_logits(self, product: Tensor) -> Tensor:
        """Logits [N, V] from the product; reduced precision ends here: fp32 from now on."""
        logits = product if product.dtype == torch.float64 else product.float()
        logits = logits * self.scale if self.scale != 1.0 else logits
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
