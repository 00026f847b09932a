"""Reward processes, side by side, so that no reward can stop, stall or silently falsify a run.

Why processes: a Python function that hangs can only be stopped from outside. `signal.alarm` works in the main thread
alone, and neither it nor a thread interrupts a runaway regular expression.

This is no security boundary: rewards run as this user, with this user's files and network.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.rewards import worker
from pellucid.rewards.calls import (
    AnswerFields,
    CallEvent,
    RewardCall,
    TermFinished,
    TermProgress,
    TermsStarted,
    insert_errors,
    split_into_groups,
)
from pellucid.rewards.functions import shorten_to_one_line
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import CallMessage, WorkerConfig
from pellucid.types import UserError
from pellucid.utils import signals
from pellucid.utils.channel import Channel

SECRET_VARIABLE_PATTERN = re.compile(r".*_(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)


class PoolClosedError(Exception):
    """The pool was closed in another thread while it computed."""


class PendingCall:
    """A call on its way: what is sent of it, and the answers that have come."""

    def __init__(self, call: RewardCall) -> None:
        groups = split_into_groups(call.pairs)
        sent = [pickle_or_explain((group[0][0], [completion for _, completion in group])) for group in groups]
        self.is_batch = call.is_batch
        ready = [(data, len(group)) for data, group in zip(sent, groups, strict=True) if isinstance(data, bytes)]
        self._message = CallMessage(call.terms, tuple(ready), call.state, call.limits)
        errors = [
            error if isinstance(error, str) else "" for group, error in zip(groups, sent, strict=True) for _ in group
        ]
        self._pickling_errors = {place: error for place, error in enumerate(errors) if error}
        self._sent_count = len(call.pairs) - len(self._pickling_errors)
        self._answers: dict[int, list[AnswerFields]] = {} if self._sent_count else {term: [] for term in call.terms}
        self._partial_answers: dict[int, list[AnswerFields]] = {}
        """The answers of terms that have some, in the order of the completions."""

    @property
    def is_done(self) -> bool:
        return self._answers.keys() >= set(self._message.terms)

    @property
    def remaining_message(self) -> CallMessage:
        """What is still to be computed."""
        places = [place for place, term in enumerate(self._message.terms) if term not in self._answers]
        terms, limits = (tuple(of[i] for i in places) for of in (self._message.terms, self._message.limits))
        return replace(self._message, terms=terms, limits=limits)

    def record(self, event: CallEvent) -> None:
        if isinstance(event, TermFinished):
            self._answers[event.term] = event.answers
        elif isinstance(event, TermProgress):
            self._partial_answers.setdefault(event.term, []).extend(event.answers)

    def fail(self, terms: Sequence[int], error: str) -> None:
        """Note that terms have failed for all completions that have no answer yet."""
        for term in terms:
            known = self._partial_answers.pop(term, [])
            self._answers[term] = [*known, *[{"error": error}] * (self._sent_count - len(known))]

    @property
    def answers(self) -> dict[int, list[AnswerFields]]:
        """The answers of each term, one for each pair of the call."""
        return {term: insert_errors(answers, self._pickling_errors) for term, answers in self._answers.items()}


class RewardPool:
    """Processes that compute calls: cfg.workers for those about one completion, one more for those about many.

    A process that ends or is late is replaced; what it has left is computed by another.
    """

    def __init__(self, task: Any, cfg: RewardConfig, log: Path | None) -> None:
        self._task, self._cfg = task, cfg
        self._worker_config = WorkerConfig(cfg.memory_gb, str(log or os.devnull), build_worker_environment(cfg.secrets))
        self._workers: list[RewardWorker] = []
        self._lock = threading.Lock()
        # End the processes before multiprocessing waits for them at exit, also in those that it started itself.
        Finalize(self, terminate_workers, [self._workers], exitpriority=0)

    def compute(self, calls: Sequence[RewardCall]) -> list[dict[int, list[AnswerFields]]]:
        """Return for each call the answers of its terms, one for each of its pairs."""
        with self._lock:
            try:
                return [job.answers for job in self._run_calls(list(map(PendingCall, calls)))]
            except BaseException:  # such as Ctrl-C: nobody will read the answers that are still to come
                self.close()
                raise

    def close(self) -> None:
        """End the processes, whatever they are doing; the next call starts new ones."""
        terminate_workers(self._workers)

    def _run_calls(self, jobs: Sequence[PendingCall]) -> Sequence[PendingCall]:
        waiting = {
            lane: deque(job for job in jobs if job.is_batch == lane and not job.is_done) for lane in (False, True)
        }
        busy: dict[RewardWorker, PendingCall] = {}
        while busy or any(waiting.values()):
            for lane, queue in waiting.items():
                for idle in self._get_idle_workers(lane, len(queue)):
                    busy[idle] = queue.popleft()
                    idle.send_call(busy[idle].remaining_message)
            wait([each.connection for each in busy], max(0.0, min(each.deadline for each in busy) - time.monotonic()))
            for each in list(busy):
                self._receive(each, busy, waiting)
        return jobs

    def _receive(
        self, worker: RewardWorker, busy: dict[RewardWorker, PendingCall], waiting: Mapping[bool, deque[PendingCall]]
    ) -> None:
        """Take the answers of a process. Where it is lost, what it was at has failed; another computes the rest."""
        job = busy[worker]
        try:
            for event in worker.receive_events():
                job.record(event)
        except WorkerLostError as error:
            job.fail(worker.running_terms, str(error))
            if worker not in self._workers:
                raise PoolClosedError("rewards were still being computed when their processes were closed") from None
            worker.terminate()
            self._workers.remove(worker)
            del busy[worker]
            if not job.is_done:
                waiting[job.is_batch].appendleft(job)
        else:
            if job.is_done:
                worker.mark_idle()
                del busy[worker]

    def _get_idle_workers(self, is_batch: bool, count: int) -> list[RewardWorker]:
        """Return up to `wanted` idle processes. Replaces ended ones, and starts more as far as they may be."""
        for each in [each for each in self._workers if not each.is_alive and not each.message]:
            each.terminate()
            self._workers.remove(each)
        mine = [each for each in self._workers if each.is_batch == is_batch]
        most = 1 if is_batch else self._cfg.workers
        missing = min(most, sum(each.message is not None for each in mine) + count) - len(mine)
        fresh = [RewardWorker(self._pickle_task(), self._worker_config, is_batch) for _ in range(missing)]
        self._workers += fresh
        for each in fresh:  # after all have started, so that they load in parallel
            each.wait_until_loaded(type(self._task).__name__)
        return [each for each in (*mine, *fresh) if not each.message][:count]

    def _pickle_task(self) -> bytes:
        message = pickle_or_explain(self._task)
        if isinstance(message, str):
            raise UserError(f"task {type(self._task).__name__} {message}")
        return message


def terminate_workers(workers: list[RewardWorker]) -> None:
    while workers:
        workers.pop().terminate()


def build_worker_environment(secrets: Sequence[str]) -> dict[str, str]:
    """Return the environment of a reward process: without secrets, except for those that are named."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in secrets or not SECRET_VARIABLE_PATTERN.fullmatch(name)
    }


def pickle_or_explain(value: Any) -> bytes | str:
    """Return the pickled bytes, or as a string the reason why the record cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent to the reward process: {shorten_to_one_line(str(error))}"


# ---------------------------------------------------------------- process
# A reward process as its parent holds it.


SPAWN_CONTEXT = multiprocessing.get_context("spawn")
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
START_TIMEOUT_SECONDS = 120.0
"""Seconds that a worker process has to import what the task needs."""
MAX_MESSAGE_BYTES = 2**28
"""The most bytes of an answer: a longer message is not from our worker."""
GRACE_SECONDS = 1.0
"""Seconds beyond its time limit that a call has to say itself what took too long, as asynchronous functions do."""


NO_MESSAGE = object()
"""Stands for a message that has not arrived."""


class WorkerLostError(Exception):
    """A process has ended or is late; the message says so in words."""


class RewardWorker:
    """A reward process: busy with a call, of which `running` are the terms that it computes until `deadline`, or idle.

    together: whether it is asked about all completions of a step at once.
    connection: what to wait on. It brings an answer, or the end of the process.
    """

    def __init__(self, task: bytes, config: WorkerConfig, is_batch: bool) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._channel = Channel(self.connection, MAX_MESSAGE_BYTES)
        # Not a daemon: those may not start processes, and some rewards do.
        self._process = SPAWN_CONTEXT.Process(target=worker.run_worker, args=(theirs, task, config))
        signals.open_standard_descriptors()
        with use_safe_path():
            self._process.start()
        theirs.close()
        self.is_batch = is_batch
        self.message: CallMessage | None = None
        self.running_terms: list[int] = []
        self.deadline = math.inf

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_until_loaded(self, task_name: str) -> None:
        """Wait until the process has loaded the task. UserError where it fails or takes more than START_SECONDS."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        for ended in (
            'the reward process cannot start; a script that trains needs `if __name__ == "__main__":` around it',
            f"the reward process ended while it loaded task {task_name}",
        ):
            while (answer := self._receive()) is NO_MESSAGE:
                if not wait([self.connection], max(0.0, deadline - time.monotonic())):
                    raise UserError(
                        f"the reward process has not loaded task {task_name} within {START_TIMEOUT_SECONDS:g} s"
                    )
            if not isinstance(answer, dict):
                raise UserError(ended)
            if error := answer.get("error"):
                raise UserError(f"the reward process cannot load task {task_name}: {error}")

    def send_call(self, message: CallMessage) -> None:
        self.message, self._open_terms = message, set(message.terms)
        self._start_terms(list(message.terms[:1]))
        sent = pickle.dumps(message)
        # A process may not read, as when a thread that a reward left keeps its interpreter busy.
        with suppress(OSError):  # it has ended, or is late; `heard` reports it
            self._channel.send(sent, self.deadline - time.monotonic())

    def receive_events(self) -> Iterator[CallEvent]:
        """Yield the events that have arrived. LostError where the process has ended, or is late."""
        while self.message and (received := self._receive()) is not NO_MESSAGE:
            if not isinstance(received, list):
                raise self._build_lost_error()
            yield self._record_event(received)
            if not self._open_terms:  # what has arrived counts, however late it is looked at
                return
        if self.message and time.monotonic() >= self.deadline:
            raise self._build_lost_error()

    def _record_event(self, received: list[Any]) -> CallEvent:
        if len(received) == 1:
            self._start_terms(received[0])
            return TermsStarted(*received)
        if len(received) == len(TermProgress._fields):
            return TermProgress(*received)
        event = TermFinished(*received)
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
        self.deadline = time.monotonic() + self._timeout + (GRACE_SECONDS if self.is_batch else 0.0)

    def _build_lost_error(self) -> WorkerLostError:
        if time.monotonic() >= self.deadline:
            return WorkerLostError(f"no reward within {self._timeout:g} s")
        return WorkerLostError(f"the reward ended its process ({self._describe_exit()})")

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
            return NO_MESSAGE if data is None else json.loads(data)
        except (EOFError, OSError, ValueError, RecursionError):
            return None


@contextmanager
def use_safe_path() -> Iterator[None]:
    """Keep the working directory off the import path of new processes: a file in it may be called pickle.py."""
    before = os.environ.get(SAFE_PATH_VARIABLE)
    os.environ[SAFE_PATH_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH_VARIABLE]
        else:
            os.environ[SAFE_PATH_VARIABLE] = before
