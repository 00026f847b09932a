"""Texts in which special tokens that somebody has written stay text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from pellucid.types import Message

START, END = "\ue000", "\ue001"
"""Around the number that stands for a special token while a template is filled in: characters for private use."""
BREAK = "\n"
"""Stands before a text that is tokenized apart: some tokenizers put a space before whatever they are given."""


def tokenized(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]
) -> list[int]:
    """Return the token ids of what `render` makes of messages. Special tokens written in these are no special tokens.

    Where none is written in them, these are the ids of the whole text; else each one is tokenized apart from the rest.
    """
    special = specials(tokenizer)
    written: list[str] = []
    marked = _marked(messages, _any_of((*special, START, END)), written)
    if special.isdisjoint(written):
        return ids_of(tokenizer, render(messages))
    first, *pieces = re.split(f"{START}(\\d+){END}", render(marked))
    ids = ids_of(tokenizer, first)
    for place, piece in enumerate(pieces):
        ids += _behind(tokenizer, piece) if place % 2 else _spelled(tokenizer, written[int(piece)])
    return ids


def specials(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of all special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(str(token.content) for token in added if token.special)} - {""}


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str, literal: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=literal)["input_ids"])


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _marked(value: Any, special: re.Pattern[str], written: list[str]) -> Any:
    """The value with a mark in place of every special token in its texts, which is added to `written`."""

    def mark(match: re.Match[str]) -> str:
        written.append(match[0])
        return f"{START}{len(written) - 1}{END}"

    if isinstance(value, str):
        return special.sub(mark, value)
    if isinstance(value, dict):
        return {key: _marked(inner, special, written) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(inner, special, written) for inner in value]
    return value


def _behind(tokenizer: PreTrainedTokenizerBase, text: str, literal: bool = False) -> list[int]:
    """Token ids of a text that does not stand at the beginning."""
    before = ids_of(tokenizer, BREAK)
    both = ids_of(tokenizer, BREAK + text, literal)
    return both[len(before) :] if both[: len(before)] == before else ids_of(tokenizer, text, literal)


def _spelled(tokenizer: PreTrainedTokenizerBase, token: str) -> list[int]:
    """Token ids of the characters of a special token; of each alone where its vocabulary has it as a word, too."""
    ids = _behind(tokenizer, token, literal=True)
    if tokenizer.convert_tokens_to_ids(token) not in ids:
        return ids
    return [id for character in token for id in _behind(tokenizer, character, literal=True)]
