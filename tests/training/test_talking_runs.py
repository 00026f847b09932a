"""Tests of runs whose answers are conversations: training, interruption, resume, evaluation and refusals."""

from __future__ import annotations

import json

import pytest

from conftest import byte_tokenizer, records, tiny_llama_of
from pellucid.environments.pool import EnvironmentPool
from pellucid.reporting import token_files
from runs import answered, same_run, train
from worlds import CHAT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a tiny model with a chat template that does not support tools."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tiny_llama_of(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, model):
    """Return a recipe with an environment that asks its own questions, and a reward function that inspects it."""
    file = tmp_path / "recipe.toml"
    file.write_text(f"""
[policy]
model = "{model}"
[task]
name = "environment"
environment = "tests/worlds.py:Parrot"
system = "Talk."
rewards = [{{ name = "environment" }}, {{ name = "tests/worlds.py:lengths_heard", weight = 0.5 }}]
[sampler]
max_tokens = 90
turns = 3
turn_tokens = 6
[algorithm]
steps = 4
prompts_per_step = 2
group_size = 4
[evaluate]
every = 2
n = 3
k = 2
[checkpoint]
every = 1
""")
    return file


@pytest.mark.slow
def test_training_with_an_environment_records_its_conversations(recipe, tmp_path):
    run = tmp_path / "run"
    assert train(recipe, "--run", run) == 0
    for record in records(run / "rollouts.jsonl"):
        turns = len(record["given"]) + 1
        assert record["parts"]["lengths_heard"] == pytest.approx(turns / 10)
        assert record["reward"] == pytest.approx(
            record["parts"]["environment"] + 0.5 * record["parts"]["lengths_heard"]
        )
        assert int(record["parts"]["environment"]) == turns
    metrics = records(run / "metrics.jsonl")
    assert all(step["turns/mean"] > 1 for step in metrics)
    assert [e["n"] for e in records(run / "evals.jsonl")] == [3, 3, 3]


@pytest.mark.slow
def test_tokens_of_conversations_are_recorded(recipe, tmp_path):
    run = tmp_path / "run"
    settings = ("--log.tokens", 2, "--log.token_steps", 1, "--evaluate.every", 0, "--algorithm.steps", 2)
    assert train(recipe, "--run", run, *settings) == 0
    assert token_files.list_recorded_steps(run) == [1, 2]
    said = {(each["step"], i % 8): each for i, each in enumerate(records(run / "rollouts.jsonl"))}
    for step in (1, 2):
        table = token_files.read_tokens(run, step)
        rows, about = table.to_pylist(), token_files.get_token_metadata(table)
        assert about["silent"] == {}
        for i in range(8):
            group, number = divmod(i, 4)
            mine = [row for row in rows if (row["group"], row["completion"], row["branch"]) == (group, number, 0)]
            record = said[step, i]
            given = {t for start, end in record["given"] for t in range(start, end)}
            assert [row["token"] for row in mine] == record["tokens"]
            assert [t for t, row in enumerate(mine) if row["kind"] == "given"] == sorted(given)
            assert all((row["logprob_after"] is None) == (row["kind"] == "given") for row in mine)
            turns = about["turns"].get(f"{group}/{number}/0")
            assert turns == [[], *([["environment"], []] * len(record["given"]))]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_a_run_killed_in_the_middle_of_a_conversation_resumes_to_the_same_bits(recipe, tmp_path, monkeypatch, sampler):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = ["--sampler.name", sampler, "--policy.deterministic"]
    assert train(recipe, "--run", whole, *settings) == 0
    tell, told = EnvironmentPool.send_turn, []

    def dying(self, number, said):
        told.append(number)
        if len(told) == 70:
            raise KeyboardInterrupt
        tell(self, number, said)

    with monkeypatch.context() as patched:
        patched.setattr(EnvironmentPool, "send_turn", dying)
        assert train(recipe, "--run", killed, *settings) == 130
    assert train("--resume", killed) == 0
    same_run(whole, killed)


@pytest.mark.slow
def test_model_without_tool_support_trains_on_a_task_with_a_tool(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["--task.name", "calculator", "--sampler.max_tokens", 40, "--algorithm.steps", 1, "--evaluate.every", 0]
    assert train(recipe, "--run", run, *words) == 0
    assert "<tool_call>" in capsys.readouterr().out
    assert records(run / "rollouts.jsonl")[0]["parts"] == {"called": 0.0, "right": 0.0}


@pytest.mark.parametrize(
    ("words", "told"),
    {
        "no file": (["--task.environment", "worls.py:Parrot"], "worls.py: there is no such file"),
        "no class": (["--task.environment", "tests/worlds.py:Parot"], 'has no "Parot"; did you mean "Parrot"?'),
        "no world": (["--task.environment", ""], 'environment = "" must be "path/to/file.py:Class", or tools'),
        "nothing that is worth": (
            ["--task.environment", "tests/worlds.py:reply", "--task.rewards", "environment"],
            "the environment has no get_reward()",
        ),
        "no turn": (["--sampler.turns", 0], "sampler.turns: Input should be greater than 0"),
        "no time": (["--task.timeout", 0], "timeout = 0.0 must be a positive number of seconds"),
        "a text": (["--task.environment", "tests/worlds.py:CHAT"], "must be a class or a function, got str"),
    }.values(),
)
def test_invalid_conversation_settings_exit_with_one_line(recipe, tmp_path, capsys, words, told):
    run = tmp_path / "run"
    assert train(recipe, "--run", run, *words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.slow
def test_an_environment_that_always_fails_is_refused_before_step_1(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    assert (
        train(recipe, "--run", run, "--task.environment", "tests/worlds.py:Broken", "--task.rewards", "environment")
        == 2
    )
    assert "reset: RuntimeError: no room (worlds.py, line" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluation_answers_are_conversations(recipe, tmp_path, capsys):
    run, answers = tmp_path / "run", tmp_path / "answers.jsonl"
    assert train(recipe, "--run", run, "--algorithm.steps", 1, "--evaluate.every", 0) == 0
    assert answered("eval", run, "--output", answers) == 0
    assert "reward@2" in capsys.readouterr().out
    assert len([json.loads(line) for line in answers.read_text().splitlines()]) == 3 * (1 + 2)
