"""What an update multiplies by AMX in C++: forward as sampling does, and backward nearer to float64 than operators."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.algorithm.batch import Batch, mask_of, padded
from pellucid.models import tiled
from pellucid.models.decoder import Decoder
from pellucid.models.packed import group_attention, hidden_states, layout_of, windowed
from pellucid.models.tiled import Line, attend_in_line, run, sums_over_tokens

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    tiled.tiles(torch.zeros(1, 1, 64, dtype=BF16)) is None, reason="needs g++ and a CPU with AMX"
)


def noise(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch_of(prompts, responses, prompt_of):
    """Responses of these lengths to prompts of these."""
    mask = mask_of(responses)
    ids = [[i % 90 for i in range(7 * n, 7 * n + length)] for n, length in enumerate([*prompts, *responses])]
    return Batch(
        prompt_ids=tuple(map(tuple, ids[: len(prompts)])),
        demonstrations=((),) * len(prompts),
        prompt_of=torch.tensor(prompt_of),
        response_ids=padded(ids[len(prompts) :], torch.long),
        mask=mask,
        sampled=mask,
        finished=torch.zeros(len(responses), dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape),
    )


def by_hand(query, key, value, line):
    """What each token reads, sequence by sequence, in the dtype of the tensors."""
    ends = line.ends.tolist()
    spans = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    prompts, out = len(spans) - len(line.prompt_of), []
    for i, own in enumerate(spans):
        before = [] if i < prompts else spans[line.prompt_of[i - prompts]]
        there, share = [*before, *own], query.shape[1] // key.shape[1]
        keys, values = (x[there].repeat_interleave(share, 1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", query[list(own)], keys) * query.shape[2] ** -0.5
        at = torch.arange(len(before), len(there))[:, None]
        seen = torch.arange(len(there)) <= at
        if line.window:
            seen &= torch.arange(len(there)) > at - line.window
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hts,shd->thd", probs, values).flatten(1))
    return torch.cat(out)


CASES = {
    "one row": ([5], [8], [0], (9, 3, 64), 0),
    "long, short and none": ([5, 40, 33], [8, 71, 2, 1, 32], [0, 1, 1, 2, 0], (9, 3, 64), 0),
    "a prompt without rows": ([5, 40, 33], [8, 71], [2, 0], (4, 4, 64), 0),
    "a window": ([5, 40, 33], [8, 71, 2, 1, 32], [0, 1, 1, 2, 0], (9, 3, 64), 20),
    "a window of long texts": ([150, 40], [8, 171], [1, 0], (2, 1, 64), 70),
    "heads of 128": ([100, 3], [200, 90], [1, 0], (4, 4, 128), 0),
    "many queries a key": ([17, 90], [40], [1], (32, 1, 64), 0),
    "heads of 256": ([50, 20], [40, 150], [0, 1], (8, 2, 256), 0),
}


def case(name):
    """Queries, keys and values side by side; where they stand; the gradient of what is read."""
    *lengths, (heads, key_heads, size), window = CASES[name]
    layout = layout_of(batch_of(*lengths), BF16, torch.device("cpu"))
    layout = windowed(layout, window) if window else layout
    n = int(layout.line.ends[-1])
    joined = noise(n, heads + 2 * key_heads, size).requires_grad_()
    return joined, (heads, key_heads, key_heads), layout, noise(n, heads * size, seed=1)


def both_ways(joined, split, attention, grad):
    """What is read, and the gradient of the projection."""
    read = attention(joined.split(split, 1))
    return read.detach(), torch.autograd.grad(read, joined, grad.to(read.dtype))[0]


def off(ours, exact):
    return (ours.double() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradient_are_no_further_from_float64_than_by_the_operators(name, monkeypatch):
    joined, split, layout, grad = case(name)
    ours = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad)
    exact = both_ways(joined.double(), split, lambda heads: by_hand(*heads, layout.line), grad)
    monkeypatch.setattr(tiled, "has_tiles", lambda: False)
    theirs = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad)
    (forward, backward), (by_operators, gradient) = (
        [off(*pair) for pair in zip(found, exact, strict=True)] for found in (ours, theirs)
    )
    assert forward <= by_operators * 1.001
    assert backward < gradient


@pytest.mark.parametrize("name", ["long, short and none", "a window"])
def test_the_bits_depend_on_no_number_of_threads(name):
    joined, split, layout, grad = case(name)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        try:
            torch.set_num_threads(threads)
            found.append(both_ways(joined, split, lambda heads: group_attention(heads, layout), grad))
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_a_prompt_with_its_rows_has_the_bits_that_it_has_alone():
    joined, split, layout, grad = case("long, short and none")
    together = both_ways(joined, split, lambda heads: attend_in_line(*heads, layout.line), grad)
    spans = [range(start, end) for start, end in zip([0, *layout.line.ends], layout.line.ends, strict=False)]
    mine = [1, 4, 5]  # the second prompt, and its two rows
    tokens = [token for i in mine for token in spans[i]]
    line = Line(torch.tensor([len(spans[i]) for i in mine]).cumsum(0), torch.tensor([0, 0]))
    alone = both_ways(
        joined[tokens].detach().requires_grad_(), split, lambda heads: attend_in_line(*heads, line), grad[tokens]
    )
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[tokens], other)


def test_heads_that_do_not_stand_side_by_side_are_read_as_well():
    joined, split, layout, grad = case("one row")
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in joined.split(split, 1)]
    [read, _] = both_ways(joined, split, lambda heads: attend_in_line(*heads, layout.line), grad)
    assert torch.equal(read, attend_in_line(*apart, layout.line))


def test_without_a_gradient_the_same_is_read():
    joined, split, layout, grad = case("a window")
    [read, _] = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad)
    with torch.no_grad():
        assert torch.equal(group_attention(joined.split(split, 1), layout), read)


@pytest.mark.parametrize(
    "heads", [noise(4, 2, 32), noise(4, 2, 320), noise(4, 2, 64, dtype=torch.float32), noise(4, 2, 64).half()]
)
def test_other_heads_are_read_by_operators(heads):
    assert tiled.tiles(heads) is None


# ---------------------------------------------------------------- gradients of weights


@pytest.mark.parametrize(("n", "outputs", "width"), [(1, 32, 32), (33, 96, 64), (300, 1120, 96), (700, 64, 544)])
def test_sums_over_tokens_are_unrounded(n, outputs, width):
    grad, x = noise(n, outputs), noise(n, width, seed=1)
    exact, before = grad.double().mT @ x.double(), noise(outputs, width, seed=2, dtype=torch.float32)
    sums = sums_over_tokens(grad, x, torch.float32)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-4)
    into = before.clone()
    assert sums_over_tokens(grad, x, torch.float32, into) is into
    torch.testing.assert_close(into.double(), before + exact, rtol=1e-5, atol=1e-4)


def test_sums_have_the_same_bits_with_any_number_of_threads():
    grad, x, before = noise(300, 1120), noise(300, 96, seed=1), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        try:
            torch.set_num_threads(threads)
            found.append(sums_over_tokens(grad, x, torch.float32))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_other_matrices_are_summed_by_operators(monkeypatch):
    monkeypatch.setattr(tiled, "call", None)
    for grad, x, wide in (
        (noise(4, 48), noise(4, 32), torch.float32),
        (noise(4, 32), noise(4, 48), torch.float32),
        (noise(4, 32), noise(4, 32), torch.float64),
        (noise(4, 32, dtype=torch.float32), noise(4, 32, dtype=torch.float32), torch.float32),
    ):
        once = sums_over_tokens(grad, x, wide)
        assert torch.equal(once, (grad.mT @ x).to(wide))
        assert torch.equal(sums_over_tokens(grad, x, wide, once.clone()), once * 2)


def test_gradients_of_a_model_are_nearer_to_fp32_than_by_the_operators(monkeypatch):
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=90, num_hidden_layers=2, head_dim=64, attention_bias=True, mlp_bias=True, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    batch = batch_of([5, 40], [8, 71, 2, 1], [0, 1, 1, 0])

    def gradients(dtype):
        states, _ = hidden_states(Decoder(config, model, dtype), batch)
        model.zero_grad()
        (states.float() * noise(*states.shape, dtype=torch.float32)).sum().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    exact, ours = gradients(torch.float32), gradients(BF16)
    monkeypatch.setattr(tiled, "has_tiles", lambda: False)
    theirs = gradients(BF16)
    assert len(exact) == 34
    distances = [sum(off(x[name], exact[name]) for name in exact) for x in (ours, theirs)]
    assert distances[0] < distances[1]


# ---------------------------------------------------------------- no memory


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_no_memory_is_an_error_of_the_call(name):
    heads = tuple(noise(2, 1, 64) for _ in range(3))
    with pytest.raises(MemoryError, match="read 2 tokens"):
        run(name, Line(torch.tensor([2**44]), torch.tensor([], dtype=torch.long)), heads, None, tiled.projected(heads))


def test_no_memory_for_sums_is_an_error_of_the_call(monkeypatch):
    monkeypatch.setattr(tiled, "call", lambda *_: 1)
    with pytest.raises(MemoryError, match="a matrix of 32 x 64"):
        sums_over_tokens(noise(2, 32), noise(2, 64), torch.float32)
