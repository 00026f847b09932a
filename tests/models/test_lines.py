"""Attention of whole rollouts in C++: forward it has the bits of the operators, backward it is nearer to float64."""

from __future__ import annotations

import pytest
import torch

from made_rollouts import CASES, both_ways, by_hand, case, noise, off
from pellucid.models import attention, fused_check, native, score
from pellucid.models.attention import PackedSequences, attend_packed, call_attention_kernel
from pellucid.models.native import KernelVariant
from pellucid.models.score import attend_groups

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    attention.load_attention_kernel()[0] is None, reason="needs g++ and a CPU with AVX-512 for bfloat16"
)
BOTH = [False, True] if native.has_amx() else [False]


@pytest.fixture(params=BOTH, ids=lambda tiles: "AMX" if tiles else "AVX-512")
def by(request, monkeypatch):
    """What computes attention."""
    found = KernelVariant(attention.load_attention_kernel()[0].library, request.param)
    monkeypatch.setattr(score, "find_attention_kernel", lambda _: found)
    return found


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradient_are_no_further_from_float64_than_by_the_operators(name, by, monkeypatch):
    joined, split, layout, grad = case(name)
    ours = both_ways(joined, split, lambda heads: attend_groups(heads, layout), grad)
    exact = both_ways(joined.double(), split, lambda heads: by_hand(*heads, layout.sequences), grad)
    monkeypatch.setattr(score, "find_attention_kernel", lambda _: None)
    theirs = both_ways(joined, split, lambda heads: attend_groups(heads, layout), grad)
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
            found.append(both_ways(joined, split, lambda heads: attend_groups(heads, layout), grad))
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_a_prompt_with_its_rows_has_the_bits_that_it_has_alone(by):
    joined, split, layout, grad = case("long, short and none")
    together = both_ways(joined, split, lambda heads: attend_packed(*heads, layout.sequences, by), grad)
    spans = [range(start, end) for start, end in zip([0, *layout.sequences.ends], layout.sequences.ends, strict=False)]
    mine = [1, 4, 5]  # the second prompt, and its two rows
    tokens = [token for i in mine for token in spans[i]]
    line = PackedSequences(torch.tensor([len(spans[i]) for i in mine]).cumsum(0), torch.tensor([0, 0]))
    alone = both_ways(
        joined[tokens].detach().requires_grad_(), split, lambda heads: attend_packed(*heads, line, by), grad[tokens]
    )
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[tokens], other)


def test_heads_that_do_not_stand_side_by_side_are_read_as_well(by):
    joined, split, layout, grad = case("one row")
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in joined.split(split, 1)]
    [read, _] = both_ways(joined, split, lambda heads: attend_packed(*heads, layout.sequences, by), grad)
    assert torch.equal(read, attend_packed(*apart, layout.sequences, by))


def test_without_a_gradient_the_same_is_read(by):
    joined, split, layout, grad = case("a window")
    [read, _] = both_ways(joined, split, lambda heads: attend_groups(heads, layout), grad)
    with torch.no_grad():
        assert torch.equal(attend_groups(joined.split(split, 1), layout), read)


@pytest.mark.parametrize(
    "heads", [noise(4, 2, 32), noise(4, 2, 320), noise(4, 2, 64, dtype=torch.float32), noise(4, 2, 64).half()]
)
def test_other_heads_are_read_by_operators(heads):
    assert attention.find_attention_kernel(heads) is None


# ---------------------------------------------------------------- no memory


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_no_memory_is_an_error_of_the_call(name, by):
    heads = tuple(noise(2, 1, 64) for _ in range(3))
    with pytest.raises(MemoryError, match="compute 2 tokens"):
        call_attention_kernel(
            name,
            by,
            PackedSequences(torch.tensor([2**44]), torch.tensor([], dtype=torch.long)),
            heads,
            None,
            attention.make_heads_struct(heads),
        )


# ---------------------------------------------------------------- the trial


def test_the_way_is_that_of_sampling():
    assert attention.load_attention_kernel()[0].uses_amx == fused_check.load_fused_kernel()[0].uses_amx
    assert [
        tiles
        for tiles in BOTH
        if not native.find_difference(
            attention.compare_attention(KernelVariant(attention.load_attention_kernel()[0].library, tiles))
        )
    ] == [attention.load_attention_kernel()[0].uses_amx]


def test_where_no_way_has_the_bits_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(native, "find_difference", lambda _: "attention")
    assert attention.load_attention_kernel.__wrapped__() == (
        None,
        "this processor or this torch rounds otherwise (attention)",
    )
    monkeypatch.setattr(native, "load_kernels", lambda: (None, "no g++"))
    assert attention.load_attention_kernel.__wrapped__() == (None, "no g++")
