"""Reward processes, side by side, so that no reward can stop, stall or silently falsify a run.

Why processes: a Python function that hangs can only be stopped from outside. `signal.alarm` works in the main thread
alone, and neither it nor a thread interrupts a runaway regular expression.

This is no security boundary: rewards run as this user, with this user's files and network.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.rewards.calls import Answer, Answered, Call, Event, Partly, groups_of, with_errors
from pellucid.rewards.plain import one_line
from pellucid.rewards.process import LostError, Process
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import Confines, Message
from pellucid.types import UserError

SECRET = re.compile(r".*_(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)


class ClosedError(Exception):
    """The pool was closed in another thread while it computed."""


class Job:
    """A call on its way: what is sent of it, and the answers that have come."""

    def __init__(self, call: Call) -> None:
        groups = groups_of(call.pairs)
        sent = [pickled((group[0][0], [completion for _, completion in group])) for group in groups]
        self.is_batch = call.is_batch
        ready = [(data, len(group)) for data, group in zip(sent, groups, strict=True) if isinstance(data, bytes)]
        self._message = Message(call.terms, tuple(ready), call.state, call.limits)
        errors = [
            error if isinstance(error, str) else "" for group, error in zip(groups, sent, strict=True) for _ in group
        ]
        self._pickling_errors = {place: error for place, error in enumerate(errors) if error}
        self._sent_count = len(call.pairs) - len(self._pickling_errors)
        self._answers: dict[int, list[Answer]] = {} if self._sent_count else {term: [] for term in call.terms}
        self._partial_answers: dict[int, list[Answer]] = {}
        """The answers of terms that have some, in the order of the completions."""

    @property
    def is_done(self) -> bool:
        return self._answers.keys() >= set(self._message.terms)

    @property
    def remaining_message(self) -> Message:
        """What is still to be computed."""
        places = [place for place, term in enumerate(self._message.terms) if term not in self._answers]
        terms, limits = (tuple(of[i] for i in places) for of in (self._message.terms, self._message.limits))
        return replace(self._message, terms=terms, limits=limits)

    def record(self, event: Event) -> None:
        if isinstance(event, Answered):
            self._answers[event.term] = event.answers
        elif isinstance(event, Partly):
            self._partial_answers.setdefault(event.term, []).extend(event.answers)

    def fail(self, terms: Sequence[int], error: str) -> None:
        """Note that terms have failed for all completions that have no answer yet."""
        for term in terms:
            known = self._partial_answers.pop(term, [])
            self._answers[term] = [*known, *[{"error": error}] * (self._sent_count - len(known))]

    @property
    def answers(self) -> dict[int, list[Answer]]:
        """The answers of each term, one for each pair of the call."""
        return {term: with_errors(answers, self._pickling_errors) for term, answers in self._answers.items()}


class Pool:
    """Processes that compute calls: cfg.workers for those about one completion, one more for those about many.

    A process that ends or is late is replaced; what it has left is computed by another.
    """

    def __init__(self, task: Any, cfg: RewardConfig, log: Path | None) -> None:
        self._task, self._cfg = task, cfg
        self._worker_config = Confines(cfg.memory_gb, str(log or os.devnull), environment(cfg.secrets))
        self._workers: list[Process] = []
        self._lock = threading.Lock()
        # End the processes before multiprocessing waits for them at exit, also in those that it started itself.
        Finalize(self, end_all, [self._workers], exitpriority=0)

    def compute(self, calls: Sequence[Call]) -> list[dict[int, list[Answer]]]:
        """Return for each call the answers of its terms, one for each of its pairs."""
        with self._lock:
            try:
                return [job.answers for job in self._run_calls(list(map(Job, calls)))]
            except BaseException:  # such as Ctrl-C: nobody will read the answers that are still to come
                self.close()
                raise

    def close(self) -> None:
        """End the processes, whatever they are doing; the next call starts new ones."""
        end_all(self._workers)

    def _run_calls(self, jobs: Sequence[Job]) -> Sequence[Job]:
        waiting = {
            lane: deque(job for job in jobs if job.is_batch == lane and not job.is_done) for lane in (False, True)
        }
        busy: dict[Process, Job] = {}
        while busy or any(waiting.values()):
            for lane, queue in waiting.items():
                for idle in self._get_idle_workers(lane, len(queue)):
                    busy[idle] = queue.popleft()
                    idle.send_call(busy[idle].remaining_message)
            wait([each.connection for each in busy], max(0.0, min(each.deadline for each in busy) - time.monotonic()))
            for each in list(busy):
                self._receive(each, busy, waiting)
        return jobs

    def _receive(self, worker: Process, busy: dict[Process, Job], waiting: Mapping[bool, deque[Job]]) -> None:
        """Take the answers of a process. Where it is lost, what it was at has failed; another computes the rest."""
        job = busy[worker]
        try:
            for event in worker.receive_events():
                job.record(event)
        except LostError as error:
            job.fail(worker.running_terms, str(error))
            if worker not in self._workers:
                raise ClosedError("rewards were still being computed when their processes were closed") from None
            worker.terminate()
            self._workers.remove(worker)
            del busy[worker]
            if not job.is_done:
                waiting[job.is_batch].appendleft(job)
        else:
            if job.is_done:
                worker.mark_idle()
                del busy[worker]

    def _get_idle_workers(self, is_batch: bool, count: int) -> list[Process]:
        """Return up to `wanted` idle processes. Replaces ended ones, and starts more as far as they may be."""
        for each in [each for each in self._workers if not each.is_alive and not each.message]:
            each.terminate()
            self._workers.remove(each)
        mine = [each for each in self._workers if each.is_batch == is_batch]
        most = 1 if is_batch else self._cfg.workers
        missing = min(most, sum(each.message is not None for each in mine) + count) - len(mine)
        fresh = [Process(self._pickle_task(), self._worker_config, is_batch) for _ in range(missing)]
        self._workers += fresh
        for each in fresh:  # after all have started, so that they load in parallel
            each.wait_until_loaded(type(self._task).__name__)
        return [each for each in (*mine, *fresh) if not each.message][:count]

    def _pickle_task(self) -> bytes:
        message = pickled(self._task)
        if isinstance(message, str):
            raise UserError(f"task {type(self._task).__name__} {message}")
        return message


def end_all(workers: list[Process]) -> None:
    while workers:
        workers.pop().terminate()


def environment(secrets: Sequence[str]) -> dict[str, str]:
    """Return the environment of a reward process: without secrets, except for those that are named."""
    return {name: value for name, value in os.environ.items() if name in secrets or not SECRET.fullmatch(name)}


def pickled(value: Any) -> bytes | str:
    """Return the pickled bytes, or as a string the reason why the record cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent to the reward process: {one_line(str(error))}"
