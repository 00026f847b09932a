"""Questions such as "What is 3 + 4?", which need no data. A small model learns them within minutes on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import add, mul, sub
from random import Random
from typing import Literal

from pellucid.rewards.answers import extract_answer, find_last_number
from pellucid.tasks.prompts import GeneratedTask, assign_split, build_chat, check_ranges
from pellucid.types import Completion, Prompt, Reward

_Operator = Literal["+", "-", "*"]
Split = Literal["train", "test"]
Problem = tuple[int, _Operator, int]

OPERATIONS = {"+": add, "-": sub, "*": mul}
_MAX_LISTED_DIGITS = 2
"""Up to this many digits, all problems of a split are listed (at most 24,300). With more, they are drawn at random, and
those of the other split are rejected."""
_MAX_DIGITS = 1000
"""The most digits of an operand. A product has twice as many, and answers.py reads up to 4000 characters."""


@dataclass(frozen=True)
class Arithmetic(GeneratedTask):
    """Questions with two operands and one operator; the reward is 1 if the answer's last number is right, else 0.

    The splits share no pair of operands, in either order: where 3 and 4 are held out, so are 3 + 4, 4 + 3 and 3 * 4.
    Which pairs are held out does not depend on the seed: all seeds are tested on the same problems.

    Example: Arithmetic(digits=2, operators=("+", "-"), split="test").sample(step=0, n=64)
    """

    name: Literal["arithmetic"] = "arithmetic"
    """The name of the task."""
    digits: int = 1
    """Digits of each operand: 1 means 0 to 9, 2 means 10 to 99."""
    operators: tuple[_Operator, ...] = ("+", "*")
    """One or more of +, - and *."""
    test_share: float = 0.25
    """The share of operand pairs that is held out for the test split, from 0.01 to 0.99."""
    template: str = "What is {a} {operator} {b}? Answer with the number only."
    """The question; {a}, {operator} and {b} are filled in."""

    def __post_init__(self) -> None:
        # Far below a share of 0.01, drawing until a problem is in the test split would take forever.
        check_ranges(self, digits=(1, _MAX_DIGITS), test_share=(0.01, 0.99))
        if not self.operators or not set(self.operators) <= OPERATIONS.keys():
            raise ValueError(f'operators = {list(self.operators)} must be one or more of "+", "-", "*"')
        if len(set(self.operators)) < len(self.operators):
            raise ValueError(f"operators = {list(self.operators)} must not repeat one")
        if not all(field in self.template for field in ("{a}", "{operator}", "{b}")):
            raise ValueError(f'template = "{self.template}" must contain {{a}}, {{operator}} and {{b}}')
        if self.digits == 1 and not (self._list_problems("train") and self._list_problems("test")):
            raise ValueError(f"test_share = {self.test_share} leaves one split without problems: bring it near 0.25")

    def sample(self, step: int, n: int) -> list[Prompt]:
        """Return n problems, all different as long as the split has others; then problems repeat."""
        rng = Random(f"arithmetic/{self.seed}/{self.split}/{step}")
        prompts = list[Prompt]()
        for i, (a, operator, b) in enumerate(self._draw_problems(rng, n)):
            question = self.template.replace("{a}", str(a)).replace("{operator}", operator).replace("{b}", str(b))
            text, answer = build_chat("", question), str(OPERATIONS[operator](a, b))
            prompts.append(Prompt(f"{self.split}/{step}/{i}", text, answer, columns={"problem": (a, operator, b)}))
        return prompts

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(float(find_last_number(extract_answer(completion.full_text)) == int(prompt.answer)))

    def working(self, prompt: Prompt) -> str:
        """Return the steps by which a person computes the result: tens first, then ones."""
        a, operator, b = prompt.columns["problem"]
        return write_working(a, operator, b)

    def _draw_problems(self, rng: Random, n: int) -> list[Problem]:
        low, high = _compute_operand_range(self.digits)
        share = self.test_share if self.split == "test" else 1 - self.test_share
        # Drawing n distinct problems takes long if n is near the size of the split, and never ends above it.
        if self.digits <= _MAX_LISTED_DIGITS or 2 * n / share > (high - low + 1) ** 2 * len(self.operators):
            problems = self._list_problems(self.split)
            passes = (min(len(problems), n - start) for start in range(0, n, len(problems)))
            return [problem for size in passes for problem in rng.sample(problems, size)]
        distinct: dict[Problem, None] = {}
        while len(distinct) < n:
            a, b = rng.randint(low, high), rng.randint(low, high)
            if assign_split(_format_pair(a, b), self.test_share) == self.split:
                distinct[a, rng.choice(self.operators), b] = None
        return list(distinct)

    def _list_problems(self, split: Split) -> tuple[Problem, ...]:
        return list_problems(self.digits, self.operators, self.test_share, split)


def write_working(a: int, operator: _Operator, b: int) -> str:
    """Return a worked solution: tens, ones, then both together, so that the result is the last number.

    For products and for one-digit operands, it is a single equation.

    Example: write_working(34, "+", 58) == "34 + 50 = 84, 4 + 8 = 12, 80 + 12 = 92"
    """
    if operator == "*" or max(a, b) < 10:
        return _format_equation(a, operator, b)
    tens = b - b % 10
    if operator == "+":
        ones = _format_equation(a % 10, "+", b % 10)
        both = _format_equation(a + tens - a % 10, "+", a % 10 + b % 10)
        return f"{_format_equation(a, '+', tens)}, {ones}, {both}"
    begun, rest = _format_equation(a, "-", tens), a - tens
    # Always borrow a ten, since a small model cannot see in advance whether it must.
    borrowed = rest % 10 + 10
    return (
        f"{begun}, {rest} = {rest - borrowed} + {borrowed}, {_format_equation(borrowed, '-', b % 10)}, "
        + _format_equation(rest - borrowed, "+", borrowed - b % 10)
    )


def _format_equation(a: int, operator: _Operator, b: int) -> str:
    return f"{a} {operator} {b} = {OPERATIONS[operator](a, b)}"


def _compute_operand_range(digits: int) -> tuple[int, int]:
    """Return the smallest and the largest operand with this many digits."""
    return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1


def _format_pair(a: int, b: int) -> str:
    """Return the key of a pair of operands, which are in the same split in either order."""
    return f"{min(a, b)},{max(a, b)}"


@cache
def list_problems(
    digits: int, operators: tuple[_Operator, ...], test_share: float, split: Split
) -> tuple[Problem, ...]:
    low, high = _compute_operand_range(digits)
    pairs = ((a, b) for a in range(low, high + 1) for b in range(low, high + 1))
    in_split = [(a, b) for a, b in pairs if assign_split(_format_pair(a, b), test_share) == split]
    return tuple((a, operator, b) for a, b in in_split for operator in operators)
