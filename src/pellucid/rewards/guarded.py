"""Compute rewards in this process: those of functions and tasks that exist nowhere else, as in a notebook."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pellucid.rewards import worker
from pellucid.rewards.sandbox import failed
from pellucid.types import Completion, Prompt, Reward, Task, with_split


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
