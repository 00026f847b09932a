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
_MAX_RECEIVED_BYTES = 2**28
"""The most bytes of a message that is received: a longer one is not from our worker, and begins otherwise."""
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")
"""The length of a message as multiprocessing writes it: in 4 bytes, or for any length -1 and then 8 bytes."""


class Channel:
    """This process's end of a multiprocessing pipe: it sends within a time limit, and never waits to receive.

    The other end runs other people's code. It may hang before it has read a message, or in the middle of writing one.
    On Windows a message is sent and received at once, however long that takes.
    """

    def __init__(self, connection: Any) -> None:
        self.connection: Connection = connection
        self._received = bytearray()
        if _IS_POSIX:
            os.set_blocking(self.connection.fileno(), False)

    def send(self, data: bytes, timeout_seconds: float) -> None:
        """Send a message. Raises TimeoutError if the other end does not take it in time, OSError if it is closed."""
        if not _IS_POSIX:
            self.connection.send_bytes(data)
            return
        deadline = time.monotonic() + timeout_seconds
        unsent = memoryview(_LONG_LENGTH.pack(-1, len(data)) + data)
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

        Raises EOFError or OSError if the pipe is closed, and ValueError if the message is too long.
        """
        if not _IS_POSIX:
            return self.connection.recv_bytes(_MAX_RECEIVED_BYTES) if self.connection.poll() else None
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
        if len(self._received) < _LENGTH.size:
            return None
        [size] = _LENGTH.unpack_from(self._received)
        if not 0 <= size <= _MAX_RECEIVED_BYTES:
            raise ValueError(f"a message of {size} bytes")
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message
