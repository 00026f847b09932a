"""Rewards in a process of their own, so that no reward function can stop, stall or silently falsify a run.

Why a process: a Python function that hangs can only be stopped from outside. `signal.alarm` works in the main thread
alone, and neither it nor a thread interrupts a regular expression that runs away.
"""

from __future__ import annotations

import copy
import faulthandler
import math
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from pellucid.tasks.wrappers import with_split
from pellucid.types import Completion, Prompt, Reward, Task, UserError

START_SECONDS = 120.0
"""For the worker process to import what the task needs."""
LONGEST_ERROR = 300
"""Characters."""


class Sandboxed:
    """A task whose rewards are computed in one worker process.

    A reward that raises, takes longer than `timeout` seconds, ends its process or is no finite number becomes
    Reward(nan, error="what happened"). The worker starts at the first reward, and anew after one it did not survive.

    Example: task = Sandboxed(Dataset(data="train.jsonl"), timeout=5.0); held_out = task.with_split("test")
    """

    def __init__(self, task: Task, timeout: float = 10.0) -> None:
        self.task, self.seed, self.split = task, task.seed, task.split
        self._worker = Worker(task, timeout)

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        return self.task.sample(step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return self._worker.reward(prompt, completion)

    def with_split(self, split: str) -> Sandboxed:
        """The same task on another split; the two share the worker, since a reward depends on no split."""
        twin = copy.copy(self)
        twin.task, twin.split = with_split(self.task, split), split
        return twin

    def close(self) -> None:
        self._worker.close()

    def __getattr__(self, name: str) -> Any:
        """What else the task offers: its name and settings, solution, observe."""
        if name == "task" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.task, name)


class Worker:
    """A process that computes rewards, one at a time."""

    def __init__(self, task: Task, timeout: float) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout = {timeout} must be a positive number of seconds")
        self._task, self._timeout = task, timeout
        self._executor: ProcessPoolExecutor | None = None
        self._pid = 0

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        future = self._submit(prompt, completion)
        if not self._done(future, self._timeout):
            return failed(f"no reward within {self._timeout:g} s")
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            return failed("the reward ended its process")
        return failed(described(error)) if error else checked(future.result())

    def close(self) -> None:
        """End the process, whatever it is doing; the next reward starts another."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        for process in multiprocessing.active_children():
            if process.pid == self._pid:
                process.kill()
        executor.shutdown()

    def _submit(self, prompt: Prompt, completion: Completion) -> Future[Any]:
        executor = self._executor or self._start()
        try:
            return executor.submit(reward_in_worker, prompt, completion, self._timeout)
        except BrokenProcessPool:  # it did not survive the last reward, or died since
            self.close()
            return self._start().submit(reward_in_worker, prompt, completion, self._timeout)

    def _start(self) -> ProcessPoolExecutor:
        kind = type(self._task).__name__
        try:
            pickled = pickle.dumps(self._task)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(f"task {kind} cannot be sent to the reward process: {error}") from error
        executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=prepare_worker)
        try:
            self._pid = executor.submit(os.getpid).result()
        except BrokenProcessPool as error:
            raise UserError(
                'the reward process cannot start; a script that trains needs `if __name__ == "__main__":` around it'
            ) from error
        self._executor = executor
        loaded = executor.submit(load_in_worker, pickled)
        if not self._done(loaded, START_SECONDS):
            raise UserError(f"the reward process has not loaded task {kind} within {START_SECONDS:g} s")
        if error := loaded.exception():
            self.close()
            raise UserError(f"the reward process cannot load task {kind}: {described(error)}")
        return executor

    def _done(self, future: Future[Any], seconds: float) -> bool:
        """Whether it ends in time. Where it does not, or Ctrl-C ends the wait, the worker is stopped."""
        done = False
        try:
            done = bool(wait([future], seconds).done)
        finally:
            if not done:  # Python waits for it at exit
                self.close()
        return done


def failed(error: str) -> Reward:
    return Reward(math.nan, error=error)


def checked(reward: Any) -> Reward:
    if not isinstance(reward, Reward):
        return failed(f"the task returned a {type(reward).__name__}, where a Reward is needed")
    if isinstance(reward.value, Real) and math.isfinite(reward.value):
        return replace(reward, value=float(reward.value))
    parts = f", of parts {dict(reward.parts)}" if reward.parts else ""
    return replace(reward, value=math.nan, error=reward.error or f"the reward is {reward.value!r}{parts}")


def described(error: BaseException) -> str:
    """In one line, with the place where it was raised; an exception from a worker brings its traceback as its cause."""
    places = re.findall(r'File "(.+?)", line (\d+)', str(error.__cause__))
    where = f" ({Path(places[-1][0]).name}, line {places[-1][1]})" if places else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_ERROR]}{where}"


# What follows runs in the worker.

WORKER: dict[str, Any] = {}


def prepare_worker() -> None:
    # Ctrl-C reaches every process of the terminal, a supervisor's SIGTERM every one of the service; the parent decides
    # what it means, and finishes a step for which it needs this one.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def load_in_worker(pickled: bytes) -> None:
    WORKER["task"] = pickle.loads(pickled)


def reward_in_worker(prompt: Prompt, completion: Completion, timeout: float) -> Any:
    # The parent stops a reward that hangs. Should the parent be gone, this does: it needs no interpreter lock, which
    # a regular expression that runs away never yields.
    faulthandler.dump_traceback_later(2 * timeout, exit=True)
    try:
        return WORKER["task"].reward(prompt, completion)
    finally:
        faulthandler.cancel_dump_traceback_later()
