"""A decoded token as a CUDA graph: its thousand kernels, started by one call. Python starts them one by one more slowly
than a GPU finishes them.

A graph computes on the tensors that it was captured with, so it serves one layout of a batch: until rows are admitted
or dropped, or need more room. No branch of the host is captured: values that change from token to token are read on
the device.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pellucid.models.decode import DecodeBatch

StepFunction = Callable[[Tensor], Tensor]
"""Append a token to each row [n]: logits [n, V] of the next."""
LOGIT_TOLERANCE = 2.0**-6
"""How far logits of a graph may be off, as a share of the largest: more than another order of sums makes of them."""


class StepGraphs:
    """The steps of a batch. It holds none of the batch itself, so that a batch's memory is freed with it."""

    def __init__(self) -> None:
        self.captured_buffers: tuple[Tensor, ...] = ()
        self.replay: StepFunction | None = None

    def step(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """`batch.by_operators`. The first token of a layout is computed without a graph: what a kernel sets up when it
        is first called cannot be captured.

        A capture that fails, now or later, ends the use of graphs by this decoder with one warning. A token is
        complete only when its graph was replayed, so the operators can compute it again.
        """
        layout = batch.get_captured_buffers()
        if len(layout) != len(self.captured_buffers) or any(
            a is not b for a, b in zip(layout, self.captured_buffers, strict=True)
        ):
            self.captured_buffers, self.replay = layout, None
            return batch.step_eager(tokens)
        if self.replay is None:
            if batch.decoder.uses_cuda_graphs is None:
                return self._check_capture(batch, tokens)
            try:
                self.replay = capture_step(batch.step_eager, tokens)
            except RuntimeError as error:
                disable_graphs(batch, str(error))
                return batch.step_eager(tokens)
        return self.replay(tokens)

    def _check_capture(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Compare, once for a decoder, the logits of a graph with those of the operators, and use graphs from now on if
        they agree. Both write the same keys and values.
        """
        wanted, off = batch.step_eager(tokens), float("inf")
        try:
            found = capture_step(batch.step_eager, tokens)(tokens)
            off = float((found - wanted).abs().max() / wanted.abs().max())
            fault = f"its logits are off by {off:.1g} of the largest"
        except RuntimeError as error:  # CUDA raises it for everything that cannot be captured
            fault = str(error)
        if off < LOGIT_TOLERANCE:
            batch.decoder.uses_cuda_graphs = True
        else:
            disable_graphs(batch, fault)
        return wanted


def disable_graphs(batch: DecodeBatch, fault: str) -> None:
    """Decode by operators from now on, and warn why."""
    batch.decoder.uses_cuda_graphs = False
    warnings.warn(f"tokens are decoded without a CUDA graph: {fault}", stacklevel=3)


def capture_step(step: StepFunction, tokens: Tensor) -> StepFunction:
    """The step for this number of tokens, as a graph. Nothing is computed yet.

    Each graph has a memory pool of its own. A pool is released with the last graph that uses it, and capturing into a
    released pool is an error, so graphs that follow one another cannot share one.
    """
    read = tokens.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads may ask the device meanwhile, as NCCL's watchdog does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = step(read)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # torch stays on its capturing stream if a capture cannot be ended
        raise

    def again(tokens: Tensor) -> Tensor:
        read.copy_(tokens)
        graph.replay()
        return logits.clone()  # the next call writes over it

    return again
