"""Tasks around tasks: a wrapper is a dataclass with a field `task: Any`, and its section holds that of the task inside.

[task]
name = "prefixed"
[task.task]
name = "gsm8k"
"""

from __future__ import annotations

import dataclasses
from typing import Any


def wraps(task: Any) -> bool:
    """Whether a task, or its class, wraps another. A field `task` that is a name is a setting like any other."""
    if not dataclasses.is_dataclass(task):
        return False
    kinds = [field.type for field in dataclasses.fields(task) if field.name == "task"]
    return bool(kinds) and (kinds[0] in ("Any", Any) or dataclasses.is_dataclass(kinds[0]))


def layers(task: Any) -> list[Any]:
    """The task and those that it wraps, from the outside in."""
    return [task, *layers(task.task)] if wraps(task) else [task]


def innermost(task: Any) -> Any:
    """The innermost task, which writes the questions."""
    return layers(task)[-1]


def seeded(task: Any, seed: int) -> Any:
    """The task with this seed, where the innermost has none of its own."""
    if wraps(task):
        return dataclasses.replace(task, task=seeded(task.task, seed))
    return dataclasses.replace(task, seed=task.seed or seed)


def with_split(task: Any, split: str) -> Any:
    """The task on another split: by its own `with_split` where it has one, otherwise as a dataclass with that field."""
    return task.with_split(split) if hasattr(task, "with_split") else dataclasses.replace(task, split=split)
