"""Helpers for tasks that build prompts, such as those that generate their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from pellucid.types import Message, Prompt


@dataclass(frozen=True)
class GeneratedTask:
    """The settings of tasks that generate their questions from random numbers."""

    name: str = ""
    """The name of the task."""
    seed: int = 0
    """The seed for the random questions of each step."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""


def draw_prompts(task: GeneratedTask, step: int, n: int, make_prompt: Callable[[str, Random], Prompt]) -> list[Prompt]:
    """Return n prompts of a step. `make_prompt` takes the id of a prompt and the random generator of the step."""
    rng = Random(f"{task.name}/{task.seed}/{task.split}/{step}")
    return [make_prompt(f"{task.split}/{step}/{i}", rng) for i in range(n)]


def check_ranges(task: GeneratedTask, **ranges: tuple[float, float]) -> None:
    """Raise ValueError unless each of these settings is between two values, inclusive."""
    for name, (low, high) in ranges.items():
        if not low <= getattr(task, name) <= high:
            raise ValueError(f"{name} = {getattr(task, name)} must be from {low} to {high}")


def assign_split(key: str, test_share: float) -> Literal["train", "test"]:
    """Return the split of the problem that has this key: about `test_share` of all keys are in the test split.

    The split is a function of a hash of the key, so that it does not depend on a seed.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < test_share * 2**64 else "train"


def build_chat(system: str, question: str) -> tuple[Message, ...]:
    """Return the system message, unless it is empty, and the user's message."""
    user: Message = {"role": "user", "content": question}
    return ({"role": "system", "content": system}, user) if system else (user,)
