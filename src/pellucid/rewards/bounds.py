"""Tell from the text of a formula that a model wrote whether computing it takes bounded time: 9^{9^{9^9}} does not."""

from __future__ import annotations

import re

LONGEST = 60
"""The most signs of a formula, where a command or a number counts as one; a longer formula is no answer."""
DEEPEST = 4
"""The deepest nesting of brackets: parsing takes longer with each level."""
MOST_IN_A_CHAIN = 4
"""The most of each ambiguous sign: every further one in 1/2/1/2 multiplies the time of parsing."""
LARGEST_EXPONENT = 10_000
LARGEST_POLYNOMIAL = 12
"""The largest exponent of a bracket that has letters in it."""

_CHAINED = [re.compile(sign) for sign in ("/", ":", r"\|", "%", r"[A-Za-z]\(")]
_UNBOUNDED = re.compile(r"\\(?:sum|prod|int|iint|iiint|oint|lim)(?![A-Za-z])")
_FACTORIAL = re.compile(r"(?:(?<![\d.])\d{1,3}|(?<![A-Za-z])[a-z]|\([^()!^]{1,20}\))!(?!!)")
_BINOMIAL = re.compile(r"\\[dt]?binom[^A-Za-z]*\d{4}")
_COMMAND = re.compile(r"\\[A-Za-z]+")


def computable(body: str, allowed: str) -> bool:
    """Whether comparing a formula takes bounded time. Whatever the gold answer, `allowed`, has in it is accepted.

    Example: computable("2^{10}", "7"); not computable("9^{9^{9^9}}", "7"); not computable("999999!!!", "7")
    """
    if signs(body) > max(LONGEST, 2 * signs(allowed)) or depth(body) > max(DEEPEST, depth(allowed)):
        return False
    if balanced(allowed) and not balanced(body):
        return False
    if any(len(sign.findall(body)) > max(MOST_IN_A_CHAIN, len(sign.findall(allowed))) for sign in _CHAINED):
        return False
    if (_UNBOUNDED.search(body) and not _UNBOUNDED.search(allowed)) or _BINOMIAL.search(body):
        return False
    largest_polynomial = max([LARGEST_POLYNOMIAL, *(int(n) for n in re.findall(r"(?<!\d)\d{1,4}(?!\d)", allowed))])
    # An exclamation mark that is left after removing small factorials belongs to a large one.
    small = "!" not in _FACTORIAL.sub("", body.replace("!=", ""))
    return small and computable_powers(body.replace("**", "^"), largest_polynomial)


def signs(body: str) -> int:
    return len(re.findall(r"\\[A-Za-z]+|\d+|\S", body))


def depth(body: str) -> int:
    deepest = now = 0
    for c in body:
        now += (c in "([{") - (c in ")]}")
        deepest = max(deepest, now)
    return deepest


def balanced(body: str) -> bool:
    """Whether every bracket is closed by one of any kind, as in [0, 1). `\\left.` and `\\right.` count as brackets."""
    level = 0
    for c in body.replace(r"\left.", "(").replace(r"\right.", ")"):
        level += (c in "([{") - (c in ")]}")
        if level < 0:
            return False
    return level == 0


def computable_powers(body: str, largest_polynomial: int) -> bool:
    """Whether each exponent, and the product of those above 9, is small enough to compute."""
    product = 1
    for place in (i for i, c in enumerate(body) if c == "^"):
        exponent = operand(body, place + 1)
        digits = re.findall(r"\d+", exponent)
        # An exponent may hold the power of a letter, which is not computed: e^{-x^2}.
        tower = re.search(r"(?<![A-Za-z])\s*\^", exponent) or (not re.search("[A-Za-z]", exponent) and "^" in exponent)
        if tower or "!" in exponent or len("".join(digits)) > len(str(LARGEST_EXPONENT)):
            return False
        if not digits:
            continue
        largest = max(map(int, digits))
        bracket = body[:place].rstrip()[-1:] in (")", "}", "]") and re.search(
            "[A-Za-z]", _COMMAND.sub("", body[:place])
        )
        if largest > (largest_polynomial if bracket else LARGEST_EXPONENT):
            return False
        product *= max(1, largest if largest > 9 else 1)
    return product <= LARGEST_EXPONENT * 100


def operand(body: str, start: int) -> str:
    """Return what an exponent holds: a group in brackets, or all up to the next sign."""
    rest = body[start:].lstrip()
    if not rest.startswith(("{", "(")):
        run = re.match(r"[-+]?(?:\\[A-Za-z]+|[\w.]+)(?:\s*\^.*)?", rest)
        return run[0] if run else ""
    level = 0
    for place, c in enumerate(rest):
        level += (c in "({") - (c in ")}")
        if level == 0:
            return rest[1:place]
    return rest
