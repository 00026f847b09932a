"""The rows that are being decoded: what the samplers and the service do with a decode batch, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pellucid.models.decoding import DecodeBatch
from pellucid.models.fallback import FallbackDecodeBatch
from pellucid.models.operators import widens
from pellucid.models.turns import Aside, bring_back, extend, set_aside

Row = TypeVar("Row")


class Running(Generic[Row]):
    """Rows of a decode batch, each with a record of its owner's, and the logits that its next token is drawn from.

    `admit` where there is room, draw a token from each row's logits, `keep` the rows that go on, `step`; again.
    """

    def __init__(self, batch: DecodeBatch | FallbackDecodeBatch) -> None:
        self.batch = batch
        self.requests: list[Row] = []
        self.logits = torch.zeros(0)
        """[n, V]"""

    def count_free_slots(self) -> int:
        """How many more rows may be admitted."""
        return self.batch.count_free_slots()

    def admit(self, prompts: Sequence[Sequence[int]], requests: Sequence[Row]) -> None:
        """Add rows, as many for each prompt, in the order of the prompts."""
        self.requests += requests  # first: where reading the prompts fails, their owners are told
        logits = self.batch.admit(prompts, len(requests) // len(prompts))
        self.logits = torch.cat([self.logits, logits]) if len(self.logits) else logits

    def keep_rows(self, slots: Tensor) -> None:
        """Drop all rows but those at these places [<= n], ascending, on the CPU."""
        if len(slots) < len(self.requests):
            self.batch.keep_rows(slots)
            self.requests = [self.requests[place] for place in slots.tolist()]

    def step(self, tokens: Tensor) -> None:
        """Append one token [n] to each row."""
        self.logits = self.batch.step(tokens) if self.requests else self.logits[:0]

    def step_active(self, tokens: Tensor, active: Tensor) -> None:
        """Append one token [n] to each row that speaks, [n] bool on the CPU; the others stay as they are."""
        assert isinstance(self.batch, DecodeBatch)
        self.logits = self.batch.step(tokens, active)

    def append_tokens(self, slots: Tensor, tokens: Sequence[Sequence[int]]) -> None:
        """Append several tokens to each of the rows at these places, on the CPU."""
        assert isinstance(self.batch, DecodeBatch)
        logits = extend(self.batch, slots, tokens)
        self.logits[slots.to(logits.device)] = logits

    def evict(self, slots: Tensor) -> list[Aside]:
        """Drop the rows at these places, ascending, on the CPU. Return what brings them back."""
        assert isinstance(self.batch, DecodeBatch)
        gone = set_aside(self.batch, slots.tolist())
        stays = torch.ones(len(self.requests), dtype=torch.bool)
        stays[slots] = False
        self.keep_rows_and_logits(stays.nonzero()[:, 0])
        return gone

    def keep_rows_and_logits(self, slots: Tensor) -> None:
        """Drop all rows but those at these places, as `keep` does, and their logits."""
        self.logits = self.logits[slots.to(self.logits.device)]
        self.keep_rows(slots)

    def restore(self, evicted: Sequence[Aside], requests: Sequence[Row]) -> None:
        """Add rows as they were set aside. Their logits are known when they are extended."""
        assert isinstance(self.batch, DecodeBatch)
        bring_back(self.batch, evicted)
        self.requests += requests
        head = self.batch.unpacked_weights.head.tensor
        unknown = head.new_zeros(len(requests), len(head), dtype=torch.float32 if widens(head) else head.dtype)
        self.logits = torch.cat([self.logits, unknown]) if len(self.logits) else unknown
