"""Keys and values of what is decoded.

Shapes: as in decoding.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


@dataclass
class Cache:
    """Keys and values of one layer. Products read the whole room: a slice of it would be copied first on the CPU."""

    prompt_keys: Tensor
    """[K, P, S, d]"""
    prompt_values: Tensor
    keys: Tensor
    """[K, n, room >= T, d]: of the tokens that each row has generated, 0 behind them; a row more for each that has left
    a gap."""
    values: Tensor

    def compact(self, rows: Tensor, capacity: int, prompts: Tensor, prompt_capacity: int) -> None:
        """Only these rows and prompts, with so much room."""
        self.keys, self.values = (x[:, :, :capacity].index_select(1, rows) for x in (self.keys, self.values))
        if len(prompts) < self.prompt_keys.shape[1] or prompt_capacity < self.prompt_keys.shape[2]:
            self.prompt_keys, self.prompt_values = (
                x[:, :, :prompt_capacity].index_select(1, prompts) for x in (self.prompt_keys, self.prompt_values)
            )


def joined(one: Tensor, other: Tensor) -> Tensor:
    """[K, P, S, d] and [K, Q, R, d] -> [K, P + Q, max(S, R), d] in the dtype of the first."""
    length = max(one.shape[2], other.shape[2])
    return torch.cat([F.pad(x.to(one.dtype), (0, 0, 0, length - x.shape[2])) for x in (one, other)], 1)
