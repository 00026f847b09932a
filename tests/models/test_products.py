"""Tests of products by AMX: they are rounded once, and a row has the same bits among many rows as among few."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from made_rollouts import batch_of, noise
from pellucid.models import attention, fused_check, linear
from pellucid.models.decode import DecodeBatch
from pellucid.models.decoder import Decoder
from pellucid.models.linear import GEMM_BLOCK, apply_joined_linear, apply_linear, compute_input_gradient
from pellucid.models.score import compute_hidden_states
from pellucid.policy.logprobs import LMHead, compute_token_logprobs

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not (attention.load_attention_kernel()[0] and attention.load_attention_kernel()[0].uses_amx),
    reason="needs g++ and a CPU with AMX",
)
SIZES = [(32, 32, 32), (33, 96, 64), (100, 576, 1536), (700, 1120, 96)]


def by(threads, multiply, *about):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return multiply(*about)
    finally:
        torch.set_num_threads(before)


def among_few(x, weight, bias=None):
    """Return F.linear of GEMM_BLOCK rows at a time: with one thread oneDNN sums these in one order."""
    few = [x[max(0, min(start, len(x) - GEMM_BLOCK)) :][:GEMM_BLOCK] for start in range(0, len(x), GEMM_BLOCK)]
    rows = torch.cat([by(1, F.linear, part, weight, bias) for part in few[:-1]] or [x[:0] @ weight.mT])
    last = by(1, F.linear, few[-1], weight, bias)
    return torch.cat([rows, last[len(last) - (len(x) - len(rows)) :]])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("n", "outputs", "width"), SIZES)
def test_rows_have_the_same_bits_among_many_as_among_few(n, outputs, width, threads):
    """Threads divide the outputs, the rows, or both."""
    x, weight, bias = noise(n, width), noise(outputs, width, seed=1), noise(outputs, seed=2)
    assert torch.equal(by(threads, apply_linear, x, weight), among_few(x, weight))
    assert torch.equal(by(threads, apply_linear, x, weight, bias), among_few(x, weight, bias))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("n", "outputs", "width"), SIZES)
def test_input_gradient_is_the_product_with_the_transposed_weight(n, outputs, width, threads):
    grad, weight = noise(n, outputs), noise(outputs, width, seed=1)
    assert torch.equal(by(threads, compute_input_gradient, grad, weight), among_few(grad, weight.mT.contiguous()))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("n", "outputs", "width"), SIZES)
def test_joined_product_equals_that_of_concatenated_inputs(n, outputs, width, threads):
    x, weight, bias = noise(n, width), noise(outputs, width, seed=1), noise(outputs, seed=2)
    z, b, a = noise(n, 64, seed=3), noise(outputs, 64, seed=4), noise(64, width, seed=5)
    joined = by(threads, apply_joined_linear, x, weight, bias, z, b)
    assert torch.equal(joined, by(threads, apply_linear, torch.cat([x, z], 1), torch.cat([weight, b], 1), bias))
    grad = noise(n, outputs, seed=6)
    expected = by(threads, compute_input_gradient, torch.cat([grad, z], 1), torch.cat([weight, a]))
    assert torch.equal(by(threads, compute_input_gradient, grad, weight, z, a), expected)


@pytest.mark.parametrize(
    "trained", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_gradients_of_products_match_the_operator(trained):
    """The weights are not cast from masters: an engine shards them, or they are frozen."""
    tensors = noise(40, 64), noise(96, 64, seed=1), noise(96, seed=2)
    grad, found = noise(40, 96, seed=3), []
    for multiply in (apply_linear, F.linear):
        leaves = [x.clone().requires_grad_(bool(needed)) for x, needed in zip(tensors, trained, strict=True)]
        multiply(*leaves).backward(grad)
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.1)


def test_products_of_noncontiguous_rows_are_the_same():
    wide, weight = noise(50, 256), noise(64, 96, seed=1)
    assert torch.equal(apply_linear(wide[:, 32:128], weight), apply_linear(wide[:, 32:128].contiguous(), weight))
    turned = noise(96, 50)
    assert torch.equal(apply_linear(turned.mT, weight), apply_linear(turned.mT.contiguous(), weight))


def test_unsupported_matrices_are_multiplied_by_operators(monkeypatch):
    monkeypatch.setattr(linear, "call_kernel", None)
    many = noise(40, 64)
    for x, weight in (
        (many[:31], noise(64, 64)),
        (many[:, :48], noise(64, 48)),
        (many, noise(48, 64)),
        (many, noise(64, 64).mT),
        (many.float(), noise(64, 64, dtype=torch.float32)),
    ):
        assert torch.equal(apply_linear(x, weight), F.linear(x, weight))
    assert torch.equal(compute_input_gradient(many, noise(64, 48)), many @ noise(64, 48))
    wide, weight = noise(32, 2**14 + 32), noise(2**14 + 32, 32)
    assert torch.equal(compute_input_gradient(wide, weight), wide @ weight)


def test_rows_of_another_dtype_raise_as_in_the_operator():
    """Otherwise their bits would be read as bf16."""
    with pytest.raises(RuntimeError, match="dtype"):
        apply_linear(noise(40, 64, dtype=torch.float32), noise(96, 64))
    with pytest.raises(RuntimeError, match="dtype"):
        compute_input_gradient(noise(40, 96, dtype=torch.float32), noise(96, 64))


def test_out_of_memory_in_a_product_raises_memory_error(monkeypatch):
    monkeypatch.setattr(linear, "call_kernel", lambda *_: 1)
    for multiply in (apply_linear, compute_input_gradient):
        with pytest.raises(MemoryError, match="a matrix of 64 x 64"):
            multiply(noise(40, 64), noise(64, 64))


def test_scorer_with_amx_matches_the_sampler_bit_for_bit():
    """By oneDNN it would not: it sums the inputs of many rows in another order than those of few."""
    sizes = {"hidden_size": 576, "intermediate_size": 1088, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(vocab_size=1152, num_hidden_layers=2, attention_bias=True, mlp_bias=True, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
    decoder, batch = Decoder(config, model, BF16), batch_of([5, 40], [12] * 40, [0] * 20 + [1] * 20)
    decoding = DecodeBatch(decoder, 40, fused_check.select_fused_decoder(decoder))
    assert decoding.fused_decoder
    said = [decoding.admit(batch.prompt_ids, 20), *(decoding.step(batch.response_ids[:, t]) for t in range(11))]
    sampled = torch.stack(said, 1).float().log_softmax(-1).gather(-1, batch.response_ids[..., None])[..., 0]
    with torch.no_grad():
        hidden, head = compute_hidden_states(decoder, batch)
        scored, _ = compute_token_logprobs(
            hidden, LMHead(head.tensor, head.masters[0]), batch.response_ids[batch.response_mask]
        )
    torch.testing.assert_close(scored, sampled[batch.response_mask], rtol=0, atol=5e-6)
