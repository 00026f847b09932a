"""Test the reward `math`: the table of answer pairs, formulas in prose, and refused computations."""

from __future__ import annotations

from fractions import Fraction

import pytest
from math_pairs import is_right, rows

from pellucid.rewards import math
from pellucid.rewards.math import (
    MAX_BRACKET_DEPTH,
    MAX_FORMULA_SYMBOLS,
    NormalizedFormula,
    count_symbols,
    extract_conclusion,
    is_computable,
    is_words,
    measure_bracket_depth,
    normalize_formula,
    parse_plain_number,
    states_formula,
)

TABLE = rows()


def test_table_has_at_least_350_pairs_of_each_verdict():
    assert min(sum(row.equal == equal for row in TABLE) for equal in (True, False)) >= 350
    assert len({(row.gold, row.completion) for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("kind", dict.fromkeys(row.kind for row in TABLE))
def test_all_pairs_are_graded_correctly_except_known_ones(kind):
    of_kind = [row for row in TABLE if row.kind == kind]
    assert [row for row in of_kind if not is_right(row)] == [row for row in of_kind if row.known]


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("", ""),
        ("no idea", ""),
        ("18", "18"),
        ("3!", "3!"),
        ("It is 3!", "3"),
        ("She makes 18 dollars", "18"),
        ("So x = 3.", "x = 3"),
        ("It is x^2 + 1, not 7x", ""),
        ("either 3 or 5", "3 or 5"),
        ("$1$ and $2$, or $3$", "1, 2, 3"),
        ("$1$ and so on, $2$", "2"),
        ("$9 \\cdot 2 = 18$, that is 18", "18"),
        ("not $3$", ""),
        ("not 3 but 4", "4"),
        (r"\[ x = \frac{1}{2} \]", r"x = \frac{1}{2}"),
        ("#### 1,080", "1,080"),
        ("答案是18个", "18"),
        ("the variable x", "x"),
    ],
)
def test_conclusion_is_extracted_if_no_answer_is_marked(text, formula):
    assert extract_conclusion(text).strip(" ,.") == formula


@pytest.mark.parametrize(
    ("text", "body", "unit"),
    [
        ("$90^\\circ$.", "90", "degrees"),
        ("5%", "5", "%"),
        (r"\$1,000", "1,000", ""),
        (r"8\text{ m}^2", "8", "meter 2"),
        ("8 square meters", "8", "meter 2"),
        ("18 dollars", "18", ""),
        ("1 000", "1000", ""),
        ("1\u00bd", r"1\frac{1}{2}", ""),
        ("6.02e23", r"6.02 \times 10^{23}", ""),
        ("10\u207b", "10\u207b", ""),
        ("x\u00b2\u00b3", "x^{23}", ""),
        ("3 or 5", "3, 5", ""),
        ("2 xy", "2 xy", ""),
        ("3 pi", r"3 \pi", ""),
    ],
)
def test_formula_is_normalized_to_latex_without_its_unit(text, body, unit):
    found = normalize_formula(text)
    assert (found.body.replace(" ", ""), found.unit) == (body.replace(" ", ""), unit)


@pytest.mark.parametrize("gold", ["yes", "no", "Monday", r"\text{up}", "A", "(B)", "no solution", "even", "是"])
def test_words_are_compared_as_text(gold):
    assert is_words(gold)


@pytest.mark.parametrize("gold", ["x", "xy", "ab", "pi", "3 dollars", "x + y", "2ab", r"\pi", "some $ or other", "5"])
def test_letters_that_are_factors_are_not_words(gold):
    assert not is_words(gold)


@pytest.mark.parametrize(
    "body",
    [
        "9^{9^{9^9}}",
        "9^9^9^9",
        "9**9**9",
        "2^{99999}",
        "(9^{9999})^{9999}",
        "x^{2^{3}}",
        "7^{9^9x^0}",
        "(a+b+c)^{99}",
        "999999!!!",
        "9!!",
        "1000!",
        "((9!)!)!",
        "(9^9)!",
        r"\binom{99999}{500}",
        r"\sum_{i=1}^{9} i",
        r"\int_0^1 x",
        "1:2:1:2:1:2",
        "1/2/1/2/1/2",
        "|1|2|3|4|5|",
        "5%" * 6,
        "f(x)" * 5,
        "[1, 2",
        "3)(",
        "(" * (MAX_BRACKET_DEPTH + 1) + "7" + ")" * (MAX_BRACKET_DEPTH + 1),
        "1+" * MAX_FORMULA_SYMBOLS,
    ],
)
def test_unbounded_formula_is_refused_before_computation(monkeypatch, body):
    """`parse_formula` is patched, so that a formula that reaches sympy fails the test."""
    states_formula("7", "8")
    monkeypatch.setattr(math, "parse_formula", lambda body: pytest.fail(f"computes {body}") if body != "7" else [body])
    assert not is_computable(body, "7")
    assert states_formula(rf"\boxed{{{body}}}", "7") is False


@pytest.mark.parametrize(
    "body",
    ["2^{2024}", "20!", "(n-1)!", "n!", r"\frac{10!}{5!5!}", "e^{-x^2}", "x^{n+1}", "[0, 1)", r"\left\{x\right.", ""],
)
def test_bounded_formula_is_computable(body):
    assert is_computable(body, "7")


def test_formula_may_be_as_complex_as_the_gold_answer():
    deep, long = "{" * 6 + "7" + "}" * 6, "+".join(["x"] * MAX_FORMULA_SYMBOLS)
    for gold in (deep, long, "(x+1)^{99}", r"\sum_{i=1}^{9} i"):
        assert is_computable(gold, gold)
        assert not is_computable(gold, "7")
    assert (measure_bracket_depth("(a)(b(c))"), count_symbols(r"\frac{1}{23}")) == (2, 7)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("7", 7),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"3 \times 10^{2}", 300),
        ("5k", None),
        ("(1,234)", None),
        ("3x", None),
    ],
)
def test_plain_numbers_are_compared_without_sympy(body, number):
    assert parse_plain_number(body) == number


def test_expressions_with_different_variables_differ():
    """This holds even if they are equal, because simplifying (a+b+c+d)^12 - 7 takes a minute."""
    assert states_formula(r"\boxed{\frac{x}{x}}", "1") is False
    assert states_formula(r"\boxed{\frac{4x}{2}}", "2x") is True


def test_unreadable_gold_answer_does_not_apply():
    assert states_formula("7", "some $ or other") is None
    assert states_formula("7", "9^{9^{9^9}}") is None
    assert normalize_formula("") == NormalizedFormula("", "")
