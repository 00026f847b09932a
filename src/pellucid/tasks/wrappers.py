"""Tasks that wrap tasks: dataclasses with a field `task: Any`. Their section holds that of the wrapped task.

[task]
name = "prefixed"
[task.task]
name = "gsm8k"
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pellucid.types import Completion, Message, Prompt, Reward, Task
from pellucid.utils.plugins import IN_PROCESS_PREFIX


@dataclasses.dataclass(frozen=True)
class TaskWrapper:
    """The base class of the wrappers here. A user's own wrapper need not derive from it."""

    task: Any = None
    """The wrapped task, which makes the questions."""

    @property
    def seed(self) -> int:
        return self.task.seed

    @property
    def split(self) -> str:
        return self.task.split

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return self.task.reward(prompt, self.transform_completion(prompt, completion))

    def transform_completion(self, prompt: Prompt, completion: Completion) -> Completion:  # noqa: ARG002
        """Return the completion that the wrapped task grades; here it is unchanged."""
        return completion


def is_task_wrapper(task: Any) -> bool:
    """Whether a task, or its class, wraps another. A field `task` of another type, such as str, is a plain setting."""
    if not dataclasses.is_dataclass(task):
        return False
    return any(field.name == "task" and field.type in ("Any", Any) for field in dataclasses.fields(task))


def list_task_layers(task: Any) -> list[Any]:
    """Return the task and the tasks that it wraps, from the outside in."""
    return [task, *list_task_layers(task.task)] if is_task_wrapper(task) else [task]


def get_innermost_task(task: Any) -> Any:
    """Return the innermost task, which makes the questions."""
    return list_task_layers(task)[-1]


def format_question_for_task(task: Any, question: str) -> str | tuple[Message, ...]:
    """Return the text of a prompt that asks a user's question in the format of the task.

    A method `format_question` of the task formats it, if there is one. Otherwise the question follows the system
    message of the task.
    """
    inner = get_innermost_task(task)
    format_question: Any = getattr(inner, "format_question", None)
    if format_question is not None:
        return format_question(question)
    text = inner.sample(0, 1)[0].text
    if isinstance(text, str):
        return question
    return (*(message for message in text if message["role"] == "system"), {"role": "user", "content": question})


def with_seed(task: Any, seed: int) -> Any:
    """Return the task with this seed, unless the innermost task already has a seed other than 0."""
    if is_task_wrapper(task):
        return dataclasses.replace(task, task=with_seed(task.task, seed))
    return dataclasses.replace(task, seed=task.seed or seed)


def is_process_bound(task: Task) -> bool:
    """Whether no other process can load the task, because its class or a reward cannot be imported."""
    for layer in list_task_layers(task):
        terms = getattr(layer, "rewards", ())  # a task of the user's own can have anything here
        reward_names = [str(getattr(term, "name", "")) for term in terms] if isinstance(terms, list | tuple) else []
        if is_local_class(type(layer)) or any(name.startswith(IN_PROCESS_PREFIX) for name in reward_names):
            return True
    return False


def is_local_class(cls: type) -> bool:
    return cls.__module__ == "__main__" or "<locals>" in cls.__qualname__
