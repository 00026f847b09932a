"""Reading answers out of what a model wrote. Linear in the length of the text, whatever the text."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

LONGEST_NUMBER = 4000
"""Characters. Python converts at most 4300 digits; a longer run of digits is no answer."""

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![A-Za-z0-9])\.\d+"
_MINUS = r"(?<![A-Za-z0-9_)\]}])[-\u2212](?:\\?[$€£])?"
_SIGNED_RATIO = re.compile(rf"(?P<minus>{_MINUS})?(?P<top>{_NUMBER})(?:/(?P<bottom>{_NUMBER}))?")
_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def last_number(text: str) -> Fraction | None:
    """The last number in the text, exactly; None where there is none, or where it is absurdly long.

    Commas group thousands only where they are well placed, otherwise they separate: "1,08" and "1, 8" are two numbers.
    A minus belongs to the number that it touches, unless it follows a letter, a digit or a closing bracket: "7-3" ends
    in 3. "1/2" is a half: read as 2, it would pass for a right answer. Exponents and LaTeX are not read.

    Example: last_number("so $1,080.50.") == Fraction(2161, 2)
    """
    found = deque(_SIGNED_RATIO.finditer(text), maxlen=1)
    if not found or len(found[0].group()) > LONGEST_NUMBER:
        return None
    (last,) = found
    top, bottom = fraction(last["top"]), fraction(last["bottom"] or "1")
    if bottom == 0:
        return None
    return -top / bottom if last["minus"] else top / bottom


def fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def tagged(text: str) -> str | None:
    """The answer of a text that is `<think>...</think> <answer>...</answer>` and nothing else, each tag once.

    Example: tagged("<think>3 + 4</think> <answer> 7 </answer>") == "7"
    """
    # With every tag there once, the pattern has one way to match: no hostile text can make it search.
    match = _TAGGED.fullmatch(text) if all(text.count(tag) == 1 for tag in _TAGS) else None
    return match[1].strip() if match else None


def answer_tag(text: str) -> str | None:
    """The content of an `<answer>` that is there once and ends the text; None where there is no such tag.

    Example: answer_tag("Let me see. <answer>7</answer>") == "7"
    """
    if text.count("<answer>") != 1 or text.count("</answer>") != 1 or not text.rstrip().endswith("</answer>"):
        return None
    return text.partition("<answer>")[2].partition("</answer>")[0].strip()


def reasoning_and_answer(text: str) -> tuple[str, str]:
    """What stands in `<think>` and in the `<answer>` behind it; a text without both is all answer.

    Example: reasoning_and_answer("<think>3 + 4</think> <answer>7</answer>") == ("3 + 4", "7")
    """
    reasoning, closed, rest = text.partition("<think>")[2].partition("</think>")
    answer, ended, _ = rest.partition("<answer>")[2].partition("</answer>")
    return (reasoning.strip(), answer.strip()) if closed and ended else ("", text.strip())
