"""Any other architecture, decoded through transformers: the calls of `DecodeBatch`, one set of rows at a time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class FallbackDecodeBatch:
    """Rows that are decoded together by transformers. New ones are admitted only when all before have ended."""

    continues = False
    """Whether rows can wait for a turn of others, and be continued behind it: they leave, and are read anew."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self.model, self.rows = model.eval(), rows  # in train mode gradient checkpointing would switch the cache off
        self.cache: Any = DynamicCache()
        self.recurrent = "cache_params" in inspect.signature(model.forward).parameters
        """Whether it is Mamba or of its kind, which call the cache so, and want no mask beside it."""
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        """[n, tokens so far], prompts padded on the left."""

    def room(self) -> int:
        return 0 if len(self.mask) else self.rows

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], copies: int) -> Tensor:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=self.model.device)
        lengths = torch.tensor([len(row) for row in prompts], device=self.model.device)
        self.mask = (torch.arange(width, device=lengths.device) >= width - lengths[:, None]).long()
        self.cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids)
        places = torch.arange(len(prompts), device=lengths.device).repeat_interleave(copies)
        # All kinds of layers can be put in another order; repeated or selected from, only those of attention.
        self.cache.reorder_cache(places)
        self.mask = self.mask[places]
        return logits[places]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        self.mask = F.pad(self.mask, (0, 1), value=1)
        return self._forward(tokens[:, None])

    def keep(self, rows: Tensor) -> None:
        rows = rows.to(self.mask.device)
        self.mask = self.mask[rows]
        if len(rows):
            self.cache.reorder_cache(rows)

    def _forward(self, ids: Tensor) -> Tensor:
        """[n, S] new tokens -> [n, V] logits behind the last of them. Positions count from the first real token."""
        if self.recurrent:
            first = ids.shape[1] == self.mask.shape[1]
            mask = self.mask if first else None
            return self.model(
                input_ids=ids, attention_mask=mask, cache_params=self.cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
