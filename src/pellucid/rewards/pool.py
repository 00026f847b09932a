"""Worker processes that compute rewards side by side, so that no reward can stop, stall or silently falsify a run."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.rewards.parts import Answer, make_failure
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import RewardCall, decode_event, load_task, merge_answers, split_into_groups
from pellucid.sandbox.pool import (
    GRACE_SECONDS,
    Worker,
    WorkerEndedError,
    WorkerLostError,
    WorkerStartError,
    build_worker_config,
    spawn_worker,
    terminate_ended,
    terminate_workers,
)
from pellucid.sandbox.values import InvalidResultError, shorten_to_one_line
from pellucid.types import UserError


class PoolClosedError(Exception):
    """The pool was closed in another thread while it computed."""


class _PendingCall:
    """A call that is being computed: the data to send, and the answers received so far."""

    def __init__(self, call: RewardCall) -> None:
        self.limits, self.is_batch = call.limits, call.is_batch
        self._call, self._numbers = call._replace(pairs={}), list(call.pairs)
        self.answers: dict[int, dict[int, Answer]] = {term: {} for term in call.limits}
        """The answers of each term, by the numbers of the completions."""
        self.groups: list[tuple[bytes, list[int]]] = []
        """Each group, pickled separately since a worker may fail to read it, and the numbers of its completions."""
        for group in split_into_groups(call.pairs):
            try:
                self.groups.append((_pickle(list(group.values())), list(group)))
            except InvalidResultError as error:
                for term in call.limits:
                    self.answers[term] |= dict.fromkeys(group, make_failure(term, str(error)))

    @property
    def is_done(self) -> bool:
        return not self.remaining_call.limits

    @property
    def remaining_call(self) -> RewardCall:
        """The call with only its unfinished terms, without completions."""
        open_terms = [term for term, found in self.answers.items() if len(found) < len(self._numbers)]
        return self._call._replace(limits={term: self.limits[term] for term in open_terms})

    def fail(self, terms: Sequence[int], error: str) -> None:
        """Record that terms have failed for all completions that have no answer yet."""
        for term in terms:
            self.answers[term] = dict.fromkeys(self._numbers, make_failure(term, error)) | self.answers[term]


class RewardPool:
    """Worker processes that compute calls: cfg.workers for calls about one completion, one more for those about many.

    A process that ends or is late is replaced; another one computes the remaining terms.
    """

    def __init__(self, task: Any, cfg: RewardConfig, log: Path | None) -> None:
        self._task, self._cfg = task, cfg
        self._worker_config = build_worker_config(cfg, log)
        self._workers: list[_RewardWorker] = []
        self._lock = threading.Lock()
        # End the workers before multiprocessing waits for them at exit, also inside a multiprocessing child.
        Finalize(self, terminate_workers, [self._workers], exitpriority=0)

    def compute(self, calls: Sequence[RewardCall]) -> dict[int, dict[int, Answer]]:
        """Return the answers of each term of the calls, by the numbers of the completions.

        Raises UserError if a worker cannot load the task, PoolClosedError if another thread closes the pool.
        """
        with self._lock:
            try:
                pending = [_PendingCall(call) for call in calls]
                self._run_calls(pending)
            except BaseException:  # such as Ctrl-C: nobody will read the answers that are still to come
                self.close()
                raise
            return merge_answers((term, found) for call in pending for term, found in call.answers.items())

    def close(self) -> None:
        """End the processes, whatever they are doing; the next call starts new ones."""
        terminate_workers(self._workers)

    def _run_calls(self, calls: Sequence[_PendingCall]) -> None:
        waiting = {
            is_batch: deque(call for call in calls if call.is_batch == is_batch and not call.is_done)
            for is_batch in (False, True)
        }
        busy: list[_RewardWorker] = []
        while busy or any(waiting.values()):
            for is_batch, queue in waiting.items():
                for worker in self._get_idle_workers(is_batch, len(queue)):
                    worker.send_call(queue.popleft())
                    busy.append(worker)
            first_deadline = min(worker.deadline for worker in busy)
            wait([worker.connection for worker in busy], max(0.0, first_deadline - time.monotonic()))
            for worker in busy:
                self._receive_answers(worker, waiting)
            busy = [worker for worker in busy if worker.call]

    def _receive_answers(self, worker: _RewardWorker, waiting: Mapping[bool, deque[_PendingCall]]) -> None:
        """Take the answers of a process. If it is lost, its current terms have failed; another computes the rest."""
        call = worker.call
        assert call
        try:
            worker.receive_answers()
        except WorkerLostError as error:
            if worker not in self._workers:
                raise PoolClosedError("rewards were still being computed when their processes were closed") from None
            call.fail(worker.running_terms or list(call.remaining_call.limits)[:1], str(error))
            worker.call = None
            worker.terminate()
            self._workers.remove(worker)
            if not call.is_done:
                waiting[call.is_batch].appendleft(call)

    def _get_idle_workers(self, is_batch: bool, count: int) -> list[_RewardWorker]:
        """Return up to `count` idle processes. Replaces ended ones, and starts more up to the limit."""
        terminate_ended(self._workers)
        workers = [worker for worker in self._workers if worker.is_batch == is_batch]
        limit = 1 if is_batch else self._cfg.workers
        missing = min(limit, sum(bool(worker.call) for worker in workers) + count) - len(workers)
        new = [self._start_worker(is_batch) for _ in range(missing)]
        for worker in new:  # after all have started, so that they load in parallel
            try:
                worker.wait_until_loaded()
            except WorkerEndedError as error:
                raise UserError(f"the reward process cannot start: {error}", page="reference/python") from None
            except WorkerStartError as error:
                name = type(self._task).__name__
                raise UserError(f"the reward process cannot load task {name}: {error}") from None
        return [worker for worker in (*workers, *new) if not worker.call][:count]

    def _start_worker(self, is_batch: bool) -> _RewardWorker:
        try:
            task = _pickle(self._task)
        except InvalidResultError as error:
            raise UserError(f"task {type(self._task).__name__} {error}") from None
        worker = spawn_worker(_RewardWorker, self._worker_config, load_task, task)
        worker.is_batch = is_batch
        self._workers.append(worker)
        return worker


class _RewardWorker(Worker):
    """A worker process that computes the terms `running_terms` of a call, or is idle.

    is_batch: whether it is asked about all completions of a step at once.
    """

    result_name = "reward"
    decode = staticmethod(decode_event)
    is_batch = False
    call: _PendingCall | None = None
    running_terms: Sequence[int] = ()

    @property
    def is_alive(self) -> bool:
        """Whether the process is busy or alive. `receive_answers` reports the end of a busy one."""
        return bool(self.call) or super().is_alive

    def send_call(self, call: _PendingCall) -> None:
        """Send the remaining terms of a call to the process."""
        self.call, remaining = call, call.remaining_call
        self._set_timeout(next(iter(remaining.limits.values())))
        # The process may not read, for example while a thread left by a reward blocks it.
        with suppress(WorkerLostError):  # receive_answers reports it
            self.send(pickle.dumps((remaining, call.groups)))

    def receive_answers(self) -> None:
        """Add the answers that have arrived to the call. If it is done, become idle. Raises WorkerLostError."""
        assert self.call
        while not self.call.is_done and (event := self.receive()):
            self.call.answers[event.term] |= event.answers
            if event.is_start:
                open_terms = self.call.remaining_call.limits
                self.running_terms = [*(term for term in self.running_terms if term in open_terms), event.term]
                self._set_timeout(max(open_terms[term] for term in self.running_terms))
        if self.call.is_done:
            self.call, self.running_terms, self.deadline = None, (), math.inf

    def _set_timeout(self, seconds: float) -> None:
        # Only the asynchronous functions of a batch report by themselves what took too long.
        self.set_timeout(seconds, grace=GRACE_SECONDS if self.is_batch else 0.0)

    def _describe_end(self) -> str:
        if time.monotonic() >= self.deadline:
            return self._describe_lateness()
        return f"the reward ended its process ({self._describe_exit()})"


def _pickle(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidResultError(f"cannot be sent to the reward process: {shorten_to_one_line(str(error))}") from None
