"""Tasks that a recipe cannot hold: any object with `sample` and `reward` that is given to `pellucid.train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.types import Completion, Prompt, Reward, UserError, with_split


def make_task_class(task: Any) -> type:
    """Return a dataclass with the fields seed and split, whose instances sample and grade as this object does.

    The object's `with_split("test")`, or the field `split` if it is a dataclass, gives the held-out questions. An
    object with neither has none: asking for them raises UserError. Instances also have the other attributes of the
    object, such as `observe`.
    """
    kind = type(task).__name__

    @dataclass(frozen=True)
    class Given:
        seed: int = 0
        split: str = "train"

        def sample(self, step: int, n: int) -> Sequence[Prompt]:
            if self.split == "train":
                return task.sample(step, n)
            if not hasattr(task, "with_split") and not hasattr(type(task), "__dataclass_fields__"):
                raise UserError(
                    f"task {kind} has no held-out questions: give it with_split(split), which returns a task of"
                    ' "test", or train without evaluations, evaluate_every=0'
                )
            return with_split(task, self.split).sample(step, n)

        def reward(self, prompt: Prompt, completion: Completion) -> Reward:
            return task.reward(prompt, completion)

        def transform_completion(self, prompt: Prompt, completion: Completion) -> Completion:  # noqa: ARG002
            """Return the completion unchanged, since the object grades it."""
            return completion

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name == "with_split":
                raise AttributeError(name)
            return getattr(task, name)

    Given.__name__ = kind
    Given.task = task  # pyright: ignore[reportAttributeAccessIssue] - the object that grades
    Given.original = type(task)  # pyright: ignore[reportAttributeAccessIssue] - the class whose source is recorded
    return Given
