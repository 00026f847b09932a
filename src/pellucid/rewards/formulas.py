"""Decide whether a completion states the formula that is the gold answer; math-verify does the comparing.

This file extracts the answer, puts numbers, units and signs into LaTeX that math-verify reads as they were meant,
compares plain numbers and words by itself, and refuses what would take for ever to compute.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any

import regex  # as in answers.py

from pellucid.machine.extras import extra
from pellucid.rewards.answers import after_thinking, marked_answer, only_number
from pellucid.rewards.bounds import computable
from pellucid.rewards.latex import Written, bare_words, is_words, undressed, written

SAME_PLACES = 6
"""With at least this many decimal places, a rounded decimal equals the ratio: 0.333333 for 1/3."""
LONGEST_PROSE = 20_000
"""How many characters at the end of a completion are searched where no answer is marked."""
LONGEST = 1000
"""The most characters of an answer."""

_WORDS_OF_FORMULAS = r"sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infinity|mod|or|and"
_SHOWN = regex.compile(
    r"\$\$[^$]++\$\$|(?<![\\\d])\$[^$\n]+(?<!\\)\$|\\\((?:[^\\\n]|\\(?![()]))*+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]"
)
_CONNECTIONS = ("and", "or", ",", ", and", ", or")
_WORD = re.compile(
    rf"(?:(?<![A-Za-z\\{{_^])(?!(?:{_WORDS_OF_FORMULAS})(?![A-Za-z]))[A-Za-z]{{2,}}(?:['\u2019][A-Za-z]+)*"
    r"|[\u2e80-\u9fff\uac00-\ud7af])[,:]?|[.;!?](?=\s)|[\n\u3002]|#+|:(?=\s)"
)
_DENIED = re.compile(
    r"(?:\bnot|n't|\bnever|\bneither|\bnor|\bcannot|\bwithout)(?:\s+(?:be|equal|equals|to|a|the|exactly))*\s*\Z"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_RELATION = re.compile(r"\\(?:neq?|approx|sim|not|equiv)(?![A-Za-z])|!=|~")


def states_formula(text: str, gold: str) -> bool | None:
    """Whether a completion states the gold answer; None where the gold answer cannot be read.

    Example: states_formula("So $x = \\\\frac{2}{4}$.", "0.5"); not states_formula("<answer>3x</answer>", "3")
    """
    marked, behind = marked_answer(text), after_thinking(text)[-LONGEST_PROSE:]
    if is_words(gold):
        return states_words(behind, marked, gold)
    expected = written(gold)
    stray = "$" in expected.body.replace(r"\$", "")
    if stray or not computable(expected.body, allowed=expected.body) or not parsed(expected.body):
        return None
    found = conclusion(behind) if marked is None else marked
    return len(found) <= LONGEST and equal(written(found), expected)


def equal(found: Written, expected: Written) -> bool:
    """Whether two formulas are equal. Either may lack the unit, but a % or a degree sign that `found` adds counts."""
    if not found.body:
        return False
    if found.unit == expected.unit or (found.unit not in ("%", "degrees") and "" in (found.unit, expected.unit)):
        if same(found.body, expected.body):
            return True
        return expected.unit == "%" and not found.unit and same(found.body, hundredth(expected.body))
    return found.unit == "%" and not expected.unit and same(hundredth(found.body), expected.body)


def same(found: str, expected: str) -> bool:
    if found.split() == expected.split():
        return True
    x, y = plain_number(found), plain_number(expected)
    if x is not None and y is not None:
        return x == y or stands_for(found, x, expected, y) or stands_for(expected, y, found, x)
    if not computable(found, allowed=expected) or not same_kind(found, expected):
        return False
    if not comparable(parsed(found), parsed(expected)):
        return False
    _, verify = math_verify()
    sides = sides_of(found) if "=" not in expected else [found]
    # The last side of a chain of equations is the answer; a false chain, such as 4 = 3, is none.
    constant = [side for side in sides if not re.search("[A-Za-z]", _COMMAND.sub("", side))]
    true = all(verify(parsed(constant[-1]), parsed(side), timeout_seconds=None) for side in constant[:-1])
    return true and bool(verify(parsed(expected), parsed(found), timeout_seconds=None))


def same_kind(found: str, expected: str) -> bool:
    """Whether both or neither hold a relation such as != or ~, and `found` holds no adjacent numbers.

    math-verify drops such relations and joins such numbers.
    """
    alike = bool(_RELATION.search(found)) == bool(_RELATION.search(expected))
    return alike and not re.search(r"\d\s+\.?\d", found)


def stands_for(decimal: str, value: Fraction, ratio: str, exact: Fraction) -> bool:
    """Whether a decimal of at least SAME_PLACES places is the ratio rounded at its last place."""
    places = decimal.partition(".")[2]
    rounds = places.isdigit() and len(places) >= SAME_PLACES and "." not in ratio
    return rounds and 2 * abs(value - exact) <= Fraction(1, 10 ** len(places))


def plain_number(body: str) -> Fraction | None:
    """Return the value of a formula that is a number alone; None where letters, brackets or signs make it more."""
    letters = re.sub(r"\\(?:[dtc]?frac|times|cdot)(?![A-Za-z])", "", body)
    return None if re.search(r"[A-Za-z()\[\]|]", letters) else only_number(body)


def sides_of(body: str) -> list[str]:
    return [body] if "," in body else re.split(r"(?<![<>!:])=(?!=)", body)


def hundredth(body: str) -> str:
    value = plain_number(body)
    return rf"\frac{{{body}}}{{100}}" if value is None else f"{(value / 100).numerator}/{(value / 100).denominator}"


def states_words(text: str, marked: str | None, gold: str) -> bool:
    """Whether a completion states these words: as its marked answer, else as its last line or the end of that."""
    expected = bare_words(gold).casefold()
    if marked is not None:
        named = re.sub(r"^(?:option|choice|answer)\s+", "", bare_words(marked[:LONGEST]), flags=re.IGNORECASE)
        return bare_words(named).casefold() == expected
    last = "".join(text.strip().splitlines()[-1:])[-LONGEST:]
    said = re.split(r"(?:\b(?:is|are)\b|[:=])", last)[-1]
    return expected in (bare_words(last).casefold(), bare_words(said).casefold())


def conclusion(text: str) -> str:
    """Return the last formula of a text without a marked answer, between $ and $ or words; empty where it is negated.

    Example: conclusion("She makes 18 dollars") == "18"; conclusion("It is x^2 + 1.") == "x^2 + 1"
    """
    start, end, formula = last_shown(text)
    spoken = last_span(text, end)
    if spoken is not None and (not formula or re.search(r"\d", text[slice(*spoken)])):
        start, formula = spoken[0], text[slice(*spoken)]
        # Alone, 3! is a factorial; at the end of a sentence it is a 3.
        formula = formula.rstrip().rstrip("!?") if start else formula
    return "" if _DENIED.search(text[max(0, start - 60) : start]) else formula


def last_shown(text: str) -> tuple[int, int, str]:
    """Return start, end and text of the last formula between delimiters. "$1$ and $2$" is one formula: "1, 2"."""
    start, end, formulas = 0, 0, list[str]()
    for match in _SHOWN.finditer(text):
        if " ".join(text[end : match.start()].split()) not in _CONNECTIONS:
            start, formulas = match.start(), []
        formulas.append(undressed(match[0]))
        end = match.end()
    return start, end, ", ".join(formulas)


def last_span(text: str, begin: int) -> tuple[int, int] | None:
    """Return start and end of the last stretch between words that has a digit, else a letter, in it; or None."""
    spans, start = [], begin
    for word in _WORD.finditer(text, begin):
        spans.append((start, word.start()))
        start = word.end()
    spans.append((start, len(text)))
    for wanted in (r"\d", r"[A-Za-z]"):
        for span in reversed(spans):
            if re.search(wanted, text[span[0] : span[1]]):
                return span
    return None


def comparable(found: list[Any], expected: list[Any]) -> bool:
    """Whether comparing is safe: expressions in different unknowns are not equal, and simplifying them may not end."""
    expression = extra("sympy", "data", 'reward "math"').Expr
    pair = (found[:1], expected[:1])
    if not all(formula and isinstance(formula[0], expression) for formula in pair):
        return True
    x, y = ({str(symbol) for symbol in formula[0].free_symbols} for formula in pair)
    return x == y


@lru_cache(maxsize=1024)
def parsed(body: str) -> list[Any]:
    parse, _ = math_verify()
    return parse(rf"\boxed{{{body}}}")


@cache
def math_verify() -> tuple[Callable[[str], list[Any]], Callable[..., bool]]:
    """Return math-verify's parse and verify, without units: it takes the ab of 2ab for one, so latex.py reads them."""
    library = extra("math_verify", "data", 'reward "math"')
    normalization = replace(library.LatexExtractionConfig().normalization_config, units=False)
    reading = [library.LatexExtractionConfig(normalization_config=normalization), library.ExprExtractionConfig()]
    # Hide its warning that its own time limits are off. They need the main thread and turn a slow comparison into a
    # silent 0; the sandbox limits the time of every reward, and reports what it stopped.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return partial(library.parse, extraction_config=reading, parsing_timeout=None), library.verify
