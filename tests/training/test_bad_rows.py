"""Tests of bad rows, which are found before step 1, and of runs that bad data ends, which can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mended_task
import pellucid
from conftest import CHARACTERS, character_tokenizer, records, tiny_llama, tiny_recipe
from pellucid.tasks.dataset import clear_dataset_caches
from pellucid.training import run
from runs import answered, in_processes, train, weights

TEMPLATE = (
    "{% for m in messages %}{% if 'e' in m['content'] %}{{ raise_exception('no e here') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


@pytest.fixture
def model(tmp_path):
    """Return a model of 128 positions whose tokenizer has one token without an embedding, the letter z."""
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.add_tokens(["z"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


BAD = {
    "long": ("1" * 119, "its prompt has 119 tokens, more than 118, which leave room for sampler.max_tokens = 10"),
    "template": ("e", "the chat template raises TemplateError: no e here"),
    "token": ("1z2", "token 28 of the tokenizer is beyond the 28 tokens that the model has"),
    "empty": (" ", "the question is empty"),
}


def write_rows(path, questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))


def made(tmp_path, model, train_rows, test_rows=()):
    """Return a recipe with these questions, the held-out ones in a separate file."""
    recipe = tiny_recipe(tmp_path / "bad.toml", model)
    text = recipe.read_text()
    head, tail = text[: text.index("[task]")], text[text.index("[sampler]") :]
    write_rows(tmp_path / "train.jsonl", train_rows)
    write_rows(tmp_path / "test.jsonl", test_rows or [f"{i}+{i}" for i in range(6)])
    task = f'[task]\nname = "dataset"\ndata = "{tmp_path}/train.jsonl"\ntest_data = "{tmp_path}/test.jsonl"\n'
    recipe.write_text(head + task + tail)
    return recipe


def good(n=12):
    return [f"{i}+1?" for i in range(n)]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_bad_row_is_named_before_a_model_is_loaded(kind, split, tmp_path, model, capsys, monkeypatch):
    question, reason = BAD[kind]
    rows = [*good(), question]
    recipe = made(tmp_path, model, *((rows, ()) if split == "train" else (good(), rows)))
    monkeypatch.setattr(run, "build_components", lambda *_: pytest.fail("a model would be loaded"))
    assert train(recipe, "--run", tmp_path / "run") == 2
    [line] = capsys.readouterr().err.splitlines()
    advice = "fix it, or set task.skip_bad_rows = true (docs/how-to/data.md)"
    assert line == f"pellucid: {tmp_path}/{split}.jsonl, line 13: {reason}; {advice}"
    assert not (tmp_path / "run").exists()


def test_error_lists_five_bad_rows_and_counts_the_rest(tmp_path, model, capsys):
    recipe = made(tmp_path, model, [*good(4), *(q for q, _ in BAD.values()), *good(2), *["e1", "e2", "e3"]])
    assert train(recipe, "--run", tmp_path / "run") == 2
    [line] = capsys.readouterr().err.splitlines()
    places = [f"train.jsonl, line {i}: " for i in (5, 6, 7, 8, 11)]
    assert [line.index(place) for place in places] == sorted(line.index(place) for place in places)
    assert line.endswith("; and 2 more bad rows; fix them, or set task.skip_bad_rows = true (docs/how-to/data.md)")


def test_error_states_a_shared_reason_once(tmp_path, model, capsys):
    question, reason = next(iter(BAD.values()))
    recipe = made(tmp_path, model, [*good(4), *[question] * 9])
    assert train(recipe, "--run", tmp_path / "run") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pellucid: {tmp_path}/train.jsonl, line 5, and 8 more rows: {reason}; fix them, or set ")


@pytest.mark.slow
def test_skip_bad_rows_leaves_them_out_with_a_warning(tmp_path, model, capsys):
    bad = [q for q, _ in BAD.values()]
    recipe = made(tmp_path, model, [*good(), *bad], [*(f"{i}*2?" for i in range(6)), *bad])
    settings = ["--run", tmp_path / "run", "--task.skip-bad-rows", "--algorithm.steps", 4, "--evaluate.n", 99]
    assert train(recipe, *settings) == 0
    said = capsys.readouterr().out
    assert "! task.skip_bad_rows leaves out 8 of 26 rows: " in said
    asked = {row["prompt"] for row in records(tmp_path / "run" / "rollouts.jsonl")}
    assert asked == set(good()), "16 draws are more than an epoch"
    assert records(tmp_path / "run" / "evals.jsonl")[0]["n"] == 6
    assert answered("eval", tmp_path / "run") == 0


def test_eval_checks_only_the_rows_that_it_asks(tmp_path, model, capsys):
    recipe = made(tmp_path, model, [*good(), "1" * 119], good(6))
    assert answered("eval", model, "--task", recipe, "--evaluate.n", 99) == 0
    write_rows(tmp_path / "test.jsonl", [*good(6), "1z"])
    clear_dataset_caches()  # as if in another process
    capsys.readouterr()
    assert answered("eval", model, "--task", recipe, "--evaluate.n", 99) == 2
    assert "test.jsonl, line 7: token 28" in capsys.readouterr().err


def test_prompts_of_endless_tasks_are_checked(tmp_path, recipe, capsys):
    settings = ["--task.name", "arithmetic", "--sampler.max-tokens", 120]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pellucid: arithmetic: prompt train/0/0, ")
    assert "tokens, more than 8, which leave room for sampler.max_tokens = 120" in line


# ---------------------------------------------------------------- runs that bad data ends


def error_of(capsys):
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid: ")]
    return line


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_ended_by_bad_data_is_saved_and_resumes_with_fixed_data(tmp_path, recipe, capsys, rounds):
    folder, data = tmp_path / "run", tmp_path / "data.txt"
    data.write_text("bad")
    text = recipe.read_text()
    name = text[text.index('name = "') :].splitlines()[0]
    recipe.write_text(text.replace(name, f'name = "{Path(mended_task.__file__)}:Mended"\ndata = "{data}"'))
    settings = ["--checkpoint.every", 100, "--evaluate.every", 0, "--algorithm.max-rounds", rounds]
    assert train(recipe, "--run", folder, *settings) == 2
    line = error_of(capsys)
    assert "a prompt of 200 tokens leaves no room" in line
    assert line.endswith(f"; saved after step 3: fix the data, then pellucid train --resume {folder}")
    assert (folder / "report.html").is_file()

    exported = tmp_path / "exported"
    assert answered("export", folder, "--output", exported) == 0
    assert AutoModelForCausalLM.from_pretrained(exported, dtype="auto").dtype == torch.float32
    assert answered("export", folder, "--output", exported) == 2
    assert "already exists" in error_of(capsys)

    assert train("--resume", folder) == 2
    assert "saved after step 3" in error_of(capsys), "the data is as it was"
    data.write_text("good")
    assert train("--resume", folder) == 0
    assert len(records(folder / "metrics.jsonl")) == 6
    changed = json.loads((folder / "config.json").read_text())["resumes"][-1]["changed"]
    assert list(changed) == ["task.data"]
    data.write_text("other")
    assert train("--resume", folder, "--algorithm.steps", 7) == 2
    assert "was trained with task.data" in error_of(capsys)


@pytest.mark.slow
def test_two_processes_save_together_when_bad_data_ends_the_run(tmp_path, recipe):
    """Both prompts of step 4 are too long, and each process has one of them."""
    (tmp_path / "data.txt").write_text("bad")
    text = recipe.read_text()
    name = text[text.index('name = "') :].splitlines()[0]
    own = f'name = "{Path(mended_task.__file__)}:Mended"\ndata = "{tmp_path}/data.txt"'
    recipe.write_text(text.replace(name, own))
    words = [recipe, "--run", tmp_path / "run", "--checkpoint.every", 0, "--evaluate.every", 0]
    finished = in_processes(2, "-m", "pellucid", "train", *words, fails=True)
    assert "saved after step 3: fix the data" in finished.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.parametrize("settings", [[], ["--policy.lora", "2"]], ids=["whole", "adapter"])
def test_export_of_the_last_checkpoint_equals_the_saved_model(recipe, tmp_path, settings, capsys):
    few = ["--evaluate.every", 0, "--policy.dtype", "bfloat16", "--algorithm.steps", 2]
    assert train(recipe, "--run", tmp_path / "run", *few, *settings) == 0
    assert answered("export", tmp_path / "run") == 0
    expected, found = weights(tmp_path / "run"), weights(tmp_path / "run", "exported")
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert str(tmp_path / "run" / "exported") in capsys.readouterr().out


@pytest.mark.slow
def test_rows_in_memory_may_change_after_they_ended_the_run(tmp_path, model):
    rows = [{"question": q, "answer": "1"} for q in good()]
    settings = {"model": str(model), "max_tokens": 10, "prompts_per_step": 4, "group_size": 4, "evaluate_every": 0}
    folder, others = tmp_path / "run", [*rows, {"question": "9+9?", "answer": "1"}]
    for step in pellucid.train(data=rows, run=folder, steps=4, **settings):
        if step.step == 2:
            break
    with pytest.raises(pellucid.UserError, match="data differs from"):
        pellucid.train(data=others, resume=folder)
    (folder / "bad_data.txt").write_text("as of a run that its data has ended")
    assert pellucid.train(data=others, resume=folder).finish().finished
    assert len(records(folder / "data.jsonl")) == 13
    assert not (folder / "bad_data.txt").exists()
    with pytest.raises(pellucid.UserError, match="data differs from"):
        pellucid.train(data=rows, resume=folder, steps=5)


def test_bad_rows_in_memory_are_named_and_skipped_on_request(tmp_path, model):
    rows = [{"question": q, "answer": "1"} for q in [*good(), "e"]]
    settings = {"model": str(model), "max_tokens": 10, "prompts_per_step": 4, "group_size": 4, "evaluate_every": 0}
    begun = pellucid.train(data=rows, run=tmp_path / "run", steps=2, **settings)
    with pytest.raises(pellucid.UserError, match=r"data.jsonl, line 13: the chat template raises"):
        begun.finish()
    assert not (tmp_path / "run").exists()
    assert pellucid.train(data=rows, run=tmp_path / "run", steps=2, skip_bad_rows=True, **settings).finish().finished
