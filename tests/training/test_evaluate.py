"""Tests of evaluation: estimators against enumeration, intervals against their equation and textbook values."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass, field, replace

import pytest
import rich
import torch
import torch.nn.functional as F

from conftest import CountDigits, make_policy
from pellucid.distributed.process_group import SingleProcess
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.reporting.console import PlainLogger, make_comparison_table, make_evaluation_table
from pellucid.reporting.eval_metrics import MIN_INTERVAL_PROMPTS, make_evaluation_record, parse_evaluation
from pellucid.reporting.loggers import format_json_line
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.vllm import VLLMSampler
from pellucid.rollout.vllm_client import ServerPool
from pellucid.training import evaluate as evaluation_module
from pellucid.training.evaluate import (
    compute_pass_at_k,
    compute_student_quantile,
    estimate_if_enough,
    estimate_mean,
    estimate_share,
    evaluate,
    sample_and_grade,
    sample_held_out_prompts,
)
from pellucid.types import Progress, Prompt, Reward, Sampling


@pytest.mark.parametrize(("samples", "correct", "k"), [(5, 2, 3), (6, 0, 2), (6, 6, 2), (4, 1, 4), (8, 3, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer(samples, correct, k):
    answers = [True] * correct + [False] * (samples - correct)
    draws = list(itertools.combinations(answers, k))
    assert compute_pass_at_k(k, samples, correct) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_wilson_intervals_have_their_textbook_values():
    """Newcombe (1998), table I: 81 of 263 gives [.2553, .3662], 0 of 20 gives [0, .1611]."""
    some = estimate_share([1.0] * 81 + [0.0] * 182)
    assert (round(some.low, 4), round(some.high, 4)) == (0.2553, 0.3662)
    none = estimate_share([0.0] * 20)
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)


def test_wilson_bounds_are_1_96_standard_errors_from_the_share():
    measured = estimate_share([1.0] * 30 + [0.0] * 70)
    for bound in (measured.low, measured.high):
        assert abs(0.3 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 100), rel=1e-6)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (29, 2.045), (30, 2.042), (120, 1.980)],
)
def test_student_quantiles_match_printed_tables(freedom, t):
    """Two-sided 5% quantiles of Student's distribution, as in any textbook."""
    assert round(compute_student_quantile(freedom), 3) == t


def test_interval_of_a_mean_matches_hand_computation():
    """Mean 3, standard deviation sqrt(10 / 4), five values: 2.776 * sqrt(2.5 / 5) = 1.963."""
    measured = estimate_mean([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (measured.value, round(measured.low, 3), round(measured.high, 3)) == (3.0, 1.037, 4.963)
    same = estimate_mean([-0.5] * 7)
    assert (same.value, same.low, same.high) == (-0.5, -0.5, -0.5)
    one = estimate_mean([2.0])
    assert (one.value, one.low, one.high) == (2.0, -math.inf, math.inf)


def test_interval_of_a_mean_covers_it_in_95_percent_of_samples():
    """Simulated with 4,000 samples of seven normal values each."""
    rng = random.Random(0)
    samples = (estimate_mean([rng.gauss(0.3, 2.0) for _ in range(7)]) for _ in range(4000))
    held = sum(interval.low <= 0.3 <= interval.high for interval in samples)
    assert abs(held / 4000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def wilson(low, high, n):
    """Return whether a share of 1/2 among n prompts has this interval, by the equation that defines its ends."""
    return all(abs(0.5 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n)) for end in (low, high))


def test_interval_needs_enough_prompts_to_be_narrower_than_one_half():
    one_less, enough = ([float(i % 2) for i in range(n)] for n in (MIN_INTERVAL_PROMPTS - 1, MIN_INTERVAL_PROMPTS))
    measured, few = estimate_if_enough(estimate_share, enough), estimate_if_enough(estimate_share, one_less)
    assert wilson(measured.low, measured.high, MIN_INTERVAL_PROMPTS)
    assert measured.high - measured.low < 0.5
    assert (
        estimate_share([0.5] * (MIN_INTERVAL_PROMPTS - 1)).high - estimate_share([0.5] * (MIN_INTERVAL_PROMPTS - 1)).low
        > 0.5
    )
    assert (few.value, few.has_interval) == (pytest.approx(sum(one_less) / len(one_less)), False)


@pytest.mark.parametrize("rewards", [[0.8] * 3, [0.8], [0.2, 0.8, 0.8], [0.8] * 40])
def test_few_or_equal_rewards_have_no_interval(rewards):
    measured = estimate_if_enough(estimate_mean, rewards)
    assert (measured.value, measured.has_interval) == (pytest.approx(sum(rewards) / len(rewards)), False)


def test_estimates_of_no_values_are_nan():
    assert math.isnan(estimate_share([]).value)
    assert math.isnan(estimate_mean([]).value)


def evaluated(k, samples, rows=256, wrapped=lambda sampler: sampler):
    task, sampling = CountDigits(split="test"), Sampling(samples, max_tokens=12)
    sampler = wrapped(NativeSampler(rows, make_policy()))
    return evaluate("digits", task, sample_held_out_prompts(task, 10), sampler, sampling, k, SingleProcess())[:2]


def test_an_evaluation_counts_right_answers():
    evaluation, groups = evaluated(k=3, samples=6)
    right = [sum(r.is_correct for r in g.rewards) for g in groups]
    assert 0 < sum(right) < 60
    assert (evaluation.n, evaluation.k, evaluation.split) == (10, 3, "test")
    assert evaluation.mean_at_k.value == pytest.approx(sum(right) / 60)
    assert evaluation.pass_at_k.value == pytest.approx(sum(compute_pass_at_k(3, 6, c) for c in right) / 10)
    assert evaluation.greedy.value in {i / 10 for i in range(11)}
    assert repr(evaluated(k=3, samples=6)[0]) == repr(evaluation), "the same policy, the same numbers"
    rewards = [reward.value for group in groups for reward in group.rewards]
    assert evaluation.reward_at_k.value == pytest.approx(sum(rewards) / 60)
    assert evaluation.reward.value == pytest.approx(sum(evaluation.rewards) / 10)
    assert evaluation.has_verdicts, "the task says which answers are right"


class Graded(CountDigits):
    """Gives degrees without verdicts, and fails for questions that begin with `ab`."""

    def reward(self, prompt, completion):
        value = super().reward(prompt, completion).value
        return Reward(math.nan, error="no") if prompt.text.startswith("ab") else Reward(value)


def test_failed_rewards_are_excluded_and_degrees_are_not_verdicts():
    task, sampling = Graded(split="test"), Sampling(4, max_tokens=12)
    sampler = NativeSampler(policy=make_policy())
    evaluation, groups, best = evaluate(
        "digits", task, sample_held_out_prompts(task, 9), sampler, sampling, 2, SingleProcess()
    )
    of_graded = [group for group in groups if not group.prompt.text.startswith("ab")]
    assert 0 < len(of_graded) < len(groups)
    means = [sum(reward.value for reward in group.rewards) / 4 for group in of_graded]
    assert evaluation.reward_at_k.value == pytest.approx(sum(means) / len(means))
    assert not evaluation.has_verdicts
    in_order = [group for _, group in sorted((group.prompt.key, group) for group in best)]
    for reward, group in zip(evaluation.rewards, in_order, strict=True):
        assert math.isnan(reward) == group.prompt.text.startswith("ab")
        assert math.isnan(reward) or reward == group.rewards[0].value


def kind_of(prompt):
    return "abcd"[int(prompt.text[-2]) % 4]


class Partly(CountDigits):
    """Gives a verdict for only a quarter of the questions."""

    def reward(self, prompt, completion):
        reward = super().reward(prompt, completion)
        kinds = {
            "a": Reward(math.nan, error="no reward applies", applies=False),
            "b": replace(reward, is_decided=False),
            "c": Reward(math.nan, error="it raised"),
        }
        return kinds.get(kind_of(prompt), reward)


def test_evaluation_counts_excluded_undecided_and_failed_answers(capsys):
    task, sampling = Partly(split="test"), Sampling(4, max_tokens=12)
    prompts = sample_held_out_prompts(task, 24)
    kinds = [kind_of(prompt) for prompt in prompts]
    assert all(kinds.count(kind) for kind in "abcd")
    found, groups, best = evaluate(
        "digits", task, prompts, NativeSampler(policy=make_policy()), sampling, 2, SingleProcess()
    )
    assert (found.left_out, found.undecided, found.failed) == (kinds.count("a"), kinds.count("b"), 5 * kinds.count("c"))
    answers = [group.rewards[0] for group in best if kind_of(group.prompt) in "cd"]
    assert found.greedy.value == pytest.approx(sum(reward.is_correct for reward in answers) / len(answers))
    rights = [sum(reward.is_correct for reward in group.rewards) for group in groups if kind_of(group.prompt) in "cd"]
    assert 0 < sum(rights) < 4 * len(rights)
    assert found.mean_at_k.value == pytest.approx(sum(rights) / 4 / len(rights))
    assert found.pass_at_k.value == pytest.approx(sum(compute_pass_at_k(2, 4, c) for c in rights) / len(rights))
    in_order = sorted(prompts, key=lambda prompt: prompt.key)
    assert [right is None for right in found.greedy_correct] == [kind_of(prompt) in "ab" for prompt in in_order]
    assert found.has_verdicts
    assert (
        parse_evaluation(json.loads(format_json_line(make_evaluation_record(found)))).greedy_correct
        == found.greedy_correct
    )
    PlainLogger(1).log_evaluation(1, found)
    told = capsys.readouterr().out
    assert f"left out, no reward applies: {kinds.count('a')}" in told
    assert f"neither right nor wrong: {kinds.count('b')}" in told


def test_evaluation_without_any_applicable_reward_can_be_printed(capsys):
    task, sampling = Partly(split="test"), Sampling(2, max_tokens=12)
    prompts = [prompt for prompt in sample_held_out_prompts(task, 24) if kind_of(prompt) == "a"]
    found, _, _ = evaluate("digits", task, prompts, NativeSampler(policy=make_policy()), sampling, 2, SingleProcess())
    assert math.isnan(found.greedy.value)
    PlainLogger(1).log_evaluation(1, found)
    rich.print(make_evaluation_table("model", found), make_comparison_table(found, found))
    assert f"left out, no reward applies: {len(prompts)}" in capsys.readouterr().out


class Asked:
    """A sampler without continuous batching that records the number of samples and prompts of each call."""

    def __init__(self, sampler):
        self.sampler, self.rows, self.asked = sampler, sampler.rows, []

    def generate(self, prompts, sampling):
        self.asked.append((sampling.n, len(prompts)))
        return self.sampler.generate(prompts, sampling)


class AskedInFlight(Asked):
    batches_continuously = True


def tokens_of(groups):
    return [[c.token_ids for c in g.completions] for g in groups]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_samples_do_not_depend_on_the_number_of_rows(monkeypatch, rows):
    """Ten prompts of six samples: all 60 rows together, in flight with fewer rows, and in parts of whole groups."""
    whole = evaluated(k=3, samples=6)
    in_flight = evaluated(k=3, samples=6, rows=rows)
    monkeypatch.setattr(evaluation_module, "MAX_GRADED_ROWS", rows)
    in_parts = evaluated(k=3, samples=6, wrapped=Asked)
    assert tokens_of(in_flight[1]) == tokens_of(in_parts[1]) == tokens_of(whole[1])
    assert in_flight[0] == in_parts[0] == whole[0]


@pytest.mark.parametrize(
    ("kind", "asked"),
    [(AskedInFlight, [(1, 10), (6, 10)]), (Asked, [(1, 10), *[(6, 2)] * 5])],
)
def test_only_continuous_batching_gets_all_prompts_at_once(monkeypatch, kind, asked):
    """A limit of 13 rows holds two groups of six."""
    monkeypatch.setattr(evaluation_module, "MAX_GRADED_ROWS", 13)
    samplers = []
    evaluated(k=3, samples=6, wrapped=lambda sampler: samplers.append(kind(sampler)) or samplers[0])
    assert samplers[0].asked == asked


@pytest.mark.parametrize(
    ("sampler", "in_flight"),
    [
        (NativeSampler(policy=make_policy()), True),
        (NativeSampler(policy=make_policy(engine="transformers")), False),
        (
            NativeSampler(policy=make_policy(), environments=InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))),
            False,
        ),
        (VLLMSampler(), True),
        (VLLMSampler(environments=InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))), False),
        (VLLMSampler(engine=ServerPool(["http://nowhere:1"])), True),
        (HuggingFaceSampler(), False),
    ],
    ids=["native", "by transformers", "conversations", "vllm", "its conversations", "servers", "hf"],
)
def test_each_sampler_says_whether_it_batches_continuously(sampler, in_flight):
    assert getattr(sampler, "batches_continuously", False) == in_flight


@dataclass(frozen=True)
class Together(CountDigits):
    """Grades many completions at once, and records how many and at which step."""

    graded: list = field(default_factory=list)

    def reward_all(self, pairs, progress):
        self.graded.append((len(pairs), progress.global_step))
        return [self.reward(*pair) for pair in pairs]


@pytest.mark.parametrize("wrapped", [Asked, AskedInFlight])
def test_answers_are_graded_in_parts_for_every_sampler(monkeypatch, wrapped):
    monkeypatch.setattr(evaluation_module, "MAX_GRADED_ROWS", 25)
    task, sampler = Together(split="test"), wrapped(NativeSampler(policy=make_policy()))
    sampling, prompts = Sampling(6, max_tokens=4), sample_held_out_prompts(task, 10)
    _, groups, _ = evaluate("digits", task, prompts, sampler, sampling, 3, SingleProcess(), Progress(7, 9, 1))
    assert task.graded == [(10, 7), (24, 7), (24, 7), (12, 7)]
    assert [[reward.value for reward in group.rewards] for group in groups] == [
        [CountDigits().reward(group.prompt, c).value for c in group.completions] for group in groups
    ]


def test_empty_share_of_prompts_does_not_call_the_sampler():
    sampler = AskedInFlight(NativeSampler(policy=make_policy()))
    assert sample_and_grade(CountDigits(), sampler, [], Sampling(6)) == []
    assert sampler.asked == []


class Scripted:
    """A policy whose prompts are the lengths of their answers. It records the calls of its decode batch."""

    device, eos_ids, decoder, context_length = torch.device("cpu"), (1,), True, 100

    def __init__(self):
        self.admitted, self.stepped, self.most = [], [], 0

    def encode(self, prompt):
        return (int(prompt.text),)

    def encode_prefix(self, prompt):
        return ()

    def decode(self, ids):
        return str(len(ids))

    def create_decode_batch(self, rows):
        self.rows, self.left = rows, torch.zeros(0, dtype=torch.long)
        return self

    def count_free_slots(self):
        return self.rows - len(self.left)

    def admit(self, prompts, copies):
        lengths = torch.tensor([length for (length,) in prompts]).repeat_interleave(copies)
        self.admitted.append(len(lengths))
        self.left = torch.cat([self.left, lengths])
        self.most = max(self.most, len(self.left))
        return self._logits()[-len(lengths) :]

    def step(self, tokens):
        self.stepped.append(len(tokens))
        self.left = self.left - 1
        return self._logits()

    def keep_rows(self, places):
        self.left = self.left[places]

    def _logits(self):
        return F.one_hot((self.left == 1).long(), 2).float()


class Lengths(CountDigits):
    def reward(self, prompt, completion):
        return Reward(float(completion.text == prompt.text))


def test_free_rows_are_refilled_while_long_answers_continue(monkeypatch):
    """With four rows: an answer of nine tokens starts with three of one token. Two of one token and the other one of
    nine take their rows, then the last one of one token. In parts of four, the long answers would decode alone for
    8 + 8 steps.
    """
    monkeypatch.setattr(evaluation_module, "MAX_GRADED_ROWS", 4)
    policy = Scripted()
    prompts = [Prompt(str(i), str(length)) for i, length in enumerate([9, 1, 1, 1, 9, 1, 1, 1])]
    groups = sample_and_grade(Lengths(), NativeSampler(4, policy), prompts, Sampling(1, temperature=0.0, max_tokens=20))
    assert [group.rewards[0].value for group in groups] == [1.0] * 8
    assert policy.admitted == [4, 3, 1]
    assert policy.stepped == [1, *[2] * 7, 1]
    assert policy.most == 4, "the cache holds no more"


def test_verdicts_do_not_depend_on_the_order_of_questions():
    """Evaluations of two seeds that draw the same questions can be compared question by question."""

    class Backwards(CountDigits):
        def sample(self, step, n):
            return super().sample(step, n)[::-1]

    sampler, sampling = NativeSampler(policy=make_policy()), Sampling(max_tokens=12)
    one, other = (
        evaluate("digits", task, sample_held_out_prompts(task, 10), sampler, sampling, 0, SingleProcess())
        for task in (CountDigits(split="test"), Backwards(split="test"))
    )
    assert [group.prompt for group in one[2]] == [group.prompt for group in other[2]][::-1]
    assert 0 < sum(one[0].greedy_correct) < 10
    assert (one[0].questions_digest, one[0].greedy_correct) == (other[0].questions_digest, other[0].greedy_correct)


def test_evaluation_gathers_answers_of_other_processes():
    sampler, sampling = NativeSampler(policy=make_policy()), Sampling(4, max_tokens=12)
    task = CountDigits(split="test")

    def evaluated_by(shards):
        return evaluate("digits", task, sample_held_out_prompts(task, 10), sampler, sampling, 2, shards)

    whole, groups, best = evaluated_by(SingleProcess())

    class FirstOfTwo:
        """The other process has the last four questions, and gives the answers that this one would give."""

        def shard(self, items):
            return items[:6]

        def gather(self, items):
            return [*items, *(groups if len(items[0].completions) == 4 else best)[6:]]

    evaluation, *gathered = evaluated_by(FirstOfTwo())
    assert repr(evaluation) == repr(whole), "some of its numbers are nan"
    assert [[group.prompt for group in some] for some in gathered] == [[group.prompt for group in best]] * 2


def test_digest_separates_questions():
    assert evaluation_module.digest_questions(["1+1", "2"]) != evaluation_module.digest_questions(["1+", "12"])


def test_k_zero_is_greedy_only():
    evaluation, groups = evaluated(k=0, samples=0)
    assert groups == []
    assert math.isnan(evaluation.mean_at_k.value)
    assert 0 <= evaluation.greedy.value <= 1


def test_held_out_prompts_are_distinct():
    class Repeats:
        seed, split = 0, "test"

        def sample(self, step, n):
            return [Prompt(f"test/0/{i}", f"question {i % 3}") for i in range(n)]

    assert [p.id for p in sample_held_out_prompts(Repeats(), 8)] == ["test/0/6", "test/0/7", "test/0/5"]
