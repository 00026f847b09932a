"""Decodes architectures that our decoder lacks, with transformers; checks its KV cache, and batch invariance."""

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

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy


class FallbackDecodeBatch:
    """Rows that transformers decodes together, like `DecodeBatch`. New rows join only when all others have finished."""

    can_append = False
    """Whether rows can wait for the environment, and continue after `append_tokens`. Here they leave the batch, and the
    whole conversation becomes a new prompt."""

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        # In train mode, gradient checkpointing would disable the cache.
        self.model, self.max_rows = model.eval(), max_rows
        self.cache: Any = DynamicCache()
        self.is_recurrent = "cache_params" in inspect.signature(model.forward).parameters
        """Whether `forward` names its cache `cache_params`, as in Mamba, and takes no mask in a decode step."""
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
        rows = torch.arange(len(prompts), device=lengths.device).repeat_interleave(copies)
        # Every kind of layer can reorder its cache; only attention layers can repeat or select rows.
        self.cache.reorder_cache(rows)
        self.attention_mask = self.attention_mask[rows]
        return logits[rows]

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
        """New tokens [n, S] -> logits [n, V] of the next. Positions count from the first token after the padding."""
        mask = self.attention_mask
        if self.is_recurrent:
            inputs = {"attention_mask": mask if ids.shape[1] == mask.shape[1] else None, "cache_params": self.cache}
        else:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.cache}
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **inputs).logits[:, -1]


# ---------------------------------------------------------------- batch invariance
# With batch invariance the logits of a row have the same bits alone and among any other rows, so a greedy completion
# does not depend on other requests.
#
# A matrix product sums each row separately, but with more rows a kernel may sum in another order. In bf16, oneDNN's
# kernels change the order with AMX, but not with AVX-512. No other computation here depends on other rows.


_TRIAL_PROMPT_LENGTHS = (7, 2)
"""Prompt lengths of the cache check, in tokens: one needs padding, one is longer than a convolution of width four."""
_INVARIANCE_PROMPT_LENGTHS = (3, 17, 40)
"""Prompt lengths of the invariance check, in tokens: below and above the multiples to which caches are padded."""
_INVARIANCE_STEPS = 4
"""Decode steps after each prompt."""


def make_trial_prompts(model: PreTrainedModel, lengths: Sequence[int] = _TRIAL_PROMPT_LENGTHS) -> list[list[int]]:
    """Return prompts of these lengths, of arbitrary tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    return [[(7 * i + length) % vocabulary for i in range(length)] for length in lengths]


def disable_amx() -> None:
    """Restrict oneDNN to AVX-512, unless ONEDNN_MAX_CPU_ISA is set. Call this before torch computes anything.

    https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def check_batch_invariance(policy: Policy, rows: int) -> None:
    """Raise UserError if the logits of this model depend on the other rows of a batch of up to `rows`."""
    if not is_batch_invariant(policy, rows):
        dtype = str(policy.dtype).removeprefix("torch.")
        raise UserError(
            f"--batch-invariant: on this machine a row's logits in {dtype} depend on the rows beside it:"
            " try --dtype bfloat16, which uses oneDNN, or leave the option out"
        )


def is_batch_invariant(policy: Policy, rows: int) -> bool:
    """Test three prompts and a few tokens after them, alone and in batches of up to `rows`. This is no proof."""
    prompts = make_trial_prompts(policy.model, _INVARIANCE_PROMPT_LENGTHS)
    expected = [_compute_step_logits(policy, [prompt], 1)[:, 0] for prompt in prompts]
    repeats = max(1, rows // len(prompts))
    return all(
        torch.equal(row, expected[i // copies % len(prompts)])
        for times, copies in ((1, 1), (2, 1), (repeats, 1), (1, repeats))
        for i, row in enumerate(_compute_step_logits(policy, prompts * times, copies).unbind(1))
    )


@torch.no_grad()
def _compute_step_logits(policy: Policy, prompts: list[list[int]], copies: int) -> Tensor:
    """Return logits [INVARIANCE_STEPS + 1, len(prompts) * copies, V] after the prompts and after each of the steps."""
    rows = len(prompts) * copies
    batch = policy.create_decode_batch(rows)
    first_logits = batch.admit(prompts, copies)
    tokens = (torch.full((rows,), token, device=policy.device) for token in range(_INVARIANCE_STEPS))
    return torch.stack([first_logits, *(batch.step(token) for token in tokens)])


# ---------------------------------------------------------------- the check of transformers' cache
# A configuration does not say whether rows can be decoded together and then dropped. An architecture may have a state
# that ignores padding (recurrent layers), a cache that cannot be reordered, or positions of its own.


MODEL_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors that libraries raise if a model and its cache do not fit each other."""
_TRIAL_COPIES = 2
LOGIT_TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-2}
"""The largest allowed difference from logits without a cache, as `measure_relative_difference` measures it."""
HALF_PRECISION_TOLERANCE = 0.2
"""The same for bfloat16 and float16: rounding causes a few hundredths, wrong logits at least a fifth."""


@torch.no_grad()
def find_cache_fault(model: PreTrainedModel) -> str:
    """Return why rows of this model cannot be decoded with transformers' cache; empty if they can."""
    try:
        prompts = make_trial_prompts(model)
        rows = [row for row in prompts for _ in range(_TRIAL_COPIES)]
        batch = FallbackDecodeBatch(model, len(rows))
        fault = describe_logit_difference(model, rows, batch.admit(prompts, _TRIAL_COPIES))
        for remaining in ([0, 1, 2, 3], [1, 2], [1]):
            batch.keep_rows(torch.tensor(remaining, device=model.device))
            tokens = list(range(len(remaining)))
            rows = [[*rows[i], token] for i, token in zip(remaining, tokens, strict=True)]
            logits = batch.step(torch.tensor(tokens, device=model.device))
            fault = fault or describe_logit_difference(model, rows, logits)
    except MODEL_ERRORS as error:
        return format_error_line(error)
    return fault


def describe_logit_difference(model: PreTrainedModel, rows: Sequence[Sequence[int]], logits: Tensor) -> str:
    """Return how far logits [n, V] are from those of each row alone without a cache; empty if within tolerance."""
    ids = [torch.tensor([list(row)], device=model.device) for row in rows]
    expected = torch.stack([model(input_ids=row, use_cache=False).logits[0, -1].float() for row in ids])
    share = measure_relative_difference(logits.float(), expected)
    if share <= LOGIT_TOLERANCES.get(model.dtype, HALF_PRECISION_TOLERANCE):
        return ""
    return f"logits differ by {share:.0%} from those without a cache"


def measure_relative_difference(x: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a row of x [n, V] from the expected row, relative to the spread of the latter."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((x - expected).norm(dim=-1) / spread).max())


def format_error_line(error: BaseException) -> str:
    """Return the error in one line of at most 120 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
