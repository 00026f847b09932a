"""Worker processes as their parent sees them: started, asked within a time limit, killed and replaced.

Code that hangs, such as a runaway regular expression, can only be stopped from outside its process. This is no security
boundary: a worker runs as this user, with this user's files and network.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pellucid.sandbox.worker import WorkerConfig, WorkerLoader, run_worker
from pellucid.utils import signals

_SPAWN_CONTEXT = multiprocessing.get_context("spawn")
CAN_FORK = sys.platform == "linux"
START_TIMEOUT_SECONDS = 120.0
"""Seconds that a worker process has to import what the user's code needs."""
GRACE_SECONDS = 1.0
"""Seconds beyond its time limit that a worker has to report by itself what took too long."""
SECRET_VARIABLE_PATTERN = re.compile(r".*_(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
_IS_POSIX = sys.platform != "win32"
_CHUNK_BYTES = 2**20
_MAX_RECEIVED_BYTES = 2**28
"""The longest message that is received. A greater length means that user code wrote into the pipe."""
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")
"""A message's length as multiprocessing writes it: in 4 bytes, or as -1 in 4 bytes and the length in 8."""
_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
_safe_path_lock = threading.Lock()


class _Channel:
    """This process's end of a multiprocessing pipe: it sends within a time limit, and never waits to receive.

    The other end runs other people's code. It may hang before it has read a message, or in the middle of writing one.
    On Windows, a message is sent or received in one blocking call.
    """

    def __init__(self, connection: Any) -> None:
        self.connection: Connection = connection
        self._received = bytearray()
        if _IS_POSIX:
            os.set_blocking(self.connection.fileno(), False)

    def send(self, data: bytes, timeout_seconds: float) -> None:
        """Send a message. Raises TimeoutError if the other end does not take it in time, OSError if it is closed."""
        if not _IS_POSIX:
            self.connection.send_bytes(data)
            return
        deadline = time.monotonic() + timeout_seconds
        unsent = memoryview(_LONG_LENGTH.pack(-1, len(data)) + data)
        writable = select.poll()
        writable.register(self.connection.fileno(), select.POLLOUT)
        while unsent:
            try:
                unsent = unsent[os.write(self.connection.fileno(), unsent) :]
            except BlockingIOError:
                remaining = max(0.0, deadline - time.monotonic())
                if not writable.poll(None if math.isinf(remaining) else remaining * 1000):
                    raise TimeoutError from None

    def receive(self) -> bytes | None:
        """Return the next message, or None if it has not arrived completely.

        Raises EOFError or OSError if the pipe is closed, and ValueError if the message is too long.
        """
        if not _IS_POSIX:
            return self.connection.recv_bytes(_MAX_RECEIVED_BYTES) if self.connection.poll() else None
        while (message := self._pop_message()) is None:
            try:
                chunk = os.read(self.connection.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return None
            if not chunk:
                raise EOFError
            self._received += chunk
        return message

    def _pop_message(self) -> bytes | None:
        """Remove the first message from the received bytes and return it, if it is complete."""
        if len(self._received) < _LENGTH.size:
            return None
        [size] = _LENGTH.unpack_from(self._received)
        if not 0 <= size <= _MAX_RECEIVED_BYTES:
            raise ValueError(f"a message of {size} bytes")
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message


class WorkerLostError(Exception):
    """A worker has ended or is late; the message says which, in words."""


class WorkerStartError(Exception):
    """A worker has not loaded the user's code; the message says why, in one line."""


class WorkerEndedError(WorkerStartError):
    """The process of a worker ended before it loaded the user's code, as in a script without a main guard."""


_MESSAGE_ERRORS = (EOFError, OSError, ValueError, TypeError, KeyError, RecursionError)
"""Errors of reading a message: the pipe is closed, or user code has written into it."""


class WorkerLimits(Protocol):
    """The settings of a worker process, such as `[reward]` of a recipe."""

    @property
    def memory_gb(self) -> float: ...
    @property
    def secrets(self) -> tuple[str, ...]: ...


def build_worker_config(limits: WorkerLimits, log: Path | None) -> WorkerConfig:
    """Return the configuration of a worker; without a log, its output is discarded.

    Secrets in environment variables are left out unless the limits name them.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in limits.secrets or not SECRET_VARIABLE_PATTERN.fullmatch(name)
    }
    return WorkerConfig(limits.memory_gb, str(log or os.devnull), environment)


class Worker:
    """A worker process, which is idle, or computes an answer until `deadline`.

    connection: what to wait on. It becomes readable with an answer, or when the process ends.
    pid: the process id; 0 if a forked process has not reported it yet.
    """

    result_name = "answer"
    """What a worker returns, as error messages call it."""
    decode: Callable[[bytes], Any] = staticmethod(bytes)
    """Decodes an answer, or raises one of `_MESSAGE_ERRORS`."""

    def __init__(self, connection: Any, process: Any = None) -> None:
        self.connection, self._process = connection, process
        self.pid: int = process.pid if process else 0
        self.deadline, self._timeout = math.inf, math.inf
        self._channel = _Channel(connection)
        self._has_reported = False
        """Whether the report of its start has come."""

    @property
    def is_alive(self) -> bool:
        """Whether the process of an idle worker runs. It sends nothing, so a readable pipe has been closed."""
        return self._process.is_alive() if self._process else not self.connection.poll()

    def wait_until_loaded(self) -> None:
        """Wait until the process has loaded the user's code. Else end it and raise WorkerStartError."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            while not self._has_reported:
                if not wait([self.connection], max(0.0, deadline - time.monotonic())):
                    raise WorkerStartError(f"it did not load within {START_TIMEOUT_SECONDS:g} s")
                self._receive_message()
        except _MESSAGE_ERRORS as error:
            raise WorkerEndedError(
                f"its process ended ({self._describe_exit()}); a script that trains needs"
                ' `if __name__ == "__main__":` around it'
            ) from error
        finally:
            if not self._has_reported:
                self.terminate()

    def set_timeout(self, seconds: float, grace: float = GRACE_SECONDS) -> None:
        """Give the worker this many seconds from now on, and a grace period to report by itself that it is late."""
        self._timeout, self.deadline = seconds, time.monotonic() + seconds + grace

    def send(self, data: bytes) -> None:
        """Send a message. Raises WorkerLostError if the process has ended, or does not take it before the deadline."""
        try:
            self._channel.send(data, self.deadline - time.monotonic())
        except TimeoutError as error:
            raise WorkerLostError(self._describe_lateness()) from error
        except (OSError, ValueError) as error:
            raise WorkerLostError(self._describe_end()) from error

    def receive(self) -> Any:
        """Return the next answer, or None if none has arrived. An answer that has arrived counts, however late.

        Raises WorkerLostError if the process has ended, or its deadline has passed.
        """
        try:
            data = self._receive_message()
            answer = None if data is None else self.decode(data)
        except _MESSAGE_ERRORS as error:
            raise WorkerLostError(self._describe_end()) from error
        if answer is None and time.monotonic() >= self.deadline:
            raise WorkerLostError(self._describe_lateness())
        return answer

    def terminate(self) -> None:
        """End the process and everything that it has started.

        The connection of a spawned process stays open: another thread may wait on it, and wakes when the process ends.
        """
        if not self.pid:
            with suppress(*_MESSAGE_ERRORS):
                self._receive_message()  # it may have reported its process id since
        if self.pid and hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):  # it has no process group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
        if self._process:
            self._process.kill()
            self._process.join()
        else:
            self.connection.close()  # a process that is idle, or has not reported its id yet, ends by itself

    def _describe_exit(self) -> str:
        """Return in words how a spawned process has ended."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "it no longer answers"
        names = {each.value: each.name for each in signal.Signals}
        return f"exit status {code}" if code >= 0 else names.get(-code, f"signal {-code}")

    def _receive_message(self) -> bytes | None:
        """Return the next message after the report of the start; None if none has arrived."""
        data = self._channel.receive()
        if data is None or self._has_reported:
            return data
        self.pid, error = json.loads(data)
        if error:
            raise WorkerStartError(error)
        self._has_reported = True
        return self._channel.receive()

    def _describe_lateness(self) -> str:
        return f"no {self.result_name} within {self._timeout:g} s"

    def _describe_end(self) -> str:
        return "its process has ended"


AnyWorker = TypeVar("AnyWorker", bound=Worker)


def spawn_worker(
    kind: type[AnyWorker], config: WorkerConfig, load: WorkerLoader, payload: bytes, forks: bool = False
) -> AnyWorker:
    """Start a worker in a fresh process, and do not wait. `forks` makes it a fork server, see `run_worker`."""
    connection, child_connection = Pipe()
    # Not a daemon: those may not start processes, and some user code does.
    process = _SPAWN_CONTEXT.Process(target=run_worker, args=(child_connection, config, load, payload, forks))
    signals.open_standard_descriptors()
    with _use_safe_path():
        process.start()
    child_connection.close()
    return kind(connection, process)


class ForkServer:
    """Starts workers quickly: they are forked from a process that has loaded the user's code.

    Where processes cannot be forked they are spawned one by one, which takes a second each.
    """

    def __init__(self, config: WorkerConfig, load: WorkerLoader, payload: bytes) -> None:
        self._config, self._load, self._payload = config, load, payload
        self._server: Worker | None = None
        self._can_load = False
        """Whether a spawned worker has loaded the user's code."""

    def start_worker(self, kind: type[AnyWorker]) -> AnyWorker:
        """Return a new worker. Raises WorkerStartError if the user's code cannot be loaded."""
        if not CAN_FORK:
            worker = spawn_worker(kind, self._config, self._load, self._payload)
            if not self._can_load:  # later ones load side by side
                worker.wait_until_loaded()
                self._can_load = True
            return worker
        connection, child_connection = Pipe()
        with child_connection:
            try:
                self._send_connection(child_connection)
            except OSError:  # the server ended just now
                self.close()
                self._send_connection(child_connection)
        return kind(connection)

    def close(self) -> None:
        """End the fork server. The workers go on without it."""
        if self._server is not None:
            self._server.terminate()
            self._server.connection.close()
            self._server = None

    def _send_connection(self, connection: Any) -> None:
        if self._server is None or not self._server.is_alive:
            self.close()
            self._server = spawn_worker(Worker, self._config, self._load, self._payload, forks=True)
            self._server.wait_until_loaded()
            os.set_blocking(self._server.connection.fileno(), True)
        reduction.send_handle(self._server.connection, connection.fileno(), self._server.pid)


def terminate_ended(workers: list[AnyWorker]) -> None:
    """Remove the idle workers whose processes have ended."""
    for worker in [worker for worker in workers if not worker.is_alive]:
        workers.remove(worker)
        worker.terminate()


def terminate_workers(workers: list[Any] | dict[Any, Any]) -> None:
    """Remove all workers and end their processes, whatever they are doing."""
    while workers:
        worker = workers.popitem()[1] if isinstance(workers, dict) else workers.pop()
        worker.terminate()


@contextmanager
def _use_safe_path() -> Iterator[None]:
    """Keep the working directory off the import path of new processes: a file in it may be called pickle.py."""
    with _safe_path_lock:  # the variable belongs to the whole process
        before = os.environ.pop(_SAFE_PATH_VARIABLE, None)
        os.environ[_SAFE_PATH_VARIABLE] = "1"
        try:
            yield
        finally:
            del os.environ[_SAFE_PATH_VARIABLE]
            if before is not None:
                os.environ[_SAFE_PATH_VARIABLE] = before
