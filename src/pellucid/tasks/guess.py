"""A game of several turns: the policy guesses a hidden number, and is told "Higher." or "Lower."."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from pellucid.environments.spec import EnvironmentSpec
from pellucid.tasks.prompts import GeneratedTask
from pellucid.types import Completion, Message, Prompt, Reward

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Guess(GeneratedTask):
    """The reward is 1 if the number was found within `guesses` turns, each of them one number and nothing else.

    The guess of a turn is the last number in it. The share `format_reward` of the reward is for the share of turns that
    are one number and nothing else; the rest is for finding the number. The splits have the same numbers in different
    orders: only the way of guessing can be learned.

    Example: Guess(largest=20, guesses=5).sample(step=0, n=8)
    """

    name: Literal["guess"] = "guess"
    """The name of the task."""
    largest: int = 20
    """The largest number that may be hidden; the smallest is 1."""
    guesses: int = 5
    """How many guesses there are."""
    format_reward: float = 0.2
    """The share of the reward for turns that are a number alone, at least 0 and below 1."""
    template: str = (
        "I have hidden a number from 1 to {largest}. Guess it. Answer with one number only, and I will say whether mine"
        " is higher or lower."
    )
    """The question; {largest} is filled in."""

    def __post_init__(self) -> None:
        if self.largest < 2 or self.guesses < 1:
            raise ValueError(f"largest = {self.largest} must be at least 2, and guesses = {self.guesses} at least 1")
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"format_reward = {self.format_reward} must be at least 0 and below 1")

    @property
    def environment_spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("pellucid.tasks.guess:Game")

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return n prompts. Each block of `largest` prompts hides each number once."""
        text = ({"role": "user", "content": self.template.replace("{largest}", str(self.largest))},)
        prompts = list[Prompt]()
        for i in range(n):
            epoch, position = divmod(step * n + i, self.largest)
            rng = Random(f"guess/{self.seed}/{self.split}/{epoch}")
            number = rng.sample(range(1, self.largest + 1), self.largest)[position]
            columns = {"number": number, "guesses": self.guesses}
            prompts.append(Prompt(f"{self.split}/{step}/{i}", text, str(number), columns))
        return prompts

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        guesses = _extract_guesses(completion.messages)[: self.guesses]
        found = int(prompt.answer) in guesses
        turns = [message["content"] for message in completion.messages if message["role"] == "assistant"]
        number_share = sum(turn.strip().isdecimal() for turn in turns) / max(1, len(turns))
        value = (1 - self.format_reward) * found + self.format_reward * number_share
        logged = {"guesses": float(len(guesses))} if found else {}
        return Reward(value, {"found": float(found), "alone": number_share}, correct=found, logged=logged)


class Game:
    """The environment, which hides a number."""

    def __init__(self) -> None:
        self.number = self.remaining_guesses = 0

    def reset(self, number: int, guesses: int) -> None:
        self.number, self.remaining_guesses = number, guesses

    def reply(self, messages: Sequence[dict[str, Any]]) -> str | None:
        self.remaining_guesses -= 1
        guesses = _extract_guesses(messages[-1:])
        if self.remaining_guesses == 0 or guesses == [self.number]:
            return None
        if not guesses:
            return "Say a number."
        return "Higher." if guesses[0] < self.number else "Lower."


def _extract_guesses(messages: Sequence[Message]) -> list[int]:
    """Return the last number of each policy message that has one. Only its first nine digits are read."""
    turns = [_NUMBER.findall(message["content"]) for message in messages if message["role"] == "assistant"]
    return [int(numbers[-1][:9]) for numbers in turns if numbers]
