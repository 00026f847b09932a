"""Ctrl-C, SIGTERM and a terminal that is gone: a run ends with the step that it is in."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTED_EXIT_STATUS = 130
"""Exit status."""
STOPPING_MESSAGE = b"stopping after this step; once more to stop at once, back to the last checkpoint\n"


class StopRequests(list[int]):
    """The signals that have asked for a stop."""

    is_immediate = False

    @contextmanager
    def interrupt_immediately(self) -> Iterator[None]:
        """In here a request is a KeyboardInterrupt at once: for what can be done again and leaves nothing behind."""
        if self:
            raise KeyboardInterrupt
        self.is_immediate = True
        try:
            yield
        finally:
            self.is_immediate = False

    def handle_signal(self, number: int, _frame: FrameType | None) -> None:
        again = bool(self)
        self.append(number)
        if self.is_immediate or again:
            raise KeyboardInterrupt
        write_to_stderr(STOPPING_MESSAGE)


@contextmanager
def collect_stop_requests() -> Iterator[StopRequests]:
    """Requests to stop, served between two steps; a second one is served at once."""
    requests = StopRequests()
    with handle_stop_signals(requests.handle_signal):
        yield requests


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals that ask for a stop, for a while; Python lets the main thread alone handle any."""
    numbers = list_stop_signals() if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def defer_stop_signals() -> Iterator[None]:
    """Handle signals that ask for a stop at the end of the block, as they would have been handled without it.

    For the first import of torch: what is imported halfway cannot be imported again, and the process would crash later.
    """
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        write_to_stderr(b"stopping when torch is imported\n")

    with handle_stop_signals(note):
        yield
    if came:
        signal.raise_signal(came[0])


def list_stop_signals() -> list[signal.Signals]:
    """SIGHUP too, where there is one: but under nohup a run outlives its terminal."""
    known = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)
    return known if hang_up is None or signal.getsignal(hang_up) == signal.SIG_IGN else [*known, hang_up]


def write_to_stderr(line: bytes) -> None:
    """From within a signal handler, which may have come in the middle of a `print`."""
    with suppress(OSError):
        os.write(2, line)


def raise_keyboard_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def exit_immediately(_number: int, _frame: FrameType | None) -> None:
    """Where nothing can be left half done; an import may swallow exceptions, and turn them into others."""
    write_to_stderr(b"pellucid: stopped\n")
    os._exit(INTERRUPTED_EXIT_STATUS)


# ---------------------------------------------------------------- streams
# Standard output and error that end nothing: whether anybody hears them is no matter of a run's.


class TolerantFileIO(io.FileIO):
    """Standard output or error: whether anybody reads it, or has room for it, does not matter to what is going on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # a closed pipe, a terminal that is gone, a full disk
            return memoryview(data).nbytes


def make_tolerant_stream(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """The stream, or what takes its place where it is closed; no file of ours then gets its number."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    raw = TolerantFileIO(descriptor, "w", closefd=False)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def open_log_stream(descriptor: int) -> io.TextIOWrapper:
    """A stream to a file that others look at, a line at a time; what cannot be encoded is named."""
    raw: Any = TolerantFileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def open_standard_descriptors() -> None:
    """Descriptors 0 to 2 are open, in processes that are started too: there no other file gets their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
        os.set_inheritable(descriptor, True)
