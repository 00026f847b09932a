"""`pellucid train --dry-run`: what it prints is what the run then is; nothing is loaded, and nothing is written."""

from __future__ import annotations

import json
import tomllib

import pytest

from pellucid import cli, config
from pellucid.policy import pretrained
from runs import train


def rehearsed(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *map(str, words), "--dry-run"])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_it_prints_the_settings_of_the_run_its_plan_and_its_first_prompt(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    overrides = ["--algorithm.steps", 2, "--optimizer.lr", 3e-4, "--evaluate.every", 0]
    there = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(pretrained, "load", None)
        status, out, _ = rehearsed(capsys, recipe, "--run", tmp_path / "run", *overrides)
    assert status == 0
    assert sorted(tmp_path.rglob("*")) == there

    assert train(recipe, "--run", tmp_path / "run", *overrides) == 0
    trained = capsys.readouterr().out
    note, _, out = out.partition("\n")
    assert note == f"! {recipe} runs code as you: {config.read(recipe)['task']['name']}"
    settings, _, rest = out.partition("\nmodel  ")
    written = tmp_path / "again.toml"
    written.write_text(settings)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    stated = config.dump(config.load(written))
    assert stated == {name: recorded[name] for name in stated}
    assert tomllib.loads(settings)["optimizer"]["lr"] == 3e-4

    plan = [line.strip() for line in rest.splitlines() if line.startswith(("computes", "a step", "the run", "memory"))]
    assert len(plan) == 4
    assert set(plan) <= {line.strip() for line in trained.splitlines()}
    prompt = rest.rstrip().rpartition("\n\n")[2]
    assert prompt.endswith("|")
    assert prompt.replace("\n", "") in trained.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--algorithm.objective", "nowhere.py:f"], "nowhere.py: there is no such file"),
        (["--policy.model", "./nowhere"], "there is no such file or folder"),
        (["--runtime.engine", "fsdp"], "Input should be 'auto', 'ddp', 'fsdp2' or 'deepspeed'"),
    ],
)
def test_what_a_run_would_refuse_it_refuses(words, said, recipe, tmp_path, capsys):
    status, _, err = rehearsed(capsys, recipe, "--run", tmp_path / "run", *words)
    assert status == 2
    assert said in err


def test_a_folder_that_is_taken_is_told_here_too(recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", "--algorithm.steps", 1) == 0
    assert rehearsed(capsys, recipe, "--run", tmp_path / "run")[0] == 2
