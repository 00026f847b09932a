"""Standard output and error that end nothing: whether anybody hears them is no matter of a run's."""

from __future__ import annotations

import io
import os
from typing import Any


class Unheard(io.FileIO):
    """Standard output or error: whether anybody reads it, or has room for it, does not matter to what is going on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # a closed pipe, a terminal that is gone, a full disk
            return memoryview(data).nbytes


def unheard(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """The stream, or what takes its place where it is closed; no file of ours then gets its number."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    raw = Unheard(descriptor, "w", closefd=False)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def logged(descriptor: int) -> io.TextIOWrapper:
    """A stream to a file that others look at, a line at a time; what cannot be encoded is named."""
    raw: Any = Unheard(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def plugged() -> None:
    """Descriptors 0 to 2 are open, in processes that are started too: there no other file gets their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
        os.set_inheritable(descriptor, True)
