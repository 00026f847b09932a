"""A frozen base in 4-bit numbers, NF4 of QLoRA (arXiv 2305.14314), by bitsandbytes."""

from __future__ import annotations

import logging
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from pellucid.machine.extras import extra

PACKS = "support_avx512bf16_for_cpu"


def check_library() -> None:
    """UserError where bitsandbytes is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it advises more libraries
    extra("bitsandbytes", "quantized", "policy.load_in_4bit")


def settings(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Blocks of 64 numbers have a scale each, 256 scales have one of their own; products are computed in `dtype`."""
    check_library()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def leave_as_it_is(model: nn.Module) -> None:
    """In a pass without gradient, on a CPU with products in bf16, bitsandbytes would pack a layer anew, from where on
    nothing has a gradient through it.
    """
    for module in model.modules():
        if hasattr(module, PACKS):
            setattr(module, PACKS, False)


def numbers(p: Any) -> int:
    """How many weights a parameter stands for: one of 4-bit numbers holds two in a byte."""
    return prod(p.quant_state.shape) if is_quantized(p) else p.numel()


def is_quantized(p: Any) -> bool:
    return getattr(p, "quant_state", None) is not None
