"""Sort a few numbers: a task with several ways to give partial credit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal

from pellucid.rewards.answers import extract_answer
from pellucid.tasks.prompts import GeneratedTask, assign_split, check_ranges, draw_prompts
from pellucid.types import Completion, Prompt, Reward

_NUMBERS = re.compile(r"(?:(?<![\d)])[-\u2212])?\d+")
_INVALID_NUMBER = -1
"""Replaces numbers below 0 or of at least 20 digits, which no right answer contains."""
Grading = Literal["positions", "distance", "inclusion_ordering", "exact"]


@dataclass(frozen=True)
class Sorting(GeneratedTask):
    """Numbers in random order, to be sorted; the reward is from 0 to 1, and 1 only for exactly the sorted list.

    The splits share no set of numbers.

    Example: Sorting(length=4, grading="distance").sample(step=0, n=8)
    """

    name: Literal["sorting"] = "sorting"
    """The name of the task."""
    length: int = 4
    """How many numbers there are."""
    largest: int = 9
    """The largest number; the smallest is 0."""
    grading: Grading = "positions"
    """positions: the share of places that hold the right number; distance: how far the numbers are from the right ones;
    inclusion_ordering: how many of the numbers it contains, and how many neighbors ascend; exact: all or nothing."""
    test_share: float = 0.25
    """The share of number sets that is held out for the test split."""
    template: str = "Sort these numbers in ascending order: {numbers}. Answer with the numbers only."
    """The question; {numbers} is filled in."""

    def __post_init__(self) -> None:
        if self.length < 2 or self.largest < 1:
            raise ValueError(f"length = {self.length} must be at least 2 and largest = {self.largest} at least 1")
        check_ranges(self, test_share=(0.01, 0.99))
        if "{numbers}" not in self.template:
            raise ValueError(f'template = "{self.template}" must contain {{numbers}}')

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        written = _NUMBERS.findall(extract_answer(completion.full_text))
        answer = [int(digits) if digits.isdigit() and len(digits) < 20 else _INVALID_NUMBER for digits in written]
        right = sorted(prompt.columns["numbers"])
        return Reward(GRADINGS[self.grading](answer, right), correct=answer == right)

    def sample(self, step: int, n: int) -> list[Prompt]:
        return draw_prompts(self, step, n, self._make_prompt)

    def _make_prompt(self, id: str, rng: Random) -> Prompt:
        for _ in range(10_000):
            numbers = [rng.randint(0, self.largest) for _ in range(self.length)]
            if assign_split(",".join(map(str, sorted(numbers))), self.test_share) == self.split:
                listed = ", ".join(map(str, numbers))
                message = {"role": "user", "content": self.template.replace("{numbers}", listed)}
                return Prompt(id, (message,), ", ".join(map(str, sorted(numbers))), {"numbers": numbers})
        raise ValueError(f"the {self.split} split has no set of numbers: raise length, largest or test_share")


def grade_positions(answer: Sequence[int], expected: Sequence[int]) -> float:
    """Return the share of positions that hold the right number.

    Example: grade_positions([1, 3, 2], [1, 2, 3]) == 1 / 3
    """
    return sum(x == y for x, y in zip(answer, expected, strict=False)) / max(len(answer), len(expected))


def grade_distance(answer: Sequence[int], expected: Sequence[int]) -> float:
    """Return 1 minus the mean distance to the right numbers, relative to their range; missing or extra ones count 1.

    Example: grade_distance([1, 3, 2], [1, 2, 3]) == 1 - (0 + 1/2 + 1/2) / 3
    """
    span = max(1, expected[-1] - expected[0])
    distance = sum(min(1.0, abs(x - y) / span) for x, y in zip(answer, expected, strict=False))
    return 1 - (distance + abs(len(answer) - len(expected))) / max(len(answer), len(expected))


def grade_inclusion_ordering(answer: Sequence[int], expected: Sequence[int]) -> float:
    """Return the share of points earned.

    There is a point for each number of the prompt that the answer contains, counted at most as often as it was given,
    and a point for each ascending pair of neighbors.

    Example: grade_inclusion_ordering([1, 3, 2], [1, 2, 3]) == (3 + 1) / (3 + 2)
    """
    length = max(len(answer), len(expected))
    included = sum((Counter(answer) & Counter(expected)).values())
    ascending = sum(x <= y for x, y in pairwise(answer))
    return (included + ascending) / (2 * length - 1)


def grade_exact(answer: Sequence[int], expected: Sequence[int]) -> float:
    return float(answer == expected)


GRADINGS = {
    "positions": grade_positions,
    "distance": grade_distance,
    "inclusion_ordering": grade_inclusion_ordering,
    "exact": grade_exact,
}
