"""AdamW in one pass has the bits of torch's clip_grad_norm_, AdamW and cast."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from conftest import make_policy
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed import optimizer as one_pass
from pellucid.distributed import torch_engine
from pellucid.distributed.optimizer import OffloadedAdamW, OnePassAdamW, supports_one_pass
from pellucid.models import native
from pellucid.models.linear import CastWeights

pytestmark = pytest.mark.skipif(
    native.load_kernels()[0] is None, reason="needs g++ and a CPU with AVX-512 for bfloat16"
)
BF16 = torch.bfloat16
SIZES = {"wide": (70, 112), "narrow": (64, 16), "vector": (48,), "large": (33, 1040)}


def model():
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, size in SIZES.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(size, generator=generator)))
    return module


def give_gradients(modules, step, scale=1.0, without=()):
    generator = torch.Generator().manual_seed(step)
    for name, size in SIZES.items():
        grad = torch.randn(size, generator=generator) * scale
        for module in modules:
            getattr(module, name).grad = None if name in without else grad.clone()


def torchs(module, settings):
    return torch.optim.AdamW(module.parameters(), **settings, fused=True)


def equal(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.1, "weight_decay": 0.01, "betas": (0.5, 0.9), "eps": 1e-3},
    ],
)
def test_steps_and_norms_are_those_of_torch_to_the_bit(settings, threads):
    ours, theirs = model(), model()
    one, other = OnePassAdamW(ours.parameters(), **settings), torchs(theirs, settings)
    before = torch.get_num_threads()
    try:
        for step in range(12):
            torch.set_num_threads(threads)
            # Large and small: clipped and not; and parameters that have no part in some steps.
            give_gradients((ours, theirs), step, (1.0, 1e-4)[step % 2], ("narrow", "wide")[: step % 3])
            for optimizer in (one, other):
                optimizer.param_groups[0]["lr"] = settings["lr"] / (1 + step)
            assert torch.equal(one.clip_gradients(1.5), clip_grad_norm_(theirs.parameters(), 1.5))
            one.step()
            other.step()
            assert equal(ours, theirs)
    finally:
        torch.set_num_threads(before)
    for name in SIZES:
        mine, others = one.state[getattr(ours, name)], other.state[getattr(theirs, name)]
        assert {key: value.tolist() for key, value in mine.items()} == {k: v.tolist() for k, v in others.items()}


def test_without_a_limit_nothing_is_clipped_and_a_clip_holds_for_one_step():
    ours, theirs = model(), model()
    settings = {"lr": 0.1, "weight_decay": 0.0}
    one, other = OnePassAdamW(ours.parameters(), **settings), torchs(theirs, settings)
    for step, limit in enumerate((1.0, None, math.inf)):
        give_gradients((ours, theirs), step)
        if limit is not None:
            one.clip_gradients(limit)
            clip_grad_norm_(theirs.parameters(), limit)
        one.step()
        other.step()
        assert equal(ours, theirs)


def test_a_gradient_is_read_as_it_lies():
    ours, theirs = model(), model()
    one, other = (by(m) for by, m in ((lambda m: OnePassAdamW(m.parameters(), lr=0.1), ours), (simplest, theirs)))
    give_gradients((ours, theirs), 0)
    ours.wide.grad = ours.wide.grad.T.contiguous().T
    assert not ours.wide.grad.is_contiguous()
    assert torch.equal(one.clip_gradients(1.0), clip_grad_norm_(theirs.parameters(), 1.0))
    one.step()
    other.step()
    assert equal(ours, theirs)


def simplest(module):
    return torchs(module, {"lr": 0.1, "weight_decay": 0.0})


def test_it_goes_on_from_the_state_of_torchs():
    ours, theirs = model(), model()
    first, other = simplest(ours), simplest(theirs)
    for step in range(3):
        give_gradients((ours, theirs), step)
        first.step()
        other.step()
    second = OnePassAdamW(ours.parameters(), lr=0.1)
    for p in ours.parameters():
        second.state[p] = {name: value.clone() for name, value in first.state[p].items()}
    give_gradients((ours, theirs), 3)
    second.step()
    other.step()
    assert equal(ours, theirs)


# ---------------------------------------------------------------- what is computed with


def casts_of(module, dtype=BF16):
    """A joined matrix, a matrix by itself, and one that nobody has asked for yet."""
    joined = CastWeights([(module, "wide"), (module, "wider")], dtype)
    alone, later = (CastWeights([(module, name)], dtype) for name in ("narrow", "large"))
    joined.get_cast_copy(), alone.get_cast_copy()
    return joined, alone, later


def stepped(dtype=BF16, without=()):
    module = model()
    module.wider = torch.nn.Parameter(torch.ones(2, 112))
    parts = casts_of(module, dtype)
    optimizer = OnePassAdamW(module.parameters(), lr=0.1, cast_weights=parts)
    give_gradients([module], 1, without=without)
    module.wider.grad = torch.ones(2, 112)
    optimizer.step()
    return module, parts


def fresh(part):
    return torch.cat([m.detach() for m in part.get_masters()]).to(part.dtype)


def test_copies_are_cast_in_the_step_and_not_once_more():
    _, (joined, alone, later) = stepped()
    assert torch.equal(joined.cast_copy, fresh(joined))
    assert torch.equal(alone.cast_copy, fresh(alone))
    joined.cast_copy.zero_()  # whoever casts it again writes over this
    assert not joined.get_cast_copy().any()
    assert later.cast_copy is None
    assert torch.equal(later.get_cast_copy(), fresh(later))


def test_a_weight_that_is_changed_by_someone_else_is_cast_again():
    module, (joined, alone, _) = stepped()
    with torch.no_grad():
        module.wide += 1
        module.narrow += 1
    assert torch.equal(joined.get_cast_copy(), fresh(joined))
    assert torch.equal(alone.get_cast_copy(), fresh(alone))


def test_of_a_matrix_that_is_stepped_in_part_all_is_cast_when_it_is_asked_for():
    module = model()
    module.wider = torch.nn.Parameter(torch.ones(2, 112))
    joined, *_ = parts = casts_of(module)
    optimizer = OnePassAdamW(module.parameters(), lr=0.1, cast_weights=parts)
    with torch.no_grad():
        module.wider += 1  # it has no gradient, and its copy is an older one
    give_gradients([module], 1)
    optimizer.step()
    assert torch.equal(joined.get_cast_copy(), fresh(joined))


def test_what_is_joined_in_fp32_shares_the_memory_of_its_parts():
    """The optimizer steps both at once, and nothing is copied."""
    _, (joined, *_) = stepped(torch.float32)
    assert torch.equal(joined.cast_copy, fresh(joined))
    assert joined.get_cast_copy() is joined.cast_copy
    for master, part in joined.pair_masters_with_copies():
        assert master.data_ptr() == part.data_ptr()


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize(
    "other",
    [torch.zeros(3, 5), torch.zeros(16, dtype=BF16), torch.zeros(16, 32).T, torch.zeros(16, device="meta")],
    ids=["of other sizes", "in bf16", "turned", "elsewhere"],
)
def test_other_parameters_are_left_to_torch(other):
    assert supports_one_pass([torch.zeros(16), torch.zeros(3, 48)])
    assert not supports_one_pass([torch.zeros(16), other])


def test_a_policy_on_the_cpu_is_stepped_so_and_its_copies_with_it():
    policy = make_policy(dtype=BF16)
    optimizer = torch_engine.build_optimizer(AdamWConfig(), policy)
    assert isinstance(optimizer, OnePassAdamW)
    assert policy.decoder and len(optimizer.cast_weights) == len(policy.decoder.list_cast_weights())
    assert isinstance(torch_engine.build_optimizer(AdamWConfig(offload=True), policy), OffloadedAdamW)


def test_where_a_bit_differs_torch_goes_on(monkeypatch):
    assert one_pass.load_one_pass()[0]
    monkeypatch.setattr(one_pass.OnePassAdamW, "clip_gradients", lambda self, max_norm: torch.zeros(()))
    assert native.find_difference(one_pass.compare_optimizers(OnePassAdamW))
