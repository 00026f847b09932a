"""Decode steps as CUDA graphs: one call launches the thousand kernels of a step. To launch them one by one from
Python takes longer than to run them.

A graph computes on the tensors with which it was captured, so it is valid for one layout of a batch, which ends when
rows are admitted or dropped, or the KV cache grows. Host branches are not captured, so values that change from token
to token are read on the device.

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

_StepFunction = Callable[[Tensor], Tensor]
"""(tokens [n] that are appended to the rows) -> logits [n, V] of the next tokens"""
_LOGIT_TOLERANCE = 2.0**-6
"""The largest accepted error of a graph's logits, relative to the largest logit. Reordered sums cause less."""


class StepGraphs:
    """The graph of a batch's steps. It does not refer to the batch, so deleting the batch frees its memory."""

    def __init__(self) -> None:
        self.captured_buffers: tuple[Tensor, ...] = ()
        self.replay: _StepFunction | None = None

    def step(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Compute `batch.step_eager` with a graph, except for the first step of a layout.

        A kernel may initialize state in its first call, which cannot be captured. If a capture fails, the decoder warns
        once and uses no more graphs. A capture computes nothing, so the step is then computed eagerly.
        """
        layout = batch.get_captured_buffers()
        if [*map(id, layout)] != [*map(id, self.captured_buffers)]:
            self.captured_buffers, self.replay = layout, None
            return batch.step_eager(tokens)
        if self.replay is None:
            if batch.decoder.uses_cuda_graphs is None:
                return self._check_capture(batch, tokens)
            try:
                self.replay = capture_step(batch.step_eager, tokens)
            except RuntimeError as error:
                _disable_graphs(batch, str(error))
                return batch.step_eager(tokens)
        return self.replay(tokens)

    def _check_capture(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Compare the logits of a graph with those of an eager step, once per decoder; use graphs if they agree."""
        expected, error_share = batch.step_eager(tokens), float("inf")
        try:
            logits = capture_step(batch.step_eager, tokens)(tokens)
            error_share = float((logits - expected).abs().max() / expected.abs().max())
            fault = f"its logits are off by {error_share:.1g} of the largest"
        except RuntimeError as error:  # CUDA raises it for everything that cannot be captured
            fault = str(error)
        if error_share < _LOGIT_TOLERANCE:
            batch.decoder.uses_cuda_graphs = True
        else:
            _disable_graphs(batch, fault)
        return expected


def _disable_graphs(batch: DecodeBatch, fault: str) -> None:
    batch.decoder.uses_cuda_graphs = False
    warnings.warn(f"tokens are decoded without a CUDA graph: {fault}", stacklevel=3)


def capture_step(step: _StepFunction, tokens: Tensor) -> _StepFunction:
    """Capture a step for this number of tokens as a graph, and return a function that replays it.

    Capturing computes nothing. Each graph has a memory pool of its own: a pool is released with the last graph that
    uses it, and capturing into a released pool is an error, so successive graphs cannot share one.
    """
    static_tokens = tokens.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads may call CUDA meanwhile, as NCCL's watchdog does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = step(static_tokens)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # torch stays on its capturing stream if a capture cannot be ended
        raise

    def replay(tokens: Tensor) -> Tensor:
        static_tokens.copy_(tokens)
        graph.replay()
        return logits.clone()  # the next call overwrites them

    return replay
