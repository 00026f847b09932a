"""Whether transformers continues this model's rows as it reads them: a trial, since a configuration does not say it.

Rows that are decoded together are padded on the left, and leave and make room. An architecture may keep a state that
knows no padding (recurrent layers), a cache that cannot be put in another order, or positions of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pellucid.models.fallback import FallbackDecodeBatch

FAULTS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What libraries raise where a model and its cache do not fit each other."""
LENGTHS = (7, 2)
"""Of the prompts that are tried, in tokens: one needs padding, one is longer than a convolution of four."""
COPIES = 2
APART = {torch.float32: 1e-2, torch.float64: 1e-2}
"""How far logits may be from those of a whole reading, as `apart` measures it."""
HALF = 0.2
"""The same in bfloat16 and float16: two ways of rounding are some hundredths apart, wrong logits a fifth at least."""


def prompts_of(model: PreTrainedModel) -> list[list[int]]:
    vocabulary = model.config.get_text_config().vocab_size
    return [[(7 * i + length) % vocabulary for i in range(length)] for length in LENGTHS]


@torch.no_grad()
def cache_fault(model: PreTrainedModel) -> str:
    """Why rows of this model cannot be continued from transformers' cache; empty where they can."""
    try:
        prompts = prompts_of(model)
        rows = [row for row in prompts for _ in range(COPIES)]
        batch = FallbackDecodeBatch(model, len(rows))
        fault = difference(model, rows, batch.admit(prompts, COPIES))
        for kept in ([0, 1, 2, 3], [1, 2], [1]):
            batch.keep_rows(torch.tensor(kept, device=model.device))
            tokens = list(range(len(kept)))
            rows = [[*rows[place], token] for place, token in zip(kept, tokens, strict=True)]
            fault = fault or difference(model, rows, batch.step(torch.tensor(tokens, device=model.device)))
    except FAULTS as error:
        return said(error)
    return fault


def difference(model: PreTrainedModel, rows: Sequence[Sequence[int]], logits: Tensor) -> str:
    """How far logits [n, V] are from those behind a whole reading of each row alone; empty where they are the same."""
    share = apart(logits.float(), torch.stack([whole_reading(model, row) for row in rows]))
    return "" if share <= APART.get(model.dtype, HALF) else f"logits are {share:.0%} off those of a whole reading"


def apart(x: Tensor, expected: Tensor) -> float:
    """How far rows [n, V] are from the right ones, as a share of how far those are from their mean: the largest."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((x - expected).norm(dim=-1) / spread).max())


def whole_reading(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """[V] logits behind a row, without any cache."""
    ids = torch.tensor([list(row)], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, -1].float()


def said(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
