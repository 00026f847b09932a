"""`pellucid serve start | stop | status | restart`: the service in the background, known by its pid file."""

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

from pellucid.machine.interrupts import handled
from pellucid.machine.locks import locked
from pellucid.types import UserError

GRACE = 30.0
"""Seconds that a service has to answer after its start, or to end after it was asked to."""
INSTANCE = "PELLUCID_INSTANCE"
"""In the environment of a service: what its /health is to say, so that no other on its port is taken for it."""
SAME_SECONDS = 2.0
"""Two times of start that differ by less are the same: they are counted from the boot, known to a second or so."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment would answer for what it cannot reach."""


@dataclass(frozen=True)
class Daemon:
    """As its pid file has it."""

    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: float
    """Seconds since 1970, as the system has it: pids are used again."""
    url: str
    instance: str
    arguments: list[str]
    """Of `pellucid serve`, to start it again."""

    def alive(self) -> bool:
        """Whether the process is there, and the one that was started."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < SAME_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def answers(self) -> bool:
        """Whether it is this service that answers at its address."""
        return health(self.url).get("instance") == self.instance


def health(url: str) -> dict[str, object]:
    """What a service says of itself; empty where none does."""
    try:
        with DIRECT.open(f"{url}/health", timeout=2) as response:
            facts = json.loads(response.read(100_000))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return facts if isinstance(facts, dict) else {}


def recorded(folder: Path) -> Daemon | None:
    """What was started last, whether it runs or not."""
    path = folder / "serve.pid"
    if not path.exists():
        return None
    try:
        return TypeAdapter(Daemon).validate_json(path.read_bytes())
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{path} is damaged ({reason}): end the service by hand if it runs, then delete it") from error


def read(folder: Path) -> Daemon | None:
    """What runs; None where nothing does, whatever a dead service left behind."""
    found = recorded(folder)
    return found if found and found.alive() else None


def start(folder: Path, url: str, arguments: Sequence[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "serve.lock", "starts a service in this folder"):
        running = read(folder)
        if running is not None:
            raise UserError(
                f"a service runs already: {running.url}, pid {running.pid}; stop it, or name another --folder"
            )
        asked_to_stop: list[int] = []
        with handled(lambda number, _: asked_to_stop.append(number)):  # who could end what has no pid file yet?
            process, service = launched(folder, url, arguments)
        try:
            if asked_to_stop:
                raise KeyboardInterrupt
            wait_for_answer(process, service, folder / "serve.log")
        except BaseException:
            end(process)
            (folder / "serve.pid").unlink(missing_ok=True)
            raise
    print(f"{url}, pid {process.pid}, log {folder / 'serve.log'}")
    return 0


def launched(folder: Path, url: str, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], Daemon]:
    """A process, and its pid file from the first moment on."""
    command = [sys.executable, "-P", "-m", "pellucid", "serve", *arguments]
    instance = secrets.token_hex(8)
    with (folder / "serve.log").open("a") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {INSTANCE: instance},
        )
    service = Daemon(process.pid, psutil.Process(process.pid).create_time(), url, instance, list(arguments))
    write(folder / "serve.pid", json.dumps(asdict(service)) + "\n")
    return process, service


def write(path: Path, text: str) -> None:
    """Whole or not at all, and for its owner alone: a token may be among the arguments."""
    partial = path.with_suffix(".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


def wait_for_answer(process: subprocess.Popen[bytes], service: Daemon, log: Path) -> None:
    """UserError where it ends, or none comes."""
    deadline = time.monotonic() + 10 * GRACE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise UserError(f"the service ended at once: {last[0]} (more in {log})")
        if service.answers():
            return
        time.sleep(0.2)
    raise UserError(f"the service did not answer within {10 * GRACE:.0f} seconds: see {log}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        process.kill()
        process.wait()


def stop(folder: Path) -> int:
    running = read(folder)
    if running is None:
        print("nothing runs")
        return 0
    with suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while running.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    if running.alive():
        with suppress(ProcessLookupError):
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
