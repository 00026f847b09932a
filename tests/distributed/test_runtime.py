"""Test optimizer steps, schedules and their state in one process; `test_run.py` uses two."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from conftest import make_policy
from pellucid import cli
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed.runtime import Runtime


def step(runtime, policy, gradient=1.0):
    for p in policy.trainable().values():
        p.grad = torch.full_like(p, gradient)
    return runtime.step()


def copies(runtime):
    return {m: {name: x.clone() for name, x in state.items()} for m, state in runtime.engine.moments().items()}


def test_steps_equal_those_of_torch():
    policy, twin = make_policy(), make_policy()
    betas, eps = (0.7, 0.9), 1e-3  # none of them is a default of torch
    settings = AdamWConfig(lr=1e-2, betas=betas, eps=eps, weight_decay=0.1, max_grad_norm=0.5)
    runtime = Runtime(policy, settings, total_updates=3)
    plain = torch.optim.AdamW(twin.trainable().values(), lr=1e-2, betas=betas, eps=eps, weight_decay=0.1)
    for scale in (1.0, -2.0, 0.01):
        metrics = step(runtime, policy, scale)
        size = math.sqrt(sum(p.numel() for p in twin.trainable().values()))
        assert metrics["grad_norm"] == pytest.approx(abs(scale) * size, rel=1e-5)
        for p in twin.trainable().values():
            p.grad = torch.full_like(p, scale * min(1.0, 0.5 / (abs(scale) * size)))
        plain.step()
    for name, p in policy.trainable().items():
        torch.testing.assert_close(p, twin.trainable()[name], rtol=0, atol=1e-6)


def test_nonfinite_gradient_changes_no_weights_and_no_moments():
    policy = make_policy()
    runtime = Runtime(policy, AdamWConfig(lr=0.1), total_updates=3)
    step(runtime, policy)
    weights = {name: p.clone() for name, p in policy.trainable().items()}
    moments = copies(runtime)
    assert step(runtime, policy, math.nan)["skipped"] == 1.0
    assert step(runtime, policy, math.inf)["skipped"] == 1.0
    assert all(torch.equal(p, weights[name]) for name, p in policy.trainable().items())
    for moment, state in copies(runtime).items():
        assert all(torch.equal(x, moments[moment][name]) for name, x in state.items())
    assert step(runtime, policy)["skipped"] == 0.0


@pytest.mark.parametrize("offload", [False, True])
def test_step_clears_the_gradients(offload):
    policy = make_policy()
    runtime = Runtime(policy, AdamWConfig(offload=offload), total_updates=1)
    step(runtime, policy)
    assert [p.grad for p in policy.trainable().values()] == [None] * len(policy.trainable())


@pytest.mark.parametrize("offload", [False, True])
def test_zero_gradient_takes_no_step_and_is_counted(offload):
    """Otherwise the momentum of earlier steps and weight decay would move the weights without a training signal."""
    policy = make_policy()
    runtime = Runtime(
        policy, AdamWConfig(lr=0.1, weight_decay=0.1, schedule="linear", offload=offload), total_updates=4
    )
    assert step(runtime, policy)["idle"] == 0.0
    weights = {name: p.clone() for name, p in policy.trainable().items()}
    moments = copies(runtime)
    metrics = step(runtime, policy, 0.0)
    assert metrics == {"grad_norm": 0.0, "lr": pytest.approx(0.075), "skipped": 0.0, "idle": 1.0}
    assert all(torch.equal(p, weights[name]) for name, p in policy.trainable().items())
    for moment, state in copies(runtime).items():
        assert all(torch.equal(x, moments[moment][name]) for name, x in state.items())
    last = step(runtime, policy)
    assert last["lr"] == pytest.approx(0.05), "the schedule goes on"
    assert not any(torch.equal(p, weights[name]) for name, p in policy.trainable().items())
    assert step(runtime, policy, math.nan)["idle"] == 0.0


def test_learning_rate_rises_then_falls():
    rates = {
        name: [AdamWConfig(lr=1.0, warmup=2, schedule=name).compute_lr(update, 6) for update in range(1, 7)]
        for name in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == [0.5, 1, 1, 1, 1, 1]
    assert rates["linear"] == [0.5, 1, 1, 0.75, 0.5, 0.25]
    half = math.sqrt(0.5) / 2
    assert rates["cosine"] == pytest.approx([0.5, 1, 1, 0.5 + half, 0.5, 0.5 - half])


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("linear", 0.0), ("cosine", 0.0)])
def test_learning_rate_stays_at_its_end_value_past_the_last_update(schedule, last):
    """A run that is resumed with fewer steps, epochs or minibatches gets there."""
    for warmup in (0, 2):
        cfg = AdamWConfig(lr=1.0, warmup=warmup, schedule=schedule)
        assert [cfg.compute_lr(update, 6) for update in (7, 8, 12, 13, 100)] == [last] * 5
    assert AdamWConfig(lr=1.0, warmup=4, schedule=schedule).compute_lr(3, 2) == 0.75, "the rise is by steps alone"


@pytest.mark.parametrize("offload", [False, True])
def test_each_step_uses_its_own_learning_rate(offload):
    """If the gradient is always 1, both corrected moments of AdamW are 1, so a weight moves by exactly the rate."""
    policy = make_policy()
    for p in policy.trainable().values():
        p.data.zero_()
    cfg = AdamWConfig(lr=0.5, warmup=2, schedule="linear", max_grad_norm=0.0, offload=offload)
    runtime = Runtime(policy, cfg, total_updates=6)
    p, places, reported = next(iter(policy.trainable().values())), [0.0], []
    for _ in range(6):
        reported.append(step(runtime, policy)["lr"])
        places.append(-float(p.detach().flatten()[0]))
    moved = [after - before for before, after in itertools.pairwise(places)]
    assert moved == pytest.approx([0.25, 0.5, 0.5, 0.375, 0.25, 0.125], rel=1e-5)
    assert reported == pytest.approx([0.25, 0.5, 0.5, 0.375, 0.25, 0.125])


@pytest.mark.slow
def test_learning_rate_covers_all_updates_and_continues_in_a_resumed_run(recipe, tmp_path):
    """Two steps with two epochs and two minibatches make eight updates, of which the first two are warmup."""
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    fixed = ["--optimizer.lr", "0.006", "--optimizer.schedule", "linear", "--evaluate.every", "0"]
    steps = ["--algorithm.steps", "2", "--checkpoint.every", "1", "--checkpoint.keep_finished", "all"]
    run_dir = tmp_path / "run"
    try:
        assert ended(["train", str(recipe), "--run", str(run_dir), *fixed, *steps]) == 0
        shutil.rmtree(run_dir / "checkpoints" / "step-000002")
        assert ended(["train", "--resume", str(run_dir)]) == 0
    finally:
        hook.remove()
    second = [0.004, 0.003, 0.002, 0.001]
    assert rates == pytest.approx([0.003, 0.006, 0.006, 0.005, *second, *second])


def ended(arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return exit_.value.code


def test_optimizer_state_is_restored():
    policy = make_policy()
    runtime = Runtime(policy, AdamWConfig(lr=0.1, warmup=5), total_updates=10)
    step(runtime, policy)
    saved = copies(runtime)
    assert saved.keys() == {"step", "exp_avg", "exp_avg_sq"}
    weights = {name: p.detach().clone() for name, p in policy.trainable().items()}
    expected = step(runtime, policy), {name: p.detach().clone() for name, p in policy.trainable().items()}

    other = make_policy(seed=3)
    other.load_trainable(weights)
    resumed = Runtime(other, AdamWConfig(lr=0.1, warmup=5), total_updates=10)
    resumed.engine.load_moments(saved)
    resumed.updates = 1
    assert step(resumed, other) == expected[0]
    assert all(torch.equal(p, expected[1][name]) for name, p in other.trainable().items())


@pytest.mark.parametrize(("wrong", "mend"), [({"lr": 0.0}, "positive"), ({"warmup": -1}, "negative")])
def test_impossible_settings_are_refused(wrong, mend):
    with pytest.raises(ValueError, match=mend):
        AdamWConfig(**wrong)
