"""The page on the loopback, live while a run trains: GET alone, from this machine alone, under its own name alone.

Other users of the machine can reach the loopback as well, so that the address has a token in its path.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Timer

from pellucid.look.assembly import page
from pellucid.look.reading import Run
from pellucid.types import UserError

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""What a browser may call this machine. Another name is one that somebody else's page made up for this address."""
SILENCE = 20.0
"""How many seconds a client has to send a whole request, and to take a piece of the answer."""
AT_A_TIME, PAUSE = 100, 0.01
"""Steps of a run that are read while answers wait, and seconds until the next ones."""
ALWAYS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Looking(ThreadingHTTPServer):
    """Serves the answers of runs by their keys, and the page that asks for them."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Run], port: int):
        self.runs, self.lock = runs, Lock()
        self.token = secrets.token_urlsafe(16)
        self.page_html, self.content_security_policy = page()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{HOST}:{port} cannot be listened on ({reason}): name another --port") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def answer(self, key: str) -> str:
        """JSON of `RUN/KEY`, of which RUN is a number. UserError where there is none."""
        number, _, rest = key.partition("/")
        if key == "runs":
            return json.dumps([run.run_dir.resolve().name for run in self.runs])
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(self.runs):
            raise UserError(f"there is no run {number}")
        with self.lock:
            return json.dumps(self.runs[int(number)].answer(rest))

    def prepare_questions(self) -> None:
        """Read a long run for its questions before anybody asks for them; other answers come in between."""
        with suppress(OSError):  # of a folder that goes away, whoever asks for an answer is told
            for run in self.runs:
                steps = run.prepare_questions(AT_A_TIME)
                while self.prepare_batch(steps):
                    time.sleep(PAUSE)

    def prepare_batch(self, batches: Iterator[int]) -> bool:
        with self.lock:
            return next(batches, None) is not None


class Handler(BaseHTTPRequestHandler):
    server_version = "pellucid"
    sys_version = ""
    timeout = SILENCE  # of each read and write; a request that comes byte by byte meets the timer

    def setup(self) -> None:
        super().setup()
        self.timer = Timer(SILENCE, self.abort_connection)
        self.timer.daemon = True
        self.timer.start()

    def finish(self) -> None:
        self.timer.cancel()
        with suppress(OSError):  # of a client that has gone
            super().finish()

    def abort_connection(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    @property
    def inspect_server(self) -> Looking:
        assert isinstance(self.server, Looking)
        return self.server

    def do_GET(self) -> None:
        self.timer.cancel()
        # Through a tunnel the port is another, and a browser leaves out 80.
        if self.headers.get("Host", "").partition(":")[0] not in NAMES:
            self.reply(
                HTTPStatus.FORBIDDEN, "text/plain", f"the microscope is at {HOST}:{self.inspect_server.server_port}"
            )
            return
        token, _, path = self.path.removeprefix("/").partition("/")
        mine = secrets.compare_digest(token.encode("utf-8", "replace"), self.inspect_server.token.encode())
        if not mine or self.path == f"/{token}":  # without a slash behind it the page would ask for other addresses
            self.reply(HTTPStatus.FORBIDDEN, "text/plain", "open the whole address that pellucid look has printed")
        elif not path:
            policy = f"{self.inspect_server.content_security_policy}; frame-ancestors 'none'"
            self.reply(HTTPStatus.OK, "text/html", self.inspect_server.page_html, {"Content-Security-Policy": policy})
        elif path.startswith("data/"):
            self.reply_data(path.removeprefix("data/"))
        else:
            self.reply(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here")

    def reply_data(self, key: str) -> None:
        try:
            self.reply(HTTPStatus.OK, "application/json", self.inspect_server.answer(key))
        except UserError as error:
            self.reply(HTTPStatus.NOT_FOUND, "application/json", json.dumps({"error": str(error)}))

    def reply(self, status: HTTPStatus, content_type: str, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {**ALWAYS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError, TimeoutError):  # a browser that went elsewhere does not wait for the answer
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal may be that of a run."""
