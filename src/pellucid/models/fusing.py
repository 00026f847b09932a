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
from pellucid.models.fused import Fused, Step

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
def here() -> tuple[Step | None, str]:
    """What computes steps, and why nothing does."""
    try:
        return way(library()), ""
    except (UnusableError, OSError) as error:
        return None, str(error)


def way(library: Any) -> Step:
    """The way of this library that has the bits of torch's operators. UnusableError where none has."""
    for tiles in (False, True) if has_tiles() else (False,):
        if has_bits_of_operators(step := Step(library, tiles)):
            return step
    raise UnusableError("this processor or this torch rounds otherwise")


def has_tiles() -> bool:
    """Whether this processor has AMX, and this process may use it from now on."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


# ---------------------------------------------------------------- the trial


@torch.no_grad()
def has_bits_of_operators(step: Step) -> bool:
    """UnusableError where it cannot be tried."""
    decoder = small()
    plain, fused = DecodeBatch(decoder, 6), DecodeBatch(decoder, 6, functools.partial(Fused, step))
    for batch in (plain, fused):
        batch.admit(PROMPTS, 2)
    for token in range(STEPS):
        tokens = torch.arange(6) + token
        if not torch.equal(plain.step(tokens), fused.step(tokens)):
            return False
    if not fused.fused:
        raise UnusableError("torch without bfloat16 for this CPU")
    return True


@torch.no_grad()
def small() -> Decoder:
    """A decoder of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(TRIED)
        for weight in model.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return Decoder(TRIED, model, torch.bfloat16)
