"""The value of one reward term for one completion, and the validation of user-defined rewards.

The value of a term is a `RewardPart`, and the weighted sum of parts is a `Reward`. Only in the pipe between a worker
process and its parent are they JSON, which can be read without running user code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pellucid.sandbox.values import InvalidResultError, describe_value, shorten_to_one_line, validate_number
from pellucid.types import Completion, Prompt, Reward

_MAX_EXTRA_CHARACTERS = 2_000
"""The most characters of a value that a reward logs beside a completion."""
_MAX_EXTRA_DEPTH = 50
"""How deep lists and objects in such a value may be nested; readers of rollouts.jsonl have limits, too."""
_MAX_EXTRAS = 500
"""The most columns that a reward logs, and the most metrics."""
TASK_REWARD = -1
"""Stands for the reward of a task that has no terms."""
PromptCompletion = tuple[Prompt, Completion]


@dataclass(frozen=True, slots=True)
class RewardPart:
    """The value of one term for one completion, before its weight."""

    value: float | None = None
    """None if the term does not apply to the prompt, or has failed."""
    error: str = ""
    """Why the value could not be computed, in one line; else empty."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of rollouts.jsonl: JSON values by name, about this completion."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers by the names of metrics. A metric of a step is their mean over the completions that have one."""


Answer = RewardPart | Reward
"""The value of a term for a completion, or the reward of a task that has no terms."""


class ModelGrader(Protocol):
    """Computes one term for many completions at once, in the process of the run: a judge, a reward model.

    A completion that it cannot grade gets a RewardPart with an error, not an exception. It keeps its time limits.
    """

    def grade(self, pairs: Sequence[PromptCompletion]) -> list[RewardPart]:
        """Return one part for each completion, in their order."""
        ...

    def stop(self) -> None:
        """Cancel a `grade` in another thread, as at Ctrl-C. Its result is not needed, so it may raise."""
        ...


def make_failure(term: int, error: str) -> Answer:
    """Return the answer of a term that could not be computed, or for `TASK_REWARD` the failed reward."""
    return Reward(math.nan, error=error) if term == TASK_REWARD else RewardPart(error=error)


def validate_answer(answer: Any) -> Answer:
    """Return a part or a reward as plain data; an invalid one becomes the failure of this completion alone."""
    is_part = isinstance(answer, RewardPart)
    try:
        return _validate_part(answer) if is_part else validate_reward(answer)
    except InvalidResultError as error:
        return RewardPart(error=str(error)) if is_part else Reward(math.nan, error=str(error))


def validate_reward(reward: Any) -> Reward:
    """Return a reward whose fields are plain Python numbers, strings and booleans. Raises InvalidResultError."""
    if not isinstance(reward, Reward):
        raise InvalidResultError(f"the task returned a {type(reward).__name__}, where a Reward is needed")
    error = reward.error if reward.error is not None else ""
    if not isinstance(error, str):
        raise InvalidResultError(f"the error is {describe_value(error)}, where a string is needed")
    try:
        valid = Reward(
            validate_number(reward.value, "the reward"),
            _validate_numbers(reward.parts, "part"),
            weights=_validate_numbers(reward.weights, "weight"),
            correct=None if reward.correct is None else _validate_correct(reward.correct),
            applies=bool(reward.applies),
            is_decided=bool(reward.is_decided),
            is_continuous=bool(reward.is_continuous),
            failures={str(name): shorten_to_one_line(str(error)) for name, error in reward.failures.items()},
            extra=_validate_extra(reward.extra),
            logged=_validate_numbers(reward.logged, "metric"),
        )
    except InvalidResultError as fault:
        raise InvalidResultError(shorten_to_one_line(error) or str(fault)) from fault
    if not error and not math.isfinite(valid.value):
        error = f"the reward is {valid.value}" + (f", of parts {valid.parts}" if valid.parts else "")
    for name, weight in valid.weights.items():
        if not math.isfinite(weight):
            error = error or f'the weight "{name}" is {weight}'
    return replace(valid, value=math.nan if error else valid.value, error=shorten_to_one_line(error))


def _validate_part(part: RewardPart) -> RewardPart:
    """Return a part whose fields are plain data. Raises InvalidResultError."""
    value = None if part.value is None else validate_number(part.value, "the reward")
    if value is not None and not math.isfinite(value):
        raise InvalidResultError(f"the reward is {value}")
    return RewardPart(
        value, shorten_to_one_line(part.error), _validate_extra(part.extra), _validate_numbers(part.logged, "metric")
    )


def _validate_numbers(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InvalidResultError(f"the {what}s are {describe_value(values)}, where names with their numbers are needed")
    if len(values) > _MAX_EXTRAS:
        raise InvalidResultError(f"there are {len(values)} {what}s; {_MAX_EXTRAS} are the most")
    return {str(name): validate_number(value, f'the {what} "{name}"') for name, value in values.items()}


def _validate_correct(value: Any) -> bool:
    expected = "True, False or None"
    number = validate_number(value, "correct", expected)
    if number not in (0.0, 1.0):
        raise InvalidResultError(f"correct is {describe_value(value)}, where {expected} is needed")
    return bool(number)


def _validate_extra(columns: Any) -> dict[str, Any]:
    if not isinstance(columns, Mapping) or len(columns) > _MAX_EXTRAS:
        raise InvalidResultError(
            f"extra is {describe_value(columns)}, where up to {_MAX_EXTRAS} columns by name are needed"
        )
    return {str(name): _to_json_value(value) for name, value in columns.items()}


def _to_json_value(value: Any) -> Any:
    """Return a value for JSON: its `repr` if it cannot be written or is nested too deeply; cut if too long."""
    try:
        value = value.item() if hasattr(value, "item") else value
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = value = describe_value(value)
    if _is_nested(value, _MAX_EXTRA_DEPTH):
        text = value = describe_value(value)
    return value if len(text) <= _MAX_EXTRA_CHARACTERS else f"{str(value)[:_MAX_EXTRA_CHARACTERS]}…"


def _is_nested(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `depth`."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    return items is not None and (depth == 0 or any(_is_nested(item, depth - 1) for item in items))
