"""Tests of chunked log-probs against plain log_softmax and autograd over all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pellucid.policy import logprobs
from pellucid.policy.logprobs import LMHead, compute_token_logprobs


@pytest.fixture
def inputs():
    hidden = torch.randn(13, 8, dtype=torch.float64).requires_grad_()
    weight = torch.randn(29, 8, dtype=torch.float64).requires_grad_()
    return hidden, weight, torch.randint(29, (13,))


def plain(hidden, weight, tokens, temperature, bias, scale, softcap):
    logits = (hidden @ weight.T + bias) * scale
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    log_probs = (logits / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=log_probs).entropy()
    return log_probs[torch.arange(len(tokens)), tokens], entropy


@pytest.mark.parametrize("tokens_at_once", [1, 4, 13, 100])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.7, 0.5, 0.0), (1.3, 0.5, 2.0)])
def test_values_and_gradients_equal_plain_autograd(monkeypatch, inputs, tokens_at_once, temperature, scale, softcap):
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 29 * tokens_at_once)
    monkeypatch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", 29 * max(1, tokens_at_once // 2))
    hidden, weight, tokens = inputs
    bias = torch.randn(29, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(2, 13, dtype=torch.float64)
    ours = compute_token_logprobs(
        hidden, LMHead(weight, weight, bias, scale, softcap), tokens, temperature, entropy_grad=True
    )
    theirs = plain(hidden, weight, tokens, temperature, bias, scale, softcap)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    leaves = (hidden, weight, bias)
    gradients = [torch.autograd.grad((torch.stack(pair) * upstream).sum(), leaves) for pair in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens_at_once", [1, 4, 100])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.7, 0.5, 0.0), (1.3, 0.5, 2.0)])
def test_exact_kl_and_its_gradient_cover_the_whole_vocabulary(
    monkeypatch, inputs, tokens_at_once, temperature, scale, softcap
):
    """Both distributions use the temperature; log-probs and KL are differentiated together, as in a loss."""
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 29 * tokens_at_once)
    monkeypatch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", 29 * max(1, tokens_at_once // 2))
    hidden, weight, tokens = inputs
    bias, ref_bias = torch.randn(2, 29, dtype=torch.float64)
    ref_hidden, ref_weight = (torch.randn(*size, dtype=torch.float64) for size in ((13, 6), (29, 6)))

    def log_probs(hidden, weight, bias):
        logits = (hidden @ weight.T + bias) * scale
        return ((softcap * (logits / softcap).tanh() if softcap else logits) / temperature).log_softmax(-1)

    reference = ref_hidden, LMHead(ref_weight, ref_weight, ref_bias, scale, softcap)
    ours = compute_token_logprobs(
        hidden, LMHead(weight, weight, bias, scale, softcap), tokens, temperature, reference=reference
    )
    every, other = log_probs(hidden, weight, bias), log_probs(ref_hidden, ref_weight, ref_bias)
    kl = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (every, other)))
    torch.testing.assert_close(ours[2], kl, rtol=0, atol=1e-12)
    upstream = torch.randn(2, 13, dtype=torch.float64)
    upstream[0, ::3] = 0.0  # tokens of a dead group: only their KL has a gradient
    pairs = (ours[0], ours[2]), (every[torch.arange(13), tokens], kl)
    mine, theirs = (torch.autograd.grad((torch.stack(pair) * upstream).sum(), (hidden, weight)) for pair in pairs)
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_entropy_has_a_gradient_only_if_asked_for(inputs):
    hidden, weight, tokens = inputs
    assert not compute_token_logprobs(hidden, LMHead(weight, weight), tokens)[1].requires_grad
    assert compute_token_logprobs(hidden, LMHead(weight, weight), tokens, entropy_grad=True)[1].requires_grad


def test_all_logits_are_never_held_at_once(monkeypatch, inputs):
    """Autograd keeps no tensor larger than the inputs of a chunk, so none of shape [N, V]."""
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 29 * 2)
    hidden, weight, tokens = inputs
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        compute_token_logprobs(hidden, LMHead(weight, weight), tokens)
    assert kept
    assert not any(29 in shape and shape != (29, 8) for shape in kept)


@pytest.mark.parametrize("room", [0, 7, 16, 40], ids="room for {} tokens".format)
def test_saved_logits_give_the_same_results_as_recomputed_ones(monkeypatch, room):
    """Some tokens have an upstream gradient of 0, and the gradient is computed twice."""
    hidden, weight = torch.randn(30, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    tokens, of = torch.randint(64, (30,)), torch.randn(30)
    of[torch.tensor([0, 3, 4, 15, 16, 29])] = 0.0

    made = logprobs._count_saved_tokens
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 40 * len(weight))
    monkeypatch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", 4 * len(weight))

    def gradients(room):
        monkeypatch.setattr(logprobs, "_count_saved_tokens", lambda w, n: made(w, min(n, room)))
        x, master = hidden.clone().requires_grad_(), weight.float().requires_grad_()
        found = compute_token_logprobs(x, LMHead(weight, master), tokens, temperature=0.7)[0]
        both = [torch.autograd.grad(found, (x, master), of, retain_graph=True) for _ in range(2)]
        return [found.detach(), *both[0], *both[1]]

    products, one = [], LMHead.project
    monkeypatch.setattr(LMHead, "project", lambda self, x: products.append(len(x)) or one(self, x))
    kept = gradients(room)
    assert sum(products) == 30 + 24 + 24 - sum(of[:room] != 0)
    for found, expected in zip(kept, gradients(0), strict=True):
        parted = found.shape == weight.shape and 0 < room < 30  # two rounded products make the head's gradient
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if parted else 0)


@pytest.fixture
def widens(monkeypatch):
    """Emulate the head's product with fp32 output, as on CUDA."""
    for module in (logprobs, logprobs):
        monkeypatch.setattr(module, "supports_fp32_product", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: (x.double() @ y.double()).to(out_dtype))


@pytest.mark.parametrize("room", [0, 7, 40], ids="room for {} tokens".format)
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.7, 1.0, 0.0), (1.3, 0.5, 2.0)])
def test_fp32_head_product_rounds_only_the_gradient(monkeypatch, widens, room, temperature, scale, softcap):
    """Saved products need no more memory than in half precision; the others are recomputed."""
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 2 * room * 64 or 2 * 64)
    monkeypatch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", 4 * 64)
    made, products, one = logprobs._count_saved_tokens, [], LMHead.project
    monkeypatch.setattr(logprobs, "_count_saved_tokens", lambda weight, n: made(weight, n) if room else 0)
    monkeypatch.setattr(LMHead, "project", lambda self, x: products.append(one(self, x)) or products[-1])
    hidden, weight, bias = torch.randn(30, 32).bfloat16(), torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16()
    tokens, upstream = torch.randint(64, (30,)), torch.randn(2, 30)
    x, master = hidden.clone().requires_grad_(), weight.float().requires_grad_()
    found = compute_token_logprobs(
        x, LMHead(weight, master, bias, scale, softcap), tokens, temperature, entropy_grad=True
    )
    gradients = torch.autograd.grad((torch.stack(found) * upstream).sum(), (x, master))
    assert {product.dtype for product in products} == {torch.float32}
    assert max(map(len, products)) <= max(room, 1)
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = plain(*leaves, tokens, temperature, bias.double(), scale, softcap)
    wanted = torch.autograd.grad((torch.stack(exact) * upstream).sum(), leaves)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours - theirs).norm() < 4e-3 * theirs.norm()


def test_no_products_are_saved_without_a_backward_pass(monkeypatch):
    asked = []
    made = logprobs._count_saved_tokens
    monkeypatch.setattr(logprobs, "_count_saved_tokens", lambda weight, n: asked.append(n) or made(weight, n))
    hidden, weight = torch.randn(30, 32).bfloat16().requires_grad_(), torch.randn(64, 32).bfloat16().requires_grad_()
    with torch.no_grad():
        compute_token_logprobs(hidden, LMHead(weight.detach(), weight), torch.randint(64, (30,)))
    assert asked == [0]


def test_logits_are_reduced_in_fp32():
    """In bf16, a log-softmax over 4096 equal logits would be off in the second digit."""
    hidden, weight = torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(4096, 4, dtype=torch.bfloat16)
    logprob, entropy = compute_token_logprobs(hidden, LMHead(weight, weight), torch.tensor([7]))
    assert logprob.dtype == torch.float32
    assert abs(float(logprob) + torch.tensor(4096.0).log()) < 1e-4
    assert abs(float(entropy) - torch.tensor(4096.0).log()) < 1e-4


@examples(max_examples=40)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    many=st.integers(1, 200),
    few=st.integers(1, 200),
    temperature=st.floats(0.1, 3.0),
    seed=st.integers(0, 999),
)
def test_chunk_sizes_do_not_change_values_or_gradients(tokens, vocabulary, many, few, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(n, 4, dtype=torch.float64, generator=generator).requires_grad_() for n in (tokens, vocabulary)
    )
    chosen = torch.randint(vocabulary, (tokens,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "MAX_MATMUL_LOGITS", many)
        patch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", few)
        ours = compute_token_logprobs(hidden, LMHead(weight, weight), chosen, temperature, entropy_grad=True)
        mine = torch.autograd.grad(sum(x.sum() for x in ours), (hidden, weight))
    theirs = plain(hidden, weight, chosen, temperature, 0.0, 1.0, 0.0)
    gradients = torch.autograd.grad(sum(x.sum() for x in theirs), (hidden, weight))
    for one, other in zip((*ours, *mine), (*theirs, *gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("trained", [True, False])
def test_frozen_head_computes_no_weight_gradient(inputs, trained):
    """The head below an adapter is frozen. Products: logits twice, the hidden gradient, a trained head's gradient."""
    hidden, weight, tokens = inputs
    weight.requires_grad_(trained)
    with FlopCounterMode(display=False) as counted:
        compute_token_logprobs(hidden, LMHead(weight, weight), tokens)[0].sum().backward()
    products = counted.get_flop_counts()["Global"][torch.ops.aten.mm] / (2 * 13 * 29 * 8)
    assert products == 3 + trained
    assert (weight.grad is not None) == trained
