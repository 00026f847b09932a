"""Which sampler draws from this policy: the one that is asked for, or the other where that one would draw otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationConfig

from pellucid.models import fused_check
from pellucid.models.hf_decode import (
    MODEL_ERRORS,
    describe_logit_difference,
    find_cache_fault,
    format_error_line,
    make_trial_prompts,
)
from pellucid.rollout.hf import HuggingFaceSampler, run_generate
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.vllm import VLLMSampler
from pellucid.rollout.vllm_client import VLLMServerSampler
from pellucid.types import AsyncEnvironments, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

TRIAL_TOKENS = 3
"""Tokens that `generate()` is tried with."""


def choose_sampler(
    name: str,
    rows: int,
    policy: Policy,
    environments: AsyncEnvironments | None = None,
    cache_gb: float = 4.0,
    urls: Sequence[str] = (),
    timeout: float = 120.0,
    ahead: bool = False,
    adapter: Literal["merged", "request"] = "merged",
) -> tuple[NativeSampler | HuggingFaceSampler | VLLMSampler, str]:
    """The sampler, and in a line why it is not quite the one that was asked for; empty where it is.

    world: those with whom it talks, if its answers are conversations. urls: of servers that sample by vLLM,
    which is not tried here: with every push of weights it shows that it computes the same. ahead: whether it draws
    while the policy is trained. adapter: as in `VLLM`.
    UserError where neither sampler draws from the distributions that this policy is scored by.
    """
    if name == "vllm":
        kept = (
            VLLMServerSampler(
                rows, cache_gb, environments=environments, adapter=adapter, urls=urls, timeout=timeout, ahead=ahead
            )
            if urls
            else VLLMSampler(rows, cache_gb, environments=environments, adapter=adapter)
        )
        return kept, ""
    if policy.decoder:
        return (
            HuggingFaceSampler(environments=environments)
            if name == "hf"
            else NativeSampler(rows, environments=environments)
        ), ""
    sampler, note, fault = try_sampler(name, rows, policy)
    sampler.environments = environments
    if not fault:
        return sampler, note
    other = "hf" if name == "native" else "native"
    second, note, also = try_sampler(other, rows, policy)
    second.environments = environments
    if also:
        kind = type(policy.model).__name__
        raise UserError(f"policy.model: {kind} cannot be sampled from: by {name} {fault}, by {other} {also}")
    return second, f"sampler.name: {other} instead of {name} ({fault})" + (f"; {note}" if note else "")


def enable_int8(sampler: NativeSampler | HuggingFaceSampler | VLLMSampler, policy: Policy) -> NativeSampler:
    """The same that decodes in int8. UserError where this policy cannot be decoded so."""
    if (fault := find_policy_int8_fault(policy)) or not isinstance(sampler, NativeSampler):
        raise UserError(f'sampler.dtype = "int8" cannot be had ({fault}): mend that, or set "auto"')
    return replace(sampler, int8=True)


def find_policy_int8_fault(policy: Policy) -> str:
    """Why rows of this policy cannot be decoded in int8; empty where they can."""
    if not policy.decoder:
        return f"this policy is computed by transformers: {policy.find_fallback_reason()}"
    return fused_check.find_int8_fault(policy.decoder)


def try_sampler(name: str, rows: int, policy: Policy) -> tuple[NativeSampler | HuggingFaceSampler, str, str]:
    """The sampler of that name, in a line what is peculiar about it here, and why it cannot be used."""
    if name == "native":
        return NativeSampler(rows), "", find_decode_fault(policy)
    model = pick_trial_model(policy)
    prompts = make_trial_prompts(model)
    if not (fault := find_generate_fault(model, prompts)):
        return HuggingFaceSampler(), "", ""
    alone = next(filter(None, (find_generate_fault(model, [prompt]) for prompt in prompts)), "")
    return HuggingFaceSampler(one_by_one=True), f"hf, one prompt after the other ({fault})", alone


def find_decode_fault(policy: Policy) -> str:
    """Why rows of this policy cannot be decoded as `policy.decode_batch` does; empty where they can."""
    return "" if policy.decoder else find_cache_fault(pick_trial_model(policy))


def pick_trial_model(policy: Policy) -> Any:
    """The model where all of it is in fp32, so that rounding does not matter, or as it is sampled from."""
    wide = all(p.dtype == torch.float32 for p in policy.model.parameters())
    return policy.model if wide else policy.get_inference_model()


@torch.no_grad()
def find_generate_fault(model: Any, prompts: Sequence[Sequence[int]]) -> str:
    """Why `generate()` does not continue these prompts beside one another as they are read; empty where it does."""
    greedy = GenerationConfig(max_new_tokens=TRIAL_TOKENS, do_sample=False, pad_token_id=0)
    rows = [list(row) for row in prompts for _ in range(2)]
    try:
        tokens, scores = run_generate(model, rows, greedy)
        for t in range(TRIAL_TOKENS):
            if fault := describe_logit_difference(model, rows, scores[:, t]):
                return fault
            rows = [[*row, token] for row, token in zip(rows, tokens[:, t].tolist(), strict=True)]
    except MODEL_ERRORS as error:
        return format_error_line(error)
    return ""
