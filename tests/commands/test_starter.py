"""Test the files of `pellucid init`: the recipe loads, the reward grades as described, and the data splits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import records
from pellucid import cli, config
from pellucid.tasks.dataset import clear_dataset_caches
from pellucid.types import Completion, UserError, with_split
from runs import train


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Write the starter files into a new working directory, and yield the loaded recipe."""
    folder = tmp_path_factory.mktemp("begun") / "first"
    assert cli.write_starter(folder) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", [*sys.path])
        clear_dataset_caches()  # other tests use other files with the same relative name
        yield config.load_config(Path("recipe.toml"))
        del sys.modules["rewards"]  # other tests import other modules of this name


def answer(text):
    return Completion((1,), (0.0,), text, True)


def test_the_splits_share_no_question_and_three_of_ten_are_held_out(begun):
    tasks = [with_split(begun.task, split) for split in ("train", "test")]
    asked = [{prompt.question for prompt in task.sample(0, 10)} for task in tasks]
    assert list(map(len, asked)) == [7, 3] and not asked[0] & asked[1]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("{}", 1.0), ("2 + 2 = {}", 0.8), ("It is {}.", 0.9), ("", 0.0), ("{} or 99", 0.0), ("{}0", 0.0)],
)
def test_reward_favors_right_and_short_answers(begun, text, reward):
    [prompt] = begun.task.sample(0, 1)
    graded = begun.task.reward(prompt, answer(text.format(prompt.answer)))
    assert graded.value == pytest.approx(reward)


@pytest.mark.slow
def test_starter_recipe_trains_evaluates_and_saves_a_model(begun, model_dir, capsys):
    assert train("recipe.toml", "--policy.model", model_dir, "--algorithm.steps", 1, "--run", "runs/first") == 0
    assert len(records(Path("runs/first/evals.jsonl"))) == 2
    assert Path("runs/first/model/config.json").is_file() and "failed" not in capsys.readouterr().out


def test_init_prints_the_files_and_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli.write_starter(Path("first"))
    *files, following = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in files] == ["first/recipe.toml", "first/rewards.py", "first/data.jsonl"]
    assert following == "next: cd first && pellucid train recipe.toml"
    cli.write_starter(Path("my run"))
    assert capsys.readouterr().out.splitlines()[-1] == "next: cd 'my run' && pellucid train recipe.toml"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir("here")
    cli.write_starter(Path())
    assert capsys.readouterr().out.splitlines()[-1] == "next: pellucid train recipe.toml"


@pytest.mark.parametrize("name", cli.STARTER_FILES)
def test_init_writes_nothing_if_a_file_exists(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"^{tmp_path / name} already exists; nothing was written"):
        cli.write_starter(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}
