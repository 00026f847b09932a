"""Tests of `algorithm.data_epochs`, the passes over a data set that determine the number of steps."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from conftest import records
from pellucid.config import load_config
from pellucid.types import UserError
from runs import train

SMALL = (
    *("--algorithm.group-size", "2", "--sampler.max-tokens", "2", "--evaluate.every", "0", "--checkpoint.every", "0"),
    *("--algorithm.prompts-per-step", "4"),
)


@pytest.fixture
def rows(tmp_path):
    """Return a file of ten rows to train on."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(10)))
    return path


def settings_of(run):
    return json.loads((run / "config.json").read_text())["algorithm"]


@pytest.mark.parametrize(("epochs", "asked"), [("2", {2}), ("1.2", {1, 2})])
def test_each_row_is_asked_once_per_epoch(epochs, asked, recipe, rows, tmp_path):
    """Twenty prompts are five steps of four, twelve are three."""
    run = tmp_path / "run"
    data = ["--task.name", "dataset", "--task.data", str(rows), "--task.test-share", "0"]
    assert train(recipe, "--run", run, *SMALL, *data, "--algorithm.data-epochs", epochs) == 0
    steps = {"2": 5, "1.2": 3}[epochs]
    assert len(records(run / "metrics.jsonl")) == settings_of(run)["steps"] == steps
    assert settings_of(run)["data_epochs"] == 0, "a resume keeps the number of steps"
    counts = Counter(rollout["prompt"] for rollout in records(run / "rollouts.jsonl"))
    assert len(counts) == 10
    assert {count // 2 for count in counts.values()} == asked


def test_epoch_of_a_curriculum_is_its_pool(recipe, rows, tmp_path):
    run = tmp_path / "run"
    curriculum = ["--task.name", "curriculum", "--task.pool", "8", "--task.task.name", "dataset"]
    data = ["--task.task.data", str(rows), "--task.task.test-share", "0"]
    assert train(recipe, "--run", run, *SMALL, *curriculum, *data, "--algorithm.data-epochs", "1") == 0
    assert settings_of(run)["steps"] == 2


def test_task_that_generates_questions_refuses_data_epochs(recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", *SMALL, "--algorithm.data-epochs", "1") == 2
    assert "algorithm.steps" in capsys.readouterr().err


def test_steps_and_data_epochs_exclude_each_other(tmp_path):
    """Steps given later replace the epochs of a recipe; both at once are refused."""
    recipe = tmp_path / "r.toml"
    recipe.write_text("[algorithm]\ndata_epochs = 2\n")
    cfg = load_config(recipe, ["--algorithm.steps", "3"])
    assert (cfg.algorithm.steps, cfg.algorithm.data_epochs) == (3, 0.0)
    recipe.write_text("[algorithm]\nsteps = 60\n")
    assert load_config(recipe, ["--algorithm.data-epochs", "2"]).algorithm.data_epochs == 2
    assert load_config(recipe, ["--algorithm.steps", "3", "--algorithm.data-epochs", "0"]).algorithm.steps == 3
    with pytest.raises(UserError) as told:
        load_config(recipe, ["--algorithm.steps", "3", "--algorithm.data-epochs", "2"])
    said = "--algorithm.steps and --algorithm.data_epochs both say how long a run is: leave one out"
    assert str(told.value) == said
