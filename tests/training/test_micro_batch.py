"""Tests of `algorithm.micro_batch = "auto"`, which chooses the largest size that fits, and records it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from conftest import records
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, EvaluateConfig, PolicyConfig, SamplerConfig, build_config
from pellucid.policy.policy import Policy, load_frozen_policy
from pellucid.training import memory, preflight
from pellucid.types import UserError, with_split
from pellucid.utils import hardware
from runs import same_run, train

PLAN = Config(
    policy=PolicyConfig(dtype="bfloat16", device="cpu"),
    sampler=SamplerConfig(max_tokens=100_000, rows=1),
    evaluate=EvaluateConfig(every=0),
)


@pytest.fixture(scope="module")
def model(model_dir):
    return memory.describe_model(PolicyConfig(str(model_dir)))


def peak_with(model, cfg, rows, processes=1):
    with_rows = replace(cfg, algorithm=replace(cfg.algorithm, micro_batch=rows))
    return memory.estimate_peak(model, with_rows, processes)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"kl_coef": 0.1}, {"minibatches": 2, "max_staleness": 2}, {"group_size": 3, "prompts_per_step": 2}]
)
def test_auto_chooses_the_most_rows_whose_memory_plan_fits(model, settings, processes):
    cfg = replace(PLAN, algorithm=GRPOConfig(**{"prompts_per_step": 4, "group_size": 8} | settings))
    rows = memory.count_minibatch_rows(cfg, processes)
    peaks = {n: peak_with(model, cfg, n, processes) for n in range(1, rows + 1)}
    lowest, highest = min(peaks.values()), max(peaks.values())
    seen = set()
    for step in range(20):
        available = (lowest + (highest - lowest) * (step - 2) / 16) / memory.MEMORY_SHARE
        fitting = [n for n, peak in peaks.items() if peak <= memory.MEMORY_SHARE * available]
        if not fitting:
            with pytest.raises(UserError, match="one row in a forward pass"):
                memory.choose_micro_batch(model, cfg, available, processes)
            continue
        chosen = memory.choose_micro_batch(model, cfg, available, processes)
        assert (chosen or rows) == max(fitting)
        assert chosen != rows, "a whole minibatch is 0, as without a limit"
        seen.add(chosen)
    assert 0 in seen
    assert len(seen) > min(4, rows // 2)


def test_error_suggests_settings_that_fit_into_memory(model):
    cfg = replace(PLAN, algorithm=GRPOConfig(prompts_per_step=4, group_size=8))
    without, with_it = (
        peak_with(model, replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=on)), 1) for on in (False, True)
    )
    available = (without + with_it) / 2 / memory.MEMORY_SHARE
    with pytest.raises(UserError) as refused:
        memory.choose_micro_batch(model, cfg, available)
    message = str(refused.value)
    assert f"it fits with policy.gradient_checkpointing = true: {with_it:.1f} GB" in message
    assert f"policy.gradient_checkpointing = true saves {without - with_it:.1f} GB" in message
    assert "sampler.max_tokens = 50000 saves" in message
    checkpointing = replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=True))
    assert memory.choose_micro_batch(model, checkpointing, available) >= 1


def test_memory_plan_uses_the_longest_prompt(model, model_dir, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": "1" * n, "answer": "1"}) + "\n" for n in range(1, 30)))
    task = {"name": "dataset", "data": str(data), "rewards": [{"name": "numeric"}]}
    cfg = build_config({"policy": {"model": str(model_dir)}, "task": task}, "a test")
    policy = load_frozen_policy(str(model_dir), torch.device("cpu"), torch.float32, 1.0)
    lengths = {len(policy.encode(prompt)) for prompt in with_split(cfg.task, "train").sample(0, 256)}
    assert len(lengths) > 20
    assert preflight.measure_prompt_tokens(cfg, policy.tokenizer) == max(lengths)
    planned = [memory.estimate_peak(model._replace(prompt_tokens=n), PLAN) for n in (10, 50_000)]
    kept = memory.estimate_activation_bytes(model.config, PLAN, True, memory.BackwardSizes(1, 1, 1))
    prompts_per_step = PLAN.algorithm.prompts_per_step
    assert planned[1] - planned[0] >= 49_990 * prompts_per_step * kept / 1e9


def rows_seen(monkeypatch):
    """Return a list that collects the sizes of all later forward passes."""
    seen, score = [], Policy.score

    def scored(policy, batch):
        seen.append(len(batch))
        return score(policy, batch)

    monkeypatch.setattr(Policy, "score", scored)
    return seen


def limited_to(monkeypatch, rows):
    """Pretend that this machine has the memory for so many rows, of 1 GB each."""

    def estimate_peak(_model, cfg, processes=1):
        return float(memory.count_backward_rows(cfg, processes))

    monkeypatch.setattr(memory, "estimate_peak", estimate_peak)
    monkeypatch.setattr(hardware, "get_available_memory_gb", lambda _: rows / memory.MEMORY_SHARE)


def recorded(run_dir):
    return json.loads((run_dir / "config.json").read_text())["algorithm"]["micro_batch"]


AUTO = ("--algorithm.micro_batch", "auto")
SHORT = ("--checkpoint.every", 1, "--evaluate.every", 0, "--algorithm.steps", 4, "--optimizer.schedule", "constant")


def test_auto_makes_a_run_fit_and_a_resume_keeps_the_choice(recipe, tmp_path, monkeypatch, capsys):
    """The run equals one with that size given. A resume keeps it on a machine with more or less memory."""
    given, chosen = tmp_path / "given", tmp_path / "chosen"
    assert train(recipe, "--run", given, *SHORT, "--algorithm.micro_batch", 3) == 0
    seen = rows_seen(monkeypatch)
    limited_to(monkeypatch, 3)
    assert train(recipe, "--run", chosen, *SHORT, *AUTO, "--algorithm.steps", 2) == 0
    assert max(seen) == 3
    assert recorded(chosen) == 3
    assert "3 rows of the 8 in a forward pass" in " ".join(capsys.readouterr().out.split())
    limited_to(monkeypatch, 1000)
    assert train("--resume", chosen, "--algorithm.steps", 3) == 0
    limited_to(monkeypatch, 1)
    capsys.readouterr()
    assert train("--resume", chosen, "--algorithm.steps", 4) == 0
    assert "--algorithm.micro_batch auto chooses" in " ".join(capsys.readouterr().out.split())
    assert recorded(chosen) == 3
    same_run(given, chosen)


@pytest.mark.slow
def test_resume_with_auto_chooses_again(recipe, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    limited_to(monkeypatch, 3)
    assert train(recipe, "--run", run_dir, *SHORT, *AUTO, "--algorithm.steps", 1) == 0
    limited_to(monkeypatch, 2)
    assert train("--resume", run_dir, "--algorithm.steps", 2, *AUTO) == 0
    assert recorded(run_dir) == 2
    assert "algorithm.micro_batch = auto (was 3)" in capsys.readouterr().out


@pytest.mark.slow
def test_run_that_cannot_fit_is_refused_and_leaves_no_folder(recipe, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(hardware, "get_available_memory_gb", lambda _: 0.5)
    assert train(recipe, "--run", run_dir, *SHORT, *AUTO) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid: ")]
    assert "one row in a forward pass" in line
    assert not run_dir.exists()
    assert train(recipe, "--run", run_dir, *SHORT, "--algorithm.micro_batch", 1, "--algorithm.steps", 1) == 0


@pytest.mark.slow
def test_default_does_not_split_minibatches_that_fit(recipe, tmp_path, monkeypatch):
    """The default run equals one with whole minibatches."""
    whole, default = tmp_path / "whole", tmp_path / "default"
    text = recipe.read_text()
    recipe.write_text("\n".join(line for line in text.splitlines() if "micro_batch" not in line))
    assert recipe.read_text() != text + "\n"
    assert train(recipe, "--run", whole, *SHORT, "--algorithm.micro_batch", 0) == 0
    assert train(recipe, "--run", default, *SHORT) == 0
    assert recorded(default) == 0
    same_run(whole, default)
    assert records(default / "metrics.jsonl")
