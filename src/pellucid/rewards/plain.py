"""What rewards return or raise, as plain data: numbers, texts and one line for each error."""

from __future__ import annotations

import json
import math
import reprlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from sysconfig import get_paths
from typing import Any

from pellucid.rewards.parts import Part
from pellucid.types import Reward

LARGEST = 3.4028234663852886e38
"""The largest reward, that of float32: sums and squares of such numbers stay finite in float64."""
LONGEST_ERROR = 300
"""The most characters of an error."""
LONGEST_EXTRA = 2_000
"""The most characters of a value that a reward logs beside a completion."""
DEEPEST_EXTRA = 50
"""How deep lists and objects in such a value may be nested; what reads rollouts.jsonl has its limits, too."""
MOST_EXTRAS = 500
"""The most columns that a reward logs, and the most metrics."""
OURS = str(Path(__file__).parents[1])
NOT_THEIRS = (OURS, "<frozen", *(get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
"""What the path of a file begins with that is not the user's own."""


class NoRewardError(Exception):
    """A task or a function returned something that is no valid reward; the message is one line."""


def one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST_ERROR]


def described(error: BaseException) -> str:
    """Describe an error in one line, with the user's line that raised it or led to it, even if its `__str__` raises."""
    if isinstance(error, NoRewardError):
        return str(error)
    told = traceback.TracebackException.from_exception(error)
    others = [frame for frame in told.stack if not frame.filename.startswith(OURS)]
    theirs = [frame for frame in others if not frame.filename.startswith(NOT_THEIRS)] or others
    where = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {one_line(str(told))}{where}"


def of_reward(reward: Any) -> dict[str, Any]:
    """Return the fields of a reward as plain Python numbers, strings and booleans. NoRewardError for an invalid one."""
    if not isinstance(reward, Reward):
        raise NoRewardError(f"the task returned a {type(reward).__name__}, where a Reward is needed")
    error = reward.error if reward.error is not None else ""
    if not isinstance(error, str):
        raise NoRewardError(f"the error is {shown(error)}, where a text is needed")
    try:
        fields = {
            "value": number(reward.value, "the reward"),
            "parts": numbers(reward.parts, "part"),
            "weights": numbers(reward.weights, "weight"),
            "correct": None if reward.correct is None else truth(reward.correct),
            "applies": bool(reward.applies),
            "is_decided": bool(reward.is_decided),
            "is_continuous": bool(reward.is_continuous),
            "failures": {str(name): one_line(str(error)) for name, error in reward.failures.items()},
            "extra": extras(reward.extra),
            "logged": numbers(reward.logged, "metric"),
        }
    except NoRewardError as fault:
        raise NoRewardError(one_line(error) or str(fault)) from fault
    if not error and not math.isfinite(fields["value"]):
        error = f"the reward is {fields['value']}" + (f", of parts {fields['parts']}" if fields["parts"] else "")
    for name, weight in fields["weights"].items():
        if not math.isfinite(weight):
            error = error or f'the weight "{name}" is {weight}'
    return {**fields, "value": math.nan if error else fields["value"], "error": one_line(error)}


def of_part(part: Part) -> dict[str, Any]:
    """Return the fields of a part as plain data. NoRewardError for a value that is no finite number."""
    value = None if part.value is None else number(part.value, "the reward")
    if value is not None and not math.isfinite(value):
        raise NoRewardError(f"the reward is {value}")
    return {
        "value": value,
        "error": one_line(part.error),
        "extra": extras(part.extra),
        "logged": numbers(part.logged, "metric"),
    }


def number(value: Any, what: str, needed: str = "a number") -> float:
    """Return a number, or a scalar of numpy or torch, as a float; NaN and infinities pass. NoRewardError for others."""
    numeric = any(hasattr(type(value), name) for name in ("__float__", "__index__"))
    if not numeric or getattr(value, "ndim", 0):
        raise NoRewardError(f"{what} is {shown(value)}, where {needed} is needed")
    try:
        result = float(value)
    except OverflowError:
        result = 2 * LARGEST
    if math.isfinite(result) and abs(result) > LARGEST:
        raise NoRewardError(f"{what} is beyond {LARGEST:.1e}, the largest number that float32 holds")
    return result


def numbers(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise NoRewardError(f"the {what}s are {shown(values)}, where names with their numbers are needed")
    if len(values) > MOST_EXTRAS:
        raise NoRewardError(f"there are {len(values)} {what}s; {MOST_EXTRAS} are the most")
    return {str(name): number(value, f'the {what} "{name}"') for name, value in values.items()}


def truth(value: Any) -> bool:
    needed = "True, False or None"
    result = number(value, "correct", needed)
    if result not in (0.0, 1.0):
        raise NoRewardError(f"correct is {shown(value)}, where {needed} is needed")
    return bool(result)


def extras(columns: Any) -> dict[str, Any]:
    if not isinstance(columns, Mapping) or len(columns) > MOST_EXTRAS:
        raise NoRewardError(f"extra is {shown(columns)}, where up to {MOST_EXTRAS} columns by name are needed")
    return {str(name): jsonable(value) for name, value in columns.items()}


def jsonable(value: Any) -> Any:
    """Return a value as JSON has it, or its `repr` where that is none, or is too long or nested too deeply."""
    try:
        value = value.item() if hasattr(value, "item") else value
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = value = shown(value)
    if is_deep(value):
        text = value = shown(value)
    return value if len(text) <= LONGEST_EXTRA else f"{str(value)[:LONGEST_EXTRA]}…"


def is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than DEEPEST_EXTRA deep."""
    level = [value]
    for _ in range(DEEPEST_EXTRA + 1):
        inside = [item for item in level if isinstance(item, Mapping | list | tuple)]
        level = [item for each in inside for item in (each.values() if isinstance(each, Mapping) else each)]
    return bool(level)


def shown(value: Any) -> str:
    try:
        return one_line(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__}"
