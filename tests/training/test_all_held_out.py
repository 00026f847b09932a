"""Tests of `evaluate.n = 0`, which asks every held-out prompt."""

from __future__ import annotations

import json

import pytest

from conftest import records
from pellucid import config
from pellucid.training.evaluate import sample_held_out_prompts
from pellucid.types import UserError, with_split
from runs import answered, train


def write(path, questions):
    path.write_text("".join(json.dumps({"question": question, "answer": "1"}) + "\n" for question in questions))
    return path


@pytest.fixture
def held_out(recipe, tmp_path):
    """Return the recipe with 7 held-out rows, two of which have the same question."""
    text = recipe.read_text()
    train_file = write(tmp_path / "train.jsonl", [f"{i}+1?" for i in range(12)])
    test_file = write(tmp_path / "test.jsonl", [*(f"{i}*2?" for i in range(6)), "5*2?"])
    task = f'[task]\nname = "dataset"\ndata = "{train_file}"\ntest_data = "{test_file}"\n'
    recipe.write_text(text[: text.index("[task]")] + task + text[text.index("[sampler]") :])
    return recipe


def test_each_question_is_asked_once(held_out):
    task = with_split(config.load_config(held_out).task, "test")
    asked = sorted(prompt.question for prompt in sample_held_out_prompts(task, 0))
    assert asked == [f"{i}*2?" for i in range(6)]
    assert len(sample_held_out_prompts(task, 4)) <= 4


def test_dry_run_prints_the_number_of_held_out_prompts(held_out, tmp_path, capsys):
    assert train(held_out, "--run", tmp_path / "run", "--evaluate.n", 0, "--dry-run") == 0
    assert "7 held out (an evaluation asks 7 of these)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_run_and_eval_command_ask_all_held_out_prompts(held_out, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert train(held_out, "--run", run_dir, "--evaluate.n", 0, "--algorithm.steps", 1) == 0
    assert [record["n"] for record in records(run_dir / "evals.jsonl")] == [6, 6]
    capsys.readouterr()
    assert answered("eval", run_dir) == 0
    assert "6 prompts" in " ".join(capsys.readouterr().out.split())


def test_task_without_a_fixed_number_of_prompts_is_refused(recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", "--evaluate.n", 0) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pellucid: evaluate.n = 0 asks all held-out prompts")
    assert line.endswith("such as evaluate.n = 100")
    assert not (tmp_path / "run").exists()
    cfg = config.load_config(None, ["--evaluate.n", "0"])
    with pytest.raises(UserError, match=r"evaluate\.n = 0"):
        sample_held_out_prompts(with_split(cfg.task, "test"), 0)
