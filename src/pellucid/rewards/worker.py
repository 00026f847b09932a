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

from pellucid.rewards.calls import (
    CallEvent,
    RewardCall,
    TermFinished,
    TermProgress,
    TermsStarted,
    insert_errors,
    run_call,
)
from pellucid.rewards.functions import PromptCompletion, TrainerState, describe_error
from pellucid.rewards.terms import get_reward_terms, is_function_term
from pellucid.utils import signals
from pellucid.utils.plugins import load_function

try:
    import resource
except ImportError:  # Windows
    resource = None

MAX_LOGGED_TRACEBACKS = 100
"""The most tracebacks in the log, one for each kind of error."""
WATCHDOG_MARGIN_SECONDS = 10.0
"""Seconds that a call has beyond twice its time limit, before its process ends itself."""
LOGGED_ERRORS: set[str] = set()
"""The kinds of error that this process has logged."""


@dataclass(frozen=True)
class WorkerConfig:
    """The limits, log and environment of a worker process."""

    memory_gb: float
    """The memory limit in GB; 0 is no limit."""
    log: str
    """The file to which everything that is printed is appended."""
    environment: Mapping[str, str]


@dataclass(frozen=True)
class CallMessage:
    """A Call on its way to a process. Each group is pickled by itself, since one of them may have no place there."""

    terms: tuple[int, ...]
    groups: tuple[tuple[bytes, int], ...]
    """A prompt with its completions, and how many these are."""
    state: TrainerState
    limits: tuple[float | None, ...]


def run_worker(connection: Connection, task: bytes, config: WorkerConfig) -> None:
    """Load the task, then answer each call, until the parent closes its end.

    Sends one message before the task is loaded, one after, and then the events of each call.
    """
    isolate_process(config)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    connection.send_bytes(b"{}")
    loaded: list[Any] = []
    connection.send_bytes(run_and_report(lambda: loaded.append(load_task(task))))
    while True:
        try:
            message: CallMessage = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            exit_with_children()
        call, unread = unpack_message(message)
        for event in run_call(loaded[0], call, log_error):
            if isinstance(event, TermsStarted):
                start_watchdog(message.limits)
            if isinstance(event, TermProgress) and unread:
                continue  # its answers are not those of the first completions: some could not be read
            connection.send_bytes(json.dumps(insert_unpickling_errors(event, unread)).encode())
        faulthandler.cancel_dump_traceback_later()


def load_task(task: bytes) -> Any:
    """Return the task, with the files of its functions imported: that takes no time of their calls."""
    loaded = pickle.loads(task)
    for term in get_reward_terms(loaded):
        if is_function_term(term.name):
            load_function(term.name, "reward")
    return loaded


def run_and_report(action: Callable[[], None]) -> bytes:
    """Return an empty JSON object, or one with the error that was raised."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        log_error(describe_error(error), error)
        return json.dumps({"error": describe_error(error)}).encode()
    return b"{}"


def unpack_message(message: CallMessage) -> tuple[RewardCall, dict[int, str]]:
    """Return the call of a message, and the errors of completions that cannot be read here, by their places."""
    pairs: list[PromptCompletion] = []
    errors: dict[int, str] = {}
    for data, n in message.groups:
        try:
            prompt, completions = pickle.loads(data)
        except BaseException as error:  # noqa: BLE001 - as above
            place = len(pairs) + len(errors)
            errors |= dict.fromkeys(
                range(place, place + n), f"it cannot be read in another process: {describe_error(error)}"
            )
        else:
            pairs += [(prompt, completion) for completion in completions]
    return RewardCall(message.terms, pairs, message.state, message.limits), errors


def insert_unpickling_errors(event: CallEvent, errors: Mapping[int, str]) -> CallEvent:
    return event._replace(answers=insert_errors(event.answers, errors)) if isinstance(event, TermFinished) else event


def start_watchdog(limits: Sequence[float | None]) -> None:
    """End this process when its parent should have done so long ago: it is gone.

    This needs no interpreter lock, which a runaway regular expression never releases.
    """
    faulthandler.dump_traceback_later(2 * max(limit or 0.0 for limit in limits) + WATCHDOG_MARGIN_SECONDS, exit=True)


def log_error(description: str, error: BaseException) -> None:
    """Write the full traceback of an error to the log, the first time that it occurs."""
    if description not in LOGGED_ERRORS and len(LOGGED_ERRORS) < MAX_LOGGED_TRACEBACKS:
        LOGGED_ERRORS.add(description)
        with suppress(OSError, ValueError):  # a reward has closed it
            traceback.print_exception(error)


def isolate_process(config: WorkerConfig) -> None:
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
    redirect_output(config.log)
    faulthandler.enable()
    if config.memory_gb and resource is not None and sys.platform == "linux":
        # Limit writable memory: RLIMIT_AS would count address space, of which CUDA takes many times what it uses.
        limit = int(config.memory_gb * 1e9)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def redirect_output(log: str) -> None:
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
    sys.stdout, sys.stderr = signals.open_log_stream(1), signals.open_log_stream(2)


def exit_with_parent() -> None:
    """Wait for the parent to end, then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        exit_with_children()


def exit_with_children() -> NoReturn:
    """End this process at once, with every process that rewards have started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
