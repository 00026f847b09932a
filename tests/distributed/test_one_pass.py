"""Test that AdamW in one pass gives exactly the results of torch's clip_grad_norm_, AdamW and cast."""

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
def test_steps_and_norms_equal_those_of_torch_exactly(settings, threads):
    ours, theirs = model(), model()
    one, other = OnePassAdamW(ours.parameters(), **settings), torchs(theirs, settings)
    before = torch.get_num_threads()
    try:
        for step in range(12):
            torch.set_num_threads(threads)
            # Large gradients are clipped and small ones are not. Some parameters have no gradient in some steps.
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


def test_gradients_are_clipped_only_after_clip_gradients_and_for_one_step():
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


def test_transposed_gradients_are_read_correctly():
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


def test_one_pass_continues_from_the_state_of_torch():
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


# ---------------------------------------------------------------- copies in the compute dtype


def casts_of(module, dtype=BF16):
    """Return the casts of a joined matrix, of a single matrix, and of one that has not been used yet."""
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


def test_copies_are_cast_in_the_step_and_not_again():
    _, (joined, alone, later) = stepped()
    assert torch.equal(joined.cast_copy, fresh(joined))
    assert torch.equal(alone.cast_copy, fresh(alone))
    joined.cast_copy.zero_()  # casting again would overwrite this
    assert not joined.get_cast_copy().any()
    assert later.cast_copy is None
    assert torch.equal(later.get_cast_copy(), fresh(later))


def test_weight_changed_outside_the_optimizer_is_cast_again():
    module, (joined, alone, _) = stepped()
    with torch.no_grad():
        module.wide += 1
        module.narrow += 1
    assert torch.equal(joined.get_cast_copy(), fresh(joined))
    assert torch.equal(alone.get_cast_copy(), fresh(alone))


def test_joined_matrix_with_a_partial_step_is_cast_again_as_a_whole():
    module = model()
    module.wider = torch.nn.Parameter(torch.ones(2, 112))
    joined, *_ = parts = casts_of(module)
    optimizer = OnePassAdamW(module.parameters(), lr=0.1, cast_weights=parts)
    with torch.no_grad():
        module.wider += 1  # it has no gradient, and its copy is outdated
    give_gradients([module], 1)
    optimizer.step()
    assert torch.equal(joined.get_cast_copy(), fresh(joined))


def test_joined_fp32_weights_share_the_memory_of_their_masters():
    """The optimizer updates both at once, and nothing is copied."""
    _, (joined, *_) = stepped(torch.float32)
    assert torch.equal(joined.cast_copy, fresh(joined))
    assert joined.get_cast_copy() is joined.cast_copy
    for master, part in joined.pair_masters_with_copies():
        assert master.data_ptr() == part.data_ptr()


# ---------------------------------------------------------------- supported parameters


@pytest.mark.parametrize(
    "other",
    [torch.zeros(3, 5), torch.zeros(16, dtype=BF16), torch.zeros(16, 32).T, torch.zeros(16, device="meta")],
    ids=["of other sizes", "in bf16", "turned", "elsewhere"],
)
def test_unsupported_parameters_are_left_to_torch(other):
    assert supports_one_pass([torch.zeros(16), torch.zeros(3, 48)])
    assert not supports_one_pass([torch.zeros(16), other])


def test_policy_on_the_cpu_uses_one_pass_adamw_with_its_copies():
    policy = make_policy(dtype=BF16)
    optimizer = torch_engine.build_optimizer(AdamWConfig(), policy)
    assert isinstance(optimizer, OnePassAdamW)
    assert policy.decoder and len(optimizer.cast_weights) == len(policy.decoder.list_cast_weights())
    assert isinstance(torch_engine.build_optimizer(AdamWConfig(offload=True), policy), OffloadedAdamW)


def test_difference_from_torch_is_found(monkeypatch):
    assert one_pass.load_one_pass()[0]
    monkeypatch.setattr(one_pass.OnePassAdamW, "clip_gradients", lambda self, max_norm: torch.zeros(()))
    assert native.find_difference(one_pass.compare_optimizers(OnePassAdamW))
