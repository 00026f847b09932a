"""A reward process as its parent holds it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from pellucid.machine import streams
from pellucid.machine.channel import Channel
from pellucid.rewards import worker
from pellucid.rewards.calls import Answered, Began, Event, Partly
from pellucid.rewards.worker import Confines, Message
from pellucid.types import UserError

SPAWN = multiprocessing.get_context("spawn")
SAFE_PATH = "PYTHONSAFEPATH"
START_SECONDS = 120.0
"""Seconds that a worker process has to import what the task needs."""
MOST = 2**28
"""The most bytes of an answer: a longer message is not from our worker."""
GRACE = 1.0
"""Seconds beyond its time limit that a call has to say itself what took too long, as asynchronous functions do."""


NOTHING = object()
"""Stands for a message that has not arrived."""


class LostError(Exception):
    """A process has ended or is late; the message says so in words."""


class Process:
    """A reward process: busy with a call, of which `running` are the terms that it computes until `deadline`, or idle.

    together: whether it is asked about all completions of a step at once.
    connection: what to wait on. It brings an answer, or the end of the process.
    """

    def __init__(self, task: bytes, config: Confines, is_batch: bool) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._channel = Channel(self.connection, MOST)
        # Not a daemon: those may not start processes, and some rewards do.
        self._process = SPAWN.Process(target=worker.work, args=(theirs, task, config))
        streams.plugged()
        with safe_path():
            self._process.start()
        theirs.close()
        self.is_batch = is_batch
        self.message: Message | None = None
        self.running_terms: list[int] = []
        self.deadline = math.inf

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_until_loaded(self, task_name: str) -> None:
        """Wait until the process has loaded the task. UserError where it fails or takes more than START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        for ended in (
            'the reward process cannot start; a script that trains needs `if __name__ == "__main__":` around it',
            f"the reward process ended while it loaded task {task_name}",
        ):
            while (answer := self._receive()) is NOTHING:
                if not wait([self.connection], max(0.0, deadline - time.monotonic())):
                    raise UserError(f"the reward process has not loaded task {task_name} within {START_SECONDS:g} s")
            if not isinstance(answer, dict):
                raise UserError(ended)
            if error := answer.get("error"):
                raise UserError(f"the reward process cannot load task {task_name}: {error}")

    def send_call(self, message: Message) -> None:
        self.message, self._open_terms = message, set(message.terms)
        self._start_terms(list(message.terms[:1]))
        sent = pickle.dumps(message)
        # A process may not read, as when a thread that a reward left keeps its interpreter busy.
        with suppress(OSError):  # it has ended, or is late; `heard` reports it
            self._channel.send(sent, self.deadline - time.monotonic())

    def receive_events(self) -> Iterator[Event]:
        """Yield the events that have arrived. LostError where the process has ended, or is late."""
        while self.message and (received := self._receive()) is not NOTHING:
            if not isinstance(received, list):
                raise self._build_lost_error()
            yield self._record_event(received)
            if not self._open_terms:  # what has arrived counts, however late it is looked at
                return
        if self.message and time.monotonic() >= self.deadline:
            raise self._build_lost_error()

    def _record_event(self, received: list[Any]) -> Event:
        if len(received) == 1:
            self._start_terms(received[0])
            return Began(*received)
        if len(received) == len(Partly._fields):
            return Partly(*received)
        event = Answered(*received)
        self.running_terms = [term for term in self.running_terms if term != event.term]
        self._open_terms.discard(event.term)
        return event

    def mark_idle(self) -> None:
        """Note that the call is answered."""
        self.message, self.running_terms, self.deadline = None, [], math.inf

    def terminate(self) -> None:
        """The connection is left to whoever listens to it, perhaps in another thread: it ends as the process does."""
        self._kill()
        self._process.join()

    def _start_terms(self, terms: list[int]) -> None:
        assert self.message
        limits = dict(zip(self.message.terms, self.message.limits, strict=True))
        self.running_terms, self._timeout = terms, max(limits[term] or math.inf for term in terms)
        self.deadline = time.monotonic() + self._timeout + (GRACE if self.is_batch else 0.0)

    def _build_lost_error(self) -> LostError:
        if time.monotonic() >= self.deadline:
            return LostError(f"no reward within {self._timeout:g} s")
        return LostError(f"the reward ended its process ({self._describe_exit()})")

    def _describe_exit(self) -> str:
        """Return how the process has ended, in words."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "it answers no more"
        names = {each.value: each.name for each in signal.Signals}
        return f"exit status {code}" if code >= 0 else names.get(-code, f"signal {-code}")

    def _kill(self) -> None:
        """Kill the process and every process that rewards have started in it."""
        if hasattr(os, "killpg") and self._process.pid:
            with suppress(ProcessLookupError, PermissionError):  # it has no process group of its own yet
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _receive(self) -> Any:
        """Return the JSON value that has arrived, NOTHING where none has, or None where none will come."""
        try:
            data = self._channel.receive()
            return NOTHING if data is None else json.loads(data)
        except (EOFError, OSError, ValueError, RecursionError):
            return None


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep the working directory off the import path of new processes: a file in it may be called pickle.py."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
