"""Proof, at every push of weights, that an engine computes with the ones that were pushed.

Log-probs alone do not show it: a small step moves them by less than two arithmetics are apart. So the weights are read
back as the engine computes with them, at columns that this push has changed: bit for bit, so that an honest push never
differs, however little it moves, and one layer that was left out does. How far the log-probs of a fixed text are from
the scorer's shows what no layer does by itself, and how many of its tokens were cached, whether the cache was cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pellucid.types import UserError

MAX_COLUMNS = 8
"""How many columns of a weight are read back at most."""
MAX_ENTRIES_SUMMED = 2**22
"""How many entries of a weight are summed at once."""
MAX_GAP_GROWTH = 10
"""How many times the first push's gap may later be the gap."""
OLD_WEIGHTS_HINT = 'nothing was trained on them; --resume the run, or set sampler.name = "native"'


class GapLimits(NamedTuple):
    """Mean distances of the log-probs of a text, in nats."""

    always_allowed: float
    """So far apart two arithmetics may always be."""
    maximum: float
    """So far apart they never are."""


GAP_LIMITS = {
    torch.float32: GapLimits(2e-5, 2e-3),
    torch.float16: GapLimits(5e-3, 5e-2),
    torch.bfloat16: GapLimits(4e-2, 2e-1),
}


class CheckedEngine(Protocol):
    """Whoever was given weights."""

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:
        """Return columns [n, len(at)] of a weight, as each place that computes with it has them."""
        ...

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """Return the log-probs of ids[1:] at temperature 1, and how many of these tokens came from a cache."""
        ...


class WeightCheck:
    """What the last push brought. `check` is called behind every push."""

    def __init__(self) -> None:
        self.column_sums: dict[str, Tensor] = {}
        """Of each column of each weight."""
        self.first_gap: float | None = None
        self.generator = torch.Generator().manual_seed(0)

    def check(
        self,
        engine: CheckedEngine,
        pushed: Mapping[str, Tensor],
        ids: Sequence[int],
        scorer_logprobs: Tensor,
        scorer_dtype: torch.dtype | None = None,
    ) -> None:
        """Check an engine that was given `pushed`, in the dtype that it computes in.

        ids: a text that the engine has read shortly before the push. scored: the scorer's log-probs of ids[1:].
        scorer_dtype: the dtype that the scorer computes in; None is that of `pushed`.

        UserError where it has other weights, or remembers what others have computed.
        """
        logprobs, cached = engine.score_tokens(ids)
        if cached:
            raise UserError(
                f"the sampler goes on from what earlier weights have computed, {cached} tokens of a text that it read"
                f" before: its prefix cache was not cleared; {OLD_WEIGHTS_HINT}"
            )
        sums = {name: compute_column_sums(weight) for name, weight in pushed.items()}
        for name, weight in pushed.items():
            self.compare_columns(engine, name, weight, self.pick_changed_columns(name, sums[name]))
        dtypes = {next(iter(pushed.values())).dtype, *([scorer_dtype] if scorer_dtype else [])}
        coarser = max(dtypes, key=lambda dtype: GAP_LIMITS[dtype].maximum)
        self.check_gap((logprobs.double() - scorer_logprobs.double().cpu()).abs().mean().item(), coarser)
        self.column_sums |= sums

    def pick_changed_columns(self, name: str, sums: Tensor) -> list[int]:
        """Return some of the columns of a weight that are not as they were at the last push; of a first one any."""
        before = self.column_sums.get(name)
        new = torch.arange(len(sums)) if before is None else (sums != before).nonzero()[:, 0]
        return new[torch.randperm(len(new), generator=self.generator)[:MAX_COLUMNS]].tolist()

    def compare_columns(self, engine: CheckedEngine, name: str, weight: Tensor, indices: list[int]) -> None:
        right = to_matrix(weight)[:, indices]
        for held in engine.read_columns(name, indices) if indices else []:
            if held.shape != right.shape:
                raise UserError(f'policy.model: vLLM keeps {name} in another form: set sampler.name = "native"')
            if not torch.equal(flush_subnormals(held), flush_subnormals(right)):
                if not weight.isfinite().all():
                    raise UserError(f"{name} of the policy is no longer finite: lower optimizer.lr, and --resume")
                raise UserError(f"the sampler has old weights: {name} is not the policy's; {OLD_WEIGHTS_HINT}")

    def check_gap(self, gap: float, dtype: torch.dtype) -> None:
        least, most = GAP_LIMITS[dtype]
        limit = most if self.first_gap is None else min(most, max(least, MAX_GAP_GROWTH * self.first_gap))
        if not gap <= limit:  # nor is it where it is no number
            raise UserError(
                f"the sampler has old weights, or computes another model: its log-probs of a fixed text are {gap:.2g}"
                f" off the scorer's, where their arithmetic allows {limit:.2g}; {OLD_WEIGHTS_HINT}"
            )
        self.first_gap = gap if self.first_gap is None else self.first_gap


def to_matrix(weight: Tensor) -> Tensor:
    """[n, k] as it is, and a vector as one column."""
    return weight.flatten(1) if weight.dim() > 1 else weight.flatten()[:, None]


def compute_column_sums(weight: Tensor) -> Tensor:
    """[k] int64 on the CPU: sums that differ where any one entry of a column does, and almost surely where more do."""
    bits = to_matrix(weight).contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32)
    n, k = bits.shape
    total = torch.zeros(k, dtype=torch.int64, device=bits.device)
    step = max(1, MAX_ENTRIES_SUMMED // k)
    for start in range(0, n, step):
        place = torch.arange(start, min(n, start + step), device=bits.device)
        # Odd, so that no change of one entry is lost, and far apart, so that those of several do not cancel out.
        factors = (2 * place + 1) * 0x9E3779B97F4A7C1
        total += (bits[start : start + step].long() * factors[:, None]).sum(0)
    return total.cpu()


def flush_subnormals(x: Tensor) -> Tensor:
    """On the CPU, subnormal numbers as 0: some matrix units read them so."""
    x = x.cpu()
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0.0)
