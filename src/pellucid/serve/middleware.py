"""The HTTP server and the middleware around its applications: access, limits for slow clients, errors, shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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

from pellucid.serve.schemas import NEUTRAL_VALUES, UNION_TAGS
from pellucid.types import UserError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_PUBLIC_PATHS = ("/", "/health")
"""Paths that need no token: the page, which asks the user for it, and the health check."""
TOKEN_VARIABLE = "PELLUCID_TOKEN"
"""The environment variable of the token: a command line can be read by every user of the machine."""


# ---------------------------------------------------------------- access
#
# Every page in the user's browser can reach a service on the loopback. A page of another site may post to it: the
# browser hides the answer from that page, but the work is done. A page whose host name is made to resolve to 127.0.0.1
# (DNS rebinding) even counts as the same site. The first is recognized by its Origin header, the second by its Host.


class AccessMiddleware:
    """ASGI middleware that checks the Host and Origin headers and the token of each request.

    TrustedHostMiddleware of starlette would not tell clients why they are refused, and would refuse IP addresses, which
    are safe: nobody can make them resolve to another machine.
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
        """Raise RequestError if a request must be refused."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not _is_trusted_host(name := _parse_host_name(host), self.allowed_hosts):
            raise RequestError(
                400,
                f'this service is not known as "{name}": ask for 127.0.0.1, or start it with --allowed-hosts {name}',
                "host_not_allowed",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestError(403, f'a page of "{origin}" may not use this service', "origin_not_allowed")
        if self.token and path not in _PUBLIC_PATHS and not self.is_authorized(headers.get("authorization", "")):
            raise RequestError(401, "this service needs its token, as: Authorization: Bearer TOKEN", "invalid_api_key")

    def is_authorized(self, authorization: str) -> bool:
        """Return whether the token is right, in a time that does not depend on how many characters are."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), self.token.encode())


def _parse_host_name(host: str) -> str:
    """Return the name in a Host header; empty if there is none. Example: parse_host_name("[::1]:8000") == "::1" """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_trusted_host(name: str, hosts: Sequence[str]) -> bool:
    """Return whether a name is an IP address or matches one of the hosts.

    Example: is_trusted_host("a.example.org", ["*.example.org"]) and is_trusted_host("10.0.0.7", [])
    """
    return bool(name) and (_is_ip_address(name) or any(_matches_pattern(name, host.lower()) for host in hosts))


def _matches_pattern(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host in LOOPBACK_HOSTS or (_is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def read_token(option: str) -> str:
    """Return the token of the options or of the environment, or "". Raises UserError if no header can hold it."""
    token = option or os.environ.get(TOKEN_VARIABLE, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError("the token must be letters, digits and signs of ASCII, without spaces")
    return token


def make_access_warning(host: str, port: int, token: str) -> str:
    """Return a warning if everyone who reaches this machine may use the service; else an empty text."""
    if token or is_loopback(host):
        return ""
    return f"{host}:{port} is open to everyone who can reach it: set {TOKEN_VARIABLE}, or give --token"


# ---------------------------------------------------------------- limits of requests


_BODY_DISCARD_FACTOR = 100
"""A body is read up to this many times its limit, and not stored. Beyond that the connection is closed."""


class _ClientDisconnectedError(Exception):
    """The client has closed the connection."""


class RequestLimitsMiddleware:
    """ASGI middleware that reads the body of a request before it calls the application, with limits of size and time.

    It cancels the application when the client disconnects, and answers every client that stays.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, body_seconds: float, send_seconds: float) -> None:
        """Set the limits.

        Args:
            app: The application.
            body_bytes: The largest body.
            body_seconds: Seconds to receive a body.
            send_seconds: Seconds for a client to receive a piece of the answer.
        """
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
            await make_error_response(_SHUTDOWN_ERROR)(scope, receive, send)
        except _ClientDisconnectedError:
            pass
        else:
            await _HTTPExchange(self.app, scope, receive, send, body, self.send_seconds).run()

    async def _read_body(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self.body_seconds):
                return await _read_body(receive, self.body_bytes)
        except TimeoutError as error:
            late = f"the body did not come within {self.body_seconds:g} seconds"
            raise RequestError(408, late, "timeout") from error


class ShutdownMiddleware:
    """ASGI middleware that answers requests with 503 if the server cancels them at its end.

    Without it uvicorn would log a traceback for each of them. RequestLimitsMiddleware does this by itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except asyncio.CancelledError:
            if not started:
                await make_error_response(_SHUTDOWN_ERROR)(scope, receive, send)


class _HTTPExchange:
    """A request whose body has been received, and its answer."""

    def __init__(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, body: bytes, send_seconds: float
    ) -> None:
        self.app, self.scope, self.receive, self.send, self.send_seconds = app, scope, receive, send, send_seconds
        self.pending_messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.ended = asyncio.Event()
        """Set when the application has answered, or the client has disconnected or receives nothing more."""
        self.response_started = False

    async def run(self) -> None:
        app_task, disconnect_task = (
            asyncio.create_task(self._run_app()),
            asyncio.create_task(self._wait_for_disconnect()),
        )
        try:
            await self.ended.wait()
            await (app_task if app_task.done() else _cancel_task(app_task))
        except asyncio.CancelledError:  # by the server, which is ending and waits no longer
            await _cancel_task(app_task)
            if not self.response_started:
                await make_error_response(_SHUTDOWN_ERROR)(self.scope, self.receive, self.send)
        finally:
            await _cancel_task(disconnect_task)

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
        """Return the body at first, and later, when the client has disconnected, that it has."""
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


async def _read_body(receive: Receive, limit: int) -> bytes:
    """Return the body.

    Bytes above the limit are read and not stored: a client that cannot finish sending would not read the answer.

    Raises:
        RequestError: The body is larger than `limit` bytes.
        ClientDisconnectedError: The client has disconnected.
    """
    body, size = bytearray(), 0
    more = True
    while more and size <= _BODY_DISCARD_FACTOR * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientDisconnectedError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            body += chunk
    if size > limit:
        raise RequestError(413, f"the body is larger than {limit} bytes", "body_too_large")
    return bytes(body)


async def _cancel_task(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# ---------------------------------------------------------------- errors


_STATUS_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


class RequestError(Exception):
    """A request that is refused, with an HTTP status and a code for programs."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


_SHUTDOWN_ERROR = RequestError(503, "the service is ending", "ending")


def build_error_body(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = str(error).encode(errors="backslashreplace").decode()  # a lone surrogate cannot be sent
    return {"error": {"message": message, "type": kind, "code": error.code, "param": None}}


def make_error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(build_error_body(error), error.status, _STATUS_HEADERS.get(error.status))


def install_error_handlers(app: FastAPI) -> None:
    """Let an application answer every error in OpenAI's form."""

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
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


def format_validation_error(error: Mapping[str, Any]) -> str:
    """Return a validation error as one line.

    Example: "messages.0.role: Input should be 'system', 'user' or 'assistant'"
    """
    field = ".".join(str(part) for part in error["loc"] if part not in ("body", *UNION_TAGS))
    if error["type"] == "extra_forbidden":
        neutral = " or ".join(map(json.dumps, NEUTRAL_VALUES.get(str(error["loc"][-1]), ())))
        return f"{field}: not supported here: leave it out{f', or send {neutral}' if neutral else ''}"
    return f"{field}: {error['msg']}" if field else str(error["msg"])


# ---------------------------------------------------------------- the server
#
# uvicorn closes a connection that stays silent after an answer. It would keep a connection forever if the client never
# finished the headers of a request, or the body of an answered request, or never read its last answer.


_SHUTDOWN_GRACE_SECONDS = 10.0
"""Seconds that requests have to end after the service was told to stop."""
_HEADER_TIMEOUT_SECONDS = 10.0
"""Seconds that a client has to send headers, from its connection or from the last answer."""


def make_server(
    app: ASGIApp, header_timeout: float = _HEADER_TIMEOUT_SECONDS, grace: float = _SHUTDOWN_GRACE_SECONDS
) -> uvicorn.Server:
    """Return an HTTP server for a listening socket.

    Args:
        app: The application.
        header_timeout: Seconds that a client has to send headers.
        grace: Seconds that requests have to end.
    """
    settings = uvicorn.Config(app, http="h11", log_level="warning", timeout_notify=0)
    # After `grace` seconds the engine refuses all requests that are left; uvicorn cancels what remains 2 seconds later.
    settings.timeout_graceful_shutdown = round(grace) + 2
    server = uvicorn.Server(settings)
    settings.callback_notify = _ConnectionWatcher(server, header_timeout).close_late
    return server


def make_stop_handler(
    server: uvicorn.Server, close: Callable[[], None], grace: float = _SHUTDOWN_GRACE_SECONDS
) -> Callable[[int, Any], None]:
    """Return a signal handler that stops accepting connections, and calls `close` after `grace` seconds.

    Current requests have that time to end.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)
        timer = threading.Timer(grace, close)
        timer.daemon = True
        timer.start()

    return stop


@dataclass
class _ConnectionWatcher:
    """Checks the connections of a server once a second, and closes those that wait for their client too long."""

    server: uvicorn.Server
    header_timeout: float
    waiting_since: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    """The connections that wait for their client, each with its latest request and when it was first seen waiting."""

    async def close_late(self) -> None:
        now = time.monotonic()
        late = [connection for connection in self.server.server_state.connections if _is_waiting_for_client(connection)]
        self.waiting_since = {one: self._get_waiting_since(one, now) for one in late}
        for connection, (_, start) in self.waiting_since.items():
            if now - start > self.header_timeout:
                connection.transport.abort()

    def _get_waiting_since(self, connection: Any, now: float) -> tuple[Any, float]:
        request, start = self.waiting_since.get(connection, (connection.cycle, now))
        return (request, start) if request is connection.cycle else (connection.cycle, now)


def _is_waiting_for_client(connection: Any) -> bool:
    """Return whether a client has to send headers or the rest of a body, or to receive the last answer."""
    http, answered = connection.conn, (h11.DONE, h11.MUST_CLOSE)
    return (
        connection.transport.is_closing()
        or http.their_state is h11.IDLE
        or (http.their_state is h11.SEND_BODY and http.our_state in answered)
    )
