"""Batch invariance: the logits of a row have the same bits alone and among any others, so that a greedy answer does not
depend on who else is being answered.

A matrix product adds up each row for itself, but a kernel may do so in another order where there are more rows. In bf16
oneDNN's do with AMX, and do not with AVX-512 alone; nothing else that is computed here depends on other rows.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.types import UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

LENGTHS = (3, 17, 40)
"""Of the prompts that are tried, in tokens: on both sides of what caches are padded to."""
STEPS = 4
"""Tokens that are read behind each of them."""


def leave_amx() -> None:
    """To be called before torch computes anything; what someone has set stays.

    https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def check(policy: Policy, rows: int) -> None:
    """UserError where the logits of this model depend on who else is being answered, among up to `rows`."""
    if not batch_invariant(policy, rows):
        dtype = str(policy.dtype).removeprefix("torch.")
        raise UserError(
            f"--batch-invariant: on this machine a row's logits in {dtype} depend on the rows beside it:"
            " try --dtype bfloat16, whose products are oneDNN's, or go without"
        )


def batch_invariant(policy: Policy, rows: int) -> bool:
    """Whether it holds of three prompts and a few tokens behind them, alone and in crowds of up to `rows`.

    A trial of the weights and kernels that will answer, on the machine where they will, and no proof.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    prompts = [[(7 * i + length) % vocabulary for i in range(length)] for length in LENGTHS]
    alone = [logits_of(policy, [prompt], 1)[:, 0] for prompt in prompts]
    share = max(1, rows // len(prompts))
    return all(
        torch.equal(row, alone[i // copies % len(prompts)])
        for times, copies in ((1, 1), (2, 1), (share, 1), (1, share))
        for i, row in enumerate(logits_of(policy, prompts * times, copies).unbind(1))
    )


@torch.no_grad()
def logits_of(policy: Policy, prompts: list[list[int]], copies: int) -> Tensor:
    """[STEPS + 1, len(prompts) * copies, V], behind each prompt and behind each token; the tokens are those of all."""
    rows = len(prompts) * copies
    batch = policy.create_decode_batch(rows)
    behind_prompts = batch.admit(prompts, copies)
    tokens = (torch.full((rows,), token, device=policy.device) for token in range(STEPS))
    return torch.stack([behind_prompts, *(batch.step(token) for token in tokens)])
