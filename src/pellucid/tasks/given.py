"""A task of the user's own that is no dataclass: any object with `sample` and `reward`, given to `pellucid.train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.types import Completion, Prompt, Reward, UserError, with_split


def make_task_class(task: Any) -> type:
    """Return a dataclass with the fields seed and split, whose instances ask and grade as this object does.

    Its `with_split("test")`, or of a dataclass its field `split`, gives the held-out questions: one without it has
    none, which is a UserError when they are asked for. Its other attributes, such as `observe`, are the instances' too.
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
            """Return the completion as it is: the object grades it."""
            return completion

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name == "with_split":
                raise AttributeError(name)
            return getattr(task, name)

    Given.__name__ = kind
    Given.task = task  # pyright: ignore[reportAttributeAccessIssue] - who grades
    Given.original = type(task)  # pyright: ignore[reportAttributeAccessIssue] - whose source is that of the task
    return Given
