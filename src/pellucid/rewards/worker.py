"""The code of a reward process, which runs other people's functions and answers with plain data, as JSON."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pellucid.machine import streams
from pellucid.machine.plugins import function_of
from pellucid.rewards.calls import Answered, Began, Call, Event, Partly, run, with_errors
from pellucid.rewards.parts import Pair
from pellucid.rewards.plain import described
from pellucid.rewards.terms import is_function, terms_of
from pellucid.rewards.trainer_state import TrainerState

try:
    import resource
except ImportError:  # Windows
    resource = None

TOLD = 100
"""The most tracebacks in the log, one for each kind of error."""
MARGIN = 10.0
"""Seconds that a call has beyond twice its time limit, before its process ends itself."""
NOTED: set[str] = set()
"""The kinds of error that this process has logged."""


@dataclass(frozen=True)
class Confines:
    """The limits, log and environment of a worker process."""

    memory_gb: float
    """The memory limit in GB; 0 is no limit."""
    log: str
    """The file to which everything that is printed is appended."""
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Message:
    """A Call on its way to a process. Each group is pickled by itself, since one of them may have no place there."""

    terms: tuple[int, ...]
    groups: tuple[tuple[bytes, int], ...]
    """A prompt with its completions, and how many these are."""
    state: TrainerState
    limits: tuple[float | None, ...]


def work(connection: Connection, task: bytes, config: Confines) -> None:
    """Load the task, then answer each call, until the parent closes its end.

    Sends one message before the task is loaded, one after, and then the events of each call.
    """
    settle(config)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    connection.send_bytes(b"{}")
    loaded: list[Any] = []
    connection.send_bytes(attempt(lambda: loaded.append(load(task))))
    while True:
        try:
            message: Message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            leave()
        call, unread = unpacked(message)
        for event in run(loaded[0], call, note):
            if isinstance(event, Began):
                watch(message.limits)
            if isinstance(event, Partly) and unread:
                continue  # its answers are not those of the first completions: some could not be read
            connection.send_bytes(json.dumps(with_unread(event, unread)).encode())
        faulthandler.cancel_dump_traceback_later()


def load(task: bytes) -> Any:
    """Return the task, with the files of its functions imported: that takes no time of their calls."""
    loaded = pickle.loads(task)
    for term in terms_of(loaded):
        if is_function(term.name):
            function_of(term.name, "reward")
    return loaded


def attempt(action: Callable[[], None]) -> bytes:
    """Return an empty JSON object, or one with the error that was raised."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        note(described(error), error)
        return json.dumps({"error": described(error)}).encode()
    return b"{}"


def unpacked(message: Message) -> tuple[Call, dict[int, str]]:
    """Return the call of a message, and the errors of completions that cannot be read here, by their places."""
    pairs: list[Pair] = []
    errors: dict[int, str] = {}
    for data, n in message.groups:
        try:
            prompt, completions = pickle.loads(data)
        except BaseException as error:  # noqa: BLE001 - as above
            place = len(pairs) + len(errors)
            errors |= dict.fromkeys(
                range(place, place + n), f"it cannot be read in another process: {described(error)}"
            )
        else:
            pairs += [(prompt, completion) for completion in completions]
    return Call(message.terms, pairs, message.state, message.limits), errors


def with_unread(event: Event, errors: Mapping[int, str]) -> Event:
    return event._replace(answers=with_errors(event.answers, errors)) if isinstance(event, Answered) else event


def watch(limits: Sequence[float | None]) -> None:
    """End this process when its parent should have done so long ago: it is gone.

    This needs no interpreter lock, which a runaway regular expression never releases.
    """
    faulthandler.dump_traceback_later(2 * max(limit or 0.0 for limit in limits) + MARGIN, exit=True)


def note(description: str, error: BaseException) -> None:
    """Write the full traceback of an error to the log, the first time that it occurs."""
    if description not in NOTED and len(NOTED) < TOLD:
        NOTED.add(description)
        with suppress(OSError, ValueError):  # a reward has closed it
            traceback.print_exception(error)


def settle(config: Confines) -> None:
    """Ignore signals, redirect output, set limits, and begin a session, so that a reward's children end with it."""
    # Ctrl-C reaches every process of the terminal, and a supervisor's SIGTERM every one of the service. The parent
    # decides what they mean, and may need this process to finish its step.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    os.environ.clear()
    os.environ.update(config.environment)
    redirect(config.log)
    faulthandler.enable()
    if config.memory_gb and resource is not None and sys.platform == "linux":
        # Limit writable memory: RLIMIT_AS would count address space, of which CUDA takes many times what it uses.
        limit = int(config.memory_gb * 1e9)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def redirect(log: str) -> None:
    """Append the output of this process and its children to the log, or discard it where the log cannot be opened.

    Their standard input is empty.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        output = os.open(log, flags, 0o666)
    except OSError:
        output = os.open(os.devnull, flags)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for taken, descriptor in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(taken, descriptor)
    os.close(nothing)
    os.close(output)
    sys.stdout, sys.stderr = streams.logged(1), streams.logged(2)


def leave_with_parent() -> None:
    """Wait for the parent to end, then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        leave()


def leave() -> NoReturn:
    """End this process at once, with every process that rewards have started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
