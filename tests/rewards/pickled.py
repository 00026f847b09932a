"""What is read again in a reward process, which then need not import what the tests do."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.tasks.dataset import Dataset
from pellucid.types import Prompt, Reward

FIRST = Prompt("p", "first?")


@dataclass(frozen=True)
class Named:
    """Its fields and helpers have names that mean something to us."""

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
    """It is pickled, and cannot be read again."""

    def __init__(self, one, two):
        super().__init__(one)
