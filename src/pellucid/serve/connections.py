"""The HTTP server, which closes the connections of clients that keep it waiting.

uvicorn itself closes a connection that stays silent after an answer. It would keep for ever a connection whose client
never finishes the headers of a request, or the body of one that has been answered, or never reads its last answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp

GRACE = 10.0
"""How many seconds requests have to end when the service is stopped."""
PATIENCE = 10.0
"""How many seconds a client has to send headers, counted from its connection or from the last answer."""


def server(app: ASGIApp, header_timeout: float = PATIENCE, grace: float = GRACE) -> uvicorn.Server:
    """Return the HTTP server, to be run with a listening socket."""
    settings = uvicorn.Config(app, http="h11", log_level="warning", timeout_notify=0)
    # After `grace` seconds the engine refuses all requests that are left; uvicorn cancels what remains 2 seconds later.
    settings.timeout_graceful_shutdown = round(grace) + 2
    made = uvicorn.Server(settings)
    settings.callback_notify = Watch(made, header_timeout).close_late
    return made


def stopper(server: uvicorn.Server, close: Callable[[], None], grace: float = GRACE) -> Callable[[int, Any], None]:
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
class Watch:
    """Check the connections of a server once a second, and close those whose client has kept it waiting too long."""

    server: uvicorn.Server
    header_timeout: float
    waiting_since: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    """The connections that wait for their client, each with its latest request and when it was first seen waiting."""

    async def close_late(self) -> None:
        now = time.monotonic()
        late = [connection for connection in self.server.server_state.connections if is_waited_for(connection)]
        self.waiting_since = {one: self._get_waiting_since(one, now) for one in late}
        for connection, (_, start) in self.waiting_since.items():
            if now - start > self.header_timeout:
                connection.transport.abort()

    def _get_waiting_since(self, connection: Any, now: float) -> tuple[Any, float]:
        behind, start = self.waiting_since.get(connection, (connection.cycle, now))
        return (behind, start) if behind is connection.cycle else (connection.cycle, now)


def is_waited_for(connection: Any) -> bool:
    """Return whether it is the client's turn: to send headers or the rest of a body, or to take the last answer."""
    http, unread = connection.conn, (h11.DONE, h11.MUST_CLOSE)
    return (
        connection.transport.is_closing()
        or http.their_state is h11.IDLE
        or (http.their_state is h11.SEND_BODY and http.our_state in unread)
    )
