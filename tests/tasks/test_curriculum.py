"""Test the order of a curriculum's questions, on a task with known accuracies."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.prefixed import Prefixed
from pellucid.types import Completion, Group, Prompt, Reward, UserError

GROUP = 4


@dataclass(frozen=True)
class Numbered:
    """A task whose question q has the text str(q)."""

    seed: int = 0
    split: str = "train"

    def sample(self, step, n):
        return [Prompt(f"{self.split}/{step}/{q}", str(q)) for q in range(n)]

    def reward(self, prompt, completion):
        return Reward(1.0)

    def working(self, prompt):
        return "working"


def answered(prompts, right=lambda q: q % (GROUP + 1), **group):
    """Return groups of four answers, of which `right(q)` are correct."""
    return [
        Group(
            prompt,
            (0,),
            (Completion((1,), (0.0,), "", True),) * GROUP,
            tuple(Reward(float(i < right(int(prompt.text)))) for i in range(GROUP)),
            **group,
        )
        for prompt in prompts
    ]


def walk(task, steps, n, right=lambda q: q % (GROUP + 1), first=0):
    """Return the questions asked in each step."""
    asked = []
    for step in range(first, first + steps):
        prompts = task.sample(step, n)
        task.observe(step, answered(prompts, right))
        asked.append([int(prompt.text) for prompt in prompts])
    return asked


def graded(prompt, *rewards):
    answer = Completion((1,), (0.0,), "", True)
    return Group(prompt, (0,), (answer,) * len(rewards), rewards)


def test_group_with_mixed_rewards_does_not_rest_even_if_none_is_correct():
    """The group earns a tenth of a point for format, so its wrong answers differ in reward."""
    task = Curriculum(Numbered(), pool=4)
    one, other = task.sample(0, 2)
    tried, failed = Reward(0.1, correct=False), Reward(0.0, correct=False)
    task.observe(0, [graded(one, tried, failed), graded(other, tried, tried)])
    assert list(task.curriculum_state.dead_since) == [int(other.text)]
    assert set(task.curriculum_state.accuracy.values()) == {0.0}


@pytest.mark.parametrize("order", ["running", "described"])
def test_failed_rewards_do_not_count_toward_accuracy(order):
    task = Curriculum(Numbered(), pool=4, order=order)
    one, other = task.sample(0, 2)
    lost, right = Reward(float("nan"), error="no reward within 10 s"), Reward(1.0)
    task.observe(0, [graded(one, lost, lost), graded(other, lost, right)])
    assert task.curriculum_state.accuracy == {int(other.text): 1.0}
    assert len(task.curriculum_state.left) == 2, "it counts as asked"


def test_conversations_with_equal_last_messages_are_different_questions():
    @dataclass(frozen=True)
    class Chats(Numbered):
        def sample(self, step, n):
            ask = {"role": "user", "content": "How many?"}
            return [Prompt(str(q), ({"role": "user", "content": f"I have {q} apples."}, ask)) for q in range(n)]

    task = Curriculum(Chats(), pool=4)
    assert len(task.questions) == 4
    assert len({prompt.key for prompt in task.sample(0, 4)}) == 4


def test_described_order_goes_from_easy_to_hard_from_the_second_epoch_on():
    task = Curriculum(Numbered(), pool=10, order="described")
    first = walk(task, 5, 2)
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    second = walk(task, 5, 2, first=5)
    # 4 and 9 are right 4 times of 4, 3 and 8 are right 3 times, and so on. Ties keep the order of the pool.
    assert second == [[4, 9], [3, 8], [2, 7], [1, 6], [0, 5]]
    reversed_since = [walk(task, 5, 2, right=lambda q: GROUP - q % (GROUP + 1), first=step) for step in (10, 15, 20)]
    assert reversed_since == [second] * 3, "measured once"


def test_running_estimates_follow_the_policy():
    task = Curriculum(Numbered(), pool=6, window=1, decay=0.5, rest=1)
    walk(task, 3, 2, right=lambda q: 1 if q < 3 else 3)
    assert task.state()["accuracy"] == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.75, 4: 0.75, 5: 0.75}
    [hard] = walk(task, 1, 1, right=lambda q: 1, first=3)
    assert task.state()["accuracy"][hard[0]] == 0.5
    assert hard == [3], "the easiest first"


def test_questions_without_signal_rest_and_come_back():
    task = Curriculum(Numbered(), pool=10, window=1, rest=6)
    walk(task, 5, 2)
    dead = {0, 4, 5, 9}
    second = walk(task, 3, 2, first=5)
    assert {q for step in second for q in step} == set(range(10)) - dead
    third = walk(task, 5, 2, first=8)
    assert {q for step in third for q in step} == set(range(10)) - {9}, "9 was dead in step 4, which is 4 steps ago"


def test_zero_rest_lets_dead_questions_rest_forever():
    task = Curriculum(Numbered(), pool=10, rest=0)
    walk(task, 5, 2)
    assert not {0, 4, 5, 9} & {q for step in walk(task, 60, 2, first=5) for q in step}


def test_all_questions_are_asked_if_all_are_dead():
    task = Curriculum(Numbered(), pool=4, rest=0)
    asked = walk(task, 8, 2, right=lambda q: 0)
    assert sorted(q for step in asked for q in step) == sorted([0, 1, 2, 3] * 4)


def test_question_with_signal_again_stops_resting():
    task = Curriculum(Numbered(), pool=4, window=1, rest=0)
    walk(task, 2, 2, right=lambda q: 0)
    walk(task, 2, 2, right=lambda q: 2 if q < 2 else 0, first=2)
    asked = walk(task, 2, 2, right=lambda q: 2, first=4)
    assert [sorted(step) for step in asked] == [[0, 1], [0, 1]]


def test_questions_are_shuffled_only_within_the_window():
    task = Curriculum(Numbered(), pool=40, window=8)
    asked = [q for step in walk(task, 20, 2) for q in step]
    assert sorted(asked) == list(range(40))
    assert asked != sorted(asked)
    places = [abs(place - q) for place, q in enumerate(asked) if q > place]
    assert max(places) < 8


def test_epoch_asks_every_question_and_its_last_step_is_filled_up():
    task = Curriculum(Numbered(), pool=7, window=1)
    asked = walk(task, 3, 3)
    assert [len(set(step)) for step in asked] == [3, 3, 3]
    assert {q for step in asked for q in step} == set(range(7))


@pytest.mark.parametrize("order", ["running", "described"])
def test_rounds_of_a_step_share_no_question(order):
    """This also holds at the end of an epoch, when 4 of the 40 questions are left."""
    task = Curriculum(Numbered(), pool=40, order=order)
    for before in (0, 9):
        walk(task, before, 4)
        step = task.curriculum_state.step
        rounds = [task.sample(step + 100 * r, 8) for r in range(4)]
        assert len({p.id for prompts in rounds for p in prompts}) == 32
        assert task.sample(step, 8) == rounds[0], "asking changes nothing"


def test_resting_questions_are_used_only_if_the_others_do_not_suffice():
    task = Curriculum(Numbered(), pool=10, window=1, rest=0)
    walk(task, 5, 2)
    awake = {1, 2, 3, 6, 7, 8}
    assert {q for step in walk(task, 30, 4, first=5) for q in step} == awake
    assert {q for step in walk(task, 1, 8, first=35) for q in step} > awake


def test_pool_smaller_than_a_step_is_refused_with_a_fix():
    with pytest.raises(UserError, match=r"holds 4 .* needs 5.*task\.pool"):
        Curriculum(Numbered(), pool=4).sample(0, 5)


def test_repeated_questions_of_the_task_count_once():
    @dataclass(frozen=True)
    class Few(Numbered):
        def sample(self, step, n):
            return [replace(p, text=str(int(p.text) % 6)) for p in super().sample(step, n)]

    task = Curriculum(Few(), pool=100)
    assert [q for step in walk(task, 3, 2) for q in sorted(step)].__len__() == 6
    assert task.state()["epoch"] == 1


def test_state_of_a_larger_pool_is_cut():
    large, small = Curriculum(Numbered(), pool=40), Curriculum(Numbered(), pool=8)
    walk(large, 3, 8)
    small.load_state(json.loads(json.dumps(large.state())))
    assert max(small.state()["accuracy"]) == 7
    walk(small, 4, 4, first=3)


def test_described_order_measures_only_the_first_answers_without_prefix():
    task = Curriculum(Numbered(), pool=2, order="described")
    task.observe(0, answered(task.sample(0, 2), demonstration=(1, 2, 3)))
    walk(task, 1, 2, right=lambda q: q, first=1)
    walk(task, 1, 2, right=lambda q: 4, first=2)
    assert task.state()["accuracy"] == {0: 0.0, 1: 0.25}


def test_resumed_state_gives_the_same_questions():
    whole, saved, resumed = (Curriculum(Numbered(), pool=12, rest=3) for _ in range(3))
    walk(whole, 7, 4)
    walk(saved, 7, 4)
    resumed.load_state(json.loads(json.dumps(saved.state())))
    assert resumed.state() == whole.state()
    assert walk(resumed, 9, 4, first=7) == walk(whole, 9, 4, first=7)


def test_group_with_a_prefix_is_asked_but_not_measured():
    task = Curriculum(Numbered(), pool=4)
    metrics = task.observe(0, answered(task.sample(0, 2), demonstration=(1, 2, 3)))
    assert task.state()["accuracy"] == {}
    assert len(task.state()["left"]) == 2
    assert metrics.pop("curriculum/measured") == 0.0
    assert metrics == {"curriculum/epoch": 0.0, "curriculum/accuracy": 0.0, "curriculum/resting": 0.0}


def test_curriculum_reports_its_metrics():
    task = Curriculum(Numbered(), pool=10)
    for step in range(5):
        metrics = task.observe(step, answered(task.sample(step, 2)))
    assert metrics.pop("curriculum/measured") == 1.0
    assert metrics == {"curriculum/epoch": 1.0, "curriculum/accuracy": 0.5, "curriculum/resting": 0.4}


def test_held_out_questions_come_from_the_inner_task():
    assert Curriculum(Numbered()).with_split("test") == Numbered(split="test")
    assert Curriculum(Numbered(split="test")).with_split("train") == Curriculum(Numbered())


def test_two_curricula_share_no_state():
    one = Curriculum(Numbered(), pool=4)
    walk(one, 1, 2)
    assert replace(one).sample(0, 2) != one.sample(1, 2)
    assert replace(one).state()["step"] == 0


@pytest.mark.parametrize("wrong", [{"pool": 0}, {"window": 0}, {"decay": 1.0}, {"rest": -1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Curriculum(Numbered(), **wrong)


def test_curriculum_cannot_wrap_prefixed_or_curriculum():
    with pytest.raises(ValueError, match="around it"):
        Curriculum(Prefixed(Numbered()))
    with pytest.raises(ValueError, match="around it"):
        Curriculum(Curriculum(Numbered()))
