import operator
from fractions import Fraction
from random import Random

import pytest

from pellucid.tasks.expressions import LONGEST, Linear, linear, numbers_in

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
    ],
)
def test_values_by_hand(text, value):
    assert linear(text) == Linear(Fraction(value), {})


def test_values_of_random_expressions_are_those_of_exact_arithmetic():
    rng = Random(0)

    def grown(depth):
        """An expression and its value."""
        if depth == 0:
            n = rng.randint(1, 20)
            return str(n), Fraction(n)
        (one, x), (other, y) = grown(depth - 1), grown(depth - 1)
        sign = rng.choice("+-*/") if y else "+"
        return f"({one} {sign} {other})", OPERATIONS[sign](x, y)

    for _ in range(200):
        text, value = grown(rng.randint(1, 3))
        assert linear(text) == Linear(value, {})


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
def test_unknowns_have_factors(text, constant, of):
    assert linear(text, "abx") == Linear(Fraction(constant), {k: Fraction(v) for k, v in of.items()})


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
        "03",
        "(" * 150 + "1" + ")" * 49,
        "1" + "+1" * LONGEST,
        "9" * 150 + "**" + "9" * 40,
        "lambda: 3",
        "1 == 1",
        "\x00",
        "a.b",
        "ab",
    ],
)
def test_anything_else_is_no_expression(text):
    assert linear(text, "ab") is None


def test_numbers_are_listed_as_often_as_they_stand_there():
    assert sorted(numbers_in("3 * (3 + 10) - 4(2)")) == [2, 3, 3, 4, 10]
    assert numbers_in("2.5 + 1") == [1]
    assert numbers_in("2 +") == []
