"""Weights to compute with, and the parameters behind them: a copy in the compute dtype, the gradient to the masters.

Shapes: N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from pellucid.models import attention
from pellucid.models.attention import CheckedLibrary
from pellucid.models.native import OperationCounter, call_kernel, find_kernels

POLICY_MISMATCH = "the checkpoint was made with another policy.model or policy.lora: resume with the same"
_optimizer_steps = 0
"""Of every optimizer of this process, also the one that is being taken: torch's fused ones change parameters without
counting their versions."""


def _count_step(*_: object) -> None:
    global _optimizer_steps  # noqa: PLW0603 - a counter of the process, as the hook is
    _optimizer_steps += 1


register_optimizer_step_pre_hook(_count_step)


class ShardedModule(Protocol):
    """Parameters of which a process keeps a part, whole from `unshard` to `reshard`. Processes call these together."""

    def unshard(self) -> Any: ...
    def reshard(self) -> Any: ...


class VocabularyMatrix(NamedTuple):
    """A weight whose gradient is added up over many tokens: unrounded, it goes to the master itself."""

    tensor: Tensor
    """[V, D] to compute with."""
    master: Tensor
    """The parameter."""


class MatrixParts(NamedTuple):
    """The parts of a matrix. Autograd keeps these, which an engine can free and gather, not what they are joined to."""

    parts: tuple[Tensor, ...]


class TrainedMatrix(NamedTuple):
    """A matrix to compute with, and the parameters that get its gradient, which is not rounded on the way."""

    tensor: Tensor
    """[outputs, inputs]"""
    masters: tuple[Tensor, ...]
    """Its rows, one behind the other."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


class CastWeights:
    """Parameters joined and cast to the compute dtype; cast again whenever they may have changed.

    They are read where they stand, in their modules: an engine that shards parameters puts whole ones there while a
    layer computes. Those, `in_place`, are gone behind the layer: nothing is kept of them.
    """

    def __init__(self, locations: Sequence[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        """places: modules and the names of their parameters."""
        self.locations, self.dtype = locations, dtype
        self.is_uncached = False
        self.cast_copy: Tensor | None = None
        self.copied_version: tuple[int, ...] = ()

    def get_masters(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self.locations]

    def get_weights(self) -> Tensor | MatrixParts | TrainedMatrix:
        """The cast weights, whose gradient goes to the masters."""
        masters = self.get_masters()
        if self.is_uncached:
            cast = [m.to(self.dtype) for m in masters]
            matrices = len(cast) > 1 and cast[0].ndim > 1 and torch.is_grad_enabled()
            return MatrixParts(tuple(cast)) if matrices else concatenate_masters(cast)
        if masters[0].ndim > 1 and torch.is_grad_enabled() and any(m.requires_grad for m in masters):
            return TrainedMatrix(self.get_cast_copy(), tuple(masters))
        return CastFunction.apply(self.get_cast_copy(), *masters)  # pyright: ignore[reportReturnType]

    def get_cast_copy(self) -> Tensor:
        """The cast weights without a gradient; cast anew only where the masters have changed."""
        masters = self.get_masters()
        if self.is_uncached or (len(masters) == 1 and masters[0].dtype == self.dtype):
            return concatenate_masters(masters).detach().to(self.dtype)
        if self.cast_copy is None:
            self.cast_copy = masters[0].new_empty(sum(map(len, masters)), *masters[0].shape[1:], dtype=self.dtype)
        if self.copied_version != (now := get_masters_version(masters)):
            for part, master in zip(self.cast_copy.split([len(m) for m in masters]), masters, strict=True):
                part.copy_(master.detach())
            self.copied_version = now
        return self.cast_copy

    def pair_masters_with_copies(self) -> list[tuple[Tensor, Tensor]]:
        """Masters, and where each of them stands in the copy that is kept; none where none is."""
        if self.is_uncached or self.cast_copy is None:
            return []
        masters = self.get_masters()
        return list(zip(masters, self.cast_copy.split([len(m) for m in masters]), strict=True))

    def mark_as_cast(self) -> None:
        """The copies of all masters have been made by someone else."""
        self.copied_version = get_masters_version(self.get_masters())


class JoinedLinear(torch.autograd.Function):
    """F.linear by matrices as if they were one, which is joined anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parts)
        return apply_linear(x, torch.cat(parts), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *parts = ctx.saved_tensors
        of_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        return (
            compute_input_gradient(grad, torch.cat(parts)),
            of_bias,
            *(grad.mT @ x).split([len(part) for part in parts]),
        )


class TrainedLinear(torch.autograd.Function):
    """F.linear by a matrix, whose gradient goes to its masters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.masters = [(len(m), m.dtype) for m in masters]
        return apply_linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, matrix = ctx.saved_tensors
        of_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        sums = compute_weight_gradient(grad, x, torch.promote_types(grad.dtype, torch.float32))
        parts = sums.split([rows for rows, _ in ctx.masters])
        of_masters = (part.to(dtype) for part, (_, dtype) in zip(parts, ctx.masters, strict=True))
        of_x = compute_input_gradient(grad, matrix) if ctx.needs_input_grad[0] else None
        return of_x, of_bias, None, *of_masters


def concatenate_masters(masters: Sequence[Tensor]) -> Tensor:
    return masters[0] if len(masters) == 1 else torch.cat(list(masters))


def get_masters_version(masters: Sequence[Tensor]) -> tuple[int, ...]:
    """What changes whenever the masters do: their versions, and where they are trained the optimizer steps."""
    trained = any(m.requires_grad for m in masters)
    return _optimizer_steps if trained else 0, *(m._version for m in masters)


class CastFunction(torch.autograd.Function):
    """The value of the cast weights with the gradient of their masters, so that not every forward pass casts anew."""

    @staticmethod
    def forward(ctx: Any, copy: Tensor, *masters: Tensor) -> Tensor:
        ctx.masters = [(len(m), m.dtype) for m in masters]
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = grad.split([rows for rows, _ in ctx.masters])
        return None, *(part.to(dtype) for part, (_, dtype) in zip(parts, ctx.masters, strict=True))


def look_up_embeddings(ids: Tensor, embedding: VocabularyMatrix, sparse: bool = False) -> Tensor:
    """[N] -> [N, D]. A sparse gradient is to be added to a dense one, as that of a head which is the same matrix."""
    if not torch.is_grad_enabled():  # with forward-mode gradients, which Lookup has not
        return F.embedding(ids, embedding.master).to(embedding.tensor.dtype)
    return EmbeddingLookup.apply(ids, *embedding, sparse)  # pyright: ignore[reportReturnType]


class EmbeddingLookup(torch.autograd.Function):
    """F.embedding, its gradient added up in the dtype of the master: a bf16 sum stands still at 256 of its terms."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tensor: Tensor, master: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.sparse = master.shape, sparse
        ctx.dtypes = torch.promote_types(master.dtype, torch.float32), master.dtype
        return F.embedding(ids, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [ids] = ctx.saved_tensors
        (rows, width), (wide, narrow), read = ctx.shape, ctx.dtypes, None
        if ctx.sparse:
            read, ids = ids.unique(return_inverse=True)
            rows = len(read)
        of_rows = torch.zeros(rows, width, dtype=wide, device=grad.device).index_add_(0, ids, grad.to(wide)).to(narrow)
        if read is not None:
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # else torch 2.11 warns
                of_rows = torch.sparse_coo_tensor(read[None], of_rows, ctx.shape, is_coalesced=True)
        return None, None, of_rows, None


def gather_full_tensor(x: Tensor) -> Tensor:
    """All of a tensor that lies in several processes, in each of them; they ask together."""
    if isinstance(x, DTensor):
        return x.full_tensor()
    if getattr(x, "ds_id", None) is None:
        return x
    parameter = cast(Any, x)  # of DeepSpeed's ZeRO-3
    parameter.all_gather([x])
    gathered = x.detach().clone()
    parameter.partition([x])
    return gathered


def copy_to_cpu(x: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy in fp32; in pinned memory where a GPU, that of `x` or `device`, shares it."""
    copy = torch.empty(x.shape, dtype=torch.float32, pin_memory=(device or x.device).type == "cuda")
    return copy.copy_(x.detach(), non_blocking=True)


# ---------------------------------------------------------------- products
# Products of many rows and a matrix, by AMX (cpp/products.cpp): each row has the bits that it has among few, as in
# sampling. oneDNN adds up inputs of many rows in another order, which depends on how many there are, and for some numbers
# of rows it takes twice as long. Elsewhere, and where this processor or this torch rounds otherwise, operators multiply.
#
# Shapes: n rows, K inputs, N outputs.


GEMM_BLOCK = 32
"""Rows at least; inputs and outputs are multiples of it."""
MAX_INPUT_GRADIENT_OUTPUTS = 2**14
"""Outputs of whose gradient that of inputs is taken; of more, as a head has, oneDNN is faster."""
GEMM_PROFILER_NAME = "multiply_rows"
"""Of such a product, in torch's profiler."""


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [n, K], a weight [N, K] and a bias [N]. MemoryError where there is no memory."""
    if not (by := find_gemm_kernel(x, weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return LinearFunction.apply(x, weight, bias, by)  # pyright: ignore[reportReturnType]
    return multiply_with_amx(by, x, weight, bias, transposed=False)


class LinearFunction(torch.autograd.Function):
    """With a gradient, which weights that are `Trained` have of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: CheckedLibrary) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply_with_amx(by, x, weight, bias, transposed=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            compute_input_gradient(grad, weight) if of_x else None,
            grad.mT @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


def compute_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient [n, K] of the inputs of a product, from that of its outputs [n, N]. MemoryError as `linear`."""
    by = find_gemm_kernel(grad, weight) if len(weight) <= MAX_INPUT_GRADIENT_OUTPUTS else None
    return multiply_with_amx(by, grad, weight, None, transposed=True) if by else grad @ weight


def find_gemm_kernel(x: Tensor, weight: Tensor) -> CheckedLibrary | None:
    """What multiplies rows like these by a matrix; None where operators do."""
    if (
        x.ndim != 2
        or len(x) < GEMM_BLOCK
        or any(size % GEMM_BLOCK for size in weight.shape)
        or not weight.is_contiguous()
    ):
        return None
    by = (
        attention.load_checked_library()[0] if find_kernels(x, x.dtype) and find_kernels(weight, weight.dtype) else None
    )
    return by if by and by.uses_amx and passes_gemm_self_check(by) else None


def multiply_with_amx(
    kernel: CheckedLibrary, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    (n, width), outputs = x.shape, weight.shape[1 if transposed else 0]
    y = x.new_empty(n, outputs)
    with record_function(GEMM_PROFILER_NAME):
        sizes, threads = (x.stride(0), n, width), torch.get_num_threads()
        fault = call_kernel(kernel.library.multiply_rows, x, *sizes, weight, outputs, bias, int(transposed), y, threads)
    if fault:
        raise MemoryError(f"no memory for a product with a matrix of {weight.shape[0]} x {weight.shape[1]}")
    OperationCounter.count(2.0 * n * width * outputs)
    return y


@functools.cache
def passes_gemm_self_check(kernel: CheckedLibrary) -> bool:
    """Whether rows have the bits that oneDNN gives so few of them."""
    numbers = torch.randn(GEMM_BLOCK + 65, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, weight, bias = numbers[:GEMM_BLOCK], numbers[GEMM_BLOCK:-1], numbers[-1, :64]
    found = (
        multiply_with_amx(kernel, x, weight, bias, transposed=False),
        multiply_with_amx(kernel, x[:, :64], weight, None, transposed=True),
    )
    wanted = F.linear(x, weight, bias), x[:, :64] @ weight
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


# ---------------------------------------------------------------- sums
# Gradients of weights: sums over tokens, unrounded where AMX adds them up (cpp/weights.cpp).


WEIGHT_GRADIENT_BLOCK = 32
"""Widths of a matrix are a multiple of it."""
WEIGHT_GRADIENT_PROFILER_NAME = "sum_over_tokens"
"""Of such a sum, in torch's profiler."""


def compute_weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype, accumulator: Tensor | None = None) -> Tensor:
    """grad.mT @ x of grad [n, N] and x [n, K], in the dtype `wide`, or so much more in `into`. By AMX it is not rounded
    on the way. MemoryError where there is no memory.
    """
    by = attention.load_checked_library()[0] if dtype == torch.float32 and find_kernels(grad, grad.dtype) else None
    if not by or not by.uses_amx or any(width % WEIGHT_GRADIENT_BLOCK for width in (grad.shape[1], x.shape[1])):
        sums = grad.mT @ x
        return sums.to(dtype) if accumulator is None else accumulator.add_(sums)
    sums = torch.empty(grad.shape[1], x.shape[1], dtype=dtype) if accumulator is None else accumulator
    sizes = len(grad), grad.shape[1], x.shape[1]
    together = grad.contiguous(), x.contiguous()
    with record_function(WEIGHT_GRADIENT_PROFILER_NAME):
        fault = call_kernel(
            by.library.sum_over_tokens, *together, *sizes, sums, accumulator is not None, torch.get_num_threads()
        )
    if fault:
        raise MemoryError(f"no memory for the gradient of a matrix of {sizes[1]} x {sizes[2]}")
    OperationCounter.count(2.0 * sizes[0] * sizes[1] * sizes[2])
    return sums
