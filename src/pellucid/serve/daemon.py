"""`pellucid serve start | stop | status | restart`: the service in the background, known by its pid file."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pellucid.types import UserError

GRACE = 30.0
"""Seconds that a service has to answer after its start, or to end after it was asked to."""
PROC = Path("/proc")


@dataclass(frozen=True)
class Daemon:
    """As its pid file has it."""

    pid: int
    url: str
    arguments: list[str]
    """Of `pellucid serve`, to start it again."""

    def alive(self) -> bool:
        """Whether the process is there, and ours: pids are used again."""
        try:
            if not (PROC / "self").exists():
                os.kill(self.pid, 0)
                return True
            command = (PROC / str(self.pid) / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return command.endswith(os.fsencode("\0".join(["", "pellucid", "serve", *self.arguments, ""])))

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False


def recorded(folder: Path) -> Daemon | None:
    """What was started last, whether it runs or not."""
    path = folder / "serve.pid"
    if not path.exists():
        return None
    try:
        return Daemon(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): end the service by hand if it runs, then delete it") from error


def read(folder: Path) -> Daemon | None:
    """What runs; None where nothing does, whatever a dead service left behind."""
    found = recorded(folder)
    return found if found and found.alive() else None


def start(folder: Path, url: str, arguments: Sequence[str]) -> int:
    running = read(folder)
    if running is not None:
        raise UserError(f"a service runs already: {running.url}, pid {running.pid}; stop it, or name another --folder")
    service = Daemon(0, url, list(arguments))
    if service.answers():
        raise UserError(f"{url} answers already, and was not started in {folder}: name another --port")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "serve.log"
    with log.open("a") as file:
        command = [sys.executable, "-m", "pellucid", "serve", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    service = replace(service, pid=process.pid)
    deadline = time.monotonic() + 10 * GRACE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text().strip().splitlines()[-1:] or ["no output"]
            raise UserError(f"the service ended at once: {last[0]} (more in {log})")
        if service.answers():
            (folder / "serve.pid").write_text(json.dumps(asdict(service)) + "\n")
            print(f"{url}, pid {process.pid}, log {log}")
            return 0
        time.sleep(0.2)
    process.terminate()
    raise UserError(f"the service did not answer within {10 * GRACE:.0f} seconds: see {log}")


def stop(folder: Path) -> int:
    running = read(folder)
    if running is None:
        print("nothing runs")
        return 0
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while running.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    if running.alive():
        os.kill(running.pid, signal.SIGKILL)
    (folder / "serve.pid").unlink(missing_ok=True)
    print(f"stopped pid {running.pid}")
    return 0


def status(folder: Path) -> int:
    """Exit status 0 where it answers, 1 where it runs and does not, 3 where nothing runs (as init scripts have it)."""
    running = read(folder)
    if running is None:
        print("nothing runs")
        return 3
    answers = running.answers()
    print(f"{running.url}, pid {running.pid}, {'answers' if answers else 'does not answer'}")
    return 0 if answers else 1


def restart(folder: Path) -> int:
    """With the arguments of the last start, whether it still runs or not."""
    last = recorded(folder)
    if last is None:
        raise UserError(f"{folder / 'serve.pid'}: nothing was started here")
    stop(folder)
    return start(folder, last.url, last.arguments)
