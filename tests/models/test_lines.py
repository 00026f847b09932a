"""Tests of attention over packed sequences in C++, against float64 and against operators."""

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
    """Return the kernel that computes attention."""
    found = KernelVariant(attention.load_attention_kernel()[0].library, request.param)
    monkeypatch.setattr(score, "find_attention_kernel", lambda _: found)
    return found


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradient_are_as_close_to_float64_as_operators(name, by, monkeypatch):
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
def test_bits_do_not_depend_on_the_number_of_threads(name, by):
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


def test_prompt_and_its_rows_have_the_same_bits_alone(by):
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


def test_noncontiguous_heads_have_the_same_bits(by):
    joined, split, layout, grad = case("one row")
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in joined.split(split, 1)]
    [read, _] = both_ways(joined, split, lambda heads: attend_packed(*heads, layout.sequences, by), grad)
    assert torch.equal(read, attend_packed(*apart, layout.sequences, by))


def test_attention_is_the_same_without_gradient(by):
    joined, split, layout, grad = case("a window")
    [read, _] = both_ways(joined, split, lambda heads: attend_groups(heads, layout), grad)
    with torch.no_grad():
        assert torch.equal(attend_groups(joined.split(split, 1), layout), read)


@pytest.mark.parametrize(
    "heads", [noise(4, 2, 32), noise(4, 2, 320), noise(4, 2, 64, dtype=torch.float32), noise(4, 2, 64).half()]
)
def test_unsupported_heads_use_operators(heads):
    assert attention.find_attention_kernel(heads) is None


# ---------------------------------------------------------------- out of memory


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_out_of_memory_in_a_kernel_raises_memory_error(name, by):
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


# ---------------------------------------------------------------- self-check


def test_attention_uses_amx_if_and_only_if_sampling_does():
    assert attention.load_attention_kernel()[0].uses_amx == fused_check.load_fused_kernel()[0].uses_amx
    assert [
        tiles
        for tiles in BOTH
        if not native.find_difference(
            attention.compare_attention(KernelVariant(attention.load_attention_kernel()[0].library, tiles))
        )
    ] == [attention.load_attention_kernel()[0].uses_amx]


def test_failed_self_check_or_missing_compiler_returns_a_reason(monkeypatch):
    monkeypatch.setattr(native, "find_difference", lambda _: "attention")
    assert attention.load_attention_kernel.__wrapped__() == (
        None,
        "this processor or this torch rounds otherwise (attention)",
    )
    monkeypatch.setattr(native, "load_kernels", lambda: (None, "no g++"))
    assert attention.load_attention_kernel.__wrapped__() == (None, "no g++")
