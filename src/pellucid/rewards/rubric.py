"""What a judge is asked, and how its answer becomes a number: strictly, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import regex

from pellucid.machine import braces
from pellucid.machine.plugins import did_you_mean
from pellucid.rewards.answers import after_thinking, split_thought
from pellucid.types import Completion, Message, Prompt

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{0,15})?")


PATTERN_SECONDS = 1.0
"""Seconds that the pattern of a recipe may take on one answer. A judge can write what makes it take hours."""


class SlowPatternError(Exception):
    """A pattern took too long on an answer."""


class UnfilledError(Exception):
    """A template names what the prompt does not have."""


def filled(template: str, values: Mapping[str, str], columns: Mapping[str, Any]) -> str:
    """Replace each {name} by its text in `known` or in the columns of the row, and {{...}} by {...}.

    Braces in what is put in are text. UnfilledError for a name that is in neither.
    """

    def text_of(name: str) -> str:
        if name in values:
            return values[name]
        if name in columns:
            return as_text(columns[name])
        hint = did_you_mean(name, [*values, *columns])
        raise UnfilledError(f"the template has {{{name}}}, and the row has no such column{hint}")

    # Half a surrogate pair, which JSON can spell, is in no text that can be sent.
    return braces.filled(template, text_of).encode(errors="replace").decode()


def as_text(value: Any) -> str:
    """Return the text of a column: nothing for None, JSON for lists and objects."""
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)


def asked_text(prompt: Prompt) -> str:
    """Return what the policy was asked: the one message, or each message of a conversation behind its role."""
    if isinstance(prompt.text, str) or len(prompt.text) == 1:
        return prompt.question
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.text)


def answered_text(completion: Completion) -> str:
    """Return the answer, or all that was said after the question of a conversation, each message behind its role.

    Calls of tools are JSON objects below the message that they were made in.
    """
    if len(completion.messages) < 2:
        return completion.full_text
    return "\n\n".join(map(message_text, completion.messages))


def message_text(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    said = "\n".join(filter(None, (message["content"], *calls)))
    return f"{message['role']}: {said}"


def stated_in(answer: str, pattern: str, is_cut: bool) -> str | None:
    """Return the first group of the last match of a pattern, or for "" the whole answer; None where there is none.

    Thinking does not count, nor does the end of an answer that was cut: more digits may have followed. SlowPatternError
    if the pattern takes longer than PATTERN_SECONDS.

    Example: stated_in("3, no: Grade: 8.", "Grade: ([0-9]+)", False) == "8"; stated_in("<think>3?</think> 8", "", False)
    """
    text = split_thought(answer)[1]
    if text is None:
        return None
    if not pattern:
        return None if is_cut and not text[-1:].isspace() else text.strip()
    try:  # of `regex`, which can be timed, and releases the interpreter for other threads
        matches = list(regex.finditer(pattern, text, timeout=PATTERN_SECONDS, concurrent=True))
    except TimeoutError:
        raise SlowPatternError(
            f'pattern = "{pattern}" took more than {PATTERN_SECONDS:g} s on an answer of {len(text):,} characters:'
            " write one that tries fewer ways"
        ) from None
    last = matches[-1] if matches else None
    return None if last is None or (is_cut and last.end(1) == len(text)) else last[1]


def number_in(text: str) -> float | None:
    """Return the number that a text is, in digits; None where it is anything else, such as 7/10."""
    return float(text) if _NUMBER.fullmatch(text) else None


def number_of(answer: str, field: str) -> float | None:
    """Return the number that a JSON object has under this name; None where the answer is no such object.

    Example: number_of('{"why": "polite", "score": 7}', "score") == 7.0; number_of('{"score": "7"}', "score") is None
    """
    try:
        found = json.loads(after_thinking(answer))
        value = found.get(field) if isinstance(found, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, RecursionError, OverflowError):
        return None
