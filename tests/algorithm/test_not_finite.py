"""Test that a non-finite gradient is dropped and counted, and leaves the following updates unaffected."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_grpo import rollouts

from architectures import adapted
from conftest import make_policy, records
from pellucid.algorithm import grpo
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import load_policy
from runs import train

SETTINGS = GRPOConfig(minibatches=2, prompts_per_step=4)
WAYS = {
    "fp32": lambda _: make_policy(),
    "bf16": lambda _: make_policy(dtype=torch.bfloat16),
    "fp16": lambda _: make_policy(dtype=torch.float16),
    "an adapter": lambda _: adapted("llama", torch.float32),
    "through transformers": lambda _: make_policy("gpt2"),
    "masters on the CPU": lambda folder: load_policy(
        str(folder), torch.device("cpu"), torch.bfloat16, 1.0, offload_masters=True
    ),
}


def learner_of(way, model_dir):
    policy = WAYS[way](model_dir)
    return policy, Runtime(policy, AdamWConfig(lr=1e-3, offload="masters" in way), total_updates=9)


def state_of(policy, learner):
    moments = learner.engine.moments()
    held = [*policy.trainable().values(), *policy.masters().values()]
    return [x.detach().clone() for x in (*held, *(x for state in moments.values() for x in state.values()))]


def broken(batch):
    """Return the batch with a NaN advantage in a row of the second minibatch."""
    advantages = batch.advantages.clone()
    advantages[-1] = math.nan
    return replace(batch, advantages=advantages)


@pytest.mark.parametrize("way", WAYS)
def test_non_finite_gradient_skips_only_its_own_update(way, model_dir):
    """The second of two minibatches is dropped. Later updates have the same bits as a run without it: weights, moments
    and the step count of Adam's bias correction are not affected.
    """
    policy, learner = learner_of(way, model_dir)
    twin, other = learner_of(way, model_dir)
    batch = rollouts(make_policy())
    first, second = batch.split_into_chunks(len(batch) // 2)
    alone = replace(SETTINGS, minibatches=1)
    assert grpo.update_policy(policy, batch, learner, SETTINGS)["skipped"] == 0
    seen = grpo.update_policy(policy, broken(batch), learner, SETTINGS)
    assert seen["skipped"] == 1
    assert not math.isfinite(seen["grad_norm"])
    assert (seen["idle"], seen.get("skipped/overflow", 0)) == (0, 0)
    assert learner.updates == 4, "the schedule counts it"
    for part in (first, second, first):
        grpo.update_policy(twin, part, other, alone)
    same = zip(state_of(policy, learner), state_of(twin, other), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in same)

    before = state_of(policy, learner)
    assert grpo.update_policy(policy, second, learner, alone)["skipped"] == 0
    grpo.update_policy(twin, second, other, alone)
    after = state_of(policy, learner)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, state_of(twin, other), strict=True))
    assert not any(torch.equal(now, then) for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "fp16"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_non_finite_gradient_value_skips_the_update(way, value, model_dir):
    policy, learner = learner_of(way, model_dir)
    batch = rollouts(make_policy())
    grpo.update_policy(policy, batch, learner, SETTINGS)
    before = state_of(policy, learner)
    last = list(policy.trainable().values())[-1]
    hook = last.register_hook(lambda grad: grad.index_put((torch.tensor(0),), torch.tensor(value, dtype=grad.dtype)))
    seen = grpo.update_policy(policy, batch, learner, SETTINGS)
    hook.remove()
    assert seen["skipped"] == 2
    assert math.isfinite(seen["loss"])
    assert all(torch.equal(now, then) for now, then in zip(state_of(policy, learner), before, strict=True))
    assert grpo.update_policy(policy, batch, learner, SETTINGS)["skipped"] == 0
    assert not any(torch.equal(now, then) for now, then in zip(state_of(policy, learner), before, strict=True))


@pytest.mark.slow
def test_run_continues_and_reports_skipped_updates(recipe, tmp_path, capsys, monkeypatch):
    """All four optimizer steps of step 3 are skipped, so its checkpoint holds the same state as the one before."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    settings = ["--checkpoint.every", 1, "--checkpoint.keep_last", 6, "--evaluate.every", 0]
    settings += ["--checkpoint.keep_finished", "all"]
    assert train(recipe, "--run", whole, *settings) == 0
    update, calls = grpo.update_policy, []

    def breaking(policy, batch, *others):
        calls.append(batch)
        lost = replace(batch, advantages=batch.advantages * math.nan)
        return update(policy, lost if len(calls) == 3 else batch, *others)

    monkeypatch.setattr(grpo, "update_policy", breaking)
    capsys.readouterr()
    assert train(recipe, "--run", run_dir, *settings) == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if "! skipped updates: 4" in line]
    assert said.startswith("step 3/6")

    steps = records(run_dir / "metrics.jsonl")
    assert [s["skipped"] for s in steps] == [0, 0, 4, 0, 0, 0]
    assert [s["lr"] for s in steps] == [s["lr"] for s in records(whole / "metrics.jsonl")]
    assert steps[2]["grad_norm"] is None, "JSON has no NaN"
    assert all(math.isfinite(s["grad_norm"]) for s in steps if s["step"] != 3)
    assert "<dt>Skipped updates</dt><dd class=warn>4</dd>" in (run_dir / "report.html").read_text()

    folders = [run_dir / "checkpoints" / f"step-{n:06d}" for n in (2, 3, 4)]
    assert [json.loads((folder / "state.json").read_text())["updates"] for folder in folders] == [8, 12, 16]
    for file in ("policy", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"):
        two, three, four = (load_file(folder / f"{file}.safetensors") for folder in folders)
        assert all(torch.equal(two[name], x) for name, x in three.items()), file
        assert not any(torch.equal(four[name], x) for name, x in three.items()), file
