"""A request and its rows: as tokens are drawn they become text, which ends at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pellucid.models.drawing import WHOLE, Truncation

REPLACEMENT = "\ufffd"
"""What the tokens of a character decode to before the last of them has come."""
LONGEST_CHARACTER = 16
"""How many tokens to wait for the end of a character. It has four bytes at most: one that is not complete after these
tokens never will be, and is sent as it is."""


class Drawn(NamedTuple):
    """A token as it was drawn."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, with their log-probs, where the request asks for some."""


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
    """Those that no piece has had yet."""
    untold: str = ""
    """Text that is decoded and not yet sent, since a stop string may begin in it. None begins in what was sent."""
    decoded: tuple[int, int] = (0, 0)
    """The range of the tokens that were decoded last."""

    def add(self, drawn: Drawn, policy: Any) -> Piece | None:
        """Add a token. Return the piece that can now be sent, if any; the last piece has a reason."""
        self.token_ids.append(drawn.token)
        self.tokens.append(drawn)
        full = len(self.token_ids) >= self.request.max_tokens
        ended = drawn.token in policy.eos_ids
        if not self.decode(policy, ended or full):
            return None
        cut = min((at for stop in self.request.stop if (at := self.untold.find(stop)) >= 0), default=-1)
        reason = "stop" if ended or cut >= 0 else "length" if full else ""
        told = cut if cut >= 0 else len(self.untold) - (0 if reason else self._held_back())
        return self._piece(told, reason) if told or reason else None

    def decode(self, policy: Any, ended: bool) -> bool:
        """Add the text of new tokens. Return False where a character is incomplete and more tokens may come.

        They are decoded together with the tokens before them: the first token of a text may lose its space.
        """
        first, end = self.decoded
        before, now = policy.decode(self.token_ids[first:end]), policy.decode(self.token_ids[first:])
        if now.endswith(REPLACEMENT) and not ended and len(self.token_ids) - end < LONGEST_CHARACTER:
            return False
        self.untold += now[len(before) :]
        self.decoded = end, len(self.token_ids)
        return True

    def _held_back(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        return next((len(part) for part in self.request.beginnings if self.untold.endswith(part)), 0)

    def _piece(self, characters: int, reason: str) -> Piece:
        text, self.untold = self.untold[:characters], self.untold[characters:]
        tokens, self.tokens = tuple(self.tokens), []
        return Piece(self.index, text, tokens, reason)
