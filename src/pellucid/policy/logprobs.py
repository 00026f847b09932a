"""Log-probs, entropy and exact KL from hidden states, in chunks of tokens: no [B, T, V] tensor is ever made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.batch import copy_to_device
from pellucid.algorithm.sampling_mask import SamplingMask
from pellucid.models import linear
from pellucid.models.linear import compute_input_gradient, compute_weight_gradient, has_gradient_in_place
from pellucid.models.native import (
    Kernels,
    LogitStatistics,
    ScaledLogits,
    StatisticsGradients,
    find_kernels,
    find_triton_kernels,
)
from pellucid.models.ops import multiply_to_fp32, supports_fp32_product

MAX_MATMUL_LOGITS, MAX_ELEMENTWISE_LOGITS = 2**26, 2**23
"""The most logits in memory at once: 128 MB in bf16 for a matrix product, and 32 MB in fp32 for elementwise work."""
MAX_GPU_LOGITS, MAX_GPU_ELEMENTWISE_LOGITS = 2**27, 2**25
"""The same on a GPU: 512 MB in fp32, some 830 rows of 152,000 tokens, so that few kernels are launched. A kernel that
makes one pass takes them all; operators with temporary tensors of this size take 128 MB at a time."""
PADDING_LOGIT = -1e15
"""The logit of padding: its probability is 0, and its square is finite."""


class LMHead(NamedTuple):
    """The output layer: hidden states to logits. D hidden size, V vocabulary."""

    weight: Tensor
    """[V, D] in the compute dtype, without gradient."""
    master: Tensor
    """[V, D] the parameter itself, which gets the gradient, in its own dtype."""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """Logits are multiplied by it (logit_scale of Cohere, 1 / logits_scaling of Granite)."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap) (Gemma 2); 0 is off."""

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states [N, D] to [N, V], in the dtype of the weight, or in fp32 if a GPU supports it."""
        if not supports_fp32_product(hidden):
            return linear.apply_linear(hidden, self.weight, self.bias)
        product = multiply_to_fp32(hidden, self.weight)
        return product if self.bias is None else product + self.bias

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, D]."""
        return self.to_logits(self.project(hidden))

    def to_logits(self, product: Tensor) -> Tensor:
        """Return the logits [N, V] of a matrix product [N, V], in fp32 or fp64."""
        logits = product if product.dtype == torch.float64 else product.float()
        logits = logits * self.scale if self.scale != 1.0 else logits
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


class Candidates(NamedTuple):
    """The tokens that n distributions are truncated to, at most K each."""

    ids: Tensor
    """[n, K] ascending, padded with 0."""
    is_valid: Tensor
    """[n, K] bool: false for padding."""

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [n, K] of the candidates from all logits [n, V]."""
        return logits.gather(-1, self.ids).masked_fill_(~self.is_valid, PADDING_LOGIT)

    def find_indices(self, tokens: Tensor) -> Tensor:
        """Return the indices [n] of token ids [n] among the candidates."""
        return (self.ids == tokens[:, None]).byte().argmax(-1)


class ScoreContext(NamedTuple):
    """How hidden states become log-probs: the head, the temperature, the reference and the truncation."""

    head: LMHead
    temperature: float
    entropy_grad: bool
    ref_hidden: Tensor | None
    ref_head: LMHead | None
    sampling_mask: SamplingMask | None = None
    """The tokens that each distribution is truncated to."""
    needs_backward: bool = False
    """Whether there may be a backward pass."""
    trained_tokens: Tensor | None = None
    """[N] bool, on the CPU: tokens that may have a gradient. None is unknown."""

    def get_candidates(self, rows: Tensor) -> Candidates | None:
        """Return the candidates of these rows; None is the whole vocabulary."""
        if self.sampling_mask is None:
            return None
        return Candidates(*self.sampling_mask.select_tokens(rows).unpack_ids(len(self.head.weight)))

    def compute_logits(self, product: Tensor, candidates: Candidates | None) -> Tensor:
        """Return the logits [n, V or K] of a matrix product [n, V], divided by the temperature."""
        logits = self.head.to_logits(product)
        if self.temperature != 1.0:  # not in place: a saved product is needed again
            logits = logits / self.temperature if logits is product else logits.div_(self.temperature)
        return logits if candidates is None else candidates.gather_logits(logits)

    @property
    def logit_scale(self) -> float:
        """The factor from the matrix product to the logits at the temperature, without a softcap."""
        return self.head.scale / self.temperature

    def pick_kernels(self, product: Tensor) -> Kernels | ModuleType | None:
        """Return kernels that compute everything in one pass; None if there are none for these logits.

        They take products in bf16 on the CPU, and products in fp32 on a GPU.
        """
        heads = [self.head] if self.ref_head is None else [self.head, self.ref_head]
        if self.sampling_mask is not None or any(head.softcap for head in heads):
            return None
        dtypes = [head.weight.dtype for head in heads]
        if product.device.type == "cuda":
            kernels = [find_triton_kernels(product, dtype) for dtype in dtypes]
            return kernels[0] if product.dtype == torch.float32 and all(kernels) else None
        return find_kernels(product, product.dtype) if set(dtypes) == {torch.bfloat16} else None

    def count_rows_per_pass(self, product: Tensor) -> int:
        """Return how many rows of a product [n, V] elementwise work takes at a time."""
        if product.device.type == "cuda" and self.ref_head is None and self.pick_kernels(product):
            return max(1, len(product))
        return count_elementwise_rows(self.head.weight)

    def get_gradient_memory(self, product: Tensor) -> Tensor:
        """Return the tensor [n, V] in which the gradient of a product is written, in the memory of the product.

        Kernels on a GPU write each row in the compute dtype at the beginning of the row's own memory.
        """
        if product.device.type != "cuda" or not self.pick_kernels(product):
            return product
        return product.view(self.head.weight.dtype)[:, : product.shape[1]]

    def compute_ref_logits(self, rows: Tensor) -> ScaledLogits | None:
        """Return the matrix product of the reference and its scale."""
        if self.ref_hidden is None or self.ref_head is None:
            return None
        return ScaledLogits(self.ref_head.project(self.ref_hidden[rows]), self.ref_head.scale / self.temperature)

    def compute_slope(self, z: Tensor) -> Tensor | float:
        """Return d logits / d product: [n, V] with a softcap, else a number."""
        cap = self.head.softcap / self.temperature
        return self.logit_scale * (1 - (z / cap).square()) if cap else self.logit_scale

    def compute_ref_logprobs(self, rows: Tensor, candidates: Candidates | None) -> Tensor | None:
        """Return the log-probs [n, V or K] of the reference."""
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
    trained_tokens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute log-probs and entropy of tokens.

    The distribution is softmax(logits / temperature), over the vocabulary or over the tokens of a sampling mask. Logits
    in half precision are saved for the backward pass, up to the memory that their gradient needs anyway; all others are
    recomputed.

    Args:
        hidden: [N, D] the hidden states that the tokens [N] are predicted from.
        entropy_grad: whether the entropy has a gradient.
        reference: hidden states [N, D] and head of a reference.
        sampling_mask: the tokens that each distribution is truncated to.
        trained_tokens: [N] bool, on the CPU: whether a token may have a gradient. On CUDA the backward pass then does
            not wait to be told by the gradients.

    Returns:
        Log-probs [N] and entropy [N], in nats; with a reference also the exact KL(policy || reference) [N].
    """
    references, needs_backward = reference or (None, None), torch.is_grad_enabled()
    context = ScoreContext(head, temperature, entropy_grad, *references, sampling_mask, needs_backward, trained_tokens)
    logprobs, entropy, kl = TokenLogprobs.apply(hidden, head.master, head.bias, tokens, context)  # pyright: ignore
    return (logprobs, entropy) if reference is None else (logprobs, entropy, kl)


class TokenLogprobs(torch.autograd.Function):
    """Log-probs, entropy and KL with gradients that are written by hand.

    z are the logits at the temperature, p their softmax, H its entropy, and q the distribution of the reference:

        d log p[token] / dz = onehot(token) - p
        d H / dz = -p (log p + H)
        d KL / dz = p (log p - log q - KL)

    On the CPU elementwise work takes few rows at a time, which fit into the processor's cache; matrix products take
    many.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, master: Tensor, bias: Tensor | None, tokens: Tensor, context: ScoreContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, every = context.head, torch.arange(len(tokens), device=tokens.device)
        n_saved = _count_saved_tokens(head.weight, len(tokens) if context.needs_backward else 0)
        saved, parts = [], []
        for rows in (every[:n_saved], *every[n_saved:].split(_count_forward_rows(head.weight))):
            product = head.project(hidden[rows])
            if not parts and n_saved:
                saved.append(product)
            few = context.count_rows_per_pass(product)
            pairs = zip(product.split(few), rows.split(few), strict=True)
            parts += [score_chunk(chunk, tokens[chunk_rows], context, chunk_rows) for chunk, chunk_rows in pairs]
            del product, pairs
        logprobs, entropy, kl, log_normalizer = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head.weight, bias, tokens, entropy, kl, log_normalizer)
        ctx.saved_products = saved
        ctx.context, ctx.master = context, master
        if not context.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, *about = ctx.saved_tensors
        context = ctx.context
        if context.trained_tokens is None or hidden.device.type != "cuda":
            is_trained = (torch.stack(grads) != 0).any(0).cpu()
        else:
            is_trained = context.trained_tokens
        live = is_trained.nonzero()[:, 0]  # tokens without weight are skipped
        sum_dtype = about[-1].dtype
        is_in_place = ctx.needs_input_grad[1] and has_gradient_in_place(ctx.master)
        hidden_grad, weight_grad = torch.zeros_like(hidden), ctx.master.grad if is_in_place else None
        bias_grad = None if bias is None else torch.zeros_like(bias, dtype=sum_dtype)
        for many, products in _iterate_products(live, ctx.saved_products, hidden, context.head):
            few, out = context.count_rows_per_pass(products), context.get_gradient_memory(products)
            for rows, part, part_out in zip(many.split(few), products.split(few), out.split(few), strict=True):
                write_product_gradients(part, part_out, rows, context, about, grads)
                del part, part_out
            logits_grad = out.to(weight.dtype)
            del products, out
            hidden_grad[many] = compute_input_gradient(logits_grad, weight)
            if ctx.needs_input_grad[1]:  # the head of a base with an adapter is frozen
                weight_grad = compute_weight_gradient(logits_grad, hidden[many], sum_dtype, weight_grad)
            if bias_grad is not None:
                bias_grad += logits_grad.sum(0, dtype=sum_dtype)
            del logits_grad  # so that only one such part is in memory
        if is_in_place:
            ctx.master.grad = weight_grad
        master_grad = None if weight_grad is None or is_in_place else weight_grad.to(ctx.master.dtype)
        return hidden_grad, master_grad, None if bias_grad is None else bias_grad.to(weight.dtype), None, None


def _count_saved_tokens(weight: Tensor, tokens: int) -> int:
    """Return of how many tokens the products are saved for the backward pass: only products in half precision are."""
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return 0
    return min(tokens, _count_forward_rows(weight) if weight.device.type == "cuda" else _count_matmul_rows(weight))


def _count_forward_rows(weight: Tensor) -> int:
    """Return how many tokens one matrix product of the forward pass takes, beside products that are saved."""
    return count_chunk_rows(weight, (MAX_GPU_LOGITS if weight.device.type == "cuda" else MAX_MATMUL_LOGITS) // 2)


def _count_matmul_rows(weight: Tensor) -> int:
    """Return how many tokens one matrix product of the backward pass takes."""
    if weight.device.type == "cuda":
        return count_chunk_rows(weight, MAX_GPU_LOGITS)
    return count_chunk_rows(weight, MAX_MATMUL_LOGITS // 2 if supports_fp32_product(weight) else MAX_MATMUL_LOGITS)


def _iterate_products(
    live: Tensor, saved: list[Tensor], hidden: Tensor, head: LMHead
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of tokens, and their products [n, V], which the caller overwrites with gradients.

    The caller has the only reference to saved products, so that it can free their memory.
    """
    products = saved.pop() if saved else head.weight[:0]
    count = int((live < len(products)).sum())
    live, ours = (copy_to_device(x, hidden.device) for x in (live, live[:count]))
    if 0 < len(ours) < len(products):
        _compact_rows(products, ours)
    handed_over = [products[: len(ours)]]
    del products
    if len(ours):
        yield ours, handed_over.pop()
    for many in live[len(ours) :].split(_count_matmul_rows(head.weight)):
        if len(many) or not len(ours):  # without live tokens, an empty chunk makes zero gradients
            yield many, head.project(hidden[many])


def _compact_rows(products: Tensor, rows: Tensor) -> None:
    """Move these rows [n], ascending, to the front in place. No row is overwritten before it has moved."""
    start = 0
    for few in rows.split(64):
        products[start : start + len(few)] = products[few]
        start += len(few)


def score_chunk(product: Tensor, tokens: Tensor, context: ScoreContext, rows: Tensor) -> LogitStatistics:
    """Return log-probs, entropy, KL and log-normalizer [n] of tokens [n], from products [n, V]."""
    if kernels := context.pick_kernels(product):
        return kernels.compute_statistics(
            ScaledLogits(product, context.logit_scale), tokens, context.compute_ref_logits(rows)
        )
    candidates = context.get_candidates(rows)
    indices = tokens if candidates is None else candidates.find_indices(tokens)
    return score_logits(
        context.compute_logits(product, candidates), indices, context.compute_ref_logprobs(rows, candidates)
    )


def score_logits(logits: Tensor, indices: Tensor, ref_logprobs: Tensor | None) -> LogitStatistics:
    """Compute `score_chunk` from logits [n, V or K], token indices [n], and the log-probs of a reference."""
    highest = logits.amax(-1, keepdim=True)
    below = logits - highest
    masses = below.exp()
    total = masses.sum(-1)
    log_total = total.log()
    log_normalizer = highest[:, 0] + log_total
    logprobs = logits.gather(-1, indices[:, None])[:, 0] - log_normalizer
    # With logits of 20, a sum over the logits themselves would lose a digit.
    entropy = log_total - compute_row_dots(masses, below) / total
    kl = torch.zeros_like(entropy)
    if ref_logprobs is not None:
        kl = -entropy - compute_row_dots(masses, ref_logprobs) / total
    return LogitStatistics(logprobs, entropy, kl, log_normalizer)


def write_product_gradients(
    product: Tensor, out: Tensor, rows: Tensor, context: ScoreContext, saved: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """Write the gradient of the product [n, V] of these rows to `out`, the product itself or `get_gradient_memory`.

    In either case the product is overwritten.
    """
    tokens, entropy, kl, log_normalizer = (x[rows] for x in saved)
    if kernels := context.pick_kernels(product):
        logprob_grad, entropy_grad, kl_grad = (g[rows] for g in grads)
        weight = StatisticsGradients(logprob_grad, entropy_grad if context.entropy_grad else None, kl_grad)
        known = LogitStatistics(logprob_grad, entropy, kl, log_normalizer)
        logits, other = ScaledLogits(product, context.logit_scale), context.compute_ref_logits(rows)
        kernels.compute_product_gradient(logits, tokens, other, known, weight, out)
        return
    logprob_grad, entropy_grad, kl_grad = (g[rows, None] for g in grads)
    candidates = context.get_candidates(rows)
    z, other = context.compute_logits(product, candidates), context.compute_ref_logprobs(rows, candidates)
    slope, log_probs = context.compute_slope(z), z.sub_(log_normalizer[:, None])
    weights = -logprob_grad
    if context.entropy_grad:
        weights = weights - entropy_grad * (log_probs + entropy[:, None])
    if other is not None:
        weights = weights + kl_grad * (log_probs - other - kl[:, None])
    grad = log_probs.exp_().mul_(weights)
    indices = tokens if candidates is None else candidates.find_indices(tokens)
    grad[torch.arange(len(rows), device=z.device), indices] += logprob_grad[:, 0]
    grad = grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)
    if candidates is None:
        out.copy_(grad)
    else:
        out.zero_().scatter_add_(-1, candidates.ids, grad.to(out.dtype))


def compute_row_dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products [n] of rows [n, V]; on the CPU without a temporary tensor of that size."""
    return (x * y).sum(-1) if x.device.type == "cuda" else (x[:, None] @ y[:, :, None])[:, 0, 0]


def count_elementwise_rows(weight: Tensor) -> int:
    """Return how many rows of logits operators take at a time."""
    is_gpu = weight.device.type == "cuda"
    return count_chunk_rows(weight, MAX_GPU_ELEMENTWISE_LOGITS if is_gpu else MAX_ELEMENTWISE_LOGITS)


def count_chunk_rows(weight: Tensor, elements: int) -> int:
    """Return how many rows of logits fit into `elements`: a multiple of 64 (matrix product tiles), if possible."""
    rows = elements // len(weight)
    return max(1, rows // 64 * 64 or rows)
