"""Estimators against enumeration, intervals against their defining equation and textbook values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from conftest import CountDigits, make_policy
from pellucid.samplers.native import Native
from pellucid.training import evaluate as evaluation_module
from pellucid.training.evaluate import (
    OneProcess,
    estimate,
    estimate_mean,
    evaluate,
    held_out,
    pass_at,
    student_quantile,
)
from pellucid.types import Prompt, Reward, Sampling


@pytest.mark.parametrize(("samples", "correct", "k"), [(5, 2, 3), (6, 0, 2), (6, 6, 2), (4, 1, 4), (8, 3, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples, correct, k):
    answers = [True] * correct + [False] * (samples - correct)
    draws = list(itertools.combinations(answers, k))
    assert pass_at(k, samples, correct) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_wilson_intervals_have_their_textbook_values():
    """Newcombe (1998), table I: 81 of 263 gives [.2553, .3662], 0 of 20 gives [0, .1611]."""
    some = estimate([1.0] * 81 + [0.0] * 182)
    assert (round(some.low, 4), round(some.high, 4)) == (0.2553, 0.3662)
    none = estimate([0.0] * 20)
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)


def test_the_bounds_are_where_the_mean_is_196_standard_errors_away():
    measured = estimate([1.0] * 30 + [0.0] * 70)
    for bound in (measured.low, measured.high):
        assert abs(0.3 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 100), rel=1e-6)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (29, 2.045), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_printed_tables(freedom, t):
    """Student's distribution, two-sided 5%, in any textbook."""
    assert round(student_quantile(freedom), 3) == t


def test_the_interval_of_a_mean_by_hand():
    """Mean 3, standard deviation sqrt(10 / 4), five values: 2.776 * sqrt(2.5 / 5) = 1.963."""
    measured = estimate_mean([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (measured.value, round(measured.low, 3), round(measured.high, 3)) == (3.0, 1.037, 4.963)
    same = estimate_mean([-0.5] * 7)
    assert (same.value, same.low, same.high) == (-0.5, -0.5, -0.5)
    one = estimate_mean([2.0])
    assert (one.value, one.low, one.high) == (2.0, -math.inf, math.inf)


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says():
    """Simulated: of 4,000 samples of seven values, 95% of the intervals hold the mean they were drawn around."""
    rng = random.Random(0)
    samples = (estimate_mean([rng.gauss(0.3, 2.0) for _ in range(7)]) for _ in range(4000))
    held = sum(interval.low <= 0.3 <= interval.high for interval in samples)
    assert abs(held / 4000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_nothing_measured_is_nan():
    assert math.isnan(estimate([]).value)
    assert math.isnan(estimate_mean([]).value)


def evaluated(k, samples):
    policy = make_policy()
    task, sampling = CountDigits(split="test"), Sampling(samples, max_tokens=12)
    return evaluate("digits", task, held_out(task, 10), Native(policy=policy), sampling, k, OneProcess())[:2]


def test_an_evaluation_counts_right_answers():
    evaluation, groups = evaluated(k=3, samples=6)
    right = [sum(r.is_correct for r in g.rewards) for g in groups]
    assert 0 < sum(right) < 60
    assert (evaluation.n, evaluation.k, evaluation.split) == (10, 3, "test")
    assert evaluation.mean_at_k.value == pytest.approx(sum(right) / 60)
    assert evaluation.pass_at_k.value == pytest.approx(sum(pass_at(3, 6, c) for c in right) / 10)
    assert evaluation.greedy.value in {i / 10 for i in range(11)}
    assert evaluated(k=3, samples=6)[0] == evaluation, "the same policy, the same numbers"
    rewards = [reward.value for group in groups for reward in group.rewards]
    assert evaluation.reward_at_k.value == pytest.approx(sum(rewards) / 60)
    assert evaluation.reward.value == pytest.approx(sum(evaluation.rewards) / 10)
    assert evaluation.verdicts, "the task says which answers are right"


class Graded(CountDigits):
    """Gives degrees, and no verdict; nothing for questions that begin with `ab?`."""

    def reward(self, prompt, completion):
        value = super().reward(prompt, completion).value
        return Reward(math.nan, error="no") if prompt.text.startswith("ab") else Reward(value)


def test_rewards_that_failed_are_left_out_of_the_mean_and_degrees_are_no_verdicts():
    task, sampling = Graded(split="test"), Sampling(4, max_tokens=12)
    sampler = Native(policy=make_policy())
    evaluation, groups, best = evaluate("digits", task, held_out(task, 9), sampler, sampling, 2, OneProcess())
    of_graded = [group for group in groups if not group.prompt.text.startswith("ab")]
    assert 0 < len(of_graded) < len(groups)
    means = [sum(reward.value for reward in group.rewards) / 4 for group in of_graded]
    assert evaluation.reward_at_k.value == pytest.approx(sum(means) / len(means))
    assert not evaluation.verdicts
    in_order = [group for _, group in sorted((group.prompt.key, group) for group in best)]
    for reward, group in zip(evaluation.rewards, in_order, strict=True):
        assert math.isnan(reward) == group.prompt.text.startswith("ab")
        assert math.isnan(reward) or reward == group.rewards[0].value


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_how_many_rows_are_decoded_together_changes_no_sample(monkeypatch, rows):
    """Ten prompts of six samples: at most 128 rows together, or 1, or 6 of 7, or 30."""
    whole = evaluated(k=3, samples=6)
    monkeypatch.setattr(evaluation_module, "MAX_ROWS", rows)
    chunked = evaluated(k=3, samples=6)
    assert [[c.token_ids for c in g.completions] for g in chunked[1]] == [
        [c.token_ids for c in g.completions] for g in whole[1]
    ]
    assert chunked[0] == whole[0]


def test_answers_stand_in_the_order_of_their_questions():
    """Evaluations of two seeds that draw the same questions can then be compared question by question."""

    class Backwards(CountDigits):
        def sample(self, step, n):
            return super().sample(step, n)[::-1]

    sampler, sampling = Native(policy=make_policy()), Sampling(max_tokens=12)
    one, other = (
        evaluate("digits", task, held_out(task, 10), sampler, sampling, 0, OneProcess())
        for task in (CountDigits(split="test"), Backwards(split="test"))
    )
    assert [group.prompt for group in one[2]] == [group.prompt for group in other[2]][::-1]
    assert 0 < sum(one[0].right) < 10
    assert (one[0].questions, one[0].right) == (other[0].questions, other[0].right)


def test_other_processes_answer_the_rest():
    sampler, sampling = Native(policy=make_policy()), Sampling(4, max_tokens=12)
    task = CountDigits(split="test")

    def evaluated_by(shards):
        return evaluate("digits", task, held_out(task, 10), sampler, sampling, 2, shards)

    whole, groups, best = evaluated_by(OneProcess())

    class FirstOfTwo:
        """The other process has the last four questions, and answers as this one would."""

        def shard(self, items):
            return items[:6]

        def gather(self, items):
            return [*items, *(groups if len(items[0].completions) == 4 else best)[6:]]

    evaluation, *gathered = evaluated_by(FirstOfTwo())
    assert evaluation == whole
    assert [[group.prompt for group in some] for some in gathered] == [[group.prompt for group in best]] * 2


def test_a_digest_knows_where_a_question_ends():
    assert evaluation_module.digest(["1+1", "2"]) != evaluation_module.digest(["1+", "12"])


def test_k_zero_is_greedy_only():
    evaluation, groups = evaluated(k=0, samples=0)
    assert groups == []
    assert math.isnan(evaluation.mean_at_k.value)
    assert 0 <= evaluation.greedy.value <= 1


def test_held_out_prompts_are_different_ones():
    class Repeats:
        seed, split = 0, "test"

        def sample(self, step, n):
            return [Prompt(f"test/0/{i}", f"question {i % 3}") for i in range(n)]

    assert [p.id for p in held_out(Repeats(), 8)] == ["test/0/6", "test/0/7", "test/0/5"]
