"""Tests of the warning signs of failed training: present in collapsed runs, absent in runs that learned."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.reporting.best_evaluation import count_evaluations_since_best, find_best_evaluation
from pellucid.reporting.warning_signs import WarningSignWatcher, find_accuracy_fall, find_warning_signs
from pellucid.training.evaluate import estimate_mean, estimate_share
from pellucid.types import Estimate, Evaluation

DOCS = Path(__file__).parents[2] / "docs"


def graded(*right, questions="same"):
    """Return the evaluation of greedy answers that are right (1), wrong (0) or undecided (None)."""
    share = estimate_share([each for each in right if each is not None])
    return Evaluation("t", "test", len(right), 0, share, Estimate(), Estimate(), right, questions, has_verdicts=True)


def rewarded(*rewards):
    mean = estimate_mean(rewards)
    rest = {"reward": mean, "rewards": rewards, "has_verdicts": False}
    return Evaluation("t", "test", len(rewards), 0, Estimate(), Estimate(), Estimate(), **rest)


def of(right, n=100):
    return graded(*(int(i < right) for i in range(n)))


def keys(rows, evaluations=None):
    return [sign.key for sign in find_warning_signs(rows, evaluations or {})]


def steps(count=10, **values):
    """Return rows whose metrics are numbers, or functions of the step."""
    return [
        {"step": step, **{name: value(step) if callable(value) else value for name, value in values.items()}}
        for step in range(1, count + 1)
    ]


# ---------------------------------------------------------------- the best evaluation


def test_best_evaluation_is_the_earliest_and_later_ones_are_counted():
    evaluations = {0: of(20), 10: of(41), 20: of(30), 30: of(41)}
    best = find_best_evaluation(evaluations)
    assert (best.step, best.measure, best.estimate.value) == (10, "greedy", 0.41)
    assert best.describe() == "step 10, greedy accuracy 0.41 [0.32, 0.51]"
    assert count_evaluations_since_best(evaluations) == 2
    assert count_evaluations_since_best({**evaluations, 40: of(42)}) == 0
    assert count_evaluations_since_best({0: of(3), 10: of(3)}) == 1
    assert find_best_evaluation({}) is None
    assert count_evaluations_since_best({}) == 0


def test_best_evaluation_is_by_mean_reward_without_verdicts():
    best = find_best_evaluation({0: rewarded(0.1, 0.3), 10: rewarded(0.5, 0.7), 20: rewarded(0.2, 0.9)})
    assert (best.step, best.measure) == (10, "reward")
    assert best.describe() == "step 10, reward 0.60 [-0.67, 1.87]"


def test_one_evaluation_without_verdicts_compares_all_by_reward():
    both = rewarded(0.2, 0.2)
    first = replace(of(2, 2), reward=both.reward)
    assert find_best_evaluation({0: first, 10: rewarded(0.1, 0.1)}).step == 0


def test_a_measure_that_one_evaluation_lacks_is_not_compared():
    undecided, mean = graded(None, None), {"mean_at_k": Estimate(0.3)}
    evaluations = {
        0: replace(of(20), **mean),
        10: replace(undecided, **mean),
        20: replace(of(10), mean_at_k=Estimate(0.4)),
    }
    best = find_best_evaluation(evaluations)
    assert (best.step, best.measure) == (20, "mean@k")


# ---------------------------------------------------------------- accuracy


@pytest.mark.parametrize(("lost", "won", "is_sign"), [(9, 0, True), (8, 0, False), (14, 2, True), (13, 2, False)])
def test_accuracy_fall_needs_more_losses_than_chance(lost, won, is_sign):
    """By hand: 2^-9 and 137 / 2^16 (at least 14 losses in 16 changes) are below 0.0028; 2^-8 and 121 / 2^15 are not."""
    rest = 30
    before = graded(*[1] * lost, *[0] * won, *[1, 0] * rest)
    now = graded(*[0] * lost, *[1] * won, *[1, 0] * rest)
    sign = find_accuracy_fall({0: before, 10: now})
    assert (sign is not None) == is_sign
    assert find_accuracy_fall({0: now, 10: before}) is None


def test_undecided_questions_do_not_count_as_changes():
    assert find_accuracy_fall({0: graded(*[1] * 20), 10: graded(*[None] * 12, *[1] * 8)}) is None
    assert find_accuracy_fall({0: graded(*[1] * 20), 10: graded(*[None] * 8, *[0] * 12)}) is not None


def test_the_sign_names_both_evaluations_and_what_to_change():
    sign = find_accuracy_fall({0: of(20), 20: of(41), 40: of(10)})
    assert sign.step == 40
    for part in (
        "After step 40",
        "0.10 [0.06, 0.17]",
        "after step 20",
        "0.41 [0.32, 0.51]",
        "optimizer.lr",
        "patience",
    ):
        assert part in sign.describe()


def test_different_questions_and_rewards_are_compared_by_intervals():
    """The intervals of 23 of 100 and 41 of 100 touch; those of 22 and 41 do not."""
    for right, is_sign in ((24, False), (22, True)):
        other = graded(*(int(i < right) for i in range(100)), questions="others")
        assert (find_accuracy_fall({0: of(41), 10: other}) is not None) == is_sign
    high, low = rewarded(*[0.7, 0.9] * 10), rewarded(*[0.3, 0.5] * 10)
    assert find_accuracy_fall({0: high, 10: low}) is not None
    assert find_accuracy_fall({0: low, 10: high}) is None
    assert find_accuracy_fall({0: rewarded(0.8, 0.9), 10: rewarded(0.1, 0.2)}) is None


def test_equal_policies_rarely_trigger_an_accuracy_fall():
    """Enumerate every outcome of 20 questions that both policies answer by coin flip, with its probability."""
    chance = 0.0
    for lost in range(21):
        for won in range(21 - lost):
            same = 20 - lost - won
            before, now = graded(*[1] * lost, *[0] * (won + same)), graded(*[0] * lost, *[1] * won, *[0] * same)
            if find_accuracy_fall({0: before, 1: now}):
                ways = math.factorial(20) / (math.factorial(lost) * math.factorial(won) * math.factorial(same))
                chance += ways * 0.25 ** (lost + won) * 0.5**same
    assert 0 < chance < 0.0028


# ---------------------------------------------------------------- updates and entropy


def test_a_collapse_is_seen_before_its_tenth_step():
    """A 0.5B model on GSM8K at a learning rate of 1e-5: entropy rose from 0.4 to 0.75 in ten steps."""
    [sign] = find_warning_signs(steps(entropy=lambda step: 0.4 + 0.35 * (step - 1) / 9), {})
    assert sign.key == "why.entropy_rose"
    assert sign.step == 9
    assert "from 0.44 to 0.67" in sign.describe()


def test_recorded_runs_have_a_sign_only_if_they_were_stuck():
    found = {}
    for path in sorted(DOCS.rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if "entropy" in rows[0]:
            found[path.parent.relative_to(DOCS).as_posix()] = set(keys(rows))
    assert len(found) > 50
    assert {key for signs in found.values() for key in signs} == {"why.entropy_fell"}
    stuck = {name for name, signs in found.items() if signs}
    assert {name.split("/")[1] for name in stuck} == {"off_the_floor"}
    assert {name.split("/")[2] for name in stuck} == {"grpo", "grpo_longer", "curriculum", "dynamic_sampling"}


@pytest.mark.parametrize(
    ("changed", "is_sign"),
    [
        ({}, True),
        ({"update/kl": 0.0049, "completion/length_mean": 1000.0}, False),
        ({"update/kl": 0.0051, "completion/length_mean": 1000.0}, True),
        ({"completion/length_mean": 90.0}, False),
        ({"update/kl": lambda step: 0.011 if step % 3 else 0.004, "completion/length_mean": 1000.0}, False),
        ({"update/kl": lambda step: 0.011 if step in (4, 5, 6) else None}, True),
        ({"update/kl": lambda step: 0.011 if step in (4, 5) else None}, False),
        ({"update/kl": None}, False),
    ],
)
def test_update_sign_needs_three_steps_in_a_row_above_both_limits(changed, is_sign):
    rows = steps(**{"update/kl": 0.011, "completion/length_mean": 100.0, **changed})
    assert keys(rows) == (["why.update_too_large"] if is_sign else [])


def test_update_sign_states_both_numbers():
    [sign] = find_warning_signs(steps(**{"update/kl": 0.011, "completion/length_mean": 100.0}), {})
    assert sign.step == 3
    assert "0.011 nats per token, 1.1 in an answer" in sign.describe()


@pytest.mark.parametrize(
    ("entropy", "dead", "key"),
    [
        (lambda step: 1.0 if step < 4 else 0.04, {"groups/dead_all_wrong": 0.4}, "why.entropy_fell"),
        (lambda step: 1.0 if step < 4 else 0.04, {"groups/dead_equal": 0.4}, "why.entropy_fell"),
        (lambda step: 1.0 if step < 4 else 0.04, {"groups/dead_all_right": 1.0, "groups/dead_all_wrong": 0.0}, None),
        (lambda step: 1.0 if step < 4 else 0.06, {"groups/dead_all_wrong": 0.4}, None),
        (lambda step: 0.01 if step < 4 else 0.05, {}, None),
        (lambda step: 1.0 if step < 4 else 1.45, {}, None),
        (lambda step: float("nan") if step > 3 else 1.0, {"groups/dead_all_wrong": 1.0}, None),
    ],
)
def test_entropy_sign_needs_a_large_drop_and_unsolved_groups(entropy, dead, key):
    assert keys(steps(entropy=entropy, **dead)) == ([key] if key else [])


FINISHED_UNTIL_THE_COLLAPSE = [0.97, 0.98, 0.96, 0.89, 0.96, 0.76, 0.56, 0.49, 0.29, 0.32, 0.20]
"""Steps 23 to 33 of a 0.5B model on GSM8K at a constant learning rate of 1e-4; from step 29 on, answers repeat
"The answer is 25." until the length limit."""


def test_answers_that_no_longer_end_are_a_sign():
    [sign] = find_warning_signs(
        steps(
            len(FINISHED_UNTIL_THE_COLLAPSE), **{"completion/finished": lambda n: FINISHED_UNTIL_THE_COLLAPSE[n - 1]}
        ),
        {},
    )
    assert (sign.key, sign.step) == ("why.cut_off_rose", 8)
    assert "rose from 3% to 40% by step 8" in sign.describe()


@pytest.mark.parametrize(
    "finished",
    [
        lambda step: 0.9 if step < 4 else 0.66,
        lambda step: 0.2 if step == 7 else 0.9,
        lambda step: 0.1 if step < 4 else 0.0,
        lambda step: None if step < 9 else 0.9 - 0.1 * step,
    ],
)
def test_small_or_short_rise_of_the_cut_off_share_is_no_sign(finished):
    assert keys(steps(**{"completion/finished": finished})) == []


def test_each_sign_is_reported_once_in_the_order_of_steps():
    rows = steps(20, **{"update/kl": 1.0, "completion/length_mean": 9.0, "entropy": lambda step: step / 10})
    evaluations = {0: of(40), 5: of(10), 10: of(5)}
    assert keys(rows, evaluations) == ["why.update_too_large", "why.accuracy_fell", "why.entropy_rose"]
    watcher = WarningSignWatcher()
    seen = [sign for row in rows for sign in watcher.observe_step(row["step"], row)]
    assert len(seen) == 2
