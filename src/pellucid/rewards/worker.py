"""The code of a reward process, which runs other people's functions and answers with plain data, as JSON."""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import pickle
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pellucid.machine import streams
from pellucid.types import Reward

try:
    import resource
except ImportError:  # Windows
    resource = None

LARGEST = 3.4028234663852886e38
"""The largest reward, that of float32: sums and squares of such numbers stay finite in float64."""
LONGEST_ERROR = 300
"""The most characters of an error."""
LONGEST_ANSWER = 16_000
"""The most bytes of an answer: a pipe takes so many at once, so that no answer arrives in parts."""
TOLD = 100
"""The most tracebacks in the log, one for each kind of error."""
NOTED: set[str] = set()
"""The kinds of error that this process has logged."""


class NoRewardError(Exception):
    """A task returned something that is no valid reward; the message is one line."""


@dataclass(frozen=True)
class Place:
    """The limits, log and environment of a worker process."""

    timeout: float
    """The time limit of a reward, in seconds."""
    memory_gb: float
    """The memory limit in GB; 0 is no limit."""
    log: str
    """The file to which everything that is printed is appended."""
    environment: Mapping[str, str]


def work(connection: Connection, task: bytes, place: Place) -> None:
    """Load the task, then answer each prompt and completion, until the parent closes its end.

    Sends one message before the task is loaded, one after, and then one for each reward.
    """
    settle(place)
    connection.send_bytes(b"{}")
    loaded: list[Any] = []
    connection.send_bytes(answer(lambda: loaded.append(pickle.loads(task)) or {}))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            leave()
        # The parent stops a reward that hangs; if the parent is gone, this does. It needs no interpreter lock, which
        # a runaway regular expression never releases.
        faulthandler.dump_traceback_later(2 * place.timeout, exit=True)
        sent = answer(lambda data=message: plain(loaded[0].reward(*pickle.loads(data))))
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(sent)


# ---------------------------------------------------------------- the process


def settle(place: Place) -> None:
    """Ignore signals, redirect output, set limits, and begin a session, so that a reward's children end with it."""
    # Ctrl-C reaches every process of the terminal, and a supervisor's SIGTERM every one of the service. The parent
    # decides what they mean, and may need this process to finish its step.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    os.environ.clear()
    os.environ.update(place.environment)
    redirect(place.log)
    faulthandler.enable()
    if place.memory_gb and resource is not None and sys.platform == "linux":
        # Limit writable memory: RLIMIT_AS would count address space, of which CUDA takes many times what it uses.
        limit = int(place.memory_gb * 1e9)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    threading.Thread(target=leave_with_parent, daemon=True).start()


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


# ---------------------------------------------------------------- answers


def answer(compute: Callable[[], dict[str, Any]]) -> bytes:
    """Return what `compute` returns as JSON, or the error that it raised."""
    try:
        sent = json.dumps(compute()).encode()
        return sent if len(sent) <= LONGEST_ANSWER else failure(f"its parts take more than {LONGEST_ANSWER} bytes")
    except NoRewardError as error:
        return failure(str(error))
    except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
        told = described(error)
        note(told, error)
        return failure(told)


def failure(error: str) -> bytes:
    return json.dumps({"error": error[: 2 * LONGEST_ERROR]}).encode()


def one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_ERROR]


def described(error: BaseException) -> str:
    """Describe an error in one line, with the place where it was raised, even if its `__str__` raises."""
    told = traceback.TracebackException.from_exception(error, limit=-1)
    where = f" ({Path(told.stack[-1].filename).name}, line {told.stack[-1].lineno})" if told.stack else ""
    return f"{type(error).__name__}: {one_line(str(told))}{where}"


def note(told: str, error: BaseException) -> None:
    """Write the full traceback of an error to the log, the first time that it occurs."""
    if told not in NOTED and len(NOTED) < TOLD:
        NOTED.add(told)
        traceback.print_exception(error)


def plain(reward: Any) -> dict[str, Any]:
    """Return the fields of a reward as plain Python numbers, strings and booleans. NoRewardError for an invalid one."""
    if not isinstance(reward, Reward):
        raise NoRewardError(f"the task returned a {type(reward).__name__}, where a Reward is needed")
    error = reward.error if reward.error is not None else ""
    if not isinstance(error, str):
        raise NoRewardError(f"the error is {shown(error)}, where a text is needed")
    try:
        fields = {
            "value": number(reward.value, "the reward"),
            "parts": numbers(reward.parts, "part"),
            "weights": numbers(reward.weights, "weight"),
            "correct": None if reward.correct is None else truth(reward.correct),
            "applies": bool(reward.applies),
            "degree": bool(reward.degree),
        }
    except NoRewardError as fault:
        raise NoRewardError(one_line(error) or str(fault)) from fault
    if not error and not math.isfinite(fields["value"]):
        error = f"the reward is {fields['value']}" + (f", of parts {fields['parts']}" if fields["parts"] else "")
    for name, weight in fields["weights"].items():
        if not math.isfinite(weight):
            error = error or f'the weight "{name}" is {weight}'
    return {**fields, "value": math.nan if error else fields["value"], "error": one_line(error)}


def number(value: Any, what: str, needed: str = "a number") -> float:
    """Return a number, or a scalar of numpy or torch, as a float; NaN and infinities pass. NoRewardError for others."""
    numeric = any(hasattr(type(value), name) for name in ("__float__", "__index__"))
    if not numeric or getattr(value, "ndim", 0):
        raise NoRewardError(f"{what} is {shown(value)}, where {needed} is needed")
    try:
        result = float(value)
    except OverflowError:
        result = 2 * LARGEST
    if math.isfinite(result) and abs(result) > LARGEST:
        raise NoRewardError(f"{what} is beyond {LARGEST:.1e}, the largest number that float32 holds")
    return result


def numbers(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise NoRewardError(f"the {what}s are {shown(values)}, where names with their numbers are needed")
    return {str(name): number(value, f'the {what} "{name}"') for name, value in values.items()}


def truth(value: Any) -> bool:
    needed = "True, False or None"
    result = number(value, "correct", needed)
    if result not in (0.0, 1.0):
        raise NoRewardError(f"correct is {shown(value)}, where {needed} is needed")
    return bool(result)


def shown(value: Any) -> str:
    return one_line(reprlib.repr(value))
