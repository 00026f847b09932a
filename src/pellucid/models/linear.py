"""Weights cast to the compute dtype, whose gradients go to the master weights; and compiled matrix products.

Shapes: N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from pellucid.models import attention
from pellucid.models.native import (
    KernelUnavailableError,
    KernelVariant,
    OperationCounter,
    add_self_check,
    call_kernel,
    find_kernels,
)

POLICY_MISMATCH = "the checkpoint was made with another policy.model or policy.lora: resume with the same settings"
_optimizer_steps = 0
"""The number of optimizer steps begun in this process. PyTorch's fused optimizers change parameters without increasing
their versions."""


def _count_step(*_: object) -> None:
    global _optimizer_steps  # noqa: PLW0603 - the hook is registered for the process, too
    _optimizer_steps += 1


register_optimizer_step_pre_hook(_count_step)


class ShardedModule(Protocol):
    """A module whose parameters are sharded except between `unshard` and `reshard`, which all processes call."""

    def unshard(self) -> Any: ...
    def reshard(self) -> Any: ...


# ---------------------------------------------------------------- weights


class MatrixParts(NamedTuple):
    """The parts of a concatenated matrix. Autograd saves the parts, which an engine can free and gather again."""

    parts: tuple[Tensor, ...]


class TrainedMatrix(NamedTuple):
    """A matrix in the compute dtype, and the parameters that get its gradient without rounding."""

    tensor: Tensor
    """[outputs, inputs]"""
    masters: tuple[Tensor, ...]
    """The parameters whose rows, concatenated, are the matrix."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


class CastWeights:
    """Parameters concatenated and cast to the compute dtype; cast again whenever they may have changed.

    They are looked up in their modules, by name, at each use: an engine that shards parameters puts gathered ones there
    while a layer computes. With `is_uncached` no copy is kept, since gathered parameters are freed after the layer.
    """

    def __init__(self, locations: Sequence[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        self.locations, self.dtype = locations, dtype
        self.is_uncached = False
        self.cast_copy: Tensor | None = None
        self.copied_version: tuple[int, ...] = ()

    def get_masters(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self.locations]

    def get_weights(self) -> Tensor | MatrixParts | TrainedMatrix:
        """Return the cast weights; their gradient goes to the masters."""
        masters = self.get_masters()
        if self.is_uncached:
            cast = [m.to(self.dtype) for m in masters]
            are_trained_parts = len(cast) > 1 and cast[0].ndim > 1 and torch.is_grad_enabled()
            return MatrixParts(tuple(cast)) if are_trained_parts else _concatenate(cast)
        if masters[0].ndim > 1 and torch.is_grad_enabled() and any(m.requires_grad for m in masters):
            return TrainedMatrix(self.get_cast_copy(), tuple(masters))
        return _CastFunction.apply(self.get_cast_copy(), *masters)  # pyright: ignore[reportReturnType]

    def get_cast_copy(self) -> Tensor:
        """Return the cast weights without gradient; they are cast again only if the masters have changed."""
        masters = self.get_masters()
        if self.is_uncached or (len(masters) == 1 and masters[0].dtype == self.dtype):
            return _concatenate(masters).detach().to(self.dtype)
        if self.cast_copy is None:
            self.cast_copy = masters[0].new_empty(sum(map(len, masters)), *masters[0].shape[1:], dtype=self.dtype)
        if self.copied_version != (version := _get_masters_version(masters)):
            for part, master in zip(self.cast_copy.split([len(m) for m in masters]), masters, strict=True):
                part.copy_(master.detach())
            self.copied_version = version
        return self.cast_copy

    def pair_masters_with_copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return each master with its part of the cast copy; nothing if there is no copy."""
        if self.is_uncached or self.cast_copy is None:
            return []
        masters = self.get_masters()
        return list(zip(masters, self.cast_copy.split([len(m) for m in masters]), strict=True))

    def mark_as_cast(self) -> None:
        """Note that the caller has cast all masters into the copy."""
        self.copied_version = _get_masters_version(self.get_masters())


class JoinedLinear(torch.autograd.Function):
    """F.linear by the concatenation of matrices, which are concatenated again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parts)
        return apply_linear(x, _concatenate(parts), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *parts = ctx.saved_tensors
        needs_x, needs_bias, *need_parts = ctx.needs_input_grad
        return (
            compute_input_gradient(grad, _concatenate(parts)) if needs_x else None,
            grad.sum(0) if needs_bias else None,
            *((grad.mT @ x).split([len(part) for part in parts]) if any(need_parts) else [None] * len(parts)),
        )


class TrainedLinear(torch.autograd.Function):
    """F.linear by a TrainedMatrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.masters = [(len(m), m.dtype) for m in masters]
        return apply_linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, matrix = ctx.saved_tensors
        bias_grad = grad.sum(0) if ctx.needs_input_grad[1] else None
        matrix_grad = compute_weight_gradient(grad, x, torch.promote_types(grad.dtype, torch.float32))
        parts = matrix_grad.split([rows for rows, _ in ctx.masters])
        master_grads = (part.to(dtype) for part, (_, dtype) in zip(parts, ctx.masters, strict=True))
        x_grad = compute_input_gradient(grad, matrix) if ctx.needs_input_grad[0] else None
        return x_grad, bias_grad, None, *master_grads


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _get_masters_version(masters: Sequence[Tensor]) -> tuple[int, ...]:
    """Return a value that changes whenever the masters do: their versions and, if trained, the optimizer steps."""
    trained = any(m.requires_grad for m in masters)
    return _optimizer_steps if trained else 0, *(m._version for m in masters)


class _CastFunction(torch.autograd.Function):
    """The cast copy as a function of its masters: the forward pass casts nothing, and gradients go to the masters."""

    @staticmethod
    def forward(ctx: Any, copy: Tensor, *masters: Tensor) -> Tensor:
        ctx.masters = [(len(m), m.dtype) for m in masters]
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = grad.split([rows for rows, _ in ctx.masters])
        return None, *(part.to(dtype) for part, (_, dtype) in zip(parts, ctx.masters, strict=True))


def look_up_embeddings(ids: Tensor, embedding: TrainedMatrix, sparse: bool = False) -> Tensor:
    """Look up embeddings, [N] -> [N, D].

    Use `sparse` only if a dense gradient is added, such as that of a tied head.
    """
    return _EmbeddingLookup.apply(ids, embedding.tensor, *embedding.masters, sparse)  # pyright: ignore[reportReturnType]


class _EmbeddingLookup(torch.autograd.Function):
    """F.embedding whose gradient is summed in fp32 at least: a bf16 sum stops growing at 256 times its terms."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tensor: Tensor, master: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.sparse = master.shape, sparse
        ctx.dtypes = torch.promote_types(master.dtype, torch.float32), master.dtype
        return F.embedding(ids, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [ids] = ctx.saved_tensors
        (rows, width), (sum_dtype, dtype), unique_ids = ctx.shape, ctx.dtypes, None
        if ctx.sparse:
            unique_ids, ids = ids.unique(return_inverse=True)
            rows = len(unique_ids)
        sums = torch.zeros(rows, width, dtype=sum_dtype, device=grad.device)
        matrix_grad = sums.index_add_(0, ids, grad.to(sum_dtype)).to(dtype)
        if unique_ids is not None:
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # else torch 2.11 warns
                matrix_grad = torch.sparse_coo_tensor(unique_ids[None], matrix_grad, ctx.shape, is_coalesced=True)
        return None, None, matrix_grad, None


def gather_full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor of which each process holds a shard. All processes must call this."""
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
    """Return a copy in fp32 on the CPU, in pinned memory if `device`, by default that of `x`, is a GPU."""
    copy = torch.empty(x.shape, dtype=torch.float32, pin_memory=(device or x.device).type == "cuda")
    return copy.copy_(x.detach(), non_blocking=True)


# ---------------------------------------------------------------- products
# Products of many rows and a matrix with AMX (cpp/products.cpp): each row has the same bits as among few rows, in
# sampling. oneDNN sums the inputs of many rows in another order, which depends on the number of rows, and for some
# numbers of rows it takes twice as long.
#
# Shapes: n rows, K inputs, N outputs.


GEMM_BLOCK = 32
"""The AMX kernels take matrices whose inputs and outputs are multiples of this, and at least this many rows."""
_MAX_INPUT_GRADIENT_OUTPUTS = 2**14
"""For matrices with more outputs, such as a head, oneDNN computes gradients of inputs faster."""
GEMM_PROFILER_NAME = "multiply_rows"
WEIGHT_GRADIENT_PROFILER_NAME = "sum_over_tokens"


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear of x [n, K], a weight [N, K] and a bias [N]. Raises MemoryError."""
    if not (kernel := _find_gemm_kernel(x, weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return JoinedLinear.apply(x, bias, weight)  # pyright: ignore[reportReturnType]
    return _multiply_with_amx(kernel, x, weight, bias, transposed=False)


def compute_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient [n, K] of a product's inputs from that of its outputs [n, N]. Raises MemoryError."""
    kernel = _find_gemm_kernel(grad, weight) if len(weight) <= _MAX_INPUT_GRADIENT_OUTPUTS else None
    return _multiply_with_amx(kernel, grad, weight, None, transposed=True) if kernel else grad @ weight


def _find_gemm_kernel(x: Tensor, weight: Tensor) -> KernelVariant | None:
    """Return the kernel that multiplies x by a matrix; None if PyTorch's operators do."""
    has_gemm_shape = x.ndim == 2 and len(x) >= GEMM_BLOCK and not any(size % GEMM_BLOCK for size in weight.shape)
    if not has_gemm_shape or not weight.is_contiguous():
        return None
    takes_both = find_kernels(x, x.dtype) and find_kernels(weight, weight.dtype)
    return load_gemm_kernel()[0] if takes_both else None


def _multiply_with_amx(
    kernel: KernelVariant, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    (n, width), outputs = x.shape, weight.shape[1 if transposed else 0]
    y = x.new_empty(n, outputs)
    with record_function(GEMM_PROFILER_NAME):
        rows, threads = (x, x.stride(0), n, width), torch.get_num_threads()
        status = call_kernel(kernel.library.multiply_rows, *rows, weight, outputs, bias, int(transposed), y, threads)
    if status:
        raise MemoryError(f"no memory for a product with a matrix of {weight.shape[0]} x {weight.shape[1]}")
    OperationCounter.count(2.0 * n * width * outputs)
    return y


def _list_gemm_kernels() -> list[KernelVariant]:
    """Return the kernel of attention if it uses AMX."""
    kernel, reason = attention.load_attention_kernel()
    if not kernel:
        raise KernelUnavailableError(reason)
    return [kernel] if kernel.uses_amx else []


def _compare_gemm(kernel: KernelVariant) -> Iterable[tuple[str, Any, Any]]:
    """Multiply as few rows as oneDNN sums in a known order; see `add_self_check`."""
    numbers = torch.randn(GEMM_BLOCK + 65, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, weight, bias = numbers[:GEMM_BLOCK], numbers[GEMM_BLOCK:-1], numbers[-1, :64]
    yield "products", _multiply_with_amx(kernel, x, weight, bias, transposed=False), F.linear(x, weight, bias)
    x = x[:, :64]
    yield "transposed products", _multiply_with_amx(kernel, x, weight, None, transposed=True), x @ weight


load_gemm_kernel = add_self_check("products", _list_gemm_kernels, _compare_gemm)
"""Return the kernel of matrix products, or None and the reason why there is none."""


def compute_weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype, accumulator: Tensor | None = None) -> Tensor:
    """Compute the gradient [N, K] of a weight, grad.mT @ x of grad [n, N] and inputs x [n, K], a sum over tokens.

    With AMX it is not rounded (cpp/weights.cpp). If an accumulator [N, K] is given, the gradient is added to it. Raises
    MemoryError.
    """
    kernel = attention.load_attention_kernel()[0] if dtype == torch.float32 and find_kernels(grad, grad.dtype) else None
    if not kernel or not kernel.uses_amx or any(width % GEMM_BLOCK for width in (grad.shape[1], x.shape[1])):
        sums = grad.mT @ x
        return sums.to(dtype) if accumulator is None else accumulator.add_(sums)
    sums = torch.empty(grad.shape[1], x.shape[1], dtype=dtype) if accumulator is None else accumulator
    sizes = len(grad), grad.shape[1], x.shape[1]
    inputs, adds, threads = (grad.contiguous(), x.contiguous()), accumulator is not None, torch.get_num_threads()
    with record_function(WEIGHT_GRADIENT_PROFILER_NAME):
        status = call_kernel(kernel.library.sum_over_tokens, *inputs, *sizes, sums, adds, threads)
    if status:
        raise MemoryError(f"no memory for the gradient of a matrix of {sizes[1]} x {sizes[2]}")
    OperationCounter.count(2.0 * sizes[0] * sizes[1] * sizes[2])
    return sums
