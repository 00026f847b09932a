"""Estimators against enumeration, intervals against their defining equation and textbook values."""

from __future__ import annotations

import itertools
import math

import pytest

from conftest import CountDigits, make_policy
from pellucid.samplers.native import Native
from pellucid.training import evaluate as evaluation_module
from pellucid.training.evaluate import OneProcess, estimate, evaluate, held_out, pass_at
from pellucid.types import Prompt, Sampling


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


def test_nothing_measured_is_nan():
    assert math.isnan(estimate([]).value)


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
