"""Weights cast to the compute dtype, whose gradients go to the master weights; and compiled matrix products.

Shapes: N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from pellucid.models.ops import add_fp32_product, promote_to_fp32, supports_fp32_product

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


class AdapterPart(NamedTuple):
    """One of the adapters that are joined in an `Adapter`, and where its matrices are in the joined ones."""

    layer: Any
    """A layer of peft: the output of its `base_layer`, plus scale * (x A^T) B^T."""
    rows: slice
    """The rows of B."""
    ranks: slice
    """The rows of A, and the columns of B."""

    @property
    def name(self) -> str:
        [name] = self.layer.lora_A
        return name

    @property
    def is_active(self) -> bool:
        return not (self.layer.disable_adapters or self.layer.merged)

    @property
    def scale(self) -> float:
        return self.layer.scaling[self.name]

    def get_masters(self) -> tuple[Tensor, Tensor]:
        """Return A and B. An engine that shards parameters puts gathered ones into their modules."""
        return self.layer.lora_A[self.name].weight, self.layer.lora_B[self.name].weight


class Adapter(NamedTuple):
    """The LoRA matrices (arXiv 2106.09685) of a projection in the compute dtype: it adds (x A^T) B^T.

    A projection of several layers has those of all of them, with a B that is block-diagonal.
    """

    a: Tensor
    """[R, K], padded with 0 to a rank that the AMX kernels take."""
    b: Tensor
    """[N, R], multiplied by the scales."""
    parts: tuple[AdapterPart, ...]
    masters: tuple[Tensor, ...]
    """A and B of each part."""


class AdaptedMatrix(NamedTuple):
    """A frozen matrix and the adapter beside it."""

    parts: tuple[Tensor, ...]
    """The parts of the matrix; see `MatrixParts`."""
    adapter: Adapter

    @property
    def base(self) -> Tensor:
        """[N, K]"""
        return _concatenate(self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def join(self) -> Tensor:
        """Return the matrix [N, K + R] by which x and x A^T are multiplied together."""
        return torch.cat([self.base, self.adapter.b], 1)


class CastAdapter:
    """The adapters of the layers of a projection, joined and cast to the compute dtype as in `CastWeights`."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """Join the adapters of layers whose outputs are concatenated; some of these may have none."""
        self.dtype = dtype
        self.copies: tuple[Tensor, Tensor] | None = None
        self.copied_version: tuple[int, ...] = ()
        parts, self.outputs, rank = [], 0, 0
        for layer in layers:
            rows = slice(self.outputs, self.outputs + layer.out_features)
            self.outputs = rows.stop
            if hasattr(layer, "lora_A"):
                [a] = layer.lora_A.values()
                parts.append(AdapterPart(layer, rows, slice(rank, rank + a.out_features)))
                rank += a.out_features
        self.parts, self.inputs = tuple(parts), layers[0].in_features
        self.rank = -(-rank // GEMM_BLOCK) * GEMM_BLOCK

    def get_adapter(self, is_uncached: bool) -> Adapter | None:
        """Return the adapter as it is now; None if it is disabled, or merged into its base."""
        if not any(part.is_active for part in self.parts):
            return None
        masters = tuple(master for part in self.parts for master in part.get_masters())
        if is_uncached:
            return Adapter(*self._cast(masters, None), self.parts, masters)
        if self.copies is None or self.copied_version != _get_masters_version(masters):
            self.copies, self.copied_version = self._cast(masters, self.copies), _get_masters_version(masters)
        return Adapter(*self.copies, self.parts, masters)

    @torch.no_grad()
    def _cast(self, masters: Sequence[Tensor], copies: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return A [R, K] and B [N, R], written into `copies` if there are any."""
        zeros = functools.partial(masters[0].new_zeros, dtype=self.dtype)
        a, b = copies or (zeros((self.rank, self.inputs)), zeros((self.outputs, self.rank)))
        for part, part_a, part_b in zip(self.parts, masters[::2], masters[1::2], strict=True):
            a[part.ranks].copy_(part_a)
            b[part.rows, part.ranks].copy_(promote_to_fp32(part_b) * part.scale)
        return a, b


class CastWeights:
    """Parameters concatenated and cast to the compute dtype; cast again whenever they may have changed.

    They are looked up in their modules, by name, at each use: an engine that shards parameters puts gathered ones there
    while a layer computes. With `is_uncached` no copy is kept, since gathered parameters are freed after the layer.
    Parameters of this dtype share the memory of the copy.
    """

    def __init__(
        self, locations: Sequence[tuple[nn.Module, str]], dtype: torch.dtype, adapter: CastAdapter | None = None
    ) -> None:
        self.locations, self.dtype, self.adapter = locations, dtype, adapter
        self.is_uncached = False
        self.cast_copy: Tensor | None = None
        self.copied_version: tuple[int, ...] = ()

    def get_masters(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self.locations]

    def get_weights(self) -> Tensor | MatrixParts | TrainedMatrix | AdaptedMatrix:
        """Return the cast weights; their gradient goes to the masters."""
        masters = self.get_masters()
        if self.adapter and (adapter := self.adapter.get_adapter(self.is_uncached)):
            keeps_parts = self.is_uncached and torch.is_grad_enabled()
            parts = tuple(m.to(self.dtype) for m in masters) if keeps_parts else (self.get_cast_copy(),)
            return AdaptedMatrix(parts, adapter)
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
                if part.data_ptr() == master.data_ptr():
                    continue
                part.copy_(master.detach())
                # A trained parameter that is a view of a larger buffer is one of an engine, which writes there.
                is_own = not master.requires_grad or master.untyped_storage().nbytes() == part.nbytes
                if master.dtype == self.dtype and is_own:
                    master.data = part
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
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, *parts)
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


class Recomputation(NamedTuple):
    """How to compute the input of a product again in the backward pass, from tensors that are kept anyway."""

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def _keep_input(x: Tensor, recomputation: Recomputation | None) -> tuple[Callable[..., Tensor] | None, list[Tensor]]:
    """Return how to compute an input again, and what to save for it; None if the input itself is saved.

    A GPU has less memory than time, so an input that can be computed again is not saved there.
    """
    if recomputation is None or x.device.type != "cuda":
        return None, [x]
    return recomputation.compute, [t.detach() for t in recomputation.inputs]


class TrainedLinear(torch.autograd.Function):
    """F.linear by a TrainedMatrix."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        recomputation: Recomputation | None,
        matrix: Tensor,
        *masters: Tensor,
    ) -> Tensor:
        ctx.compute_input, kept = _keep_input(x, recomputation)
        ctx.save_for_backward(matrix, *kept)
        ctx.masters = masters
        return apply_linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrix, *kept = ctx.saved_tensors
        x = ctx.compute_input(*kept) if ctx.compute_input else kept[0]
        bias_grad = grad.sum(0) if ctx.needs_input_grad[1] else None
        master_grads = compute_master_gradients(grad, x, ctx.masters)
        del x  # one that was computed again is not in memory beside its gradient
        x_grad = compute_input_gradient(grad, matrix) if ctx.needs_input_grad[0] else None
        return x_grad, bias_grad, None, None, *master_grads


_accumulates_in_place = False


@contextmanager
def accumulate_in_place(enabled: bool) -> Iterator[None]:
    """In a backward pass in this context, add the gradients of matrices to `.grad` inside the products, if enabled.

    Autograd then gets none for these parameters, so neither their hooks nor `torch.autograd.grad` see any.
    """
    global _accumulates_in_place  # noqa: PLW0603 - autograd runs the backward pass of a GPU in a thread of its own
    _accumulates_in_place = enabled
    try:
        yield
    finally:
        _accumulates_in_place = False


def has_gradient_in_place(master: Tensor) -> bool:
    """Return whether the gradient of a parameter is to be added to its `.grad`; see `accumulate_in_place`."""
    return _accumulates_in_place and master.requires_grad and master.dtype == torch.float32


def compute_master_gradients(grad: Tensor, x: Tensor, masters: Sequence[Tensor]) -> list[Tensor | None]:
    """Compute the gradients of the parameters whose rows, concatenated, are the matrix of a product.

    Returns None for those that are added to `.grad`. Shapes are as in `compute_weight_gradient`. Raises MemoryError.
    """
    sizes, sum_dtype = [len(m) for m in masters], torch.promote_types(grad.dtype, torch.float32)
    if not all(map(has_gradient_in_place, masters)):
        parts = compute_weight_gradient(grad, x, sum_dtype).split(sizes)
        return [part.to(m.dtype) for part, m in zip(parts, masters, strict=True)]
    joined = _find_joined_gradient(masters)
    parts = compute_weight_gradient(grad, x, sum_dtype, joined).split(sizes)
    if joined is None:
        for master, part in zip(masters, parts, strict=True):
            master.grad = part if master.grad is None else master.grad.add_(part)
    return [None] * len(masters)


def _find_joined_gradient(masters: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix whose parts `compute_master_gradients` has made the gradients of these parameters before."""
    grads = [m.grad for m in masters]
    if any(g is None for g in grads):
        return None
    joined = grads[0] if len(grads) == 1 else grads[0]._base  # pyright: ignore[reportOptionalMemberAccess]
    is_joined = joined is not None and len(joined) == sum(map(len, masters))
    return joined if is_joined and all(g is joined or g._base is joined for g in grads) else None  # pyright: ignore


class AdaptedLinear(torch.autograd.Function):
    """F.linear by an AdaptedMatrix. With z = x A^T [n, R], x and z are the inputs of one product by W and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        recomputation: Recomputation | None,
        weight: AdaptedMatrix,
        *masters: Tensor,
    ) -> Tensor:
        adapter = weight.adapter
        z = apply_linear(x, adapter.a)
        ctx.compute_input, kept = _keep_input(x, recomputation)
        ctx.save_for_backward(z, adapter.a, adapter.b, *kept, *weight.parts)
        ctx.kept, ctx.parts, ctx.dtypes = len(kept), adapter.parts, [master.dtype for master in masters]
        return apply_joined_linear(x, weight.base, bias, z, adapter.b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        z, a, b, *tensors = ctx.saved_tensors
        kept, weight_parts = tensors[: ctx.kept], tensors[ctx.kept :]
        x = ctx.compute_input(*kept) if ctx.compute_input else kept[0]
        z_grad, sum_dtype = compute_input_gradient(grad, b), torch.promote_types(grad.dtype, torch.float32)
        a_grad, b_grad = compute_weight_gradient(z_grad, x, sum_dtype), compute_weight_gradient(grad, z, sum_dtype)
        del x  # one that was computed again is not in memory beside its gradient
        pairs = ((a_grad[part.ranks], b_grad[part.rows, part.ranks] * part.scale) for part in ctx.parts)
        master_grads = (g.to(dtype) for g, dtype in zip((g for pair in pairs for g in pair), ctx.dtypes, strict=True))
        weight = _concatenate(weight_parts)
        x_grad = compute_input_gradient(grad, weight, z_grad, a) if ctx.needs_input_grad[0] else None
        return x_grad, None, None, None, *master_grads


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
        ctx.master, ctx.shape, ctx.sparse = master, master.shape, sparse
        ctx.dtypes = torch.promote_types(master.dtype, torch.float32), master.dtype
        return F.embedding(ids, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [ids] = ctx.saved_tensors
        (rows, width), (sum_dtype, dtype), unique_ids = ctx.shape, ctx.dtypes, None
        if has_gradient_in_place(ctx.master) and ctx.master.grad is not None:
            ctx.master.grad.index_add_(0, ids, grad.to(sum_dtype))
            return None, None, None, None
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


def apply_joined_linear(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, b: Tensor) -> Tensor:
    """Compute the product [n, N] of x [n, K] and z [n, R], concatenated, and a weight [N, K] and b [N, R], without
    gradient. Raises MemoryError.

    In bf16 on the CPU the sums are in this order and rounded once, as in a fused step.
    """
    if kernel := _find_gemm_kernel(x, weight):
        return _multiply_with_amx(kernel, x, weight, bias, transposed=False, more=(z, b))
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return F.linear(torch.cat([x, z], 1), torch.cat([weight, b], 1), bias)
    return F.linear(x, weight, bias).addmm_(z, b.mT)


def compute_input_gradient(
    grad: Tensor, weight: Tensor, z_grad: Tensor | None = None, a: Tensor | None = None
) -> Tensor:
    """Compute the gradient [n, K] of a product's inputs from that of its outputs [n, N]. Raises MemoryError.

    If z_grad [n, R] and a [R, K] are given, their product is added.
    """
    kernel = _find_gemm_kernel(grad, weight) if len(weight) <= _MAX_INPUT_GRADIENT_OUTPUTS else None
    more = None if z_grad is None or a is None else (z_grad, a)
    if kernel:
        return _multiply_with_amx(kernel, grad, weight, None, transposed=True, more=more)
    product = grad @ weight
    return product if more is None else product.addmm_(*more)


def _find_gemm_kernel(x: Tensor, weight: Tensor) -> KernelVariant | None:
    """Return the kernel that multiplies x by a matrix; None if PyTorch's operators do."""
    has_gemm_shape = x.ndim == 2 and len(x) >= GEMM_BLOCK and not any(size % GEMM_BLOCK for size in weight.shape)
    if not has_gemm_shape or not weight.is_contiguous():
        return None
    takes_both = find_kernels(x, x.dtype) and find_kernels(weight, weight.dtype)
    return load_gemm_kernel()[0] if takes_both else None


def _multiply_with_amx(
    kernel: KernelVariant,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool,
    more: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Multiply x and a weight, and add the product of two more matrices of the same shapes but for the inputs."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (n, width), outputs = x.shape, weight.shape[1 if transposed else 0]
    y = x.new_empty(n, outputs)
    (more_x, more_weight), more_width = (None, None) if more is None else more, 0 if more is None else more[0].shape[1]
    with record_function(GEMM_PROFILER_NAME):
        rows, added = (x, x.stride(0), n, width, weight), (more_x, more_width, more_weight)
        sizes = outputs, bias, int(transposed), y, torch.get_num_threads()
        status = call_kernel(kernel.library.multiply_rows, *rows, *added, *sizes)
    if status:
        raise MemoryError(f"no memory for a product with a matrix of {weight.shape[0]} x {weight.shape[1]}")
    OperationCounter.count(2.0 * n * (width + more_width) * outputs)
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
    # The last inputs as a second pair
    x, end = numbers[:GEMM_BLOCK], numbers.shape[1] - GEMM_BLOCK
    more = x[:, end:].contiguous(), weight[:, end:].contiguous()
    product = _multiply_with_amx(kernel, x[:, :end], weight[:, :end].contiguous(), bias, transposed=False, more=more)
    yield "products of two pairs", product, F.linear(x, weight, bias)


load_gemm_kernel = add_self_check("products", _list_gemm_kernels, _compare_gemm)
"""Return the kernel of matrix products, or None and the reason why there is none."""


def compute_weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype, accumulator: Tensor | None = None) -> Tensor:
    """Compute the gradient [N, K] of a weight, grad.mT @ x of grad [n, N] and inputs x [n, K], a sum over tokens.

    With AMX (cpp/weights.cpp) and on a GPU it is not rounded. If an accumulator [N, K] is given, the gradient is added
    to it. Raises MemoryError.
    """
    if dtype == torch.float32 and supports_fp32_product(grad):
        return add_fp32_product(grad.mT, x, accumulator)
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
