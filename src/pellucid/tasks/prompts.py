"""What several tasks share that make up their questions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Literal

from pellucid.types import Message, Prompt


@dataclass(frozen=True)
class GeneratedTask:
    """A task that makes up its questions from random numbers."""

    name: str = ""
    """This task."""
    seed: int = 0
    """The seed by which the questions of each step are drawn."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""

    def sample(self, step: int, n: int) -> list[Prompt]:
        rng = Random(f"{self.name}/{self.seed}/{self.split}/{step}")
        return [self._make_prompt(f"{self.split}/{step}/{i}", rng) for i in range(n)]

    def _make_prompt(self, id: str, rng: Random) -> Prompt:
        raise NotImplementedError

    def _check_ranges(self, **ranges: tuple[float, float]) -> None:
        """Raise ValueError unless each of these settings is between two values, or equal to one of them."""
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)} must be from {low} to {high}")


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
