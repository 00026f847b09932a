"""Tests of Triton's decoding kernels in its interpreter against PyTorch's operators.

test_triton_decode.py runs this file in its own process.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import triton_interpreter  # noqa: F401 - Triton was imported with TRITON_INTERPRET=1, and has no kernel yet
from architectures import adapted, model_of
from pellucid.models import decode, ops, sampling, triton_check, triton_decode, triton_ops
from pellucid.models.cuda_graphs import measure_error_share
from pellucid.models.decode import CACHE_GROWTH_TOKENS, DecodeBatch
from pellucid.models.decoder import Decoder
from pellucid.models.linear import AdaptedMatrix
from pellucid.models.triton_decode import ROWS_STEP, TritonDecoder

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


# ---------------------------------------------------------------- norms and gates


def same(result, expected, dtype):
    """Assert that results are equal in half precision, which rounds the order of sums away, and close in fp32."""
    for x, y in zip(result, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates_round_as_operators_do(dtype):
    x, more, weight = torch.randn(5, 96), torch.randn(5, 96).to(dtype), torch.rand(96) + 0.5
    same(triton_ops.add_norm_forward(x, more, weight, 1e-6), ops.add_norm_forward(x, more, weight, 1e-6), dtype)
    same([triton_ops.norm_forward(x, weight, 1e-6, dtype)], [ops.norm_forward(x, weight, 1e-6, dtype)], dtype)
    gate_up = torch.randn(3, 2 * 1100).to(dtype)  # more than one block
    same([triton_ops.swiglu_forward(gate_up)], [ops.swiglu_forward(gate_up)], dtype)


# ---------------------------------------------------------------- steps


def batches(model, dtype, rows=8):
    """Return two batches of one decoder: the first decodes by kernels, the second by operators."""
    decoder = Decoder(model.config, model, dtype)
    decoder.can_prepack = False
    return DecodeBatch(decoder, rows, triton_decoder=TritonDecoder(decoder)), DecodeBatch(decoder, rows)


def do(pair, act, tolerance=2e-6):
    one, other = (act(batch) for batch in pair)
    assert measure_error_share(one, other) < tolerance
    return one, other


def step(pair, *about, **more):
    tokens = (torch.arange(len(pair[0].generated_lengths)) * 5 + 3) % 11
    return do(pair, lambda batch: batch.step((tokens + int(batch.generated_lengths.max())) % 11, *about), **more)


PROMPTS = [[(3 * i * i + 1) % 23 for i in range(21)], [6, 5, 3], [7] * 11]
MODELS = ["llama, biases everywhere", "llama, one key head", "mistral, a window", "qwen2.5 0.5b"]
MODELS += ["qwen3, biases, a window above"]


@pytest.mark.parametrize("name", MODELS)
def test_decode_step_matches_operators(name, monkeypatch):
    """Rows join, leave gaps, pause, get tokens appended, and are evicted and restored. One prompt has two blocks of
    keys."""
    monkeypatch.setattr(triton_decode, "_KEY_BLOCK_BYTES", 0)
    pair = batches(model_of(name), torch.float32)
    with torch.no_grad():
        for batch in pair:
            batch.admit(PROMPTS, 2)
        for _ in range(2):
            step(pair)
        cache = pair[0].caches[0].keys
        for batch in pair:
            batch.keep_rows(torch.tensor([0, 3, 4, 5]))
        step(pair)
        assert pair[0].caches[0].keys is cache, "rows have left gaps"
        for batch in pair:
            batch.keep_rows(torch.tensor([0, 1, 3]))
        step(pair)
        do(pair, lambda batch: batch.admit([[2, 2]], 1))
        speaks = torch.tensor([True, False, True, True])
        one, other = (batch.step(torch.tensor([1, 2, 3, 4]), speaks)[speaks] for batch in pair)
        assert measure_error_share(one, other) < 2e-6
        do(pair, lambda batch: decode.append_tokens(batch, torch.tensor([1, 2]), [[5, 6, 7], [8] * 20]))
        step(pair)
        evicted = [decode.evict_rows(batch, [1]) for batch in pair]
        for batch, rows in zip(pair, evicted, strict=True):
            batch.keep_rows(torch.tensor([0, 2, 3]))
            decode.restore_rows(batch, rows)
        step(pair)
    for one, other in zip(*(batch.caches for batch in pair), strict=True):
        for x, y in ((one.keys, other.keys), (one.values, other.values)):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


def test_decode_step_with_an_adapter_matches_operators():
    decoder = adapted("llama, heads of 64", torch.float32).decoder
    pair = DecodeBatch(decoder, 4, triton_decoder=TritonDecoder(decoder)), DecodeBatch(decoder, 4)
    assert any(isinstance(weight, AdaptedMatrix) for weight in pair[0].unpacked_weights.layers[0])
    with torch.no_grad():
        for batch in pair:
            batch.admit(PROMPTS[1:], 2)
        step(pair)


def test_the_cache_grows_while_rows_decode():
    pair = batches(model_of("llama, one key head"), torch.float32, rows=2)
    with torch.no_grad():
        for batch in pair:
            batch.admit([[6, 5, 3]], 2)
            decode.append_tokens(batch, torch.arange(2), [[7, 8] * (CACHE_GROWTH_TOKENS // 2 - 1), [5]])
        capacities = set()
        for _ in range(4):
            step(pair)
            capacities.add(pair[0].caches[0].keys.shape[2])
    assert capacities == {CACHE_GROWTH_TOKENS, 2 * CACHE_GROWTH_TOKENS}


def test_similar_numbers_of_rows_share_a_graph(monkeypatch):
    monkeypatch.setattr(TritonDecoder, "_compute", lambda decoder, tokens: torch.zeros(len(tokens), 1))
    [batch, _] = batches(model_of("llama"), torch.float32, rows=40)
    batch.admit([[6, 5, 3]], 40)
    for rows in range(40, 0, -1):
        batch.keep_rows(torch.arange(rows))
        assert len(batch.triton_decoder.step(batch, torch.zeros(rows, dtype=torch.long))) == rows
    assert sorted(batch.triton_decoder.graphs) == [2, 4, 8, ROWS_STEP, 2 * ROWS_STEP, 3 * ROWS_STEP]


def test_bfloat16_cache_of_the_first_layer_equals_operators():
    """Rotated keys are rounded at the same places, also with norms of heads."""
    for name in ("qwen2.5, heads of 64", "qwen3 0.6b"):
        pair = batches(model_of(name), torch.bfloat16)
        with torch.no_grad():
            for batch in pair:
                batch.admit(PROMPTS, 2)
            step(pair, tolerance=0.05)
        for part in ("keys", "values"):
            assert torch.equal(*(getattr(batch.caches[0], part) for batch in pair))


def test_bfloat16_kernels_are_closer_to_fp32_than_operators():
    """Kernels round fewer numbers: scores stay in fp32."""
    model = model_of("qwen2.5, heads of 64")
    pair = batches(model, torch.bfloat16)
    [_, exact] = batches(model, torch.float32)
    errors = torch.zeros(2)
    with torch.no_grad():
        for batch in (*pair, exact):
            batch.admit(PROMPTS, 2)
        for _ in range(3):
            logits = [batch.step(torch.arange(6)).float() for batch in (*pair, exact)]
            errors += torch.stack([(x - logits[-1]).square().mean() for x in logits[:2]])
    assert 0 < errors[0] < errors[1]


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampled_tokens_match_the_inverse_cdf(temperature):
    """Some tokens are impossible, and the vocabulary has more than one block."""
    logits, uniforms = 4 * torch.randn(24, 9000), torch.rand(24, dtype=torch.float64)
    logits[3, 100:] = logits[4, :8990] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 17] = 0
    uniforms[:6] = 0
    tokens, logprobs = triton_decode.sample_tokens(logits, uniforms, temperature)
    assert torch.equal(tokens, ops.sample_with_masses(logits, uniforms, temperature)[0])
    expected = (logits / (temperature or 1)).double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


def test_samples_of_a_large_vocabulary_follow_its_fp64_cdf():
    """Numbers are 1e-7 before a token's end, 1% of its probability: a CDF in fp32 would give some to a neighbor."""
    logits, tokens = torch.randn(1, 100_000), torch.arange(2999, 100_000, 3000)
    cdf = logits[0].double().softmax(-1).cumsum(-1)
    sampled, _ = triton_decode.sample_tokens(logits.expand(len(tokens), -1), cdf[tokens] - 1e-7, 1.0)
    assert torch.equal(sampled, tokens)


def test_an_impossible_token_is_never_sampled():
    """This includes the two ends of the distribution."""
    logits, ends = torch.full((2, 5000), -torch.inf), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    logits[:, [4100, 4200]] = torch.tensor([1.0, 2.0])
    assert triton_decode.sample_tokens(logits, ends, 1.0)[0].tolist() == [4100, 4200]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_nan_logits_sample_a_token_of_the_vocabulary():
    """Operators do the same. The next step looks the token up in the embedding."""
    logits = torch.full((2, 5000), torch.nan)
    for temperature in (1.0, 0.0):
        tokens, _ = triton_decode.sample_tokens(logits, torch.rand(2, dtype=torch.float64), temperature)
        assert bool(((tokens >= 0) & (tokens < 5000)).all())


# ---------------------------------------------------------------- self-checks


def find_fault(name, dtype=torch.float32):
    model = model_of(name)
    triton_check.find_step_fault.cache_clear()
    return triton_check.find_decoder_fault(Decoder(model.config, model, dtype))


@pytest.mark.parametrize("name", ["qwen2.5 0.5b", "qwen3, biases, a window above"])
def test_the_check_finds_no_fault(name):
    for dtype in (torch.bfloat16, torch.float32):
        assert not find_fault(name, dtype)


def test_float64_is_left_to_operators():
    model = model_of("llama").double()
    assert triton_check.find_decoder_fault(Decoder(model.config, model, torch.float32)) == "float64"


@triton.jit
def rotate_not(x, swapped, cos, sin, dtype):
    return x


@triton.jit
def attend_to_one_key_less(query, keys, values, first, end, highest, mass, output, scale, D, BLOCK_D, BLOCK):
    return attend_to_keys(query, keys, values, first + 1, end, highest, mass, output, scale, D, BLOCK_D, BLOCK)


@triton.jit
def attend_to_one_block(query, keys, values, first, end, highest, mass, output, scale, D, BLOCK_D, BLOCK):
    last = tl.minimum(end, first + BLOCK)
    return attend_to_keys(query, keys, values, first, last, highest, mass, output, scale, D, BLOCK_D, BLOCK)


def attend_in_a_wider_window(qkv, header, addresses, layer, shape, window):
    return attend_step(qkv, header, addresses, layer, shape, window and window + 1)


attend_to_keys, attend_step = triton_decode._attend_to_keys, triton_decode.attend_step
PLAIN, SLIDING = "qwen2.5, heads of 64", "mistral, a window"
FAULTS = {
    "keys are not rotated": (PLAIN, "rotate", rotate_not),
    "a key of a prompt and one of the row are left out": (PLAIN, "_attend_to_keys", attend_to_one_key_less),
    "a long prompt is not read to its end": (PLAIN, "_attend_to_keys", attend_to_one_block),
    "a window is one token longer": (SLIDING, "attend_step", attend_in_a_wider_window),
}


@pytest.mark.parametrize(("model", "name", "instead"), FAULTS.values(), ids=FAULTS)
def test_kernel_with_wrong_results_is_not_used(model, name, instead, monkeypatch):
    monkeypatch.setattr(triton_decode, name, instead)
    with pytest.warns(UserWarning, match="decoded without Triton's kernels: logits are off by"):
        assert find_fault(model, torch.bfloat16)


def test_a_kernel_that_cannot_be_compiled_is_not_used(monkeypatch):
    def refuse(*arguments, **constants):
        raise triton.errors.TritonError("no compiler")

    monkeypatch.setattr(triton_decode, "launch", refuse)
    with pytest.warns(UserWarning, match="decoded without Triton's kernels: TritonError: no compiler"):
        assert find_fault("llama")


@pytest.mark.parametrize("fault", [False, True])
def test_sampling_is_checked_too(fault, monkeypatch):
    sampling._load_triton_sampler.cache_clear()
    if fault:
        monkeypatch.setattr(triton_decode, "compute_exponent_factor", lambda temperature: 1.44)
        with pytest.warns(UserWarning, match="sampled without Triton's kernels: other tokens"):
            assert sampling._load_triton_sampler(CPU) is None
    else:
        assert sampling._load_triton_sampler(CPU) is triton_decode.sample_tokens
    sampling._load_triton_sampler.cache_clear()
