"""Test that the offloaded optimizer matches torch's up to rounding and keeps small steps of bf16 weights."""

from __future__ import annotations

import pytest
import torch

from pellucid.distributed.optimizer import OffloadedAdamW


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(5, 3).to(dtype).requires_grad_(), torch.randn(7).to(dtype).requires_grad_()]


def follow(optimizer, parameters, steps=20):
    generator = torch.Generator().manual_seed(1)
    for i in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if i == 10:
            optimizer.param_groups[0]["lr"] *= 0.1
            parameters[1].grad = None  # a parameter without a gradient in this step
        optimizer.step()
        optimizer.zero_grad()
    return parameters


@pytest.mark.parametrize(
    "settings", [{"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}]
)
def test_offloaded_adamw_takes_the_steps_of_torch(settings):
    defaults = {"weight_decay": 0.0} | settings
    ours, theirs = weights(), weights()
    follow(OffloadedAdamW(ours, **defaults), ours)
    follow(torch.optim.AdamW(theirs, **defaults), theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_bf16_weights_are_their_rounded_fp32_masters():
    """Steps of 1e-5 are below the spacing of bf16 under 1. If each step were rounded, all of them would be lost."""
    p, lost = (torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    master = torch.ones(4, requires_grad=True)
    ours = OffloadedAdamW([p], lr=1e-5)
    plain = torch.optim.AdamW([lost, master], lr=1e-5, weight_decay=0.0)
    for _ in range(1000):
        for x in (p, lost, master):
            x.grad = torch.ones_like(x)
        ours.step()
        plain.step()
    assert lost.eq(1).all()
    torch.testing.assert_close(ours.masters[p], master.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(master.detach(), torch.full((4,), 0.99), rtol=0, atol=1e-4)
    assert p.equal(ours.masters[p].to(torch.bfloat16))


def test_state_is_fp32_on_the_cpu_for_every_weight_dtype():
    parameters = weights(torch.bfloat16)
    optimizer = OffloadedAdamW(parameters)
    follow(optimizer, parameters, steps=1)
    for p in parameters:
        kept = [optimizer.masters[p], *optimizer.state[p].values()]
        assert {x.dtype for x in kept} == {torch.float32}
        assert {x.device.type for x in kept} == {"cpu"}
        torch.testing.assert_close(p, optimizer.masters[p].to(torch.bfloat16))


def test_state_survives_a_save():
    ours, resumed = weights(), weights()
    first = OffloadedAdamW(ours, lr=0.1)
    follow(first, ours, 5)
    second = OffloadedAdamW(resumed, lr=0.1)
    with torch.no_grad():
        for p, q in zip(resumed, ours, strict=True):
            p.copy_(second.masters[p].copy_(q))
            second.state[p] = {name: value.clone() for name, value in first.state[q].items()}
    follow(first, ours, 3)
    follow(second, resumed, 3)
    for one, other in zip(ours, resumed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_given_masters_are_updated_in_place():
    """The step starts from the masters, not from the weights that were rounded from them."""
    held = [torch.full((4,), 1.001), torch.full((2, 2), 0.999)]
    rounded = [x.bfloat16().requires_grad_() for x in held]
    twins = [x.clone().requires_grad_() for x in held]
    ours = OffloadedAdamW(rounded, lr=1e-4, masters=held)
    theirs = torch.optim.AdamW(twins, lr=1e-4, weight_decay=0.0)
    for p in (*rounded, *twins):
        p.grad = torch.ones_like(p)
    ours.step()
    theirs.step()
    for master, twin in zip(held, twins, strict=True):
        torch.testing.assert_close(master, twin.detach(), rtol=0, atol=1e-7)
