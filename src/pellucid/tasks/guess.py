"""A hidden number is to be guessed in a few turns; what is said in between is "Higher." or "Lower."."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from pellucid.environments.spec import EnvironmentSpec
from pellucid.types import Completion, Message, Prompt, Reward

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Guess:
    """The reward is 1 where the number was found within `guesses` turns, each a number alone. The policy never sees it.

    A turn's guess is the last number in it. Of the reward `format_reward` is for the share of turns that are one number
    and nothing else; the rest is for the number. The splits have the same numbers, in other orders: nothing but the way
    of guessing can be learnt.

    Example: Guess(largest=20, guesses=5).sample(step=0, n=8)
    """

    name: Literal["guess"] = "guess"
    """This task."""
    seed: int = 0
    """The seed by which the numbers of each step are drawn."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    largest: int = 20
    """The largest number that may be hidden; the smallest is 1."""
    guesses: int = 5
    """How many guesses there are."""
    format_reward: float = 0.2
    """The share of the reward for turns that are a number alone, from 0 to below 1."""
    template: str = (
        "I have hidden a number from 1 to {largest}. Guess it. Answer with one number only, and I will say whether mine"
        " is higher or lower."
    )
    """The question; {largest} is filled in."""

    def __post_init__(self) -> None:
        if self.largest < 2 or self.guesses < 1:
            raise ValueError(f"largest = {self.largest} must be at least 2, and guesses = {self.guesses} at least 1")
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"format_reward = {self.format_reward} must be from 0 to below 1")

    @property
    def environment_spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("pellucid.tasks.guess:Game")

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return n numbers; in each stretch of `largest` of them every number is there once."""
        text = ({"role": "user", "content": self.template.replace("{largest}", str(self.largest))},)
        numbers = [self._get_hidden_number(step * n + i) for i in range(n)]
        return [
            Prompt(f"{self.split}/{step}/{i}", text, str(number), {"number": number, "guesses": self.guesses})
            for i, number in enumerate(numbers)
        ]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        guesses = extract_guesses(completion.messages)[: self.guesses]
        found = int(prompt.answer) in guesses
        turns = [message["content"] for message in completion.messages if message["role"] == "assistant"]
        alone = sum(turn.strip().isdecimal() for turn in turns) / max(1, len(turns))
        value = (1 - self.format_reward) * found + self.format_reward * alone
        logged = {"guesses": float(len(guesses))} if found else {}
        return Reward(value, {"found": float(found), "alone": alone}, correct=found, logged=logged)

    def _get_hidden_number(self, index: int) -> int:
        stretch, i = divmod(index, self.largest)
        order = Random(f"guess/{self.seed}/{self.split}/{stretch}").sample(range(1, self.largest + 1), self.largest)
        return order[i]


class Game:
    """The one who has hidden a number."""

    def __init__(self) -> None:
        self.number = self.remaining_guesses = 0

    def reset(self, number: int, guesses: int) -> None:
        self.number, self.remaining_guesses = number, guesses

    def reply(self, messages: Sequence[dict[str, Any]]) -> str | None:
        self.remaining_guesses -= 1
        said = extract_guesses(messages[-1:])
        if self.remaining_guesses == 0 or said == [self.number]:
            return None
        if not said:
            return "Say a number."
        return "Higher." if said[0] < self.number else "Lower."


def extract_guesses(messages: Sequence[Message]) -> list[int]:
    """Return the last number of each message of the policy that has one of up to nine digits."""
    said = [_NUMBER.findall(message["content"]) for message in messages if message["role"] == "assistant"]
    return [int(numbers[-1][:9]) for numbers in said if numbers]
