"""Rewrite formulas, in LaTeX or not, for math-verify: numbers, units and signs. Tell words from formulas."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import regex  # recursive patterns

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
    r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|__(.*)__|`(.*)`|\\displaystyle\s*(.*)", re.DOTALL
)
_SQRT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_CURRENCY = re.compile(r"(?:\bUS\s*)?(?:\\\$|\$)\s*(?=-?\.?\d)|(?<=\d)\s*(?:\\\$|\$)\s*\Z|\b(?:USD|EUR|GBP)\s*(?=\d)")
_SEPARATOR = r"(?:\\[,:; ]|\{,\}|\{\\,\}|[ '_]|~)"
_GROUPED = re.compile(rf"(?<![\d.,])(?<!\d[ ])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d|{_SEPARATOR}\d)")
_EXPONENT = re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\dA-Za-z])")
_SCALED = re.compile(r"(?<=\d)\s*(thousand|million|billion)\b")
_PLACES = {"thousand": 3, "million": 6, "billion": 9}
_IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")
_MIXED = re.compile(
    r"(?<![\d.,/^{_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/])|(?<![\d.,/^{_])(\d+)\s*\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)"
)
_GROUP = r"\{((?:[^{}]++|\{(?1)\})*+)\}"
_STYLE = regex.compile(
    r"\\(?:mathbf|textbf|boldsymbol|pmb|bm|bf|mathit|textit|mathsf|textsf|mathtt|texttt|mathnormal|emph|underline|ensuremath"
    rf"|textcolor\s*\{{[a-z]+\}}|color\s*\{{[a-z]+\}})\s*{_GROUP}"
)
"""Commands that change only how their argument looks."""
_STYLED_NUMBER = regex.compile(rf"\\(?:text|textrm|textnormal|mathrm|rm|mbox|hbox|operatorname)\s*{_GROUP}")
_SIZES = re.compile(
    r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lrm]?)(?![A-Za-z])(?!\s*\.)|\\color\s*\{[a-z]+\}"
)
_TAG = re.compile(r"</?(?:b|i|u|p|em|strong|span|code|sub|sup|br|mark|center)\s*/?>", re.IGNORECASE)
_EMPHASIS = re.compile(
    r"(?<![A-Za-z0-9)}\s])\*\*+|\*\*+(?![A-Za-z0-9(+\-\s])|(?:(?<=\s)|\A)\*\*+(?=\S)|(?<=\S)\*\*+(?=\s|\Z)"
    r"|(?<![A-Za-z0-9)}])__|__(?![A-Za-z0-9{(])"
)
_CODE = [
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
_CALL = regex.compile(r"(?<![A-Za-z\\])(sqrt|abs)\s*(\(((?:[^()]++|(?2))*+)\))")
_POWER_IN_BRACKETS = regex.compile(r"\^\s*(\(((?:[^()]++|(?1))*+)\))")
_ROUGHLY = re.compile(
    r"\A\s*(?:\\(?:approx(?:eq)?|thickapprox|sim(?:eq)?|cong|doteq)(?![A-Za-z])|~|=)\s*"
    r"|\A\s*(?:approximately|approx\.?|roughly|about|around)\s+(?=[-\\$\d.])",
    re.IGNORECASE,
)
_LOGARITHM = re.compile(
    r"\\log\s*_\s*(?:\{\s*([^{}]+?)\s*\}|([A-Za-z0-9]))\s*(?:\{([^{}]+)\}|(\d+(?:\.\d+)?|[A-Za-z]))(?![A-Za-z0-9{])"
)
_SHORT_FRACTION = re.compile(r"(\\[dtc]?frac)\s*(\d)\s*(\d)(?!\d)|(\\[dt]?binom)\s*(\d)\s*(\d)(?!\d)")
_ANGLE = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?)\s*[({]?\s*(-?\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?"
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
    has_currency: bool = False
    """Whether it has a currency sign."""
    range: str = ""
    """The intervals that a condition such as -5 < x < 3 stands for; empty where it is no condition."""
    unknown: str = ""
    """The unknown of that condition."""


@lru_cache(maxsize=1024)
def written(text: str) -> Written:
    """Return the formula and the unit of a text, in the LaTeX that math-verify reads.

    Example: written("US$1,000").body == "1,000"; written("90\u00b0")[:2] == ("90", "degrees")
    """
    raised = _POWER.sub(lambda match: "^{" + "".join(str(_RAISED.index(c)) for c in match[0]) + "}", in_ascii(text))
    body = plain_style(undressed(" ".join(_TAG.sub("", raised).translate(LATEX_FORMS).split())))
    spoken = _SQRT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", without_code(_ROUGHLY.sub("", undressed(body))))
    body = _CURRENCY.sub("", spoken)
    in_currency = body != spoken
    body = _SCALED.sub(lambda m: rf" \times 10^{{{_PLACES[m[1]]}}}", body)
    body = _ANGLE.sub(r"\1(\\frac{\2\\pi}{180})", body)
    unknown, range_ = condition(body)
    body, unit = without_unit(_CONNECTED.sub(", ", body).strip())
    body = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), body)
    body = _SHORT_FRACTION.sub(lambda m: rf"{m[1] or m[4]}{{{m[2] or m[5]}}}{{{m[3] or m[6]}}}", body)
    body = _LOGARITHM.sub(lambda m: rf"\log_{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", body)
    body = _MIXED.sub(lambda m: rf"{m[1] or m[4]}\frac{{{m[2] or m[5]}}}{{{m[3] or m[6]}}}", body)
    # math-verify reads an i that stands alone as the imaginary unit, but the i of 3i as an unknown.
    body = _IMAGINARY.sub(" i", _EXPONENT.sub(r" \\times 10^{\1}", body))
    return Written(body.replace(r"\varnothing", r"\emptyset").strip(), unit, in_currency, range_, unknown)


def plain_style(body: str) -> str:
    """Remove commands that change only the looks, and text boxes around numbers: \\mathbf{5}, \\text{12}."""
    if "\\" not in body:
        return body
    body = _SIZES.sub("", body)
    for _ in range(3):
        before = body
        body = _STYLE.sub(r"\1", body)
        body = _STYLED_NUMBER.sub(lambda m: m[1] if any(c.isdigit() or c == "\\" for c in m[1]) else m[0], body)
        body = re.sub(r"\\mathrm\s*\{\s*i\s*\}|\\[ij]math(?![A-Za-z])", "i", body)
        if body == before:
            break
    return body


def without_code(body: str) -> str:
    """Replace the spelling of programming languages, such as pi/2, x**2 and sqrt(3), by LaTeX."""
    for pattern, latex in _CODE:
        body = pattern.sub(latex, body)
    for _ in range(3):
        before = body
        body = _CALL.sub(lambda m: rf"\sqrt{{{m[3]}}}" if m[1] == "sqrt" else f"|{m[3]}|", body)
        body = _POWER_IN_BRACKETS.sub(r"^{\2}", body)
        if body == before:
            break
    return body


_SIGN = re.compile(r"\\(?:leqslant|geqslant|leq?|geq?|lt|gt|ne|neq)(?![A-Za-z])|[<>]")
_DIRECTIONS = {"<": "<", "lt": "<", "le": "<=", "leq": "<=", "leqslant": "<="}
_DIRECTIONS |= {">": ">", "gt": ">", "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!="}
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_UNKNOWN = re.compile(r"(?!\\(?:pi|infty|emptyset)(?![A-Za-z]))(?:[A-Za-z]|\\[a-z]+)")
_OR = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*or\s*\}|\bor\b|\\(?:lor|vee|cup)(?![A-Za-z]))\s*")
_AND = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*and\s*\}|\band\b|\\(?:land|wedge)(?![A-Za-z]))\s*")
_SET_OF = re.compile(
    r"\\?\\\{\s*(?:[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|:|\||\\vert|\\colon)\s*)(.*?)\\\}", re.DOTALL
)


def condition(body: str) -> tuple[str, str]:
    """Return the unknown of a condition such as -5 < x < 3 and its intervals; empty where it is none.

    Example: condition(r"x < 1 \\text{ or } x \\ge 2") == ("x", r"(-\\infty,1)\\cup[2,\\infty)")
    """
    if not _SIGN.search(body) or "=" in body:
        return "", ""
    if inside := _SET_OF.fullmatch(body.strip()):
        body = inside[1]
    unknowns, pieces = set[str](), list[str]()
    for alternative in _OR.split(body):
        bounds = [simple_condition(each) for each in _AND.split(alternative)]
        found = bounds[0] if len(bounds) == 1 else both(bounds)
        if found is None:
            return "", ""
        unknowns.add(found[0])
        pieces += found[1]
    if len(unknowns) != 1:
        return "", ""
    return unknowns.pop(), r"\cup".join(pieces)


Bounds = tuple[str, list[str]]


def simple_condition(text: str) -> Bounds | None:
    """Return unknown and intervals of one inequality, or of a chain a < x < b; None where it is neither."""
    sides = [side.strip().strip("$").strip() for side in _SIGN.split(text)]
    signs = [_DIRECTIONS[sign[0].lstrip("\\")] for sign in _SIGN.finditer(text)]
    if not all(sides) or "," in text or not 2 <= len(sides) <= 3:
        return None
    return chain(sides, signs) if len(sides) == 3 else inequality(sides[0], signs[0], sides[1])


def chain(sides: list[str], signs: list[str]) -> Bounds | None:
    """Return unknown and interval of a < x < b or a > x > b; None for another chain."""
    low, unknown, high = sides
    if not _UNKNOWN.fullmatch(unknown) or not signs[0][0] == signs[1][0] != "!" or unknown_in(unknown, low + high):
        return None
    if signs[0][0] == ">":
        low, high, signs = high, low, signs[::-1]
    opening, closing = "[" if "=" in signs[0] else "(", "]" if "=" in signs[1] else ")"
    return unknown, [f"{opening}{low},{high}{closing}"]


def inequality(left: str, sign: str, right: str) -> Bounds | None:
    """Return unknown and intervals of x < a, a < x, x != a or |x| < a; None for anything else."""
    if not is_unknown(left):
        left, right, sign = right, left, _TURNED[sign]
    if not is_unknown(left) or unknown_in(left.strip("|"), right):
        return None
    if left.startswith("|"):
        return around_zero(left.strip("| "), sign, right)
    below, above = rf"(-\infty,{right}{']' if '=' in sign else ')'}", rf"{'[' if '=' in sign else '('}{right},\infty)"
    if sign == "!=":
        return left, [rf"(-\infty,{right})", rf"({right},\infty)"]
    return left, [below if sign[0] == "<" else above]


def around_zero(unknown: str, sign: str, limit: str) -> Bounds | None:
    """Return the intervals of |x| < a or |x| > a; None where a may be negative."""
    if sign == "!=" or limit.startswith("-"):
        return None
    opening, closing = ("[", "]") if "=" in sign else ("(", ")")
    if sign[0] == "<":
        return unknown, [f"{opening}-{limit},{limit}{closing}"]
    return unknown, [rf"(-\infty,-{limit}{closing}", rf"{opening}{limit},\infty)"]


def both(bounds: list[Bounds | None]) -> Bounds | None:
    """Return the interval of "x > -5 and x < 3"; None where conditions are not one lower and one upper bound."""
    if len(bounds) != 2 or any(bound is None or len(bound[1]) != 1 for bound in bounds):
        return None
    (one, (first,)), (other, (second,)) = (bound for bound in bounds if bound is not None)
    low, high = (first, second) if first.endswith(r",\infty)") else (second, first)
    if one != other or not low.endswith(r",\infty)") or not high.startswith(r"(-\infty,"):
        return None
    return one, [low.removesuffix(r"\infty)") + high.removeprefix(r"(-\infty,")]


def is_unknown(side: str) -> bool:
    return _UNKNOWN.fullmatch(side.strip("| ") if side.startswith("|") and side.endswith("|") else side) is not None


def unknown_in(unknown: str, text: str) -> bool:
    return re.search(rf"(?<![A-Za-z\\]){re.escape(unknown)}(?![A-Za-z])", text) is not None


def undressed(text: str) -> str:
    """Remove math delimiters, emphasis in Markdown and HTML, and punctuation at the end."""
    text = _TAG.sub("", text) if "<" in text else text
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


_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?",
    re.IGNORECASE,
)
_NAMED = re.compile(r"[^\W\d_]{3,}\.?(?:[\s,'-]+[^\W_]+\.?)*")
"""A word and then words and numbers: Route 66, Friday, June 3."""
_OF_FORMULAS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "exp",
    "sqrt",
    "max",
    "min",
    "mod",
    "gcd",
    "lcm",
    "det",
}
_OF_FORMULAS |= {"abs", "approximately", "about", "roughly", "around", "arcsin", "arccos", "arctan", "infinity", "all"}
_OF_FORMULAS |= {"inf", "answer", "usd", "eur", "gbp", "rs"}


def without_emphasis(text: str) -> str:
    """Remove the marks of emphasis in Markdown and HTML from a text, but no ** that is a power."""
    text = _TAG.sub("", text) if "<" in text else text
    return _EMPHASIS.sub("", text) if "**" in text or "__" in text else text


def date_key(words: str) -> str:
    """Return words as they are compared: without case, and of dates without commas, order and "th".

    Example: date_key("20th of June, 2024") == date_key("June 20, 2024")
    """
    folded = " ".join(words.replace(",", " ").split()).casefold() if re.search(r"\d", words) else words.casefold()
    if not _MONTH.search(folded) or not re.search(r"\d", folded):
        return folded
    short = _MONTH.sub(lambda match: match[0][:3], re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", folded))
    return " ".join(sorted(word for word in short.split() if word not in ("of", "the")))


def is_sentence(gold: str) -> bool:
    """Whether a gold answer looks like a sentence from which the answer must be cut: four words or more."""
    return len(re.findall(r"(?<![A-Za-z\\])[A-Za-z]{2,}", undressed(gold))) >= 4


def is_named(bare: str) -> bool:
    """Whether a text with numbers is a name or a date, such as June 20 or Route 66, and no formula."""
    if re.search(r"[\\^_={}+*/<>|$%]", bare) or not re.search(r"\d", bare):
        return False
    if _MONTH.search(bare) and re.fullmatch(
        r"(?:\d+(?:st|nd|rd|th)?|[^\W\d_]+\.?)(?:[\s,-]+(?:\d+(?:st|nd|rd|th)?|[^\W\d_]+\.?))+", bare
    ):
        return True
    first = re.match(r"[^\W\d_]*", bare)
    named = bool(_NAMED.fullmatch(bare)) and not is_sentence(bare)
    return named and first is not None and first[0].lower() not in _OF_FORMULAS


def is_words(gold: str) -> bool:
    """Whether a gold answer is text, not a formula: words, or a choice from A to H. A product such as xy is none."""
    bare = bare_words(gold)
    if re.fullmatch(r"[A-H\u2e80-\u9fff\uac00-\ud7af]", bare) or is_named(bare):
        return True
    if len(bare) > 1 and _TEXT.fullmatch(gold.strip(" $.")) and not re.search(r"\d", bare):
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
    bare = undressed(_TEXT.sub(r"\1", without_emphasis(text))).strip("*_`'\"$ ." + _FULL_STOP)
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", bare)
    return choice[1] if choice else " ".join(bare.split())
