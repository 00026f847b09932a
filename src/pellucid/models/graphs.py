"""A decoded token as a CUDA graph: its thousand kernels, begun by one call. Python begins them one by one more slowly
than a GPU ends them.

A graph computes on the tensors that it was recorded with. So it serves one layout of a batch: until rows come, are
dropped or need more room. No branch of the host is recorded: what changes from token to token is read on the device.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pellucid.models.decoding import DecodeBatch

Step = Callable[[Tensor], Tensor]
"""Append a token to each row [n]: logits [n, V] of the next."""
CLOSE = 2.0**-6
"""How far logits of a graph may be off, as a share of the largest: more than another order of sums makes of them."""


class Graphs:
    """The steps of a batch. It holds none of the batch itself, so that what a batch takes is freed with it."""

    def __init__(self) -> None:
        self.layout: tuple[Tensor, ...] = ()
        self.recorded: Step | None = None
        self.pool: Any = None
        """The memory that all graphs of a batch compute in, one after the other."""

    def step(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """`batch.by_operators`. The first token of a layout is computed without a graph: what a kernel sets up when it
        is first called cannot be recorded.
        """
        layout = batch.layout()
        if len(layout) != len(self.layout) or any(a is not b for a, b in zip(layout, self.layout, strict=True)):
            self.layout, self.recorded = layout, None
            return batch.by_operators(tokens)
        if self.recorded is None:
            if batch.decoder.recordable is None:
                return self._try(batch, tokens)
            self.recorded = record(batch.by_operators, tokens, self._pool())
        return self.recorded(tokens)

    def _try(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Settle, once for a decoder, whether a graph says what is said without: what is written is the same, too."""
        wanted, off = batch.by_operators(tokens), float("inf")
        try:
            found = record(batch.by_operators, tokens, self._pool())(tokens)
            off = float((found - wanted).abs().max() / wanted.abs().max())
            fault = f"its logits are off by {off:.1g} of the largest"
        except RuntimeError as error:  # so CUDA refuses what it cannot record
            fault = str(error)
        batch.decoder.recordable = off < CLOSE
        if not batch.decoder.recordable:
            warnings.warn(f"tokens are decoded without a CUDA graph: {fault}", stacklevel=2)
        return wanted

    def _pool(self) -> Any:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool


def record(step: Step, tokens: Tensor, pool: Any) -> Step:
    """The step for so many tokens, as a graph. Nothing is computed yet."""
    read = tokens.clone()
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the device meanwhile, as NCCL's watchdog does.
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        logits = step(read)

    def again(tokens: Tensor) -> Tensor:
        read.copy_(tokens)
        graph.replay()
        return logits.clone()  # the next call writes over it

    return again
