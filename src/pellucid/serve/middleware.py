"""The HTTP server and the middleware around its applications: access, limits for slow clients, errors, shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.serve.schemas import NEUTRAL_VALUES, PROMPT_KINDS
from pellucid.types import UserError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_PUBLIC_PATHS = ("/", "/health")
"""Paths that need no token: the page, which asks the user for it, and the health check."""
TOKEN_VARIABLE = "PELLUCID_TOKEN"
"""The environment variable of the token, since every user of the machine can read a command line."""


# ---------------------------------------------------------------- access
#
# Every page in the user's browser can reach a service on the loopback. A page of another site may post to it: the
# browser hides the answer from that page, but the work is done. A page whose host name is made to resolve to 127.0.0.1
# (DNS rebinding) even counts as the same site. The first is recognized by its Origin header, the second by its Host.


class GuardMiddleware:
    """ASGI middleware that turns a RequestError of the application, or of a check before it, into a response.

    Requests that the server cancels at shutdown get a response, too: uvicorn would log a traceback for them.
    """

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]) -> None:
        """Guard an application. `check` raises RequestError to refuse a request before its body is read."""
        self.app, self.check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            self.check(scope)
            await self.app(scope, receive, send_noted)
        except RequestError as refusal:
            await make_error_response(refusal)(scope, receive, send)
        except asyncio.CancelledError:
            if not has_started:
                await make_error_response(_SHUTDOWN_ERROR)(scope, receive, send)


def make_access_check(allowed_hosts: Sequence[str], token: str) -> Callable[[Scope], None]:
    """Return a check of the Host and Origin headers and of the token, if there is one.

    TrustedHostMiddleware of starlette would not tell clients why they are refused, and would refuse IP addresses, which
    are safe: nobody can make them resolve to another machine.
    """

    def check(scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not _is_trusted_host(name := _parse_host_name(host), allowed_hosts):
            raise RequestError(
                400,
                f'the host "{name}" is not allowed: use 127.0.0.1, or start the service with --allowed-hosts {name}',
                "host_not_allowed",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestError(403, f'a page of "{origin}" may not use this service', "origin_not_allowed")
        if token and scope["path"] not in _PUBLIC_PATHS and not _has_token(headers.get("authorization", ""), token):
            raise RequestError(401, "this service needs its token, as: Authorization: Bearer TOKEN", "invalid_api_key")

    return check


def _has_token(authorization: str, token: str) -> bool:
    """Return whether the token is right, in a time that does not depend on how many characters match."""
    scheme, _, sent = authorization.partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(sent.strip().encode(), token.encode())


def _parse_host_name(host: str) -> str:
    """Return the name in a Host header; empty if there is none. Example: "[::1]:8000" has "::1"."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_trusted_host(name: str, patterns: Sequence[str]) -> bool:
    is_address = _parse_address(name) is not None
    return bool(name) and (is_address or any(fnmatchcase(name, pattern.lower()) for pattern in patterns))


def _parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = _parse_address(host)
    return host in LOOPBACK_HOSTS or (address is not None and address.is_loopback)


def read_token(option: str) -> str:
    """Return the token from the option or the environment, or "". Raises UserError if no header can hold it."""
    token = option or os.environ.get(TOKEN_VARIABLE, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError("the token must be printable ASCII without spaces")
    return token


def make_access_warning(host: str, port: int, token: str) -> str:
    """Return a warning if everyone who reaches this machine may use the service; else an empty text."""
    if token or is_loopback(host):
        return ""
    return f"{host}:{port} is open to everyone who can reach it: set {TOKEN_VARIABLE}, or give --token"


# ---------------------------------------------------------------- limits of requests


class RequestLimitsMiddleware:
    """ASGI middleware that reads the body of a request before it calls the application, with limits of size and time.

    It cancels the application when the client disconnects or receives nothing more.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, body_seconds: float, send_seconds: float) -> None:
        """Limit the size of bodies, the seconds to receive one, and the seconds to send each piece of an answer."""
        self.app, self.body_bytes, self.body_seconds = app, body_bytes, body_seconds
        self.send_seconds, self.request_count = send_seconds, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_count += 1
        with suppress(ClientDisconnect):
            body = await self._read_body(Request(scope, receive))
            await self._run_app(scope, receive, send, [body])

    async def _read_body(self, request: Request) -> bytes:
        """Return the body. Raises RequestError if it is too large or comes too late."""
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= self.body_bytes:  # the rest is dropped: a client must send it to read the answer
                        body += chunk
        except TimeoutError as error:
            late = f"the body did not come within {self.body_seconds:g} seconds"
            raise RequestError(408, late, "timeout") from error
        if size > self.body_bytes:
            raise RequestError(413, f"the body is larger than {self.body_bytes} bytes", "body_too_large")
        return bytes(body)

    async def _run_app(self, scope: Scope, receive: Receive, send: Send, bodies: list[bytes]) -> None:
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))

        async def receive_body() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.wait([disconnect])
            return {"type": "http.disconnect"}

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self.send_seconds):
                    await send(message)
            except TimeoutError:
                disconnect.cancel()
                await asyncio.get_running_loop().create_future()  # waits until the application is cancelled

        answer = asyncio.ensure_future(self.app(scope, receive_body, send_in_time))
        try:
            await asyncio.wait([answer, disconnect], return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            disconnect.cancel()
            await asyncio.wait([answer, disconnect])
        if not answer.cancelled():
            answer.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---------------------------------------------------------------- errors


_STATUS_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


class RequestError(Exception):
    """A refused request, with an HTTP status and an error code for programs."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


_SHUTDOWN_ERROR = RequestError(503, "the service is shutting down", "ending")


def build_error_body(error: RequestError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = str(error).encode(errors="backslashreplace").decode()  # a lone surrogate cannot be sent
    return {"error": {"message": message, "type": kind, "code": error.code, "param": None}}


def make_error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(build_error_body(error), error.status, _STATUS_HEADERS.get(error.status))


async def _answer_error(_: Request, error: Exception) -> Response:
    match error:
        case RequestError():
            answer = error
        case RequestValidationError():
            answer = RequestError(400, format_validation_errors(error.errors()))
        case HTTPException():
            answer = RequestError(error.status_code, error.detail)
        case UserError():
            answer = RequestError(422, str(error))
        case _:
            answer = RequestError(500, f"{type(error).__name__}: {error}", "internal_error")
    return make_error_response(answer)


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = dict.fromkeys(
    (RequestError, RequestValidationError, HTTPException, UserError, Exception), _answer_error
)
"""Exception handlers that answer every error in OpenAI's format."""


def format_validation_errors(errors: Iterable[Any]) -> str:
    """Format errors of pydantic as one line."""
    return "; ".join(map(_format_validation_error, errors))


def _format_validation_error(error: Mapping[str, Any]) -> str:
    """Format an error, for example "messages.0.role: Input should be 'system', 'user' or 'assistant'"."""
    field = ".".join(str(part) for part in error["loc"] if part not in ("body", *PROMPT_KINDS))
    if error["type"] == "extra_forbidden":
        neutral = " or ".join(map(json.dumps, NEUTRAL_VALUES.get(str(error["loc"][-1]), ())))
        return f"{field}: not supported here: leave it out{f', or send {neutral}' if neutral else ''}"
    return f"{field}: {error['msg']}" if field else str(error["msg"])


# ---------------------------------------------------------------- the server
#
# uvicorn closes a connection that stays silent after an answer. It would keep a connection forever if the client never
# finished the headers of a request, or the body of an answered request, or never read its last answer.


_SHUTDOWN_GRACE_SECONDS = 10.0


def _is_waiting_for_client(connection: Any) -> bool:
    """Return whether a client has to send headers or the rest of a body, or to receive the last answer."""
    http, answered = connection.conn, (h11.DONE, h11.MUST_CLOSE)
    return (
        connection.transport.is_closing()
        or http.their_state is h11.IDLE
        or (http.their_state is h11.SEND_BODY and http.our_state in answered)
    )


def make_server(
    app: ASGIApp,
    header_timeout: float = 10.0,
    grace: float = _SHUTDOWN_GRACE_SECONDS,
    keep_alive: int = 5,
    is_waiting: Callable[[Any], bool] = _is_waiting_for_client,
) -> uvicorn.Server:
    """Return an HTTP server for a listening socket.

    Args:
        app: The application.
        header_timeout: Seconds after which a connection that waits for its client is closed.
        grace: Seconds in which requests may finish at shutdown. Uvicorn cancels the rest 2 seconds later.
        keep_alive: Seconds that a connection may be silent after an answer.
        is_waiting: Returns whether a connection waits for its client.
    """
    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        timeout_notify=0,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=round(grace) + 2,
    )
    server: Any = uvicorn.Server(settings)
    waiting_since = dict[tuple[Any, Any], float]()  # by connections and their latest requests

    async def abort_idle_connections() -> None:
        nonlocal waiting_since
        now = time.monotonic()
        waiting = [(one, one.cycle) for one in server.server_state.connections if is_waiting(one)]
        waiting_since = {each: waiting_since.get(each, now) for each in waiting}
        for (connection, _), start in waiting_since.items():
            if now - start > header_timeout:
                connection.transport.abort()

    settings.callback_notify = abort_idle_connections  # once a second
    return server


def make_stop_handler(
    server: uvicorn.Server, close: Callable[[], None], grace: float = _SHUTDOWN_GRACE_SECONDS
) -> Callable[[int, Any], None]:
    """Return a signal handler that accepts no more connections, and calls `close` after `grace` seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)
        timer = threading.Timer(grace, close)
        timer.daemon = True
        timer.start()

    return stop
