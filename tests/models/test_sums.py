"""Tests of weight gradients by AMX: sums over tokens are not rounded."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import VOCAB, character_tokenizer
from made_rollouts import batch_of, noise, off
from pellucid.models import attention, linear, score
from pellucid.models.decoder import Decoder
from pellucid.models.linear import compute_weight_gradient
from pellucid.models.score import compute_hidden_states
from pellucid.policy.policy import Policy

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not (attention.load_attention_kernel()[0] and attention.load_attention_kernel()[0].uses_amx),
    reason="needs g++ and a CPU with AMX",
)


@pytest.mark.parametrize(("n", "outputs", "width"), [(1, 32, 32), (33, 96, 64), (300, 1120, 96), (1100, 800, 832)])
def test_sums_over_tokens_are_not_rounded(n, outputs, width):
    grad, x = noise(n, outputs), noise(n, width, seed=1)
    exact, before = grad.double().mT @ x.double(), noise(outputs, width, seed=2, dtype=torch.float32)
    found = compute_weight_gradient(grad, x, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    for start in (0, 1):  # aligned to a cache line, and not
        into = torch.empty(16 + outputs * width)[start : start + outputs * width].view(outputs, width).copy_(before)
        assert compute_weight_gradient(grad, x, torch.float32, into) is into
        torch.testing.assert_close(into.double(), before + exact, rtol=1e-5, atol=1e-4)


@pytest.fixture
def unwritten_is_nan():
    """Fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_sums_over_no_token_are_zero(unwritten_is_nan):
    grad, x, before = noise(0, 96), noise(0, 64), noise(96, 64, dtype=torch.float32)
    assert torch.equal(compute_weight_gradient(grad, x, torch.float32), torch.zeros(96, 64))
    assert torch.equal(compute_weight_gradient(grad, x, torch.float32, before.clone()), before)


def test_gradients_are_zero_if_all_tokens_weigh_zero(unwritten_is_nan):
    """A step whose groups are all dead keeps one such row."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB + 4, num_hidden_layers=1, head_dim=64, **sizes))
    policy = Policy(model, character_tokenizer(), BF16)
    (0 * policy.score(batch_of([5], [8], [0])).logprobs.sum()).backward()
    assert {float(x.grad.abs().max()) for x in model.parameters()} == {0.0}


@pytest.mark.parametrize("outputs", [32, 64, 1120])
def test_sums_have_the_same_bits_with_any_number_of_threads(outputs):
    grad, x, before = noise(300, outputs), noise(300, 96, seed=1), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        try:
            torch.set_num_threads(threads)
            found.append(compute_weight_gradient(grad, x, torch.float32))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_unsupported_matrices_are_summed_by_operators(monkeypatch):
    monkeypatch.setattr(linear, "call_kernel", None)
    for grad, x, wide in (
        (noise(4, 48), noise(4, 32), torch.float32),
        (noise(4, 32), noise(4, 48), torch.float32),
        (noise(4, 32), noise(4, 32), torch.float64),
        (noise(4, 32, dtype=torch.float32), noise(4, 32, dtype=torch.float32), torch.float32),
    ):
        once = compute_weight_gradient(grad, x, wide)
        assert torch.equal(once, (grad.mT @ x).to(wide))
        assert torch.equal(compute_weight_gradient(grad, x, wide, once.clone()), once * 2)


def test_gradients_of_a_model_are_closer_to_fp32_than_by_operators(monkeypatch):
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=90, num_hidden_layers=2, head_dim=64, attention_bias=True, mlp_bias=True, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    batch = batch_of([5, 40], [8, 71, 2, 1], [0, 1, 1, 0])

    def gradients(dtype):
        states, _ = compute_hidden_states(Decoder(config, model, dtype), batch)
        model.zero_grad()
        (states.float() * noise(*states.shape, dtype=torch.float32)).sum().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    exact, ours = gradients(torch.float32), gradients(BF16)
    monkeypatch.setattr(score, "find_attention_kernel", lambda _: None)
    monkeypatch.setattr(attention, "load_attention_kernel", lambda: (None, ""))
    monkeypatch.setattr(linear, "load_gemm_kernel", lambda: (None, ""))
    theirs = gradients(BF16)
    assert len(exact) == 34
    distances = [sum(off(x[name], exact[name]) for name in exact) for x in (ours, theirs)]
    assert distances[0] < distances[1]


def test_out_of_memory_in_a_sum_raises_memory_error(monkeypatch):
    monkeypatch.setattr(linear, "call_kernel", lambda *_: 1)
    with pytest.raises(MemoryError, match="a matrix of 32 x 64"):
        compute_weight_gradient(noise(2, 32), noise(2, 64), torch.float32)
