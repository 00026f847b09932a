"""Whether decoding is fused on this machine: where it is, a token is sampled in half the time, and to the same bits.

Each process tries cpp/decode.cpp on a small model: it is used where its logits are those of torch's operators, bit for
bit, and these go on where they are not, or where there is no library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.models.compiling import UnusableError, library
from pellucid.models.decoder import Decoder, Weights
from pellucid.models.decoding import DecodeBatch
from pellucid.models.family import Shape
from pellucid.models.fused import Fused

TRIED = LlamaConfig(
    vocab_size=112,
    hidden_size=576,  # more than are added up together, and so is the next
    intermediate_size=1088,
    num_hidden_layers=1,
    num_attention_heads=9,
    num_key_value_heads=3,
    attention_bias=True,
    mlp_bias=True,
)
"""The model of the trial."""
PROMPTS = ([5, 3, 7], [11] * 17, list(range(40)))
STEPS = 3


def maker(decoder: Decoder) -> Callable[[Weights, Shape], Fused] | None:
    """What makes fused steps for this decoder; none where its operators go on."""
    found = here()[0] if decoder.may_pack else None
    return functools.partial(Fused, found) if found else None


@functools.cache
def here() -> tuple[Any, str]:
    """The library, and why there is none."""
    try:
        found = library()
        try_bits(found)
    except (UnusableError, OSError) as error:
        return None, str(error)
    return found, ""


# ---------------------------------------------------------------- the trial


@torch.no_grad()
def try_bits(library: Any) -> None:
    """UnusableError where its logits are not those of torch's operators."""
    decoder = small()
    plain, fused = DecodeBatch(decoder, 6), DecodeBatch(decoder, 6, functools.partial(Fused, library))
    for batch in (plain, fused):
        batch.admit(PROMPTS, 2)
    for token in range(STEPS):
        tokens = torch.arange(6) + token
        if not torch.equal(plain.step(tokens), fused.step(tokens)):
            raise UnusableError("this processor or this torch rounds otherwise")
    if not fused.fused:
        raise UnusableError("torch without bfloat16 for this CPU")


@torch.no_grad()
def small() -> Decoder:
    """A decoder of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(TRIED)
        for weight in model.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return Decoder(TRIED, model, torch.bfloat16)
