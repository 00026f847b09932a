"""Group decoding of conversations: rows speak, wait for their reply in their place, and go on from their own cache.

A row that waits long makes room for others and comes back with what it had. None waits for the reply of another: those
that have one are told it together, a few at a time, since reading one token costs about as much as reading many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.models.decode import EvictedRow, RunningBatch
from pellucid.rollout.conversations import REPLY_POLL_SECONDS, ConversationBatch, ConversationRow
from pellucid.rollout.groups import compute_row_seed, sample_tokens
from pellucid.types import Group
from pellucid.utils import hardware

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

EVICT_AFTER_TOKENS = 8
"""How many tokens of others a row waits for its reply in its place."""
DECODING_ROWS_PER_EXTENSION = 4
"""Rows are told something when they are one of so many that speak, or nobody speaks."""
GATHER_SECONDS = 0.05
"""Seconds, about those of a token, that the first to be told something wait for others where nobody speaks: what a few
begin alone costs as much as if all spoke."""


class MultiTurnScheduler:
    """The rows of conversations in one decode batch. `hold` samples all of them to their ends."""

    def __init__(
        self,
        policy: Policy,
        conversations: ConversationBatch,
        rows: int,
        deterministic: bool = False,
        int8: bool = False,
    ) -> None:
        """patient: whether all wait for every reply, so that who is beside whom does not depend on the clock. int8: as
        in `Native`.
        """
        self.deterministic = deterministic
        self.policy, self.conversations, self.max_rows = policy, conversations, max(rows, conversations.sampling.n)
        self.running: RunningBatch[ConversationRow] = RunningBatch(policy.create_decode_batch(self.max_rows, int8))
        self.can_extend = self.running.batch.can_append
        self.decoding: set[ConversationRow] = set()
        self.waited_tokens: dict[ConversationRow, int] = {}
        """How many tokens each row in the batch has waited."""
        self.evicted: dict[ConversationRow, EvictedRow] = {}
        seeds = [
            compute_row_seed(
                conversations.sampling.seed, conversations.prompts[r.number // conversations.sampling.n], s
            )
            for r, s in self._list_samples()
        ]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.uniforms = [self._draw_uniforms(number) for number in range(len(seeds))]
        self.sampling_device = hardware.pick_float64_device(policy.device)

    def run(self) -> list[Group]:
        while not self.conversations.is_done:
            self.conversations.start(2 * self.max_rows)
            self.conversations.poll_replies(0.0 if self.decoding else REPLY_POLL_SECONDS)
            self._wait_for_replies()
            self._drop_rows([row for row in self.running.requests if self._has_left_batch(row)])
            self._admit_waiting()
            self._extend_ready()
            if self.decoding:
                self._decode()
        return self.conversations.collect_groups()

    def _wait_for_replies(self) -> None:
        until = time.monotonic() + (0.0 if self.decoding else GATHER_SECONDS)
        while self.conversations.pending_replies and (self.deterministic or time.monotonic() < until):
            self.conversations.poll_replies(
                REPLY_POLL_SECONDS if self.deterministic else max(0.0, until - time.monotonic())
            )

    def _list_samples(self) -> list[tuple[ConversationRow, int]]:
        return [(row, row.number % self.conversations.sampling.n) for row in self.conversations.rows]

    def _has_left_batch(self, row: ConversationRow) -> bool:
        """Whether a row in the batch is over, or begins anew."""
        return (row.outcome is not None and row not in self.decoding) or row in self.conversations.prefill_queue

    # ------------------------------------------------------------ who comes, who goes

    def _admit_waiting(self) -> None:
        for row in self.conversations.prefill_queue:
            self.evicted.pop(row, None)
        by_size: dict[int, list[list[ConversationRow]]] = {}
        for alike in self.conversations.take_prefill_groups(self.running.count_free_slots()):
            by_size.setdefault(len(alike), []).append(alike)
        for groups in by_size.values() if self.can_extend else list(by_size.values())[:1]:
            self._admit(groups)
        for left in [] if self.can_extend else list(by_size.values())[1:]:
            self.conversations.prefill_queue += [row for alike in left for row in alike]

    def _admit(self, groups: Sequence[Sequence[ConversationRow]]) -> None:
        rows = [row for alike in groups for row in alike]
        self.running.admit([alike[0].context for alike in groups], rows)
        for row in rows:
            row.cached_length = len(row.question) + len(row.tokens)
        self.decoding |= set(rows)

    def _extend_ready(self) -> None:
        """Tell rows what was said to them, when there are enough of them."""
        told = self.conversations.extend_queue
        if not told or len(told) * DECODING_ROWS_PER_EXTENSION < len(self.decoding):
            return
        if not self.can_extend:
            if not self.running.requests:
                some, self.conversations.extend_queue = told[: self.max_rows], told[self.max_rows :]
                self._admit([[row] for row in some])
            return
        back = [row for row in told if row in self.evicted][: self.running.count_free_slots()]
        if back:
            self.running.restore([self.evicted.pop(row) for row in back], back)
        here = [row for row in told if row not in self.evicted]
        if here:
            self.conversations.extend_queue = [row for row in told if row in self.evicted]
            self.running.append_tokens(self._find_slots(here), [row.context[row.cached_length :] for row in here])
            for row in here:
                row.cached_length = len(row.question) + len(row.tokens)
                self.waited_tokens.pop(row, None)
            self.decoding |= set(here)

    def _drop_rows(self, rows: Sequence[ConversationRow]) -> None:
        if rows:
            gone = set(rows)
            stays = [place for place, row in enumerate(self.running.requests) if row not in gone]
            self.running.keep_rows_and_logits(torch.tensor(stays, dtype=torch.long))
            for row in rows:
                self.waited_tokens.pop(row, None)

    def _evict_waiting(self) -> None:
        """Set rows aside that have waited long, where others could use their place."""
        long = {
            row
            for row, steps in self.waited_tokens.items()
            if steps > EVICT_AFTER_TOKENS and row not in self.conversations.extend_queue
        }
        wanted = (
            self.conversations.prefill_queue or self.evicted or 2 * len(self.waited_tokens) > len(self.running.requests)
        )
        if long and wanted:
            rows = [row for row in self.running.requests if row in long]
            self.evicted |= dict(zip(rows, self.running.evict(self._find_slots(rows)), strict=True))
            for row in rows:
                del self.waited_tokens[row]

    # ------------------------------------------------------------ a token

    def _decode(self) -> None:
        rows = [row for row in self.running.requests if row in self.decoding]
        places = self._find_slots(rows)
        logits = self.running.logits
        logits = logits if len(rows) == len(self.running.requests) else logits[places.to(logits.device)]
        uniforms = torch.stack([self._get_uniform(row) for row in rows]).to(self.sampling_device)
        tokens, logprobs, masks = sample_tokens(logits, uniforms, self.conversations.sampling)
        kept = masks or [None] * len(rows)
        drawn_by = zip(rows, tokens.tolist(), logprobs.tolist(), kept, strict=True)
        silent = [
            row for row, token, logprob, mask in drawn_by if self.conversations.add_token(row, token, logprob, mask)
        ]
        for row in silent:
            self.decoding.discard(row)
            self.conversations.finish_turn(row)
        self._append_tokens(rows, tokens, silent)

    def _append_tokens(
        self, rows: Sequence[ConversationRow], tokens: Tensor, finished_turns: Sequence[ConversationRow]
    ) -> None:
        """Append what was drawn to the rows that go on; those whose turn has ended wait, or leave."""
        leave = [row for row in finished_turns if not self.can_extend or self.conversations.is_last_turn(row)]
        self.waited_tokens = {row: steps + 1 for row, steps in self.waited_tokens.items()}
        self.waited_tokens |= dict.fromkeys((row for row in finished_turns if row not in leave), 0)
        token_of = dict(zip(rows, tokens.tolist(), strict=True))
        self._drop_rows(leave)
        if self.decoding:
            every = [token_of.get(row, 0) for row in self.running.requests]
            speaks = [row in self.decoding for row in self.running.requests]
            tokens = torch.tensor(every, device=self.policy.device)
            if all(speaks):
                self.running.step(tokens)
            else:
                self.running.step_active(tokens, torch.tensor(speaks))
            for row in self.decoding:
                row.cached_length += 1
        self._evict_waiting()

    def _find_slots(self, rows: Sequence[ConversationRow]) -> Tensor:
        place = {row: i for i, row in enumerate(self.running.requests)}
        return torch.tensor([place[row] for row in rows], dtype=torch.long)

    def _get_uniform(self, row: ConversationRow) -> Tensor:
        if row.sampled_count == len(self.uniforms[row.number]):
            self.uniforms[row.number] = torch.cat([self.uniforms[row.number], self._draw_uniforms(row.number)])
        return self.uniforms[row.number][row.sampled_count]

    def _draw_uniforms(self, number: int) -> Tensor:
        return torch.rand(
            self.conversations.sampling.max_tokens, dtype=torch.float64, generator=self.generators[number]
        )
