from fractions import Fraction

import pytest

from pellucid.tasks.sorting import GRADINGS, Sorting, grade_distance, grade_inclusion_ordering, grade_positions
from pellucid.types import Completion, Prompt


def completion(text):
    return Completion((1, 2), (-0.5, -0.5), text, True)


@pytest.mark.parametrize(
    ("grade", "answer", "value"),
    [
        (grade_positions, [1, 2, 3], 1),
        (grade_positions, [1, 3, 2], Fraction(1, 3)),
        (grade_positions, [1, 2], Fraction(2, 3)),
        (grade_positions, [1, 2, 3, 3, 3, 3], Fraction(1, 2)),
        (grade_positions, [], 0),
        (grade_distance, [1, 2, 3], 1),
        (grade_distance, [1, 3, 2], 1 - Fraction(1, 3)),
        (grade_distance, [3, 2, 1], 1 - Fraction(2, 3)),
        (grade_distance, [1, 2, 999], 1 - Fraction(1, 3)),
        (grade_distance, [1, 2, 3, 4], Fraction(3, 4)),
        (grade_distance, [], 0),
        (grade_inclusion_ordering, [1, 2, 3], 1),
        (grade_inclusion_ordering, [1, 3, 2], Fraction(4, 5)),
        (grade_inclusion_ordering, [1, 1, 1], Fraction(3, 5)),  # one of the three ones is in the prompt
        (grade_inclusion_ordering, [3, 2, 1], Fraction(3, 5)),
        (grade_inclusion_ordering, list(range(50)), Fraction(3 + 49, 99)),
        (grade_inclusion_ordering, [], 0),
    ],
)
def test_grades_by_hand(grade, answer, value):
    assert grade(answer, [1, 2, 3]) == pytest.approx(float(value))


@pytest.mark.parametrize("grading", GRADINGS)
def test_only_the_gold_answer_scores_1(grading):
    task = Sorting(grading=grading)
    for prompt in task.sample(0, 50):
        numbers = prompt.columns["numbers"]
        assert task.reward(prompt, completion(prompt.answer)).value == 1.0
        others = ["", "no", "9" * 9999, "0 1 2 3 4 5 6 7 8 9", " ".join(map(str, sorted(numbers, reverse=True)))]
        for garbage in others:
            reward = task.reward(prompt, completion(garbage))
            if len(set(numbers)) > 1:
                assert reward.value < 1.0
                assert not reward.is_correct
        assert min(task.reward(prompt, completion(text)).value for text in others) >= 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1, 2, 3", True),
        ("1-2-3", True),
        ("First 3 2 1, then <answer>1 2 3</answer>", True),
        (r"3 2 1 are \boxed{1, 2, 3}", True),
        ("-1, 2, 3", False),
        ("1, 2, \u22123", False),
        ("1, 2, 3, " + "9" * 30, False),
        ("1, 2, 3, 4", False),
    ],
)
def test_every_number_of_the_answer_counts(text, right):
    prompt = Prompt("p", "?", "1, 2, 3", {"numbers": [3, 1, 2]})
    assert Sorting(length=3, grading="exact").reward(prompt, completion(text)).is_correct == right


def test_prompts_hold_their_numbers_and_splits_share_no_set():
    def prompts(split):
        return [p for step in range(10) for p in Sorting(split=split).sample(step, 40)]

    sets = {split: {tuple(sorted(p.columns["numbers"])) for p in prompts(split)} for split in ("train", "test")}
    assert sets["train"].isdisjoint(sets["test"])
    for prompt in prompts("test")[:20]:
        assert ", ".join(map(str, prompt.columns["numbers"])) in prompt.question
        assert prompt.answer == ", ".join(map(str, sorted(prompt.columns["numbers"])))


def test_sampling_is_a_function_of_seed_split_and_step():
    assert Sorting().sample(3, 5) == Sorting().sample(3, 5) != Sorting(seed=1).sample(3, 5)
    assert Sorting().sample(3, 5) != Sorting().sample(4, 5)


@pytest.mark.parametrize("settings", [{"length": 1}, {"largest": 0}, {"test_share": 1.0}, {"template": "sort"}])
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sorting(**settings)
