"""Whether decoding is fused on this machine: where it is, a token is sampled in half the time, and to the same bits.

Each process tries cpp/decode.cpp on a small model, by AVX-512 and by AMX: it is used where its logits are those of
torch's operators, bit for bit, and these go on where they are not, or where there is no library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.models.decode import DecodeBatch, append_tokens
from pellucid.models.decoder import Decoder, DecoderWeights, ModelShape
from pellucid.models.fused_decode import INT8_INPUT_BLOCK, FusedDecoder, FusedKernel, find_fused_fault, pack_matrix
from pellucid.models.native import KernelUnavailableError, call_kernel, has_amx, load_library

SELF_CHECK_CONFIG = LlamaConfig(
    vocab_size=1136,  # of so many logits some show another order of sums
    hidden_size=576,  # more than are added up together, and so is the next
    intermediate_size=1088,
    num_hidden_layers=1,
    num_attention_heads=9,
    num_key_value_heads=3,
    attention_bias=True,
    mlp_bias=True,
)
"""The model of the trial."""
SELF_CHECK_PROMPTS = ([[5, 3, 7], [11] * 17], [list(range(30))])
"""What is read together: of up to 32 tokens, whose order of sums is known with AMX, too."""
SELF_CHECK_APPENDED_TOKENS = list(range(7, 38))
"""What a row is told then, so that it has more tokens of its own than are added up together with AMX."""
SELF_CHECK_STEPS = 3


def select_fused_decoder(
    decoder: Decoder, int8: bool = False
) -> Callable[[DecoderWeights, ModelShape], FusedDecoder] | None:
    """What makes fused steps for this decoder; none where its operators go on.

    int8: with products of the layers in int8, where `int8_fault` is empty.
    """
    found = load_fused_kernel()[0] if decoder.can_prepack else None
    return functools.partial(FusedDecoder, found._replace(int8=int8)) if found else None


@torch.no_grad()
def find_int8_fault(decoder: Decoder) -> str:
    """Why this decoder cannot sample in int8; empty where it can."""
    if decoder.device.type != "cpu":
        return f'policy.device is "{decoder.device.type}": set "cpu"'
    if decoder.dtype != torch.bfloat16:
        return f'policy.dtype is "{str(decoder.dtype).removeprefix("torch.")}": set "bfloat16"'
    step, why = load_fused_kernel() if decoder.can_prepack else (None, "torch without bfloat16 for this CPU")
    return (find_int8_kernel_fault(step) or find_fused_fault(decoder.collect_weights(), decoder.shape)) if step else why


@torch.no_grad()
def can_use_cuda_graphs(device: torch.device) -> bool:
    """Whether a small model is decoded by CUDA graphs on this GPU, as graphs.py tries it. A warning says why not."""
    decoder = build_self_check_decoder(device)
    batch = DecodeBatch(decoder, 4)
    batch.admit(SELF_CHECK_PROMPTS[0], 2)
    for _ in range(SELF_CHECK_STEPS):  # without a graph, the trial, and a graph
        batch.step(torch.arange(4, device=device))
    return decoder.uses_cuda_graphs is True


@functools.cache
def load_fused_kernel() -> tuple[FusedKernel | None, str]:
    """What computes steps, and why nothing does."""
    try:
        return choose_fused_kernel(load_library()), ""
    except (KernelUnavailableError, OSError) as error:
        return None, str(error)


def choose_fused_kernel(library: Any) -> FusedKernel:
    """The way of this library that has the bits of torch's operators. UnusableError where none has."""
    for tiles in (False, True) if has_amx() else (False,):
        if passes_fused_self_check(step := FusedKernel(library, tiles)):
            return step
    raise KernelUnavailableError("this processor or this torch rounds otherwise")


# ---------------------------------------------------------------- the trial


@functools.cache
def find_int8_kernel_fault(step: FusedKernel) -> str:
    """Why this processor cannot be left products in int8; empty where they are those of whole numbers."""
    if not torch.cpu._is_vnni_supported():
        return "a CPU without AVX-512 for int8"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 576, generator=generator).bfloat16() for n in (6, 112))
    wanted, threads = multiply_int8(x, weight), torch.get_num_threads()
    found = torch.empty_like(wanted)
    matrix = pack_matrix(step.library, weight, int8=True)
    call_kernel(step.library.product_of_bytes, x, 6, 576, matrix, 112, found, step.uses_amx, threads)
    return "" if torch.equal(found, wanted) else "this processor multiplies int8 otherwise"


def multiply_int8(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, K] times weight [N, K] as cpp/bytes.h multiplies them, by torch's operators: fp32 [n, N].

    A row and an output, both spread, have a scale each, by which their largest magnitude is 127.
    """
    (rows, of_rows), (outputs, of_outputs) = map(quantize_rows, (x, weight))
    return (rows.long() @ outputs.long().T).float() * of_rows * (of_outputs.T / INT8_INPUT_BLOCK)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, K] as int8, spread, K filled up to a multiple of DEPTH, and their scales [n, 1]; of zeros 1."""
    y = F.pad(x.float(), (0, -x.shape[1] % INT8_INPUT_BLOCK))
    for apart in (1, 2, 4, 8, 16, 32):
        one, other = y.unflatten(1, (-1, 2, apart)).unbind(2)
        y = torch.stack([one + other, one - other], 2).flatten(1)
    largest = y.abs().amax(1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return (y / scale).round().to(torch.int8), scale


@torch.no_grad()
def passes_fused_self_check(step: FusedKernel) -> bool:
    """UnusableError where it cannot be tried."""
    decoder = build_self_check_decoder()
    if not decoder.can_prepack:
        raise KernelUnavailableError("torch without bfloat16 for this CPU")
    plain, fused = DecodeBatch(decoder, 6), DecodeBatch(decoder, 6, functools.partial(FusedDecoder, step))
    calls: list[Callable[[DecodeBatch], Tensor]] = [
        *(lambda batch, prompts=prompts: batch.admit(prompts, 2) for prompts in SELF_CHECK_PROMPTS),
        lambda batch: batch.step(torch.arange(6)),
        lambda batch: append_tokens(batch, torch.tensor([3]), [SELF_CHECK_APPENDED_TOKENS]),
        *[lambda batch: batch.step(torch.arange(6) + 50)] * SELF_CHECK_STEPS,
    ]
    return all(torch.equal(*map(each, (plain, fused))) for each in calls)


@torch.no_grad()
def build_self_check_decoder(device: str | torch.device = "cpu") -> Decoder:
    """A decoder of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(SELF_CHECK_CONFIG)
        for weight in model.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return Decoder(SELF_CHECK_CONFIG, torch.nn.Module.to(model, device), torch.bfloat16)
