"""`pellucid serve start | stop | status | restart`: a background service with a pid file."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from pellucid.types import UserError
from pellucid.utils.files import hold_lock, write_file_atomically
from pellucid.utils.text import escape_controls

STOP_TIMEOUT_SECONDS = 30.0
"""The seconds that a service may take to end after SIGTERM. It may take ten times as long to start."""
INSTANCE_VARIABLE = "PELLUCID_INSTANCE"
"""The environment variable with a random number, which /health shows: it identifies the service on its port."""
_START_TIME_TOLERANCE_SECONDS = 2.0
"""Start times that differ by less count as equal: they are relative to the boot time, which is known to a second."""


@dataclass(frozen=True)
class Daemon:
    """A service, as its pid file describes it."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: float
    """The start time of the process in seconds since 1970: another process can have the same pid later."""
    url: str
    instance: str
    arguments: list[str]
    """The arguments of `pellucid serve`, to start it again."""

    def is_alive(self) -> bool:
        """Return whether the process runs, and is not another one with the same pid."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) < _START_TIME_TOLERANCE_SECONDS
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def is_answering(self) -> bool:
        """Return whether this service, and no other, answers at its address. Proxies are bypassed."""
        try:
            with closing(http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=2)) as connection:
                connection.request("GET", "/health")
                facts = json.loads(connection.getresponse().read(100_000))
        except (OSError, ValueError, http.client.HTTPException):
            return False
        return isinstance(facts, dict) and facts.get("instance") == self.instance

    def end(self) -> None:
        """End the process, with SIGKILL if it does not end in time."""
        for number, seconds in ((signal.SIGTERM, STOP_TIMEOUT_SECONDS), (signal.SIGKILL, 1.0)):
            deadline = time.monotonic() + seconds
            if self.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(0.1)


def _read_pid_file(folder: Path) -> Daemon | None:
    """Return the service that was started last, running or not. Raises UserError for a damaged pid file."""
    path = folder / "serve.pid"
    if not path.exists():
        return None
    try:
        return TypeAdapter(Daemon).validate_json(path.read_bytes())
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{path} is damaged ({reason}): end the service by hand if it runs, then delete it") from error


def _find_running_daemon(folder: Path) -> Daemon | None:
    """Return the running service; None if there is none, even if a pid file is left."""
    daemon = _read_pid_file(folder)
    return daemon if daemon and daemon.is_alive() else None


def make_url(host: str, port: int) -> str:
    """Return the address for a client on this machine. Example: make_url("::1", 8000) == "http://[::1]:8000" """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def start_daemon(folder: Path, url: str, arguments: Sequence[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    pid_file, log = folder / "serve.pid", folder / "serve.log"
    with hold_lock(folder / "serve.lock", "starts a service in this folder"):
        if running := _find_running_daemon(folder):
            raise UserError(
                f"a service is already running: {running.url}, pid {running.pid}; stop it, or name another --folder"
            )
        service = _launch_daemon(log, url, arguments)
        try:
            # Readable by its owner alone: a token may be among the arguments.
            write_file_atomically(pid_file, json.dumps(asdict(service)) + "\n", 0o600)
            _wait_for_answer(service, log)
        except BaseException:
            service.end()
            pid_file.unlink(missing_ok=True)
            raise
    print(escape_controls(f"{url}, pid {service.pid}, log {log}"))
    return 0


def _launch_daemon(log: Path, url: str, arguments: Sequence[str]) -> Daemon:
    instance = secrets.token_hex(8)
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pellucid", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {INSTANCE_VARIABLE: instance},
        )
    return Daemon(process.pid, psutil.Process(process.pid).create_time(), url, instance, list(arguments))


def _wait_for_answer(service: Daemon, log: Path) -> None:
    """Wait until the service answers. Raises UserError if it ends, or does not answer in time."""
    deadline = time.monotonic() + 10 * STOP_TIMEOUT_SECONDS
    while not service.is_answering():
        if not service.is_alive():
            [last_line] = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise UserError(f"the service ended at once: {last_line} (more in {log})")
        if time.monotonic() > deadline:
            raise UserError(f"the service did not answer within {10 * STOP_TIMEOUT_SECONDS:.0f} seconds: see {log}")
        time.sleep(0.2)


def stop_daemon(folder: Path) -> int:
    running = _find_running_daemon(folder)
    if running is None:
        print("no service is running")
        return 0
    running.end()
    (folder / "serve.pid").unlink(missing_ok=True)
    print(f"stopped pid {running.pid}")
    return 0


def print_status(folder: Path) -> int:
    """Print the state. Return 0 if the service answers, 1 if it runs and does not answer, 3 if none runs."""
    running = _find_running_daemon(folder)
    if running is None:
        print("no service is running")
        return 3
    is_answering = running.is_answering()
    print(f"{running.url}, pid {running.pid}, {'answers' if is_answering else 'does not answer'}")
    return 0 if is_answering else 1


def restart_daemon(folder: Path) -> int:
    """Start again with the arguments of the last start, whether that service runs or not."""
    last = _read_pid_file(folder)
    if last is None:
        raise UserError(f"{folder / 'serve.pid'}: nothing was started here")
    stop_daemon(folder)
    return start_daemon(folder, last.url, last.arguments)
