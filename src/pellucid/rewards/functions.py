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
import json
import math
import os
import pickle
import reprlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from sysconfig import get_paths
from typing import Any, Protocol

from pellucid.types import Completion, Progress, Prompt, Reward
from pellucid.utils.files import exit_if_forked
from pellucid.utils.plugins import load_function, load_object

RESERVED_COLUMNS = ("prompt", "completion", "completion_ids")
EXTRA_ARGUMENTS = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What a function is given besides prompts, completions and columns."""


class FunctionLog:
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
        found = validate_number(value, f'the metric "{name}"')
        if not math.isfinite(found):
            raise InvalidRewardError(f'the metric "{name}" is {found}')
        self.metrics.setdefault(str(name), []).append(found)

    def build_parts(self, name: str, rewards: Iterable[Any]) -> list[RewardPart]:
        """Return the parts of a function's rewards with what it logged. NoRewardError for a wrong number of them."""
        if not isinstance(rewards, Iterable):
            raise InvalidRewardError(
                f"{name} returned {describe_value(rewards)}, where a list with a number for each is needed"
            )
        values = [unwrap_scalar(reward) for reward in rewards]
        if len(values) != self.completion_count:
            raise InvalidRewardError(
                f"{name} returned {len(values)} rewards for {self.completion_count} completions: it must return one for each"
            )
        for column, given in self.columns.items():
            if len(given) != self.completion_count:
                raise InvalidRewardError(
                    f'log_extra("{column}") has {len(given)} values for {self.completion_count} completions'
                )
        logged = {metric: sum(added) / len(added) for metric, added in self.metrics.items()}
        rows = [{column: given[i] for column, given in self.columns.items()} for i in range(self.completion_count)]
        return [RewardPart(value, extra=row, logged=logged) for value, row in zip(values, rows, strict=True)]


def is_async_function(spec: str) -> bool:
    """Return whether the function that `spec` names is asynchronous."""
    function = load_function(spec, "reward")
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - of an object


def call_function(spec: str, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[RewardPart]:
    """Return what a function says of each completion. Raises what it raises; NoRewardError for what is no answer."""
    log = FunctionLog(len(pairs))
    output = bind_arguments(spec, pairs, state, log)()
    return log.build_parts(get_function_name(spec), run_coroutine(output) if inspect.iscoroutine(output) else output)


async def call_async_function(spec: str, pairs: Sequence[PromptCompletion], state: TrainerState) -> list[RewardPart]:
    """Return the same of an asynchronous function."""
    log = FunctionLog(len(pairs))
    return log.build_parts(get_function_name(spec), await await_user_code(bind_arguments(spec, pairs, state, log)()))


def bind_arguments(
    spec: str, pairs: Sequence[PromptCompletion], state: TrainerState, log: FunctionLog
) -> Callable[[], Any]:
    """Return the function with its arguments. NoRewardError where it does not take them."""
    function = load_function(spec, "reward")
    arguments = collect_columns(pairs) | collect_texts(pairs)
    arguments |= {"completion_ids": [list(completion.token_ids) for _, completion in pairs]}
    if any(completion.outcome and completion.outcome.environment for _, completion in pairs):
        arguments["environments"] = [unpickle_environment(completion) for _, completion in pairs]
    arguments |= {"trainer_state": state, "log_extra": log.log_extra, "log_metric": log.log_metric}
    check_signature(spec, list(arguments))
    return lambda: function(**arguments)


def check_signature(spec: str, names: Sequence[str]) -> None:
    """Raise NoRewardError where a function does not take arguments of these names."""
    try:
        inspect.signature(load_function(spec, "reward"), follow_wrapped=False).bind(**dict.fromkeys(names))
    except TypeError as error:
        given = ", ".join(names)
        raise InvalidRewardError(
            f"{get_function_name(spec)} {error}: end its arguments with **kwargs; it is given {given}"
        ) from error
    except ValueError:  # one of those written in C, which have no signature
        pass


def list_argument_names(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of the arguments that a function is given with completions of these prompts."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in RESERVED_COLUMNS)
    return [*(name for name in columns if isinstance(name, str)), "prompts", "completions", *EXTRA_ARGUMENTS]


def unwrap_scalar(reward: Any) -> Any:
    """Return the number in a tensor of one element, which TRL takes; anything else as it is."""
    return reward.item() if hasattr(reward, "numel") and reward.numel() == 1 else reward


def get_function_name(spec: str) -> str:
    return spec.rpartition(":")[2]


def collect_columns(pairs: Sequence[PromptCompletion]) -> dict[str, list[Any]]:
    """Return each column with a value for each completion; None where a row lacks it."""
    names = {name: None for prompt, _ in pairs for name in prompt.columns if name not in RESERVED_COLUMNS}
    return {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in names if isinstance(name, str)}


def collect_texts(pairs: Sequence[PromptCompletion]) -> dict[str, list[Any]]:
    return {
        "prompts": [format_trl_prompt(prompt) for prompt, _ in pairs],
        "completions": [format_trl_completion(prompt, completion) for prompt, completion in pairs],
    }


def format_trl_prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    return prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]


def format_trl_completion(prompt: Prompt, completion: Completion) -> str | list[dict[str, str]]:
    if isinstance(prompt.text, str):
        return completion.text
    return [dict(message) for message in completion.messages] or [{"role": "assistant", "content": completion.text}]


def unpickle_environment(completion: Completion) -> Any:
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
def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's rewards: one for all steps, since what they open in it lives on."""
    created = asyncio.new_event_loop()
    threading.Thread(target=run_event_loop, args=(created,), name="rewards", daemon=True).start()
    return created


def run_event_loop(event_loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop for ever. SystemExit of a task comes out of it, and ends that task alone."""
    owner = os.getpid()
    while True:
        try:
            event_loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            exit_if_forked(owner, error)


async def await_user_code(awaitable: Awaitable[Any]) -> Any:
    """Await something of the user's code. A copy of this process that it has forked ends with it."""
    owner = os.getpid()
    try:
        result = await awaitable
    except BaseException as error:
        exit_if_forked(owner, error)
        raise
    exit_if_forked(owner)
    return result


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    running = submit_coroutine(await_user_code(coroutine))
    try:
        return running.result()
    finally:
        running.cancel()  # an interrupt has left it


def submit_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(coroutine, get_event_loop())


# ---------------------------------------------------------------- plain
# What rewards return or raise, as plain data: numbers, texts and one line for each error.


MAX_REWARD = 3.4028234663852886e38
"""The largest reward, that of float32: sums and squares of such numbers stay finite in float64."""
MAX_ERROR_CHARACTERS = 300
"""The most characters of an error."""
MAX_EXTRA_CHARACTERS = 2_000
"""The most characters of a value that a reward logs beside a completion."""
MAX_EXTRA_DEPTH = 50
"""How deep lists and objects in such a value may be nested; what reads rollouts.jsonl has its limits, too."""
MAX_EXTRAS = 500
"""The most columns that a reward logs, and the most metrics."""
PACKAGE_FOLDER = str(Path(__file__).parents[1])
LIBRARY_PATH_PREFIXES = (PACKAGE_FOLDER, "<frozen", *(get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
"""What the path of a file begins with that is not the user's own."""


class InvalidRewardError(Exception):
    """A task or a function returned something that is no valid reward; the message is one line."""


def shorten_to_one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the user's line that raised it or led to it, even if its `__str__` raises."""
    if isinstance(error, InvalidRewardError):
        return str(error)
    told = traceback.TracebackException.from_exception(error)
    others = [frame for frame in told.stack if not frame.filename.startswith(PACKAGE_FOLDER)]
    theirs = [frame for frame in others if not frame.filename.startswith(LIBRARY_PATH_PREFIXES)] or others
    where = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {shorten_to_one_line(str(told))}{where}"


def validate_reward(reward: Any) -> dict[str, Any]:
    """Return the fields of a reward as plain Python numbers, strings and booleans. NoRewardError for an invalid one."""
    if not isinstance(reward, Reward):
        raise InvalidRewardError(f"the task returned a {type(reward).__name__}, where a Reward is needed")
    error = reward.error if reward.error is not None else ""
    if not isinstance(error, str):
        raise InvalidRewardError(f"the error is {describe_value(error)}, where a text is needed")
    try:
        fields = {
            "value": validate_number(reward.value, "the reward"),
            "parts": validate_numbers(reward.parts, "part"),
            "weights": validate_numbers(reward.weights, "weight"),
            "correct": None if reward.correct is None else validate_correct(reward.correct),
            "applies": bool(reward.applies),
            "is_decided": bool(reward.is_decided),
            "is_continuous": bool(reward.is_continuous),
            "failures": {str(name): shorten_to_one_line(str(error)) for name, error in reward.failures.items()},
            "extra": validate_extra(reward.extra),
            "logged": validate_numbers(reward.logged, "metric"),
        }
    except InvalidRewardError as fault:
        raise InvalidRewardError(shorten_to_one_line(error) or str(fault)) from fault
    if not error and not math.isfinite(fields["value"]):
        error = f"the reward is {fields['value']}" + (f", of parts {fields['parts']}" if fields["parts"] else "")
    for name, weight in fields["weights"].items():
        if not math.isfinite(weight):
            error = error or f'the weight "{name}" is {weight}'
    return {**fields, "value": math.nan if error else fields["value"], "error": shorten_to_one_line(error)}


def validate_part(part: RewardPart) -> dict[str, Any]:
    """Return the fields of a part as plain data. NoRewardError for a value that is no finite number."""
    value = None if part.value is None else validate_number(part.value, "the reward")
    if value is not None and not math.isfinite(value):
        raise InvalidRewardError(f"the reward is {value}")
    return {
        "value": value,
        "error": shorten_to_one_line(part.error),
        "extra": validate_extra(part.extra),
        "logged": validate_numbers(part.logged, "metric"),
    }


def validate_number(value: Any, what: str, needed: str = "a number") -> float:
    """Return a number, or a scalar of numpy or torch, as a float; NaN and infinities pass. NoRewardError for others."""
    numeric = any(hasattr(type(value), name) for name in ("__float__", "__index__"))
    if not numeric or getattr(value, "ndim", 0):
        raise InvalidRewardError(f"{what} is {describe_value(value)}, where {needed} is needed")
    try:
        result = float(value)
    except OverflowError:
        result = 2 * MAX_REWARD
    if math.isfinite(result) and abs(result) > MAX_REWARD:
        raise InvalidRewardError(f"{what} is beyond {MAX_REWARD:.1e}, the largest number that float32 holds")
    return result


def validate_numbers(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InvalidRewardError(f"the {what}s are {describe_value(values)}, where names with their numbers are needed")
    if len(values) > MAX_EXTRAS:
        raise InvalidRewardError(f"there are {len(values)} {what}s; {MAX_EXTRAS} are the most")
    return {str(name): validate_number(value, f'the {what} "{name}"') for name, value in values.items()}


def validate_correct(value: Any) -> bool:
    needed = "True, False or None"
    result = validate_number(value, "correct", needed)
    if result not in (0.0, 1.0):
        raise InvalidRewardError(f"correct is {describe_value(value)}, where {needed} is needed")
    return bool(result)


def validate_extra(columns: Any) -> dict[str, Any]:
    if not isinstance(columns, Mapping) or len(columns) > MAX_EXTRAS:
        raise InvalidRewardError(
            f"extra is {describe_value(columns)}, where up to {MAX_EXTRAS} columns by name are needed"
        )
    return {str(name): to_json_value(value) for name, value in columns.items()}


def to_json_value(value: Any) -> Any:
    """Return a value as JSON has it, or its `repr` where that is none, or is too long or nested too deeply."""
    try:
        value = value.item() if hasattr(value, "item") else value
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = value = describe_value(value)
    if is_nested_too_deeply(value):
        text = value = describe_value(value)
    return value if len(text) <= MAX_EXTRA_CHARACTERS else f"{str(value)[:MAX_EXTRA_CHARACTERS]}…"


def is_nested_too_deeply(value: Any) -> bool:
    """Return whether lists and objects are nested more than DEEPEST_EXTRA deep."""
    level = [value]
    for _ in range(MAX_EXTRA_DEPTH + 1):
        inside = [item for item in level if isinstance(item, Mapping | list | tuple)]
        level = [item for each in inside for item in (each.values() if isinstance(each, Mapping) else each)]
    return bool(level)


def describe_value(value: Any) -> str:
    try:
        return shorten_to_one_line(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__}"


# ---------------------------------------------------------------- parts
# What one term of a reward says of one completion.


PromptCompletion = tuple[Prompt, Completion]


@dataclass(frozen=True, slots=True)
class RewardPart:
    """The value of one term for one completion, before its weight."""

    value: float | None = None
    """None where the term does not apply to the prompt, or has failed."""
    error: str = ""
    """Why the value could not be computed, in one line; else empty."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of rollouts.jsonl: JSON values by name, about this completion."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers by the names of metrics. A metric of a step is their mean over the completions that have one."""


class ModelGrader(Protocol):
    """Computes one term for many completions at once, in the process of the run: a judge, a reward model.

    What it cannot grade is a Part with an error: it raises for no completion, and ends within its own time limits.
    """

    def grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        """Return one part for each completion, in their order."""
        ...

    def stop(self) -> None:
        """Give up what is under way in another thread, as at Ctrl-C: nobody will read it. `parts` may raise there."""
        ...


# ---------------------------------------------------------------- trainer_state
# What a reward function finds in `trainer_state`, by the names of transformers' TrainerState.


TRL_METRIC_NAMES = {"reward": "reward/mean", "reward_std": "reward/std", "learning_rate": "lr"}
"""Names that TRL's log has, and ours for them."""


@dataclass(frozen=True)
class TrainerState:
    """How far a run is. It has no other attributes of transformers' record: what they hold is not known here."""

    global_step: int
    """The number of finished steps."""
    max_steps: int
    """The number of all steps."""
    epoch: float
    """How often all questions were asked; of a task that makes up its own, the share of the run that is done."""
    num_train_epochs: int
    """The same at the end of the run, rounded up."""
    metrics_file: str = ""
    """The file metrics.jsonl of the run, where there is one."""

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The metrics of the finished steps, each with its `step`, and TRL's names beside ours."""
        lines = []
        with suppress(OSError):
            lines = Path(self.metrics_file).read_text(encoding="utf-8").splitlines() if self.metrics_file else []
        return [add_trl_names(json.loads(line)) for line in lines if line.strip()]

    @property
    def is_world_process_zero(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    @property
    def is_local_process_zero(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"


def build_trainer_state(progress: Progress, question_count: int | None, metrics_file: str = "") -> TrainerState:
    """Return the state of a run whose task has so many questions; None where it makes up new ones."""
    if question_count:
        epochs = [
            steps * progress.prompts_per_step / question_count for steps in (progress.global_step, progress.max_steps)
        ]
    else:
        epochs = [progress.global_step / progress.max_steps, 1.0]
    return TrainerState(progress.global_step, progress.max_steps, epochs[0], math.ceil(epochs[1]), metrics_file)


def add_trl_names(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, **{theirs: record[ours] for theirs, ours in TRL_METRIC_NAMES.items() if ours in record}}
