"""Compute rewards in this process: those of functions and tasks that exist nowhere else, as in a notebook."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pellucid.machine.plugins import HERE
from pellucid.tasks import worker
from pellucid.tasks.sandbox import failed
from pellucid.tasks.wrappers import layers, with_split
from pellucid.types import Completion, Prompt, Reward, Task


def only_here(task: Task) -> bool:
    """Return whether no other process could load the task: its class or a reward of it has no file."""
    return any(is_local(type(layer)) or has_given_rewards(layer) for layer in layers(task))


def is_local(cls: type) -> bool:
    return cls.__module__ == "__main__" or "<locals>" in cls.__qualname__


def has_given_rewards(task: Any) -> bool:
    terms = getattr(task, "rewards", ())  # of a task of the user's own it may be anything
    names = [getattr(term, "name", "") for term in terms] if isinstance(terms, list | tuple) else []
    return any(isinstance(name, str) and name.startswith(HERE) for name in names)


class Guarded:
    """A task whose rewards are computed in this process, where they may use all that it holds.

    A reward that raises or is no finite number becomes Reward(nan, error="what happened"), in the words of a Sandboxed
    task; the traceback of each kind of error is appended to the file `log`. There is no time limit: what hangs, hangs
    the run, and what ends the process, ends it.
    """

    def __init__(self, task: Task, log: Path | None = None) -> None:
        self.task, self.seed, self.split = task, task.seed, task.split
        self._log, self._noted = log, set[str]()

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        return self.task.sample(step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        try:
            return Reward(**worker.plain(self.task.reward(prompt, completion)))
        except worker.NoRewardError as error:
            return failed(str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
            told = worker.described(error)
            self._note(told, error)
            return failed(told)

    def with_split(self, split: str) -> Guarded:
        """Return the same task on another split."""
        twin = copy.copy(self)
        twin.task, twin.split = with_split(self.task, split), split
        return twin

    def _note(self, told: str, error: BaseException) -> None:
        """Write the traceback of an error to the log, the first time that it occurs."""
        if self._log and told not in self._noted and len(self._noted) < worker.TOLD:
            self._noted.add(told)
            with self._log.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the task: its name and settings, solution, observe."""
        if name == "task" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.task, name)
