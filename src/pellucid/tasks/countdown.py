"""Reach a target from a few numbers with + - * /, each number once: easy to check, hard to find."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Literal, NamedTuple

from pellucid.rewards.answers import ASCII_FORMS, extract_marked_answer, strip_thought
from pellucid.tasks.prompts import GeneratedTask, assign_split, check_ranges, draw_prompts
from pellucid.types import Completion, Prompt, Reward

MAX_TRIES = 10_000


@dataclass(frozen=True)
class Countdown(GeneratedTask):
    """The reward is 1 for an expression that has the target's exact value and uses every number exactly once.

    The expression is read from a final `<answer>` tag or the last `\\boxed{}`, otherwise from the last line. It may be
    LaTeX or Markdown. In an equation, only the first side that is more than a number is graded: `3 * 5 - 2 = 13` and
    `13 = 3 * 5 - 2` are the same. Numbers are written in digits, without decimal point or power, and the only signs
    are + - * / and brackets. An expression that uses the right numbers but misses the target earns `format_reward`. The
    splits share no set of numbers.

    Example: Countdown(numbers=3, largest=20).sample(step=0, n=8)
    """

    name: Literal["countdown"] = "countdown"
    """The name of the task."""
    numbers: int = 3
    """How many numbers there are, from 2 to 6."""
    largest: int = 20
    """The largest number."""
    format_reward: float = 0.1
    """The reward for the right numbers and a wrong value, at least 0 and below 1."""
    test_share: float = 0.1
    """The share of number sets that is held out for the test split."""
    template: str = (
        "Using each of the numbers {numbers} exactly once, and + - * / and brackets, write an expression that equals"
        " {target}. Answer with the expression only."
    )
    """The question; {numbers} and {target} are filled in."""

    def __post_init__(self) -> None:
        check_ranges(self, numbers=(2, 6), test_share=(0.01, 0.99))
        if self.largest < 5:
            raise ValueError(f"largest = {self.largest} must be at least 5")
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"format_reward = {self.format_reward} must be at least 0 and below 1")
        if not all(field in self.template for field in ("{numbers}", "{target}")):
            raise ValueError(f'template = "{self.template}" must contain {{numbers}} and {{target}}')

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        expression = extract_expression(completion.full_text)
        value = parse_linear(expression)
        uses_numbers = value is not None and (
            Counter(extract_numbers(expression) or ()) == Counter(prompt.columns["numbers"])
        )
        right = uses_numbers and value is not None and value.constant == int(prompt.answer)
        parts = {"right": float(right), "numbers": float(uses_numbers)}
        return Reward(1.0 if right else self.format_reward * uses_numbers, parts, correct=right)

    def sample(self, step: int, n: int) -> list[Prompt]:
        return draw_prompts(self, step, n, self._make_prompt)

    def _make_prompt(self, id: str, rng: Random) -> Prompt:
        for _ in range(MAX_TRIES):
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            if assign_split(",".join(map(str, sorted(numbers))), self.test_share) != self.split:
                continue
            solution, value = generate_expression(numbers, rng)
            if value.denominator == 1 and 0 < value <= 10 * self.largest:
                question = self.template.replace("{numbers}", ", ".join(map(str, numbers)))
                question = question.replace("{target}", str(value))
                columns = {"numbers": numbers, "solution": solution}
                return Prompt(id, ({"role": "user", "content": question},), str(value), columns)
        raise ValueError(f"no problem of the {self.split} split in {MAX_TRIES} tries: raise largest or test_share")


def generate_expression(numbers: list[int], rng: Random) -> tuple[str, Fraction]:
    """Return a random expression that uses each of these numbers once, and its value."""
    parts = [(str(n), Fraction(n)) for n in numbers]
    while len(parts) > 1:
        (one, x), (other, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        values = {"+": x + y, "-": x - y, "*": x * y} | ({"/": x / y} if y else {})
        operator = rng.choice(list(values))
        parts.append((f"({one} {operator} {other})", values[operator]))
    [(expression, value)] = parts
    return expression[1:-1], value


def extract_expression(text: str) -> str:
    """Return the expression by which a completion is graded, in plain text (see Countdown).

    Example: extract_expression("So:\\n**143 = 11 \\\\times (14 - 1)**") == "11  *  (14 - 1)"
    """
    marked = extract_marked_answer(text)
    written = "".join(strip_thought(text).strip().splitlines()[-1:]) if marked is None else marked
    sides = [side.strip() for side in convert_latex(_strip_emphasis(written)).split("=")]
    return next((side for side in sides if not side.isdigit()), sides[0])


def _strip_emphasis(written: str) -> str:
    """Remove Markdown emphasis and a final period: the stars around `**3 * 5**.` are not powers."""
    bare = written.strip().rstrip(".\u3002")
    marks = len(bare) - len(bare.lstrip("*_`"))
    return bare[marks : len(bare) - marks] if marks and bare.endswith(bare[:marks][::-1]) else bare


# ---------------------------------------------------------------- expressions
# A model's arithmetic is parsed with Python's parser and computed exactly. Only + - * / and brackets are allowed.


MAX_EXPRESSION_CHARS = 200
"""The most characters of an expression; a longer text is not read."""

_ASCII_TABLE = ASCII_FORMS | dict.fromkeys(map(ord, "\u00d7\u22c5\u00b7\u2217"), "*") | {0xF7: "/"}
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX_COMMAND = re.compile(
    r"\\(cdot|times|ast|div|left|right|quad|displaystyle|implies|Rightarrow|to)(?![A-Za-z])|\\\\"
)
_LATEX_MEANING = {"cdot": "*", "times": "*", "ast": "*", "div": "/"} | dict.fromkeys(
    ["implies", "Rightarrow", "to", None], "\n"
)
_LATEX_SPACING = re.compile(r"\\[,;:! ()\[\]]|[$`&]")
_BRACES_TO_BRACKETS = str.maketrans("{}", "()")
_ALLOWED_CHARS = re.compile(r"[0-9a-z+*/(). -]*")
_IMPLICIT_PRODUCT = re.compile(r"(?<=[0-9)])(?=[a-z(])|(?<=[a-z)])(?=[0-9(])")


class LinearExpression(NamedTuple):
    """A linear expression: a constant plus multiples of unknowns.

    Example: parse_linear("2a + 3", "a") == LinearExpression(Fraction(3), {"a": Fraction(2)})
    """

    constant: Fraction
    coefficients: dict[str, Fraction]
    """The nonzero coefficients, by unknown."""


def convert_latex(text: str) -> str:
    """Return the same arithmetic without LaTeX: \\times becomes *, braces become brackets, arrows begin a new line.

    Example: convert_latex("$11 \\\\times \\\\frac{2}{2}$").split() == ["11", "*", "((2)/(2))"]
    """
    text = text.translate(_ASCII_TABLE)
    # Each round rewrites the innermost fractions, whose braces hold no others.
    for _ in range(MAX_EXPRESSION_CHARS // len(r"\frac{}{}")):
        text, count = _LATEX_FRACTION.subn(r" ((\1)/(\2))", text)
        if not count:
            break
    signs = _LATEX_COMMAND.sub(lambda match: f" {_LATEX_MEANING.get(match[1], '')} ", text)
    return _LATEX_SPACING.sub(" ", signs).translate(_BRACES_TO_BRACKETS)


@lru_cache(maxsize=4096)
def parse_linear(text: str, unknowns: str = "") -> LinearExpression | None:
    """Return the value of an expression in one-letter unknowns; None if it is not linear. 2a is a product.

    Example: parse_linear("(3 - 1) / 4") == LinearExpression(Fraction(1, 2), {})
    """
    written, tree = _parse_expression(text)

    def evaluate(node: ast.AST | None) -> LinearExpression:
        match node:
            case ast.Constant():
                return LinearExpression(Fraction(_get_source(written, node)), {})
            case ast.Name(id=name) if name in unknowns and len(name) == 1:
                return LinearExpression(Fraction(0), {name: Fraction(1)})
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return scale_linear(evaluate(operand), Fraction(-1))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return evaluate(operand)
            case ast.BinOp(op=operator):
                return _apply_operator(evaluate(node.left), operator, evaluate(node.right))
        raise ValueError("no linear arithmetic")

    try:
        return evaluate(tree)
    except (ArithmeticError, ValueError):
        return None


def _apply_operator(left: LinearExpression, operator: ast.operator, right: LinearExpression) -> LinearExpression:
    match operator:
        case ast.Add():
            return add_linear(left, right)
        case ast.Sub():
            return add_linear(left, scale_linear(right, Fraction(-1)))
        case ast.Mult() if not left.coefficients:
            return scale_linear(right, left.constant)
        case ast.Mult() if not right.coefficients:
            return scale_linear(left, right.constant)
        case ast.Div() if not right.coefficients:
            return scale_linear(left, 1 / right.constant)
    raise ValueError("not linear")


def extract_numbers(text: str) -> list[int] | None:
    """Return the numbers in an expression, repeats included; None if one is written with more than digits.

    Example: extract_numbers("3 * (3 + 10)") == [3, 3, 10]; extract_numbers("3 * 0.0 + 10") is None
    """
    written, tree = _parse_expression(text)
    nodes = ast.walk(tree) if tree else ()
    numbers = [_get_source(written, node) for node in nodes if isinstance(node, ast.Constant)]
    return [int(number) for number in numbers] if all(map(str.isdigit, numbers)) else None


def _get_source(written: str, node: ast.Constant) -> str:
    """Return a number as written, since Python rounds decimals, and people read 1_0 and 0x10 differently."""
    return written[node.col_offset : node.end_col_offset]


@lru_cache(maxsize=4096)
def _parse_expression(text: str) -> tuple[str, ast.expr | None]:
    """Return the text in Python's syntax, and its syntax tree; no tree if it is not an expression."""
    written = _IMPLICIT_PRODUCT.sub("*", " ".join(text.translate(_ASCII_TABLE).split()))
    if len(text) > MAX_EXPRESSION_CHARS or not _ALLOWED_CHARS.fullmatch(written):
        return written, None
    try:
        return written, ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return written, None


def scale_linear(x: LinearExpression, factor: Fraction) -> LinearExpression:
    return LinearExpression(x.constant * factor, {name: f * factor for name, f in x.coefficients.items() if factor})


def add_linear(x: LinearExpression, y: LinearExpression) -> LinearExpression:
    coefficients = {
        name: x.coefficients.get(name, Fraction(0)) + y.coefficients.get(name, Fraction(0))
        for name in x.coefficients | y.coefficients
    }
    return LinearExpression(x.constant + y.constant, {name: factor for name, factor in coefficients.items() if factor})
