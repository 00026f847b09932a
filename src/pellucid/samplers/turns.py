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

from pellucid.machine import hardware
from pellucid.models.running import Running
from pellucid.models.turns import Aside
from pellucid.samplers.drawn import drawn
from pellucid.samplers.rollout import row_seed
from pellucid.samplers.talks import PAUSE, Row, Talks
from pellucid.types import Group

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

PATIENCE = 8
"""How many tokens of others a row waits for its reply in its place."""
TOGETHER = 4
"""Rows are told something when they are one of so many that speak, or nobody speaks."""
GATHER = 0.05
"""Seconds, about those of a token, that the first to be told something wait for others where nobody speaks: what a few
begin alone costs as much as if all spoke."""


class Hall:
    """The rows of conversations in one decode batch. `hold` samples all of them to their ends."""

    def __init__(self, policy: Policy, talks: Talks, rows: int, patient: bool = False, int8: bool = False) -> None:
        """patient: whether all wait for every reply, so that who is beside whom does not depend on the clock. int8: as
        in `Native`.
        """
        self.patient = patient
        self.policy, self.talks, self.most = policy, talks, max(rows, talks.sampling.n)
        self.running: Running[Row] = Running(policy.decode_batch(self.most, int8))
        self.continues = self.running.batch.continues
        self.speaking: set[Row] = set()
        self.waited: dict[Row, int] = {}
        """How many tokens each row in the batch has waited."""
        self.aside: dict[Row, Aside] = {}
        seeds = [row_seed(talks.sampling.seed, talks.prompts[r.number // talks.sampling.n], s) for r, s in self._each()]
        self.random = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.uniforms = [self._more(number) for number in range(len(seeds))]
        self.place_of_sums = hardware.place_of_sums(policy.device)

    def hold(self) -> list[Group]:
        while not self.talks.over:
            self.talks.begin(2 * self.most)
            self.talks.listen(0.0 if self.speaking else PAUSE)
            self._gather()
            self._drop([row for row in self.running.rows if self._is_elsewhere(row)])
            self._seat_newcomers()
            self._tell()
            if self.speaking:
                self._speak()
        return self.talks.groups()

    def _gather(self) -> None:
        until = time.monotonic() + (0.0 if self.speaking else GATHER)
        while self.talks.unheard and (self.patient or time.monotonic() < until):
            self.talks.listen(PAUSE if self.patient else max(0.0, until - time.monotonic()))

    def _each(self) -> list[tuple[Row, int]]:
        return [(row, row.number % self.talks.sampling.n) for row in self.talks.rows]

    def _is_elsewhere(self, row: Row) -> bool:
        """Whether a row in the batch is over, or begins anew."""
        return (row.outcome is not None and row not in self.speaking) or row in self.talks.asked

    # ------------------------------------------------------------ who comes, who goes

    def _seat_newcomers(self) -> None:
        for row in self.talks.asked:
            self.aside.pop(row, None)
        by_size: dict[int, list[list[Row]]] = {}
        for alike in self.talks.next_groups(self.running.room()):
            by_size.setdefault(len(alike), []).append(alike)
        for groups in by_size.values() if self.continues else list(by_size.values())[:1]:
            self._admit(groups)
        for left in [] if self.continues else list(by_size.values())[1:]:
            self.talks.asked += [row for alike in left for row in alike]

    def _admit(self, groups: Sequence[Sequence[Row]]) -> None:
        rows = [row for alike in groups for row in alike]
        self.running.admit([alike[0].context for alike in groups], rows)
        for row in rows:
            row.fed = len(row.question) + len(row.tokens)
        self.speaking |= set(rows)

    def _tell(self) -> None:
        """Tell rows what was said to them, when there are enough of them."""
        told = self.talks.ready
        if not told or len(told) * TOGETHER < len(self.speaking):
            return
        if not self.continues:
            if not self.running.rows:
                some, self.talks.ready = told[: self.most], told[self.most :]
                self._admit([[row] for row in some])
            return
        back = [row for row in told if row in self.aside][: self.running.room()]
        if back:
            self.running.bring_back([self.aside.pop(row) for row in back], back)
        here = [row for row in told if row not in self.aside]
        if here:
            self.talks.ready = [row for row in told if row in self.aside]
            self.running.extend(self._places(here), [row.context[row.fed :] for row in here])
            for row in here:
                row.fed = len(row.question) + len(row.tokens)
                self.waited.pop(row, None)
            self.speaking |= set(here)

    def _drop(self, rows: Sequence[Row]) -> None:
        if rows:
            gone = set(rows)
            stays = [place for place, row in enumerate(self.running.rows) if row not in gone]
            self.running.drop_to(torch.tensor(stays, dtype=torch.long))
            for row in rows:
                self.waited.pop(row, None)

    def _make_room(self) -> None:
        """Set rows aside that have waited long, where others could use their place."""
        long = {row for row, steps in self.waited.items() if steps > PATIENCE and row not in self.talks.ready}
        wanted = self.talks.asked or self.aside or 2 * len(self.waited) > len(self.running.rows)
        if long and wanted:
            rows = [row for row in self.running.rows if row in long]
            self.aside |= dict(zip(rows, self.running.set_aside(self._places(rows)), strict=True))
            for row in rows:
                del self.waited[row]

    # ------------------------------------------------------------ a token

    def _speak(self) -> None:
        rows = [row for row in self.running.rows if row in self.speaking]
        places = self._places(rows)
        logits = self.running.logits
        logits = logits if len(rows) == len(self.running.rows) else logits[places.to(logits.device)]
        uniforms = torch.stack([self._uniform(row) for row in rows]).to(self.place_of_sums)
        tokens, logprobs, masks = drawn(logits, uniforms, self.talks.sampling)
        kept = masks or [None] * len(rows)
        drawn_by = zip(rows, tokens.tolist(), logprobs.tolist(), kept, strict=True)
        silent = [row for row, token, logprob, mask in drawn_by if self.talks.add(row, token, logprob, mask)]
        for row in silent:
            self.speaking.discard(row)
            self.talks.spoken(row)
        self._step(rows, tokens, silent)

    def _step(self, rows: Sequence[Row], tokens: Tensor, silent: Sequence[Row]) -> None:
        """Append what was drawn to the rows that go on; those whose turn has ended wait, or leave."""
        leave = [row for row in silent if not self.continues or self.talks.is_last(row)]
        self.waited = {row: steps + 1 for row, steps in self.waited.items()}
        self.waited |= dict.fromkeys((row for row in silent if row not in leave), 0)
        token_of = dict(zip(rows, tokens.tolist(), strict=True))
        self._drop(leave)
        if self.speaking:
            every = [token_of.get(row, 0) for row in self.running.rows]
            speaks = [row in self.speaking for row in self.running.rows]
            tokens = torch.tensor(every, device=self.policy.device)
            if all(speaks):
                self.running.step(tokens)
            else:
                self.running.step_some(tokens, torch.tensor(speaks))
            for row in self.speaking:
                row.fed += 1
        self._make_room()

    def _places(self, rows: Sequence[Row]) -> Tensor:
        place = {row: i for i, row in enumerate(self.running.rows)}
        return torch.tensor([place[row] for row in rows], dtype=torch.long)

    def _uniform(self, row: Row) -> Tensor:
        if row.drawn == len(self.uniforms[row.number]):
            self.uniforms[row.number] = torch.cat([self.uniforms[row.number], self._more(row.number)])
        return self.uniforms[row.number][row.drawn]

    def _more(self, number: int) -> Tensor:
        return torch.rand(self.talks.sampling.max_tokens, dtype=torch.float64, generator=self.random[number])
