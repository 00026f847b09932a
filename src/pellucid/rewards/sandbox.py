"""Compute rewards in separate processes, so that no reward function can stop, stall or silently falsify a run.

Why a process: a Python function that hangs can only be stopped from outside. `signal.alarm` works in the main thread
alone, and neither it nor a thread interrupts a runaway regular expression.

This is no security boundary: reward functions run as this user, with this user's files and network.
"""

from __future__ import annotations

import copy
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.algorithm.settings import RewardConfig
from pellucid.machine import streams
from pellucid.rewards import worker
from pellucid.types import Completion, Prompt, Reward, Task, UserError, with_split

SPAWN = multiprocessing.get_context("spawn")
SAFE_PATH = "PYTHONSAFEPATH"
START_SECONDS = 120.0
"""Seconds that a worker process has to import what the task needs."""
AT_ONCE = 2**16
"""How many bytes of a message a pipe takes while the process does not read."""
MOST = 2 * worker.LONGEST_ANSWER
"""The most bytes of an answer: a longer message is not from our worker."""
SECRET = re.compile(r".*_(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)

Pair = tuple[Prompt, Completion]


class Sandboxed:
    """A task whose rewards are computed in worker processes.

    A reward that raises, takes longer than `cfg.timeout` seconds, ends its process or is no finite number becomes
    Reward(nan, error="what happened"). Workers start at the first reward, and are replaced when one dies. What they
    print is appended to the file `log`, or discarded without one.

    Example: task = Sandboxed(Dataset(data="train.jsonl"), RewardConfig(timeout=5.0)); test = task.with_split("test")
    """

    def __init__(self, task: Task, cfg: RewardConfig | None = None, log: Path | None = None) -> None:
        self.task, self.seed, self.split = task, task.seed, task.split
        self._workers = Workers(task, cfg or RewardConfig(), log)

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        return self.task.sample(step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return self._workers.rewards([(prompt, completion)])[0]

    def reward_all(self, pairs: Sequence[Pair]) -> list[Reward]:
        """Return the rewards in the order of the completions, computed by all workers."""
        return self._workers.rewards(pairs)

    def with_split(self, split: str) -> Sandboxed:
        """Return the same task on another split. Both share the workers, since rewards do not depend on the split."""
        twin = copy.copy(self)
        twin.task, twin.split = with_split(self.task, split), split
        return twin

    def close(self) -> None:
        self._workers.close()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the task: its name and settings, solution, observe."""
        if name == "task" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.task, name)


class Workers:
    """A pool of processes, each of which computes one reward at a time."""

    def __init__(self, task: Task, cfg: RewardConfig, log: Path | None) -> None:
        self._task, self._cfg = task, cfg
        self._place = worker.Place(cfg.timeout, cfg.memory_gb, str(log or os.devnull), environment(cfg.secrets))
        self._workers: list[Worker] = []
        self._turn = threading.Lock()
        # End the workers before multiprocessing waits for them at exit, also in processes that it started itself.
        Finalize(self, end_all, [self._workers], exitpriority=0)

    def rewards(self, pairs: Sequence[Pair]) -> list[Reward]:
        """Return the reward of each prompt and completion, in their order."""
        with self._turn:
            try:
                return self._computed(pairs)
            except BaseException:  # such as Ctrl-C: nobody will read the answers that are still to come
                self.close()
                raise

    def close(self) -> None:
        """End the processes, whatever they are doing; the next reward starts new ones."""
        end_all(self._workers)

    def _computed(self, pairs: Sequence[Pair]) -> list[Reward]:
        messages = [pickled(pair) for pair in pairs]
        computed = {i: failed(message) for i, message in enumerate(messages) if isinstance(message, str)}
        waiting = deque((i, message) for i, message in enumerate(messages) if isinstance(message, bytes))
        while len(computed) < len(pairs):
            for idle in self._idle(len(waiting)):
                idle.ask(*waiting.popleft(), self._cfg.timeout)
            busy = [each for each in self._workers if each.busy]
            ends = [end for each in busy for end in each.ends]
            heard = wait(ends, max(0.0, min(each.deadline for each in busy) - time.monotonic()))
            for each in busy:
                if time.monotonic() >= each.deadline or any(end in heard for end in each.ends):
                    computed[each.place] = each.answered(self._cfg.timeout)
        return [computed[i] for i in range(len(pairs))]

    def _idle(self, wanted: int) -> list[Worker]:
        """Return up to `wanted` idle workers. Replaces ended ones, and starts more up to cfg.workers."""
        for each in [each for each in self._workers if not each.alive]:
            each.end()
            self._workers.remove(each)
        busy = sum(each.busy for each in self._workers)
        missing = min(self._cfg.workers, busy + wanted) - len(self._workers)
        fresh = [Worker(self._task_bytes(), self._place) for _ in range(missing)]
        self._workers += fresh
        for each in fresh:  # after all have started, so that they load in parallel
            each.load(type(self._task).__name__)
        return [each for each in self._workers if not each.busy][:wanted]

    def _task_bytes(self) -> bytes:
        message = pickled(self._task)
        if isinstance(message, str):
            raise UserError(f"task {type(self._task).__name__} {message}")
        return message


class Worker:
    """The parent's handle of a reward process: busy with the completion at index `place` until `deadline`, or idle."""

    def __init__(self, task: bytes, place: worker.Place) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # Not a daemon: those may not start processes, and some rewards do.
        self._process = SPAWN.Process(target=worker.work, args=(theirs, task, place))
        streams.plugged()
        with safe_path():
            self._process.start()
        theirs.close()
        self.place, self.deadline = 0, math.inf

    @property
    def busy(self) -> bool:
        return self.deadline < math.inf

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def ends(self) -> tuple[Any, int]:
        """The two objects to wait on: the connection, for an answer, and the sentinel, for the end of the process."""
        return self._connection, self._process.sentinel

    def load(self, kind: str) -> None:
        """Wait until the worker has loaded the task. UserError where it fails or takes more than START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        for ended in (
            'the reward process cannot start; a script that trains needs `if __name__ == "__main__":` around it',
            f"the reward process ended while it loaded task {kind}",
        ):
            if not wait(self.ends, max(0.0, deadline - time.monotonic())):
                raise UserError(f"the reward process has not loaded task {kind} within {START_SECONDS:g} s")
            answer = self._received()
            if answer is None:
                raise UserError(ended)
            if error := answer.get("error"):
                raise UserError(f"the reward process cannot load task {kind}: {error}")

    def ask(self, place: int, message: bytes, timeout: float) -> None:
        self.place, self.deadline = place, time.monotonic() + timeout
        # Sending blocks if the process does not read, as when a thread that a reward left keeps its interpreter busy.
        watch = threading.Timer(timeout, self._kill) if len(message) > AT_ONCE else None
        try:
            if watch:
                watch.start()
            with suppress(OSError):  # the process has ended; `answered` reports it
                self._connection.send_bytes(message)
        finally:
            if watch:
                watch.cancel()

    def answered(self, timeout: float) -> Reward:
        """Return the computed reward, or a failed one with its error. Kills a worker that has ended or is late."""
        answer, late = self._received(), time.monotonic() >= self.deadline
        self.deadline = math.inf
        if answer is not None:
            return Reward(**{"value": math.nan, **answer})
        error = f"no reward within {timeout:g} s" if late else f"the reward ended its process ({self._status()})"
        self.end()
        return failed(error)

    def end(self) -> None:
        self._kill()
        self._process.join()
        self._connection.close()

    def _status(self) -> str:
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

    def _received(self) -> dict[str, Any] | None:
        """Return the answer that has arrived; None where there is none, or it is no JSON object."""
        try:
            answer = json.loads(self._connection.recv_bytes(MOST)) if self._connection.poll() else None
        except (EOFError, OSError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None


def end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()


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


def environment(secrets: Sequence[str]) -> dict[str, str]:
    """Return the environment of a reward process: without secrets, except for those that are named."""
    return {name: value for name, value in os.environ.items() if name in secrets or not SECRET.fullmatch(name)}


def pickled(record: Any) -> bytes | str:
    """Return the pickled bytes, or as a string the reason why the record cannot be pickled."""
    try:
        return pickle.dumps(record)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent to the reward process: {worker.one_line(str(error))}"


def failed(error: str) -> Reward:
    return Reward(math.nan, error=error)
