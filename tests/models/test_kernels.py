"""Tests of the C++ kernels of an update: layers have the bits of operators, the head is as close to float64."""

from __future__ import annotations

import pytest
import torch

from pellucid.algorithm.sampling_mask import SamplingMask
from pellucid.models import autograd_ops, native, ops
from pellucid.models.native import (
    Kernels,
    KernelUnavailableError,
    ScaledLogits,
    StatisticsGradients,
    find_kernels,
    select_kernels,
)
from pellucid.policy.logprobs import LMHead, ScoreContext, compute_token_logprobs, score_logits

pytestmark = pytest.mark.skipif(
    native.load_kernels()[0] is None, reason="needs g++ and a CPU with AVX-512 for bfloat16"
)
BF16 = torch.bfloat16


def noise(*shape, seed=0, dtype=BF16):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def layer_work(n, width):
    """Return the arguments of each kernel of a layer, by name."""
    x, weight = noise(n, 2 * width, dtype=torch.float32), noise(2 * width, dtype=torch.float32)
    more, grad, heads = noise(n, 2 * width, seed=1), noise(n, 2 * width, seed=2), noise(n, 5, 2 * width)
    keys = -(-width // 16) * 16
    bias = torch.zeros(n, 1, 3, keys, dtype=BF16).masked_fill_(noise(n, 1, 3, keys, seed=1) > 2, -torch.inf)
    scores = noise(n, 2, 6, keys)
    return {
        "norm_forward": (x, weight, 1e-5, BF16),
        "norm_backward": (x, weight, 1e-5, grad),
        "add_norm_forward": (x, more, weight, 1e-5),
        "add_norm_backward": (x, weight, 1e-5, noise(n, 2 * width, seed=3, dtype=torch.float32), grad),
        "rotate_forward": (heads[:, :3], noise(n, 1, 2 * width), noise(n, 1, 2 * width, seed=3)),
        "rotate_backward": (heads[:, 1:4], noise(n, 1, 2 * width), noise(n, 1, 2 * width, seed=3)),
        "swiglu_forward": (noise(n, 2 * width),),
        "swiglu_backward": (noise(n, 2 * width), noise(n, width, seed=4)),
        "softmax": (scores, bias),
        "softmax_backward": (scores.float(), bias, noise(n, 2, 6, keys, seed=5), 0.125),
    }


def copied(arguments):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]


@pytest.mark.parametrize("name", layer_work(1, 16))
@pytest.mark.parametrize(("n", "width"), [(1, 16), (3, 48), (33, 112)])
def test_layer_kernels_equal_operators_with_any_number_of_threads(name, n, width):
    arguments = layer_work(n, width)[name]
    before = torch.get_num_threads()
    found = native.load_kernels()[0]
    for threads in (1, 2, 3):
        try:
            torch.set_num_threads(threads)
            ours, theirs = (getattr(by, name)(*copied(arguments)) for by in (found, ops))
        finally:
            torch.set_num_threads(before)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("vocabulary", [16, 272, 8192, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampled_tokens_equal_those_of_operators(vocabulary, temperature):
    uniforms = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    for sharpness in (0.1, 1, 4):
        logits = (noise(5, vocabulary, dtype=torch.float32) * sharpness).to(BF16)
        ours, theirs = (by.sample_with_masses(logits, uniforms, temperature) for by in (native.load_kernels()[0], ops))
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_sampled_token_does_not_depend_on_other_rows(temperature):
    logits, uniforms = noise(5, 8192), torch.linspace(0, 0.9, 5, dtype=torch.float64)
    together = native.load_kernels()[0].sample_with_masses(logits, uniforms, temperature)
    for row in range(5):
        alone = native.load_kernels()[0].sample_with_masses(logits[row : row + 1], uniforms[row : row + 1], temperature)
        assert [x.item() for x in alone] == [x[row].item() for x in together]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_ties_sample_the_first_token_and_nan_logits_a_valid_one(temperature):
    logits = torch.full((3, 272), -torch.inf, dtype=BF16)
    logits[0, [40, 100]] = 2.0
    logits[1] = torch.nan
    token, mass, total = native.load_kernels()[0].sample_with_masses(
        logits, torch.full((3,), 0.4, dtype=torch.float64), temperature
    )
    assert token[0] == 40
    assert (mass[0], total[0]) == (1, 2)
    assert (token < 272).all()
    assert total[1:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(("n", "width"), [(3, 544), (3, 4128), (3, 8224), (256, 96), (5000, 64), (600_000, 32)])
def test_norms_of_any_size_equal_those_of_torch(n, width):
    found = native.load_kernels()[0]
    x, weight, grad = noise(n, width, dtype=torch.float32), noise(width, dtype=torch.float32), noise(n, width, seed=1)
    assert torch.equal(found.norm_forward(x, weight, 1e-6, BF16), ops.norm_forward(x, weight, 1e-6, BF16))
    ours, theirs = (by.norm_backward(x, weight, 1e-6, grad) for by in (found, ops))
    assert all(map(torch.equal, ours, theirs))


def test_unsupported_tensors_use_operators():
    x = noise(4, 32)
    assert isinstance(select_kernels(x, BF16, 32), Kernels)
    assert select_kernels(x, BF16, 24) is ops
    assert select_kernels(x.float(), torch.float32, 32) is ops
    assert find_kernels(x.to("meta"), BF16, 32) is None
    for half_norm in (noise(4, 32, dtype=BF16), noise(4, 32, dtype=torch.float16)):
        assert autograd_ops.select_norm_kernels(half_norm, BF16) is ops


# ---------------------------------------------------------------- the head


VOCABULARY, SOME = 1003, 37
FACTOR, OTHER = 0.5, 0.8


def made():
    product, other = noise(SOME, VOCABULARY), noise(SOME, VOCABULARY, seed=1)
    return product, other, torch.arange(SOME) * 27 % VOCABULARY


def test_logit_statistics_are_as_close_to_float64_as_operators():
    product, other, tokens = made()
    read = native.load_kernels()[0].compute_statistics(
        ScaledLogits(product, FACTOR), tokens, ScaledLogits(other, OTHER)
    )

    def by_operators(dtype):
        z, reference = product.to(dtype) * FACTOR, (other.to(dtype) * OTHER).log_softmax(-1)
        return score_logits(z, tokens, reference)

    exact, theirs = by_operators(torch.float64), by_operators(torch.float32)
    for ours, one, right in zip(read, theirs, exact, strict=True):
        assert (ours - right).abs().max() <= (one - right).abs().max()
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kl", [False, True])
def test_gradient_of_the_product_matches_autograd(entropy, kl):
    product, other, tokens = made()
    weights = noise(3, SOME, seed=2, dtype=torch.float32)
    z = product.double().requires_grad_()
    log_probs = (z * FACTOR).log_softmax(-1)
    reference = (other.double() * OTHER).log_softmax(-1)
    said = log_probs.gather(-1, tokens[:, None])[:, 0]
    h = -(log_probs.exp() * log_probs).sum(-1)
    divergence = (log_probs.exp() * (log_probs - reference)).sum(-1)
    loss = (weights[0] * said).sum() + entropy * (weights[1] * h).sum() + kl * (weights[2] * divergence).sum()
    loss.backward()
    second = ScaledLogits(other, OTHER) if kl else None
    found, into = native.load_kernels()[0], product.clone()
    read = found.compute_statistics(ScaledLogits(into, FACTOR), tokens, second)
    weight = StatisticsGradients(weights[0], weights[1] if entropy else None, weights[2])
    found.compute_product_gradient(ScaledLogits(into, FACTOR), tokens, second, read, weight, into)
    rounding = 2**-8 * z.grad.abs() + 1e-6
    assert ((into.double() - z.grad).abs() <= rounding).all()


def test_head_kernels_need_bf16_and_no_softcap_or_sampling_mask():
    weight = noise(64, 32)
    plain = ScoreContext(LMHead(weight, weight), 1.0, False, None, None)
    product = noise(2, 64)
    assert plain.pick_kernels(product)
    assert not plain._replace(head=LMHead(weight, weight, softcap=30.0)).pick_kernels(product)
    assert not plain._replace(head=LMHead(weight.half(), weight.half())).pick_kernels(product.half())
    assert not plain._replace(ref_head=LMHead(weight.float(), weight.float())).pick_kernels(product)
    nothing = SamplingMask(torch.zeros(0, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.long))
    assert not plain._replace(sampling_mask=nothing).pick_kernels(product)


def test_log_probs_and_gradients_agree_with_and_without_kernels(monkeypatch):
    weight, hidden, tokens = noise(96, 32) / 8, noise(20, 32, seed=1) / 8, torch.arange(20)

    def both():
        master, states = weight.float().requires_grad_(), hidden.clone().requires_grad_()
        logprobs, entropy = compute_token_logprobs(states, LMHead(weight, master), tokens, 0.7, entropy_grad=True)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        return logprobs, entropy, master.grad, states.grad

    ours = both()
    monkeypatch.setattr(ScoreContext, "pick_kernels", lambda *_: None)
    for one, other in zip(ours, both(), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=2e-3)


# ---------------------------------------------------------------- self-check


@pytest.mark.parametrize("name", [*layer_work(1, 16), "sample_with_masses"])
def test_kernel_with_other_bits_fails_the_self_check(name):
    class Off(Kernels):
        pass

    def off(self, *arguments):
        said = getattr(ops, name)(*arguments)
        first, *rest = said if isinstance(said, tuple) else (said,)
        changed = first.view(-1)[0] * 1.02 + 0.02  # the last bits of one number
        first.view(-1)[0] = changed if first.is_floating_point() else first.view(-1)[0] + 1
        return (first, *rest) if rest else first

    setattr(Off, name, off)
    off = Off(native.load_kernels()[0].library)
    assert native.find_difference(native.compare_kernels(off)) == name


def test_missing_library_returns_a_reason(monkeypatch):
    def no_library():
        raise KernelUnavailableError("no g++")

    monkeypatch.setattr(native, "load_library", no_library)
    assert native.load_kernels.__wrapped__() == (None, "no g++")
