"""A task whose rewards are computed where they can do no harm, all those of a step at once."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pellucid.protocols import Task, grades_together, with_split
from pellucid.rewards import worker
from pellucid.rewards.calls import OWN, Answer, Answered, Call, run
from pellucid.rewards.parts import Grader, Pair, Part
from pellucid.rewards.plain import NoRewardError, of_reward
from pellucid.rewards.pool import Pool
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import in_batches, terms_of
from pellucid.rewards.trainer_state import TrainerState, state_of
from pellucid.types import Completion, Progress, Prompt, Reward


class Place(Protocol):
    """Where calls are computed: in other processes, or in this one."""

    def compute(self, calls: Sequence[Call]) -> list[dict[int, list[Answer]]]:
        """Return for each call the answers of its terms, one for each of its pairs."""
        ...

    def close(self) -> None: ...


class Graded:
    """A task whose rewards are computed in other processes, or with `here` in this one.

    A reward that raises, takes longer than `cfg.timeout` seconds, ends its process or is no finite number becomes
    Reward(nan, error="what happened"). Where functions are terms of the reward, or the task has a method
    `rewards(prompts, completions)`, they are called once for all completions of a step, within `cfg.step_timeout`
    seconds; where one raises, once for each group. A judge and a reward model, `graders` by their places in
    `task.rewards`, work in threads of this process meanwhile. What rewards print in other processes is appended to the
    file `log`, and so are tracebacks, one for each kind of error.

    here: for rewards that exist in this process alone, as in a notebook. There is no time limit then: what hangs, hangs
    the run, and what ends the process, ends it.

    Example: task = Graded(Dataset(data="train.jsonl"), RewardConfig(timeout=5.0)); test = task.with_split("test")
    """

    def __init__(
        self,
        task: Task,
        cfg: RewardConfig | None = None,
        log: Path | None = None,
        graders: Mapping[int, Grader] | None = None,
        in_process: bool = False,
    ) -> None:
        self.task, self.seed, self.split = task, task.seed, task.split
        self._cfg, self._graders = cfg or RewardConfig(), graders or {}
        self._metrics_file = str(log.with_name("metrics.jsonl")) if log else ""
        self._grading_task = grading(task)
        self._terms = terms_of(self._grading_task)
        self._executor: Place = (
            Here(self._grading_task, log) if in_process else Pool(self._grading_task, self._cfg, log)
        )

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        return self.task.sample(step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return self.reward_all([(prompt, completion)])[0]

    def reward_all(self, pairs: Sequence[Pair], progress: Progress = Progress()) -> list[Reward]:  # noqa: B008 - frozen
        """Return the rewards of completions in their order, group by group."""
        if not pairs:
            return []
        state = state_of(progress, getattr(self._grading_task, "question_count", None), self._metrics_file)
        seen = [(prompt, as_seen(self.task, prompt, completion)) for prompt, completion in pairs]
        if not self._terms:
            return [Reward(**{"value": math.nan, **answer}) for answer in self._compute_task_rewards(seen, state)]
        with ThreadPoolExecutor(len(self._graders) or 1, "grader") as beside:
            waiting = {term: beside.submit(grader.grade, seen) for term, grader in self._graders.items()}
            try:
                parts = self._compute_term_parts(seen, state)
                parts |= {term: future.result() for term, future in waiting.items()}
            except BaseException:  # such as Ctrl-C: nobody will read what graders are still to say
                for grader in self._graders.values():
                    grader.stop()
                raise
        columns = [parts[term] for term in sorted(parts)]
        return [checked(self._grading_task.total(of_one)) for of_one in zip(*columns, strict=True)]

    @property
    def is_batch_graded(self) -> bool:
        """Whether completions are graded together, as what compares them needs it."""
        return grades_together(self._grading_task) or any(in_batches(term.name) for term in self._terms)

    def with_split(self, split: str) -> Graded:
        """Return the same task on another split. Both share the processes: rewards do not depend on the split."""
        twin = copy.copy(self)
        twin.task, twin.split = with_split(self.task, split), split
        return twin

    def close(self) -> None:
        """End the processes."""
        self._executor.close()

    def _compute_task_rewards(self, pairs: Sequence[Pair], state: TrainerState) -> list[Answer]:
        """Return the fields of the rewards that the task gives by itself."""
        if grades_together(self._grading_task):
            return self._executor.compute([Call((OWN,), pairs, state, (self._cfg.step_timeout,))])[0][OWN]
        calls = [Call((OWN,), [pair], state, (self._cfg.timeout,), is_batch=False) for pair in pairs]
        return [answers[OWN][0] for answers in self._executor.compute(calls)]

    def _compute_term_parts(self, pairs: Sequence[Pair], state: TrainerState) -> dict[int, list[Part]]:
        """Return the parts of all terms but those of graders: each completion's own, and what functions say of all."""
        terms = self._terms
        here = [i for i in range(len(terms)) if i not in self._graders]
        each = tuple(i for i in here if not in_batches(terms[i].name))
        batch = tuple(i for i in here if in_batches(terms[i].name))
        limits = tuple(terms[i].timeout or self._cfg.step_timeout for i in batch)
        alone = [Call(each, [pair], state, (self._cfg.timeout,) * len(each), is_batch=False) for pair in pairs]
        calls = [*(alone if each else []), *([Call(batch, pairs, state, limits)] if batch else [])]
        answers = self._executor.compute(calls)
        found = {i: [Part(**answer[i][0]) for answer in answers[: len(pairs)]] for i in each}
        return found | {i: [Part(**answer) for answer in answers[-1][i]] for i in batch}

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the task: its name and settings, solution, observe."""
        if name == "task" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.task, name)


class Here:
    """Computes calls in this process."""

    def __init__(self, task: Any, log: Path | None) -> None:
        self._task, self._log, self._logged_errors = task, log, set[str]()

    def compute(self, calls: Sequence[Call]) -> list[dict[int, list[Answer]]]:
        """Return for each call the answers of its terms, one for each of its pairs."""
        endless = [call._replace(limits=(None,) * len(call.terms)) for call in calls]
        events = [list(run(self._task, call, self._log_error)) for call in endless]
        return [{e.term: e.answers for e in of_call if isinstance(e, Answered)} for of_call in events]

    def close(self) -> None:
        """Nothing is to be ended."""

    def _log_error(self, description: str, error: BaseException) -> None:
        """Write the traceback of an error to the log, the first time that it occurs."""
        if self._log and description not in self._logged_errors and len(self._logged_errors) < worker.TOLD:
            self._logged_errors.add(description)
            with self._log.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)


def grading(task: Any) -> Any:
    """Return the task that grades: a wrapper with a method `seen` leaves that to the task inside."""
    return grading(task.task) if has_inside(task) else task


def as_seen(task: Any, prompt: Prompt, completion: Completion) -> Completion:
    """Return a completion as the task that grades sees it, without what only the algorithm needs and is large."""
    if has_inside(task):
        return as_seen(task.task, prompt, task.transform_completion(prompt, completion))
    return replace(completion, sampling_mask=())


def has_inside(task: Any) -> bool:
    return callable(getattr(type(task), "transform_completion", None)) and hasattr(task, "task")


def checked(reward: Reward) -> Reward:
    """Return a reward whose value is finite, or that has failed."""
    try:
        return Reward(**of_reward(reward))
    except NoRewardError as error:
        return replace(reward, value=math.nan, error=str(error))
