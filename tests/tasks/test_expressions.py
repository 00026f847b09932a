import operator
import re
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.tasks.countdown import (
    MAX_EXPRESSION_CHARS,
    LinearExpression,
    convert_latex,
    extract_numbers,
    parse_linear,
)

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        (" 3 + 4 * 2 ", 11),
        ("(3 + 4) * 2", 14),
        ("1 / 3 + 1 / 6", Fraction(1, 2)),
        ("-3 + 10", 7),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("2(3 + 4)", 14),
        ("(1 + 1)(2 + 2)", 8),
        ("8 \u00d7 3 \u00f7 4 \u2212 1", 5),
        ("\uff08\uff11\uff14\uff0d\uff11\uff09\u00d7\uff12", 26),
        ("143.00000000000000000001 - 143", Fraction(1, 10**20)),  # as a float it is 0
    ],
)
def test_values_by_hand(text, value):
    assert parse_linear(text) == LinearExpression(Fraction(value), {})


def test_random_expressions_are_evaluated_exactly():
    rng = Random(0)

    def grown(depth):
        """Return a random expression and its value."""
        if depth == 0:
            n = rng.randint(1, 20)
            return str(n), Fraction(n)
        (one, x), (other, y) = grown(depth - 1), grown(depth - 1)
        sign = rng.choice("+-*/") if y else "+"
        return f"({one} {sign} {other})", OPERATIONS[sign](x, y)

    for _ in range(200):
        text, value = grown(rng.randint(1, 3))
        assert parse_linear(text) == LinearExpression(value, {})


@pytest.mark.parametrize(
    ("text", "constant", "of"),
    [
        ("2a + 3", 3, {"a": 2}),
        ("-7 + 4 + b", -3, {"b": 1}),
        ("2(a - b) / 4", 0, {"a": Fraction(1, 2), "b": Fraction(-1, 2)}),
        ("a * 3 - 3a", 0, {}),
        ("-x", 0, {"x": -1}),
    ],
)
def test_unknowns_have_coefficients(text, constant, of):
    assert parse_linear(text, "abx") == LinearExpression(Fraction(constant), {k: Fraction(v) for k, v in of.items()})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seven",
        "1 / 0",
        "1 / (2 - 2)",
        "2 ** 3",
        "9 // 2",
        "9 % 2",
        "a * a",
        "1 / a",
        "c + 1",
        "abs(3)",
        "__import__('os').system('true')",
        "[1]",
        "1, 2",
        "True",
        "'3'",
        "3 if 1 else 4",
        "0x10",
        "1e3",
        "1E3",
        "0X10",
        "0B11",
        "1_0",
        "2j",
        "2J",
        "~3",
        "not 3",
        "1 and 2",
        "1 in 2",
        "9" * 199 + "**",
        "03",
        "(" * 150 + "1" + ")" * 49,
        "1" + "+1" * MAX_EXPRESSION_CHARS,
        "9" * 150 + "**" + "9" * 40,
        "lambda: 3",
        "1 == 1",
        "\x00",
        "a.b",
        "ab",
    ],
)
def test_invalid_expressions_are_not_parsed(text):
    assert parse_linear(text, "ab") is None


def test_repeated_numbers_are_listed_each_time():
    assert sorted(extract_numbers("3 * (3 + 10) - 4(2)")) == [2, 3, 3, 4, 10]
    assert extract_numbers("2.5 + 1") is None
    assert extract_numbers("2.0 + 1") is None
    assert extract_numbers("0. + .5") is None
    assert extract_numbers("1_0 + 2") == extract_numbers("2 +") == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"11 \times \left(14 - 1\right)", 143),
        (r"$11\cdot{(14-1)}$", 143),
        (r"\(8 \div 4\,\)", 2),
        (r"\frac{1}{3} + \dfrac{\frac{1}{2}}{3}", Fraction(1, 2)),
        ("`2 * 3`", 6),
        (r"\frac" * 20, None),
    ],
)
def test_latex_arithmetic_is_parsed(text, value):
    assert parse_linear(convert_latex(text)) == (None if value is None else LinearExpression(Fraction(value), {}))


@given(st.text(alphabet="0123456789. +-*/()eExXjJ_~abo\u00d7\u2212", max_size=30))
def test_parsed_expressions_use_only_the_listed_numbers(text):
    """Check against an independent reader: every run of digits is a number, and only signs and spaces stand between
    them.
    """
    listed = extract_numbers(text)
    if parse_linear(text) is not None and listed is not None:
        plain_signs = text.replace("\u00d7", "*").replace("\u2212", "-")
        assert sorted(listed) == sorted(map(int, re.findall(r"\d+", plain_signs)))
        assert set(plain_signs) <= set("0123456789 +-*/()")
