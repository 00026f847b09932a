"""How far the update of a step moved the policy.

With one optimizer step per rollout every ratio is 1 when the loss is computed, so clipping holds nothing back, and no
metric of the loss shows that a step was too large. The policies before and after the update are therefore compared on a
few rows of the step.

Shapes: R rows, T response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.protocols import Runtime

ROWS_PER_PROBE_ROW = 16
"""One of this many completions is scored before and after the update."""


class UpdateProbe(NamedTuple):
    """A few rows of a step, and their log-probs before the update."""

    batch: Batch
    logprobs: Tensor
    """[R, T]"""
    counted: Tensor
    """[R] bool: a process without a chosen row scores one that does not count, as sharded parameters require."""


def choose_probe_rows(batch: Batch, group_size: int, runtime: Runtime, max_rows: int) -> tuple[Batch, Tensor]:
    """Return the rows of this process that are scored before and after the update, and which of them count.

    One of ROWS_PER_PROBE_ROW completions of the step is chosen, in the order of all processes, so that the choice does
    not depend on their number. Replayed rows are left out. A process scores at most `max_rows` rows, if `max_rows` is
    not 0, so that each process makes one forward pass.
    """
    assert batch.step_row_indices is not None
    is_new = batch.step_row_indices >= 0
    own_prompt_count = int(batch.prompt_indices[is_new].max()) + 1
    prompt_count = int(runtime.sum(torch.tensor(own_prompt_count)))
    own_prompts = torch.tensor(runtime.shard(range(prompt_count)))
    rollouts = torch.arange(len(batch)) if batch.rollout_indices is None else batch.rollout_indices
    rollouts = rollouts.where(is_new, 0)
    indices = own_prompts[rollouts // group_size] * group_size + rollouts % group_size
    chosen = (is_new & (indices % ROWS_PER_PROBE_ROW == 0)).nonzero().flatten()[: max_rows or None]
    if len(chosen):
        return batch.select_rows(chosen), torch.ones(len(chosen), dtype=torch.bool)
    return batch.select_rows(slice(1)), torch.zeros(1, dtype=torch.bool)


def compute_update_kl(probe: UpdateProbe, logprobs: Tensor, runtime: Runtime) -> float:
    """Return KL(old policy, new policy) per token, in nats, over the sampled tokens of the probes of all processes.

    The tokens were sampled from the old policy. With r = new / old, the mean of r - 1 - log r estimates the KL without
    bias, and no term is negative: estimator k3 of http://joschu.net/blog/kl-approx.html.

    Args:
        probe: The rows, with the log-probs of the old policy.
        logprobs: [R, T] the log-probs of the new policy.
    """
    log_ratio = (logprobs - probe.logprobs)[probe.batch.action_mask & probe.counted[:, None]].double()
    kl = log_ratio.expm1() - log_ratio
    total, count = runtime.sum(torch.stack([kl.sum(), torch.tensor(float(kl.numel())).to(kl)])).tolist()
    return total / max(1.0, count)
