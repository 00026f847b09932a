"""Worker processes that compute rewards side by side, so that no reward can stop, stall or silently falsify a run."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.rewards.parts import Answer, make_failure
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import (
    CallEvent,
    RewardCall,
    TermAnswered,
    TermsStarted,
    decode_event,
    insert_failures,
    load_task,
    split_into_groups,
)
from pellucid.sandbox.pool import (
    START_TIMEOUT_SECONDS,
    Worker,
    WorkerLostError,
    WorkerStartError,
    build_worker_config,
    spawn_worker,
    terminate_workers,
)
from pellucid.sandbox.values import shorten_to_one_line
from pellucid.types import UserError


class PoolClosedError(Exception):
    """The pool was closed in another thread while it computed."""


class _PendingCall:
    """A call that is being computed: the data to send, and the answers received so far."""

    def __init__(self, call: RewardCall) -> None:
        groups = split_into_groups(call.pairs)
        pickled = [_pickle_or_explain((group[0][0], [completion for _, completion in group])) for group in groups]
        outcomes = [(data, len(group)) for data, group in zip(pickled, groups, strict=True)]
        self.groups = [(data, count) for data, count in outcomes if isinstance(data, bytes)]
        """Pickled prompts with their completions, since one of them may be unreadable in a worker, and their counts."""
        errors = [data for data, count in outcomes for _ in range(count)]
        self._pickling_errors = {i: error for i, error in enumerate(errors) if isinstance(error, str)}
        self._sent_count = len(call.pairs) - len(self._pickling_errors)
        self._call = call._replace(pairs=())
        self.is_batch = call.is_batch
        self._answers: dict[int, list[Answer]] = {} if self._sent_count else {term: [] for term in call.limits}
        self._partial_answers: dict[int, list[Answer]] = {}
        """The answers of terms that are not done, in the order of the completions."""

    @property
    def is_done(self) -> bool:
        return self._answers.keys() >= self._call.limits.keys()

    @property
    def remaining_call(self) -> RewardCall:
        """What is still to be computed, without the completions."""
        limits = {term: limit for term, limit in self._call.limits.items() if term not in self._answers}
        return self._call._replace(limits=limits)

    def record(self, event: CallEvent) -> None:
        if isinstance(event, TermAnswered):
            if event.is_done:
                self._answers[event.term] = event.answers
            else:
                self._partial_answers.setdefault(event.term, []).extend(event.answers)

    def fail(self, terms: Sequence[int], error: str) -> None:
        """Record that terms have failed for all completions that have no answer yet."""
        for term in terms:
            answers = self._partial_answers.pop(term, [])
            failures = [make_failure(term, error)] * (self._sent_count - len(answers))
            self._answers[term] = [*answers, *failures]

    @property
    def answers(self) -> dict[int, list[Answer]]:
        """The answers of each term, one for each completion of the call."""
        return {term: insert_failures(term, found, self._pickling_errors) for term, found in self._answers.items()}


class RewardPool:
    """Worker processes that compute calls: cfg.workers for calls about one completion, one more for those about many.

    A process that ends or is late is replaced; another one computes the remaining terms.
    """

    def __init__(self, task: Any, cfg: RewardConfig, log: Path | None) -> None:
        self._task, self._cfg = task, cfg
        self._worker_config = build_worker_config(cfg, log)
        self._workers: list[_RewardWorker] = []
        self._lock = threading.Lock()
        # End the processes before multiprocessing waits for them at exit, also in those that it started itself.
        Finalize(self, terminate_workers, [self._workers], exitpriority=0)

    def compute(self, calls: Sequence[RewardCall]) -> list[dict[int, list[Answer]]]:
        """Return for each call the answers of its terms, one for each of its completions.

        Raises:
            UserError: if a worker cannot load the task.
            PoolClosedError: if another thread closes the pool meanwhile.
        """
        with self._lock:
            try:
                return [pending.answers for pending in self._run_calls(list(map(_PendingCall, calls)))]
            except BaseException:  # such as Ctrl-C: nobody will read the answers that are still to come
                self.close()
                raise

    def close(self) -> None:
        """End the processes, whatever they are doing; the next call starts new ones."""
        terminate_workers(self._workers)

    def _run_calls(self, calls: Sequence[_PendingCall]) -> Sequence[_PendingCall]:
        waiting = {
            is_batch: deque(call for call in calls if call.is_batch == is_batch and not call.is_done)
            for is_batch in (False, True)
        }
        busy: dict[_RewardWorker, _PendingCall] = {}
        while busy or any(waiting.values()):
            for is_batch, queue in waiting.items():
                for worker in self._get_idle_workers(is_batch, len(queue)):
                    busy[worker] = queue.popleft()
                    worker.send_call(busy[worker])
            first_deadline = min(worker.deadline for worker in busy)
            wait([worker.connection for worker in busy], max(0.0, first_deadline - time.monotonic()))
            for worker in list(busy):
                self._receive(worker, busy, waiting)
        return calls

    def _receive(
        self,
        worker: _RewardWorker,
        busy: dict[_RewardWorker, _PendingCall],
        waiting: Mapping[bool, deque[_PendingCall]],
    ) -> None:
        """Take the answers of a process. If it is lost, its current terms have failed; another computes the rest."""
        call = busy[worker]
        try:
            for event in worker.receive_events():
                call.record(event)
        except WorkerLostError as error:
            call.fail(worker.running_terms, str(error))
            if worker not in self._workers:
                raise PoolClosedError("rewards were still being computed when their processes were closed") from None
            worker.terminate()
            self._workers.remove(worker)
            del busy[worker]
            if not call.is_done:
                waiting[call.is_batch].appendleft(call)
        else:
            if call.is_done:
                worker.mark_idle()
                del busy[worker]

    def _get_idle_workers(self, is_batch: bool, count: int) -> list[_RewardWorker]:
        """Return up to `count` idle processes. Replaces ended ones, and starts more if there may be more."""
        for worker in [worker for worker in self._workers if not worker.is_alive and not worker.is_busy]:
            worker.terminate()
            self._workers.remove(worker)
        workers = [worker for worker in self._workers if worker.is_batch == is_batch]
        limit = 1 if is_batch else self._cfg.workers
        missing = min(limit, sum(worker.is_busy for worker in workers) + count) - len(workers)
        new = [self._start_worker(is_batch) for _ in range(missing)]
        for worker in new:  # after all have started, so that they load in parallel
            self._wait_until_loaded(worker)
        return [worker for worker in (*workers, *new) if not worker.is_busy][:count]

    def _start_worker(self, is_batch: bool) -> _RewardWorker:
        task = _pickle_or_explain(self._task)
        if isinstance(task, str):
            raise UserError(f"task {type(self._task).__name__} {task}")
        worker = spawn_worker(_RewardWorker, self._worker_config, load_task, task)
        worker.is_batch = is_batch
        self._workers.append(worker)
        return worker

    def _wait_until_loaded(self, worker: _RewardWorker) -> None:
        name = type(self._task).__name__
        try:
            worker.wait_until_loaded()
        except WorkerStartError as error:
            messages = {
                "not started": "the reward process cannot start; a script that trains needs "
                '`if __name__ == "__main__":` around it',
                "ended": f"the reward process ended while it loaded task {name}",
                "late": f"the reward process has not loaded task {name} within {START_TIMEOUT_SECONDS:g} s",
                "raised": f"the reward process cannot load task {name}: {error}",
            }
            raise UserError(messages[error.reason]) from None


class _RewardWorker(Worker):
    """A worker process that computes the terms `running_terms` of a call, or is idle.

    is_batch: whether it is asked about all completions of a step at once.
    """

    result_name = "reward"

    def __init__(self, connection: Any, process: Any = None) -> None:
        super().__init__(connection, process)
        self.is_batch = False
        self.running_terms: list[int] = []
        self._call: RewardCall | None = None
        self._open_terms: set[int] = set()

    @property
    def is_busy(self) -> bool:
        return self._call is not None

    def send_call(self, pending: _PendingCall) -> None:
        """Send the remaining terms of a call to the process."""
        self._call = call = pending.remaining_call
        self._open_terms = set(call.limits)
        self._start_terms(list(call.limits)[:1])
        # A process may not read, as when a thread that a reward left keeps its interpreter busy.
        with suppress(WorkerLostError):  # receive_events reports it
            self.send(pickle.dumps((call, pending.groups)))

    def receive_events(self) -> Iterator[CallEvent]:
        """Yield the events that have arrived. Raises WorkerLostError if the process has ended or is late."""
        while self._call and (data := self.receive()) is not None:
            try:
                event = decode_event(data)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise WorkerLostError(self._describe_end()) from error
            if isinstance(event, TermsStarted):
                self._start_terms(event.terms)
            elif event.is_done:
                self.running_terms = [term for term in self.running_terms if term != event.term]
                self._open_terms.discard(event.term)
            yield event
            if not self._open_terms:  # what has arrived counts, however late it is looked at
                return

    def mark_idle(self) -> None:
        """Note that the call is answered."""
        self._call, self.running_terms, self.deadline = None, [], math.inf

    def _start_terms(self, terms: list[int]) -> None:
        assert self._call
        self.running_terms = terms
        timeout = max(self._call.limits[term] or math.inf for term in terms)
        if self.is_batch:  # asynchronous functions report by themselves what took too long
            self.set_timeout(timeout)
        else:
            self.set_timeout(timeout, grace=0.0)

    def _describe_end(self) -> str:
        if time.monotonic() >= self.deadline:
            return self._describe_lateness()
        return f"the reward ended its process ({self.describe_exit()})"


def _pickle_or_explain(value: Any) -> bytes | str:
    """Return the pickled bytes, or as a string the reason why the record cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent to the reward process: {shorten_to_one_line(str(error))}"
