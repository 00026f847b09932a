"""Decide whether a completion states the formula that is the gold answer.

This file extracts the answer, rewrites its numbers, units and signs in LaTeX that math-verify reads, and refuses what
would take forever to compute. It compares words, numbers and constants itself, exactly, and lists, intervals and unions
piece by piece. math-verify parses formulas and compares the rest: expressions with unknowns, equations, matrices.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import regex  # as in answers.py

from pellucid.rewards.answers import (
    extract_gold_answer,
    extract_marked_answer,
    normalize_to_ascii,
    parse_only_number,
    strip_thought,
)
from pellucid.utils.plugins import import_extra

_MIN_ROUNDED_PLACES = 6
"""With at least this many decimal places, a rounded decimal equals the exact number: 0.333333 for 1/3."""
_MAX_ROUNDING_ERROR = Fraction(1, 10**5)
"""The largest error of such a decimal, relative to the exact number: 0.0000003 is not 1/3000000."""
_MIN_COMPARED_DIGITS = 100
"""Constants such as \\sqrt{2} are compared to this many digits, or more if exponents are large."""
_MAX_COMPARED_DIGITS = 4000
_SYMPY_ERRORS = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Errors by which sympy says that it cannot evaluate a formula."""
_MAX_COMPARED_PAIRS = 36
"""The most pairs of pieces of two lists that are compared by math-verify."""
_MAX_SEARCHED_CHARACTERS = 20_000
"""How many characters at the end of a completion are searched if no answer is marked."""
MAX_ANSWER_CHARACTERS = 1000
"""The most characters of an answer."""

_FORMULA_WORDS_PATTERN = r"sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infinity|mod|or|and"
_DELIMITED_FORMULA = regex.compile(
    r"\$\$[^$]++\$\$|(?<![\\\d])\$[^$\n]+(?<!\\)\$|\\\((?:[^\\\n]|\\(?![()]))*+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]"
)
_CONNECTIVES = ("and", "or", ",", ", and", ", or")
_WORD = re.compile(
    rf"(?:(?<![A-Za-z\\{{_^])(?!(?:{_FORMULA_WORDS_PATTERN})(?![A-Za-z]))[A-Za-z]{{2,}}(?:['\u2019][A-Za-z]+)*"
    r"|[\u2e80-\u9fff\uac00-\ud7af])[,:]?|[.;!?](?=\s)|[\n\u3002]|#+|:(?=\s)"
)
_NEGATION = re.compile(
    r"(?:\bnot|n't|\bnever|\bneither|\bnor|\bcannot|\bwithout)(?:\s+(?:be|equal|equals|to|a|the|exactly))*\s*\Z"
)
_ANSWER_IS = re.compile(
    r"(?:\A|[.!?:,;\n]\s*|\b(?:so|thus|hence|therefore|and|then)\s+)(?:the\s+)?(?:final\s+|correct\s+)?answer\s*"
    r"(?:is|:|=|equals|is\s+equal\s+to)\s*:?\s*(?P<answer>[^\n]+?)\s*\Z",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NUMBER_WITH_BASE = re.compile(r"(-?[0-9A-Fa-f]+)_\{?(\d{1,2})\}?")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_APPROXIMATELY = re.compile(r"(?<!\\not)\\(?:approx(?:eq)?|simeq|doteq)(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:neq?|approx|sim|not|equiv)(?![A-Za-z])|!=|~")


def states_formula(text: str, gold: str) -> bool | None:
    """Return whether a completion states the gold answer; None if the gold answer cannot be read.

    Example: states_formula("So $x = \\\\frac{2}{4}$.", "0.5"); not states_formula("<answer>3x</answer>", "3")
    """
    gold = strip_answer_sentence(extract_gold_answer(gold))
    marked, text_after_thought = extract_marked_answer(text), strip_thought(text)[-_MAX_SEARCHED_CHARACTERS:]
    if is_words(gold):
        return _states_words(text_after_thought, marked, gold)
    expected = normalize_formula(gold)
    body = expected.body
    if parse_plain_number(body) is None and not (
        "$" not in body.replace(r"\$", "") and is_computable(body, allowed=body) and parse_formula(body)
    ):
        return None
    found = extract_conclusion(text_after_thought) if marked is None else marked
    found = strip_answer_sentence(found) if marked is not None and len(found) <= MAX_ANSWER_CHARACTERS else found
    return len(found) <= MAX_ANSWER_CHARACTERS and _are_equal(normalize_formula(found), expected)


@lru_cache(maxsize=1024)
def strip_answer_sentence(gold: str) -> str:
    """Return the formula of a gold answer such as "The answer is 0.5"; any other text as it is."""
    match = _ANSWER_IS.search(gold) if "nswer" in gold or "NSWER" in gold else None
    return match["answer"] if match else gold


def _are_equal(found: NormalizedFormula, expected: NormalizedFormula) -> bool:
    """Return whether two formulas are equal. One may lack a unit; two units must agree.

    If only one formula has a percent sign, 50% equals both 50 and 0.5.
    """
    if not found.body:
        return False
    for one, other in ((found, expected), (expected, found)):
        if one.has_currency and other.unit in _NON_CURRENCY_UNITS:
            return False
    if found.unit != expected.unit and found.unit and expected.unit:
        return False
    if _are_equal_without_units(found, expected):
        return True
    if found.unit == expected.unit or "%" not in (found.unit, expected.unit):
        return False
    one, other = (
        _replace_body(side, rf"\frac{{{side.body}}}{{100}}") if side.unit == "%" else side for side in (found, expected)
    )
    return _are_equal_without_units(one, other)


_NON_CURRENCY_UNITS = ("%", "degrees")
"""Units that contradict a currency."""


def _replace_body(side: NormalizedFormula, body: str) -> NormalizedFormula:
    return side._replace(body=body, range="", unknown="")


def _are_equal_without_units(found: NormalizedFormula, expected: NormalizedFormula) -> bool:
    one, other = found.body, expected.body
    if one.split() == other.split():
        return True
    for check in (_compare_numbers, _compare_in_base):
        if (verdict := check(one, other)) is not None:
            return verdict
    if not is_computable(one, allowed=other):
        return False
    for check_sides in (_compare_approximation, _compare_ranges, _compare_structures):
        if (verdict := check_sides(found, expected)) is not None:
            return verdict
    return _compare_formulas(one, other)


def _compare_numbers(found: str, expected: str) -> bool | None:
    """Return whether two plain numbers are equal; None if either is not one."""
    x, y = parse_plain_number(found), parse_plain_number(expected)
    if x is None or y is None:
        return None
    if x == y:
        return True
    sides = (found, y, expected), (expected, x, found)
    return any("." not in ratio and _is_rounded(decimal, exact) for decimal, exact, ratio in sides)


def _compare_structures(found: NormalizedFormula, expected: NormalizedFormula) -> bool | None:
    """Return whether two lists or sets are equal; False for formulas of different kinds, None for other formulas.

    Kinds differ by a relation such as !=, which math-verify drops, or by adjacent numbers, which it joins.
    """
    one, other = found.body, expected.body
    if bool(_RELATION.search(one)) != bool(_RELATION.search(other)) or re.search(r"\d\s+\.?\d", one):
        return False
    return _compare_pieces(one, other)


def _compare_formulas(found: str, expected: str) -> bool:
    has_sides = "=" not in expected and "," not in found
    sides = re.split(r"(?<![<>!:])=(?!=)", found) if has_sides else [found]
    # The last side of a chain of equations is the answer; a false chain, such as 4 = 3, has none.
    constant = [side for side in sides if not re.search("[A-Za-z]", _COMMAND.sub("", side))]
    if not all(_verify_formula(side, constant[-1]) for side in constant[:-1]):
        return False
    if len(sides) > 1 and constant and sides[-1] == constant[-1]:
        return _verify_formula(sides[-1], expected)
    return _verify_formula(found, expected)


def _verify_formula(found: str, expected: str) -> bool:
    """Return whether two formulas are equal: constants exactly, anything else as math-verify compares it."""
    one, other = parse_formula(found), parse_formula(expected)
    if not _are_comparable(one, other):
        return False
    # Constants with these exponents differ within this many digits.
    exponents = [int(n) for n in re.findall(r"\^\s*\{?\s*-?(\d{1,5})", f"{found} {expected}")]
    digits = min(_MAX_COMPARED_DIGITS, _MIN_COMPARED_DIGITS + 3 * max(exponents, default=0))
    constants = _compare_constants(found, one, expected, other, digits)
    if constants is not None:
        return constants
    _, verify = load_math_verify()
    # Its numeric comparison is absolute: a difference below 10^-digits counts as none.
    return bool(verify(other, one, numeric_precision=digits, timeout_seconds=None))


def _compare_constants(found: str, one: Sequence[Any], expected: str, other: Sequence[Any], digits: int) -> bool | None:
    """Return whether two constants are equal, or one is the other rounded; None if either is no constant."""
    x, y = (_evaluate_constant(side) for side in (one, other))
    if x is None or y is None:
        return None
    if x.is_Rational and y.is_Rational:
        return bool(x == y)
    if x.is_infinite or y.is_infinite:
        return bool(x == y)
    sympy = import_extra("sympy", "data", 'reward "math"')
    try:
        x_value, y_value = (sympy.N(side, digits, maxn=2 * digits) for side in (x, y))
        if x_value.is_Float and y_value.is_Float:
            exact = Fraction(str(x_value)), Fraction(str(y_value))
            if _is_rounded(found, exact[1]) or _is_rounded(expected, exact[0]):
                return True
        size, difference = max(abs(x_value), abs(y_value)), abs(x_value - y_value)
        return bool(difference <= size * sympy.Float(10, digits) ** (10 - digits))
    except _SYMPY_ERRORS:
        return None


def _is_rounded(decimal: str, exact: Fraction) -> bool:
    """Return whether a decimal of at least `_MIN_ROUNDED_PLACES` places is a number rounded at its last place."""
    places, value = decimal.partition(".")[2], parse_plain_number(decimal)
    if value is None or not places.isdigit() or len(places) < _MIN_ROUNDED_PLACES:
        return False
    error = abs(value - exact)
    return 2 * error <= Fraction(1, 10 ** len(places)) and error <= _MAX_ROUNDING_ERROR * abs(exact)


def _evaluate_constant(formula: Sequence[Any]) -> Any:
    """Return the sympy value of a parsed constant; None if it has unknowns or is no expression."""
    sympy = import_extra("sympy", "data", 'reward "math"')
    if not formula or not isinstance(formula[0], sympy.Expr) or formula[0].free_symbols:
        return None
    try:
        value = formula[0].doit()
    except _SYMPY_ERRORS:
        return None
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo, sympy.core.function.AppliedUndef):
        return None
    return value if value.is_number or value.is_infinite else None


def _compare_in_base(found: str, expected: str) -> bool | None:
    """Return whether two numbers agree, one or both with a base such as 101_2; None if neither has one."""
    one, other = (_NUMBER_WITH_BASE.fullmatch("".join(side.split())) for side in (found, expected))
    if one and other:
        return (one[1].lower(), one[2]) == (other[1].lower(), other[2])
    if other:  # the question has asked for this base
        return "".join(found.split()).lower() == other[1].lower()
    value = parse_plain_number(expected)
    if one and value is not None and 2 <= int(one[2]) <= 36:
        try:
            return value == int(one[1], int(one[2]))
        except ValueError:  # the base has no such digit
            return False
    return None


def _compare_approximation(found: NormalizedFormula, expected: NormalizedFormula) -> bool | None:
    """Return whether a side of "\\pi \\approx 3.14" is the gold answer, and both agree; None without such a sign."""
    sides = [side.strip() for side in _APPROXIMATELY.split(found.body)]
    if len(sides) == 1 or _APPROXIMATELY.search(expected.body):
        return None
    if len(sides) != 2 or not all(sides):
        return False
    exact, decimal = sides[0].rpartition("=")[2].strip(), parse_plain_number(sides[1])
    value = _evaluate_constant(parse_formula(exact)) if exact else None
    if value is None:
        return re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+", exact) is not None and _are_equal_without_units(
            _replace_body(expected, sides[1]), expected
        )
    if decimal is None:
        return False
    places = len(sides[1].partition(".")[2]) if "." in sides[1] else 0
    near = import_extra("sympy", "data", 'reward "math"').N(value, 30 + places)
    is_real = near.is_Float or near.is_Rational
    if not is_real or 2 * abs(Fraction(str(near)) - decimal) > Fraction(1, 10**places):
        return False
    return any(_are_equal_without_units(_replace_body(expected, side), expected) for side in (exact, sides[1]))


def _compare_ranges(found: NormalizedFormula, expected: NormalizedFormula) -> bool | None:
    """Return whether a condition and an interval, or two conditions, hold for the same numbers.

    None if neither is a condition, or if conditions that differ would have to be solved first.
    """
    if found.range and expected.range:
        same_bounds = found.unknown == expected.unknown and bool(_compare_pieces(found.range, expected.range))
        return True if same_bounds else None
    if not (found.range or expected.range):
        return None
    conditional, other = (found, expected) if found.range else (expected, found)
    interval = _parse_intervals(other.body)
    if interval is None:
        return None
    return bool(_compare_pieces(conditional.range, interval))


def _parse_intervals(body: str) -> str | None:
    """Return the intervals of a set such as (-5,3), "x \\in [0,1]" and \\mathbb{R}; None for anything else."""
    inside = re.sub(r"\A\s*(?:[A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])\s*", "", body).strip()
    reals = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\u211d|\(-\\infty\s*,\s*\+?\\infty\s*\))"
    if re.fullmatch(reals, inside):
        return r"(-\infty,\infty)"
    if excluded := re.fullmatch(reals + r"\s*(?:\\setminus|\\backslash|-|\\)\s*\\\{([^{},]+)\\\}", inside):
        return rf"(-\infty,{excluded[1]})\cup({excluded[1]},\infty)"
    kind, pieces = _split_pieces(inside) or ("", ())
    return inside if kind == "cup" and all(len(piece.parts) == 2 for piece in pieces) else None


class _Piece(NamedTuple):
    """A bracketed list."""

    brackets: str
    parts: tuple[str, ...]


def _split_pieces(body: str) -> tuple[str, Sequence[Any]] | None:
    """Return a kind and its pieces: the intervals of a "cup", the elements of a "set" or "list"; else None."""
    body = body.strip()
    if r"\cup" in body or body.startswith(("(", "[", r"\{")):
        found = [_parse_bracketed(part.strip()) for part in re.split(r"\\cup(?![A-Za-z])", body)]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) == len(found) == 1 and pieces[0].brackets == "{}":
            return "set", pieces[0].parts
        if len(pieces) == len(found) and (len(pieces) > 1 or len(pieces[0].parts) > 1):
            return "cup", pieces
    parts = _split_at_commas(body)
    return ("list", parts) if len(parts) > 1 else None


def _parse_bracketed(part: str) -> _Piece | None:
    """Return the elements of a list in brackets that close at its end; None if they do not."""
    opening, closing = (2 if part.startswith(r"\{") else 1), (2 if part.endswith(r"\}") else 1)
    brackets = part[:opening][-1:] + part[-1:]
    if len(part) < 3 or brackets not in ("()", "[]", "(]", "[)", "{}") or (brackets == "{}" and opening + closing != 4):
        return None
    inside = part[opening:-closing]
    parts = _split_at_commas(inside)
    return _Piece(brackets, tuple(parts)) if all(parts) and _has_no_stray_bracket(inside) else None


def _count_open_brackets(body: str) -> list[int]:
    """Return how many brackets, of any kind, are open after each character."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in body))


def _has_no_stray_bracket(body: str) -> bool:
    """Return whether every bracket is closed by one of any kind."""
    open_counts = _count_open_brackets(body)
    return min(open_counts, default=0) >= 0 and not sum(open_counts[-1:])


def _split_at_commas(body: str) -> list[str]:
    """Split at commas and semicolons outside brackets. In a text with ", ", the comma of 1,000 does not split."""
    if ", " in body:
        body = _THOUSANDS_COMMA.sub("\0", body)
    separated = zip(body, _count_open_brackets(body), strict=True)
    parts = "".join("\n" if c in ",;" and level <= 0 else c for c, level in separated).split("\n")
    return [part.replace("\0", ",").strip() for part in parts]


def _expand_plus_minus(body: str) -> str:
    r"""Return "3, -3" for "\pm 3"; any other text as it is."""
    if body.count(r"\pm") != 1 or "," in body:
        return body
    plus = body.replace(r"\pm", "+").replace(r"\mp", "-").strip().removeprefix("+")
    return plus + ", " + body.replace(r"\pm", "-").replace(r"\mp", "+")


def _compare_pieces(found: str, expected: str) -> bool | None:
    """Return whether two lists, tuples, sets, intervals or unions have equal pieces; None if their kinds differ."""
    one, other = (_split_pieces(_expand_plus_minus(side)) for side in (found, expected))
    if one is None or other is None:
        return None
    (kind, first), (other_kind, second) = one, other
    if "cup" not in (kind, other_kind):  # a list without brackets is a set
        return _have_equal_elements(first, second)
    if kind != other_kind:
        return None if "list" in (kind, other_kind) else False
    if len(first) == len(second) == 1:
        return _are_equal_pieces(first[0], second[0])
    return len(first) == len(second) and _can_pair_all(first, second, _are_equal_pieces)


def _are_equal_pieces(one: _Piece, other: _Piece) -> bool:
    """Return whether two bracketed lists are equal: in their order, unless they are sets."""
    if one.brackets != other.brackets or len(one.parts) != len(other.parts):
        return False
    if one.brackets == "{}":
        return _have_equal_elements(one.parts, other.parts)
    return all(map(_are_equal_elements, one.parts, other.parts))


def _have_equal_elements(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two lists have the same elements, in whatever order."""
    return len(one) == len(other) and _can_pair_all(one, other, _are_equal_elements)


def _are_equal_elements(one: str, other: str) -> bool:
    return _are_equal(normalize_formula(one), normalize_formula(other))


def _can_pair_all(one: Sequence[Any], other: Sequence[Any], alike: Callable[[Any, Any], bool]) -> bool:
    """Return whether each element has its own partner. Equal texts are paired first: comparing formulas is slow."""
    rest = list(other)
    left = [each for each in one if not (each in rest and (rest.remove(each) is None))]
    if len(left) ** 2 > _MAX_COMPARED_PAIRS:
        return False
    for each in left:
        partner = next((i for i, candidate in enumerate(rest) if alike(each, candidate)), None)
        if partner is None:
            return False
        del rest[partner]
    return not rest


def parse_plain_number(body: str) -> Fraction | None:
    """Return the value of a formula that is a number alone; None if letters, brackets or signs make it more."""
    letters = re.sub(r"\\(?:[dtc]?frac|times|cdot)(?![A-Za-z])", "", body)
    return None if re.search(r"[A-Za-z()\[\]|]", letters) else parse_only_number(body)


def _states_words(text: str, marked: str | None, gold: str) -> bool:
    """Return whether a completion states these words: as its marked answer, else as its last line or its end."""
    expected = _normalize_words(_strip_to_words(gold))
    if marked is not None:
        named = re.sub(
            r"^(?:option|choice|answer)\s+", "", _strip_to_words(marked[:MAX_ANSWER_CHARACTERS]), flags=re.IGNORECASE
        )
        return _normalize_words(_strip_to_words(named)) == expected
    last = "".join(text.strip().splitlines()[-1:])[-MAX_ANSWER_CHARACTERS:]
    ending = re.split(r"(?:\b(?:is|are|on)\b|[:=])", last)[-1]
    return expected in (_normalize_words(_strip_to_words(last)), _normalize_words(_strip_to_words(ending)))


def extract_conclusion(text: str) -> str:
    """Return the last formula of a text without a marked answer, between $ signs or words; empty if negated.

    Example: extract_conclusion("She makes 18 dollars") == "18"; extract_conclusion("It is x^2 + 1.") == "x^2 + 1"
    """
    text = _remove_emphasis(text)
    start, end, formula = _find_last_delimited(text)
    spoken = _find_last_span(text, end)
    if spoken is not None and (not formula or re.search(r"\d", text[slice(*spoken)])):
        start, formula = spoken[0], text[slice(*spoken)]
        # Alone, 3! is a factorial; at the end of a sentence it is a 3.
        formula = formula.rstrip().rstrip("!?") if start else formula
    return "" if _NEGATION.search(text[max(0, start - 60) : start]) else formula


def _find_last_delimited(text: str) -> tuple[int, int, str]:
    """Return start, end and text of the last formula between delimiters. "$1$ and $2$" is one formula: "1, 2"."""
    start, end, formulas = 0, 0, list[str]()
    for match in _DELIMITED_FORMULA.finditer(text):
        if " ".join(text[end : match.start()].split()) not in _CONNECTIVES:
            start, formulas = match.start(), []
        formulas.append(_strip_formatting(match[0]))
        end = match.end()
    return start, end, ", ".join(formulas)


def _find_last_span(text: str, begin: int) -> tuple[int, int] | None:
    """Return start and end of the last stretch between words with a digit, or else with a letter; or None."""
    words = list(_WORD.finditer(text, begin))
    starts, ends = [begin, *(word.end() for word in words)], [*(word.start() for word in words), len(text)]
    for wanted in (r"\d", r"[A-Za-z]"):
        for start, end in zip(reversed(starts), reversed(ends), strict=True):
            if re.search(wanted, text[start:end]):
                return start, end
    return None


def _are_comparable(found: list[Any], expected: list[Any]) -> bool:
    """Return whether comparing is safe. Formulas with different unknowns differ, and simplifying may not end."""
    expression = import_extra("sympy", "data", 'reward "math"').Expr
    pair = (found[:1], expected[:1])
    if not all(formula and isinstance(formula[0], expression) for formula in pair):
        return True
    x, y = ({str(symbol) for symbol in formula[0].free_symbols} for formula in pair)
    return x == y


@lru_cache(maxsize=1024)
def parse_formula(body: str) -> list[Any]:
    """Return the formula as math-verify parses it, with exact decimals, and i as the imaginary unit."""
    parse, _ = load_math_verify()
    return [_make_exact(each) for each in parse(rf"\boxed{{{body}}}")]


def _make_exact(formula: Any) -> Any:
    """Return a formula of sympy with decimals as ratios and the symbol i as the imaginary unit; other things as is."""
    sympy = import_extra("sympy", "data", 'reward "math"')
    if not isinstance(formula, sympy.Expr | sympy.core.relational.Relational | sympy.MatrixBase):
        return formula
    exact: dict[Any, Any] = {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}
    exact |= {symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"}
    try:
        return formula.xreplace(exact) if exact else formula
    except _SYMPY_ERRORS:  # such as a relation that does not order complex numbers
        return formula


@cache
def load_math_verify() -> tuple[Callable[[str], list[Any]], Callable[..., bool]]:
    """Return math-verify's parse and verify, without its search for units, which takes the ab of 2ab for one."""
    library = import_extra("math_verify", "data", 'reward "math"')
    normalization = replace(library.LatexExtractionConfig().normalization_config, units=False)
    reading = [library.LatexExtractionConfig(normalization_config=normalization), library.ExprExtractionConfig()]
    # Hide its warning that its own time limits are off. They need the main thread and turn a slow comparison into a
    # silent 0; the sandbox limits the time of every reward, and reports what it stopped.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return partial(library.parse, extraction_config=reading, parsing_timeout=None), library.verify


# ---------------------------------------------------------------- formulas in the LaTeX that math-verify reads


_SIGNS = {"π": "pi", "∞": "infty", "\u00d7": "times", "÷": "div", "·": "cdot", "\u22c5": "cdot", "≤": "le", "≥": "ge"}
_SIGNS |= {"≠": "ne", "±": "pm", "\u222a": "cup", "∩": "cap", "∈": "in", "∅": "emptyset", "≈": "approx"}
_SIGNS |= {"\u03b1": "alpha", "β": "beta", "θ": "theta", "λ": "lambda"}
_LATEX_FORMS = {ord(sign): rf"\{command} " for sign, command in _SIGNS.items()}
_LATEX_FORMS |= {ord("°"): r"^\circ "} | {ord(sign): r"\$" for sign in "£€¥"}
_FULL_STOP = "\u3002"
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")

_DELIMITED = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|__(.*)__|`(.*)`|\\displaystyle\s*(.*)", re.DOTALL
)
_CURRENCY = re.compile(r"(?:\bUS\s*)?(?:\\\$|\$)\s*(?=-?\.?\d)|(?<=\d)\s*(?:\\\$|\$)\s*\Z|\b(?:USD|EUR|GBP)\s*(?=\d)")
_GROUP = r"\{((?:[^{}]++|\{(?1)\})*+)\}"
_STYLE_COMMAND = regex.compile(
    r"\\(?:mathbf|textbf|boldsymbol|pmb|bm|bf|mathit|textit|mathsf|textsf|mathtt|texttt|mathnormal|emph|underline|ensuremath"
    rf"|textcolor\s*\{{[a-z]+\}}|color\s*\{{[a-z]+\}})\s*{_GROUP}"
)
"""Commands that change only how their argument looks."""
_TEXT_COMMAND = regex.compile(rf"\\(?:text|textrm|textnormal|mathrm|rm|mbox|hbox|operatorname)\s*{_GROUP}")
_SIZE_COMMAND = re.compile(
    r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lrm]?)(?![A-Za-z])(?!\s*\.)|\\color\s*\{[a-z]+\}"
)
_TAG = re.compile(r"</?(?:b|i|u|p|em|strong|span|code|sub|sup|br|mark|center)\s*/?>", re.IGNORECASE)
_EMPHASIS = re.compile(
    r"(?<![A-Za-z0-9)}\s])\*\*+|\*\*+(?![A-Za-z0-9(+\-\s])|(?:(?<=\s)|\A)\*\*+(?=\S)|(?<=\S)\*\*+(?=\s|\Z)"
    r"|(?<![A-Za-z0-9)}])__|__(?![A-Za-z0-9{(])"
)
_CODE_SPELLINGS = [
    (re.compile(r"\b(?:math|np|numpy|sympy|sp)\.(?=[a-z])"), ""),
    (re.compile(r"\b(?:Fraction|Rational)\(\s*(-?\w+)\s*,\s*(-?\w+)\s*\)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\s*\*\*\s*(-?[A-Za-z0-9.]+)(?![A-Za-z0-9.]|\s*\*\*)"), r"^{\1}"),
    (re.compile(r"\s*\*\*\s*"), "^"),
    (re.compile(r"(?<![A-Za-z\\])(pi|infty|infinity|alpha|beta|theta|lambda)(?![A-Za-z(])"), r"\\\1 "),
    (re.compile(r"(?<![A-Za-z\\])(?:oo|inf)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\infinity(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<![A-Za-z\\])(?:a?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp)(?=\s*\()"), r"\\\g<0>"),
    (re.compile(r"(?:>=|=>)"), r"\\ge "),
    (re.compile(r"(?:<=|=<)"), r"\\le "),
    (re.compile(r"!="), r"\\ne "),
]
"""Spellings of programming languages, and the LaTeX that they stand for."""
_CODE_CALLS = [
    (regex.compile(r"(?<![A-Za-z\\])sqrt\s*(\(((?:[^()]++|(?1))*+)\))"), r"\\sqrt{\2}"),
    (regex.compile(r"(?<![A-Za-z\\])abs\s*(\(((?:[^()]++|(?1))*+)\))"), r"|\2|"),
    (regex.compile(r"\^\s*(\(((?:[^()]++|(?1))*+)\))"), r"^{\2}"),
]
"""Calls in programming languages, whose arguments may be calls."""
_MAX_NESTED_CALLS = 3
"""How deep calls and commands may be nested."""
_APPROXIMATION_PREFIX = re.compile(
    r"\A\s*(?:\\(?:approx(?:eq)?|thickapprox|sim(?:eq)?|cong|doteq)(?![A-Za-z])|~|=)\s*"
    r"|\A\s*(?:approximately|approx\.?|roughly|about|around)\s+(?=[-\\$\d.])",
    re.IGNORECASE,
)
_CONJUNCTION = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:or|and)\s*\}|\b(?:or|and)\b)\s*")
_SEPARATOR = r"(?:\\[,:; ]|\{,\}|\{\\,\}|[ '_]|~)"
_SCALES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"(?<=\d)\s*thousand\b"), r" \\times 10^{3}"),
    (re.compile(r"(?<=\d)\s*million\b"), r" \\times 10^{6}"),
    (re.compile(r"(?<=\d)\s*billion\b"), r" \\times 10^{9}"),
    (
        re.compile(
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?)\s*[({]?\s*(-?\d+(?:\.\d+)?)"
            r"\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?"
        ),
        r"\1(\\frac{\2\\pi}{180})",
    ),
]
"""Number words and degrees of angles, which would be read as units, and the LaTeX that they stand for."""
_NUMBER_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (
        re.compile(rf"(?<![\d.,])(?<!\d[ ])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d|{_SEPARATOR}\d)"),
        lambda grouped: re.sub(r"\D", "", grouped[0]),
    ),
    (re.compile(r"(\\[dtc]?frac)\s*(\d)\s*(\d)(?!\d)|(\\[dt]?binom)\s*(\d)\s*(\d)(?!\d)"), r"\1\4{\2\5}{\3\6}"),
    (
        re.compile(
            r"\\log\s*_\s*(?:\{\s*([^{}]+?)\s*\}|([A-Za-z0-9]))"
            r"\s*(?:\{([^{}]+)\}|(\d+(?:\.\d+)?|[A-Za-z]))(?![A-Za-z0-9{])"
        ),
        r"\\log_{\1\2}{\3\4}",
    ),
    (
        re.compile(
            r"(?<![\d.,/^{_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/])"
            r"|(?<![\d.,/^{_])(\d+)\s*\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)"
        ),
        r"\1\4\\frac{\2\5}{\3\6}",
    ),
    (re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\dA-Za-z])"), r" \\times 10^{\1}"),
    # math-verify reads an i that stands alone as the imaginary unit, but the i of 3i as an unknown.
    (re.compile(r"(?<=\d)i(?![A-Za-z])"), " i"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
]
"""Other spellings of numbers, and the one that math-verify reads."""
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"""(?<=[\d})])(?:\s|~|\\[,;:!\ ])*
    (?: (?P<percent>\\?%|(?:\\text\s*\{\s*)?(?:%|\\%|per\s?cent(?:age)?)\s*\}?)
      | (?P<degrees>\^\s*\{?\s*\\circ\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF])?|\\degree
          |(?:\\text\s*\{\s*)?degrees?(?:\s+(?:Celsius|Fahrenheit))?\s*\}?)
      | (?: \\(?:text(?:rm|it)?|mathrm|mbox|operatorname)\s*\{\s*(?P<dressed>[A-Za-z][A-Za-z./\ ]*)\}
          | (?<=[ ])(?P<words>[A-Za-z]{2,}(?:[ /][A-Za-z]+){0,3}\.?|[mgshL]) | (?P<glued>cm|mm|km|kg|ml|mg|ft|mph) )
        (?:\s*\^\s*\{?(?P<power>\d)\}?)? )\s*\Z""",
    re.VERBOSE,
)
_NON_UNIT_WORD = re.compile(r"(?<!\S)(?:pi|sin|cos|tan|log|ln|exp|sqrt|or|and|not|to|is|in|mod|times)(?!\S)")
_UNIT_NAMES = {"cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "g": "gram", "kg": "kilogram"}
_UNIT_NAMES |= {"ft": "foot", "feet": "foot", "inches": "inch", "s": "second", "sec": "second", "min": "minute"}
_UNIT_NAMES |= {"h": "hour", "hr": "hour", "mph": "mile per hour", "sq": "square", "dollar": "", "buck": ""}


class NormalizedFormula(NamedTuple):
    """A formula in LaTeX, and its unit: empty, "%", "degrees", or words."""

    body: str
    unit: str
    has_currency: bool = False
    """Whether it has a currency sign."""
    range: str = ""
    """The intervals that a condition such as -5 < x < 3 stands for; empty if it is no condition."""
    unknown: str = ""
    """The unknown of that condition."""


@lru_cache(maxsize=1024)
def normalize_formula(text: str) -> NormalizedFormula:
    """Return the formula and the unit of a text, in the LaTeX that math-verify reads.

    Example: normalize_formula("US$1,000").body == "1,000"; normalize_formula("90\u00b0")[:2] == ("90", "degrees")
    """
    raised = _SUPERSCRIPT.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", normalize_to_ascii(text))
    body = _remove_styles(_strip_formatting(" ".join(_TAG.sub("", raised).translate(_LATEX_FORMS).split())))
    spelled = _convert_code_spelling(_APPROXIMATION_PREFIX.sub("", _strip_formatting(body)))
    body = _replace_all(_SCALES, _CURRENCY.sub("", spelled))
    has_currency = _CURRENCY.search(spelled) is not None
    unknown, range_ = _parse_condition(body)
    body, unit = _split_unit(_CONJUNCTION.sub(", ", body).strip())
    return NormalizedFormula(_replace_all(_NUMBER_SPELLINGS, body).strip(), unit, has_currency, range_, unknown)


def _replace_all(table: Iterable[tuple[Any, Any]], text: str) -> str:
    """Replace the patterns of a table by their replacements, one after the other."""
    for pattern, replacement in table:
        text = pattern.sub(replacement, text)
    return text


def _remove_styles(body: str) -> str:
    """Remove commands that change only the looks, and text boxes around numbers: \\mathbf{5}, \\text{12}."""
    if "\\" not in body:
        return body
    body = _SIZE_COMMAND.sub("", body)
    for _ in range(_MAX_NESTED_CALLS):
        body = _STYLE_COMMAND.sub(r"\1", body)
        body = _TEXT_COMMAND.sub(lambda m: m[1] if any(c.isdigit() or c == "\\" for c in m[1]) else m[0], body)
        body = re.sub(r"\\mathrm\s*\{\s*i\s*\}|\\[ij]math(?![A-Za-z])", "i", body)
    return body


def _convert_code_spelling(body: str) -> str:
    """Replace the spelling of programming languages, such as pi/2, x**2 and sqrt(3), by LaTeX."""
    body = _replace_all(_CODE_SPELLINGS, body)
    for _ in range(_MAX_NESTED_CALLS if "(" in body else 0):
        body = _replace_all(_CODE_CALLS, body)
    return re.sub(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))", r"\\sqrt{\1\2}", body)


_SIGN = re.compile(r"\\(?:leqslant|geqslant|leq?|geq?|lt|gt|ne|neq)(?![A-Za-z])|[<>]")
_DIRECTIONS = {"<": "<", "lt": "<", "le": "<=", "leq": "<=", "leqslant": "<="}
_DIRECTIONS |= {">": ">", "gt": ">", "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!="}
_MIRRORED_SIGNS = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_UNKNOWN = re.compile(r"(?!\\(?:pi|infty|emptyset)(?![A-Za-z]))(?:[A-Za-z]|\\[a-z]+)")
_OR = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*or\s*\}|\bor\b|\\(?:lor|vee|cup)(?![A-Za-z]))\s*")
_AND = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*and\s*\}|\band\b|\\(?:land|wedge)(?![A-Za-z]))\s*")
_SET_BUILDER = re.compile(
    r"\\?\\\{\s*(?:[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|:|\||\\vert|\\colon)\s*)(.*?)\\\}", re.DOTALL
)


def _parse_condition(body: str) -> tuple[str, str]:
    """Return the unknown of a condition such as -5 < x < 3 and its intervals; empty if it is none."""
    if not _SIGN.search(body) or "=" in body:
        return "", ""
    if inside := _SET_BUILDER.fullmatch(body.strip()):
        body = inside[1]
    unknowns, pieces = set[str](), list[str]()
    for alternative in _OR.split(body):
        bounds = [_parse_simple_condition(each) for each in _AND.split(alternative)]
        found = bounds[0] if len(bounds) == 1 else _intersect_bounds(bounds)
        if found is None:
            return "", ""
        unknowns.add(found[0])
        pieces += found[1]
    if len(unknowns) != 1:
        return "", ""
    return unknowns.pop(), r"\cup".join(pieces)


_ConditionIntervals = tuple[str, list[str]]


def _parse_simple_condition(text: str) -> _ConditionIntervals | None:
    """Return unknown and intervals of one inequality, or of a chain a < x < b; None if it is neither."""
    sides = [side.strip().strip("$").strip() for side in _SIGN.split(text)]
    signs = [_DIRECTIONS[sign[0].lstrip("\\")] for sign in _SIGN.finditer(text)]
    if not all(sides) or "," in text or not 2 <= len(sides) <= 3:
        return None
    if len(sides) == 3:
        low = _parse_inequality(sides[1], _MIRRORED_SIGNS[signs[0]], sides[0])
        return _intersect_bounds([low, _parse_inequality(sides[1], signs[1], sides[2])])
    left, right = sides
    if _is_unknown(left):
        return _parse_inequality(left, signs[0], right)
    return _parse_inequality(right, _MIRRORED_SIGNS[signs[0]], left)


def _parse_inequality(unknown: str, sign: str, limit: str) -> _ConditionIntervals | None:
    """Return unknown and intervals of x < a, x != a or |x| < a; else None, as for |x| < -a, where a may be negative."""
    name, is_absolute = unknown.strip("| "), unknown.startswith("|")
    limit_lacks_unknown = re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", limit) is None
    if not _is_unknown(unknown) or not limit_lacks_unknown or (is_absolute and (sign == "!=" or limit.startswith("-"))):
        return None
    opening, closing = ("[", "]") if sign in ("<=", ">=") else ("(", ")")
    low = f"-{limit}" if is_absolute else limit
    below, above = rf"(-\infty,{low}{closing}", rf"{opening}{limit},\infty)"
    if sign[0] == "<":
        return name, [f"{opening}{low},{limit}{closing}" if is_absolute else below]
    return name, [below, above] if is_absolute or sign == "!=" else [above]


def _intersect_bounds(bounds: list[_ConditionIntervals | None]) -> _ConditionIntervals | None:
    """Return the interval of "x > -5 and x < 3"; None if conditions are not one lower and one upper bound."""
    if len(bounds) != 2 or any(bound is None or len(bound[1]) != 1 for bound in bounds):
        return None
    (one, (first,)), (other, (second,)) = (bound for bound in bounds if bound is not None)
    low, high = (first, second) if first.endswith(r",\infty)") else (second, first)
    if one != other or not low.endswith(r",\infty)") or not high.startswith(r"(-\infty,"):
        return None
    return one, [low.removesuffix(r"\infty)") + high.removeprefix(r"(-\infty,")]


def _is_unknown(side: str) -> bool:
    return _UNKNOWN.fullmatch(side.strip("| ") if side.startswith("|") and side.endswith("|") else side) is not None


def _strip_formatting(text: str) -> str:
    """Remove math delimiters, emphasis in Markdown and HTML, and punctuation at the end."""
    text = _TAG.sub("", text) if "<" in text else text
    while True:
        text = text.strip().rstrip(".,;:" + _FULL_STOP).strip().lstrip("#:").strip()
        match = _DELIMITED.fullmatch(text)
        inside = next((group for group in match.groups() if group is not None), "") if match else ""
        if not match or "$" in inside or (text[0] == "\\" and inside.count(r"\(") + inside.count(r"\[")):
            return text
        text = inside


def _split_unit(body: str) -> tuple[str, str]:
    """Return a formula without its unit, and the unit; empty if there is none."""
    match = _UNIT.search(body)
    if match is None:
        return body, ""
    words = (match["dressed"] or match["words"] or match["glued"] or "").strip(". ").lower()
    if _NON_UNIT_WORD.search(words) or (match["words"] and _is_product(words)):
        return body, ""
    if match["percent"] or match["degrees"]:
        unit = "%" if match["percent"] else "degrees"
    else:
        names = (word.removesuffix("s") if len(word) > 2 else word for word in words.split())
        unit = " ".join([*filter(None, (_UNIT_NAMES.get(name, name) for name in names)), *(match["power"] or "")])
        unit = re.sub(r"^square (.*)", r"\1 2", unit)
    return body[: match.start()].strip(), unit


_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?",
    re.IGNORECASE,
)
_NAME_WITH_NUMBERS = re.compile(r"[^\W\d_]{3,}\.?(?:[\s,'-]+[^\W_]+\.?)*")
"""A word and then words and numbers: Route 66, Friday, June 3."""
_FORMULA_WORD = re.compile(
    r"sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min|mod|gcd|lcm|det|abs|approximately|about|roughly|around"
    r"|arcsin|arccos|arctan|infinity|all|inf|answer|usd|eur|gbp|rs",
    re.IGNORECASE,
)


def _remove_emphasis(text: str) -> str:
    """Remove the marks of emphasis in Markdown and HTML from a text, but no ** that is a power."""
    text = _TAG.sub("", text) if "<" in text else text
    return _EMPHASIS.sub("", text) if "**" in text or "__" in text else text


def _normalize_words(words: str) -> str:
    """Return words without case; with digits, also without commas; dates also without order and "th"."""
    folded = " ".join(words.replace(",", " ").split()).casefold() if re.search(r"\d", words) else words.casefold()
    if not _MONTH.search(folded) or not re.search(r"\d", folded):
        return folded
    short = _MONTH.sub(lambda match: match[0][:3], re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", folded))
    return " ".join(sorted(word for word in short.split() if word not in ("of", "the")))


def is_sentence(gold: str) -> bool:
    """Return whether a gold answer looks like a sentence from which the answer must be cut: four words or more."""
    return len(re.findall(r"(?<![A-Za-z\\])[A-Za-z]{2,}", _strip_formatting(gold))) >= 4


def _is_name_or_date(bare: str) -> bool:
    """Return whether a text with numbers is a name or a date, such as June 20 or Route 66, and no formula."""
    if re.search(r"[\\^_={}+*/<>|$%]", bare) or not re.search(r"\d", bare):
        return False
    if _MONTH.search(bare) and re.fullmatch(
        r"(?:\d+(?:st|nd|rd|th)?|[^\W\d_]+\.?)(?:[\s,-]+(?:\d+(?:st|nd|rd|th)?|[^\W\d_]+\.?))+", bare
    ):
        return True
    first = re.split(r"[\W\d_]", bare, maxsplit=1)[0]
    return not (is_sentence(bare) or _FORMULA_WORD.fullmatch(first)) and bool(_NAME_WITH_NUMBERS.fullmatch(bare))


def is_words(gold: str) -> bool:
    """Return whether a gold answer is text: words, or a choice from A to H. A product such as xy is a formula."""
    bare = _strip_to_words(gold)
    if re.fullmatch(r"[A-H\u2e80-\u9fff\uac00-\ud7af]", bare) or _is_name_or_date(bare):
        return True
    if len(bare) > 1 and _TEXT.fullmatch(gold.strip(" $.")) and not re.search(r"\d", bare):
        return True
    if not re.fullmatch(r"[^\W\d_]{2,}(?:[\s,'-]+[^\W\d_]+)*", bare) or bare.lower() in ("pi", "infinity"):
        return False
    return not _is_product(bare)


def _is_product(word: str) -> bool:
    """Return whether letters are a product of unknowns, such as xyz and ab, and not a word or a unit."""
    letters = set(word)
    ordered = letters <= set("wxyz") or list(word) == sorted(letters)
    return (
        len(word) <= 3
        and word.isascii()
        and word.islower()
        and ordered
        and not (letters & set("eilo") or word in _UNIT_NAMES)
    )


def _strip_to_words(text: str) -> str:
    """Return a text without formatting and quotation marks, or the letter of a choice such as (B)."""
    bare = _strip_formatting(_TEXT.sub(r"\1", _remove_emphasis(text))).strip("*_`'\"$ ." + _FULL_STOP)
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", bare)
    return choice[1] if choice else " ".join(bare.split())


# ---------------------------------------------------------------- the cost of a formula: 9^{9^{9^9}} is too expensive


MAX_FORMULA_SYMBOLS = 60
"""The most symbols of a formula, where a command or a number counts as one; a longer formula is no answer."""
MAX_BRACKET_DEPTH = 4
"""The deepest nesting of brackets: parsing takes longer with each level."""
_MAX_CHAINED_SIGNS = 4
"""The most uses of an ambiguous sign: each further one in 1/2/1/2 multiplies the parsing time."""
_MAX_EXPONENT = 10_000
_MAX_POLYNOMIAL_EXPONENT = 12
"""The largest exponent of a bracket that has letters in it."""

_CHAINED_SIGNS = [re.compile(sign) for sign in ("/", ":", r"\|", "%", r"[A-Za-z]\(")]
_UNBOUNDED_OPERATOR = re.compile(r"\\(?:sum|prod|int|iint|iiint|oint|lim)(?![A-Za-z])")
_SMALL_FACTORIAL = re.compile(r"(?:(?<![\d.])\d{1,3}|(?<![A-Za-z])[a-z]|\([^()!^]{1,20}\))!(?!!)")
_LARGE_BINOMIAL = re.compile(r"\\[dt]?binom[^A-Za-z]*\d{4}")


def is_computable(body: str, allowed: str) -> bool:
    """Return whether comparing a formula takes bounded time. Most limits rise with the gold answer, `allowed`.

    Example: is_computable("2^{10}", "7"); not is_computable("9^{9^{9^9}}", "7"); not is_computable("999999!!!", "7")
    """
    if count_symbols(body) > max(MAX_FORMULA_SYMBOLS, 2 * count_symbols(allowed)) or measure_bracket_depth(body) > max(
        MAX_BRACKET_DEPTH, measure_bracket_depth(allowed)
    ):
        return False
    if _has_balanced_brackets(allowed) and not _has_balanced_brackets(body):
        return False
    if any(len(sign.findall(body)) > max(_MAX_CHAINED_SIGNS, len(sign.findall(allowed))) for sign in _CHAINED_SIGNS):
        return False
    if (_UNBOUNDED_OPERATOR.search(body) and not _UNBOUNDED_OPERATOR.search(allowed)) or _LARGE_BINOMIAL.search(body):
        return False
    largest_polynomial = max(
        [_MAX_POLYNOMIAL_EXPONENT, *(int(n) for n in re.findall(r"(?<!\d)\d{1,4}(?!\d)", allowed))]
    )
    # An exclamation mark that is left after removing small factorials belongs to a large one.
    small = "!" not in _SMALL_FACTORIAL.sub("", body.replace("!=", ""))
    return small and _has_computable_powers(body.replace("**", "^"), largest_polynomial)


def count_symbols(body: str) -> int:
    return len(re.findall(r"\\[A-Za-z]+|\d+|\S", body))


def measure_bracket_depth(body: str) -> int:
    return max(0, max(_count_open_brackets(body), default=0))


def _has_balanced_brackets(body: str) -> bool:
    """Return whether every bracket is closed by one of any kind, as in [0, 1); so are `\\left.` and `\\right.`."""
    return _has_no_stray_bracket(body.replace(r"\left.", "(").replace(r"\right.", ")"))


def _has_computable_powers(body: str, largest_polynomial: int) -> bool:
    """Return whether each exponent, and the product of those above 9, is small enough to compute."""
    product = 1
    for position in (i for i, c in enumerate(body) if c == "^"):
        exponent = _find_exponent(body, position + 1)
        digits = re.findall(r"\d+", exponent)
        # An exponent may hold the power of a letter, which is not computed: e^{-x^2}.
        tower = re.search(r"(?<![A-Za-z])\s*\^", exponent) or (not re.search("[A-Za-z]", exponent) and "^" in exponent)
        if tower or "!" in exponent or len("".join(digits)) > len(str(_MAX_EXPONENT)):
            return False
        if not digits:
            continue
        largest = max(map(int, digits))
        bracket = body[:position].rstrip()[-1:] in (")", "}", "]") and re.search(
            "[A-Za-z]", _COMMAND.sub("", body[:position])
        )
        if largest > (largest_polynomial if bracket else _MAX_EXPONENT):
            return False
        product *= max(1, largest if largest > 9 else 1)
    return product <= _MAX_EXPONENT * 100


def _find_exponent(body: str, start: int) -> str:
    """Return an exponent: a group in brackets, or everything up to the next sign."""
    rest = body[start:].lstrip()
    if not rest.startswith(("{", "(")):
        run = re.match(r"[-+]?(?:\\[A-Za-z]+|[\w.]+)(?:\s*\^.*)?", rest)
        return run[0] if run else ""
    levels = accumulate((c in "({") - (c in ")}") for c in rest)
    return next((rest[1:i] for i, level in enumerate(levels) if level == 0), rest)
