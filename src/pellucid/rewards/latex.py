"""Rewrite formulas, in LaTeX or not, for math-verify: numbers, units and signs. Tell words from formulas."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from pellucid.rewards.answers import in_ascii

_SIGNS = {"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00d7": r"\times ", "\u00f7": r"\div ", "\u00b7": r"\cdot "}
_SIGNS |= {"\u22c5": r"\cdot ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b0": r"^\circ "}
_SIGNS |= {"\u00b1": r"\pm ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset "}
_SIGNS |= {
    "\u03b1": r"\alpha ",
    "\u03b2": r"\beta ",
    "\u03b8": r"\theta ",
    "\u03bb": r"\lambda ",
    "\u2248": r"\approx ",
}
_SIGNS |= {"\u00a3": r"\$", "\u20ac": r"\$", "\u00a5": r"\$"}
LATEX_FORMS = str.maketrans(_SIGNS)
_FULL_STOP = "\u3002"
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_POWER = re.compile(f"[{_RAISED}]+")

_DELIMITED = re.compile(
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|`(.*)`|\\displaystyle\s*(.*)", re.DOTALL
)
_SQRT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_CURRENCY = re.compile(r"(?:\bUS\s*)?(?:\\\$|\$)\s*(?=-?\.?\d)|(?<=\d)\s*(?:\\\$|\$)\s*\Z|\b(?:USD|EUR|GBP)\s*(?=\d)")
_SEPARATOR = r"(?:\\[,!:; ]|\{,\}|[ ']|~)"
_GROUPED = re.compile(rf"(?<![\d.,])(?<!\d[ ])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d|{_SEPARATOR}\d)")
_EXPONENT = re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\dA-Za-z])")
_SCALED = re.compile(r"(?<=\d)\s*(thousand|million|billion)\b")
_PLACES = {"thousand": 3, "million": 6, "billion": 9}
_IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")
_MIXED = re.compile(
    r"(?<![\d.,/^{_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/])|(?<![\d.,/^{_])(\d+)\s*\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)"
)
_CONNECTED = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:or|and)\s*\}|\b(?:or|and)\b)\s*")
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
_NO_UNIT = {"pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "or", "and", "not", "to", "is", "in", "mod", "times"}
_ABBREVIATED = {"cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "g": "gram", "kg": "kilogram"}
_ABBREVIATED |= {"ft": "foot", "feet": "foot", "inches": "inch", "s": "second", "sec": "second", "min": "minute"}
_ABBREVIATED |= {"h": "hour", "hr": "hour", "mph": "mile per hour", "sq": "square", "dollar": "", "buck": ""}


class Written(NamedTuple):
    """A formula in LaTeX, and its unit: empty, "%", "degrees", or words."""

    body: str
    unit: str


@lru_cache(maxsize=1024)
def written(text: str) -> Written:
    """Return the formula and the unit of a text, in the LaTeX that math-verify reads.

    Example: written("US$1,000") == Written("1,000", ""); written("90\u00b0") == Written("90", "degrees")
    """
    raised = _POWER.sub(lambda match: "^{" + "".join(str(_RAISED.index(c)) for c in match[0]) + "}", in_ascii(text))
    body = undressed(" ".join(raised.translate(LATEX_FORMS).split()))
    body = _CURRENCY.sub("", _SQRT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", body))
    body = _SCALED.sub(lambda m: rf" \times 10^{{{_PLACES[m[1]]}}}", body)
    body, unit = without_unit(_CONNECTED.sub(", ", body).strip())
    body = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), body)
    body = _MIXED.sub(lambda m: rf"{m[1] or m[4]}\frac{{{m[2] or m[5]}}}{{{m[3] or m[6]}}}", body)
    # math-verify reads an i that stands alone as the imaginary unit, but the i of 3i as an unknown.
    body = _IMAGINARY.sub(" i", _EXPONENT.sub(r" \\times 10^{\1}", body))
    return Written(body.replace(r"\varnothing", r"\emptyset").strip(), unit)


def undressed(text: str) -> str:
    """Remove math delimiters, Markdown emphasis, and punctuation at the end."""
    while True:
        text = text.strip().rstrip(".,;:" + _FULL_STOP).strip().lstrip("#:").strip()
        match = _DELIMITED.fullmatch(text)
        inside = next((group for group in match.groups() if group is not None), "") if match else ""
        if not match or "$" in inside or (text[0] == "\\" and inside.count(r"\(") + inside.count(r"\[")):
            return text
        text = inside


def without_unit(body: str) -> tuple[str, str]:
    """Return a formula without its unit, and the unit; empty where there is none."""
    match = _UNIT.search(body)
    if match is None:
        return body, ""
    words = (match["dressed"] or match["words"] or match["glued"] or "").strip(". ").lower()
    if set(words.split()) & _NO_UNIT or (match["words"] and is_product(words)):
        return body, ""
    if match["percent"] or match["degrees"]:
        unit = "%" if match["percent"] else "degrees"
    else:
        names = (word.removesuffix("s") if len(word) > 2 else word for word in words.split())
        unit = " ".join([*filter(None, (_ABBREVIATED.get(name, name) for name in names)), *(match["power"] or "")])
        unit = re.sub(r"^square (.*)", r"\1 2", unit)
    return body[: match.start()].strip(), unit


def is_words(gold: str) -> bool:
    """Whether a gold answer is text, not a formula: words, or a choice from A to H. A product such as xy is none."""
    bare = bare_words(gold)
    if re.fullmatch(r"[A-H\u2e80-\u9fff\uac00-\ud7af]", bare) or (len(bare) > 1 and _TEXT.fullmatch(gold.strip(" $."))):
        return True
    if not re.fullmatch(r"[^\W\d_]{2,}(?:[\s,'-]+[^\W\d_]+)*", bare) or bare.lower() in ("pi", "infinity"):
        return False
    return not is_product(bare)


def is_product(word: str) -> bool:
    """Whether letters are a product of unknowns, such as xyz and ab, and not a word or a unit."""
    letters = set(word)
    ordered = letters <= set("wxyz") or list(word) == sorted(letters)
    return (
        len(word) <= 3
        and word.isascii()
        and word.islower()
        and ordered
        and not (letters & set("eilo") or word in _ABBREVIATED)
    )


def bare_words(text: str) -> str:
    """Return a text without formatting and quotation marks; of a choice such as (B), the letter."""
    bare = undressed(_TEXT.sub(r"\1", text)).strip("*_`'\"$ ." + _FULL_STOP)
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", bare)
    return choice[1] if choice else " ".join(bare.split())
