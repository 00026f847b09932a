"""Shorten a model's answer to its first sentences or tokens of thinking. Mathematics stays as it is."""

from __future__ import annotations

import re
from typing import Any

_CODE_FENCE = re.compile(r"```(?:[A-Za-z][\w+-]*[ \t]*(?=\n))?")
_REASONING_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning|answer)\s*>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>|</?s>")
_END_OF_THINKING = re.compile(r"</(?:think|thinking|thought|reasoning)\s*>", re.IGNORECASE)
_ANSWER_BLOCK = re.compile(r"<answer\s*>.*", re.IGNORECASE | re.DOTALL)
_LABEL = re.compile(
    r"^(?:[ \t#>*_-]*(?:my )?(?:(?:thinking|thought|reasoning)(?: process)?|thoughts|chain of thought"
    r"|first (?:one or two )?sentences?|prefix|思考过程|思考|思路|推理)[ \t]*[*_]*[:：][*_]*\s*)+",
    re.IGNORECASE | re.MULTILINE,
)
_CLOSING_MARKS = "\"'”’)\\]」』）》"
# A sentence does not end before an operator: "5! = 120" and "5! + 1" are one sentence each.
# A match starts only at the first of several periods; otherwise a million of them would take hours.
_SENTENCE_END = re.compile(
    rf"(?<![.!?])[.!?]+[{_CLOSING_MARKS}]*(?=\s+[^\s=+*/<>^-]|\s*$)|[。！？]+[{_CLOSING_MARKS}]*"
)
_ABBREVIATION = re.compile(r"(?<![^\s(])(?:e\.g|i\.e|vs|cf|approx|Mr|Mrs|Ms|Dr|St|Fig|Eq)\.$")
_MAX_ABBREVIATION_CHARS = 7
_LIST_NUMBER = re.compile(r"\s*\d+\.")


def extract_thinking(text: str) -> str:
    """Return the thinking before the answer, if tags separate them: a prefix must not give the answer away.

    If the thinking is empty, return the text after it.

    Example: extract_thinking("<think>3 and 4.</think><answer>7</answer>") == "<think>3 and 4."
    """
    pieces = _END_OF_THINKING.split(_ANSWER_BLOCK.sub("", text))
    return next((piece for piece in pieces if clean_text(piece)), "")


def clean_text(text: str) -> str:
    """Return the text as one line without tags, special tokens, code fences and labels.

    Example: clean_text("**Thinking:** <think>First,\\n 3 < 4.</think>") == "First, 3 < 4."
    """
    writable = text.encode(errors="ignore").decode()  # JSON can hold a lone surrogate, UTF-8 cannot
    unfenced = _REASONING_TAG.sub(" ", _CODE_FENCE.sub(" ", _SPECIAL_TOKEN.sub(" ", writable)))
    return " ".join(_LABEL.sub("", unfenced).split())


def take_first_sentences(text: str, n: int) -> str:
    """Return the first n sentences, or the whole text if it has no more.

    Periods in numbers, abbreviations and the numbers of a list end no sentence.

    Example: take_first_sentences("Pi is 3.14. Square it. Done.", 2) == "Pi is 3.14. Square it."
    """
    start = 0
    for boundary in _SENTENCE_END.finditer(text):
        end = boundary.end()
        abbreviated = _ABBREVIATION.search(text, max(start, end - _MAX_ABBREVIATION_CHARS), end)
        if abbreviated or _LIST_NUMBER.fullmatch(text, start, end):
            continue
        start, n = end, n - 1
        if n == 0:
            return text[:end]
    return text


def take_first_tokens(text: str, n: int, tokenizer: Any) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) <= n:
        return text
    start = tokenizer.decode(ids[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return start.rstrip("\ufffd").strip()  # a character that was cut in two
