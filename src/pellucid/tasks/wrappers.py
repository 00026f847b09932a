"""Tasks around tasks: a wrapper is a dataclass with a field `task`, and its section holds that of the task inside.

[task]
name = "prefixed"
[task.task]
name = "gsm8k"
"""

from __future__ import annotations

import dataclasses
from typing import Any


def wraps(task: Any) -> bool:
    """Of a task or of its class."""
    return dataclasses.is_dataclass(task) and any(field.name == "task" for field in dataclasses.fields(task))


def innermost(task: Any) -> Any:
    """The task that writes the questions."""
    return innermost(task.task) if wraps(task) else task


def seeded(task: Any, seed: int) -> Any:
    """With this seed, where the innermost has none of its own."""
    if wraps(task):
        return dataclasses.replace(task, task=seeded(task.task, seed))
    return dataclasses.replace(task, seed=task.seed or seed)


def with_split(task: Any, split: str) -> Any:
    """The task on another split: by its own `with_split` where it has one, otherwise as a dataclass with that field."""
    return task.with_split(split) if hasattr(task, "with_split") else dataclasses.replace(task, split=split)
