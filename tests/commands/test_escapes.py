"""Test that commands escape control characters in the names of files and folders."""

from __future__ import annotations

import shutil

import pytest

from conftest import tiny_recipe
from made_runs import small_run
from runs import answered

EVIL = "\x1b]0;owned\x07\x1b[2J"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J"


def said(capfd, status=0, *, words):
    assert answered(*words) == status
    output = "".join(capfd.readouterr())
    assert not {"\x1b", "\x07"} & set(output), repr(output)
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model_dir):
    """Return a run folder with control characters in its name, and the command line that trains it."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = tiny_recipe(folder / "tiny.toml", model_dir)
    few = ["--algorithm.steps", 1, "--evaluate.every", 0, "--log.no-tensorboard"]
    return folder / f"run{EVIL}", ["train", recipe, "--run", folder / f"run{EVIL}", *few]


@pytest.mark.slow
def test_train_and_resume_escape_run_folder_names(trained, capfd):
    run, words = trained
    assert SHOWN in said(capfd, words=words)
    assert f"{SHOWN} goes on after step 1" in said(capfd, words=["train", "--resume", run, "--algorithm.steps", 2])


def test_push_dry_run_escapes_file_names(trained, capfd):
    run, words = trained
    if not (run / "model").exists():
        assert answered(*words) == 0
    shutil.copy(run / "model" / "config.json", run / "model" / f"{EVIL}.json")
    capfd.readouterr()
    assert SHOWN in said(capfd, words=["push", run, "me/tiny", "--dry-run"])


def test_init_and_look_escape_output_paths(tmp_path, capfd):
    assert SHOWN in said(capfd, words=["init", tmp_path / EVIL])
    page, run = tmp_path / f"{EVIL}.html", small_run(tmp_path / "run", steps=1)
    assert SHOWN in said(capfd, words=["look", run, "--output", page])
