"""A task whose rewards are computed in worker processes, all those of a step at once."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pellucid.rewards.functions import TrainerState, build_trainer_state
from pellucid.rewards.judge import Judge
from pellucid.rewards.parts import TASK_REWARD, Answer, ModelGrader, PromptCompletion, validate_reward
from pellucid.rewards.pool import RewardPool
from pellucid.rewards.settings import RewardConfig, RewardModelSettings
from pellucid.rewards.terms import REWARD_MODEL_PREFIX, get_reward_terms, is_batch_term
from pellucid.rewards.worker import RewardCall, merge_answers, run_call
from pellucid.sandbox.values import InvalidResultError
from pellucid.sandbox.worker import ErrorLog
from pellucid.types import Completion, Progress, Prompt, Reward, Task, has_batch_rewards, with_split
from pellucid.utils.endpoint import describe_destination


class GradedTask:
    """A task whose rewards are computed in worker processes, or with `in_process` in this one, without time limits.

    A reward that raises, takes longer than `cfg.timeout` seconds, ends its process or is no finite number becomes
    Reward(nan, error="what happened"). If functions are terms of the reward, or the task has a method
    `rewards(prompts, completions)`, they are called once for all completions of a step, within `cfg.step_timeout`
    seconds; if one raises, once for each group. Meanwhile judges and reward models (`graders`, by the indices of their
    terms in `task.rewards`) run in threads of this process. Worker processes append to the file `log` what rewards
    print, and a traceback for each kind of error.

    Example: task = GradedTask(Dataset(data="train.jsonl"), RewardConfig(timeout=5.0)); test = task.with_split("test")
    """

    def __init__(
        self,
        task: Task,
        cfg: RewardConfig | None = None,
        log: Path | None = None,
        graders: Mapping[int, ModelGrader] | None = None,
        in_process: bool = False,
    ) -> None:
        self.task, self.seed, self.split = task, task.seed, task.split
        self._cfg, self._graders = cfg or RewardConfig(), graders or {}
        self._metrics_file = str(log.with_name("metrics.jsonl")) if log else ""
        self._grading_task = get_grading_task(task)
        self._terms = get_reward_terms(self._grading_task)
        self._single_limits, self._batch_limits = self._get_time_limits()
        self._executor = (
            InProcessExecutor(self._grading_task, log) if in_process else RewardPool(self._grading_task, self._cfg, log)
        )

    def sample(self, step: int, n: int) -> Sequence[Prompt]:
        return self.task.sample(step, n)

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return self.reward_all([(prompt, completion)])[0]

    def reward_all(self, pairs: Sequence[PromptCompletion], progress: Progress = Progress()) -> list[Reward]:  # noqa: B008 - frozen
        """Return the rewards of completions in their order, group by group."""
        if not pairs:
            return []
        state = build_trainer_state(progress, getattr(self._grading_task, "question_count", None), self._metrics_file)
        pairs = [(prompt, _transform_completion(self.task, prompt, completion)) for prompt, completion in pairs]
        with ThreadPoolExecutor(len(self._graders) or 1, "grader") as executor:
            waiting = {term: executor.submit(grader.grade, pairs) for term, grader in self._graders.items()}
            try:
                answers = self._compute_answers(pairs, state)
                answers |= {term: future.result() for term, future in waiting.items()}
            except BaseException:  # such as Ctrl-C: nobody will read the answers of graders
                for grader in self._graders.values():
                    grader.stop()
                raise
        if not self._terms:
            return answers[TASK_REWARD]
        columns = [answers[term] for term in sorted(answers)]
        return [_check_reward(self._grading_task.combine_parts(parts)) for parts in zip(*columns, strict=True)]

    @property
    def is_batch_graded(self) -> bool:
        """Whether completions are graded together, since a term may compare them."""
        return has_batch_rewards(self._grading_task) or any(is_batch_term(term.name) for term in self._terms)

    def with_split(self, split: str) -> GradedTask:
        """Return the same task on another split. Both share the processes: rewards do not depend on the split."""
        copied = copy.copy(self)
        copied.task, copied.split = with_split(self.task, split), split
        return copied

    def close(self) -> None:
        """End the processes."""
        self._executor.close()

    def _get_time_limits(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return the limits of terms that grade one completion at a time, and of those that grade all at once."""
        single, batch = self._cfg.timeout, self._cfg.step_timeout
        if not self._terms:
            return ({}, {TASK_REWARD: batch}) if has_batch_rewards(self._grading_task) else ({TASK_REWARD: single}, {})
        terms = {i: term for i, term in enumerate(self._terms) if i not in self._graders}
        return (
            {i: single for i, term in terms.items() if not is_batch_term(term.name)},
            {i: term.timeout or batch for i, term in terms.items() if is_batch_term(term.name)},
        )

    def _compute_answers(self, pairs: Sequence[PromptCompletion], state: TrainerState) -> dict[int, list[Any]]:
        """Return the answers of all terms without a grader, one for each completion."""
        single, batch = self._single_limits, self._batch_limits
        calls = [RewardCall(single, {i: pair}, state, is_batch=False) for i, pair in enumerate(pairs) if single]
        calls += [RewardCall(batch, dict(enumerate(pairs)), state)] if batch else []
        answers = self._executor.compute(calls)
        return {term: [by_index[i] for i in range(len(pairs))] for term, by_index in answers.items()}

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the task: its name and settings, solution, observe."""
        if name == "task" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.task, name)


class InProcessExecutor:
    """Computes calls in this process, in place of a RewardPool."""

    def __init__(self, task: Any, log: Path | None) -> None:
        self._task, self._log_error = task, ErrorLog(log or os.devnull)

    def compute(self, calls: Sequence[RewardCall]) -> dict[int, dict[int, Answer]]:
        """Return the answers of each term of the calls, by the numbers of the completions."""
        unlimited = (call._replace(limits=dict.fromkeys(call.limits, math.inf)) for call in calls)
        return merge_answers(event for call in unlimited for event in run_call(self._task, call, self._log_error))

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def get_grading_task(task: Any) -> Any:
    """Return the task that grades: a wrapper with `transform_completion` leaves that to the task inside."""
    return get_grading_task(task.task) if is_wrapper(task) else task


def _transform_completion(task: Any, prompt: Prompt, completion: Completion) -> Completion:
    """Return a completion as the task that grades sees it, without the large fields that only the algorithm needs."""
    if is_wrapper(task):
        return _transform_completion(task.task, prompt, task.transform_completion(prompt, completion))
    return replace(completion, sampling_mask=())


def is_wrapper(task: Any) -> bool:
    return callable(getattr(type(task), "transform_completion", None)) and hasattr(task, "task")


def _check_reward(reward: Reward) -> Reward:
    try:
        return validate_reward(reward)
    except InvalidResultError as error:
        return replace(reward, value=math.nan, error=str(error))


# ---------------------------------------------------------------- judges and reward models, which work in this process


def load_graders(task: Any, cache_folder: Path | None = None) -> dict[int, ModelGrader]:
    """Return the judges and reward models of a task by their indices in its `rewards`; models are loaded.

    Without a `cache_folder` judges store no answers. Raises UserError for a judge that cannot be reached, or a model
    that cannot be loaded.
    """
    judged = {i: term.judge for i, term in enumerate(get_reward_terms(get_grading_task(task))) if term.judge}
    graders: dict[int, ModelGrader] = {i: Judge(settings, cache_folder) for i, settings in judged.items()}
    if models := find_reward_models(task):
        from pellucid.rewards.reward_model import RewardModel  # noqa: PLC0415 - it imports torch and transformers

        graders |= {i: RewardModel(source, settings) for i, (source, settings) in models.items()}
    return graders


def collect_grader_notices(task: Any) -> list[str]:
    """Return the lines that must be shown before the graders of a task are loaded: whose code runs, what is sent."""
    codes = [settings.get_trust_notice(source) for source, settings in find_reward_models(task).values()]
    judges = [term.judge for term in get_reward_terms(get_grading_task(task)) if term.judge]
    sent = [describe_destination(judge.base_url, judge.key, "judge: prompts and completions") for judge in judges]
    return list(dict.fromkeys(filter(None, [*codes, *sent])))


def find_reward_models(task: Any) -> dict[int, tuple[str, RewardModelSettings]]:
    """Return name and settings of each reward model of a task, by its index in `rewards`."""
    return {
        i: (term.name.removeprefix(REWARD_MODEL_PREFIX), term.reward_model or RewardModelSettings())
        for i, term in enumerate(get_reward_terms(get_grading_task(task)))
        if term.name.startswith(REWARD_MODEL_PREFIX)
    }
