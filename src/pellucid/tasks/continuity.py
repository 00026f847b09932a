"""Find the two unknowns that make a function of three pieces continuous, with partial credit for each step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple

from pellucid.rewards.answers import extract_marked_answer, parse_only_number, strip_thought
from pellucid.tasks.countdown import LinearExpression, add_linear, convert_latex, parse_linear, scale_linear
from pellucid.tasks.prompts import GeneratedTask, assign_split, build_chat, check_ranges
from pellucid.types import Completion, Prompt, Reward

_DEFAULT_SYSTEM_MESSAGE = "Solve the problem step by step, and put the final answer in \\boxed{}."
PARSED_WEIGHTS = {"points": 0.1, "right equation": 0.15, "a": 0.15, "left equation": 0.15, "b": 0.15, "sum": 0.3}
"""The weight of each part. Without the sum they add up to 0.7: no other part makes up for the answer."""
_LITERAL_WEIGHTS = {"points": 0.2, "right equation": 0.25, "a": 0.15, "left equation": 0.25, "b": 0.15, "sum": 0.2}
"""The weights of literal grading. They add up to 1.2, capped at 1, so the sum is not needed for a full reward."""

_BULLET = re.compile(r"^[ \t]*(?:[-+*\u2022]|\d+[.)])[ \t]+", re.MULTILINE)
_REMARK = re.compile(r"\(([^()]*=[^()]*)\)")
_OPENING_BRACKET = r"(?<![A-Za-z])\(|(?<=[^A-Za-z][abx])\("
_EXPRESSION_TOKEN = re.compile(rf"\d+(?:\.\d+)?|(?<![A-Za-z])[abx](?![A-Za-z])|[-+*/=)]|{_OPENING_BRACKET}|[ \t]+")
_LITERAL_ANSWER = re.compile(r"(?:answer is|a\+b=|boxed\{)([^\n]*)", re.IGNORECASE)
_MAX_SEARCHED_CHARS = 20_000
"""The number of characters of a completion that are searched for statements. A marked answer may come after them."""


class PiecewiseProblem(NamedTuple):
    """The function f(x) = a x + p for x > `right`, m x + q in between, k x - b for x < `left`; a and b are unknown."""

    right: int
    left: int
    p: int
    m: int
    q: int
    k: int

    @property
    def a(self) -> int:
        return (self.m * self.right + self.q - self.p) // self.right

    @property
    def b(self) -> int:
        return self.k * self.left - self.m * self.left - self.q

    def format_question(self) -> str:
        middle = f"{_format_factor(self.m)}x {_format_signed(self.q)}"
        return (
            f"Let f(x) = ax {_format_signed(self.p)} for x > {self.right}, f(x) = {middle} for {self.left} <= x <="
            f" {self.right}, and f(x) = {_format_factor(self.k)}x - b for x < {self.left}. f is continuous everywhere."
            " Find a + b."
        )


ORIGINAL_PROBLEM = PiecewiseProblem(right=2, left=-2, p=3, m=1, q=-5, k=2)
"""The problem of problems = "one": a = -3, b = 3, a + b = 0."""


@dataclass(frozen=True)
class Continuity(GeneratedTask):
    """Find a + b such that a function of three pieces is continuous; the reward is the sum of the weights earned.

    Grading `parsed` reads statements as equations, in LaTeX and Markdown too: 2a + 6 = 0 is the same as 2a + 3 = -3,
    and b = 30 is not b = 3. At the beginning of a line, "- a = -3" is a list item and states a = -3. The sum is the
    number in a final `<answer>` tag or in the last `\\boxed{}`, else the number after the last "a + b = ".

    Grading `literal` searches for strings, as first described: "a = -39" then contains a = -3, and the reward can reach
    1 with a wrong sum.

    Example: Continuity(problems="family").sample(step=0, n=8)
    """

    name: Literal["continuity"] = "continuity"
    """The name of the task."""
    problems: Literal["one", "family"] = "one"
    """one: always the same problem, in both splits, to see whether training has any effect. family: many problems."""
    grading: Literal["parsed", "literal"] = "parsed"
    """parsed: equations are read and compared. literal: strings are searched for (problems = "one" only)."""
    test_share: float = 0.2
    """The share of the family that is held out for the test split."""
    system: str = _DEFAULT_SYSTEM_MESSAGE
    """The system message; empty for none."""

    def __post_init__(self) -> None:
        if self.grading == "literal" and self.problems == "family":
            raise ValueError('grading = "literal" needs problems = "one": it searches for strings of that problem')
        check_ranges(self, test_share=(0.01, 0.99))

    def sample(self, step: int, n: int) -> list[Prompt]:
        rng = Random(f"continuity/{self.seed}/{self.split}/{step}")
        family = list_problems(self.split, self.test_share) if self.problems == "family" else (ORIGINAL_PROBLEM,)
        chosen = rng.sample(family, n) if n <= len(family) else rng.choices(family, k=n)
        return [
            Prompt(
                f"{self.split}/{step}/{i}",
                build_chat(self.system, pieces.format_question()),
                str(pieces.a + pieces.b),
                {"pieces": pieces._asdict()},
            )
            for i, pieces in enumerate(chosen)
        ]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        parsed_parts = parts = grade_parts(completion.full_text, PiecewiseProblem(**prompt.columns["pieces"]))
        weights = PARSED_WEIGHTS
        if self.grading == "literal":
            parts, weights = _grade_literal_parts(completion.text[:_MAX_SEARCHED_CHARS]), _LITERAL_WEIGHTS
        value = round(sum(weights[name] * part for name, part in parts.items()), 10)
        return Reward(min(1.0, value), parts, correct=bool(parsed_parts["sum"]), weights=weights)


@cache
def list_problems(split: str, test_share: float) -> tuple[PiecewiseProblem, ...]:
    """Return all problems of a split. a is from -5 to 5 and not 0, b from -9 to 9."""
    every = (
        PiecewiseProblem(right, left, m * right + q - a * right, m, q, k)
        for right in range(1, 5)
        for left in range(-4, 0)
        for m in range(1, 4)
        for q in range(-6, 7)
        for k in range(1, 5)
        for a in range(-5, 6)
        if q and k != m and a
    )
    bounded = (p for p in every if p.p and abs(p.p) < 15 and abs(p.b) < 10)
    return tuple(p for p in bounded if assign_split(repr(tuple(p)), test_share) == split)


def grade_parts(text: str, pieces: PiecewiseProblem) -> dict[str, float]:
    """Return 1 or 0 for each part: both joins named, both equations stated, both unknowns solved, the sum right."""
    equations = extract_equations(text[:_MAX_SEARCHED_CHARS])
    normalized = [_normalize_equation(left, right) for left, right in equations]
    answer = strip_thought(text)
    answer_equations = equations if answer == text else extract_equations(answer[:_MAX_SEARCHED_CHARS])

    def states(unknown: str, value: int) -> bool:
        return LinearExpression(Fraction(-value), {unknown: Fraction(1)}) in normalized

    parts = {
        "points": states("x", pieces.right) and states("x", pieces.left),
        "right equation": states("a", pieces.a),
        "a": _find_solution(equations, "a") == pieces.a,
        "left equation": states("b", pieces.b),
        "b": _find_solution(equations, "b") == pieces.b,
        "sum": extract_final_answer(text, answer_equations) == pieces.a + pieces.b,
    }
    return {name: float(value) for name, value in parts.items()}


def extract_equations(text: str) -> list[tuple[LinearExpression, LinearExpression]]:
    """Return both sides of every equation in a text, in order: "2a + 3 = 2 - 5 = -3" holds two equations."""
    equations = []
    for span in _iter_expression_spans(text):
        # Emphasis and brackets at the outer ends belong to the text around the equation.
        sides = span.lstrip(" \t*)").rstrip(" \t*(").split("=")
        if len(sides) > 1:
            if sides[0].count("(") != sides[0].count(")"):
                sides[0] = sides[0].removeprefix("(")
            if sides[-1].count("(") != sides[-1].count(")"):
                sides[-1] = sides[-1].removesuffix(")")
            equations += pairwise([parse_linear(side, "abx") for side in sides])
    return [(left, right) for left, right in equations if left is not None and right is not None]


def _iter_expression_spans(text: str) -> Iterator[str]:
    """Yield the spans of a text that consist of nothing but numbers, unknowns, signs and brackets."""
    text = " " + _REMARK.sub(r"\n\1\n", convert_latex(_BULLET.sub("", text.replace("**", " "))))
    start = end = 0
    for piece in _EXPRESSION_TOKEN.finditer(text):
        if piece.start() != end:
            yield text[start:end]
            start = piece.start()
        end = piece.end()
    yield text[start:end]


def _normalize_equation(left: LinearExpression, right: LinearExpression) -> LinearExpression | None:
    """Return left - right, scaled so that equivalent equations are equal; None if no unknown is left.

    The coefficient of the first unknown in alphabetical order becomes 1.
    """
    difference = add_linear(left, scale_linear(right, Fraction(-1)))
    if not difference.coefficients:
        return None
    return scale_linear(difference, 1 / difference.coefficients[min(difference.coefficients)])


def _find_solution(equations: Sequence[tuple[LinearExpression, LinearExpression]], *unknowns: str) -> Fraction | None:
    """Return the number in the last "a = number", or for several unknowns in the last "a + b = number", if any."""
    wanted = LinearExpression(Fraction(0), dict.fromkeys(unknowns, Fraction(1)))
    return next(
        (right.constant for left, right in reversed(equations) if left == wanted and not right.coefficients), None
    )


def extract_final_answer(text: str, equations: Sequence[tuple[LinearExpression, LinearExpression]]) -> Fraction | None:
    """Return the number that a text marks as its answer, else that in the last "a + b = number" of the equations."""
    marked = extract_marked_answer(text)
    return _find_solution(equations, "a", "b") if marked is None else parse_only_number(marked.rpartition("=")[2])


def _grade_literal_parts(text: str) -> dict[str, float]:
    """Return the parts of ORIGINAL_PROBLEM that a text states, found as strings: "a=-3" is found in "a=-39" too."""
    plain = re.sub(r"\s", "", text)
    answers = _LITERAL_ANSWER.findall(text) or _LITERAL_ANSWER.findall(plain)
    parts = {
        "points": "x=2" in plain or "x=-2" in plain,
        "right equation": "2a+3=-3" in plain or "a=-3" in plain,
        "a": "a=-3" in plain,
        "left equation": "-7=-4-b" in plain or "-4-b=-7" in plain,
        "b": "b=3" in plain,
        "sum": any("0" in answer for answer in answers),
    }
    return {name: float(value) for name, value in parts.items()}


def _format_factor(n: int) -> str:
    return "" if n == 1 else str(n)


def _format_signed(n: int) -> str:
    return f"+ {n}" if n >= 0 else f"- {-n}"
