"""`pellucid look`: serve the page on the loopback, live while a run trains, or write it into a file.

The server answers only GET, only on this machine, and only under the machine's own names. Other users of the machine
can reach the loopback as well, so the address has a secret token in its path.
"""

from __future__ import annotations

import json
import secrets
import socket
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread, Timer

from pellucid.inspect import single_file
from pellucid.inspect.page import build_inspect_page, load_modules
from pellucid.inspect.run_reader import RunReader, open_recorded_run
from pellucid.types import UserError
from pellucid.utils.text import escape_controls

HOST = "127.0.0.1"
_ALLOWED_HOSTS = (HOST, "localhost")
"""The host names that a browser may use. A foreign web page can give this address another name (DNS rebinding)."""
CLIENT_TIMEOUT_SECONDS = 20.0
"""The seconds that a client has to send a whole request, and to receive a piece of the answer."""
STEPS_PER_BATCH, _BATCH_PAUSE_SECONDS = 100, 0.01
"""The number of steps that are read at once while requests wait, and the pause until the next batch."""
_COMMON_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class InspectServer(ThreadingHTTPServer):
    """Serves the page, its modules, and the answers of runs by their keys."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunReader], port: int):
        self.runs, self.lock = runs, Lock()
        self.token = secrets.token_urlsafe(16)
        self.page_html, self.content_security_policy = build_inspect_page()
        self.modules = load_modules()
        try:
            super().__init__((HOST, port), InspectHandler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"cannot listen on {HOST}:{port} ({reason}): choose another --port") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def answer(self, key: str) -> str:
        """Return the JSON of `RUN/KEY`, RUN being a run's number, or of `runs`. Raises UserError."""
        number, _, rest = key.partition("/")
        if key == "runs":
            return json.dumps([run.run_dir.resolve().name for run in self.runs])
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(self.runs):
            raise UserError(f"there is no run {number}")
        with self.lock:
            return json.dumps(self.runs[int(number)].answer(rest))

    def prepare_questions(self) -> None:
        """Read the questions of long runs in advance; requests are answered between two batches of steps."""
        with suppress(OSError):  # if a folder goes away, the next request reports it
            for run in self.runs:
                with self.lock:
                    steps = run.list_steps()
                for count in range(STEPS_PER_BATCH, len(steps) + STEPS_PER_BATCH, STEPS_PER_BATCH):
                    with self.lock:
                        if len(run.question_history.fingerprints) < len(steps):  # else a request has read all of them
                            run.question_history.update(run.fingerprint_steps(steps[:count]))
                    time.sleep(_BATCH_PAUSE_SECONDS)


class InspectHandler(BaseHTTPRequestHandler):
    server_version = "pellucid"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_SECONDS  # for each read and write; the timer ends requests that come byte by byte

    def setup(self) -> None:
        super().setup()
        self.timer = Timer(CLIENT_TIMEOUT_SECONDS, self.abort_connection)
        self.timer.daemon = True
        self.timer.start()

    def finish(self) -> None:
        self.timer.cancel()
        with suppress(OSError):  # the client has gone
            super().finish()

    def abort_connection(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    @property
    def inspect_server(self) -> InspectServer:
        assert isinstance(self.server, InspectServer)
        return self.server

    def do_GET(self) -> None:
        self.timer.cancel()
        # Ignore the port: a tunnel changes it, and a browser leaves out port 80.
        if self.headers.get("Host", "").partition(":")[0] not in _ALLOWED_HOSTS:
            address = f"{HOST}:{self.inspect_server.server_port}"
            self.reply(HTTPStatus.FORBIDDEN, "text/plain", f"pellucid look is at {address}")
            return
        token, _, path = self.path.removeprefix("/").partition("/")
        is_valid = secrets.compare_digest(token.encode("utf-8", "replace"), self.inspect_server.token.encode())
        # Without a slash behind the token, relative addresses in the page would lead elsewhere.
        if not is_valid or self.path == f"/{token}":
            hint = "open the complete address that pellucid look printed, including its token"
            self.reply(HTTPStatus.FORBIDDEN, "text/plain", hint)
        elif not path:
            policy = f"{self.inspect_server.content_security_policy}; frame-ancestors 'none'"
            self.reply(HTTPStatus.OK, "text/html", self.inspect_server.page_html, {"Content-Security-Policy": policy})
        elif path in self.inspect_server.modules:
            self.reply(HTTPStatus.OK, "text/javascript", self.inspect_server.modules[path])
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
        for name, value in {**_COMMON_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError, TimeoutError):  # a browser that has left the page does not wait for the answer
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, since a run may print to the same terminal."""


def run_look(run_dirs: Sequence[Path], port: int, output: Path | None, open_browser: bool) -> int:
    """Serve the page of one or two runs until Ctrl-C, or write it into the file `output`. Return the exit status.

    Raises:
        UserError: There is nothing to look at, or the page cannot be served or written.
    """
    if not 1 <= len(run_dirs) <= 2:
        raise UserError("look takes one RUN, or two to compare")
    runs = [open_recorded_run(folder) for folder in run_dirs]
    if output:
        if not output.parent.is_dir():
            raise UserError(f"there is no folder {output.parent}: name another --output, or make it")
        try:
            left_out = single_file.write_page(runs, output)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} was deleted while it was read, as by a resume: look again") from error
        size = output.stat().st_size / 1e6
        page = f"page     {output}, {size:.1f} MB, works without network"
        print(escape_controls(page + (f"\n         {left_out}" if left_out else "")))
        return 0
    with InspectServer(runs, port) as server, ExitStack() as stack:
        print(f"look at {server.url}  (Ctrl-C ends it)", flush=True)
        Thread(target=server.prepare_questions, daemon=True).start()
        if open_browser:
            redirect_url = stack.enter_context(create_redirect_file(server.url))
            # In a thread, since a browser in the terminal blocks until it is closed.
            Thread(target=webbrowser.open, args=(redirect_url,), daemon=True).start()
        server.serve_forever()
    return 0


@contextmanager
def create_redirect_file(url: str) -> Iterator[str]:
    """Yield the address of a file that leads to the page and that only this user can read.

    Every user of the machine can read the command line of a browser, and the address of the page has the token.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-look-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">\n')
        yield file.as_uri()
