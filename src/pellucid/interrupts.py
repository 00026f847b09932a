"""Ctrl-C and SIGTERM: a run ends with the step that it is in."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status."""


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Signals that asked for a stop (Ctrl-C, SIGTERM), served between two steps; a second one is served at once."""
    requests: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if requests:
            raise KeyboardInterrupt
        requests.append(number)
        print("stopping after this step; once more to stop at once, back to the last checkpoint")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
