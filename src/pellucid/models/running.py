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
        self.rows: list[Row] = []
        self.logits = torch.zeros(0)
        """[n, V]"""

    def room(self) -> int:
        """How many more rows may be admitted."""
        return self.batch.room()

    def admit(self, prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
        """Add rows, as many for each prompt, in the order of the prompts."""
        self.rows += rows  # first: where reading the prompts fails, their owners are told
        logits = self.batch.admit(prompts, len(rows) // len(prompts))
        self.logits = torch.cat([self.logits, logits]) if len(self.logits) else logits

    def keep(self, places: Tensor) -> None:
        """Drop all rows but those at these places [<= n], ascending, on the CPU."""
        if len(places) < len(self.rows):
            self.batch.keep(places)
            self.rows = [self.rows[place] for place in places.tolist()]

    def step(self, tokens: Tensor) -> None:
        """Append one token [n] to each row."""
        self.logits = self.batch.step(tokens) if self.rows else self.logits[:0]

    def step_some(self, tokens: Tensor, speaks: Tensor) -> None:
        """Append one token [n] to each row that speaks, [n] bool on the CPU; the others stay as they are."""
        assert isinstance(self.batch, DecodeBatch)
        self.logits = self.batch.step(tokens, speaks)

    def extend(self, places: Tensor, tokens: Sequence[Sequence[int]]) -> None:
        """Append several tokens to each of the rows at these places, on the CPU."""
        assert isinstance(self.batch, DecodeBatch)
        logits = extend(self.batch, places, tokens)
        self.logits[places.to(logits.device)] = logits

    def set_aside(self, places: Tensor) -> list[Aside]:
        """Drop the rows at these places, ascending, on the CPU. Return what brings them back."""
        assert isinstance(self.batch, DecodeBatch)
        gone = set_aside(self.batch, places.tolist())
        stays = torch.ones(len(self.rows), dtype=torch.bool)
        stays[places] = False
        self.drop_to(stays.nonzero()[:, 0])
        return gone

    def drop_to(self, places: Tensor) -> None:
        """Drop all rows but those at these places, as `keep` does, and their logits."""
        self.logits = self.logits[places.to(self.logits.device)]
        self.keep(places)

    def bring_back(self, asides: Sequence[Aside], rows: Sequence[Row]) -> None:
        """Add rows as they were set aside. Their logits are known when they are extended."""
        assert isinstance(self.batch, DecodeBatch)
        bring_back(self.batch, asides)
        self.rows += rows
        head = self.batch.plain.head.tensor
        unknown = head.new_zeros(len(rows), len(head), dtype=torch.float32 if widens(head) else head.dtype)
        self.logits = torch.cat([self.logits, unknown]) if len(self.logits) else unknown
