"""Tests for a user's own objective and advantage, loaded from a file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from conftest import records
from pellucid import config
from pellucid.algorithm.advantages import Grades, get_advantage_function, grpo
from pellucid.algorithm.objectives import (
    ObjectiveInputs,
    ObjectiveOutput,
    compute_clip_metrics,
    get_objective_function,
    ppo_clip,
)
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import UserError
from runs import same_run, train

MINE = """
from pellucid.algorithm.objectives import ppo_clip
from pellucid.algorithm.advantages import grpo

def value_alone(tokens, cfg):
    return 2 * tokens.advantages * tokens.logprobs

def whole(tokens, cfg):
    return ppo_clip(tokens, cfg)

def compared(grades, cfg):
    return grpo(grades, cfg)

NUMBER = 3
"""


@pytest.fixture
def mine(tmp_path):
    """Return a file with a name that no other test has imported."""
    path = tmp_path / f"own_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(MINE)
    return path


def tokens():
    old = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    logprobs = (old + torch.tensor([[0.4, -0.1]], dtype=torch.float64)).requires_grad_()
    return ObjectiveInputs(logprobs, old, torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))


def test_objective_that_returns_only_values_has_ratios_and_no_clip(mine):
    given = tokens()
    outcome = get_objective_function(f"{mine}:value_alone")(given, GRPOConfig())
    assert torch.autograd.grad(outcome.value.sum(), given.logprobs)[0].tolist() == [[2.0, 2.0]]
    metrics = compute_clip_metrics(outcome, given.mask)
    assert metrics["ratio/mean"].log().tolist() == [pytest.approx([0.4, -0.1])]
    assert metrics["clip/high"].tolist() == metrics["clip/low"].tolist() == [[False, False]]


def test_objective_may_report_what_it_clips(mine):
    given = tokens()
    own, ours = get_objective_function(f"{mine}:whole")(given, GRPOConfig()), ppo_clip(given, GRPOConfig())
    assert isinstance(own, ObjectiveOutput)
    assert compute_clip_metrics(own, given.mask)["clip/high"].tolist() == [[True, False]]
    assert own.value.tolist() == ours.value.tolist()


def test_custom_advantage_is_called_with_the_grades(mine):
    rewards = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    grades = Grades(rewards, rewards, rewards, rewards[..., None], torch.ones(1, 1, dtype=torch.float64))
    found = get_advantage_function(f"{mine}:compared")(grades, GRPOConfig())
    assert found.tolist() == grpo(grades, GRPOConfig()).tolist()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:NUMBER", "is a int: name a function"),
        ("{file}:wole", 'did you mean "whole"?'),
        ("{file}x.py:whole", "there is no such file"),
    ],
)
@pytest.mark.parametrize("find", [get_objective_function, get_advantage_function])
def test_names_of_no_function_raise_a_one_line_error(mine, find, name, said):
    with pytest.raises(UserError) as error:
        find(name.format(file=mine))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("axis", ["objective", "advantage"])
def test_unknown_name_is_refused_with_a_suggestion(axis):
    near = {"objective": "ppo_clap", "advantage": "grpp"}[axis]
    with pytest.raises(ValueError, match=f'{axis} = "{near}" is unknown; did you mean') as error:
        replace(GRPOConfig(), **{axis: near})
    assert "path/to/file.py:function" in str(error.value)


@pytest.mark.slow
def test_custom_functions_match_built_in_run_and_their_file_is_pinned(recipe, mine, tmp_path, capsys):
    assert train(recipe, "--run", tmp_path / "ours") == 0
    own = ["--algorithm.objective", f"{mine}:whole", "--algorithm.advantage", f"{mine}:compared"]
    assert train(recipe, "--run", tmp_path / "own", *own) == 0
    for step in records(tmp_path / "own" / "metrics.jsonl"):
        assert step["effect/advantage"] == 0.0
    settings = json.loads((tmp_path / "own" / "config.json").read_text())
    assert {"algorithm.objective", "algorithm.advantage"} <= settings["digests"].keys()
    assert config.load_config(tmp_path / "own" / "config.json").algorithm.objective == f"{mine}:whole"
    without_effect(tmp_path / "own")
    same_run(tmp_path / "ours", tmp_path / "own")
    mine.write_text(MINE + "\n")
    capsys.readouterr()
    assert train("--resume", tmp_path / "own", "--algorithm.steps", 7) == 2
    assert "a file of sha256" in capsys.readouterr().err


def without_effect(run_dir):
    """Remove `effect/advantage` from the metrics of a run, which only advantages other than `grpo` report."""
    path = run_dir / "metrics.jsonl"
    kept = [{key: x for key, x in step.items() if key != "effect/advantage"} for step in records(path)]
    path.write_text("".join(json.dumps(step) + "\n" for step in kept))
