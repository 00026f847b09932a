"""Which requests are let in: by their Host and Origin headers, and by a token.

Every page in the user's browser can reach a service on the loopback. A page of another site may post to it: the browser
hides the answer from that page, but the work is done. A page whose host name is made to resolve to 127.0.0.1 (DNS
rebinding) even counts as the same site. The first is recognized by its Origin, the second by its Host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.serve.schemas import NEUTRAL_VALUES, PROMPT_KINDS
from pellucid.types import UserError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
PUBLIC_PATHS = ("/", "/health")
"""Paths that need no token: the page asks the user for it, and whoever watches over the service needs none."""
TOKEN_VARIABLE = "PELLUCID_TOKEN"
"""The environment variable of the token: a command line can be read by every user of the machine."""


class AccessMiddleware:
    """ASGI middleware that refuses the requests for which `check` raises.

    starlette's TrustedHostMiddleware would not tell clients why they are refused, and would refuse IP addresses,
    which, unlike a name, nobody can make to lead elsewhere.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] = LOOPBACK_HOSTS, token: str = "") -> None:
        self.app, self.allowed_hosts, self.token = app, allowed_hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self.check_access(scope["path"], Headers(scope=scope))
        except RequestError as refusal:
            await make_error_response(refusal)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check_access(self, path: str, headers: Headers) -> None:
        """Raise RequestError for a request that is not let in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_trusted_host(name := parse_host_name(host), self.allowed_hosts):
            raise RequestError(
                400,
                f'this service is not known as "{name}": ask for 127.0.0.1, or start it with --allowed-hosts {name}',
                "host_not_allowed",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestError(403, f'a page of "{origin}" may not use this service', "origin_not_allowed")
        if self.token and path not in PUBLIC_PATHS and not self.is_authorized(headers.get("authorization", "")):
            raise RequestError(401, "this service needs its token, as: Authorization: Bearer TOKEN", "invalid_api_key")

    def is_authorized(self, authorization: str) -> bool:
        """Return whether the token is right, in a time that does not depend on how much of it is."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), self.token.encode())


def parse_host_name(host: str) -> str:
    """Return the name in a Host header, empty where there is none. Example: name_of("[::1]:8000") == "::1" """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_trusted_host(name: str, hosts: Sequence[str]) -> bool:
    """Return whether a name is an IP address or matches one of the hosts.

    Example: trusted("a.example.org", ["*.example.org"]); trusted("10.0.0.7", [])
    """
    return bool(name) and (is_ip_address(name) or any(matches_pattern(name, host.lower()) for host in hosts))


def matches_pattern(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host in LOOPBACK_HOSTS or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def read_token(option: str) -> str:
    """Return the token of the options or of the environment; empty for none. UserError where no header can hold it."""
    token = option or os.environ.get(TOKEN_VARIABLE, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError("the token must be letters, digits and signs of ASCII, without spaces")
    return token


def make_access_warning(host: str, port: int, token: str) -> str:
    """Return a warning that everybody gets in; empty where only this machine does, or only those with the token."""
    if token or is_loopback(host):
        return ""
    return f"{host}:{port} is open to everyone who can reach it: set {TOKEN_VARIABLE}, or give --token"


# ---------------------------------------------------------------- exchange
# ASGI middleware around every request: it bounds the size and the time of the body, ends the work for a client that
# has hung up, and answers every client that has not.


BODY_DISCARD_FACTOR = 100
"""A body is read up to this many times its limit; beyond that the connection is closed."""


class ClientDisconnectedError(Exception):
    """The client has hung up."""


class RequestLimitsMiddleware:
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
            await make_error_response(refusal)(scope, receive, send)
        except asyncio.CancelledError:  # by the server, which is ending
            await make_error_response(SHUTDOWN_ERROR)(scope, receive, send)
        except ClientDisconnectedError:
            pass
        else:
            await HTTPExchange(self.app, scope, receive, send, body, self.send_seconds).run()

    async def _read_body(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self.body_seconds):
                return await read_body(receive, self.body_bytes)
        except TimeoutError as error:
            late = f"the body did not come within {self.body_seconds:g} seconds"
            raise RequestError(408, late, "timeout") from error


class ShutdownMiddleware:
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
                await make_error_response(SHUTDOWN_ERROR)(scope, receive, send)


class HTTPExchange:
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
            await (answering if answering.done() else cancel_task(answering))
        except asyncio.CancelledError:  # by the server, which is ending and waits no longer
            await cancel_task(answering)
            if not self.response_started:
                await make_error_response(SHUTDOWN_ERROR)(self.scope, self.receive, self.send)
        finally:
            await cancel_task(listening)

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


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return the body. RequestError where it is above the limit, GoneError where the client hangs up.

    What is above the limit is read and not kept: a client that cannot finish sending would not read the answer.
    """
    body, size = bytearray(), 0
    more = True
    while more and size <= BODY_DISCARD_FACTOR * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            body += chunk
    if size > limit:
        raise RequestError(413, f"the body is larger than {limit} bytes", "body_too_large")
    return bytes(body)


async def cancel_task(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# ---------------------------------------------------------------- errors
# A request that is not served, in OpenAI's form of an error.


STATUS_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


class RequestError(Exception):
    """A request that is not served, and why."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


SHUTDOWN_ERROR = RequestError(503, "the service is ending", "ending")


def make_error_response(refusal: RequestError) -> JSONResponse:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    message = str(refusal).encode(errors="backslashreplace").decode()  # a lone surrogate cannot be sent
    body = {"error": {"message": message, "type": kind, "code": refusal.code, "param": None}}
    return JSONResponse(body, refusal.status, STATUS_HEADERS.get(refusal.status))


def install_error_handlers(app: FastAPI) -> None:
    """Have an application answer in this form whatever goes wrong in it."""

    @app.exception_handler(RequestError)
    async def refusal(_: Request, error: RequestError) -> JSONResponse:
        return make_error_response(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return make_error_response(RequestError(400, "; ".join(map(format_validation_error, error.errors()))))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return make_error_response(RequestError(error.status_code, error.detail))

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return make_error_response(RequestError(500, f"{type(error).__name__}: {error}", "internal_error"))


def format_validation_error(error: dict[str, Any]) -> str:
    """Return a validation error as one line.

    Example: "messages.0.role: Input should be 'system', 'user' or 'assistant'"
    """
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", *PROMPT_KINDS))
    if error["type"] == "extra_forbidden":
        neutral = " or ".join(map(json.dumps, NEUTRAL_VALUES.get(str(error["loc"][-1]), ())))
        return f"{place}: not supported here: leave it out{f', or send {neutral}' if neutral else ''}"
    return f"{place}: {error['msg']}" if place else str(error["msg"])


# ---------------------------------------------------------------- connections
# The HTTP server, which closes the connections of clients that keep it waiting.
#
# uvicorn itself closes a connection that stays silent after an answer. It would keep for ever a connection whose client
# never finishes the headers of a request, or the body of one that has been answered, or never reads its last answer.


SHUTDOWN_GRACE_SECONDS = 10.0
"""How many seconds requests have to end when the service is stopped."""
HEADER_TIMEOUT_SECONDS = 10.0
"""How many seconds a client has to send headers, counted from its connection or from the last answer."""


def make_server(
    app: ASGIApp, header_timeout: float = HEADER_TIMEOUT_SECONDS, grace: float = SHUTDOWN_GRACE_SECONDS
) -> uvicorn.Server:
    """Return the HTTP server, to be run with a listening socket."""
    settings = uvicorn.Config(app, http="h11", log_level="warning", timeout_notify=0)
    # After `grace` seconds the engine refuses all requests that are left; uvicorn cancels what remains 2 seconds later.
    settings.timeout_graceful_shutdown = round(grace) + 2
    made = uvicorn.Server(settings)
    settings.callback_notify = ConnectionWatcher(made, header_timeout).close_late
    return made


def make_stop_handler(
    server: uvicorn.Server, close: Callable[[], None], grace: float = SHUTDOWN_GRACE_SECONDS
) -> Callable[[int, Any], None]:
    """Return a signal handler that lets no more connections in, and calls `close` after `grace` seconds.

    Requests that are being answered have that time to end.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)
        timer = threading.Timer(grace, close)
        timer.daemon = True
        timer.start()

    return stop


@dataclass
class ConnectionWatcher:
    """Check the connections of a server once a second, and close those whose client has kept it waiting too long."""

    server: uvicorn.Server
    header_timeout: float
    waiting_since: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    """The connections that wait for their client, each with its latest request and when it was first seen waiting."""

    async def close_late(self) -> None:
        now = time.monotonic()
        late = [connection for connection in self.server.server_state.connections if is_waiting_for_client(connection)]
        self.waiting_since = {one: self._get_waiting_since(one, now) for one in late}
        for connection, (_, start) in self.waiting_since.items():
            if now - start > self.header_timeout:
                connection.transport.abort()

    def _get_waiting_since(self, connection: Any, now: float) -> tuple[Any, float]:
        behind, start = self.waiting_since.get(connection, (connection.cycle, now))
        return (behind, start) if behind is connection.cycle else (connection.cycle, now)


def is_waiting_for_client(connection: Any) -> bool:
    """Return whether it is the client's turn: to send headers or the rest of a body, or to take the last answer."""
    http, unread = connection.conn, (h11.DONE, h11.MUST_CLOSE)
    return (
        connection.transport.is_closing()
        or http.their_state is h11.IDLE
        or (http.their_state is h11.SEND_BODY and http.our_state in unread)
    )
