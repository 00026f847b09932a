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

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, with their log-probs, where the request asks for some."""
    added: bytes = b""
    """The bytes that it adds to the text of its row: those of a part of a character, or none for a special token."""
    offset: int = 0
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

    def ended_at(self, end: int) -> Iterator[Drawn]:
        """Yield the tokens, without the bytes of characters from `end` on, where a stop string cut the text."""
        if end >= self.end:
            yield from self.tokens
            return
        left = len(self.text[: max(0, end - self.offset)].encode())
        for drawn in self.tokens:
            yield drawn._replace(added=drawn.added[:left], offset=min(drawn.offset, end))
            left -= min(left, len(drawn.added))


def spanned(tokens: Sequence[Drawn], text: str, offset: int, policy: Policy) -> Span:
    """Return tokens that were decoded to this text as a span; each token gets its share of the bytes."""
    if len(tokens) == 1 and REPLACEMENT not in text:
        return Span((tokens[0]._replace(added=text.encode(), offset=offset),), text, offset)
    shares = [policy.token_bytes.of(drawn.token) for drawn in tokens]
    if len(tokens) == 1 and shares[0].decode(errors="replace") != text:
        shares = [text.encode()]
    characters, placed, before = codecs.getincrementaldecoder("utf-8")("replace"), list[Drawn](), 0
    for drawn, share in zip(tokens, shares, strict=True):
        placed.append(drawn._replace(added=share, offset=offset + min(before, len(text))))
        before += len(characters.decode(share))
    return Span(tuple(placed), text, offset)


class Piece(NamedTuple):
    """A piece of the answer of one row."""

    row: int
    """The index of the row in its request, from 0."""
    text: str
    """The text that has been added."""
    tokens: tuple[Drawn, ...]
    reason: str = ""
    """`stop` or `length` in the last piece of a row."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(drawn.token for drawn in self.tokens)


@dataclass(eq=False)
class Request:
    """A request for n completions of a prompt, each of which is a row.

    The engine calls `tell` in its own thread: with each piece, with None when all rows have ended, or with an error.
    """

    prompt_ids: Sequence[int]
    tell: Callable[[Piece | Exception | None], None]
    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    truncation: Truncation = WHOLE
    stop: Sequence[str] = ()
    seed: int = 0
    likeliest: int = 0
    """How many of the likeliest tokens are told beside each that was drawn."""
    cancelled: bool = False
    """Set where the client no longer waits, or after an error."""
    beginnings: tuple[str, ...] = field(init=False)
    """All beginnings of stop strings, the longest first: text that ends in one may be about to stop."""

    def __post_init__(self) -> None:
        parts = {stop[:n] for stop in self.stop for n in range(1, len(stop))}
        self.beginnings = tuple(sorted(parts, key=len, reverse=True))


@dataclass(eq=False)
class Row:
    request: Request
    index: int
    random: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Drawn] = field(default_factory=list)
    """Tokens that are not decoded yet."""
    spans: list[Span] = field(default_factory=list)
    """Spans whose text is not sent to its end yet."""
    sent: int = 0
    """The number of characters that were sent."""
    untold: str = ""
    """Text that is decoded and not yet sent, since a stop string may begin in it. None begins in what was sent."""
    decoded: tuple[int, int] = (0, 0)
    """The range of the tokens that were decoded last."""

    def add(self, drawn: Drawn, policy: Policy) -> Piece | None:
        """Add a token. Return the piece that can now be sent, if any; the last piece has a reason."""
        self.token_ids.append(drawn.token)
        self.tokens.append(drawn)
        full = len(self.token_ids) >= self.request.max_tokens
        ended = drawn.token in policy.eos_ids
        before = len(self.untold)
        if not self.decode(policy, ended or full):
            return None
        self.spans.append(spanned(self.tokens, self.untold[before:], self.sent + before, policy))
        self.tokens = []
        cut = min((at for stop in self.request.stop if (at := self.untold.find(stop)) >= 0), default=-1)
        reason = "stop" if ended or cut >= 0 else "length" if full else ""
        told = cut if cut >= 0 else len(self.untold) - (0 if reason else self._held_back())
        return self._piece(told, reason) if told or reason else None

    def decode(self, policy: Policy, ended: bool) -> bool:
        """Add the text of new tokens. Return False where a character is incomplete and more tokens may come.

        They are decoded together with the tokens before them: the first token of a text may lose its space.
        """
        first, end = self.decoded
        before, now = policy.decode(self.token_ids[first:end]), policy.decode(self.token_ids[first:])
        if now.endswith(REPLACEMENT) and not ended and len(self.token_ids) - end < LONGEST_CHARACTER:
            return False
        text = now[len(before) :]
        self.untold += text
        # After a special token, which has no text, a token would lose its space again.
        start = first if not text and len(self.token_ids) - first < LONGEST_CHARACTER else end
        self.decoded = start, len(self.token_ids)
        return True

    def _held_back(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        return next((len(part) for part in self.request.beginnings if self.untold.endswith(part)), 0)

    def _piece(self, characters: int, reason: str) -> Piece:
        """Return the next characters as a piece, with the tokens whose text is sent by then; at the end with all."""
        text, self.untold = self.untold[:characters], self.untold[characters:]
        self.sent += characters
        complete = len(self.spans) if reason else sum(span.end <= self.sent for span in self.spans)
        tokens = tuple(drawn for span in self.spans[:complete] for drawn in span.ended_at(self.sent))
        del self.spans[:complete]
        return Piece(self.index, text, tokens, reason)
