"""Decodes for all requests at once: rows join a flight when they arrive and leave when they end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import torch

from pellucid import hardware
from pellucid.models.drawing import WHOLE, Truncation, draw

REPLACEMENT = "\ufffd"
"""What an incomplete character decodes to: its last token is yet to come."""


class Piece(NamedTuple):
    """News of one row."""

    row: int
    """Of the request, from 0."""
    text: str
    """What has been added."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str = ""
    """`stop` or `length` in the last piece of a row."""


@dataclass(eq=False)
class Request:
    """n answers to a prompt. `tell` is called in the engine's thread, with None when all rows have ended."""

    prompt_ids: Sequence[int]
    tell: Callable[[Piece | Exception | None], None]
    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    truncation: Truncation = WHOLE
    stop: Sequence[str] = ()
    seed: int = 0
    cancelled: bool = False
    """Set by whoever no longer waits."""


@dataclass(eq=False)
class Row:
    request: Request
    index: int
    random: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    """Of all tokens but those of a character that is not whole yet."""
    decoded: tuple[int, int] = (0, 0)
    """Where the last tokens that were decoded begin and end."""
    told: int = 0
    """Characters."""
    told_tokens: int = 0

    def decode(self, policy: Any, ended: bool) -> bool:
        """Adds the text of new tokens, read behind the last ones: the first of a text may decode without its space.
        False where a character is not whole, and more may come.
        """
        first, end = self.decoded
        before, now = policy.decode(self.token_ids[first:end]), policy.decode(self.token_ids[first:])
        if now.endswith(REPLACEMENT) and not ended:
            return False
        self.text += now[len(before) :]
        self.decoded = end, len(self.token_ids)
        return True


class Engine:
    """`submit` from any thread; answers come through `Request.tell`.

    `run` belongs into the thread that loaded the model: OpenMP keeps a pool of workers for each thread that has
    computed, and with two pools on two cores a token takes twice as long.
    """

    def __init__(self, policy: Any, rows: int = 64, waiting: int = 256) -> None:
        """Decodes at most `rows` at once; at most `waiting` requests wait for room."""
        self.policy, self.rows = policy, rows
        self.inbox: queue.Queue[Request | None] = queue.Queue(waiting)
        self.waiting: list[Request] = []
        self.flying: list[Row] = []
        self.flight = policy.flight(rows)
        self.logits = torch.zeros(0)
        self.place = hardware.place_of_sums(policy.device)

    def submit(self, request: Request) -> None:
        """queue.Full where too many wait. A request of more rows than the engine has is the caller's mistake."""
        if request.n > self.rows:
            raise ValueError(f"n = {request.n} is more than the {self.rows} rows that are decoded at once")
        self.inbox.put_nowait(request)

    def close(self) -> None:
        """Ends `run`; what is in flight is not finished."""
        self.inbox.put(None)

    def run(self) -> None:
        """Until it is closed."""
        while True:
            for request in self._arrivals():
                if request is None:
                    return
                self.waiting.append(request)
            try:
                self._board()
                if self.flying:
                    self._advance()
            except RuntimeError as error:  # out of memory: those in flight are lost, the service is not
                self._abandon(error)

    def _arrivals(self) -> Iterator[Request | None]:
        """Waits for the next only where there is nothing to do."""
        if not self.flying and not self.waiting:
            yield self.inbox.get()
        while not self.inbox.empty():
            yield self.inbox.get()

    def _abandon(self, error: RuntimeError) -> None:
        for request in {row.request for row in self.flying} | set(self.waiting):
            request.tell(error)
        self.flying, self.waiting = [], []
        self.flight, self.logits = self.policy.flight(self.rows), torch.zeros(0)

    def _board(self) -> None:
        """In the order of arrival: a large request is not overtaken for ever by small ones. Those of the same size are
        read together: four prompts take two and a half times as long as one.
        """
        self.waiting = [request for request in self.waiting if not request.cancelled]
        while self.waiting and (n := self.waiting[0].n) <= self.flight.room():
            alike = list(takewhile(lambda request: request.n == n, self.waiting))
            aboard = alike[: self.flight.room() // n]
            del self.waiting[: len(aboard)]
            logits = self.flight.admit([list(request.prompt_ids) for request in aboard], n)
            self.logits = torch.cat([self.logits, logits]) if len(self.logits) else logits
            self.flying += [Row(r, i, generator_of(r.seed, i)) for r in aboard for i in range(n)]

    def _advance(self) -> None:
        """One token for each row."""
        tokens = self._drawn()
        stays = []
        for place, row in enumerate(self.flying):
            row.token_ids.append(int(tokens[place][0]))
            row.logprobs.append(float(tokens[place][1]))
            if not row.request.cancelled and not self._told(row):
                stays.append(place)
        if len(stays) < len(self.flying):
            before, self.flying = self.flying, [self.flying[i] for i in stays]
            self.flight.keep(torch.tensor(stays, dtype=torch.long, device=self.policy.device))
            self._finish({row.request for row in before} - {row.request for row in self.flying})
        last = torch.tensor([row.token_ids[-1] for row in self.flying], device=self.policy.device)
        self.logits = self.flight.step(last) if self.flying else self.logits[:0]

    def _drawn(self) -> list[tuple[int, float]]:
        """(token, log-prob) of every row; rows of the same settings are drawn together."""
        drawn: list[tuple[int, float]] = []
        for _, run in groupby(self.flying, lambda row: (row.request.temperature, row.request.truncation)):
            rows = list(run)
            logits = self.logits[len(drawn) : len(drawn) + len(rows)]
            uniforms = torch.cat([torch.rand(1, dtype=torch.float64, generator=row.random) for row in rows])
            request = rows[0].request
            tokens, logprobs = draw(logits, uniforms.to(self.place), request.temperature, request.truncation)
            drawn += zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return drawn

    def _told(self, row: Row) -> bool:
        """Passes on what is new; whether the row has ended."""
        request = row.request
        full = len(row.token_ids) >= request.max_tokens
        ended = row.token_ids[-1] in self.policy.eos_ids
        if not row.decode(self.policy, ended or full):
            return False
        text = row.text
        cut = min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=-1)
        reason = "stop" if ended or cut >= 0 else "length" if full else ""
        if not reason and text.endswith(beginnings(request.stop)):
            return False
        new = text[row.told : cut if cut >= 0 else len(text)]
        if new or reason:
            request.tell(
                Piece(
                    row.index,
                    new,
                    tuple(row.token_ids[row.told_tokens :]),
                    tuple(row.logprobs[row.told_tokens :]),
                    reason,
                )
            )
            row.told, row.told_tokens = row.told + len(new), len(row.token_ids)
        return bool(reason)

    def _finish(self, requests: set[Request]) -> None:
        for request in requests:
            if not request.cancelled:
                request.tell(None)


def beginnings(stops: Sequence[str]) -> tuple[str, ...]:
    """Of stop strings: text that ends in one may be about to stop."""
    return tuple(stop[:n] for stop in stops for n in range(1, len(stop)))


def generator_of(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
