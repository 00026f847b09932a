"""Checks, after every push of weights, that an engine computes with the weights that were pushed.

Log-probs alone do not show this: a small update changes them by less than two implementations differ. Therefore columns
that the push changed are read back from the engine and compared bit for bit: this finds a layer that was left out, and
never fails for a correct push. The log-probs of a fixed text are also compared with the scorer's, and the number of its
tokens that were cached shows whether the prefix cache was cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pellucid.types import UserError

MAX_COLUMNS = 8
"""The maximum number of columns of a weight that are read back."""
MAX_ENTRIES_SUMMED = 2**22
"""The number of entries of a weight that are summed at a time."""
_MAX_GAP_GROWTH = 10
"""The factor by which the gap may exceed that of the first push."""
_OLD_WEIGHTS_HINT = 'nothing was trained on them; --resume the run, or set sampler.name = "native"'


_GAP_LIMITS = {torch.float32: (2e-5, 2e-3), torch.float16: (5e-3, 5e-2), torch.bfloat16: (4e-2, 2e-1)}
"""Two limits of the sampler gap, in nats: a gap up to the first is always allowed, one above the second never."""


class _CheckedEngine(Protocol):
    """A `VLLMEngine`, or the client of a server."""

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]: ...

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]: ...


class WeightCheck:
    """The state between pushes. Call `check` after every push."""

    def __init__(self) -> None:
        self.column_sums: dict[str, Tensor] = {}
        """The column sums of each weight at the last push."""
        self.first_gap: float | None = None
        self.generator = torch.Generator().manual_seed(0)

    def check(
        self,
        engine: _CheckedEngine,
        pushed: Mapping[str, Tensor],
        ids: Sequence[int],
        scorer_logprobs: Tensor,
        scorer_dtype: torch.dtype | None = None,
    ) -> None:
        """Check an engine after a push.

        Args:
            pushed: the weights by name, in the dtype that the engine computes in.
            ids: [T] a text that the engine has scored just before the push.
            scorer_logprobs: [T - 1] the scorer's log-probs of ids[1:].
            scorer_dtype: the dtype that the scorer computes in; None means that of `pushed`.

        Raises:
            UserError: the engine has other weights, or uses a cache of earlier weights.
        """
        logprobs, cached = engine.score_tokens(ids)
        if cached:
            raise UserError(
                f"the sampler reuses {cached} cached tokens of a text that it read with earlier weights: its prefix"
                f" cache was not cleared; {_OLD_WEIGHTS_HINT}",
                page="how-to/vllm",
            )
        sums, dtypes = dict[str, Tensor](), {scorer_dtype} if scorer_dtype else set[torch.dtype]()
        for name, weight in pushed.items():  # once, since each may be read from the disk
            dtypes.add(weight.dtype)
            sums[name] = compute_column_sums(weight)
            self.compare_columns(engine, name, weight, self.pick_changed_columns(name, sums[name]))
        coarser = max(dtypes, key=lambda dtype: _GAP_LIMITS[dtype])
        self.check_gap((logprobs.double() - scorer_logprobs.double().cpu()).abs().mean().item(), coarser)
        self.column_sums |= sums

    def pick_changed_columns(self, name: str, sums: Tensor) -> list[int]:
        """Return some columns that have changed since the last push; at the first push, any columns."""
        before = self.column_sums.get(name)
        changed = torch.arange(len(sums)) if before is None else (sums != before).nonzero()[:, 0]
        return changed[torch.randperm(len(changed), generator=self.generator)[:MAX_COLUMNS]].tolist()

    def compare_columns(self, engine: _CheckedEngine, name: str, weight: Tensor, indices: list[int]) -> None:
        expected = to_matrix(weight)[:, indices]
        for engine_columns in engine.read_columns(name, indices) if indices else []:
            if engine_columns.shape != expected.shape:
                raise UserError(f'policy.model: vLLM keeps {name} in another shape: set sampler.name = "native"')
            if not torch.equal(_flush_subnormals(engine_columns), _flush_subnormals(expected)):
                if not weight.isfinite().all():
                    raise UserError(f"{name} of the policy is no longer finite: lower optimizer.lr, and --resume")
                raise UserError(f"the sampler has old weights: {name} differs from the policy's; {_OLD_WEIGHTS_HINT}")

    def check_gap(self, gap: float, dtype: torch.dtype) -> None:
        allowed, maximum = _GAP_LIMITS[dtype]
        limit = maximum if self.first_gap is None else min(maximum, max(allowed, _MAX_GAP_GROWTH * self.first_gap))
        if not gap <= limit:  # NaN fails, too
            raise UserError(
                f"the sampler has old weights, or computes another model: its log-probs of a fixed text are {gap:.2g}"
                f" nats off the scorer's, where rounding explains {limit:.2g}; {_OLD_WEIGHTS_HINT}",
                page="how-to/vllm",
            )
        self.first_gap = gap if self.first_gap is None else self.first_gap


def to_matrix(weight: Tensor) -> Tensor:
    """Return a weight as a matrix [n, k]; a vector is one column."""
    return weight.flatten(1) if weight.dim() > 1 else weight.flatten()[:, None]


def compute_column_sums(weight: Tensor) -> Tensor:
    """Return the column sums [k], int64 on the CPU. One changed entry always changes them, several almost surely."""
    bits = to_matrix(weight).contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32)
    n, k = bits.shape
    total = torch.zeros(k, dtype=torch.int64, device=bits.device)
    step = max(1, MAX_ENTRIES_SUMMED // k)
    for start in range(0, n, step):
        index = torch.arange(start, min(n, start + step), device=bits.device)
        # The factors are odd, so no change of one entry is lost, and far apart, so several changes do not cancel.
        factors = (2 * index + 1) * 0x9E3779B97F4A7C1
        total += (bits[start : start + step].long() * factors[:, None]).sum(0)
    return total.cpu()


def _flush_subnormals(x: Tensor) -> Tensor:
    """Return a copy on the CPU with 0 in place of subnormal numbers, since some matrix units read them as 0."""
    x = x.cpu()
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0.0)
