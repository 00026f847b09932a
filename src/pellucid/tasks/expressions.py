"""Arithmetic that a model wrote, read by Python's parser and computed exactly: + - * / and brackets, nothing else."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

LONGEST = 200
"""Characters of an expression; a longer one is none."""

_SIGNS = str.maketrans({"\u2212": "-", "\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/"})
_PRODUCT = re.compile(r"(?<=[0-9)])(?=[a-z(])|(?<=[a-z)])(?=[0-9(])")


class Linear(NamedTuple):
    """A number plus multiples of unknowns.

    Example: linear("2a + 3", "a") == Linear(Fraction(3), {"a": Fraction(2)})
    """

    constant: Fraction
    of: dict[str, Fraction]
    """Factors other than 0."""


def linear(text: str, unknowns: str = "") -> Linear | None:
    """What an expression is in these one-letter unknowns; None where it is no such thing. 2a is a product.

    Example: linear("(3 - 1) / 4") == Linear(Fraction(1, 2), {})
    """
    tree = tree_of(text)
    try:
        return None if tree is None else evaluated(tree, unknowns)
    except (ArithmeticError, ValueError):
        return None


def numbers_in(text: str) -> list[int]:
    """The whole numbers that an expression is made of, as often as they stand there.

    Example: numbers_in("3 * (3 + 10)") == [3, 3, 10]
    """
    tree = tree_of(text)
    nodes = [] if tree is None else list(ast.walk(tree))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is int]


@lru_cache(maxsize=4096)
def tree_of(text: str) -> ast.expr | None:
    if len(text) > LONGEST:
        return None
    written = _PRODUCT.sub("*", text.strip().translate(_SIGNS))
    try:
        return ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def evaluated(node: ast.expr, unknowns: str) -> Linear:
    """ValueError for anything but linear arithmetic, ZeroDivisionError for a division by 0."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Linear(Fraction(str(value)), {})
        case ast.Name(id=name) if name in unknowns and len(name) == 1:
            return Linear(Fraction(0), {name: Fraction(1)})
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return scaled(evaluated(operand, unknowns), Fraction(-1))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return evaluated(operand, unknowns)
        case ast.BinOp(left=left, op=operator, right=right):
            return combined(evaluated(left, unknowns), operator, evaluated(right, unknowns))
    raise ValueError(f"no linear arithmetic: {ast.dump(node)}")


def combined(left: Linear, operator: ast.operator, right: Linear) -> Linear:
    match operator:
        case ast.Add():
            return total(left, right)
        case ast.Sub():
            return total(left, scaled(right, Fraction(-1)))
        case ast.Mult() if not left.of:
            return scaled(right, left.constant)
        case ast.Mult() if not right.of:
            return scaled(left, right.constant)
        case ast.Div() if not right.of:
            return scaled(left, 1 / right.constant)
    raise ValueError("not linear")


def scaled(x: Linear, factor: Fraction) -> Linear:
    return Linear(x.constant * factor, {name: f * factor for name, f in x.of.items() if factor})


def total(x: Linear, y: Linear) -> Linear:
    of = {name: x.of.get(name, Fraction(0)) + y.of.get(name, Fraction(0)) for name in x.of | y.of}
    return Linear(x.constant + y.constant, {name: factor for name, factor in of.items() if factor})
