"""Read a model's arithmetic with Python's parser and compute it exactly: + - * / and brackets, nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from pellucid.rewards.answers import ASCII_FORMS

LONGEST = 200
"""The most characters of an expression; a longer text is not read."""

_SIGNS = ASCII_FORMS | dict.fromkeys(map(ord, "\u00d7\u22c5\u00b7\u2217"), "*") | {0xF7: "/"}
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(cdot|times|ast|div|left|right|quad|displaystyle|implies|Rightarrow|to)(?![A-Za-z])|\\\\")
_MEANING = {"cdot": "*", "times": "*", "ast": "*", "div": "/"} | dict.fromkeys(
    ["implies", "Rightarrow", "to", None], "\n"
)
_SPACING = re.compile(r"\\[,;:! ()\[\]]|[$`&]")
_BRACES = str.maketrans("{}", "()")
_WRITTEN = re.compile(r"[0-9a-z+*/(). -]*")
_PRODUCT = re.compile(r"(?<=[0-9)])(?=[a-z(])|(?<=[a-z)])(?=[0-9(])")


class Linear(NamedTuple):
    """A linear expression: a constant plus multiples of unknowns.

    Example: linear("2a + 3", "a") == Linear(Fraction(3), {"a": Fraction(2)})
    """

    constant: Fraction
    coefficients: dict[str, Fraction]
    """The coefficient of each unknown, where it is not 0."""


class Tree(NamedTuple):
    """An expression as Python parses it, and its text."""

    root: ast.expr
    text: str


def plain(text: str) -> str:
    """Return the same arithmetic without LaTeX: \\times becomes *, braces become brackets, arrows begin a new line.

    Example: plain("$11 \\\\times \\\\frac{2}{2}$").split() == ["11", "*", "((2)/(2))"]
    """
    text = text.translate(_SIGNS)
    # Each round rewrites the innermost fractions, whose braces hold no others.
    for _ in range(LONGEST // len(r"\frac{}{}")):
        text, found = _FRACTION.subn(r" ((\1)/(\2))", text)
        if not found:
            break
    signs = _COMMAND.sub(lambda match: f" {_MEANING.get(match[1], '')} ", text)
    return _SPACING.sub(" ", signs).translate(_BRACES)


@lru_cache(maxsize=4096)
def linear(text: str, unknowns: str = "") -> Linear | None:
    """Return the value of an expression in one-letter unknowns; None where it is not linear. 2a is a product.

    Example: linear("(3 - 1) / 4") == Linear(Fraction(1, 2), {})
    """
    tree = tree_of(text)
    try:
        return None if tree is None else evaluated(tree, tree.root, unknowns)
    except (ArithmeticError, ValueError):
        return None


def numbers_in(text: str) -> list[int] | None:
    """Return the numbers in an expression, repeats included; None where one is written with more than digits.

    Example: numbers_in("3 * (3 + 10)") == [3, 3, 10]; numbers_in("3 * 0.0 + 10") is None
    """
    tree = tree_of(text)
    written = [] if tree is None else list(constants(tree))
    return [int(number) for number in written] if all(map(str.isdigit, written)) else None


def constants(tree: Tree) -> Iterator[str]:
    """Return every constant as it is written: Python's value of 1_0 or 0x10 is not what the text shows."""
    nodes = (node for node in ast.walk(tree.root) if isinstance(node, ast.Constant))
    return (tree.text[node.col_offset : node.end_col_offset] for node in nodes)


@lru_cache(maxsize=4096)
def tree_of(text: str) -> Tree | None:
    if len(text) > LONGEST:
        return None
    written = _PRODUCT.sub("*", " ".join(text.translate(_SIGNS).split()))
    if not _WRITTEN.fullmatch(written):
        return None
    try:
        return Tree(ast.parse(written, mode="eval").body, written)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def evaluated(tree: Tree, node: ast.expr, unknowns: str) -> Linear:
    """Evaluate a parsed expression. ValueError where it is not linear, ZeroDivisionError for a division by 0."""
    match node:
        case ast.Constant():
            # Read from the text, since Python rounds decimals.
            return Linear(Fraction(tree.text[node.col_offset : node.end_col_offset]), {})
        case ast.Name(id=name) if name in unknowns and len(name) == 1:
            return Linear(Fraction(0), {name: Fraction(1)})
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return scaled(evaluated(tree, operand, unknowns), Fraction(-1))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return evaluated(tree, operand, unknowns)
        case ast.BinOp(left=left, op=operator, right=right):
            return combined(evaluated(tree, left, unknowns), operator, evaluated(tree, right, unknowns))
    raise ValueError(f"no linear arithmetic: {ast.dump(node)}")


def combined(left: Linear, operator: ast.operator, right: Linear) -> Linear:
    match operator:
        case ast.Add():
            return total(left, right)
        case ast.Sub():
            return total(left, scaled(right, Fraction(-1)))
        case ast.Mult() if not left.coefficients:
            return scaled(right, left.constant)
        case ast.Mult() if not right.coefficients:
            return scaled(left, right.constant)
        case ast.Div() if not right.coefficients:
            return scaled(left, 1 / right.constant)
    raise ValueError("not linear")


def scaled(x: Linear, factor: Fraction) -> Linear:
    return Linear(x.constant * factor, {name: f * factor for name, f in x.coefficients.items() if factor})


def total(x: Linear, y: Linear) -> Linear:
    of = {
        name: x.coefficients.get(name, Fraction(0)) + y.coefficients.get(name, Fraction(0))
        for name in x.coefficients | y.coefficients
    }
    return Linear(x.constant + y.constant, {name: factor for name, factor in of.items() if factor})
