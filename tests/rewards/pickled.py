"""Classes that a reward process unpickles, apart from the tests so that it need not import what they import."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.tasks.dataset import Dataset
from pellucid.types import Prompt, Reward

FIRST = Prompt("p", "first?")


@dataclass(frozen=True)
class Named:
    """A task whose fields and helpers have names that mean something else in Pellucid."""

    seed: int = 0
    split: str = "train"
    total: int = 100
    seen: int = 0

    def sample(self, step, n):
        return [FIRST] * n

    def rewards(self, text):
        return float(len(text))

    def reward(self, prompt, completion):
        assert completion.sampling_mask == ()
        return Reward(self.rewards(completion.text))


@dataclass(frozen=True)
class Mine(Dataset):
    def reward(self, prompt, completion):
        return Reward(7.0)


class Grudge(Exception):  # noqa: N818
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one, two):
        super().__init__(one)
