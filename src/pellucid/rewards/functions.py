"""Reward functions of the user's own, called as TRL calls them: once, with all completions of a step.

A function has TRL's signature and needs no change: `def reward(completions, **kwargs)`, plain or `async`, returns one
number for each completion, or None where it does not apply. Its keywords are lists with an item for each completion:
prompts, completions, completion_ids, and every column of the data rows except prompt, completion and completion_ids.
Of conversations with environments `environments` are these, as they were left.
As in TRL, prompts and completions are strings for plain prompts, and lists of messages for conversations.
`trainer_state` is a TrainerState; `log_extra(column, values)` adds a column to rollouts.jsonl, `log_metric(name,
value)` a metric. (TRL 1.16, GRPOTrainer._calculate_rewards.)
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from pellucid.machine.copies import end_copy
from pellucid.machine.plugins import function_of, load_object
from pellucid.rewards.parts import Pair, Part
from pellucid.rewards.plain import NoRewardError, number, shown
from pellucid.rewards.trainer_state import TrainerState
from pellucid.types import Completion, Prompt

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
GIVEN_TOO = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What a function is given besides prompts, completions and columns."""


class Log:
    """What a call of a function logs, about n completions."""

    def __init__(self, completion_count: int) -> None:
        self.completion_count = completion_count
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add values to a column, which has one for each completion in the end."""
        self.columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to a metric, which is the mean of what was added. NoRewardError for what is no finite number."""
        found = number(value, f'the metric "{name}"')
        if not math.isfinite(found):
            raise NoRewardError(f'the metric "{name}" is {found}')
        self.metrics.setdefault(str(name), []).append(found)

    def build_parts(self, name: str, rewards: Iterable[Any]) -> list[Part]:
        """Return the parts of a function's rewards with what it logged. NoRewardError for a wrong number of them."""
        if not isinstance(rewards, Iterable):
            raise NoRewardError(f"{name} returned {shown(rewards)}, where a list with a number for each is needed")
        values = [scalar(reward) for reward in rewards]
        if len(values) != self.completion_count:
            raise NoRewardError(
                f"{name} returned {len(values)} rewards for {self.completion_count} completions: it must return one for each"
            )
        for column, given in self.columns.items():
            if len(given) != self.completion_count:
                raise NoRewardError(
                    f'log_extra("{column}") has {len(given)} values for {self.completion_count} completions'
                )
        logged = {metric: sum(added) / len(added) for metric, added in self.metrics.items()}
        rows = [{column: given[i] for column, given in self.columns.items()} for i in range(self.completion_count)]
        return [Part(value, extra=row, logged=logged) for value, row in zip(values, rows, strict=True)]


def is_async(spec: str) -> bool:
    """Return whether the function that `spec` names is asynchronous."""
    function = function_of(spec, "reward")
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - of an object


def parts_of(spec: str, pairs: Sequence[Pair], state: TrainerState) -> list[Part]:
    """Return what a function says of each completion. Raises what it raises; NoRewardError for what is no answer."""
    log = Log(len(pairs))
    output = bound(spec, pairs, state, log)()
    return log.build_parts(named(spec), result_of(output) if inspect.iscoroutine(output) else output)


async def awaited_parts_of(spec: str, pairs: Sequence[Pair], state: TrainerState) -> list[Part]:
    """Return the same of an asynchronous function."""
    log = Log(len(pairs))
    return log.build_parts(named(spec), await own(bound(spec, pairs, state, log)()))


def bound(spec: str, pairs: Sequence[Pair], state: TrainerState, log: Log) -> Callable[[], Any]:
    """Return the function with its arguments. NoRewardError where it does not take them."""
    function = function_of(spec, "reward")
    arguments = columns_of(pairs) | texts_of(pairs)
    arguments |= {"completion_ids": [list(completion.token_ids) for _, completion in pairs]}
    if any(completion.outcome and completion.outcome.environment for _, completion in pairs):
        arguments["environments"] = [environment_of(completion) for _, completion in pairs]
    arguments |= {"trainer_state": state, "log_extra": log.log_extra, "log_metric": log.log_metric}
    check_signature(spec, list(arguments))
    return lambda: function(**arguments)


def check_signature(spec: str, names: Sequence[str]) -> None:
    """Raise NoRewardError where a function does not take arguments of these names."""
    try:
        inspect.signature(function_of(spec, "reward"), follow_wrapped=False).bind(**dict.fromkeys(names))
    except TypeError as error:
        given = ", ".join(names)
        raise NoRewardError(f"{named(spec)} {error}: end its arguments with **kwargs; it is given {given}") from error
    except ValueError:  # one of those written in C, which have no signature
        pass


def arguments_for(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of the arguments that a function is given with completions of these prompts."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in NOT_COLUMNS)
    return [*(name for name in columns if isinstance(name, str)), "prompts", "completions", *GIVEN_TOO]


def scalar(reward: Any) -> Any:
    """Return the number in a tensor of one element, which TRL takes; anything else as it is."""
    return reward.item() if hasattr(reward, "numel") and reward.numel() == 1 else reward


def named(spec: str) -> str:
    return spec.rpartition(":")[2]


def columns_of(pairs: Sequence[Pair]) -> dict[str, list[Any]]:
    """Return each column with a value for each completion; None where a row lacks it."""
    names = {name: None for prompt, _ in pairs for name in prompt.columns if name not in NOT_COLUMNS}
    return {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in names if isinstance(name, str)}


def texts_of(pairs: Sequence[Pair]) -> dict[str, list[Any]]:
    return {
        "prompts": [prompt_of(prompt) for prompt, _ in pairs],
        "completions": [answer_of(prompt, completion) for prompt, completion in pairs],
    }


def prompt_of(prompt: Prompt) -> str | list[dict[str, str]]:
    return prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]


def answer_of(prompt: Prompt, completion: Completion) -> str | list[dict[str, str]]:
    if isinstance(prompt.text, str):
        return completion.text
    return [dict(message) for message in completion.messages] or [{"role": "assistant", "content": completion.text}]


def environment_of(completion: Completion) -> Any:
    """Return the environment of a conversation as it was left; None where there was none, or its process was lost."""
    if not completion.outcome or not completion.outcome.environment:
        return None
    spec, inner = pickle.loads(completion.outcome.environment)
    load_object(spec)  # its module, by which it is found
    kind, attributes = pickle.loads(inner)
    environment = object.__new__(kind)
    vars(environment).update({name: pickle.loads(value) for name, value in attributes.items()})
    return environment


@cache
def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's rewards: one for all steps, since what they open in it lives on."""
    created = asyncio.new_event_loop()
    threading.Thread(target=run_on, args=(created,), name="rewards", daemon=True).start()
    return created


def run_on(event_loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop for ever. SystemExit of a task comes out of it, and ends that task alone."""
    owner = os.getpid()
    while True:
        try:
            event_loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            end_copy(owner, error)


async def own(awaitable: Awaitable[Any]) -> Any:
    """Await something of the user's code. A copy of this process that it has forked ends with it."""
    owner = os.getpid()
    try:
        result = await awaitable
    except BaseException as error:
        end_copy(owner, error)
        raise
    end_copy(owner)
    return result


def result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    running = on_loop(own(coroutine))
    try:
        return running.result()
    finally:
        running.cancel()  # an interrupt has left it


def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(coroutine, loop())
