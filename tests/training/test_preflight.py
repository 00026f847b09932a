"""The look before step 1 says the obvious, and how much it rests on."""

from __future__ import annotations

import math

import pytest

from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.sections import SamplerConfig
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.prefixed import Prefixed
from pellucid.training.preflight import show_signal
from pellucid.types import Completion, Group, Prompt, Reward

HINT = '[task] name = "prefixed"'


def group(*values, finished=True):
    completions = tuple(Completion((1,), (0.0,), "7", finished) for _ in values)
    return Group(Prompt("p", "3 + 4"), (1,), completions, tuple(map(Reward, values)))


def said(capsys, groups, task=None):
    cfg = Config(algorithm=GRPOConfig(group_size=2), sampler=SamplerConfig(max_tokens=5), task=task or Arithmetic())
    show_signal(groups, cfg)
    return capsys.readouterr().out


def test_how_many_samples_the_advice_rests_on(capsys):
    assert said(capsys, [group(1.0, 0.0, 0.0), group(0.0, 1.0, math.nan)]).startswith("40% of 5 samples of 2 prompts")
    assert said(capsys, [group(0.25, -0.5)]).startswith("The mean reward of 2 samples of 1 prompt is -0.125; 0% of")


@pytest.mark.parametrize(("cut", "told"), [(0, ""), (1, ""), (2, "10%"), (20, "100%")])
def test_what_is_cut_off_is_said_where_it_is_more_than_a_few(capsys, cut, told):
    groups = [group(1.0, 0.0, finished=i >= cut) for i in range(20)]
    line = f"! {told} of 40 samples were cut off at sampler.max_tokens = 5"
    assert (line in said(capsys, groups)) == bool(told)
    assert ("cut off" in said(capsys, groups)) == bool(told)


def test_failed_rewards_are_no_contrast(capsys):
    assert "0% of groups of 2 will be dead" in said(capsys, [group(0.0, 1.0)])
    assert "100% of groups of 2 will be dead" in said(capsys, [group(1.0, math.nan), group(math.nan, math.nan)])


def test_prefixes_are_thought_of_where_all_is_wrong_and_the_task_can_begin_the_answers(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    wrong, right = [group(0.0, 0.0)], [group(1.0, 1.0)]
    assert HINT in said(capsys, wrong)
    assert HINT not in said(capsys, right)
    assert HINT not in said(capsys, wrong, Prefixed(Arithmetic())), "it has them"
    assert HINT not in said(capsys, wrong, Dataset(data=str(tmp_path / "a.jsonl"))), "it has none to give"
    assert HINT not in said(capsys, [group(0.0, 1.0)]), "contrast enough"
