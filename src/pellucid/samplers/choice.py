"""Which sampler draws from this policy: the one that is asked for, or the other where that one would draw otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationConfig

from pellucid.models import fusing
from pellucid.models.trial import FAULTS, cache_fault, difference, prompts_of, said
from pellucid.protocols import World
from pellucid.samplers.hf import HuggingFace, generated
from pellucid.samplers.native import Native
from pellucid.samplers.servers import Servers
from pellucid.samplers.vllm import VLLM
from pellucid.types import UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

STEPS = 3
"""Tokens that `generate()` is tried with."""


def choose(
    name: str,
    rows: int,
    policy: Policy,
    environments: World | None = None,
    cache_gb: float = 4.0,
    urls: Sequence[str] = (),
    timeout: float = 120.0,
    ahead: bool = False,
    adapter: Literal["merged", "request"] = "merged",
) -> tuple[Native | HuggingFace | VLLM, str]:
    """The sampler, and in a line why it is not quite the one that was asked for; empty where it is.

    world: those with whom it talks, if its answers are conversations. urls: of servers that sample by vLLM,
    which is not tried here: with every push of weights it shows that it computes the same. ahead: whether it draws
    while the policy is trained. adapter: as in `VLLM`.
    UserError where neither sampler draws from the distributions that this policy is scored by.
    """
    if name == "vllm":
        kept = (
            Servers(rows, cache_gb, environments=environments, adapter=adapter, urls=urls, timeout=timeout, ahead=ahead)
            if urls
            else VLLM(rows, cache_gb, environments=environments, adapter=adapter)
        )
        return kept, ""
    if policy.decoder:
        return (HuggingFace(environments=environments) if name == "hf" else Native(rows, environments=environments)), ""
    sampler, note, fault = tried(name, rows, policy)
    sampler.environments = environments
    if not fault:
        return sampler, note
    other = "hf" if name == "native" else "native"
    second, note, also = tried(other, rows, policy)
    second.environments = environments
    if also:
        kind = type(policy.model).__name__
        raise UserError(f"policy.model: {kind} cannot be sampled from: by {name} {fault}, by {other} {also}")
    return second, f"sampler.name: {other} instead of {name} ({fault})" + (f"; {note}" if note else "")


def in_int8(sampler: Native | HuggingFace | VLLM, policy: Policy) -> Native:
    """The same that decodes in int8. UserError where this policy cannot be decoded so."""
    if (fault := int8_fault(policy)) or not isinstance(sampler, Native):
        raise UserError(f'sampler.dtype = "int8" cannot be had ({fault}): mend that, or set "auto"')
    return replace(sampler, int8=True)


def int8_fault(policy: Policy) -> str:
    """Why rows of this policy cannot be decoded in int8; empty where they can."""
    if not policy.decoder:
        return f"this policy is computed by transformers: {policy.find_fallback_reason()}"
    return fusing.int8_fault(policy.decoder)


def tried(name: str, rows: int, policy: Policy) -> tuple[Native | HuggingFace, str, str]:
    """The sampler of that name, in a line what is peculiar about it here, and why it cannot be used."""
    if name == "native":
        return Native(rows), "", fault_of(policy)
    model = uniform(policy)
    prompts = prompts_of(model)
    if not (fault := generate_fault(model, prompts)):
        return HuggingFace(), "", ""
    alone = next(filter(None, (generate_fault(model, [prompt]) for prompt in prompts)), "")
    return HuggingFace(one_by_one=True), f"hf, one prompt after the other ({fault})", alone


def fault_of(policy: Policy) -> str:
    """Why rows of this policy cannot be decoded as `policy.decode_batch` does; empty where they can."""
    return "" if policy.decoder else cache_fault(uniform(policy))


def uniform(policy: Policy) -> Any:
    """The model where all of it is in fp32, so that rounding does not matter, or as it is sampled from."""
    wide = all(p.dtype == torch.float32 for p in policy.model.parameters())
    return policy.model if wide else policy.get_inference_model()


@torch.no_grad()
def generate_fault(model: Any, prompts: Sequence[Sequence[int]]) -> str:
    """Why `generate()` does not continue these prompts beside one another as they are read; empty where it does."""
    greedy = GenerationConfig(max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    rows = [list(row) for row in prompts for _ in range(2)]
    try:
        tokens, scores = generated(model, rows, greedy)
        for t in range(STEPS):
            if fault := difference(model, rows, scores[:, t]):
                return fault
            rows = [[*row, token] for row, token in zip(rows, tokens[:, t].tolist(), strict=True)]
    except FAULTS as error:
        return said(error)
    return ""
