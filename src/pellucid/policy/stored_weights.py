"""Weights that stay in their files until an engine reads its own shards of them.

Until then a parameter is a placeholder: a tensor on the CPU with the shape and the dtype of the parameter, whose
elements share the memory of one. An adapter can be added to placeholders as to weights, and has the same initial bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Yield the tensor as a slice of the file, of which only the rows that are indexed are read.

        The file is closed afterwards: pages of an open file that were read count as memory of the process.
        """
        with safe_open(self.file, framework="pt") as file:
            yield file.get_slice(self.key)


def list_stored_tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file from its header. Raise SafetensorError for a damaged or cut file."""
    with safe_open(file, framework="pt") as opened:
        return [StoredTensor(file, key, tuple(opened.get_slice(key).get_shape())) for key in opened.keys()]  # noqa: SIM118


def make_placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a tensor whose elements all share the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class StoredWeights:
    """The parameters of a model that are placeholders, by name, and where their weights are.

    Args:
        tensors: the tensor of each such parameter; empty if the model has its weights.
        reason: why the model has its weights although an engine shards them; empty if it does not.
        explain_errors: the context that turns errors of reading a file into a UserError.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor] | None = None,
        reason: str = "",
        explain_errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.tensors, self.reason, self._explain_errors = tensors or {}, reason, explain_errors

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def __contains__(self, name: str) -> bool:
        return _remove_adapter(name) in self.tensors

    @torch.no_grad()
    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        """Read the rows of a tensor from `start` on into `out`, cast to its dtype. Raise UserError."""
        with self._explain_errors(), self.tensors[_remove_adapter(name)].open() as stored:
            if out.numel():
                out.copy_(stored[start : start + len(out)])

    @torch.no_grad()
    def read_elements(self, name: str, start: int, out: Tensor) -> None:
        """Read the elements of the flattened tensor from `start` on into `out`, which is flat and cast to its dtype.

        Elements of `out` beyond the end of the tensor become 0. Raise UserError.
        """
        shape = self.tensors[_remove_adapter(name)].shape
        row = prod(shape[1:])
        stop = min(start + out.numel(), prod(shape))
        count = max(0, stop - start)
        out[count:].zero_()
        with self._explain_errors(), self.tensors[_remove_adapter(name)].open() as stored:
            if count:
                first = start // row
                rows = stored[first : -(-stop // row)].flatten()
                out[:count].copy_(rows[start - first * row :][:count])

    def move_placeholders(self, model: nn.Module, device: torch.device) -> None:
        """Move a model with placeholders, without giving them memory."""
        for name, p in model.named_parameters():
            p.data = make_placeholder(tuple(p.shape), p.dtype, device) if name in self else p.data.to(device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)


def _remove_adapter(name: str) -> str:
    """Return the name that a parameter had before an adapter was added to its layer."""
    return name.replace(".base_layer.", ".")
