"""A request and its rows: as tokens are drawn they become text, which ends at a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from pellucid.models.drawing import WHOLE, Truncation
from pellucid.policy.token_bytes import REPLACEMENT

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

LONGEST_CHARACTER = 16
"""How many tokens to wait for the end of a character. It has four bytes at most: one that is not complete after these
tokens never will be, and is sent as it is."""


class Drawn(NamedTuple):
    """A token as it was drawn."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, with their log-probs, where the request asks for some."""
    text_bytes: bytes = b""
    """The bytes that it adds to the text of its row: those of a part of a character, or none for a special token."""
    text_offset: int = 0
    """The index, in the text of its row, of the character that it begins or continues."""


class Span(NamedTuple):
    """Tokens that were decoded together, and their text: several where they are parts of one character."""

    tokens: tuple[Drawn, ...]
    text: str
    offset: int
    """The number of characters before it in the text of its row."""

    @property
    def end(self) -> int:
        return self.offset + len(self.text)

    def cut_tokens_at(self, end: int) -> Iterator[Drawn]:
        """Yield the tokens, without the bytes of characters from `end` on, where a stop string cut the text."""
        if end >= self.end:
            yield from self.tokens
            return
        left = len(self.text[: max(0, end - self.offset)].encode())
        for drawn in self.tokens:
            yield drawn._replace(text_bytes=drawn.text_bytes[:left], text_offset=min(drawn.text_offset, end))
            left -= min(left, len(drawn.text_bytes))


def spanned(tokens: Sequence[Drawn], text: str, offset: int, policy: Policy) -> Span:
    """Return tokens that were decoded to this text as a span; each token gets its share of the bytes."""
    if len(tokens) == 1 and REPLACEMENT not in text:
        return Span((tokens[0]._replace(text_bytes=text.encode(), text_offset=offset),), text, offset)
    shares = [policy.token_bytes.get_bytes(drawn.token_id) for drawn in tokens]
    if len(tokens) == 1 and shares[0].decode(errors="replace") != text:
        shares = [text.encode()]
    characters, placed, before = codecs.getincrementaldecoder("utf-8")("replace"), list[Drawn](), 0
    for drawn, share in zip(tokens, shares, strict=True):
        placed.append(drawn._replace(text_bytes=share, text_offset=offset + min(before, len(text))))
        before += len(characters.decode(share))
    return Span(tuple(placed), text, offset)


class Piece(NamedTuple):
    """A piece of the answer of one row."""

    row_index: int
    """The index of the row in its request, from 0."""
    text: str
    """The text that has been added."""
    tokens: tuple[Drawn, ...]
    finish_reason: str = ""
    """`stop` or `length` in the last piece of a row."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(drawn.token_id for drawn in self.tokens)


@dataclass(eq=False)
class Request:
    """A request for n completions of a prompt, each of which is a row.

    The engine calls `tell` in its own thread: with each piece, with None when all rows have ended, or with an error.
    """

    prompt_ids: Sequence[int]
    notify: Callable[[Piece | Exception | None], None]
    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    truncation: Truncation = WHOLE
    stop: Sequence[str] = ()
    seed: int = 0
    top_logprob_count: int = 0
    """How many of the likeliest tokens are told beside each that was drawn."""
    cancelled: bool = False
    """Set where the client no longer waits, or after an error."""
    stop_prefixes: tuple[str, ...] = field(init=False)
    """All beginnings of stop strings, the longest first: text that ends in one may be about to stop."""

    def __post_init__(self) -> None:
        parts = {stop[:n] for stop in self.stop for n in range(1, len(stop))}
        self.stop_prefixes = tuple(sorted(parts, key=len, reverse=True))


@dataclass(eq=False)
class Row:
    request: Request
    index: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    undecoded_tokens: list[Drawn] = field(default_factory=list)
    """Tokens that are not decoded yet."""
    unsent_spans: list[Span] = field(default_factory=list)
    """Spans whose text is not sent to its end yet."""
    sent_characters: int = 0
    """The number of characters that were sent."""
    unsent_text: str = ""
    """Text that is decoded and not yet sent, since a stop string may begin in it. None begins in what was sent."""
    decoded_range: tuple[int, int] = (0, 0)
    """The range of the tokens that were decoded last."""

    def append_token(self, token: Drawn, policy: Policy) -> Piece | None:
        """Add a token. Return the piece that can now be sent, if any; the last piece has a reason."""
        self.token_ids.append(token.token_id)
        self.undecoded_tokens.append(token)
        full = len(self.token_ids) >= self.request.max_tokens
        ended = token.token_id in policy.eos_ids
        before = len(self.unsent_text)
        if not self.decode_text(policy, ended or full):
            return None
        self.unsent_spans.append(
            spanned(self.undecoded_tokens, self.unsent_text[before:], self.sent_characters + before, policy)
        )
        self.undecoded_tokens = []
        cut = min((at for stop in self.request.stop if (at := self.unsent_text.find(stop)) >= 0), default=-1)
        reason = "stop" if ended or cut >= 0 else "length" if full else ""
        told = cut if cut >= 0 else len(self.unsent_text) - (0 if reason else self._count_held_back())
        return self._take_chunk(told, reason) if told or reason else None

    def decode_text(self, policy: Policy, is_last: bool) -> bool:
        """Add the text of new tokens. Return False where a character is incomplete and more tokens may come.

        They are decoded together with the tokens before them: the first token of a text may lose its space.
        """
        first, end = self.decoded_range
        before, now = policy.decode(self.token_ids[first:end]), policy.decode(self.token_ids[first:])
        if now.endswith(REPLACEMENT) and not is_last and len(self.token_ids) - end < LONGEST_CHARACTER:
            return False
        text = now[len(before) :]
        self.unsent_text += text
        # After a special token, which has no text, a token would lose its space again.
        start = first if not text and len(self.token_ids) - first < LONGEST_CHARACTER else end
        self.decoded_range = start, len(self.token_ids)
        return True

    def _count_held_back(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        return next((len(part) for part in self.request.stop_prefixes if self.unsent_text.endswith(part)), 0)

    def _take_chunk(self, characters: int, finish_reason: str) -> Piece:
        """Return the next characters as a piece, with the tokens whose text is sent by then; at the end with all."""
        text, self.unsent_text = self.unsent_text[:characters], self.unsent_text[characters:]
        self.sent_characters += characters
        complete = (
            len(self.unsent_spans)
            if finish_reason
            else sum(span.end <= self.sent_characters for span in self.unsent_spans)
        )
        tokens = tuple(
            drawn for span in self.unsent_spans[:complete] for drawn in span.cut_tokens_at(self.sent_characters)
        )
        del self.unsent_spans[:complete]
        return Piece(self.index, text, tokens, finish_reason)
