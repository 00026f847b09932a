"""The self-check of the fused decode step, and the choice between it and PyTorch's operators.

The check runs cpp/decode.cpp on a small model, with AVX-512 and with AMX. A fused step samples a token in half the time
of the operators, with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.models.decode import DecodeBatch, append_tokens
from pellucid.models.decoder import Decoder, DecoderWeights, ModelShape
from pellucid.models.fused_decode import FusedDecoder
from pellucid.models.native import (
    KernelUnavailableError,
    KernelVariant,
    add_self_check,
    list_variants,
    load_library,
)

SELF_CHECK_CONFIG = LlamaConfig(
    vocab_size=1136,  # with so many logits, another order of sums changes some of them
    hidden_size=576,  # larger than a block of the sums, like intermediate_size
    intermediate_size=1088,
    num_hidden_layers=1,
    num_attention_heads=9,
    num_key_value_heads=3,
    attention_bias=True,
    mlp_bias=True,
)
_SELF_CHECK_PROMPTS = ([[5, 3, 7], [11] * 17], [list(range(30))])
"""The prompts of two prefills, up to 32 tokens each: for so few, oneDNN's order of sums with AMX is known."""
_SELF_CHECK_APPENDED_TOKENS = list(range(7, 38))
"""Tokens appended to a row, so that it has more tokens of its own than AMX sums in one block."""
_SELF_CHECK_STEPS = 3


def select_fused_decoder(decoder: Decoder) -> Callable[[DecoderWeights, ModelShape], FusedDecoder] | None:
    """Return a constructor of fused decoders for this decoder; None if PyTorch's operators are used."""
    load = load_fused_adapter_kernel if decoder.is_adapted else load_fused_kernel
    kernel = load()[0] if decoder.can_prepack else None
    return functools.partial(FusedDecoder, kernel) if kernel else None


@torch.no_grad()
def can_use_cuda_graphs(device: torch.device) -> bool:
    """Return whether a small model can be decoded with CUDA graphs on this GPU; if not, a warning says why."""
    decoder = build_self_check_decoder(device)
    batch = DecodeBatch(decoder, 4)
    batch.admit(_SELF_CHECK_PROMPTS[0], 2)
    for _ in range(_SELF_CHECK_STEPS):  # the first runs without a graph, the second compares, the third replays
        batch.step(torch.arange(4, device=device))
    return decoder.uses_cuda_graphs is True


# ---------------------------------------------------------------- self-checks


def compare_fused_steps(kernel: KernelVariant, is_adapted: bool = False) -> Iterable[tuple[str, Any, Any]]:
    """Decode a small model with fused steps and with PyTorch's operators; see `add_self_check`."""
    decoder = build_self_check_decoder(is_adapted=is_adapted)
    if not decoder.can_prepack:
        raise KernelUnavailableError("torch without bfloat16 for this CPU")
    eager, fused = DecodeBatch(decoder, 6), DecodeBatch(decoder, 6, functools.partial(FusedDecoder, kernel))
    calls: list[Callable[[DecodeBatch], Tensor]] = [
        *(lambda batch, prompts=prompts: batch.admit(prompts, 2) for prompts in _SELF_CHECK_PROMPTS),
        lambda batch: batch.step(torch.arange(6)),
        lambda batch: append_tokens(batch, torch.tensor([3]), [_SELF_CHECK_APPENDED_TOKENS]),
        *[lambda batch: batch.step(torch.arange(6) + 50)] * _SELF_CHECK_STEPS,
    ]
    for call in calls:
        yield "fused steps", call(fused), call(eager)


load_fused_kernel = add_self_check("fused steps", lambda: list_variants(load_library()), compare_fused_steps)
"""Return the kernel of fused steps, or None and the reason why there is none."""
load_fused_adapter_kernel = add_self_check(
    "fused steps with an adapter",
    lambda: list_variants(load_library()),
    functools.partial(compare_fused_steps, is_adapted=True),
)
"""Return the kernel of fused steps of a model with an adapter, or None and the reason why there is none."""


class _AdaptedLayer(nn.Module):
    """A projection with an adapter, with the attributes of peft's, which need not be installed."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(self.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, self.out_features, bias=False)})
        self.scaling, self.disable_adapters, self.merged = {"default": 1.5}, False, False


@torch.no_grad()
def build_self_check_decoder(device: str | torch.device = "cpu", is_adapted: bool = False) -> Decoder:
    """Build a decoder with random weights, some of its projections with an adapter if `is_adapted`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(SELF_CHECK_CONFIG)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj") if is_adapted else ():
            base: Any = model.model.layers[0].get_submodule(name)
            model.model.layers[0].set_submodule(name, _AdaptedLayer(base, rank=24))
        for weight in model.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return Decoder(SELF_CHECK_CONFIG, torch.nn.Module.to(model, device), torch.bfloat16)
