"""Tests of fp16 training: the scale keeps small gradients from rounding to 0, and falls when they overflow."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from architectures import FAMILY, VANISHING, adapted, model_of, weighted
from conftest import CountDigits, character_tokenizer, make_policy, records
from pellucid.algorithm.batch import collate
from pellucid.algorithm.settings import AdamWConfig
from pellucid.distributed import torch_engine
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import Policy
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.training import doctor, run
from pellucid.types import Sampling
from pellucid.utils import hardware
from runs import in_two_processes, same_run, train


def policy_of(name, dtype, **settings):
    return Policy(model_of(name), character_tokenizer(), dtype, **settings)


def gradient(policy, size, unscale=True):
    """Return the gradient of all trained parameters as one vector, divided by the size."""
    learner = Runtime(policy, AdamWConfig(), total_updates=1)
    if unscale:
        learner.backward(weighted(policy, size))
        learner.engine.scaler.unscale_(learner.engine.optimizer)
    else:
        weighted(policy, size).backward()
    return torch.cat([p.grad.flatten() for p in policy.trainable().values()]) / size


def off(measured, exact):
    return float((measured - exact).norm() / exact.norm())


WAYS = {
    **{name: partial(policy_of, name) for name in FAMILY},
    "through transformers": partial(policy_of, "qwen2", engine="transformers"),
    "recomputed": partial(policy_of, "qwen3", gradient_checkpointing=True),
    "an adapter": partial(adapted, "llama"),
}


@pytest.mark.parametrize("way", WAYS)
def test_scaled_gradients_match_fp32_and_unscaled_ones_vanish(way):
    """They are closer than those of bf16, whose rounding is eight times as coarse."""
    exact = gradient(WAYS[way](torch.float32), VANISHING)
    scaled = off(gradient(WAYS[way](torch.float16), VANISHING), exact)
    assert scaled < 0.02
    assert scaled < off(gradient(WAYS[way](torch.bfloat16), VANISHING, unscale=False), exact)
    assert off(gradient(WAYS[way](torch.float16), VANISHING, unscale=False), exact) > 0.5


def starting_at(scale, interval=2000):
    return partial(GradScaler, init_scale=scale, growth_interval=interval)


def state_of(learner):
    tensors = [p.detach().clone() for p in learner.engine.parameters.values()]
    return tensors + [x.clone() for state in learner.engine.moments().values() for x in state.values()]


def step(learner, policy, size):
    learner.backward(weighted(policy, size))
    return learner.step()


@pytest.mark.parametrize("offload", [False, True])
def test_overflow_lowers_the_scale_and_skips_the_update(monkeypatch, offload):
    """Weights, moments and Adam's step count do not change, and it does not count as a skip that no scale prevents."""
    monkeypatch.setattr(torch_engine, "GradScaler", starting_at(2.0**16))
    policy = adapted("llama", torch.float16)
    learner = Runtime(policy, AdamWConfig(lr=1e-2, offload=offload), total_updates=9)
    first = step(learner, policy, VANISHING)
    assert (first["skipped"], first["skipped/overflow"], first["loss_scale"]) == (0, 0, 2.0**16)
    before = state_of(learner)
    seen = step(learner, policy, 1e5)
    assert not math.isfinite(seen["grad_norm"])
    assert (seen["skipped"], seen["skipped/overflow"], seen["idle"], seen["loss_scale"]) == (0, 1, 0, 2.0**16)
    assert all(torch.equal(now, then) for now, then in zip(state_of(learner), before, strict=True))
    assert all(p.grad is None for p in policy.trainable().values())
    after = step(learner, policy, VANISHING)
    assert (after["skipped"], after["skipped/overflow"], after["loss_scale"]) == (0, 0, 2.0**15)
    assert learner.updates == 3, "the schedule goes on"
    assert not any(torch.equal(now, then) for now, then in zip(state_of(learner), before, strict=True))


@pytest.mark.slow
def test_scale_falls_until_it_fits_and_grows_again(monkeypatch):
    monkeypatch.setattr(torch_engine, "GradScaler", starting_at(2.0**40, interval=2))
    policy = make_policy(dtype=torch.float16)
    learner = Runtime(policy, AdamWConfig(lr=1e-5), total_updates=40)
    seen = [step(learner, policy, 1e-3) for _ in range(40)]
    scales = [s["loss_scale"] for s in seen]
    overflowed = [bool(s["skipped/overflow"]) for s in seen]
    assert overflowed[0]
    assert not all(overflowed[20:])
    for now, then, lowered in zip(scales, scales[1:], overflowed, strict=False):
        assert then == now / 2 if lowered else then in (now, 2 * now)
    assert any(then == 2 * now for now, then in itertools.pairwise(scales))
    assert {s["skipped"] for s in seen} == {0.0}


def test_non_finite_loss_skips_the_update_and_keeps_the_scale():
    policy = make_policy(dtype=torch.float16)
    learner = Runtime(policy, AdamWConfig(lr=1e-2), total_updates=3)
    step(learner, policy, VANISHING)
    before = state_of(learner)
    learner.backward(weighted(policy, VANISHING))
    learner.backward(weighted(policy, VANISHING) * math.nan)
    learner.backward(weighted(policy, VANISHING))
    seen = learner.step()
    assert (seen["skipped"], seen["skipped/overflow"]) == (1, 0)
    assert all(torch.equal(now, then) for now, then in zip(state_of(learner), before, strict=True))
    seen = step(learner, policy, 1e5)
    assert (seen["skipped"], seen["skipped/overflow"], seen["loss_scale"]) == (0, 1, 2.0**16), "and is forgotten"


def test_scale_of_one_is_never_lowered(monkeypatch):
    """Otherwise the scale would fall until every gradient was 0, and the run would look idle."""
    monkeypatch.setattr(torch_engine, "GradScaler", starting_at(1.0))
    policy = make_policy(dtype=torch.float16)
    learner = Runtime(policy, AdamWConfig(), total_updates=3)
    for _ in range(2):
        seen = step(learner, policy, 1e9)
        assert (seen["skipped"], seen["skipped/overflow"], seen["loss_scale"]) == (1, 0, 1.0)


def test_zero_gradient_is_idle_in_fp16_too():
    policy = make_policy(dtype=torch.float16)
    learner = Runtime(policy, AdamWConfig(weight_decay=0.1), total_updates=3)
    before = [p.detach().clone() for p in learner.engine.parameters.values()]
    seen = step(learner, policy, 0.0)
    assert (seen["skipped"], seen["skipped/overflow"], seen["idle"]) == (0, 0, 1)
    assert all(torch.equal(p, then) for p, then in zip(learner.engine.parameters.values(), before, strict=True))


def test_gradients_are_unscaled_before_they_are_clipped():
    """With eps far above the moments, a step of Adam has the size of its gradient, which clipping limits."""
    moved = []
    for dtype in (torch.float32, torch.float16):
        policy = make_policy(dtype=dtype)
        before = [p.detach().clone() for p in policy.trainable().values()]
        learner = Runtime(policy, AdamWConfig(lr=1.0, eps=1.0, max_grad_norm=1e-3), total_updates=1)
        seen = step(learner, policy, 1e-5)
        steps = [p.detach() - was for p, was in zip(policy.trainable().values(), before, strict=True)]
        moved.append((seen["grad_norm"], torch.cat([s.flatten() for s in steps])))
    (norm, exact), (other_norm, measured) = moved
    assert norm > 1e-2, "clipped"
    assert other_norm == pytest.approx(norm, rel=0.01)
    assert off(measured, exact) < 0.02


# ---------------------------------------------------------------- sampler and scorer


@pytest.mark.parametrize("sampler", [NativeSampler, HuggingFaceSampler])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_sampler_and_scorer_compute_in_fp16(name, sampler):
    """Their gap is that of fp16 products, and the log-probs differ from those of fp32."""
    policy = policy_of(name, torch.float16)
    drawing = sampler()
    drawing.sync(policy)
    batch = collate(drawing.generate(CountDigits().sample(0, 4), Sampling(8, max_tokens=24, seed="0/0")))
    scored = policy.score(batch).logprobs.detach()
    gap = (scored - batch.sampler_logprobs)[batch.response_mask].abs()
    exact = (scored - policy_of(name, torch.float32).score(batch).logprobs.detach())[batch.response_mask].abs()
    assert gap.mean() < 0.01
    assert 1e-5 < exact.mean() < 0.02


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--policy.lora", 2, "--optimizer.offload"]], ids=["whole", "an adapter"])
def test_checkpoint_holds_the_scale_and_its_growth_counter(recipe, tmp_path, monkeypatch, more):
    """The scale falls in the first steps and grows in the last; a run killed in between ends with the same bits."""
    monkeypatch.setattr(torch_engine, "GradScaler", starting_at(2.0**36, interval=3))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = ["--policy.dtype", "float16", "--checkpoint.every", 1, "--evaluate.every", 3, *more]
    settings += ["--algorithm.steps", 8]
    assert train(recipe, "--run", whole, *settings) == 0
    steps = records(whole / "metrics.jsonl")
    assert steps[0]["skipped/overflow"] > 0
    assert {s["skipped"] for s in steps} == {0.0}
    assert len({s["loss_scale"] for s in steps}) > 3
    moved = [s for s in steps if s["skipped/overflow"] + s["idle"] < 4]
    assert moved, "some update was taken"

    update, calls = run.grpo.update_policy, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(run.grpo, "update_policy", dying)
        assert train(recipe, "--run", killed, *settings) == 130
    state = json.loads((killed / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["scaler"]["scale"] < 2.0**36
    assert train("--resume", killed) == 0
    same_run(whole, killed)


@pytest.mark.slow
def test_resume_can_switch_to_fp16_and_leave_it_again(recipe, tmp_path):
    run_dir = tmp_path / "run"
    settings = ["--checkpoint.every", 1, "--evaluate.every", 0]
    assert train(recipe, "--run", run_dir, *settings, "--algorithm.steps", 1) == 0
    assert train("--resume", run_dir, "--policy.dtype", "float16", "--algorithm.steps", 2) == 0
    assert train("--resume", run_dir, "--policy.dtype", "bfloat16", "--algorithm.steps", 3) == 0
    assert ["loss_scale" in s for s in records(run_dir / "metrics.jsonl")] == [False, True, False]


TWO = """
import json, math, sys
from pathlib import Path
import torch
from conftest import make_policy
from pellucid.distributed.runtime import Runtime
from pellucid.algorithm.settings import AdamWConfig
from architectures import VANISHING as SMALL, weighted

policy = make_policy(dtype=torch.float16)
learner = Runtime(policy, AdamWConfig(), total_updates=9)
seen = []
for sizes in ((SMALL, SMALL), (SMALL, 1e5), (SMALL, SMALL), (SMALL * math.nan, SMALL), (SMALL, SMALL)):
    learner.backward(weighted(policy, sizes[learner.rank]))
    seen.append({name: x for name, x in learner.step().items() if name != "lr"})
sums = [float(p.detach().double().sum()) for p in learner.engine.parameters.values()]
Path(sys.argv[1], str(learner.rank)).write_text(json.dumps([seen, sums], allow_nan=True))
"""


@pytest.mark.slow
def test_two_processes_agree_on_an_overflow_or_nan_in_one_of_them(tmp_path):
    """One of the two has an overflow, and later a loss that is not finite."""
    (tmp_path / "two.py").write_text(TWO)
    in_two_processes(tmp_path / "two.py", tmp_path)
    (one, sums), (other, others) = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert str(one) == str(other), "NaN is not equal to itself"
    assert sums == others
    assert [s["skipped/overflow"] for s in one] == [0, 1, 0, 0, 0]
    assert [s["skipped"] for s in one] == [0, 0, 0, 1, 0]
    assert [s["loss_scale"] for s in one] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15]


# ---------------------------------------------------------------- errors and warnings


def test_offload_with_fp16_is_refused_in_one_line(recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", "--policy.dtype", "float16", "--optimizer.offload") == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "pellucid" in line]
    assert line.startswith('pellucid: optimizer.offload keeps gradients in policy.dtype, and those of "float16"')


def test_fp16_without_scaling_in_torch_is_refused_in_one_line(recipe, tmp_path, capsys, monkeypatch):
    def unable(*_):
        raise NotImplementedError("'_amp_foreach_non_finite_check_and_unscale_' is not there\nfor this device")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", unable)
    assert train(recipe, "--run", tmp_path / "run", "--policy.dtype", "float16") == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "pellucid" in line]
    assert line.startswith('pellucid: policy.dtype = "float16" cannot be trained on cpu (\'_amp')
    assert line.endswith('is not there): set "float32"')


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_report_no_scale(dtype):
    policy = make_policy(dtype=dtype)
    learner = Runtime(policy, AdamWConfig(), total_updates=1)
    assert step(learner, policy, 1.0).keys() == {"grad_norm", "lr", "skipped", "idle"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("speed", "said"), [(0.02, True), (0.9, False), (1.1, False)])
def test_cpu_with_slow_half_precision_prints_a_warning(recipe, tmp_path, capsys, monkeypatch, speed, said, dtype):
    """A CPU without instructions for half precision takes fifty times as long."""
    speeds = {torch.float32: 1.0, getattr(torch, dtype): speed}
    monkeypatch.setattr(hardware, "measure_matmul_tflops", lambda measured, **_: speeds[measured])
    settings = ["--policy.dtype", dtype, "--evaluate.every", 0, "--algorithm.steps", 1]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    warning = f"! this CPU multiplies 50 times as fast in float32 as in {dtype}: set"
    assert (warning in capsys.readouterr().out) == said
    assert hardware.describe_slow_dtype(dtype, torch.device("cuda")) == ""


@pytest.mark.slow
def test_device_without_bf16_is_noted_by_train_and_doctor(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "describe_missing_bf16", lambda device: f"{device} has no bf16")
    settings = ["--evaluate.every", 0, "--algorithm.steps", 1]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    assert "! cpu has no bf16" in capsys.readouterr().out
    assert train(recipe, "--run", tmp_path / "other", "--policy.dtype", "bfloat16", *settings) == 0
    assert "has no bf16" not in capsys.readouterr().out
    assert dict(doctor.collect_findings())["auto"].endswith("; cpu has no bf16")


def test_auto_dtype_never_picks_fp16(monkeypatch):
    """The range of fp16 is too small for some models, and no scale helps their activations."""
    monkeypatch.setattr(
        hardware, "measure_matmul_tflops", {torch.float16: 9.0, torch.bfloat16: 1.0, torch.float32: 1.0}.get
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for device in ("cpu", "cuda", "mps"):
        assert hardware.pick_dtype("auto", torch.device(device)) == torch.float32
