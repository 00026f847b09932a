"""Weights to compute with, and the parameters behind them: a copy in the compute dtype, the gradient to the masters.

Shapes: N tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pellucid.models import products
from pellucid.models.sums import sums_over_tokens

OTHER_POLICY = "the checkpoint was made with another policy.model or policy.lora: resume with the same"
_optimizer_steps = 0
"""Of every optimizer of this process, also the one that is being taken: torch's fused ones change parameters without
counting their versions."""


def _count_step(*_: object) -> None:
    global _optimizer_steps  # noqa: PLW0603 - a counter of the process, as the hook is
    _optimizer_steps += 1


register_optimizer_step_pre_hook(_count_step)


class Gatherable(Protocol):
    """Parameters of which a process keeps a part, whole from `unshard` to `reshard`. Processes call these together."""

    def unshard(self) -> Any: ...
    def reshard(self) -> Any: ...


class Matrix(NamedTuple):
    """A weight whose gradient is added up over many tokens: unrounded, it goes to the master itself."""

    tensor: Tensor
    """[V, D] to compute with."""
    master: Tensor
    """The parameter."""


class Parts(NamedTuple):
    """The parts of a matrix. Autograd keeps these, which an engine can free and gather, not what they are joined to."""

    parts: tuple[Tensor, ...]


class Trained(NamedTuple):
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

    def get_weights(self) -> Tensor | Parts | Trained:
        """The cast weights, whose gradient goes to the masters."""
        masters = self.get_masters()
        if self.is_uncached:
            cast = [m.to(self.dtype) for m in masters]
            matrices = len(cast) > 1 and cast[0].ndim > 1 and torch.is_grad_enabled()
            return Parts(tuple(cast)) if matrices else joined(cast)
        if masters[0].ndim > 1 and torch.is_grad_enabled() and any(m.requires_grad for m in masters):
            return Trained(self.get_cast_copy(), tuple(masters))
        return Cast.apply(self.get_cast_copy(), *masters)  # pyright: ignore[reportReturnType]

    def get_cast_copy(self) -> Tensor:
        """The cast weights without a gradient; cast anew only where the masters have changed."""
        masters = self.get_masters()
        if self.is_uncached or (len(masters) == 1 and masters[0].dtype == self.dtype):
            return joined(masters).detach().to(self.dtype)
        if self.cast_copy is None:
            self.cast_copy = masters[0].new_empty(sum(map(len, masters)), *masters[0].shape[1:], dtype=self.dtype)
        if self.copied_version != (now := state_of(masters)):
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
        self.copied_version = state_of(self.get_masters())


class JoinedLinear(torch.autograd.Function):
    """F.linear by matrices as if they were one, which is joined anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parts)
        return products.linear(x, torch.cat(parts), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *parts = ctx.saved_tensors
        of_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        return products.of_inputs(grad, torch.cat(parts)), of_bias, *(grad.mT @ x).split([len(part) for part in parts])


class TrainedLinear(torch.autograd.Function):
    """F.linear by a matrix, whose gradient goes to its masters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.masters = [(len(m), m.dtype) for m in masters]
        return products.linear(x, matrix, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, matrix = ctx.saved_tensors
        of_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        sums = sums_over_tokens(grad, x, torch.promote_types(grad.dtype, torch.float32))
        parts = sums.split([rows for rows, _ in ctx.masters])
        of_masters = (part.to(dtype) for part, (_, dtype) in zip(parts, ctx.masters, strict=True))
        of_x = products.of_inputs(grad, matrix) if ctx.needs_input_grad[0] else None
        return of_x, of_bias, None, *of_masters


def joined(masters: Sequence[Tensor]) -> Tensor:
    return masters[0] if len(masters) == 1 else torch.cat(list(masters))


def state_of(masters: Sequence[Tensor]) -> tuple[int, ...]:
    """What changes whenever the masters do: their versions, and where they are trained the optimizer steps."""
    trained = any(m.requires_grad for m in masters)
    return _optimizer_steps if trained else 0, *(m._version for m in masters)


class Cast(torch.autograd.Function):
    """The value of the cast weights with the gradient of their masters, so that not every forward pass casts anew."""

    @staticmethod
    def forward(ctx: Any, copy: Tensor, *masters: Tensor) -> Tensor:
        ctx.masters = [(len(m), m.dtype) for m in masters]
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = grad.split([rows for rows, _ in ctx.masters])
        return None, *(part.to(dtype) for part, (_, dtype) in zip(parts, ctx.masters, strict=True))


def embedded(ids: Tensor, embedding: Matrix, sparse: bool = False) -> Tensor:
    """[N] -> [N, D]. A sparse gradient is to be added to a dense one, as that of a head which is the same matrix."""
    if not torch.is_grad_enabled():  # with forward-mode gradients, which Lookup has not
        return F.embedding(ids, embedding.master).to(embedding.tensor.dtype)
    return Lookup.apply(ids, *embedding, sparse)  # pyright: ignore[reportReturnType]


class Lookup(torch.autograd.Function):
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


def whole(x: Tensor) -> Tensor:
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


def on_cpu(x: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy in fp32; in pinned memory where a GPU, that of `x` or `device`, shares it."""
    copy = torch.empty(x.shape, dtype=torch.float32, pin_memory=(device or x.device).type == "cuda")
    return copy.copy_(x.detach(), non_blocking=True)
