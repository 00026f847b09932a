"""Continuous batching: one scheduler for the native sampler, for conversations, and for the service.

Rows join the decode batch when there are free slots and leave it when they finish. `ConversationScheduler` adds what
conversations need: rows that wait for a reply, and go on from their own KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pellucid.algorithm.batch import copy_to_device
from pellucid.models.decode import EvictedRow, RunningBatch
from pellucid.rollout.conversations import REPLY_POLL_SECONDS, ConversationBatch, ConversationRow
from pellucid.rollout.groups import sample_tokens
from pellucid.types import Group
from pellucid.utils import hardware

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

_EVICT_AFTER_STEPS = 8
"""The number of decode steps after which the cache of a row that waits for a reply may leave the batch."""
_DECODING_ROWS_PER_EXTENSION = 4
"""Replies are appended when there is one for this many decoding rows, or when no row decodes: appending one token costs
about as much as appending many."""
GATHER_SECONDS = 0.05
"""How long the first reply waits for others if no row decodes: about the time of a decode step, which costs as much
for a few rows as for all of them."""


class RowState(Enum):
    """The state of a row after it received tokens."""

    DECODING = "decoding"
    PAUSED = "paused"
    """It keeps its slot and its KV cache, and waits for `Scheduler.resume`."""
    FINISHED = "finished"


class Row(Protocol):
    """One sequence of a request."""

    @property
    def uniforms(self) -> Iterator[float]: ...


RowT = TypeVar("RowT", bound=Row)
_SampleTokens = Callable[[Sequence[RowT], Tensor, Tensor], tuple[Tensor, Tensor, Sequence[Any]]]
"""(rows, logits [n, V], uniforms [n]) -> tokens [n], log-probs [n], and n sampling masks or other values, or none."""
_AppendTokens = Callable[[RowT, list[int], list[float], list[Any]], RowState]
"""(row, tokens, log-probs, masks) -> what the row does next. It ignores tokens past the end of the row."""


class Request(NamedTuple, Generic[RowT]):
    """A prompt and the rows that continue it."""

    prompt_ids: Sequence[int]
    rows: Sequence[RowT]


class Scheduler(Generic[RowT]):
    """Continuous batching. Add requests, and call `step` until `has_requests` is false.

    A step admits the waiting requests for which there are free slots (one prefill), samples a token for each row,
    hands the tokens to `append_tokens`, drops the rows that finished, and runs one decode step. Requests are admitted
    in the order of their arrival; a small one never overtakes a large one.
    """

    def __init__(
        self,
        policy: Policy,
        max_rows: int,
        sample_tokens: _SampleTokens[RowT],
        append_tokens: _AppendTokens[RowT],
        on_finished: Callable[[list[RowT]], None] | None = None,
        compacts_at_once: bool = True,
    ) -> None:
        """Create a scheduler with free slots only.

        Args:
            max_rows: the number of slots; no request may have more rows.
            on_finished: gets finished rows before the next decode step; with `compacts_at_once` their slots are free.
            compacts_at_once: drop finished rows at once. On a GPU a step is hardly faster without them, while
                dropping them costs a copy and a new CUDA graph. False drops them when half of the rows have finished,
                or when that makes room for the next request.
        """
        self.device, self.sampling_device = policy.device, hardware.pick_float64_device(policy.device)
        self.sample_tokens, self.append_tokens, self.on_finished = sample_tokens, append_tokens, on_finished
        self.compacts_at_once = compacts_at_once
        self.waiting: list[Request[RowT]] = []
        self.running: RunningBatch[RowT] = RunningBatch(policy.create_decode_batch(max_rows))
        self.decoding: set[RowT] = set()
        self.paused: dict[RowT, int] = {}
        """The paused rows that have a slot, and for how many decode steps they have waited."""
        self.evicted: dict[RowT, EvictedRow] = {}
        """The paused rows that have no slot."""

    @property
    def has_requests(self) -> bool:
        """Whether requests wait or decode."""
        return bool(self.waiting or self.decoding)

    def add_request(self, prompt_ids: Sequence[int], rows: Sequence[RowT]) -> None:
        """Queue rows that continue one prompt."""
        self.waiting.append(Request(prompt_ids, rows))

    def admit(self) -> None:
        """Prefill waiting requests while there are free slots; those of equal size are prefilled together."""
        while self.waiting:
            size = len(self.waiting[0].rows)
            fitting = self.waiting[: self.running.count_free_slots() // size]
            joining = list(takewhile(lambda request: len(request.rows) == size, fitting))  # noqa: B023
            if not joining:
                return
            self.waiting = self.waiting[len(joining) :]
            rows = [row for request in joining for row in request.rows]
            self.running.admit([request.prompt_ids for request in joining], rows)
            self.decoding.update(rows)

    def step(self, tokens: int = 1) -> None:
        """Admit requests, and decode `tokens` tokens of each row before `append_tokens` receives them.

        With more than 1, the host waits less often for a GPU, but no row may be paused.
        """
        self.admit()
        if self.decoding:
            self._decode(tokens)

    def resume(self, rows: Sequence[RowT], tokens: Sequence[Sequence[int]]) -> list[RowT]:
        """Append these tokens to paused rows, which decode again. Return the rows for which no slot is free."""
        tokens_of = dict(zip(rows, tokens, strict=True))
        restored = [row for row in rows if row in self.evicted][: self.running.count_free_slots()]
        if restored:
            self.running.restore([self.evicted.pop(row) for row in restored], restored)
        resumed = [row for row in rows if row not in self.evicted]
        if resumed:
            self.running.append_tokens(self._find_slots(resumed), [tokens_of[row] for row in resumed])
            for row in resumed:
                self.paused.pop(row, None)
            self.decoding.update(resumed)
        return [row for row in rows if row in self.evicted]

    def evict(self, rows: Iterable[RowT]) -> None:
        """Move the KV caches of paused rows out of the batch, to free their slots."""
        evicted_rows = set(rows)
        if ordered := [row for row in self.running.requests if row in evicted_rows]:
            self.evicted |= dict(zip(ordered, self.running.evict(self._find_slots(ordered)), strict=True))
            for row in ordered:
                del self.paused[row]

    def cancel(self, rows: Iterable[RowT]) -> None:
        """Drop paused rows."""
        for row in rows:
            self.paused.pop(row, None)
            self.evicted.pop(row, None)
        self._drop_finished()

    def _decode(self, count: int) -> None:
        """Sample tokens, hand them out, and run a decode step on the last of them."""
        rows, logits = self.running.requests, self.running.logits
        if self.paused:
            assert count == 1
            rows = [row for row in rows if row in self.decoding]
            logits = logits[self._find_slots(rows).to(logits.device)]
        last, ids, logprobs, extras = self._sample(rows, logits, count)
        for row in self.paused:
            self.paused[row] += 1
        finished: list[RowT] = []
        for row, row_ids, row_logprobs, row_extras in zip(rows, ids, logprobs, extras, strict=True):
            if row not in self.decoding:
                continue  # it has finished, but still has its slot
            state = self.append_tokens(row, row_ids, row_logprobs, row_extras)
            if state is not RowState.DECODING:
                self.decoding.discard(row)
            if state is RowState.FINISHED:
                finished.append(row)
            elif state is RowState.PAUSED:
                self.paused[row] = 0
        unfinished = len(self.decoding) + len(self.paused)
        if not self.decoding:
            self._drop_finished()
        elif unfinished < len(self.running.requests) and self._should_compact(unfinished):
            slots = self._list_unfinished_slots()
            self.running.keep_rows(slots)  # without their logits, which the step replaces
            last = last if self.paused else last[copy_to_device(slots, last.device)]
        if finished and self.on_finished:
            self.on_finished(finished)
        if self.decoding and self.paused:  # paused rows do not change
            last_ids = {row: row_ids[-1] for row, row_ids in zip(rows, ids, strict=True)}
            last = torch.tensor([last_ids.get(row, 0) for row in self.running.requests], device=self.device)
            self.running.step_active(last, torch.tensor([row in self.decoding for row in self.running.requests]))
        elif self.decoding:
            self.running.step(last)

    def _sample(
        self, rows: Sequence[RowT], logits: Tensor, count: int
    ) -> tuple[Tensor, list[list[int]], list[list[float]], list[list[Any]]]:
        """Sample `count` tokens. Return the last ones [n], and the tokens, log-probs and masks of each row."""
        nothing = [0.0] * count  # finished rows that still have a slot get any token
        uniforms = [list(islice(row.uniforms, count)) if row in self.decoding else nothing for row in rows]
        tokens: list[Tensor] = []
        logprobs, extras = [], [[] for _ in rows]
        for column in copy_to_device(torch.tensor(uniforms, dtype=torch.float64), self.sampling_device).unbind(1):
            if tokens:
                self.running.step(tokens[-1])
                logits = self.running.logits
            token, logprob, more = self.sample_tokens(rows, logits, column)
            tokens.append(token)
            logprobs.append(logprob)
            for row_extras, extra in zip(extras, more, strict=False):  # without masks, `more` is empty
                row_extras.append(extra)
        values = torch.stack(logprobs, 1)
        # One copy from the device, so that the host waits once. Floats hold the ids of any vocabulary exactly.
        ids, values = torch.stack([torch.stack(tokens, 1).to(values), values]).cpu()
        return tokens[-1], ids.long().tolist(), values.tolist(), extras

    def _drop_finished(self) -> None:
        """Drop finished rows if no decode step follows: paused rows keep their logits."""
        if len(self.decoding) + len(self.paused) < len(self.running.requests):
            self.running.keep_rows_and_logits(self._list_unfinished_slots())

    def _list_unfinished_slots(self) -> Tensor:
        return self._find_slots([row for row in self.running.requests if row in self.decoding or row in self.paused])

    def _should_compact(self, unfinished: int) -> bool:
        if self.compacts_at_once:
            return True
        rows, wanted = len(self.running.requests), len(self.waiting[0].rows) if self.waiting else 0
        return 2 * unfinished <= rows or 0 < wanted <= self.running.count_free_slots() + rows - unfinished

    def _find_slots(self, rows: Sequence[RowT]) -> Tensor:
        """Return the slots [n] of rows, on the CPU."""
        slots = {row: slot for slot, row in enumerate(self.running.requests)}
        return torch.tensor([slots[row] for row in rows], dtype=torch.long)


class ConversationScheduler:
    """Runs conversations to their ends. Rows keep their slots while they wait for their environments.

    No row waits for the reply of another. Rows that have a reply are extended together, a few at a time. A row that
    waits long makes room for others, and comes back with its KV cache.
    """

    def __init__(
        self,
        policy: Policy,
        conversations: ConversationBatch,
        rows: int,
        deterministic: bool = False,
    ) -> None:
        """Create a scheduler for these conversations.

        Args:
            rows: the number of slots; it is raised to the size of a group.
            deterministic: before each step wait for all replies, so that the clock does not decide which rows are
                decoded together.
        """
        self.conversations, self.max_rows = conversations, max(rows, conversations.sampling.n)
        self.deterministic = deterministic
        self.scheduler: Scheduler[ConversationRow] = Scheduler(
            policy,
            self.max_rows,
            lambda _, logits, uniforms: sample_tokens(logits, uniforms, conversations.sampling),
            self._append_tokens,
        )
        self.can_append = self.scheduler.running.batch.can_append

    def run(self) -> list[Group]:
        while not self.conversations.is_done:
            self.conversations.start(2 * self.max_rows)
            self.conversations.poll_replies(0.0 if self.scheduler.decoding else REPLY_POLL_SECONDS)
            self._wait_for_replies()
            self._drop_ended()
            self._admit_new_rows()
            self._extend_ready()
            if self.scheduler.decoding:
                self.scheduler.step()
                self._evict_paused()
        return self.conversations.collect_groups()

    def _wait_for_replies(self) -> None:
        until = time.monotonic() + (0.0 if self.scheduler.decoding else GATHER_SECONDS)
        while self.conversations.pending_replies and (self.deterministic or time.monotonic() < until):
            self.conversations.poll_replies(
                REPLY_POLL_SECONDS if self.deterministic else max(0.0, until - time.monotonic())
            )

    def _drop_ended(self) -> None:
        """Drop the paused rows whose conversation is over, or begins anew with another prompt."""
        paused = (*self.scheduler.paused, *self.scheduler.evicted)
        if ended := [row for row in paused if row.outcome or row in self.conversations.prefill_queue]:
            self.scheduler.cancel(ended)

    def _admit_new_rows(self) -> None:
        """Prefill the prompts of new rows, groups of equal size together."""
        by_size: dict[int, list[list[ConversationRow]]] = {}
        for siblings in self.conversations.take_prefill_groups(self.scheduler.running.count_free_slots()):
            by_size.setdefault(len(siblings), []).append(siblings)
        sizes = list(by_size.values())
        admitted = len(sizes) if self.can_append else 1
        for siblings in [siblings for groups in sizes[:admitted] for siblings in groups]:
            self.scheduler.add_request(siblings[0].context, siblings)
        self.conversations.prefill_queue += [
            row for groups in sizes[admitted:] for siblings in groups for row in siblings
        ]
        self.scheduler.admit()

    def _extend_ready(self) -> None:
        """Append replies to rows when enough rows have one."""
        ready, scheduler = self.conversations.extend_queue, self.scheduler
        if not ready or len(ready) * _DECODING_ROWS_PER_EXTENSION < len(scheduler.decoding):
            return
        if self.can_append:
            new_tokens = [row.context[row.cached_length :] for row in ready]
            self.conversations.extend_queue = scheduler.resume(ready, new_tokens)
        elif not scheduler.running.requests:
            self.conversations.extend_queue = ready[self.max_rows :]
            for row in ready[: self.max_rows]:
                scheduler.add_request(row.context, [row])
            scheduler.admit()

    def _evict_paused(self) -> None:
        """Evict rows that have waited long, when others may use their slots."""
        scheduler, conversations = self.scheduler, self.conversations
        has_many_paused = 2 * len(scheduler.paused) > len(scheduler.running.requests)
        if conversations.prefill_queue or scheduler.evicted or has_many_paused:
            late = [row for row, steps in scheduler.paused.items() if steps > _EVICT_AFTER_STEPS]
            scheduler.evict(row for row in late if row not in conversations.extend_queue)

    def _append_tokens(
        self, row: ConversationRow, ids: list[int], logprobs: list[float], masks: list[Tensor]
    ) -> RowState:
        """Add a token to a turn. At its end, send the turn to the environment."""
        if not self.conversations.add_token(row, ids[0], logprobs[0], masks[0] if masks else None):
            return RowState.DECODING
        self.conversations.finish_turn(row)
        row.cached_length = len(row.question_ids) + len(row.tokens) - 1  # the last token is not in the cache
        return RowState.PAUSED if self.can_append and not self.conversations.is_last_turn(row) else RowState.FINISHED
