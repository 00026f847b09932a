"""Tasks that wrap tasks: dataclasses with a field `task: Any`, whose section contains that of the task inside.

[task]
name = "prefixed"
[task.task]
name = "gsm8k"
"""

from __future__ import annotations

import dataclasses
from typing import Any


def wraps(task: Any) -> bool:
    """Whether a task, or its class, wraps another. A field `task` of another type, such as str, is a plain setting."""
    if not dataclasses.is_dataclass(task):
        return False
    return any(field.name == "task" and field.type in ("Any", Any) for field in dataclasses.fields(task))


def layers(task: Any) -> list[Any]:
    """Return the task and those that it wraps, from the outside in."""
    return [task, *layers(task.task)] if wraps(task) else [task]


def innermost(task: Any) -> Any:
    """Return the innermost task, which writes the questions."""
    return layers(task)[-1]


def seeded(task: Any, seed: int) -> Any:
    """Return the task with this seed, unless the innermost task has a seed of its own, other than 0."""
    if wraps(task):
        return dataclasses.replace(task, task=seeded(task.task, seed))
    return dataclasses.replace(task, seed=task.seed or seed)


def with_split(task: Any, split: str) -> Any:
    """Return the task on another split: by its own `with_split` if it has one, otherwise by replacing its field."""
    return task.with_split(split) if hasattr(task, "with_split") else dataclasses.replace(task, split=split)
