"""Any other architecture, decoded through transformers: the calls of `DecodeBatch`, one set of rows at a time."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pellucid.types import UserError


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


# ---------------------------------------------------------------- invariance
# Batch invariance: the logits of a row have the same bits alone and among any others, so that a greedy answer does not
# depend on who else is being answered.
#
# A matrix product adds up each row for itself, but a kernel may do so in another order where there are more rows. In bf16
# oneDNN's do with AMX, and do not with AVX-512 alone; nothing else that is computed here depends on other rows.


if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

INVARIANCE_PROMPT_LENGTHS = (3, 17, 40)
"""Of the prompts that are tried, in tokens: on both sides of what caches are padded to."""
INVARIANCE_STEPS = 4
"""Tokens that are read behind each of them."""


def disable_amx() -> None:
    """To be called before torch computes anything; what someone has set stays.

    https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def check_batch_invariance(policy: Policy, rows: int) -> None:
    """UserError where the logits of this model depend on who else is being answered, among up to `rows`."""
    if not is_batch_invariant(policy, rows):
        dtype = str(policy.dtype).removeprefix("torch.")
        raise UserError(
            f"--batch-invariant: on this machine a row's logits in {dtype} depend on the rows beside it:"
            " try --dtype bfloat16, whose products are oneDNN's, or go without"
        )


def is_batch_invariant(policy: Policy, rows: int) -> bool:
    """Whether it holds of three prompts and a few tokens behind them, alone and in crowds of up to `rows`.

    A trial of the weights and kernels that will answer, on the machine where they will, and no proof.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    prompts = [[(7 * i + length) % vocabulary for i in range(length)] for length in INVARIANCE_PROMPT_LENGTHS]
    alone = [compute_step_logits(policy, [prompt], 1)[:, 0] for prompt in prompts]
    share = max(1, rows // len(prompts))
    return all(
        torch.equal(row, alone[i // copies % len(prompts)])
        for times, copies in ((1, 1), (2, 1), (share, 1), (1, share))
        for i, row in enumerate(compute_step_logits(policy, prompts * times, copies).unbind(1))
    )


@torch.no_grad()
def compute_step_logits(policy: Policy, prompts: list[list[int]], copies: int) -> Tensor:
    """[STEPS + 1, len(prompts) * copies, V], behind each prompt and behind each token; the tokens are those of all."""
    rows = len(prompts) * copies
    batch = policy.create_decode_batch(rows)
    behind_prompts = batch.admit(prompts, copies)
    tokens = (torch.full((rows,), token, device=policy.device) for token in range(INVARIANCE_STEPS))
    return torch.stack([behind_prompts, *(batch.step(token) for token in tokens)])


# ---------------------------------------------------------------- trial
# Whether transformers continues this model's rows as it reads them: a trial, since a configuration does not say it.
#
# Rows that are decoded together are padded on the left, and leave and make room. An architecture may keep a state that
# knows no padding (recurrent layers), a cache that cannot be put in another order, or positions of its own.


MODEL_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What libraries raise where a model and its cache do not fit each other."""
TRIAL_PROMPT_LENGTHS = (7, 2)
"""Of the prompts that are tried, in tokens: one needs padding, one is longer than a convolution of four."""
TRIAL_COPIES = 2
LOGIT_TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-2}
"""How far logits may be from those of a whole reading, as `apart` measures it."""
HALF_PRECISION_TOLERANCE = 0.2
"""The same in bfloat16 and float16: two ways of rounding are some hundredths apart, wrong logits a fifth at least."""


def make_trial_prompts(model: PreTrainedModel) -> list[list[int]]:
    vocabulary = model.config.get_text_config().vocab_size
    return [[(7 * i + length) % vocabulary for i in range(length)] for length in TRIAL_PROMPT_LENGTHS]


@torch.no_grad()
def find_cache_fault(model: PreTrainedModel) -> str:
    """Why rows of this model cannot be continued from transformers' cache; empty where they can."""
    try:
        prompts = make_trial_prompts(model)
        rows = [row for row in prompts for _ in range(TRIAL_COPIES)]
        batch = FallbackDecodeBatch(model, len(rows))
        fault = describe_logit_difference(model, rows, batch.admit(prompts, TRIAL_COPIES))
        for kept in ([0, 1, 2, 3], [1, 2], [1]):
            batch.keep_rows(torch.tensor(kept, device=model.device))
            tokens = list(range(len(kept)))
            rows = [[*rows[place], token] for place, token in zip(kept, tokens, strict=True)]
            fault = fault or describe_logit_difference(
                model, rows, batch.step(torch.tensor(tokens, device=model.device))
            )
    except MODEL_ERRORS as error:
        return format_error_line(error)
    return fault


def describe_logit_difference(model: PreTrainedModel, rows: Sequence[Sequence[int]], logits: Tensor) -> str:
    """How far logits [n, V] are from those behind a whole reading of each row alone; empty where they are the same."""
    share = measure_relative_difference(
        logits.float(), torch.stack([compute_uncached_logits(model, row) for row in rows])
    )
    return (
        ""
        if share <= LOGIT_TOLERANCES.get(model.dtype, HALF_PRECISION_TOLERANCE)
        else f"logits are {share:.0%} off those of a whole reading"
    )


def measure_relative_difference(x: Tensor, expected: Tensor) -> float:
    """How far rows [n, V] are from the right ones, as a share of how far those are from their mean: the largest."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((x - expected).norm(dim=-1) / spread).max())


def compute_uncached_logits(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """[V] logits behind a row, without any cache."""
    ids = torch.tensor([list(row)], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, -1].float()


def format_error_line(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
