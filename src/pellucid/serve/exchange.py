"""ASGI middleware around every request: it bounds the size and the time of the body, ends the work for a client that
has hung up, and answers every client that has not.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.serve.errors import ENDING, RequestError, refused

PATIENCE = 100
"""A body is read up to this many times its limit; beyond that the connection is closed."""


class GoneError(Exception):
    """The client has hung up."""


class Exchanges:
    """ASGI middleware that reads the whole body of a request before the application is called."""

    def __init__(self, app: ASGIApp, body_bytes: int, body_seconds: float, send_seconds: float) -> None:
        """Set the bounds: bytes and seconds for a body, and seconds for a client to take a piece of its answer."""
        self.app, self.body_bytes, self.body_seconds = app, body_bytes, body_seconds
        self.send_seconds, self.request_count = send_seconds, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.request_count += 1
        try:
            body = await self._read_body(receive)
        except RequestError as refusal:
            await refused(refusal)(scope, receive, send)
        except asyncio.CancelledError:  # by the server, which is ending
            await refused(ENDING)(scope, receive, send)
        except GoneError:
            pass
        else:
            await Exchange(self.app, scope, receive, send, body, self.send_seconds).run()

    async def _read_body(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self.body_seconds):
                return await whole_body(receive, self.body_bytes)
        except TimeoutError as error:
            late = f"the body did not come within {self.body_seconds:g} seconds"
            raise RequestError(408, late, "timeout") from error


class Endings:
    """ASGI middleware for applications that read bodies themselves: requests that the ending server cancels get a 503.

    Without it uvicorn would log a traceback for each of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if not started:
                await refused(ENDING)(scope, receive, send)


class Exchange:
    """One request whose body has arrived, and its answer."""

    def __init__(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, body: bytes, send_seconds: float
    ) -> None:
        self.app, self.scope, self.receive, self.send, self.send_seconds = app, scope, receive, send, send_seconds
        self.pending_messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.ended = asyncio.Event()
        """Set when the application has answered, or the client has hung up or takes nothing more."""
        self.response_started = False

    async def run(self) -> None:
        answering, listening = asyncio.create_task(self._run_app()), asyncio.create_task(self._wait_for_disconnect())
        try:
            await self.ended.wait()
            await (answering if answering.done() else left(answering))
        except asyncio.CancelledError:  # by the server, which is ending and waits no longer
            await left(answering)
            if not self.response_started:
                await refused(ENDING)(self.scope, self.receive, self.send)
        finally:
            await left(listening)

    async def _run_app(self) -> None:
        try:
            await self.app(self.scope, self._receive, self._send)
        finally:
            self.ended.set()

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.ended.set()

    async def _receive(self) -> Message:
        """Return what the application receives: first the body, then that the client has gone, once it has."""
        if self.pending_messages:
            return self.pending_messages.pop()
        await self.ended.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.response_started = True
        try:
            async with asyncio.timeout(self.send_seconds):
                await self.send(message)
        except TimeoutError:
            self.ended.set()
            await asyncio.get_running_loop().create_future()  # until `run` has cancelled this


async def whole_body(receive: Receive, limit: int) -> bytes:
    """Return the body. RequestError where it is above the limit, GoneError where the client hangs up.

    What is above the limit is read and not kept: a client that cannot finish sending would not read the answer.
    """
    body, size = bytearray(), 0
    more = True
    while more and size <= PATIENCE * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            body += chunk
    if size > limit:
        raise RequestError(413, f"the body is larger than {limit} bytes", "body_too_large")
    return bytes(body)


async def left(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
