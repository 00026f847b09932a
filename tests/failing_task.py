"""Tasks whose rewards fail, always or from some call on."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from digits_task import Digits
from pellucid.types import Reward


@dataclass(frozen=True)
class Broken(Digits):
    how: str = "name"

    def reward(self, prompt, completion):
        print("looking at it")
        if self.how == "talks a lot":
            print(f"{'la ' * 100}\n" * 1000, completion.text)
            return super().reward(prompt, completion)
        if self.how == "not held out":
            return Reward(float("nan")) if prompt.id.startswith("test") else super().reward(prompt, completion)
        return WAYS[self.how](super().reward(prompt, completion))


@dataclass(frozen=True)
class Judged(Digits):
    """Graded by a judge who answers as long as a file exists."""

    judge: str = ""

    def reward(self, prompt, completion):
        if not Path(self.judge).exists():
            raise ConnectionError("the judge does not answer")
        return super().reward(prompt, completion)


def unknown(reward):
    return undefined_name  # noqa: F821


def seldom(reward):
    """Return a reward for some completions only: it does not apply to the others."""
    return reward if reward.value > 0.2 else Reward(float("nan"), error="no term applies", applies=False)


WAYS = {
    "not": lambda reward: reward,
    "name": unknown,
    "hang": lambda _: time.sleep(600),
    "segfault": lambda _: os.kill(os.getpid(), 11),
    "exit": lambda _: sys.exit(3),
    "nan": lambda _: Reward(float("nan")),
    "huge": lambda _: Reward(10**400),
    "never meant": lambda _: Reward(float("nan"), error="no term applies", applies=False),
    "seldom meant": seldom,
}
