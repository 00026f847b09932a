"""Test that a failed reward is neither right nor wrong everywhere, and counts as its siblings' mean in training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from math import exp, sqrt

import numpy as np
import pytest
import torch

from conftest import EOS, CountDigits, OneProcessRuntime
from pellucid.algorithm import grpo
from pellucid.algorithm.advantages import ADVANTAGES
from pellucid.algorithm.batch import collate, collect_grades, collect_task_rewards
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.distributed.process_group import SingleProcess
from pellucid.reporting.console import (
    PlainLogger,
    make_comparison_table,
    make_evaluation_rows,
    make_evaluation_table,
    make_verdict_table,
)
from pellucid.reporting.loggers import JsonlLogger, compute_group_metrics
from pellucid.rewards.parts import validate_reward
from pellucid.sandbox.values import MAX_NUMBER, InvalidResultError
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.training.evaluate import evaluate
from pellucid.training.preflight import show_signal
from pellucid.types import Completion, Group, Prompt, Reward, Sampling

FAILED = {
    "no value": Reward(math.nan),
    "infinite": Reward(math.inf),
    "an error beside a value": Reward(1.0, error="timed out"),
    "an error beside a verdict": Reward(math.nan, correct=True, error="ValueError: no"),
}
RIGHT, WRONG = Reward(1.0), Reward(0.0)


def group(*rewards, prompt=None):
    completions = tuple(Completion((i, 27), (-1.0, -1.0), str(i), True) for i in range(len(rewards)))
    return Group(prompt or Prompt("p", "1+1?"), (1, 2), completions, rewards, (0.0,) * len(rewards))


@pytest.fixture(params=FAILED)
def failed(request):
    return FAILED[request.param]


def test_failed_rewards_are_recognized_and_not_correct(failed):
    assert failed.failed
    assert failed.is_correct is False
    assert not RIGHT.failed
    assert Reward(np.float64(1.0)).is_correct is True, "a bool of Python's, which goes into JSON"


def test_failed_reward_counts_as_the_mean_of_its_graded_siblings(failed):
    """It counts like a reward with the value 1/3 that is one third correct."""
    for advantage, compute in ADVANTAGES.items():
        cfg = GRPOConfig(advantage=advantage, group_size=4, length_min_cell=2)
        of_failed, of_mean = (
            collect_grades([group(RIGHT, WRONG, WRONG, last), group(RIGHT, RIGHT, WRONG, WRONG)])
            for last in (failed, Reward(1 / 3))
        )
        if advantage == "lead":
            of_mean.correct[0, 3] = 1 / 3
        torch.testing.assert_close(compute(of_failed, cfg), compute(of_mean, cfg), msg=advantage)


def test_lead_uses_the_accuracy_of_graded_answers(failed):
    """One of three is right, not one of four. The failed reward has no advantage."""
    advantages = ADVANTAGES["lead"](collect_grades([group(RIGHT, WRONG, WRONG, failed)]), GRPOConfig())[0].tolist()
    weights = [0.4 + 1.1 / (1 + exp(10 * (p - 0.75))) for p in (1 / 3, 2 / 3)]
    # (r - 1/3) / std of (1, 0, 0, 1/3), whose variance is 1/6
    assert advantages == pytest.approx([sqrt(6) * 2 / 3 * weights[0], *2 * [-sqrt(6) / 3 * weights[1]], 0.0], abs=1e-12)


def test_clip_difficulty_uses_graded_answers(failed):
    """2 of 3 and 0 of 4 are right, with a mean of 1/3. A group without grades counts as having mean difficulty."""
    groups = [group(RIGHT, RIGHT, WRONG, failed), group(*[WRONG] * 4), group(*[failed] * 4)]
    cfg = GRPOConfig(group_size=4, clip_high=0.2, clip_difficulty=1.0)
    advantages = torch.zeros(3, 4, dtype=torch.float64)
    batch = grpo.attach_advantages(collate(groups), collect_grades(groups), advantages, OneProcessRuntime(), cfg)
    assert batch.clip_high.tolist() == pytest.approx([0.2 * 2 / 3] * 4 + [0.2 * 4 / 3] * 4 + [0.2] * 4)
    batch = grpo.attach_advantages(
        collate(groups[2:]), collect_grades(groups[2:]), advantages[2:], OneProcessRuntime(), cfg
    )
    assert batch.clip_high.tolist() == pytest.approx([0.2] * 4)


def test_group_without_a_grade_has_no_advantage(failed):
    grades = collect_grades([group(*[failed] * 4)])
    for advantage, compute in ADVANTAGES.items():
        assert compute(grades, GRPOConfig(advantage=advantage)).abs().max() == 0.0, advantage


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_infinite_reward_term_counts_as_failed(infinite):
    """The value of the reward is infinite too, or the task keeps it within bounds."""
    for value in (infinite, 1.0):
        rewards = [Reward(v, {"a": v, "b": 1.0 - v}) for v in (1.0, 0.0)] + [Reward(value, {"a": infinite, "b": 0.5})]
        grades = collect_grades([group(*rewards)])
        assert grades.parts[0].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]
        cfg = GRPOConfig(advantage="gdpo", group_size=3)
        alone = grades._replace(parts=grades.parts[..., :1], weights=torch.ones(1, 1, dtype=torch.float64))
        assert ADVANTAGES["gdpo"](alone, cfg)[0].tolist() == pytest.approx([sqrt(1.5), -sqrt(1.5), 0.0])
    assert math.isnan(compute_group_metrics([group(Reward(1.0, {"a": infinite}))])["reward/a"])
    assert (
        compute_group_metrics([group(*(Reward(1.0, {"a": x}) for x in (math.inf, -math.inf, 3.0)))])["reward/a"] == 3.0
    )


def test_terms_of_a_failed_reward_are_ignored():
    """They are what the task had computed before it failed."""
    rewards = [Reward(1.0, {"a": 1.0}), Reward(0.0, {"a": 0.0}), Reward(9.0, {"a": 9.0}, error="timed out")]
    assert collect_grades([group(*rewards)]).parts[0, :, 0].tolist() == [1.0, 0.0, 0.5]


def test_dynamic_sampling_and_metrics_agree_on_dead_groups(failed):
    """A failed reward among equal rewards makes no difference, for any value it has."""
    for siblings in ([WRONG] * 3, [RIGHT] * 3):
        assert collect_task_rewards([group(*siblings, failed)]).unique().tolist() == [siblings[0].value]
        measured = compute_group_metrics([group(*siblings, failed)])
        assert measured["groups/dead_all_right"] + measured["groups/dead_all_wrong"] == 1.0


def test_curriculum_measures_accuracy_of_graded_answers(failed):
    task = Curriculum(CountDigits(), pool=1)
    [prompt] = task.sample(0, 1)
    task.observe(0, [group(RIGHT, WRONG, WRONG, failed, prompt=prompt)])
    assert task.curriculum_state.accuracy == {0: 1 / 3}
    task.observe(1, [group(*[failed] * 4, prompt=prompt)])
    assert task.curriculum_state.accuracy == {0: 1 / 3}


class Script:
    seed, split = 0, "test"

    def __init__(self, reward):
        self.graded = reward

    def reward(self, prompt, completion):
        return self.graded

    def generate(self, prompts, sampling):
        return [replace(group(*[RIGHT] * sampling.n), prompt=prompt) for prompt in prompts]


def test_evaluation_counts_and_reports_failed_rewards(failed, tmp_path, capsys):
    """Answers with failed rewards count as not correct, and every report shows their number."""
    task = Script(failed)
    prompts = [Prompt(str(i), f"{i}?") for i in range(3)]
    evaluation, _, _ = evaluate("script", task, prompts, task, Sampling(4), 2, SingleProcess())
    assert (evaluation.greedy.value, evaluation.mean_at_k.value, evaluation.greedy_correct) == (0.0, 0.0, (0, 0, 0))
    assert evaluation.failed == 3 + 12
    PlainLogger(3).log_evaluation(1, evaluation)
    assert "! failed rewards: 15" in capsys.readouterr().out
    for table in (make_evaluation_table("m", evaluation), make_comparison_table(evaluation, evaluation)):
        assert "3 prompts, too few prompts for an interval, ! failed rewards: 15" in str(table.title)
    assert "! failed rewards: 15" in str(next(make_evaluation_rows({1: evaluation}))[2])
    log = JsonlLogger(tmp_path)
    log.log_evaluation(1, evaluation)
    log.close()
    assert json.loads((tmp_path / "evals.jsonl").read_text())["failed"] == 15


def test_rollout_log_has_no_grade_for_a_failed_reward(failed, tmp_path):
    log = JsonlLogger(tmp_path)
    log.log(1, {}, [group(RIGHT, failed)])
    log.close()
    graded, not_graded = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert (graded["reward"], graded["correct"]) == (1.0, True)
    assert (not_graded["reward"], not_graded["correct"]) == (None, None)
    assert not_graded.get("error", "") == failed.error


def test_verdict_of_a_failed_reward_is_not_graded(failed):
    said = " ".join(map(str, make_verdict_table(group(failed)).columns[1].cells))
    assert "wrong" not in said
    assert "right" not in said
    assert "not graded" in said
    assert failed.error in said


def test_preflight_signal_uses_graded_answers(failed, capsys):
    cfg = Config(algorithm=GRPOConfig(group_size=4), task=Arithmetic())
    show_signal([group(RIGHT, RIGHT, RIGHT, failed)], cfg, (EOS,))
    said = capsys.readouterr().out
    assert "100% of 3 samples of 1 prompt are right; judging by them, 100% of groups of 4 will be dead" in said
    assert ("25% of rewards failed, the first with " in said) == failed.applies
    assert ("harder prompts" in said) != failed.applies
    show_signal([group(*[failed] * 4)], cfg, (EOS,))
    assert "no sample could be graded" in capsys.readouterr().out


# ---------------------------------------------------------------- valid numbers


def test_the_largest_rewards_can_be_added_and_squared():
    """Metrics and advantages do both."""
    rewards = [Reward(sign * MAX_NUMBER, {"a": sign * MAX_NUMBER}) for sign in (1, -1, 1, 1)]
    assert all(math.isfinite(value) for value in compute_group_metrics([group(*rewards)] * 8).values())
    for name, advantage in ADVANTAGES.items():
        if name != "maxrl":  # refuses negative rewards
            assert advantage(collect_grades([group(*rewards)]), GRPOConfig(advantage=name)).isfinite().all(), name


def test_torch_scalars_are_accepted_as_numbers():
    reward = Reward(torch.tensor(0.5), {"a": torch.tensor(0.25).bfloat16()}, correct=torch.tensor(True))
    assert validate_reward(reward) == (Reward(0.5, {"a": 0.25}, correct=True))
    with pytest.raises(InvalidResultError, match="where a number is needed"):
        validate_reward(Reward(torch.tensor([0.5])))
