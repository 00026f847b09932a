"""The engine decodes all requests together: rows join the decode batch when there is room, and leave at their end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.machine import hardware
from pellucid.models.drawing import draw, likeliest
from pellucid.models.running import Running
from pellucid.serve.rows import Drawn, Piece, Request, Row

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

PROMPT_TOKENS = 65_536
"""The most tokens of prompts in the cache: their number times the length of the longest, since each takes its room."""
SCORES = 2**24
"""The most attention scores of a head in one prefill, prompts * length^2: 64 prompts of 512 tokens, or one of 4096."""
NOBODY = -1
"""The token id of a row for which none could be drawn."""


class RefusedError(Exception):
    """The engine takes no more requests: it is full, or ending."""


class Meter:
    """Counts by the second, for the rate of the last ten."""

    def __init__(self) -> None:
        self.counts: deque[tuple[int, int]] = deque(maxlen=11)

    def add(self, count: int, now: float) -> None:
        second, before = self.counts[-1] if self.counts else (-1, 0)
        if second == int(now):
            self.counts[-1] = second, before + count
        else:
            self.counts.append((int(now), count))

    def compute_rate(self, now: float) -> float:
        """The mean count per second over the last ten whole seconds."""
        return sum(count for second, count in tuple(self.counts) if int(now) - 10 <= second < int(now)) / 10


class Engine:
    """Decodes the requests that any thread may `submit`; their answers come through `Request.tell`.

    Call `run` in the thread that loaded the model: OpenMP keeps a pool of workers for each thread that has computed,
    and with two pools on two cores a token takes twice as long.
    """

    def __init__(self, policy: Policy, max_rows: int = 64, max_waiting: int = 256) -> None:
        """An engine that decodes at most `rows` rows at once and lets at most `waiting` requests wait."""
        self.policy, self.max_rows, self.max_waiting = policy, max_rows, max_waiting
        self.waiting: list[Request] = []
        self.closed = False
        self.queue_changed = threading.Condition()
        """Guards `waiting` and `closed`, and wakes `run` when they change."""
        self.running: Running[Row] = Running(policy.create_decode_batch(max_rows))
        self.sum_device = hardware.place_of_sums(policy.device)
        self.meter, self.error_count, self.last_error = Meter(), 0, ""
        self.heap = hardware.Heap()

    def submit(self, request: Request) -> None:
        """Queue a request. RefusedError where too many wait; ValueError for more rows than the engine has."""
        if request.n > self.max_rows:
            raise ValueError(f"n = {request.n} is more than the {self.max_rows} rows that are decoded at once")
        with self.queue_changed:
            self._drop_cancelled()
            if self.closed:
                raise RefusedError("the service is ending")
            if len(self.waiting) >= self.max_waiting:
                raise RefusedError("too many requests are waiting: try again in a moment")
            self.waiting.append(request)
            self.queue_changed.notify()

    def close(self) -> None:
        """End `run`, which sends RefusedError to all unfinished requests."""
        with self.queue_changed:
            self.closed = True
            self.queue_changed.notify()

    def run(self) -> None:
        """Decode until the engine is closed."""
        try:
            while self._wait_for_work():
                try:
                    self._admit()
                    if self.running.requests:
                        self._decode_step()
                        self.heap.trim_after_step()
                except Exception as error:  # noqa: BLE001 - whatever it was, the service goes on for others
                    self._reset_batch(error)
        finally:
            self.close()
            self._notify_all([*self._get_active_requests(), *self.waiting], RefusedError("the service is ending"))

    def describe_state(self) -> dict[str, Any]:
        """Return the state of the engine, for `/health`."""
        return {
            "rows": len(self.running.requests),
            "rows_at_most": self.max_rows,
            "waiting": len(self.waiting),
            "waiting_at_most": self.max_waiting,
            "tokens_per_second": self.meter.compute_rate(time.monotonic()),
            "errors": self.error_count,
            "last_error": self.last_error,
        }

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do. Return False when the engine is closed."""
        if not self.running.requests and not self.waiting:
            self.heap.trim()  # the memory of finished prompts' caches
        with self.queue_changed:
            self.queue_changed.wait_for(lambda: self.closed or self.running.requests or self.waiting)
            return not self.closed

    def _drop_cancelled(self) -> None:
        self.waiting = [request for request in self.waiting if not request.cancelled]

    def _get_active_requests(self) -> set[Request]:
        """Return the requests that are being decoded."""
        return {row.request for row in self.running.requests}

    def _admit(self) -> None:
        """Prefill waiting requests while there is room, in order of arrival: small ones never overtake a large one.

        Requests with the same n are prefilled together: four prompts take two and a half times as long as one.
        """
        while joining := self._take_admissible():
            rows = [Row(request, i, generator_of(request.seed, i)) for request in joining for i in range(request.n)]
            self.running.admit([list(request.prompt_ids) for request in joining], rows)

    def _take_admissible(self) -> list[Request]:
        """Take from the queue and return its first requests, as many as fit into one prefill and into the free rows."""
        with self.queue_changed:
            self._drop_cancelled()
            served = [len(request.prompt_ids) for request in self._get_active_requests()]
            joining: list[Request] = []
            for request in self.waiting:
                lengths = [len(one.prompt_ids) for one in (*joining, request)]
                if joining and (request.n != joining[0].n or taken(lengths) * max(lengths) > SCORES):
                    break
                if (served or joining) and taken(served + lengths) > PROMPT_TOKENS:
                    break
                if request.n * len(lengths) > self.running.count_free_slots():
                    break
                joining.append(request)
            del self.waiting[: len(joining)]
            return joining

    def _decode_step(self) -> None:
        """Decode one token for each row."""
        drawn = self._sample_tokens()
        self.meter.add(len(drawn), time.monotonic())
        stays = [place for place, row in enumerate(self.running.requests) if self._append_token(row, drawn[place])]
        before, device = self._get_active_requests(), self.policy.device
        self.running.keep_rows(torch.tensor(stays, dtype=torch.long))
        self._notify_all(before - self._get_active_requests(), None)
        self.running.step(torch.tensor([row.token_ids[-1] for row in self.running.requests], device=device))

    def _sample_tokens(self) -> list[Drawn]:
        """Return the token of every row; adjacent rows of the same settings are drawn together."""
        drawn: list[Drawn] = []
        for _, run in groupby(self.running.requests, lambda row: (row.request.temperature, row.request.truncation)):
            rows = list(run)
            logits = self.running.logits[len(drawn) : len(drawn) + len(rows)]
            uniforms = torch.cat([torch.rand(1, dtype=torch.float64, generator=row.generator) for row in rows])
            drawn += self._sample_rows(rows, logits, uniforms.to(self.sum_device))
        return drawn

    def _sample_rows(self, rows: Sequence[Row], logits: Tensor, uniforms: Tensor) -> list[Drawn]:
        """Return the tokens of rows of the same settings. An error fails only the requests that cause it."""
        request = rows[0].request
        try:
            tokens, logprobs = draw(logits, uniforms, request.temperature, request.truncation)
            others = likeliest_of(rows, logits)
            return list(map(Drawn, tokens.tolist(), logprobs.tolist(), others))
        except Exception as error:  # noqa: BLE001 - as in `run`
            if all(row.request is request for row in rows):
                self._fail_requests({request}, error)
                return [Drawn(NOBODY, 0.0)] * len(rows)
        drawn: list[Drawn] = []
        for _, run in groupby(rows, lambda row: row.request):
            own, start = list(run), len(drawn)
            of_own = slice(start, start + len(own))
            drawn += self._sample_rows(own, logits[of_own], uniforms[of_own])
        return drawn

    def _append_token(self, row: Row, drawn: Drawn) -> bool:
        if row.request.cancelled:
            return False
        try:
            piece = row.append_token(drawn, self.policy)
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._fail_requests({row.request}, error)
            return False
        if piece is not None:
            self._notify(row.request, piece)
        return piece is None or not piece.finish_reason

    def _notify(self, request: Request, news: Piece | Exception | None) -> None:
        """Call `tell` of a request. Where that raises, the request is cancelled."""
        try:
            request.notify(news)
        except Exception as error:  # noqa: BLE001 - as in `run`
            request.cancelled = True
            self._record_error(error)

    def _notify_all(self, requests: Iterable[Request], news: Exception | None) -> None:
        for request in requests:
            if not request.cancelled:
                self._notify(request, news)

    def _fail_requests(self, requests: Iterable[Request], error: Exception) -> None:
        """Send the error to the requests and cancel them; their rows are free at the end of the step."""
        self._record_error(error)
        self._notify_all(requests, error)
        for request in requests:
            request.cancelled = True

    def _reset_batch(self, error: Exception) -> None:
        """Fail all requests that are being decoded, since half a step may have been taken, and start a new batch."""
        requests = self._get_active_requests()
        try:
            self.running = Running(
                self.policy.create_decode_batch(self.max_rows)
            )  # first, since `tell` may look at the state
        finally:
            self._fail_requests(requests, error)

    def _record_error(self, error: Exception) -> None:
        self.error_count += 1
        self.last_error = " ".join(f"{type(error).__name__}: {error}".split())[:300]


def likeliest_of(rows: Sequence[Row], logits: Tensor) -> list[tuple[tuple[int, float], ...]]:
    """Return for each row as many of the likeliest tokens as its request asks for; the rows have one temperature."""
    counts = [row.request.top_logprob_count for row in rows]
    if not any(counts):
        return [()] * len(rows)
    tokens, logprobs = likeliest(logits, rows[0].request.temperature, max(counts))
    pairs = [list(zip(*both, strict=True)) for both in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
    return [tuple(row[:count]) for row, count in zip(pairs, counts, strict=True)]


def taken(lengths: Sequence[int]) -> int:
    """Return the room that prompts take in the cache, in tokens: each takes that of the longest."""
    return len(lengths) * max(lengths)


def generator_of(seed: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
