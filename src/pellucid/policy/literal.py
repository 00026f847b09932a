"""Texts in which special tokens that somebody has written stay text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from pellucid.types import Message

MARK = "\ue000{}\ue001"
"""Stands in for a special token while a template is filled in: characters for private use, which no template knows."""


def tokenized(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]
) -> list[int]:
    """Return the token ids of what `render` makes of messages. Special tokens in their contents are no special tokens.

    Where there are none in them, these are the ids of the whole text; else each is tokenized apart from the rest.
    """
    written: list[str] = []
    special = re.compile("|".join(map(re.escape, sorted(specials(tokenizer), key=len, reverse=True))) or "(?!)")
    marked = [{**m, "content": special.sub(partial(_mark, written), m["content"] or "")} for m in messages]
    pieces = re.split(MARK.format(r"(\d+)"), render(marked)) if written else [render(marked)]
    ids: list[int] = []
    for place, piece in enumerate(pieces):
        text = written[int(piece)] if place % 2 else piece
        ids += tokenizer(text, add_special_tokens=False, split_special_tokens=bool(place % 2))["input_ids"]
    return ids


def specials(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of all special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(str(token.content) for token in added if token.special)} - {""}


def _mark(written: list[str], match: re.Match[str]) -> str:
    written.append(match[0])
    return MARK.format(len(written) - 1)
