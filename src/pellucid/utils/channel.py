"""Messages to and from a process that may stop anywhere, so that nobody waits for it without end."""

from __future__ import annotations

import math
import os
import select
import struct
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

IS_POSIX = sys.platform != "win32"
CHUNK_BYTES = 2**20
SHORT_LENGTH, LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")
"""The length of a message as multiprocessing writes it: in 4 bytes, or -1 and then 8."""


class Channel:
    """This process's end of a pipe of multiprocessing: it sends within a time limit, and never waits to receive.

    The other end runs other people's code. It may hang before it has read a message, or in the middle of one that it
    writes. On Windows a message is sent and received at once, however long that takes.
    """

    def __init__(self, connection: Any, max_bytes: int) -> None:
        """most: the most bytes of a message that is received."""
        self.connection: Connection = connection
        self._max_bytes = max_bytes
        self._received = bytearray()
        if IS_POSIX:
            os.set_blocking(self.connection.fileno(), False)

    def send(self, data: bytes, timeout_seconds: float) -> None:
        """Send a message.

        TimeoutError where it is not taken within so many seconds, which may be inf; OSError where the pipe is closed.
        """
        if not IS_POSIX:
            self.connection.send_bytes(data)
            return
        until = time.monotonic() + timeout_seconds
        size = (
            SHORT_LENGTH.pack(len(data)) if len(data) < 2**31 else SHORT_LENGTH.pack(-1) + LONG_LENGTH.pack(len(data))
        )
        left = memoryview(size + data)
        writable = select.poll()
        writable.register(self.connection.fileno(), select.POLLOUT)
        while left:
            try:
                left = left[os.write(self.connection.fileno(), left) :]
            except BlockingIOError:
                wait = max(0.0, until - time.monotonic())
                if not writable.poll(None if math.isinf(wait) else wait * 1000):
                    raise TimeoutError from None

    def receive(self) -> bytes | None:
        """Return the next message; None where it has not arrived whole.

        EOFError or OSError where the pipe is closed, ValueError for a message that is too long.
        """
        if not IS_POSIX:
            return self.connection.recv_bytes(self._max_bytes) if self.connection.poll() else None
        while (message := self._pop_message()) is None:
            try:
                chunk = os.read(self.connection.fileno(), CHUNK_BYTES)
            except BlockingIOError:
                return None
            if not chunk:
                raise EOFError
            self._received += chunk
        return message

    def _pop_message(self) -> bytes | None:
        """Take the first message out of what has arrived, if it is whole."""
        start = SHORT_LENGTH.size
        if len(self._received) < start:
            return None
        [size] = SHORT_LENGTH.unpack_from(self._received)
        if size == -1:
            start += LONG_LENGTH.size
            if len(self._received) < start:
                return None
            [size] = LONG_LENGTH.unpack_from(self._received, SHORT_LENGTH.size)
        if not 0 <= size <= self._max_bytes:
            raise ValueError(f"a message of {size} bytes")
        if len(self._received) < start + size:
            return None
        message = bytes(self._received[start : start + size])
        del self._received[: start + size]
        return message
