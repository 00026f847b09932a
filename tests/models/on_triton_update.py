"""Tests of Triton's update kernels in its interpreter. test_triton_update.py runs this file in its own process."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import triton_interpreter  # noqa: F401 - before Triton
from pellucid.models import native, ops, triton_update
from pellucid.models.native import LogitStatistics, ScaledLogits, StatisticsGradients

CPU = torch.device("cpu")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
EPS, FACTOR, OTHER_FACTOR = 1e-5, 1 / 0.7, 0.9
WIDTHS = [16, 544, 1030]


def noise(*shape, dtype=F32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def compare(name, *arguments):
    """Assert that a kernel equals its operator, up to the order of sums in fp32. In half precision a few numbers may
    differ: those whose fp32 value is about as close to one neighbor as to the other."""
    results = getattr(triton_update, name)(*arguments), getattr(ops, name)(*arguments)
    for found, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if found.dtype == F32:
            assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
        else:
            assert ((found - expected).abs() <= 2 * torch.finfo(found.dtype).eps * expected.abs() + 1e-7).all()
            assert (found != expected).float().mean() <= {BF16: 0.001, F16: 0.02}[found.dtype]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("programs", [3, 512])
def test_norms_and_their_gradients_match_operators(programs, width, dtype, monkeypatch):
    monkeypatch.setattr(triton_update, "_MAX_NORM_PROGRAMS", programs)  # with 3, each computes several tiles
    x, weight, grad = noise(37, width), noise(width, seed=1), noise(37, width, dtype=dtype, seed=2)
    more, sum_grad = noise(37, width, dtype=dtype, seed=3), noise(37, width, seed=4)
    compare("norm_forward", x, weight, EPS, dtype)
    compare("norm_backward", x, weight, EPS, grad)
    compare("add_norm_forward", x, more, weight, EPS)
    compare("add_norm_backward", x, weight, EPS, sum_grad, grad)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norms_of_heads_match_operators(dtype):
    """Qwen3 has these norms: heads are in the compute dtype, and a slice of more heads."""
    x, weight, grad = noise(5, 9, 32, dtype=dtype)[:, 2:6], noise(32, seed=1), noise(5, 4, 32, dtype=dtype, seed=2)
    compare("norm_forward", x, weight, EPS, dtype)
    compare("norm_backward", x, weight, EPS, grad)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("heads", "size"), [(6, 64), (1, 80), (33, 16)])
def test_rotations_match_operators(heads, size, dtype):
    x, cos, sin = noise(5, heads + 3, size, dtype=dtype)[:, 1:-2], *noise(2, 5, 1, size, dtype=dtype)
    compare("rotate_forward", x, cos, sin)
    compare("rotate_backward", x, cos, sin)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", WIDTHS)
def test_gates_and_their_gradients_match_operators(width, dtype):
    gate_up, grad = noise(7, 2 * width, dtype=dtype), noise(7, width, dtype=dtype, seed=1)
    compare("swiglu_forward", gate_up)
    compare("swiglu_backward", gate_up, grad)


def test_gradients_match_autograd_in_float64():
    shapes = (9, 48), (9, 48), (48,), (9, 96)
    x, more, weight, gate_up = (
        noise(*shape, scale=1.0, dtype=F64, seed=i).requires_grad_() for i, shape in enumerate(shapes)
    )
    sum_grad, grad = noise(2, 9, 48, dtype=F64)
    total = x + more
    normed, gate, up = F.rms_norm(total, (48,), weight, EPS), *gate_up.chunk(2, -1)
    expected = torch.autograd.grad((total * sum_grad + normed * grad).sum(), (x, more, weight))
    found = triton_update.add_norm_backward(total.float(), weight.float(), EPS, sum_grad.float(), grad.float())
    [gate_up_grad] = torch.autograd.grad((F.silu(gate) * up * grad).sum(), gate_up)
    found += (triton_update.swiglu_backward(gate_up.float(), grad.float()),)
    for ours, theirs in zip(found, (*expected, gate_up_grad), strict=True):
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


# ---------------------------------------------------------------- logits


def compute_exactly(logits, other, tokens, upstream):
    """Return statistics of logits in float64, and the gradient of their sum with the weights `upstream` [3, n]."""
    z = logits.double().requires_grad_()
    log_probs, other_log_probs = (z * FACTOR).log_softmax(-1), (other.double() * OTHER_FACTOR).log_softmax(-1)
    statistics = LogitStatistics(
        log_probs.gather(-1, tokens[:, None])[:, 0],
        -(log_probs.exp() * log_probs).sum(-1),
        (log_probs.exp() * (log_probs - other_log_probs)).sum(-1),
        (z * FACTOR).logsumexp(-1),
    )
    [grad] = torch.autograd.grad((torch.stack(statistics[:3]) * upstream).sum(), z)
    return LogitStatistics(*(x.detach() for x in statistics)), grad


LOGITS = {
    "less than a block": lambda: noise(4, 29),
    "many blocks": lambda: noise(4, 9001),
    "sure of a token in the last block": lambda: noise(4, 9001).index_fill_(1, torch.tensor([9000]), 30.0),
    "far below zero": lambda: noise(4, 4096) - 100,
    "falling": lambda: noise(4, 9001, scale=0.1) - torch.arange(9001) / 1000,
    "rising": lambda: noise(4, 9001, scale=0.1) + torch.arange(9001) / 1000,
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("has_other", [False, True])
def test_statistics_of_logits_match_float64(logits, has_other):
    logits = logits()
    other, tokens = noise(*logits.shape, seed=1), torch.tensor([0, 7, 28, logits.shape[1] - 1])
    exact, _ = compute_exactly(logits, other, tokens, torch.zeros(3, 4))
    reference = ScaledLogits(other, OTHER_FACTOR) if has_other else None
    found = triton_update.compute_statistics(ScaledLogits(logits, FACTOR), tokens, reference)
    wanted = exact if has_other else exact._replace(kl=torch.zeros(4))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=3e-7, atol=4e-5)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("parts", ["log-probs", "entropy", "entropy and KL"])
def test_gradient_of_logits_matches_autograd_and_stays_in_its_rows(parts, logits, dtype):
    logits = logits()
    other, tokens = noise(*logits.shape, seed=1), torch.tensor([0, 7, 28, logits.shape[1] - 1])
    weights = noise(3, 4, scale=1.0) * torch.tensor([1.0, "entropy" in parts, "KL" in parts])[:, None]
    statistics, exact = compute_exactly(logits, other, tokens, weights)
    memory = torch.cat([logits, logits[:1]])  # the last row is not given to the kernel
    product = memory[:4]
    out = product.view(dtype)[:, : logits.shape[1]]
    triton_update.compute_product_gradient(
        ScaledLogits(product, FACTOR),
        tokens,
        ScaledLogits(other, OTHER_FACTOR) if "KL" in parts else None,
        LogitStatistics(*(x.float() for x in statistics)),
        StatisticsGradients(weights[0], weights[1] if "entropy" in parts else None, weights[2]),
        out,
    )
    rounding = {BF16: 2**-8, F16: 2**-10, F32: 0.0}[dtype]
    smallest = 1e-7 if dtype == F16 else 0.0
    largest = exact.abs().max()
    assert ((out.double() - exact).abs() <= rounding * exact.abs() + 2e-5 * largest + smallest).all()
    assert torch.equal(memory[4], logits[0])


# ---------------------------------------------------------------- self-check


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_check_finds_no_fault(dtype):
    assert not triton_update.find_fault(CPU, dtype)


@pytest.mark.parametrize("name", triton_update.__all__)
def test_the_check_finds_a_kernel_that_differs(name, monkeypatch):
    """Only the largest number differs, by 2%."""
    compute = getattr(triton_update, name)

    def differ(*arguments):
        result = compute(*arguments)
        changed = arguments[-1] if result is None else result[0] if isinstance(result, tuple) else result
        changed[tuple(int(i) for i in torch.unravel_index(changed.abs().argmax(), changed.shape))] *= 1.02
        return result

    monkeypatch.setattr(triton_update, name, differ)
    assert triton_update.find_fault(CPU, BF16).startswith(f"{name} is off by")


def test_kernels_that_fail_to_launch_are_not_used_and_warn(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify it.")

    monkeypatch.setattr(triton_update, "launch", refuse)
    monkeypatch.setattr(triton_update.triton_ops, "launch", refuse)
    load = native.load_triton_kernels.__wrapped__
    with pytest.warns(UserWarning, match="without Triton: Failed to find C compiler.$"):
        assert load(CPU, BF16) is None
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(CPU, BF16) is triton_update
