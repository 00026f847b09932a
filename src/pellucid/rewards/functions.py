"""Reward functions of the user's own, called as TRL calls them: once, with all completions of a step.

A function has TRL's signature and needs no change: `def reward(completions, **kwargs)`, plain or `async`, returns one
number for each completion, or None where it does not apply. Its keywords are lists with an item for each completion:
prompts, completions, completion_ids, and every column of the data rows except prompt, completion and completion_ids.
With environments, `environments` holds them as their conversations left them. As in TRL, prompts and completions are
strings for plain prompts, and lists of messages for conversations. `trainer_state` is a TrainerState;
`log_extra(column, values)` adds a column to rollouts.jsonl, `log_metric(name, value)` a metric.
(TRL 1.16, GRPOTrainer._calculate_rewards.)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pellucid.rewards.parts import PromptCompletion, RewardPart
from pellucid.sandbox.values import InvalidResultError, describe_value, validate_number
from pellucid.sandbox.worker import exit_forked_copies
from pellucid.types import Completion, Progress, Prompt
from pellucid.utils.plugins import load_function, load_object

_RESERVED_COLUMNS = ("prompt", "completion", "completion_ids")
_EXTRA_ARGUMENTS = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What a function is given besides prompts, completions and columns."""


class FunctionLog:
    """What one call of a function logs about its completions."""

    def __init__(self, completion_count: int) -> None:
        self.completion_count = completion_count
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add values to a column, which needs one for each completion in the end."""
        self.columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to a metric, whose value is the mean. Raises InvalidResultError if it is not finite."""
        found = validate_number(value, f'the metric "{name}"')
        if not math.isfinite(found):
            raise InvalidResultError(f'the metric "{name}" is {found}')
        self.metrics.setdefault(str(name), []).append(found)

    def build_parts(self, name: str, rewards: Iterable[Any]) -> list[RewardPart]:
        """Return the rewards of a function with what it logged. Raises InvalidResultError if their number is wrong."""
        if not isinstance(rewards, Iterable):
            raise InvalidResultError(
                f"{name} returned {describe_value(rewards)}, where a list with a number for each completion is needed"
            )
        values = [_unwrap_scalar(reward) for reward in rewards]
        if len(values) != self.completion_count:
            raise InvalidResultError(
                f"{name} returned {len(values)} rewards for {self.completion_count} completions:"
                " it must return one for each"
            )
        for column, entries in self.columns.items():
            if len(entries) != self.completion_count:
                raise InvalidResultError(
                    f'log_extra("{column}") has {len(entries)} values for {self.completion_count} completions'
                )
        logged = {metric: sum(numbers) / len(numbers) for metric, numbers in self.metrics.items()}
        rows = [{column: entries[i] for column, entries in self.columns.items()} for i in range(self.completion_count)]
        return [RewardPart(value, extra=row, logged=logged) for value, row in zip(values, rows, strict=True)]


def is_async_function(spec: str) -> bool:
    """Return whether the function that `spec` names is asynchronous."""
    function = load_function(spec, "reward")
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - of an object


def call_function(spec: str, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[RewardPart]:
    """Return the rewards of a function, "path/to/file.py:name", for each completion; siblings are next to each other.

    Raises InvalidResultError if the function rejects its arguments or does not return a list of the right length.
    Errors of the function pass through.
    """
    log = FunctionLog(len(pairs))
    output = load_function(spec, "reward")(**_build_arguments(spec, pairs, state, log))
    if inspect.iscoroutine(output):
        running = submit_coroutine(_await_user_code(output))
        try:
            output = running.result()
        finally:
            running.cancel()  # if an interrupt came
    return log.build_parts(get_function_name(spec), output)


async def call_async_function(spec: str, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[RewardPart]:
    """Return the rewards of an asynchronous function, as `call_function` does."""
    log = FunctionLog(len(pairs))
    awaitable = load_function(spec, "reward")(**_build_arguments(spec, pairs, state, log))
    return log.build_parts(get_function_name(spec), await _await_user_code(awaitable))


def _build_arguments(
    spec: str, pairs: Sequence[PromptCompletion], state: TrainerState, log: FunctionLog
) -> dict[str, Any]:
    """Return the arguments of a function. Raises InvalidResultError if it does not take them."""
    names = {name: None for prompt, _ in pairs for name in prompt.columns if name not in _RESERVED_COLUMNS}
    # A row may lack a column.
    arguments = {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in names if isinstance(name, str)}
    arguments["prompts"] = [
        prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
        for prompt, _ in pairs
    ]
    arguments["completions"] = [_format_trl_completion(*pair) for pair in pairs]
    arguments["completion_ids"] = [list(completion.token_ids) for _, completion in pairs]
    if any(completion.outcome and completion.outcome.environment for _, completion in pairs):
        arguments["environments"] = [unpickle_environment(completion) for _, completion in pairs]
    extra = {"trainer_state": state, "log_extra": log.log_extra, "log_metric": log.log_metric}
    check_signature(spec, [*arguments, *extra])
    return arguments | extra


def check_signature(spec: str, names: Sequence[str]) -> None:
    """Raise InvalidResultError if a function does not take arguments of these names."""
    try:
        inspect.signature(load_function(spec, "reward"), follow_wrapped=False).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise InvalidResultError(
            f"{get_function_name(spec)} {error}: accept **kwargs as well; it is called with {', '.join(names)}"
        ) from error
    except ValueError:  # a function written in C has no signature
        pass


def list_argument_names(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of the arguments that a function is given with completions of these prompts."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in _RESERVED_COLUMNS)
    return [*(name for name in columns if isinstance(name, str)), "prompts", "completions", *_EXTRA_ARGUMENTS]


def _unwrap_scalar(reward: Any) -> Any:
    """Return the number in a one-element tensor, which TRL accepts, and other values unchanged."""
    return reward.item() if hasattr(reward, "numel") and reward.numel() == 1 else reward


def get_function_name(spec: str) -> str:
    return spec.rpartition(":")[2]


def _format_trl_completion(prompt: Prompt, completion: Completion) -> str | list[dict[str, str]]:
    if isinstance(prompt.text, str):
        return completion.text
    return [dict(message) for message in completion.messages] or [{"role": "assistant", "content": completion.text}]


def unpickle_environment(completion: Completion) -> Any:
    """Return the environment as a conversation left it; None if there was none, or its process was lost."""
    if not completion.outcome or not completion.outcome.environment:
        return None
    spec, inner = pickle.loads(completion.outcome.environment)
    load_object(spec)  # imports the module of its class
    kind, attributes = pickle.loads(inner)
    environment = object.__new__(kind)
    vars(environment).update({name: pickle.loads(value) for name, value in attributes.items()})
    return environment


@cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's rewards. All steps share it, so that connections stay open in it."""
    event_loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # the SystemExit of a task stops the loop, but must end that task alone
            with suppress(SystemExit, KeyboardInterrupt), exit_forked_copies():
                event_loop.run_forever()

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return event_loop


async def _await_user_code(awaitable: Awaitable[Any]) -> Any:
    """Await the user's code. If it forks this process, the copy ends when the code returns."""
    with exit_forked_copies():
        return await awaitable


def submit_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(coroutine, _get_event_loop())


# ---------------------------------------------------------------- trainer_state of a reward function


_TRL_METRIC_NAMES = (("reward", "reward/mean"), ("reward_std", "reward/std"), ("learning_rate", "lr"))
"""The names of metrics in TRL's log, and ours."""


@dataclass(frozen=True)
class TrainerState:
    """The progress of a run, in attributes named as in transformers' TrainerState, which has more of them."""

    global_step: int
    """The number of finished steps."""
    max_steps: int
    """The number of all steps."""
    epoch: float
    """How often all questions were asked; for a task that makes up its own, the share of the run that is done."""
    num_train_epochs: int
    """`epoch` at the end of the run, rounded up."""
    metrics_file: str = ""
    """The file metrics.jsonl of the run, if there is one."""

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The metrics of the finished steps, each with its `step`, and TRL's names beside ours."""
        try:
            lines = Path(self.metrics_file).read_text(encoding="utf-8").splitlines() if self.metrics_file else []
        except OSError:
            return []
        records: list[dict[str, Any]] = []
        for line in filter(str.strip, lines):
            with suppress(ValueError):  # cut by a crash
                record = json.loads(line)
                records.append(record | {theirs: record[ours] for theirs, ours in _TRL_METRIC_NAMES if ours in record})
        return records

    @property
    def is_world_process_zero(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    @property
    def is_local_process_zero(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"


def build_trainer_state(progress: Progress, question_count: int | None, metrics_file: str = "") -> TrainerState:
    """Return the state of a run. `question_count` is None for a task that makes up its questions."""
    per_step, total = (progress.prompts_per_step, question_count) if question_count else (1, progress.max_steps)
    epoch, last = (steps * per_step / total for steps in (progress.global_step, progress.max_steps))
    return TrainerState(progress.global_step, progress.max_steps, epoch, math.ceil(last), metrics_file)
