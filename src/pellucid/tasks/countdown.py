"""Reach a target from a few numbers with + - * /, each number once: easy to check, hard to find."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Literal

from pellucid.rewards.answers import after_thinking, marked_answer
from pellucid.tasks.expressions import linear, numbers_in, plain
from pellucid.types import Completion, Prompt, Reward

TRIES = 10_000


@dataclass(frozen=True)
class Countdown:
    """The reward is 1 for an expression that has the target's exact value and uses every number exactly once.

    The expression is read from a final `<answer>` tag or the last `\\boxed{}`, otherwise from the last line, in LaTeX
    and Markdown too. Of an equation, only the first side that is more than a number is graded: `3 * 5 - 2 = 13` and
    `13 = 3 * 5 - 2` are the same. Numbers are written in digits, without decimal point or power, and the only signs
    are + - * / and brackets. An expression that uses the right numbers but misses the target earns `format_reward`. The
    splits share no set of numbers.

    Example: Countdown(numbers=3, largest=20).sample(step=0, n=8)
    """

    name: Literal["countdown"] = "countdown"
    """This task."""
    seed: int = 0
    """The seed by which the problems of each step are drawn."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`."""
    numbers: int = 3
    """How many numbers there are, from 2 to 6."""
    largest: int = 20
    """The largest number."""
    format_reward: float = 0.1
    """The reward for the right numbers and a wrong value, from 0 to below 1."""
    test_share: float = 0.1
    """The share of number sets that is held out for the test split."""
    template: str = (
        "Using each of the numbers {numbers} exactly once, and + - * / and brackets, write an expression that equals"
        " {target}. Answer with the expression only."
    )
    """The question; {numbers} and {target} are filled in."""

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= 6:
            raise ValueError(f"numbers = {self.numbers} must be from 2 to 6")
        if self.largest < 5:
            raise ValueError(f"largest = {self.largest} must be at least 5")
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"format_reward = {self.format_reward} must be from 0 to below 1")
        if not 0.01 <= self.test_share <= 0.99:
            raise ValueError(f"test_share = {self.test_share} must be from 0.01 to 0.99")
        if not all(field in self.template for field in ("{numbers}", "{target}")):
            raise ValueError(f'template = "{self.template}" must contain {{numbers}} and {{target}}')

    def sample(self, step: int, n: int) -> list[Prompt]:
        rng = Random(f"countdown/{self.seed}/{self.split}/{step}")
        return [self._make_prompt(f"{self.split}/{step}/{i}", rng) for i in range(n)]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        written = expression_of(completion.full_text)
        value = linear(written)
        fair = value is not None and Counter(numbers_in(written) or ()) == Counter(prompt.columns["numbers"])
        right = fair and value is not None and value.constant == int(prompt.answer)
        parts = {"right": float(right), "numbers": float(fair)}
        return Reward(1.0 if right else self.format_reward * fair, parts, correct=right)

    def solution(self, prompt: Prompt) -> str:
        return prompt.columns["solution"]

    def _make_prompt(self, id: str, rng: Random) -> Prompt:
        for _ in range(TRIES):
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            if split_of(numbers, self.test_share) != self.split:
                continue
            solution, value = combination(numbers, rng)
            if value.denominator == 1 and 0 < value <= 10 * self.largest:
                question = self.template.replace("{numbers}", ", ".join(map(str, numbers)))
                question = question.replace("{target}", str(value))
                columns = {"numbers": numbers, "solution": solution}
                return Prompt(id, ({"role": "user", "content": question},), str(value), columns)
        raise ValueError(f"no problem of the {self.split} split in {TRIES} tries: raise largest or test_share")


def split_of(numbers: list[int], test_share: float) -> Literal["train", "test"]:
    """Return the split of a set of numbers, by a hash that does not depend on their order."""
    digest = hashlib.sha256(",".join(map(str, sorted(numbers))).encode()).digest()
    return "test" if int.from_bytes(digest[:8]) < test_share * 2**64 else "train"


def combination(numbers: list[int], rng: Random) -> tuple[str, Fraction]:
    """Return a random expression that uses each of these numbers once, and its value."""
    parts = [(str(n), Fraction(n)) for n in numbers]
    while len(parts) > 1:
        (one, x), (other, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        values = {"+": x + y, "-": x - y, "*": x * y} | ({"/": x / y} if y else {})
        operator = rng.choice(list(values))
        parts.append((f"({one} {operator} {other})", values[operator]))
    [(expression, value)] = parts
    return expression[1:-1], value


def expression_of(text: str) -> str:
    """Return the expression that a completion is graded by, in plain text (see Countdown).

    Example: expression_of("So:\\n**143 = 11 \\\\times (14 - 1)**") == "11  *  (14 - 1)"
    """
    marked = marked_answer(text)
    written = "".join(after_thinking(text).strip().splitlines()[-1:]) if marked is None else marked
    sides = [side.strip() for side in plain(without_emphasis(written)).split("=")]
    return next((side for side in sides if not side.isdigit()), sides[0])


def without_emphasis(written: str) -> str:
    """Remove Markdown emphasis and a final full stop: the stars around `**3 * 5**.` are no powers."""
    bare = written.strip().rstrip(".\u3002")
    marks = len(bare) - len(bare.lstrip("*_`"))
    return bare[marks : len(bare) - marks] if marks and bare.endswith(bare[:marks][::-1]) else bare
