"""The work of an update besides matrix products and attention, by Triton: one kernel per function of `ops`.

The functions have the names and arguments of those in `ops` and of `native.Kernels`, and round where `ops` does. Import
this module where it is needed, not at the top of a file: `native.load_triton_kernels` does, and checks it once per
device.

Shapes: N tokens, D hidden size, H heads, d head size, I intermediate size; n rows of logits, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pellucid.models import ops, triton_ops
from pellucid.models.native import LogitStatistics, ScaledLogits, StatisticsGradients
from pellucid.models.triton_ops import KERNEL_ERRORS, LOG2E, launch, rotate, round_up_block, silu, swiglu_forward

__all__ = [
    "add_norm_backward",
    "add_norm_forward",
    "compute_product_gradient",
    "compute_statistics",
    "norm_backward",
    "norm_forward",
    "rotate_backward",
    "rotate_forward",
    "swiglu_backward",
    "swiglu_forward",
]

_NORM_TILE, _MAX_NORM_PROGRAMS = 1024, 512
"""The elements that a program of `norm_backward` computes at once, and the most programs. These are constants, so that
the order of sums does not depend on the GPU."""
_ROTATION_TILE, _GATE_BLOCK, _LOGITS_BLOCK = 1024, 1024, 4096
_HALF_TOLERANCE, _FP32_TOLERANCE = 2.0**-7, 1e-5
"""The largest accepted errors, as shares of the largest number: of results in half precision, one rounding."""


# ---------------------------------------------------------------- norms


def norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return triton_ops.norm_forward(x.flatten(0, -2), weight, eps, dtype).view(x.shape)


def add_norm_forward(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return triton_ops.add_norm_forward(x, more, weight, eps)


@triton.jit
def norm_backward_kernel(
    x, weight, grad, sum_grad, x_grad, more_grad, partial_sums, N, D, eps, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Every so many tiles of TILE rows: the gradients of their norm and of the sum before it, and the sum over these
    rows of the gradient of the weight."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + i, i < D, 0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    for step in range(tl.cdiv(tl.cdiv(N, TILE) - program, programs)):
        row = (program + step * programs).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
        inside, offset = (row < N) & (i < D), row * D + i
        wide = tl.load(x + offset, inside, 0.0).to(tl.float32)
        g = tl.load(grad + offset, inside, 0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        unit = wide * inverse_rms
        sums += tl.sum(g * unit, 0)
        unit_grad = g * w
        result = (unit_grad - unit * (tl.sum(unit_grad * unit, 1) / D)[:, None]) * inverse_rms
        if sum_grad is not None:
            result += tl.load(sum_grad + offset, inside, 0.0)
            tl.store(more_grad + offset, result.to(more_grad.dtype.element_ty), inside)
        tl.store(x_grad + offset, result.to(x_grad.dtype.element_ty), inside)
    i = tl.arange(0, BLOCK)
    tl.store(partial_sums + program.to(tl.int64) * D + i, sums, i < D)


def norm_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad: Tensor,
    sum_grad: Tensor | None = None,
    more_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.norm_backward`. `sum_grad` is added to the gradient of x, which is also written to `more_grad`, rounded."""
    x, grad, width = x.contiguous(), grad.contiguous(), x.shape[-1]
    n, block = x.numel() // width, round_up_block(width)
    tile = max(1, _NORM_TILE // block)
    programs = max(1, min(-(-n // tile), _MAX_NORM_PROGRAMS))
    x_grad, partial_sums = torch.empty_like(x), weight.new_empty(programs, width)
    tensors = x, weight, grad, sum_grad, x_grad, more_grad, partial_sums
    launch(
        norm_backward_kernel, (programs,), *tensors, n, width, eps, TILE=tile, BLOCK=block, num_warps=_pick_warps(block)
    )
    return x_grad, partial_sums.sum(0)


def add_norm_backward(
    x: Tensor, weight: Tensor, eps: float, sum_grad: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    more_grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    x_grad, weight_grad = norm_backward(x, weight, eps, grad, sum_grad.contiguous(), more_grad)
    return x_grad, more_grad, weight_grad


def _pick_warps(block: int) -> int:
    """Return how many warps share a row, so that its numbers fit into their registers."""
    return min(max(4, block // 512), 16)


# ---------------------------------------------------------------- rotation and gate


@triton.jit
def rotate_kernel(x, cos, sin, y, stride, H, D, INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """HEADS heads of one token; the tokens of x are `stride` elements apart."""
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    dtype: tl.constexpr = y.dtype.element_ty
    half = D // 2
    inside, offset = (head < H) & (i < half), head * D + i
    first = tl.load(x + token * stride + offset, inside, 0.0)
    second = tl.load(x + token * stride + offset + half, inside, 0.0)
    angle = token * D + i
    first_cos, second_cos = tl.load(cos + angle, i < half, 0.0), tl.load(cos + angle + half, i < half, 0.0)
    first_sin = tl.load(sin + angle, i < half, 0.0).to(tl.float32)
    second_sin = tl.load(sin + angle + half, i < half, 0.0).to(tl.float32)
    if INVERSE:
        first_sin, second_sin = -first_sin, -second_sin
    tl.store(y + token * H * D + offset, rotate(first, second, first_cos, first_sin, dtype), inside)
    tl.store(y + token * H * D + offset + half, rotate(second, first, second_cos, second_sin, dtype), inside)


def rotate_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate(x, cos, sin, inverse=False)


def rotate_backward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate(x, cos, sin, inverse=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    n, heads, size = x.shape
    x = x if x.stride()[1:] == (size, 1) else x.contiguous()  # the heads may be a slice of more heads
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = round_up_block(size // 2)
    block = min(round_up_block(heads), max(1, _ROTATION_TILE // half))
    tensors = x, cos.contiguous(), sin.contiguous(), y
    launch(
        rotate_kernel, (n, -(-heads // block)), *tensors, x.stride(0), heads, size,
        INVERSE=inverse, HEADS=block, HALF=half,
    )  # fmt: skip
    return y


@triton.jit
def swiglu_backward_kernel(gate_up, grad, gate_up_grad, I, BLOCK: tl.constexpr):
    """A block of one row: the gradients of gate and up."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = gate_up_grad.dtype.element_ty
    inside = i < I
    gate = tl.load(gate_up + row * 2 * I + i, inside, 0.0)
    up = tl.load(gate_up + row * 2 * I + I + i, inside, 0.0).to(tl.float32)
    g = tl.load(grad + row * I + i, inside, 0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp2(-wide * LOG2E))
    gate_grad = (g * up).to(dtype).to(tl.float32) * sigmoid * (1 + wide * (1 - sigmoid))
    tl.store(gate_up_grad + row * 2 * I + i, gate_grad.to(dtype), inside)
    tl.store(gate_up_grad + row * 2 * I + I + i, (silu(gate, dtype).to(tl.float32) * g).to(dtype), inside)


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    (n, width), gate_up_grad = grad.shape, torch.empty_like(gate_up)
    grid = n, -(-width // _GATE_BLOCK)
    launch(swiglu_backward_kernel, grid, gate_up, grad, gate_up_grad, width, BLOCK=_GATE_BLOCK)
    return gate_up_grad


# ---------------------------------------------------------------- logits


@triton.jit
def statistics_kernel(
    logits, tokens, other, logprobs, entropy, kl, log_normalizer, V, factor, other_factor, BLOCK: tl.constexpr
):
    """One row of logits z, in one pass: with the highest of the logits so far, the mass is the sum of exp(z - highest),
    the slope that of exp(z - highest) (z - highest), and the cross term that of exp(z - highest) (z - other)."""
    row = tl.program_id(0).to(tl.int64)
    highest, mass, slope = float("-inf"), 0.0, 0.0
    other_highest, other_mass, cross = float("-inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < V
        z = tl.load(logits + row * V + i, inside, 0.0).to(tl.float32) * factor
        now_highest, change, below, masses = _compute_masses(z, inside, highest)  # pyright: ignore[reportGeneralTypeIssues]
        decay = tl.exp2(change * LOG2E)
        slope = (slope + mass * change) * decay + tl.sum(masses * below, 0)
        mass = mass * decay + tl.sum(masses, 0)
        if other is not None:
            other_z = tl.load(other + row * V + i, inside, 0.0).to(tl.float32) * other_factor
            cross = cross * decay + tl.sum(masses * (z - other_z), 0)
            other_highest, change, below, masses = _compute_masses(other_z, inside, other_highest)
            other_mass = other_mass * tl.exp2(change * LOG2E) + tl.sum(masses, 0)
        highest = now_highest
    normalizer = highest + tl.log(mass)
    tl.store(logprobs + row, tl.load(logits + row * V + tl.load(tokens + row)).to(tl.float32) * factor - normalizer)
    tl.store(entropy + row, tl.log(mass) - slope / mass)
    tl.store(log_normalizer + row, normalizer)
    if other is not None:
        tl.store(kl + row, cross / mass - normalizer + other_highest + tl.log(other_mass))


@triton.jit
def _compute_masses(z, inside, highest):
    """Return the highest logit with these [BLOCK], how far the highest before is below it, how far these are, and their
    masses exp(z - highest)."""
    now_highest = tl.maximum(highest, tl.max(tl.where(inside, z, float("-inf")), 0))
    change = tl.where(highest == float("-inf"), 0.0, highest - now_highest)
    below = tl.where(inside, z - now_highest, 0.0)
    return now_highest, change, below, tl.where(inside, tl.exp2(below * LOG2E), 0.0)


@triton.jit
def product_gradient_kernel(
    logits, tokens, other, out, entropy, kl, log_normalizer, logprobs_grad, entropy_grad, kl_grad, V, stride,
    factor, other_factor, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. `out` is in its own memory: a block is written when it has been read, and begins where it began or
    before, so what is written never reaches what has yet to be read."""
    row = tl.program_id(0).to(tl.int64)
    token, normalizer = tl.load(tokens + row), tl.load(log_normalizer + row)
    weight = tl.load(logprobs_grad + row)
    other_normalizer, own_kl, kl_weight, own_entropy, entropy_weight = 0.0, 0.0, 0.0, 0.0, 0.0
    if other is not None:
        own_kl, kl_weight = tl.load(kl + row), tl.load(kl_grad + row)
        other_highest, other_mass = float("-inf"), 0.0
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            other_z = tl.load(other + row * V + i, i < V, 0.0).to(tl.float32) * other_factor
            other_highest, change, _, masses = _compute_masses(other_z, i < V, other_highest)  # pyright: ignore
            other_mass = other_mass * tl.exp2(change * LOG2E) + tl.sum(masses, 0)
        other_normalizer = other_highest + tl.log(other_mass)
    if entropy_grad is not None:
        own_entropy, entropy_weight = tl.load(entropy + row), tl.load(entropy_grad + row)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < V
        z = tl.load(logits + row * V + i, inside, 0.0).to(tl.float32) * factor
        log_probs = tl.where(inside, z - normalizer, 0.0)
        weights = tl.zeros([BLOCK], tl.float32) - weight
        if entropy_grad is not None:
            weights -= entropy_weight * (log_probs + own_entropy)
        if other is not None:
            other_z = tl.load(other + row * V + i, inside, 0.0).to(tl.float32) * other_factor
            weights += kl_weight * (log_probs - (other_z - other_normalizer) - own_kl)
        grad = tl.exp2(log_probs * LOG2E) * weights + tl.where(i == token, weight, 0.0)
        tl.debug_barrier()  # the whole block is read before its memory is written
        tl.store(out + row * stride + i, (grad * factor).to(out.dtype.element_ty), inside)


def compute_statistics(logits: ScaledLogits, tokens: Tensor, other: ScaledLogits | None) -> LogitStatistics:
    """`native.Kernels.compute_statistics` of logits [n, V] in fp32."""
    (n, vocabulary), device = logits.head_output.shape, tokens.device
    statistics = LogitStatistics(*torch.zeros(4, n, device=device))
    reference, factors = _get_reference(other), (logits.factor, 1.0 if other is None else other.factor)
    launch(
        statistics_kernel, (n,), logits.head_output, tokens, reference, *statistics, vocabulary, *factors,
        BLOCK=_LOGITS_BLOCK, num_warps=8,
    )  # fmt: skip
    return statistics


def compute_product_gradient(
    logits: ScaledLogits,
    tokens: Tensor,
    other: ScaledLogits | None,
    statistics: LogitStatistics,
    gradients: StatisticsGradients,
    out: Tensor,
) -> None:
    """`native.Kernels.compute_product_gradient` of logits [n, V] in fp32.

    `out` [n, V], in any dtype, is in the memory of the head output: each row begins where that of the head output does.
    """
    (n, vocabulary), reference = logits.head_output.shape, _get_reference(other)
    logprobs_grad, entropy_grad, kl_grad = (None if g is None else g.contiguous() for g in gradients)
    known = (x.contiguous() for x in statistics[1:])
    grads = logprobs_grad, entropy_grad, None if other is None else kl_grad
    factors = logits.factor, 1.0 if other is None else other.factor
    launch(
        product_gradient_kernel, (n,), logits.head_output, tokens, reference, out, *known, *grads, vocabulary,
        out.stride(0), *factors, BLOCK=_LOGITS_BLOCK, num_warps=8,
    )  # fmt: skip


def _get_reference(other: ScaledLogits | None) -> Tensor | None:
    return None if other is None else other.head_output


# ---------------------------------------------------------------- the check


def find_fault(device: torch.device, dtype: torch.dtype) -> str:
    """Return why these kernels cannot be used on a device in a dtype; empty if they can."""
    try:
        for name, ours, theirs in compare_kernels(device, dtype):
            for x, y in zip(ours, theirs, strict=True):
                error_share = float((x.double() - y.double()).abs().max() / y.double().abs().max())
                if not error_share < (_FP32_TOLERANCE if x.dtype == torch.float32 else _HALF_TOLERANCE):
                    return f"{name} is off by {error_share:.1g} of the largest number"
    except KERNEL_ERRORS as error:
        return str(error).splitlines()[0]
    return ""


@torch.no_grad()
def compare_kernels(
    device: torch.device, dtype: torch.dtype
) -> Iterable[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Run each function with the kernels and by operators on small inputs; yield its name and both results."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(3).to(device, dtype)

    fp32 = torch.float32
    x, more, weight = noise(37, 544, dtype=fp32), noise(37, 544), noise(544, dtype=fp32)
    rotation = noise(5, 9, 64)[:, :6], noise(5, 1, 64), noise(5, 1, 64)
    gate_up = noise(5, 96)
    calls: dict[str, tuple[Any, ...]] = {
        "norm_forward": (x, weight, 1e-5, dtype),
        "norm_backward": (x, weight, 1e-5, more),
        "add_norm_forward": (x, more, weight, 1e-5),
        "add_norm_backward": (x, weight, 1e-5, x * 2, more),
        "rotate_forward": rotation,
        "rotate_backward": rotation,
        "swiglu_forward": (gate_up,),
        "swiglu_backward": (gate_up, noise(5, 48)),
    }
    for name, arguments in calls.items():
        ours, theirs = (getattr(module, name)(*arguments) for module in (sys.modules[__name__], ops))
        yield name, ours if isinstance(ours, tuple) else (ours,), theirs if isinstance(theirs, tuple) else (theirs,)
    yield from _compare_logits(noise(3, 5000, dtype=fp32), noise(3, 5000, dtype=fp32), noise(3, 3, dtype=fp32), dtype)


def _compare_logits(
    product: Tensor, other: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Iterable[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """As `compare_kernels`: the statistics of logits, and their gradient against autograd's."""
    tokens = torch.tensor([4095, 4096, 7]).to(product.device)
    with torch.enable_grad():
        z = product.clone().requires_grad_()
        log_probs, other_log_probs = (z / 0.7).log_softmax(-1), other.log_softmax(-1)
        statistics = (
            log_probs.gather(-1, tokens[:, None])[:, 0],
            -(log_probs.exp() * log_probs).sum(-1),
            (log_probs.exp() * (log_probs - other_log_probs)).sum(-1),
            (z / 0.7).logsumexp(-1),
        )
        [expected] = torch.autograd.grad((torch.stack(statistics[:3]) * upstream).sum(), z)
    logits, reference = ScaledLogits(product, 1 / 0.7), ScaledLogits(other, 1.0)
    found = compute_statistics(logits, tokens, reference)
    yield "compute_statistics", found, tuple(x.detach() for x in statistics)
    out = product.view(dtype)[:, : product.shape[1]]
    compute_product_gradient(logits, tokens, reference, found, StatisticsGradients(*upstream), out)
    yield "compute_product_gradient", (out,), (expected,)
