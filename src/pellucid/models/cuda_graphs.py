"""Decode steps as CUDA graphs: one call launches all kernels of a step. To launch them one by one from Python takes
longer than to run them.

A graph computes on the tensors with which it was captured. Host branches are not captured, so values that change from
token to token are read on the device. If Triton's kernels compute a step (`triton_decode`), its graphs outlive
batches; a graph of PyTorch's operators is valid for one layout of a batch, which ends when rows are admitted or
dropped, or the KV cache grows.

Shapes: n rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pellucid.models.decode import DecodeBatch
    from pellucid.models.decoder import Decoder

_StepFunction = Callable[[Tensor], Tensor]
"""(tokens [n] that are appended to the rows) -> logits [n, V] of the next tokens, or hidden states [n, D]"""
_TOLERANCE = 2.0**-6
"""The largest accepted error of a graph's result, relative to its largest number. Reordered sums cause less."""


class StepGraph:
    """A step with one number of rows: its first call launches kernels one by one, all later calls replay a graph.

    A kernel may initialize state in its first call, which cannot be captured. If a capture fails, the decoder warns
    once and uses no more graphs. A capture computes nothing, so the step is then computed without.
    """

    def __init__(self) -> None:
        self.is_first = True
        self.replay: _StepFunction | None = None

    def step(self, decoder: Decoder, compute: _StepFunction, tokens: Tensor) -> Tensor:
        """Return compute(tokens), until the next step."""
        with select_device(decoder.device):
            return self._step(decoder, compute, tokens)

    def _step(self, decoder: Decoder, compute: _StepFunction, tokens: Tensor) -> Tensor:
        if self.is_first or decoder.uses_cuda_graphs is False:
            self.is_first = False
            return compute(tokens)
        if self.replay is None:
            if decoder.uses_cuda_graphs is None:
                return self._check_capture(decoder, compute, tokens)
            try:
                self.replay = capture_step(compute, tokens)
            except RuntimeError as error:
                _disable_graphs(decoder, str(error))
                return compute(tokens)
        return self.replay(tokens)

    def _check_capture(self, decoder: Decoder, compute: _StepFunction, tokens: Tensor) -> Tensor:
        """Compare a graph with a step without one, once per decoder; use graphs if they agree."""
        expected, error_share = compute(tokens), float("inf")
        try:
            replay = capture_step(compute, tokens)
            error_share = measure_error_share(replay(tokens), expected)
            fault = f"its results are off by {error_share:.1g} of the largest"
            self.replay = replay
        except RuntimeError as error:  # CUDA raises it for everything that cannot be captured
            fault = str(error)
        if error_share < _TOLERANCE:
            decoder.uses_cuda_graphs = True
        else:
            _disable_graphs(decoder, fault)
        return expected


class EagerStepGraphs:
    """The graph of a batch's eager steps. It does not refer to the batch, so deleting the batch frees its memory."""

    def __init__(self) -> None:
        self.captured_buffers: tuple[Tensor, ...] = ()
        self.graph = StepGraph()

    def step(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Compute `batch.step_eager` with a graph, except for the first step of a layout."""
        layout = batch.get_captured_buffers()
        if [*map(id, layout)] != [*map(id, self.captured_buffers)]:
            self.captured_buffers, self.graph = layout, StepGraph()
        return self.graph.step(batch.decoder, batch.step_eager, tokens).clone()  # the next step overwrites it


def select_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which graphs are captured and kernels of Triton are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def measure_error_share(x: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest number."""
    return float((x - expected).abs().max() / expected.abs().max())


def _disable_graphs(decoder: Decoder, fault: str) -> None:
    decoder.uses_cuda_graphs = False
    warnings.warn(f"tokens are decoded without a CUDA graph: {fault}", stacklevel=3)


def capture_step(step: _StepFunction, tokens: Tensor) -> _StepFunction:
    """Capture a step for this number of tokens as a graph, and return a function that replays it.

    The next call overwrites what the function returned. Capturing computes nothing. Each graph has a memory pool of its
    own: a pool is released with the last graph that uses it, and capturing into a released pool is an error, so
    successive graphs cannot share one.
    """
    static_tokens = tokens.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads may call CUDA meanwhile, as NCCL's watchdog does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = step(static_tokens)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # torch stays on its capturing stream if a capture cannot be ended
        raise

    def replay(tokens: Tensor) -> Tensor:
        static_tokens.copy_(tokens)
        graph.replay()
        return result

    return replay
