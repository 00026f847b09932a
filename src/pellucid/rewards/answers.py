"""Extract the answer from a completion, in time linear in its length, whatever the text."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice

import regex  # Python's own re loses matches of possessive groups before 3.11.5

MAX_NUMBER_CHARACTERS = 4000
"""The most characters of a number, and its largest power of ten: Python converts at most 4300 digits."""

_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BOX = re.compile(
    r"\\(?:f?boxed|fbox|framebox)(?![A-Za-z])\s*"
    r"(?:\{|(?P<bare>[-+]?(?:\\?[$€£¥]\s?)?(?:\d[\d.,/]*\d|\d)(?:\s?\\?%)?|\\[A-Za-z]+|[A-Za-z](?=\s*(?:[$.,)\\]|\Z))))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if chr(code) != "\uff0c"}
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f"), " ")
_VULGAR = {
    ord(c): "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", c).split("\u2044"))
    for c in map(chr, [*range(0xBC, 0xBF), *range(0x2150, 0x215F)])
}
ASCII_FORMS = _FULL_WIDTH | _DASHES | _SPACES | _VULGAR | {0x2019: "'", 0x2044: "/"}
"""A table for `str.translate`: full-width signs, dashes that mean a minus, spaces that group digits, and \u00bd."""
_FULL_WIDTH_COMMA = re.compile("(?<=[\uff10-\uff19])\uff0c(?=[\uff10-\uff19])")

_GROUPS = "|".join(
    rf"(?:{separator}\d{{3}})+" for separator in (",", "'", "_", "[ ]", "~", r"\\[,:;\ ]", r"\{,\}", r"\{\\,\}")
)
_REPEATING = re.compile(
    r"(?<![\d.,])(?P<whole>\d{0,15})\.(?P<begin>\d{0,15})"
    r"(?:\\(?:overline|bar|dot)\s*(?:\{(?P<period>\d{1,15})\}|(?P<digit>\d))(?:(?P<between>\d{0,15})\\dot\s*\{?(?P<last>\d)\}?)?"
    r"|(?<=\.)\((?P<bracketed>\d{1,15})\)(?!\s*[(\^])"
    r"|(?P<repeated>\d)(?P=repeated){2,}(?:\.\.\.|\u2026|\\[lc]?dots(?![A-Za-z])))"
)
_REPETITION_MARKS = ("\\overline", "\\bar", "dot", "...", "\u2026", ".(")
_DIGITS = rf"(?:\d{{1,3}}(?:{_GROUPS})(?!\d)|\d++)(?:\.\d++)?+"
_DECIMAL = rf"(?:{_DIGITS}|(?<![A-Za-z0-9.])\.\d++)"
_FRACTION_ARGUMENT = rf"(?:\{{\s*+-?{_DIGITS}\s*+\}}|\s*+\d)"
_NUMBER = regex.compile(
    rf"""
    (?<![A-Za-z])[A-Za-z]++\}}?(?:\s*+[\^_]\s*+(?:\{{[^{{}}]*+\}}|-?\d++))++  # m^2, x_1: part of a name, not a number
    | (?:(?P<minus>-)[ \t]*+)?+ (?:\\?[$€£¥]\s?+(?P<inner>-)?+)?+
      (?:
        (?:(?P<count>\d++)\s*+)?+ \\[dtc]?frac \s*+ (?P<over>{_FRACTION_ARGUMENT}) \s*+ (?P<under>{_FRACTION_ARGUMENT})
        | (?:(?P<whole>\d++)[ \t]++(?=[1-9]\d*+[ \t]*+/[ \t]*+\d))?+
          (?P<top>{_DECIMAL}) (?:[ \t]*+/[ \t]*+(?P<bottom>{_DECIMAL}))?+
      )
      (?P<scale>[eE][+-]?\d++ | [kKM](?![A-Za-z])
        | \s*+(?:\\times|\\cdot|[*x\u00d7\u00b7\u22c5])\s*+10\s*+(?:\^|\*\*)\s*+(?:\{{\s*+-?\d++\s*+\}}|-?\d++) )?+
      (?P<more>[)\]}}]*+\s*+(?:\^(?!\s*+\{{?\s*+\\circ)|\*\*(?=-?[\d(]))(?:\s*+\{{[^{{}}]*+\}}|[-+({{]*+\w++)?+
        | [)\]}}]*+[²³¹⁰⁴-⁹]++ | :\d[\d:.]*+ | \.\d[\d.]*+ | [ \t]*+/[ \t]*+\d[\d/]*+ )?+
    """,
    regex.VERBOSE,
)
_OPERAND = re.compile(r"[A-Za-z0-9_)\]}%]\Z")
_STATING_WORD = re.compile(r"(?:\b(?:is|are|was|be|equals?|gives|to)|[是为])\Z")
_LARGER_EXPRESSION = re.compile(
    r"(?:\\(?:[dtc]?frac|[dt]?binom|sqrt)|[}\]]\s*\{|\^|√|[A-Za-z0-9)}]_|[A-Za-z0-9)}]\*\*)\s*[({\[+-]*\s*\Z"
)
_FORMATTING = re.compile(
    r"\^\s*\{?\s*\\circ\s*\}?|\\[^A-Za-z]"
    r"|\\(?:text|mathrm|textbf|mathbf|mbox|boxed|left|right|quad|displaystyle)(?![A-Za-z])"
)
_OPERATOR = re.compile(r"[\d\\^_*+=<>|~!\u00b1\u00d7\u00f7√∞π]|(?<![A-Za-z])[/-]|[/-](?![A-Za-z])")
_ONE_LETTER_UNITS = "mgshlLNJWVACFK"


def extract_answer(text: str) -> str:
    """Return the answer of a text: the marked one, or else all text after `</think>`.

    A text whose thought never ends has no answer, whatever the thought contains.

    Example: extract_answer("It is 8. No: \\\\boxed{\\\\frac{7}{2}}") == "\\\\frac{7}{2}"
    """
    marked = extract_marked_answer(text)
    return strip_thought(text).strip() if marked is None else marked


def extract_marked_answer(text: str) -> str | None:
    """Return the last box in the final `<answer>`, else all of that tag, else the last box after `</think>`, else None.

    Example: extract_marked_answer("<answer>So \\\\boxed{7}.</answer>") == "7"
    """
    inside = find_answer_tag(text)
    box = find_last_box(strip_thought(text) if inside is None else inside)
    return inside if box is None else box


def split_thought(text: str) -> tuple[str, str | None]:
    """Split a text into its thought and the text after the last `</think>`, which is None if the thought never ends.

    The `<think>` may be missing, since a chat template wrote it. A text without either tag has no thought.

    Example: split_thought("<think>3?</think> No, 4.") == ("3?", " No, 4."); split_thought("<think>3") == ("3", None)
    """
    before, closed, behind = text.rpartition("</think>")
    if "<think>" in behind:
        return text.partition("<think>")[2].strip(), None
    if not closed:
        return "", text
    _, opened, thought = before.partition("<think>")
    return (thought if opened else before).strip(), behind


def strip_thought(text: str) -> str:
    """Return the text after the last `</think>`: the whole text without a thought, "" if the thought never ends."""
    return split_thought(text)[1] or ""


def find_last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, `\fbox{}` or `\boxed 7`; None if there is none or it stays open.

    Braces inside may be nested.

    Example: find_last_box("\\boxed{1}, no: \\boxed{x^{2}}") == "x^{2}"; find_last_box("$\\boxed 7$") == "7"
    """
    for opened in deque(_BOX.finditer(text), maxlen=1):
        if bare := opened["bare"]:
            return bare + _find_brace_arguments(text, opened.end()) if bare[0] == "\\" else bare
        end = _find_closing_brace(text, opened.end())
        return None if end is None else text[opened.end() : end].strip()
    return None


def _find_closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one right before `start`; None if it stays open."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _find_brace_arguments(text: str, start: int) -> str:
    """Return the groups in braces that follow a command directly, such as the {1}{2} of a fraction."""
    end = start
    while text[end : end + 1] == "{" and (closed := _find_closing_brace(text, end + 1)) is not None:
        end = closed + 1
    return text[start:end]


def extract_gold_answer(text: str) -> str:
    """Return the gold answer in a text that may be a whole solution: its last box, or the text after a final `####`.

    Example: extract_gold_answer("So it is $\\\\boxed{7}$.") == "7"; extract_gold_answer("3 + 4 = 7\\n#### 7") == "7"
    """
    if box := find_last_box(text):
        return box
    before, marked, behind = text.rpartition("\n####")
    return behind.strip() if marked and before.strip() and behind.strip() and "\n" not in behind.strip() else text


def find_last_number(text: str) -> Fraction | None:
    """Return the last number in the text, exactly; None if there is none, or if it cannot be read.

    These can be read: 1,080 (also with ' or a space), .5, 1/2, 1 / 2, 1 1/2, \\frac{1}{2}, 1.5e3, 3 \\times 10^4 and
    5k, with currency signs and in full width too. These cannot: 12:30, 2^{10}, 1/2/3 and \\sqrt{2}. Powers of a unit
    or variable are skipped: 8 m^2 is 8. Well-placed commas group thousands; all others separate: "1,08" and "1, 8"
    are two numbers each.

    A minus that touches a number is its sign, unless it follows a letter, a digit or a closing bracket: "7-3" ends in
    3. A minus with a space behind it is a dash after a word or number ("Total - 7"), except after "is" and the like.

    Example: find_last_number("so $1,080.50.") == Fraction(2161, 2)
    """
    plain = normalize_to_ascii(text)
    found = deque(_find_numbers(plain), maxlen=1)
    return parse_number_match(found[0], plain) if found else None


def parse_only_number(text: str) -> Fraction | None:
    """Return the number of a text with just one number, apart from a currency, a unit or words; otherwise None.

    Example: parse_only_number("18 dollars") == 18; parse_only_number("3 or 5") is None
    """
    plain = normalize_to_ascii(text)
    found = list(islice(_find_numbers(plain), 2))
    if len(found) != 1:
        return None
    (number,) = found
    beside = _remove_unit_powers(plain[: number.start()]) + " " + _remove_unit_powers(plain[number.end() :])
    letters = (word for word in re.findall(r"[A-Za-z]+", beside) if len(word) == 1)
    if _OPERATOR.search(beside) or any(letter not in _ONE_LETTER_UNITS for letter in letters):
        return None
    return parse_number_match(number, plain)


def normalize_to_ascii(text: str) -> str:
    """Return a text with ASCII digits and signs, without negative thin spaces, and repeating decimals as fractions."""
    plain = _FULL_WIDTH_COMMA.sub(",", text).translate(ASCII_FORMS).replace(r"\!", "")
    is_repeating = any(sign in plain for sign in _REPETITION_MARKS)
    return _REPEATING.sub(_convert_repeating_decimal, plain) if is_repeating else plain


def _convert_repeating_decimal(decimal: re.Match[str]) -> str:
    """Return the fraction that a repeating decimal stands for: \\frac{1}{3} for 0.\\overline{3}."""
    begin = decimal["begin"]
    period = decimal["period"] or decimal["digit"] or decimal["bracketed"] or decimal["repeated"]
    if decimal["last"]:
        period += decimal["between"] + decimal["last"]
    value = int(decimal["whole"] + begin or "0") + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(begin)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _find_numbers(plain: str) -> Iterator[regex.Match[str]]:
    return (match for match in _NUMBER.finditer(plain) if match["top"] or match["over"])


def _remove_unit_powers(beside: str) -> str:
    """Remove powers of units, LaTeX commands for formatting, and the backslash of escaped signs."""
    return _FORMATTING.sub(" ", _NUMBER.sub(lambda match: match[0] if match["top"] or match["over"] else " ", beside))


def parse_number_match(number: regex.Match[str], plain: str) -> Fraction | None:
    """Return the value of a match; None if it is part of something unreadable, far too long, or divided by 0."""
    if number["more"] or len(number[0]) > MAX_NUMBER_CHARACTERS:
        return None
    if _LARGER_EXPRESSION.search(plain[max(0, number.start() - 20) : number.start()]):
        return None
    top, bottom = (
        _parse_decimal(part or "1") for part in (number["top"] or number["over"], number["bottom"] or number["under"])
    )
    whole = _parse_decimal(number["whole"] or number["count"] or "0")
    exponent = _parse_scale(number["scale"] or "")
    if bottom == 0 or abs(exponent) > MAX_NUMBER_CHARACTERS or (whole and top >= bottom):
        return None
    size = (whole + top / bottom) * Fraction(10) ** exponent
    negative = number["inner"] or (number["minus"] and is_minus_sign(number, plain))
    return -size if negative else size


def _parse_scale(written: str) -> int:
    """Return the power of ten that a scale stands for: 3 for k, 6 for M, -2 for e-2."""
    if written in ("k", "K", "M"):
        return 6 if written == "M" else 3
    digits = re.search(r"-?\d+\s*\}?$", written)
    return int(digits[0].strip("} ")[:8]) if digits else 0


def is_minus_sign(number: regex.Match[str], plain: str) -> bool:
    """Return whether the minus before a number is its sign, not a subtraction or dash (see `find_last_number`)."""
    touches = plain[number.end("minus")] not in " \t"
    before = plain[: number.start()] if touches else plain[: number.start()].rstrip(" \t")
    if touches or not before[-1:].isalnum():
        return _OPERAND.search(before[-1:]) is None
    return _STATING_WORD.search(before[-9:]) is not None


def _parse_decimal(digits: str) -> Fraction:
    return Fraction(re.sub(r"[^\d.-]", "", digits))


def extract_tagged_answer(text: str) -> str | None:
    """Return the answer of a text that is only `<think>...</think> <answer>...</answer>`, each tag once; else None."""
    # If every tag is there once, the pattern has one way to match: no hostile text can make it backtrack.
    match = _TAGGED.fullmatch(text) if all(text.count(tag) == 1 for tag in _TAGS) else None
    return match[1].strip() if match else None


def find_answer_tag(text: str) -> str | None:
    """Return the content of the `<answer>` tag that ends the text and is the only one outside of a thought; else None.

    A text whose thought never ends has no answer.
    """
    if not text.rstrip().endswith("</answer>"):
        return None
    _, behind = split_thought(text)
    for part in () if behind is None else (text, behind):
        if part.count("<answer>") == part.count("</answer>") == 1:
            return part.partition("<answer>")[2].partition("</answer>")[0].strip()
    return None
