"""Choose between our sampler and that of transformers: the one of the settings, unless it changes the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from pellucid.models.hf_decode import (
    MODEL_ERRORS,
    describe_logit_difference,
    find_cache_fault,
    format_error_line,
    make_trial_prompts,
)
from pellucid.rollout.hf import HuggingFaceSampler, run_generate
from pellucid.rollout.native import NativeSampler
from pellucid.types import AsyncEnvironments, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

_TRIAL_TOKENS = 3
"""How many tokens of `generate()` are compared."""


def choose_sampler(
    name: str, rows: int, policy: Policy, environments: AsyncEnvironments | None = None
) -> tuple[NativeSampler | HuggingFaceSampler, str]:
    """Choose a sampler that samples from the distributions that the policy scores with.

    Args:
        name: native or hf. `VLLMSampler` needs no choice, since every push of weights is checked.
        rows: how many completions are decoded at once.
        environments: those of the task's conversations; None if it has none.

    Returns:
        The sampler, and a line that says why it is not the one of the settings; empty if it is.

    Raises:
        UserError: neither native nor hf samples from these distributions.
    """
    sampler, note, fault = _try_sampler(name, rows, policy)
    if fault:
        other = "hf" if name == "native" else "native"
        sampler, other_note, other_fault = _try_sampler(other, rows, policy)
        if other_fault:
            kind = type(policy.model).__name__
            raise UserError(f"policy.model: {kind} cannot be sampled from: by {name} {fault}, by {other} {other_fault}")
        note = "; ".join(filter(None, (f"sampler.name: {other} instead of {name} ({fault})", other_note)))
    sampler.environments = environments
    return sampler, note


def _try_sampler(name: str, rows: int, policy: Policy) -> tuple[NativeSampler | HuggingFaceSampler, str, str]:
    """Return the sampler of that name, a notice about it, and why it cannot be used; both may be empty."""
    if name == "native":
        return NativeSampler(rows), "", find_decode_fault(policy)
    if policy.decoder:
        return HuggingFaceSampler(), "", ""
    model = _pick_trial_model(policy)
    prompts = make_trial_prompts(model)
    if not (fault := _find_generate_fault(model, prompts)):
        return HuggingFaceSampler(), "", ""
    alone = next(filter(None, (_find_generate_fault(model, [prompt]) for prompt in prompts)), "")
    return HuggingFaceSampler(one_by_one=True), f"hf, one prompt after the other ({fault})", alone


def find_decode_fault(policy: Policy) -> str:
    """Return why `policy.create_decode_batch` cannot decode this policy; empty if it can."""
    return "" if policy.decoder else find_cache_fault(_pick_trial_model(policy))


def _pick_trial_model(policy: Policy) -> Any:
    """Return the model if it is in fp32, so that rounding does not matter; else the one that is sampled from."""
    is_fp32 = all(p.dtype == torch.float32 for p in policy.model.parameters())
    return policy.model if is_fp32 else policy.get_inference_model()


@torch.no_grad()
def _find_generate_fault(model: Any, prompts: Sequence[Sequence[int]]) -> str:
    """Return why `generate()` does not continue a batch of these prompts as the model does; empty if it does."""
    greedy = GenerationConfig(max_new_tokens=_TRIAL_TOKENS, do_sample=False, pad_token_id=0)
    rows = [list(row) for row in prompts for _ in range(2)]  # two of each prompt, like the rows of a group
    try:
        tokens, scores = run_generate(model, rows, greedy)
        for t in range(_TRIAL_TOKENS):
            if fault := describe_logit_difference(model, rows, scores[:, t]):
                return fault
            rows = [[*row, token] for row, token in zip(rows, tokens[:, t].tolist(), strict=True)]
    except MODEL_ERRORS as error:
        return format_error_line(error)
    return ""
