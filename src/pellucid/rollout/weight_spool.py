"""Weights in a temporary file, from which sampler servers get them one at a time.

The file is a copy that does not change with the policy, and that needs no memory. It has no name on POSIX systems, so
that nothing is left of it even if the process is killed.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from pellucid.types import UserError


class _SpoolFile(NamedTuple):
    """A file, and the lock that is held between finding a place in it and reading there."""

    stream: BinaryIO
    lock: threading.Lock


class _SpooledWeight(NamedTuple):
    """The place and the form of a weight in a file."""

    file: _SpoolFile
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class WeightSpool(Mapping[str, Tensor]):
    """Weights by name, in temporary files. Each access reads one of them. Any number of threads may read."""

    def __init__(self, entries: Mapping[str, _SpooledWeight]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        weight = torch.empty(entry.shape, dtype=entry.dtype)
        with entry.file.lock:
            entry.file.stream.seek(entry.offset)
            entry.file.stream.readinto(view_bytes(weight))  # pyright: ignore[reportAttributeAccessIssue]
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __or__(self, other: WeightSpool) -> WeightSpool:
        """Return both sets of weights, in the same files."""
        return WeightSpool(self.entries | other.entries)

    def get_sizes(self) -> dict[str, int]:
        """Return the bytes of each weight."""
        return {name: entry.nbytes for name, entry in self.entries.items()}

    def close(self) -> None:
        """Delete the files."""
        for entry in self.entries.values():
            entry.file.stream.close()


def spool_weights(weights: Iterable[tuple[str, Tensor]]) -> WeightSpool:
    """Write weights to a new temporary file, one at a time.

    Raises:
        UserError: The file cannot be written. All of `weights` has been iterated over even then, since other processes
            may take part in gathering them.
    """
    entries: dict[str, _SpooledWeight] = {}
    file, offset, fault = None, 0, None
    for name, weight in weights:
        try:
            file = file or _SpoolFile(tempfile.TemporaryFile(prefix="pellucid-weights-"), threading.Lock())  # noqa: SIM115
            if fault is None:
                host = weight.detach().cpu().contiguous()
                file.stream.write(view_bytes(host))
                entries[name] = _SpooledWeight(file, offset, host.shape, host.dtype)
                offset += host.nbytes
                file.stream.flush()
        except OSError as error:
            fault = fault or error
    if fault:
        if file:
            file.stream.close()
        raise UserError(
            f"{tempfile.tempdir or 'the temporary folder'} has no room for the weights that sampler servers get"
            f" ({fault.strerror or fault}): set the environment variable TMPDIR to a folder that has"
        ) from fault
    return WeightSpool(entries)


def view_bytes(weight: Tensor) -> memoryview:
    """Return the bytes of a contiguous weight on the CPU, without copying them."""
    return weight.view(-1).view(torch.uint8).numpy().data
