"""`pellucid serve start | stop | status | restart`: the service in the background, which has a pid file."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from pellucid.types import UserError
from pellucid.utils.files import hold_lock, write_file_atomically
from pellucid.utils.signals import handle_stop_signals
from pellucid.utils.text import escape_controls

STOP_TIMEOUT_SECONDS = 30.0
"""Seconds that a service has to end after SIGTERM. It has ten times as many to answer after its start."""
INSTANCE_VARIABLE = "PELLUCID_INSTANCE"
"""The environment variable with a random number, which /health shows: it identifies the service on its port."""
_START_TIME_TOLERANCE_SECONDS = 2.0
"""Start times that differ by less count as equal: they are relative to the boot time, which is known to a second."""
_PROXYLESS_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An opener that ignores proxies: a proxy would answer in place of a service that is not running."""


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
        """Return whether this service, and no other, answers at its address."""
        return _fetch_health(self.url).get("instance") == self.instance


def _fetch_health(url: str) -> dict[str, object]:
    """Return the health report of the service at an address; empty if none answers."""
    try:
        with _PROXYLESS_OPENER.open(f"{url}/health", timeout=2) as response:
            facts = json.loads(response.read(100_000))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return facts if isinstance(facts, dict) else {}


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
    with hold_lock(folder / "serve.lock", "starts a service in this folder"):
        running = _find_running_daemon(folder)
        if running is not None:
            raise UserError(
                f"a service runs already: {running.url}, pid {running.pid}; stop it, or name another --folder"
            )
        signals: list[int] = []
        with handle_stop_signals(lambda number, _: signals.append(number)):  # no stop before there is a pid file
            process, service = _launch_daemon(folder, url, arguments)
        try:
            if signals:
                raise KeyboardInterrupt
            wait_for_answer(process, service, folder / "serve.log")
        except BaseException:
            _terminate_process(process)
            (folder / "serve.pid").unlink(missing_ok=True)
            raise
    print(escape_controls(f"{url}, pid {process.pid}, log {folder / 'serve.log'}"))
    return 0


def _launch_daemon(folder: Path, url: str, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], Daemon]:
    """Start the process, and write its pid file at once."""
    command = [sys.executable, "-P", "-m", "pellucid", "serve", *arguments]
    instance = secrets.token_hex(8)
    with (folder / "serve.log").open("a") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {INSTANCE_VARIABLE: instance},
        )
    service = Daemon(process.pid, psutil.Process(process.pid).create_time(), url, instance, list(arguments))
    # Readable by its owner alone: a token may be among the arguments.
    write_file_atomically(folder / "serve.pid", json.dumps(asdict(service)) + "\n", 0o600)
    return process, service


def wait_for_answer(process: subprocess.Popen[bytes], service: Daemon, log: Path) -> None:
    """Wait until the service answers. Raises UserError if it ends, or does not answer in time."""
    deadline = time.monotonic() + 10 * STOP_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            [last_line] = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise UserError(f"the service ended at once: {last_line} (more in {log})")
        if service.is_answering():
            return
        time.sleep(0.2)
    raise UserError(f"the service did not answer within {10 * STOP_TIMEOUT_SECONDS:.0f} seconds: see {log}")


def _terminate_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_SECONDS)
    finally:
        process.kill()
        process.wait()


def stop_daemon(folder: Path) -> int:
    running = _find_running_daemon(folder)
    if running is None:
        print("nothing runs")
        return 0
    with suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while running.is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    if running.is_alive():
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)
    (folder / "serve.pid").unlink(missing_ok=True)
    print(f"stopped pid {running.pid}")
    return 0


def print_status(folder: Path) -> int:
    """Print the state. Return 0 if the service answers, 1 if it runs and does not answer, 3 if none runs."""
    running = _find_running_daemon(folder)
    if running is None:
        print("nothing runs")
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
