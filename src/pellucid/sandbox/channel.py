"""Messages to and from a process that may stop at any moment, so that nobody waits for it forever."""

from __future__ import annotations

import math
import os
import select
import struct
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

_IS_POSIX = sys.platform != "win32"
_CHUNK_BYTES = 2**20
_SHORT_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!Q")
"""The length of a message as multiprocessing writes it: in 4 bytes, or -1 and then 8."""


class Channel:
    """This process's end of a multiprocessing pipe: it sends within a time limit, and never waits to receive.

    The other end runs other people's code. It may hang before it has read a message, or in the middle of writing one.
    On Windows a message is sent and received at once, however long that takes.
    """

    def __init__(self, connection: Any, max_bytes: int) -> None:
        """Use a connection. A message of more than `max_bytes` is not received."""
        self.connection: Connection = connection
        self._max_bytes = max_bytes
        self._received = bytearray()
        if _IS_POSIX:
            os.set_blocking(self.connection.fileno(), False)

    def send(self, data: bytes, timeout_seconds: float) -> None:
        """Send a message. `timeout_seconds` may be inf.

        Raises:
            TimeoutError: if the other end does not take the message in time.
            OSError: if the pipe is closed.
        """
        if not _IS_POSIX:
            self.connection.send_bytes(data)
            return
        deadline = time.monotonic() + timeout_seconds
        size = (
            _SHORT_LENGTH.pack(len(data))
            if len(data) < 2**31
            else _SHORT_LENGTH.pack(-1) + _LONG_LENGTH.pack(len(data))
        )
        unsent = memoryview(size + data)
        writable = select.poll()
        writable.register(self.connection.fileno(), select.POLLOUT)
        while unsent:
            try:
                unsent = unsent[os.write(self.connection.fileno(), unsent) :]
            except BlockingIOError:
                wait = max(0.0, deadline - time.monotonic())
                if not writable.poll(None if math.isinf(wait) else wait * 1000):
                    raise TimeoutError from None

    def receive(self) -> bytes | None:
        """Return the next message, or None if it has not arrived completely.

        Raises:
            EOFError, OSError: if the pipe is closed.
            ValueError: if the message is too long.
        """
        if not _IS_POSIX:
            return self.connection.recv_bytes(self._max_bytes) if self.connection.poll() else None
        while (message := self._pop_message()) is None:
            try:
                chunk = os.read(self.connection.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return None
            if not chunk:
                raise EOFError
            self._received += chunk
        return message

    def _pop_message(self) -> bytes | None:
        """Remove the first message from the received bytes and return it, if it is complete."""
        start = _SHORT_LENGTH.size
        if len(self._received) < start:
            return None
        [size] = _SHORT_LENGTH.unpack_from(self._received)
        if size == -1:
            start += _LONG_LENGTH.size
            if len(self._received) < start:
                return None
            [size] = _LONG_LENGTH.unpack_from(self._received, _SHORT_LENGTH.size)
        if not 0 <= size <= self._max_bytes:
            raise ValueError(f"a message of {size} bytes")
        if len(self._received) < start + size:
            return None
        message = bytes(self._received[start : start + size])
        del self._received[: start + size]
        return message
