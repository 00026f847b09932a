"""Test the agent task, and train, evaluate and resume with it through the command line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import agents
from conftest import records
from pellucid import config
from pellucid.environments.agents import AgentSpec
from pellucid.rewards.terms import RewardTerm
from pellucid.rollout.native import NativeSampler
from pellucid.tasks.agent import Agent
from pellucid.types import Completion, ConversationOutcome, Prompt, UserError
from runs import answered, same_run, train
from worlds import TEMPLATE

FILE = Path(agents.__file__)
SOLVE = f"{FILE}:solve"
SAID = Completion((1,), (0.0,), "12x", True)


def said(**outcome):
    return Completion((1,), (0.0,), "12x", True, outcome=ConversationOutcome(**outcome))


def test_return_value_of_the_agent_is_the_reward():
    task = Agent(run=SOLVE, data="a.jsonl")
    reward = task.reward(Prompt("p", "say"), said(reward=0.25))
    assert (reward.value, reward.is_continuous, reward.error) == (0.25, True, "")
    assert task.reward(Prompt("p", "say"), said(reward=1.0)).is_correct
    assert not task.environment_spec.has_rewards


def test_other_terms_add_to_the_reward_of_the_agent_or_replace_it():
    task = Agent(run=SOLVE, data="a.jsonl", rewards=(RewardTerm("exact", weight=0.5),))
    assert task.environment_spec.has_rewards
    prompt = Prompt("p", "say", "12x")
    assert task.reward(prompt, said(reward=2.0)).value == 2.5
    alone = task.reward(prompt, said(reward=None))
    assert (alone.value, alone.correct) == (0.5, True)
    weighed = Agent(run=SOLVE, data="a.jsonl", rewards=(RewardTerm("exact"), RewardTerm("environment", weight=0.1)))
    assert weighed.reward(prompt, said(reward=2.0)).value == pytest.approx(1.2)


def test_no_term_grades_a_failed_agent():
    for terms in ((), (RewardTerm("exact"),)):
        reward = Agent(run=SOLVE, data="a.jsonl", rewards=terms).reward(Prompt("p", "say", "12x"), said(error="lost"))
        assert reward.failed
        assert reward.error == "environment: lost"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"run": " "}, 'run = "" must be "path/to/file.py:function", or a command'),
        ({"timeout": 0.0}, "timeout = 0.0 must be a positive number of seconds"),
        ({"data": ""}, 'data = "" must be files'),
        ({"run": f"{FILE}:solves"}, 'has no "solves"; did you mean "solve"?'),
        ({"run": f"{FILE}:TOOLS"}, "is a list: name a function"),
    ],
)
def test_invalid_settings_raise_an_error(settings, told):
    with pytest.raises(Exception, match=re.escape(told)):
        Agent(**{"run": SOLVE, "data": "a.jsonl", **settings})


def test_run_that_names_no_function_is_a_command():
    functions = ("agent.py:solve", "package.agent:solve", f"{FILE}:solve")
    commands = ("python agent.py", "./agent", "python agent.py --at 127.0.0.1:8000", "docker run agent:latest")
    assert [AgentSpec(run).load_function() for run in commands] == [None] * 4
    assert AgentSpec(SOLVE).load_function() is agents.solve is AgentSpec(agents.solve).load_function()
    for run in functions[:2]:
        with pytest.raises(UserError):
            AgentSpec(run).load_function()


@pytest.fixture
def trained(recipe, tmp_path):
    """Return a recipe with two kinds of agents: some rewrite their history, others answer or fail as their rows
    specify.
    """
    kinds = ("talks", "rewrites", "draws", "raises")
    rows = [{"question": f"{'ab'[n % 2]}{n}+", "does": kinds[n % 4], "turns": 2} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    task = f'name = "agent"\nrun = "{SOLVE}"\ndata = "{tmp_path}/rows.jsonl"\ntest_share = 0.3\n'
    text = re.sub(r"(?<=\[task\]\n)\s*name = .*\n", task, recipe.read_text())
    text = text.replace("[policy]", f'[policy]\ntemplate = "{tmp_path}/chat.jinja"')
    text = text.replace("max_tokens = 10", "max_tokens = 40\nturn_tokens = 6\nturns = 4")
    recipe.write_text(text.replace("steps = 6", "steps = 3"))
    return recipe


@pytest.mark.slow
def test_agent_is_trained_and_a_resumed_run_gives_identical_results(trained, tmp_path, monkeypatch, undisturbed):
    settings = ["--checkpoint.every", 1, "--evaluate.every", 3, "--policy.deterministic"]
    whole, killed = undisturbed(trained, *settings), tmp_path / "killed"
    steps = records(whole / "metrics.jsonl")
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0 for step in steps)
    assert max(step["turns/mean"] for step in steps) > 1
    failed = [r for r in records(whole / "rollouts.jsonl") if "error" in r]
    assert failed
    assert all("ValueError: no idea (agents.py, line" in r["error"] for r in failed)
    [after] = [row for row in records(whole / "evals.jsonl") if row["step"] == 3]
    assert after["n"] == 6
    generate = NativeSampler.generate

    def dying(self, prompts, sampling):
        if sampling.seed == "0/1":
            raise KeyboardInterrupt
        return generate(self, prompts, sampling)

    with monkeypatch.context() as patched:
        patched.setattr(NativeSampler, "generate", dying)
        assert train(trained, "--run", killed, *settings) == 130
    assert train("--resume", killed) == 0
    same_run(whole, killed)


@pytest.mark.slow
def test_model_is_evaluated_by_an_agent_command(trained, model_dir, tmp_path, capsys):
    command = shlex.join([sys.executable, str(FILE)])
    text = trained.read_text().replace(SOLVE, command)
    trained.write_text(text)
    assert config.load_config(trained).task.run == command
    few = ["--evaluate.n", 2, "--evaluate.k", 1]
    told = ["--show", 0, "--output", tmp_path / "answers.jsonl"]
    assert answered("eval", model_dir, "--task", trained, *few, *told) == 0
    answers = records(tmp_path / "answers.jsonl")
    assert {row["drawn"] for row in answers} == {"greedy", "sample"}
    assert all(row["reward"] > 0 for row in answers)
