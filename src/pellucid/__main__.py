"""Where the process begins: what it prints may go nowhere, and a stop request may come before all is imported."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    # `python -m` puts the working directory first: a file of the user's called tomllib.py would be taken for Python's.
    del sys.path[0]

import io
import signal
from typing import Any

from pellucid.interrupts import end_at_once, stop_signals


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


def main() -> None:
    for number in stop_signals():
        signal.signal(number, end_at_once)
    sys.stdout, sys.stderr = unheard(sys.stdout, 1), unheard(sys.stderr, 2)
    from pellucid.cli import main  # noqa: PLC0415 - takes its time, in which a stop request may come

    main()


if __name__ == "__main__":
    main()
