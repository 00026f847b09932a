"""Signals that ask a run to stop after its step, and standard streams whose write errors do not end it."""

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
_STOPPING_MESSAGE = b"stopping after this step; a second signal stops at once, back to the last checkpoint\n"


# ---------------------------------------------------------------- requests to stop


class StopRequests(list[int]):
    """The numbers of the signals that have asked for a stop."""

    is_immediate = False

    @contextmanager
    def interrupt_immediately(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at once for a request within the block, which must be safe to interrupt."""
        self.is_immediate = True  # first, or a signal after the test would wait until the block ends
        try:
            if self:
                raise KeyboardInterrupt
            yield
        finally:
            self.is_immediate = False

    def handle_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note a request. Raise KeyboardInterrupt for the second one, and for each within `interrupt_immediately`."""
        is_repeated = bool(self)
        self.append(number)
        if self.is_immediate or is_repeated:
            raise KeyboardInterrupt
        _write_to_stderr(_STOPPING_MESSAGE)


@contextmanager
def collect_stop_requests() -> Iterator[StopRequests]:
    """Collect requests to stop within the block; the second one raises KeyboardInterrupt."""
    requests = StopRequests()
    with handle_stop_signals(requests.handle_signal):
        yield requests


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals that ask for a stop within the block. In other threads than the main one, do nothing."""
    numbers = list_stop_signals() if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def defer_stop_signals() -> Iterator[None]:
    """Delay signals that ask for a stop until the end of the block, which imports torch.

    A module that was imported halfway cannot be imported again, and the process would crash later.
    """
    received: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _write_to_stderr(b"stopping when torch is imported\n")

    with handle_stop_signals(handler):
        yield
    if received:
        signal.raise_signal(received[0])


def list_stop_signals() -> list[signal.Signals]:
    """Return SIGINT, SIGTERM and, unless it is ignored as under nohup, SIGHUP."""
    hang_up = [signal.SIGHUP] if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def _write_to_stderr(line: bytes) -> None:
    """Write a line without Python's buffers: a signal handler may interrupt a `print`."""
    with suppress(OSError):
        os.write(2, line)


def raise_keyboard_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def exit_immediately(_number: int, _frame: FrameType | None) -> None:
    """Exit without cleanup. Used during imports, which may swallow exceptions or replace them."""
    _write_to_stderr(b"pellucid: stopped\n")
    os._exit(INTERRUPTED_EXIT_STATUS)


# ---------------------------------------------------------------- standard streams


class _TolerantFileIO(io.FileIO):
    """Standard output or error whose write errors are ignored, so that they do not end a run."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # a closed pipe, a closed terminal, a full disk
            return memoryview(data).nbytes


def make_tolerant_stream(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Return a tolerant stream in place of standard output or error; one to the null device if that is closed."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    raw = _TolerantFileIO(descriptor, "w", closefd=False)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def open_log_stream(descriptor: int) -> io.TextIOWrapper:
    """Return a tolerant, line-buffered stream to a log file; characters that cannot be encoded are escaped."""
    raw: Any = _TolerantFileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def open_standard_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed, here and in child processes, so that no other file gets them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # this returns the lowest free descriptor
        os.set_inheritable(descriptor, True)
