"""Decide whether a completion states the formula that is the gold answer.

This file extracts the answer and refuses what would take for ever to compute. It compares words, numbers and constants
itself, exactly, and lists, intervals and unions piece by piece. math-verify parses formulas and compares the rest:
expressions with unknowns, equations, matrices. latex.py puts numbers, units and signs into LaTeX that it reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import regex  # as in answers.py

from pellucid.machine.extras import extra
from pellucid.rewards.answers import after_thinking, gold_in, marked_answer, only_number
from pellucid.rewards.bounds import computable
from pellucid.rewards.latex import (
    Written,
    bare_words,
    date_key,
    is_words,
    undressed,
    without_emphasis,
    written,
)

SAME_PLACES = 6
"""With at least this many decimal places, a rounded decimal equals the exact number: 0.333333 for 1/3."""
LARGEST_ERROR = Fraction(1, 10**5)
"""The largest error of such a decimal, relative to the exact number: 0.0000003 is not 1/3000000."""
DIGITS = 100
"""Constants such as \\sqrt{2} are compared to so many digits, and more where exponents are large."""
MOST_DIGITS = 4000
FAULTS = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Errors by which sympy says that it cannot evaluate a formula."""
MOST_PAIRS = 36
"""The most pairs of pieces of two lists that are compared by math-verify."""
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
_ANSWER_IS = re.compile(
    r"(?:\A|[.!?:,;\n]\s*|\b(?:so|thus|hence|therefore|and|then)\s+)(?:the\s+)?(?:final\s+|correct\s+)?answer\s*"
    r"(?:is|:|=|equals|is\s+equal\s+to)\s*:?\s*(?P<answer>[^\n]+?)\s*\Z",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_BASE = re.compile(r"(-?[0-9A-Fa-f]+)_\{?(\d{1,2})\}?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_APPROXIMATELY = re.compile(r"(?<!\\not)\\(?:approx(?:eq)?|simeq|doteq)(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:neq?|approx|sim|not|equiv)(?![A-Za-z])|!=|~")


def states_formula(text: str, gold: str) -> bool | None:
    """Whether a completion states the gold answer; None where the gold answer cannot be read.

    Example: states_formula("So $x = \\\\frac{2}{4}$.", "0.5"); not states_formula("<answer>3x</answer>", "3")
    """
    gold = stated_in_sentence(gold_in(gold))
    marked, behind = marked_answer(text), after_thinking(text)[-LONGEST_PROSE:]
    if is_words(gold):
        return states_words(behind, marked, gold)
    expected = written(gold)
    if plain_number(expected.body) is None and not readable(expected.body):
        return None
    found = conclusion(behind) if marked is None else marked
    found = stated_in_sentence(found) if marked is not None and len(found) <= LONGEST else found
    return len(found) <= LONGEST and equal(written(found), expected)


@lru_cache(maxsize=1024)
def stated_in_sentence(gold: str) -> str:
    """Return the formula of a gold answer such as "The answer is 0.5"; any other text as it is."""
    match = _ANSWER_IS.search(gold) if "nswer" in gold or "NSWER" in gold else None
    return match["answer"] if match else gold


def readable(body: str) -> bool:
    """Whether math-verify can read the formula of a gold answer, within a bounded time."""
    stray = "$" in body.replace(r"\$", "")
    return not stray and computable(body, allowed=body) and bool(parsed(body))


def equal(found: Written, expected: Written) -> bool:
    """Whether two formulas are equal. Either may lack its unit; units that are both there must agree.

    A percentage is its amount or a hundredth of it, where only one side has the sign.
    """
    if not found.body:
        return False
    if (found.has_currency and expected.unit in PURE) or (expected.has_currency and found.unit in PURE):
        return False
    if found.unit != expected.unit and found.unit and expected.unit:
        return False
    if same(found, expected):
        return True
    if found.unit == expected.unit or "%" not in (found.unit, expected.unit):
        return False
    one, other = (replace_body(side, hundredth(side.body)) if side.unit == "%" else side for side in (found, expected))
    return same(one, other)


PURE = ("%", "degrees")
"""Units that contradict a currency."""


def replace_body(side: Written, body: str) -> Written:
    return side._replace(body=body, range="", unknown="")


def same(found: Written, expected: Written) -> bool:
    """Whether two formulas without their units are equal."""
    one, other = found.body, expected.body
    if one.split() == other.split():
        return True
    quick = first_verdict(check(one, other) for check in (same_number, same_in_base))
    if quick is not None or not computable(one, allowed=other):
        return bool(quick)
    structured = first_verdict(check(found, expected) for check in (same_approximately, same_range, same_structure))
    return same_formula(one, other) if structured is None else structured


def first_verdict(verdicts: Iterable[bool | None]) -> bool | None:
    """Return the first verdict that is no None; None where there is none."""
    return next((verdict for verdict in verdicts if verdict is not None), None)


def same_number(found: str, expected: str) -> bool | None:
    """Whether two plain numbers are equal; None where either is none."""
    x, y = plain_number(found), plain_number(expected)
    if x is None or y is None:
        return None
    return x == y or stands_for(found, x, expected, y) or stands_for(expected, y, found, x)


def same_approximately(found: Written, expected: Written) -> bool | None:
    """Whether an answer with an approximation sign states the gold answer; None where there is no such sign."""
    if not _APPROXIMATELY.search(found.body) or _APPROXIMATELY.search(expected.body):
        return None
    return approximates(found.body, expected)


def same_structure(found: Written, expected: Written) -> bool | None:
    """Whether two lists or sets are equal; False for formulas of different kinds, None for other formulas."""
    return same_pieces(found.body, expected.body) if same_kind(found.body, expected.body) else False


def same_formula(found: str, expected: str) -> bool:
    sides = sides_of(found) if "=" not in expected else [found]
    # The last side of a chain of equations is the answer; a false chain, such as 4 = 3, is none.
    constant = [side for side in sides if not re.search("[A-Za-z]", _COMMAND.sub("", side))]
    if not all(verified(side, constant[-1]) for side in constant[:-1]):
        return False
    if len(sides) > 1 and constant and sides[-1] == constant[-1] and "=" not in expected:
        return verified(sides[-1], expected)
    return verified(found, expected)


def verified(found: str, expected: str) -> bool:
    """Whether two formulas are equal: constants exactly, anything else as math-verify compares it."""
    one, other = parsed(found), parsed(expected)
    if not comparable(one, other):
        return False
    digits = digits_of(found, expected)
    constants = equal_constants(found, one, expected, other, digits)
    if constants is not None:
        return constants
    _, verify = math_verify()
    # Its numeric comparison is absolute: a difference below 10^-digits counts as none.
    return bool(verify(other, one, numeric_precision=digits, timeout_seconds=None))


def digits_of(*bodies: str) -> int:
    """Return how many digits tell constants apart that have these exponents."""
    exponents = [int(n) for body in bodies for n in re.findall(r"\^\s*\{?\s*-?(\d{1,5})", body)]
    return min(MOST_DIGITS, DIGITS + 3 * max(exponents, default=0))


def equal_constants(found: str, one: Sequence[Any], expected: str, other: Sequence[Any], digits: int) -> bool | None:
    """Whether two constants are equal; None where either is no constant.

    A plain decimal of SAME_PLACES places equals the number that it is rounded from.
    """
    x, y = (constant(side) for side in (one, other))
    if x is None or y is None:
        return None
    if x.is_Rational and y.is_Rational:
        return bool(x == y)
    for decimal, exact in ((found, y), (expected, x)):
        value = plain_number(decimal)
        if value is not None and (places := decimal.partition(".")[2]).isdigit() and len(places) >= SAME_PLACES:
            return rounded(value, exact, len(places))
    if x.is_infinite or y.is_infinite:
        return bool(x == y)
    sympy = extra("sympy", "data", 'reward "math"')
    try:
        near, far = (sympy.N(side, digits, maxn=2 * digits) for side in (x, y))
        size, difference = max(abs(near), abs(far)), abs(near - far)
        return bool(difference <= size * sympy.Float(10, digits) ** (10 - digits))
    except FAULTS:
        return None


def rounded(decimal: Fraction, exact: Any, places: int) -> bool:
    """Whether a decimal is a constant of sympy rounded at so many places."""
    sympy = extra("sympy", "data", 'reward "math"')
    value = sympy.N(exact, places + 30)
    if not value.is_Float:
        return False
    error = abs(Fraction(str(value)) - decimal)
    return 2 * error <= Fraction(1, 10**places) and error <= LARGEST_ERROR * abs(decimal)


def constant(formula: Sequence[Any]) -> Any:
    """Return the evaluated constant of sympy that was parsed; None where it has unknowns or is no expression."""
    sympy = extra("sympy", "data", 'reward "math"')
    if not formula or not isinstance(formula[0], sympy.Expr) or formula[0].free_symbols:
        return None
    try:
        value = formula[0].doit()
    except FAULTS:
        return None
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo, sympy.core.function.AppliedUndef):
        return None
    return value if value.is_number or value.is_infinite else None


def same_in_base(found: str, expected: str) -> bool | None:
    """Whether numbers with a base such as 101_2 agree, of which one may lack the base; None where none has one."""
    one, other = (_BASE.fullmatch("".join(side.split())) for side in (found, expected))
    if one and other:
        return (one[1].lower(), one[2]) == (other[1].lower(), other[2])
    if other:  # the question has asked for this base
        return "".join(found.split()).lower() == other[1].lower()
    value = plain_number(expected)
    if one and value is not None and 2 <= int(one[2]) <= 36:
        digits = re.fullmatch("-?[0-9a-z]+", one[1].lower())
        return (
            digits is not None
            and all(int(c, 36) < int(one[2]) for c in one[1].lstrip("-"))
            and value == int(one[1], int(one[2]))
        )
    return None


def approximates(found: str, expected: Written) -> bool:
    """Whether "x \\approx 3.14" or "\\pi \\approx 3.14" states the gold answer: by either side, where both agree."""
    sides = [side.strip() for side in _APPROXIMATELY.split(found)]
    if len(sides) != 2 or not all(sides):
        return False
    exact, decimal = sides[0].rpartition("=")[2].strip(), plain_number(sides[1])
    value = constant(parsed(exact)) if exact else None
    if value is None:
        return re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+", exact) is not None and same(
            replace_body(expected, sides[1]), expected
        )
    if decimal is None:
        return False
    places = len(sides[1].partition(".")[2]) if "." in sides[1] else 0
    near = extra("sympy", "data", 'reward "math"').N(value, 30 + places)
    if not near.is_Float and not near.is_Rational:
        return False
    if 2 * abs(Fraction(str(near)) - decimal) > Fraction(1, 10**places):
        return False
    return any(same(replace_body(expected, side), expected) for side in (exact, sides[1]))


def same_range(found: Written, expected: Written) -> bool | None:
    """Whether a condition and an interval, or two conditions, hold for the same numbers.

    None where this does not say: neither is a condition, or a condition that must be solved first differs.
    """
    if found.range and expected.range:
        same_bounds = found.unknown == expected.unknown and bool(same_pieces(found.range, expected.range))
        return True if same_bounds else None
    if not (found.range or expected.range):
        return None
    conditional, other = (found, expected) if found.range else (expected, found)
    interval = interval_of(other.body)
    if interval is None:
        return None
    return bool(same_pieces(conditional.range, interval))


def interval_of(body: str) -> str | None:
    """Return the intervals of a set such as (-5,3), "x \\in [0,1]" and \\mathbb{R}; None for anything else."""
    inside = re.sub(r"\A\s*(?:[A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])\s*", "", body).strip()
    reals = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\u211d|\(-\\infty\s*,\s*\+?\\infty\s*\))"
    if re.fullmatch(reals, inside):
        return r"(-\infty,\infty)"
    if left_out := re.fullmatch(reals + r"\s*(?:\\setminus|\\backslash|-|\\)\s*\\\{([^{},]+)\\\}", inside):
        return rf"(-\infty,{left_out[1]})\cup({left_out[1]},\infty)"
    pieces = pieces_of(inside)
    return inside if pieces and all(len(piece.parts) == 2 for piece in pieces[1]) and pieces[0] == "cup" else None


class Piece(NamedTuple):
    """A bracketed list, or a part of a list without brackets."""

    brackets: str
    parts: tuple[str, ...]


def pieces_of(body: str) -> tuple[str, list[Piece]] | None:
    """Return the pieces of a union of intervals, "cup", or of a list, "list"; None where it is neither.

    Example: pieces_of("[0,1) \\cup \\{3\\}") == ("cup", [Piece("[)", ("0", "1")), Piece("{}", ("3",))])
    """
    body = body.strip()
    if r"\cup" in body or body.startswith(("(", "[", r"\{")):
        found = [bracketed(part.strip()) for part in re.split(r"\\cup(?![A-Za-z])", body)]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) == len(found) and (len(pieces) > 1 or len(pieces[0].parts) > 1 or pieces[0].brackets == "{}"):
            return "cup", pieces
    parts = split_at_commas(body)
    return ("list", [Piece("", (part,)) for part in parts]) if len(parts) > 1 else None


def bracketed(part: str) -> Piece | None:
    """Return the elements of a list in brackets that close at its end; None where they do not."""
    opening, closing = (2 if part.startswith(r"\{") else 1), (2 if part.endswith(r"\}") else 1)
    brackets = part[:opening][-1:] + part[-1:]
    if len(part) < 3 or brackets not in ("()", "[]", "(]", "[)", "{}") or (brackets == "{}" and opening + closing != 4):
        return None
    inside = part[opening:-closing]
    parts = split_at_commas(inside)
    return Piece(brackets, tuple(parts)) if all(parts) and level_of(inside) else None


def level_of(body: str) -> bool:
    """Whether no bracket in a text closes one that was opened before it."""
    level = 0
    for c in body:
        level += (c in "([{") - (c in ")]}")
        if level < 0:
            return False
    return level == 0


def split_at_commas(body: str) -> list[str]:
    """Split at commas outside of brackets. Where there are commas with a space, those in 1,000 group thousands."""
    if ", " in body:
        body = _THOUSANDS.sub("\0", body)
    parts, level, start = list[str](), 0, 0
    for place, c in enumerate(body):
        level += (c in "([{") - (c in ")]}")
        if c in ",;" and level <= 0:
            parts.append(body[start:place])
            start = place + 1
    return [part.replace("\0", ",").strip() for part in (*parts, body[start:])]


def both_signs(body: str) -> str:
    r"""Return "3, -3" for "\pm 3"; any other text as it is."""
    if body.count(r"\pm") != 1 or "," in body:
        return body
    plus = body.replace(r"\pm", "+").replace(r"\mp", "-").strip().removeprefix("+")
    return plus + ", " + body.replace(r"\pm", "-").replace(r"\mp", "+")


def same_pieces(found: str, expected: str) -> bool | None:
    """Whether two lists, tuples, sets, intervals or unions have equal pieces; None where they are not of one kind."""
    if (
        not any(sign in found and sign in expected for sign in (",", ";", r"\{", r"\pm"))
        and r"\pm" not in found + expected
    ):
        return None
    one, other = (pieces_of(both_signs(side)) for side in (found, expected))
    if one is None or other is None:
        return None
    (kind, first), (other_kind, second) = one, other
    lists = elements_of(first), elements_of(second)
    if "list" in (kind, other_kind):  # a list without brackets is a set
        return None if lists[0] is None or lists[1] is None else same_elements(lists[0], lists[1])
    if len(first) == len(second) == 1:
        return same_piece(first[0], second[0])
    return len(first) == len(second) and matched(first, second, same_piece)


def elements_of(pieces: Sequence[Piece]) -> tuple[str, ...] | None:
    """Return the elements of a set or of a list without brackets; None for anything else."""
    if len(pieces) == 1 and pieces[0].brackets == "{}":
        return pieces[0].parts
    return None if any(piece.brackets for piece in pieces) else tuple(piece.parts[0] for piece in pieces)


def same_piece(one: Piece, other: Piece) -> bool:
    """Whether two bracketed lists are equal: in their order, unless they are sets."""
    if one.brackets != other.brackets or len(one.parts) != len(other.parts):
        return False
    if one.brackets == "{}":
        return same_elements(one.parts, other.parts)
    return all(map(same_element, one.parts, other.parts))


def same_elements(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two lists have the same elements, in whatever order."""
    return len(one) == len(other) and matched(one, other, same_element)


def same_element(one: str, other: str) -> bool:
    return equal(written(one), written(other))


def matched(one: Sequence[Any], other: Sequence[Any], alike: Callable[[Any, Any], bool]) -> bool:
    """Whether each element has a partner of its own. Equal texts are paired first, as comparing formulas is slow."""
    rest = list(other)
    left = [each for each in one if not (each in rest and (rest.remove(each) is None))]
    if len(left) ** 2 > MOST_PAIRS:
        return False
    for each in left:
        partner = next((place for place, candidate in enumerate(rest) if alike(each, candidate)), None)
        if partner is None:
            return False
        del rest[partner]
    return not rest


def same_kind(found: str, expected: str) -> bool:
    """Whether both or neither hold a relation such as != or ~, and `found` holds no adjacent numbers.

    math-verify drops such relations and joins such numbers.
    """
    alike = bool(_RELATION.search(found)) == bool(_RELATION.search(expected))
    return alike and not re.search(r"\d\s+\.?\d", found)


def stands_for(decimal: str, value: Fraction, ratio: str, exact: Fraction) -> bool:
    """Whether a decimal of at least SAME_PLACES places is the ratio rounded at its last place."""
    places = decimal.partition(".")[2]
    if not places.isdigit() or len(places) < SAME_PLACES or "." in ratio:
        return False
    error = abs(value - exact)
    return 2 * error <= Fraction(1, 10 ** len(places)) and error <= LARGEST_ERROR * abs(exact)


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
    expected = date_key(bare_words(gold))
    if marked is not None:
        named = re.sub(r"^(?:option|choice|answer)\s+", "", bare_words(marked[:LONGEST]), flags=re.IGNORECASE)
        return date_key(bare_words(named)) == expected
    last = "".join(text.strip().splitlines()[-1:])[-LONGEST:]
    said = re.split(r"(?:\b(?:is|are|on)\b|[:=])", last)[-1]
    return expected in (date_key(bare_words(last)), date_key(bare_words(said)))


def conclusion(text: str) -> str:
    """Return the last formula of a text without a marked answer, between $ and $ or words; empty where it is negated.

    Example: conclusion("She makes 18 dollars") == "18"; conclusion("It is x^2 + 1.") == "x^2 + 1"
    """
    text = without_emphasis(text)
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
    """Return the formula as math-verify parses it, with exact decimals, and i as the imaginary unit."""
    parse, _ = math_verify()
    return [exactly(each) for each in parse(rf"\boxed{{{body}}}")]


def exactly(formula: Any) -> Any:
    """Return a formula of sympy with decimals as ratios and the symbol i as the imaginary unit; other things as is."""
    sympy = extra("sympy", "data", 'reward "math"')
    if not isinstance(formula, sympy.Expr | sympy.core.relational.Relational | sympy.MatrixBase):
        return formula
    exact: dict[Any, Any] = {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"}
    try:
        return formula.xreplace(exact) if exact else formula
    except FAULTS:  # such as a relation that does not order complex numbers
        return formula


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
