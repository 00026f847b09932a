"""The endpoint of agents that are trained: each rollout has an address of its own, `/rollout/ID/v1`.

It runs in a thread, takes what is asked, and waits for the answer; who answers is in rollouts.py.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pellucid.environments.agent import HERE
from pellucid.protocols import Said
from pellucid.serve.asked import AgentRequest, answer, streamed
from pellucid.serve.command import BACKLOG, listening
from pellucid.serve.errors import RequestError, refuse_in_form, refused
from pellucid.serve.exchange import Exchanges
from pellucid.types import Message

BODY_BYTES = 50_000_000
SECONDS = 60.0
"""How long a body may take to come, and a piece of an answer to be read."""
MOST = 64
"""How many requests of a rollout may wait at a time."""
FOREVER = 10**8
"""Seconds that the connection of an agent may be silent: it ends with the process of the agent."""
STRANGERS = 256
"""How many connections may be open that have not asked for a rollout which there is; the oldest makes room for more."""
PATIENCE = 10.0
"""Seconds that such a connection has to ask for one."""
ACCEPTED = 64
"""The most connections that are accepted at a time, before the oldest are closed."""
DISCARDING = 1.0
"""Seconds in which the body of a request for an unknown rollout is read and discarded. A client that sends it in that
time reads the answer; a connection that is closed on it would not."""


@dataclass(eq=False)
class Asked:
    """A request on its way to the policy."""

    rollout_name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int = 0
    response: Future[Said] = field(default_factory=Future)
    arrived_at: float = field(default_factory=time.monotonic)
    """When it came, by the monotonic clock."""


class Recorder:
    """The HTTP server. `rollouts` are the numbers of conversations by the names in their addresses.

    bell: what to wait on; it can be read when something was asked.
    """

    def __init__(self) -> None:
        self.rollout_numbers: dict[str, int] = {}
        self.wakeup, self._wakeup_sender = Pipe(duplex=False)
        self._requests: deque[Asked] = deque()
        self._waiting_counts: dict[str, int] = {}
        taken = listening(HERE, 0)
        self._port = int(taken.getsockname()[1])
        settings = uvicorn.Config(
            application(self),
            http=protocol(self),
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=FOREVER,
            backlog=ACCEPTED,
            timeout_notify=0,
            callback_notify=self._close_unknown,
        )
        settings.timeout_graceful_shutdown = 1
        self._socket = taken
        self._server = uvicorn.Server(settings)
        run: dict[str, list[socket.socket]] = {"sockets": [taken]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, name="rollouts", daemon=True)
        self._thread.start()

    def make_rollout_url(self, name: str) -> str:
        """Return the base URL of a rollout."""
        return f"http://{HERE}:{self._port}/rollout/{name}/v1"

    def take_requests(self) -> list[Asked]:
        """Return what was asked since the last time, of clients that are still there."""
        while self.wakeup.poll():
            self.wakeup.recv_bytes()
        found: list[Asked] = []
        while self._requests:
            asked = self._requests.popleft()
            if asked.response.set_running_or_notify_cancel():
                found.append(asked)
        return found

    async def wait_for_answer(self, request: Asked) -> Said:
        """Return what the policy says to a request. RequestError where it does not."""
        name = request.rollout_name
        if name not in self.rollout_numbers:
            raise ended(name)
        if self._waiting_counts.get(name, 0) >= MOST:
            raise RequestError(400, f"{MOST} requests of this rollout wait already", "too_many")
        self._waiting_counts[name] = self._waiting_counts.get(name, 0) + 1
        try:
            self._requests.append(request)
            self._wakeup_sender.send_bytes(b"")
            return await asyncio.wrap_future(request.response)
        finally:
            self._waiting_counts[name] -= 1
            if not self._waiting_counts[name]:
                del self._waiting_counts[name]

    def is_known(self, connection: Any) -> bool:
        """Return whether the last request of a connection was for a rollout that there is."""
        return connection.cycle is not None and rollout_of(connection.cycle.scope["path"]) in self.rollout_numbers

    async def _close_unknown(self) -> None:
        """Close the connections that have not asked for a rollout in time. Called once a second."""
        self._socket.listen(BACKLOG)  # asyncio has set it to how many it accepts at a time
        now = time.monotonic()
        connections: set[Any] = set(self._server.server_state.connections)
        for connection in connections:
            if self.is_known(connection):
                connection.since = now
            elif now - connection.since > PATIENCE:
                connection.transport.abort()

    def close(self) -> None:
        """Refuse what has not been answered, and stop the server."""
        self.rollout_numbers.clear()
        for asked in self.take_requests():
            asked.response.set_exception(ended(asked.rollout_name))
        self._server.should_exit = True
        self._thread.join(5.0)


def ended(name: str) -> RequestError:
    return RequestError(404, f"there is no rollout {name}: it has ended, or has never been", "no_rollout")


def rollout_of(path: str) -> str:
    """Return the name of the rollout in a path; empty where there is none."""
    _, *parts = path.split("/")
    return parts[1] if len(parts) > 1 and parts[0] == "rollout" else ""


def protocol(recorder: Recorder) -> type[H11Protocol]:
    """Return the protocol of the server, which bounds the connections that have not asked for a rollout."""

    class Bounded(H11Protocol):
        since = 0.0
        """When it was opened, or was last seen to have asked for a rollout."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's own
            super().connection_made(transport)
            self.since = time.monotonic()
            strangers = [
                each
                for each in self.connections
                if isinstance(each, Bounded) and not each.transport.is_closing() and not recorder.is_known(each)
            ]
            if len(strangers) > STRANGERS:
                min(strangers, key=lambda each: each.since).transport.abort()

    return Bounded


class Known:
    """ASGI middleware that answers requests for unknown rollouts before their bodies are kept."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self.app, self.recorder = app, recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (name := rollout_of(scope["path"])) in self.recorder.rollout_numbers:
            await self.app(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARDING):
                while (await receive()).get("more_body", False):
                    pass
        answer = refused(ended(name))
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)


def application(recorder: Recorder) -> ASGIApp:
    app = FastAPI(title="pellucid", docs_url=None, redoc_url=None, openapi_url=None)
    refuse_in_form(app)

    @app.get("/rollout/{name}/v1/models")
    async def models(name: str) -> dict[str, Any]:
        if name not in recorder.rollout_numbers:
            raise ended(name)
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "pellucid"}]}

    @app.post("/rollout/{name}/v1/chat/completions")
    async def chat(name: str, request: AgentRequest) -> Response:
        limit = request.max_completion_tokens or request.max_tokens or 0
        said = await recorder.wait_for_answer(Asked(name, request.build_history(), request.tool_schemas, limit))
        if request.stream:
            return StreamingResponse(streamed(request, said), media_type="text/event-stream")
        return JSONResponse(answer(request, said))

    return Known(Exchanges(app, BODY_BYTES, SECONDS, SECONDS), recorder)
