"""Attention of whole rollouts in C++: forward it has the bits of the operators, backward it is nearer to float64."""

from __future__ import annotations

import pytest
import torch

from made_rollouts import batch_of, noise, off
from pellucid.models import compiling, fusing, kernels, lines, packed
from pellucid.models.lines import Line, Way, attend_in_line, run
from pellucid.models.packed import group_attention, layout_of, windowed

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(lines.here()[0] is None, reason="needs g++ and a CPU with AVX-512 for bfloat16")
BOTH = [False, True] if compiling.has_tiles() else [False]


@pytest.fixture(params=BOTH, ids=lambda tiles: "AMX" if tiles else "AVX-512")
def by(request, monkeypatch):
    """What computes attention."""
    found = Way(lines.here()[0].library, request.param)
    monkeypatch.setattr(packed, "way", lambda _: found)
    return found


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


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradient_are_no_further_from_float64_than_by_the_operators(name, by, monkeypatch):
    joined, split, layout, grad = case(name)
    ours = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad)
    exact = both_ways(joined.double(), split, lambda heads: by_hand(*heads, layout.line), grad)
    monkeypatch.setattr(packed, "way", lambda _: None)
    theirs = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad)
    (forward, backward), (by_operators, gradient) = (
        [off(*pair) for pair in zip(found, exact, strict=True)] for found in (ours, theirs)
    )
    assert forward <= by_operators * 1.001
    assert backward < gradient


@pytest.mark.parametrize("name", ["long, short and none", "a window"])
def test_the_bits_depend_on_no_number_of_threads(name, by):
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


def test_a_prompt_with_its_rows_has_the_bits_that_it_has_alone(by):
    joined, split, layout, grad = case("long, short and none")
    together = both_ways(joined, split, lambda heads: attend_in_line(*heads, layout.line, by), grad)
    spans = [range(start, end) for start, end in zip([0, *layout.line.ends], layout.line.ends, strict=False)]
    mine = [1, 4, 5]  # the second prompt, and its two rows
    tokens = [token for i in mine for token in spans[i]]
    line = Line(torch.tensor([len(spans[i]) for i in mine]).cumsum(0), torch.tensor([0, 0]))
    alone = both_ways(
        joined[tokens].detach().requires_grad_(), split, lambda heads: attend_in_line(*heads, line, by), grad[tokens]
    )
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[tokens], other)


def test_heads_that_do_not_stand_side_by_side_are_read_as_well(by):
    joined, split, layout, grad = case("one row")
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in joined.split(split, 1)]
    [read, _] = both_ways(joined, split, lambda heads: attend_in_line(*heads, layout.line, by), grad)
    assert torch.equal(read, attend_in_line(*apart, layout.line, by))


def test_without_a_gradient_the_same_is_read(by):
    joined, split, layout, grad = case("a window")
    [read, _] = both_ways(joined, split, lambda heads: group_attention(heads, layout), grad)
    with torch.no_grad():
        assert torch.equal(group_attention(joined.split(split, 1), layout), read)


@pytest.mark.parametrize(
    "heads", [noise(4, 2, 32), noise(4, 2, 320), noise(4, 2, 64, dtype=torch.float32), noise(4, 2, 64).half()]
)
def test_other_heads_are_read_by_operators(heads):
    assert lines.way(heads) is None


# ---------------------------------------------------------------- no memory


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_no_memory_is_an_error_of_the_call(name, by):
    heads = tuple(noise(2, 1, 64) for _ in range(3))
    with pytest.raises(MemoryError, match="read 2 tokens"):
        run(
            name,
            by,
            Line(torch.tensor([2**44]), torch.tensor([], dtype=torch.long)),
            heads,
            None,
            lines.projected(heads),
        )


# ---------------------------------------------------------------- the trial


def test_the_way_is_that_of_sampling():
    assert lines.here()[0].tiles == fusing.here()[0].tiles
    assert [tiles for tiles in BOTH if lines.has_bits_of_operators(Way(lines.here()[0].library, tiles))] == [
        lines.here()[0].tiles
    ]


def test_where_no_way_has_the_bits_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(lines, "has_bits_of_operators", lambda _: False)
    assert lines.here.__wrapped__() == (None, "this processor or this torch rounds otherwise (attention)")
    monkeypatch.setattr(kernels, "here", lambda: (None, "no g++"))
    assert lines.here.__wrapped__() == (None, "no g++")
