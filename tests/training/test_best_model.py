"""Tests that a run keeps the model of its best evaluation, and ends after evaluations without a new best."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import mostly_slow, records
from pellucid import cli
from pellucid.inspect.run_reader import RunReader
from pellucid.policy.policy import Policy
from pellucid.reporting.loggers import JsonlLogger
from pellucid.serve import api
from pellucid.training import run
from pellucid.training.evaluate import estimate_share
from runs import answered, launch, same_run, same_weights, train, weights

ALL = ["--checkpoint.keep_finished", "all", "--checkpoint.keep_last", 9, "--evaluate.n", 20]
RISES_AND_FALLS = {0: 4, 2: 10, 4: 18, 6: 2}
"""Right answers out of 20, by step."""


@pytest.fixture
def graded(monkeypatch):
    """Return a function that sets the number of right answers out of 20 by step; all else of an evaluation is real."""
    evaluate = run.evaluate_policy

    def grade(right):
        def evaluated(cfg, parts):
            found, groups = evaluate(cfg, parts)
            correct = tuple(int(i < right[parts.state.step]) for i in range(20))
            return replace(found, greedy=estimate_share(correct), greedy_correct=correct), groups

        monkeypatch.setattr(run, "evaluate_policy", evaluated)

    return grade


def best(run_dir):
    return json.loads((run_dir / "model-best" / "evaluation.json").read_text())


def is_of_step(run_dir, step):
    """Return whether the kept model has the weights of a step and records that step."""
    masters = load_file(run_dir / "checkpoints" / f"step-{step:06d}" / "policy.safetensors")
    kept = weights(run_dir, "model-best")
    return best(run_dir)["step"] == step and all(torch.equal(kept[name], x) for name, x in masters.items())


def test_the_model_of_the_best_evaluation_is_kept_and_named(recipe, tmp_path, capsys, graded):
    graded(RISES_AND_FALLS)
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, *ALL) == 0
    assert is_of_step(run_dir, 4)
    assert not is_of_step(run_dir, 6)
    assert best(run_dir)["value"] == 0.9
    printed = capsys.readouterr().out
    end = printed.splitlines()[-2:]
    assert end[0] == f"best     {run_dir / 'model-best'} (step 4, greedy accuracy 0.90 [0.70, 0.97])"
    assert end[1].endswith(f"worse than the best, by more than chance: use {run_dir / 'model-best'}")
    assert printed.count("! After step 6, held-out greedy accuracy 0.10") == 1
    report = (run_dir / "report.html").read_text()
    assert "step 4, greedy accuracy 0.90 [0.70, 0.97], in model-best/" in report
    assert "After step 6, held-out greedy accuracy 0.10" in report
    AutoModelForCausalLM.from_pretrained(run_dir / "model-best")
    assert not list(run_dir.glob("*.partial")) + list(run_dir.glob("*.replaced"))


@pytest.mark.slow
def test_tie_replaces_no_best_model_and_the_first_one_is_not_kept(recipe, tmp_path, graded, capsys):
    graded({0: 4, 2: 10, 4: 10, 6: 10})
    assert train(recipe, "--run", tmp_path / "ties", *ALL) == 0
    assert is_of_step(tmp_path / "ties", 2)
    graded({0: 10, 2: 10, 4: 9, 6: 10})
    capsys.readouterr()
    assert train(recipe, "--run", tmp_path / "start", *ALL) == 0
    assert not (tmp_path / "start" / "model-best").exists()
    said = "best     before training, greedy accuracy 0.50 [0.30, 0.70]: no evaluation since was better"
    assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.mark.slow
def test_accuracy_warning_is_printed_once_across_a_resume(recipe, tmp_path, monkeypatch, graded, capsys):
    graded({0: 18, 2: 2, 4: 2, 6: 2})
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        dies_in_the_next_step(patched)
        assert train(recipe, "--run", run_dir, *ALL) == 130
    assert train("--resume", run_dir) == 0
    printed = capsys.readouterr().out
    assert printed.count("! After step 2, held-out greedy accuracy 0.10") == 1
    assert printed.count("! After step") == 1
    assert printed.splitlines()[-1].endswith("worse than the best, by more than chance: use the best one")
    found = {each["key"]: each for each in RunReader(run_dir).find_explanations()}
    assert found["accuracy_fell"]["step"] == 2


@pytest.mark.slow
def test_no_best_model_is_saved_with_no_keep_best(recipe, tmp_path, graded, capsys):
    graded(RISES_AND_FALLS)
    assert train(recipe, "--run", tmp_path / "run", *ALL, "--checkpoint.no-keep-best") == 0
    assert not (tmp_path / "run" / "model-best").exists()
    assert "0.90 [0.70, 0.97]: its model was not kept" in capsys.readouterr().out


@pytest.mark.slow
def test_best_model_of_the_last_step_shares_the_weights_file(recipe, tmp_path, graded):
    graded({0: 4, 2: 3, 4: 5, 6: 18, 8: 1})
    run_dir = tmp_path / "run"
    assert train(recipe, "--run", run_dir, *ALL) == 0
    assert is_of_step(run_dir, 6)
    files = [run_dir / name / "model.safetensors" for name in ("model", "model-best")]
    assert files[0].samefile(files[1])
    assert not (run_dir / "model" / "config.json").samefile(run_dir / "model-best" / "config.json")
    assert train("--resume", run_dir, "--algorithm.steps", 8) == 0
    assert is_of_step(run_dir, 6)
    assert any(not torch.equal(weights(run_dir)[name], x) for name, x in weights(run_dir, "model-best").items())


def dies_while_it_saves(patched):
    """Die during the save of a folder that is to replace an earlier one."""
    save = Policy.save

    def dying(policy, folder, *rest):
        save(policy, folder, *rest)
        if folder.name == "model-best.partial" and (folder.parent / "model-best").exists():
            raise KeyboardInterrupt

    patched.setattr(Policy, "save", dying)


def dies_before_it_saves(patched):
    """Die when the evaluation is logged."""
    log = JsonlLogger.log_evaluation

    def dying(logger, step, evaluation):
        log(logger, step, evaluation)
        if step == 4:
            raise KeyboardInterrupt

    patched.setattr(JsonlLogger, "log_evaluation", dying)


def dies_in_the_next_step(patched):
    update = run.grpo.update_policy

    def dying(policy, *rest):
        dying.calls += 1
        if dying.calls == 5:
            raise KeyboardInterrupt
        return update(policy, *rest)

    dying.calls = 0
    patched.setattr(run.grpo, "update_policy", dying)


def dies_before_the_last_model(patched):
    def dying(*_):
        raise KeyboardInterrupt

    patched.setattr(run, "save_model", dying)


DEATHS = [dies_while_it_saves, dies_before_it_saves, dies_in_the_next_step, dies_before_the_last_model]
CASES = [(death, every, "falls") for death in DEATHS for every in (2, 3)] + [
    (death, 2, "rises") for death in (dies_before_it_saves, dies_before_the_last_model)
]


@pytest.mark.slow
@pytest.mark.parametrize(("death", "every", "accuracy"), mostly_slow(CASES, every=len(CASES)))
def test_a_run_killed_anywhere_keeps_the_same_best_model(recipe, tmp_path, monkeypatch, graded, death, every, accuracy):
    graded(RISES_AND_FALLS if accuracy == "falls" else {0: 4, 2: 10, 4: 18, 6: 19})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = [*ALL, "--checkpoint.every", every]
    assert train(recipe, "--run", whole, *settings) == 0
    with monkeypatch.context() as patched:
        death(patched)
        assert train(recipe, "--run", killed, *settings) == 130
    assert best(killed)["step"] in (2, 4), "the one or the other is there"
    AutoModelForCausalLM.from_pretrained(killed / "model-best")
    assert train("--resume", killed) == 0
    same_run(whole, killed)
    assert best(whole)["step"] == (4 if accuracy == "falls" else 6)


@pytest.mark.slow
def test_best_model_of_discarded_steps_is_deleted_at_a_resume(recipe, tmp_path, monkeypatch, graded, capsys):
    graded(RISES_AND_FALLS)
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        dies_in_the_next_step(patched)
        assert train(recipe, "--run", run_dir, *ALL, "--checkpoint.every", 3) == 130
    assert best(run_dir)["step"] == 4
    graded({4: 1, 6: 2})
    assert train("--resume", run_dir, "--optimizer.lr", "1e-5") == 0
    assert not (run_dir / "model-best").exists()
    assert "best     step 2, greedy accuracy 0.50 [0.30, 0.70]: its model was not kept" in capsys.readouterr().out


def test_full_disk_loses_only_the_best_model(recipe, tmp_path, monkeypatch, graded, capsys):
    graded(RISES_AND_FALLS)
    run_dir, save = tmp_path / "run", Policy.save

    def full(policy, folder, *rest):
        save(policy, folder, *rest)
        if folder.name == "model-best.partial" and (folder.parent / "model-best").exists():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save", full)
    assert train(recipe, "--run", run_dir, *ALL) == 0
    printed = capsys.readouterr().out
    assert printed.count("model-best could not be saved ([Errno 28] No space left on device); training goes on") == 1
    assert is_of_step(run_dir, 2), "the earlier one is whole"
    assert not list(run_dir.glob("*.partial"))
    assert (run_dir / "model").is_dir()
    assert "best     step 4, greedy accuracy 0.90 [0.70, 0.97]: its model was not kept" in printed


@pytest.mark.slow
def test_patience_ends_a_run_after_evaluations_without_a_new_best(recipe, tmp_path, graded, capsys):
    graded({0: 4, 2: 10, 4: 10, 6: 3, 8: 19, 10: 1})
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    settings = [*ALL, "--algorithm.steps", 10, "--checkpoint.every", 4, "--optimizer.schedule", "constant"]
    assert train(recipe, "--run", run_dir, *settings, "--evaluate.patience", 2) == 0
    assert [record["step"] for record in records(run_dir / "metrics.jsonl")][-1] == 6
    assert best(run_dir)["step"] == 2
    assert (run_dir / "model").is_dir()
    assert (run_dir / "report.html").is_file()
    assert "after step 6 of 10: no new best in 2 evaluations (evaluate.patience)" in capsys.readouterr().out
    assert train("--resume", run_dir) == 0
    assert "finished after step 6: its evaluations found no new best; --evaluate.patience 0" in capsys.readouterr().out
    shutil.rmtree(run_dir / "model")  # as if killed before it was saved
    assert train("--resume", run_dir) == 0
    assert (run_dir / "model").is_dir()
    assert [record["step"] for record in records(run_dir / "metrics.jsonl")][-1] == 6
    assert train("--resume", run_dir, "--evaluate.patience", 0) == 0
    assert train(recipe, "--run", whole, *settings) == 0
    same_run(whole, run_dir)
    assert best(run_dir)["step"] == 8


@pytest.mark.slow
def test_best_model_is_evaluated_and_served_with_the_task_of_its_run(recipe, tmp_path, graded, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    with monkeypatch.context():
        graded(RISES_AND_FALLS)
        assert train(recipe, "--run", run_dir, *ALL) == 0
    policies, names, evaluate = [], [], run.evaluate

    def asked(name, task, prompts, sampler, *rest):
        policies.append(sampler.policy)
        names.append(name)
        return evaluate(name, task, prompts, sampler, *rest)

    monkeypatch.setattr(run, "evaluate", asked)
    capsys.readouterr()
    assert answered("eval", run_dir / "model-best") == 0
    assert "asked the default task" not in capsys.readouterr().out
    assert names[0].endswith("digits_task.py:Digits")
    served = api.load_served_model(cli.parse_command_line(["serve", str(run_dir / "model-best"), "--dtype", "float32"]))
    assert type(served.task.task).__name__ == "Digits"
    for policy in (policies[0], served.policy):
        assert all(torch.equal(policy.weights()[name], x) for name, x in weights(run_dir, "model-best").items())


SHARDED = [
    ["fsdp2"],
    *(pytest.param(["deepspeed", "--runtime.zero-stage", stage], marks=pytest.mark.deepspeed) for stage in (2, 3)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_on_cpus")
@pytest.mark.parametrize("settings", [[], ["--policy.lora", 2]], ids=["whole weights", "adapter"])
@pytest.mark.parametrize("engine", SHARDED, ids=["fsdp2", "ZeRO-2", "ZeRO-3"])
def test_two_sharded_processes_keep_the_same_best_model_as_one(recipe, tmp_path, engine, settings):
    """Saving the best model changes no bit of the training."""
    settings = [*ALL, *settings, "--optimizer.lr", "3e-3", "--algorithm.steps", 8, "--checkpoint.every", 0]
    sharded = [*settings, "--runtime.engine", *engine]
    runs = {name: tmp_path / name for name in ("one", "two", "without")}
    assert train(recipe, "--run", runs["one"], *settings) == 0
    launch(2, recipe, "--run", runs["two"], *sharded)
    launch(2, recipe, "--run", runs["without"], *sharded, "--checkpoint.no-keep-best")
    step = best(runs["one"])["step"]
    assert 0 < step < 8, "saved in the middle of training"
    assert best(runs["two"]) == pytest.approx(best(runs["one"]))
    same_weights(weights(runs["two"], "model-best"), weights(runs["one"], "model-best"), 1e-4)
    if "--policy.lora" in settings:
        adapters = [weights(runs[name], "model-best/adapter") for name in ("two", "one")]
        same_weights(*adapters, 1e-4)
    shutil.rmtree(runs["two"] / "model-best")
    same_run(runs["without"], runs["two"])
