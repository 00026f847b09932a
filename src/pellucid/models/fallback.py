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

    can_append = False
    """Whether rows can wait for a turn of others, and be continued behind it: they leave, and are read anew."""

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        self.model, self.max_rows = (
            model.eval(),
            max_rows,
        )  # in train mode gradient checkpointing would switch the cache off
        self.cache: Any = DynamicCache()
        self.is_recurrent = "cache_params" in inspect.signature(model.forward).parameters
        """Whether it is Mamba or of its kind, which call the cache so, and want no mask beside it."""
        self.attention_mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        """[n, tokens so far], prompts padded on the left."""

    def count_free_slots(self) -> int:
        return 0 if len(self.attention_mask) else self.max_rows

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], copies: int) -> Tensor:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=self.model.device)
        lengths = torch.tensor([len(row) for row in prompts], device=self.model.device)
        self.attention_mask = (torch.arange(width, device=lengths.device) >= width - lengths[:, None]).long()
        self.cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids)
        places = torch.arange(len(prompts), device=lengths.device).repeat_interleave(copies)
        # All kinds of layers can be put in another order; repeated or selected from, only those of attention.
        self.cache.reorder_cache(places)
        self.attention_mask = self.attention_mask[places]
        return logits[places]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        self.attention_mask = F.pad(self.attention_mask, (0, 1), value=1)
        return self._forward(tokens[:, None])

    def keep_rows(self, rows: Tensor) -> None:
        rows = rows.to(self.attention_mask.device)
        self.attention_mask = self.attention_mask[rows]
        if len(rows):
            self.cache.reorder_cache(rows)

    def _forward(self, ids: Tensor) -> Tensor:
        """[n, S] new tokens -> [n, V] logits behind the last of them. Positions count from the first real token."""
        if self.is_recurrent:
            first = ids.shape[1] == self.attention_mask.shape[1]
            mask = self.attention_mask if first else None
            return self.model(
                input_ids=ids, attention_mask=mask, cache_params=self.cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
        positions = (self.attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(
            input_ids=ids,
            attention_mask=self.attention_mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
