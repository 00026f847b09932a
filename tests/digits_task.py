"""A minimal custom task."""

import random
from dataclasses import dataclass

from pellucid.types import Completion, Prompt, Reward


@dataclass(frozen=True)
class Digits:
    seed: int = 0
    split: str = "train"

    def sample(self, step: int, n: int) -> list[Prompt]:
        rng = random.Random(f"{self.seed}/{self.split}/{step}")
        return [Prompt(f"{self.split}/{step}/{i}", "abc"[: 1 + i % 3] + str(rng.randrange(10**6))) for i in range(n)]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        digits = sum(c.isdigit() for c in completion.text)
        return Reward(digits / max(1, len(completion.text)), correct=digits > 3)


@dataclass(frozen=True)
class Careless(Digits):
    """Draws from the global random generator, as user code may."""

    def sample(self, step: int, n: int) -> list[Prompt]:
        return [Prompt(f"{self.split}/{step}/{i}", str(random.randrange(10**6))) for i in range(n)]


@dataclass(frozen=True)
class Silent(Digits):
    """Asks empty questions."""

    def sample(self, step: int, n: int) -> list[Prompt]:
        return [Prompt(f"{self.split}/{step}/{i}", "") for i in range(n)]
