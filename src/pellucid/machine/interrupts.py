"""Ctrl-C, SIGTERM and a terminal that is gone: a run ends with the step that it is in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit status."""
LATER = b"stopping after this step; once more to stop at once, back to the last checkpoint\n"


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
        say(LATER)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Requests to stop, served between two steps; a second one is served at once."""
    requests = StopRequests()
    with handled(requests.handle_signal):
        yield requests


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals that ask for a stop, for a while; Python lets the main thread alone handle any."""
    numbers = stop_signals() if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def deferred() -> Iterator[None]:
    """Handle signals that ask for a stop at the end of the block, as they would have been handled without it.

    For the first import of torch: what is imported halfway cannot be imported again, and the process would crash later.
    """
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        say(b"stopping when torch is imported\n")

    with handled(note):
        yield
    if came:
        signal.raise_signal(came[0])


def stop_signals() -> list[signal.Signals]:
    """SIGHUP too, where there is one: but under nohup a run outlives its terminal."""
    known = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)
    return known if hang_up is None or signal.getsignal(hang_up) == signal.SIG_IGN else [*known, hang_up]


def say(line: bytes) -> None:
    """From within a signal handler, which may have come in the middle of a `print`."""
    with suppress(OSError):
        os.write(2, line)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def end_at_once(_number: int, _frame: FrameType | None) -> None:
    """Where nothing can be left half done; an import may swallow exceptions, and turn them into others."""
    say(b"pellucid: stopped\n")
    os._exit(INTERRUPTED)
