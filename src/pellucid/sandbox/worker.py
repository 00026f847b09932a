"""The code inside a worker process: limits, the log, and the start and end of the process."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pellucid.sandbox.values import InvalidResultError, describe_error
from pellucid.utils import signals
from pellucid.utils.files import exit_if_forked

try:
    import resource
except ImportError:  # Windows
    resource = None

MAX_LOGGED_TRACEBACKS = 100
"""The most tracebacks that a process logs, one for each kind of error."""
_WATCHDOG_MARGIN_SECONDS = 10.0
"""Seconds that a call has beyond twice its time limit before its process ends itself."""
_WorkerMain = Callable[[Connection], None]
"""Serves requests until the parent closes its end of the connection."""
WorkerLoader = Callable[[bytes], _WorkerMain]
"""Loads the user's code from pickled bytes. It must be a module-level function, so that it can be pickled."""


@dataclass(frozen=True)
class WorkerConfig:
    """The limits, log and environment variables of a worker process."""

    memory_gb: float
    """The memory limit in GB; 0 is no limit."""
    log: str
    """The file to which all output is appended."""
    environment: Mapping[str, str]


class ErrorLog:
    """Describes errors, and writes one traceback for each kind, but none for an InvalidResultError.

    path: the file to append to; by default standard error, which is the log of a worker process.
    """

    def __init__(self, path: str | Path = "") -> None:
        self._path = path
        self._descriptions: set[str] = set()

    def __call__(self, error: BaseException) -> str:
        """Return the description of an error in one line, and write its traceback if it is new."""
        description = describe_error(error)
        is_known = description in self._descriptions or isinstance(error, InvalidResultError)
        if is_known or len(self._descriptions) >= MAX_LOGGED_TRACEBACKS:
            return description
        self._descriptions.add(description)
        with suppress(OSError, ValueError):  # a full disk, or a stream that user code has closed
            if not self._path:
                traceback.print_exception(error)
                return description
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as file:
                traceback.print_exception(error, file=file)
        return description


log_error = ErrorLog()
"""The log of this worker process."""


def run_worker(connection: Connection, config: WorkerConfig, load: WorkerLoader, payload: bytes, forks: bool) -> None:
    """Isolate this process, load the user's code, and serve requests until the parent closes its end.

    It reports to the parent whether loading succeeded. With `forks` it serves no requests itself, but forks a process
    for each connection that the parent sends.
    """
    _isolate_process(config)
    if not forks:  # a process with threads should not be forked
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        serve = load(payload)
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is reported
        _send_report(connection, log_error(error))
        exit_with_children()
    _send_report(connection)
    if forks:
        _fork_workers(connection, serve)
    else:
        serve(connection)


def _fork_workers(control: Connection, serve: _WorkerMain) -> NoReturn:
    """Fork a process for each connection that the parent sends, until the parent closes its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of children is not needed
    while True:
        try:
            handle = reduction.recv_handle(control)
        except (EOFError, OSError, RuntimeError):
            exit_with_children()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            control.close()
            connection = Connection(handle)
            try:
                _send_report(connection)
            except OSError:  # the parent is gone
                exit_with_children()
            serve(connection)
        os.close(handle)


def _send_report(connection: Connection, error: str = "") -> None:
    connection.send_bytes(json.dumps([os.getpid(), error]).encode())


def receive_request(connection: Connection) -> Any:
    """Return the next request. Ends this process when the parent has closed its end."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        exit_with_children()


def send_answer(connection: Connection, data: bytes) -> None:
    """Send an answer. Ends this process when the parent has closed its end."""
    try:
        connection.send_bytes(data)
    except OSError:
        exit_with_children()


def call_user_code(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call user code. Return its result and the exception that it raised, one of them None."""
    try:
        with exit_forked_copies():
            return action(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - an exception of user code is an answer
        return None, error


@contextmanager
def exit_forked_copies() -> Iterator[None]:
    """End each copy of this process that user code forks within the block, when the copy leaves it."""
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        exit_if_forked(owner, error)
        raise
    exit_if_forked(owner)


def start_watchdog(seconds: float) -> None:
    """End this process long after its time limit, when its parent must be gone, or would have ended it.

    The watchdog needs no interpreter lock, which a runaway regular expression never releases.
    """
    faulthandler.dump_traceback_later(2 * seconds + _WATCHDOG_MARGIN_SECONDS, exit=True)


def stop_watchdog() -> None:
    faulthandler.cancel_dump_traceback_later()


def _isolate_process(config: WorkerConfig) -> None:
    """Ignore signals, redirect output, set limits, and begin a session, so that all children end with this process."""
    # Ctrl-C reaches every process of the terminal, and a supervisor's SIGTERM every one of the service. The parent
    # decides what they mean, and may need this process to finish its step.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    os.environ.clear()
    os.environ.update(config.environment)
    _redirect_output(config.log)
    faulthandler.enable()
    if config.memory_gb and resource is not None and sys.platform == "linux":
        # Limit writable memory: RLIMIT_AS would count address space, of which CUDA takes many times what it uses.
        limit = int(config.memory_gb * 1e9)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _redirect_output(log: str) -> None:
    """Append the output of this process and its children to the log, or discard it if the log cannot be opened.

    Their standard input is empty.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        output = os.open(log, flags, 0o666)
    except OSError:
        output = os.open(os.devnull, flags)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, descriptor)
    os.close(nothing)
    os.close(output)
    sys.stdout, sys.stderr = signals.open_log_stream(1), signals.open_log_stream(2)


def _exit_with_parent() -> None:
    """Wait for the parent to end, then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        exit_with_children()


def exit_with_children() -> NoReturn:
    """End this process at once, with every process that user code has started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
