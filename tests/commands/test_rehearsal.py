"""Test `pellucid train --dry-run`: it prints what the run will do, loads no model, and writes nothing."""

from __future__ import annotations

import json
import tomllib

import pytest

from conftest import byte_tokenizer, tiny_llama_of
from pellucid import cli, config
from pellucid.policy import load
from runs import train
from worlds import CHAT


def rehearsed(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *map(str, words), "--dry-run"])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_dry_run_prints_settings_plan_and_first_prompt(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    overrides = ["--algorithm.steps", 2, "--optimizer.lr", 3e-4, "--evaluate.every", 0]
    there = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(load, "load_pretrained", None)
        status, out, _ = rehearsed(capsys, recipe, "--run", tmp_path / "run", *overrides)
    assert status == 0
    assert sorted(tmp_path.rglob("*")) == there

    assert train(recipe, "--run", tmp_path / "run", *overrides) == 0
    trained = capsys.readouterr().out
    note, _, out = out.partition("\n")
    assert note == f"! {recipe} runs code with your permissions: {config.read_settings(recipe)['task']['name']}"
    settings, _, rest = out.partition("\nmodel  ")
    written = tmp_path / "again.toml"
    written.write_text(settings)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    stated = config.dump_config(config.load_config(written))
    assert stated == {name: recorded[name] for name in stated}
    assert tomllib.loads(settings)["optimizer"]["lr"] == 3e-4

    plan = [line.strip() for line in rest.splitlines() if line.startswith(("computes", "a step", "the run", "memory"))]
    assert len(plan) == 4
    assert set(plan) <= {line.strip() for line in trained.splitlines()}
    prompt = rest.rstrip().rpartition("\n\n")[2]
    assert prompt.endswith("|")
    assert prompt.replace("\n", "") in trained.replace("\n", "")


@pytest.fixture
def counting(tmp_path):
    """Return a recipe of an environment that has a tool and adds to the questions itself."""
    tokenizer, folder = byte_tokenizer(), tmp_path / "model"
    tokenizer.chat_template = CHAT
    tiny_llama_of(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = tmp_path / "counting.toml"
    file.write_text(f"""
[policy]
model = "{folder}"
[task]
name = "environment"
environment = "tests/worlds.py:Counter"
system = "Count."
[sampler]
max_tokens = 30
[algorithm]
steps = 1
prompts_per_step = 2
group_size = 2
[evaluate]
every = 0
""")
    return file


def test_dry_run_shows_tools_and_question_of_an_environment(counting, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "5000")
    status, out, _ = rehearsed(capsys, counting, "--run", tmp_path / "run")
    assert status == 0
    shown = out.rpartition("\n\n<|im_start|>")[2].rstrip().removesuffix("|")
    for part in ("Count.", "Begin at 0.", '"name": "count"', "How far."):
        assert part in shown
    assert train(counting, "--run", tmp_path / "run") == 0
    assert shown in capsys.readouterr().out, "what the model reads in the run"


def test_dry_run_counts_training_and_held_out_rows(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"question": f"say {n}", "answer": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["--task.name", "dataset", "--task.data", tmp_path / "rows.jsonl", "--task.no-chat"]
    told = {
        ("--task.test-share", 0.2): "32 rows to train on, 8 held out (an evaluation asks 6 of these)",
        (
            "--task.test-share",
            0.2,
            "--evaluate.n",
            99,
        ): "32 rows to train on, 8 held out (an evaluation asks 8 of these)",
        ("--task.test-share", 0, "--evaluate.every", 0): "40 rows to train on, none held out",
    }
    for words, line in told.items():
        status, out, _ = rehearsed(capsys, recipe, "--run", tmp_path / "run", *task, *words)
        assert (status, line in out) == (0, True), out
    status, _, err = rehearsed(capsys, recipe, "--run", tmp_path / "run", *task, "--task.test-share", 0)
    assert status == 2
    assert "test_share = 0 holds no row out for evaluations: set evaluate.every = 0" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--algorithm.objective", "nowhere.py:f"], "nowhere.py: there is no such file"),
        (["--policy.model", "./nowhere"], "there is no such file or folder"),
        (["--runtime.engine", "fsdp"], "Input should be 'auto', 'ddp', 'fsdp2' or 'deepspeed'"),
    ],
)
def test_dry_run_refuses_what_a_run_would_refuse(words, said, recipe, tmp_path, capsys):
    status, _, err = rehearsed(capsys, recipe, "--run", tmp_path / "run", *words)
    assert status == 2
    assert said in err


@pytest.mark.slow
def test_dry_run_refuses_a_folder_that_holds_a_run(recipe, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "run", "--algorithm.steps", 1) == 0
    assert rehearsed(capsys, recipe, "--run", tmp_path / "run")[0] == 2
