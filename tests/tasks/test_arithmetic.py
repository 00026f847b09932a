import re
from dataclasses import replace

import pytest
from pydantic import ValidationError, create_model

from pellucid.tasks.arithmetic import Arithmetic, write_working
from pellucid.types import Completion

PATTERN = re.compile(r"What is (\d+) ([-+*]) (\d+)\? Answer with the number only\.")


def completion(text):
    return Completion((1, 2), (-0.5, -0.5), text, True)


def problems(task, step=0, n=64):
    """Return the (a, operator, b) of each problem, parsed from the prompts."""
    questions = [PATTERN.fullmatch(prompt.question) for prompt in task.sample(step, n)]
    return [(int(m[1]), m[2], int(m[3])) for m in questions if m]


def pairs(task, n=13_000):
    return {frozenset((a, b)) for a, _, b in problems(task, n=n)}


def test_answers_are_right_and_prompts_are_chats():
    for prompt in Arithmetic(operators=("+", "-", "*"), digits=2).sample(3, 50):
        (message,) = prompt.text
        a, operator, b = PATTERN.fullmatch(message["content"]).groups()
        by_hand = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert message["role"] == "user"
        assert prompt.answer == str(by_hand[operator])


@pytest.mark.parametrize("digits", [1, 2, 3, 20, 1000])
def test_the_gold_answer_scores_1_and_garbage_does_not(digits):
    task = Arithmetic(digits=digits, operators=("+", "-", "*"))
    for prompt in task.sample(0, 20):
        assert task.reward(prompt, completion(prompt.answer)).value == 1.0
        assert task.reward(prompt, completion(f"I think it is {prompt.answer}.")).is_correct
        for garbage in ("", "no idea", prompt.answer + "1", f"{prompt.answer} or 5000", "0123456789" * 10, "9" * 9999):
            assert task.reward(prompt, completion(garbage)).value == 0.0


@pytest.mark.parametrize(("digits", "low", "high"), [(1, 0, 9), (2, 10, 99), (3, 100, 999)])
def test_operands_have_the_configured_number_of_digits(digits, low, high):
    operands = [x for a, _, b in problems(Arithmetic(digits=digits), n=2000) for x in (a, b)]
    assert low <= min(operands) <= low + (high - low) // 20
    assert high - (high - low) // 20 <= max(operands) <= high


@pytest.mark.parametrize(("digits", "count"), [(1, 55), (2, 4095)])
def test_splits_share_no_pair_and_cover_all_pairs(digits, count):
    train = pairs(Arithmetic(digits=digits))  # 13,000 problems are more than either split holds
    test = pairs(Arithmetic(digits=digits, split="test"))
    assert train.isdisjoint(test)
    assert len(train | test) == count
    assert abs(len(test) / count - 0.25) < 0.1


def test_splits_of_drawn_problems_share_no_pair():
    train, test = Arithmetic(digits=3, test_share=0.5), Arithmetic(digits=3, test_share=0.5, split="test")
    assert pairs(train, n=3000).isdisjoint(pairs(test, n=3000))


def test_held_out_pairs_are_held_out_in_both_orders_and_every_operator():
    test = set(problems(Arithmetic(split="test", operators=("+", "-", "*")), n=1000))
    assert {(b, operator, a) for a, _, b in test for operator in "+-*"} == test


def test_all_seeds_share_the_test_split():
    first, second = Arithmetic(seed=1, split="test"), Arithmetic(seed=2, split="test")
    assert pairs(first, n=200) == pairs(second, n=200)


@pytest.mark.parametrize("digits", [1, 3])
def test_sample_is_a_pure_function_of_seed_split_and_step(digits):
    task = Arithmetic(digits=digits, seed=5)
    assert task.sample(7, 16) == replace(task).sample(7, 16)
    others = [replace(task, seed=6).sample(7, 16), task.sample(8, 16), replace(task, split="test").sample(7, 16)]
    assert all([p.question for p in other] != [p.question for p in task.sample(7, 16)] for other in others)


@pytest.mark.parametrize("digits", [1, 2, 3, 9])
def test_problems_of_a_step_are_distinct(digits):
    sampled = problems(Arithmetic(digits=digits, split="test"), n=24)
    assert len(set(sampled)) == 24


def test_a_used_up_split_starts_again():
    everything = set(problems(Arithmetic(split="test"), n=2000))
    sampled = problems(Arithmetic(split="test"), n=2 * len(everything) + 3)
    assert set(sampled[: len(everything)]) == everything
    assert set(sampled[len(everything) : 2 * len(everything)]) == everything
    assert len(sampled) == 2 * len(everything) + 3


@pytest.mark.slow
def test_large_split_starts_again_when_used_up():
    n = 10_000  # more than the test split of three digits holds
    sampled = problems(Arithmetic(digits=3, operators=("+",), split="test", test_share=0.01), n=n)
    assert len(sampled) == n
    assert 7_000 < len(set(sampled)) < n


def test_ids_name_split_step_and_position():
    assert [prompt.id for prompt in Arithmetic(split="test").sample(4, 2)] == ["test/4/0", "test/4/1"]


def test_other_braces_in_the_template_are_kept():
    (prompt,) = Arithmetic(template=r"{a}{operator}{b} in \boxed{}").sample(0, 1)
    assert prompt.question.endswith(r" in \boxed{}")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"digits": 0}, "digits = 0"),
        ({"digits": 1001}, "digits = 1001"),
        ({"operators": ()}, "operators"),
        ({"operators": ("+", "+")}, "operators"),
        ({"operators": ("/",)}, "operators"),
        ({"test_share": 0.0}, "test_share"),
        ({"test_share": 1.0}, "test_share"),
        ({"test_share": 0.99}, "test_share = 0.99 leaves one split without problems"),
        ({"template": "What is {a} + {b}?"}, "{operator}"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, says):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Arithmetic(**settings)
    assert says in str(caught.value)


def test_task_is_its_own_config_section():
    config = create_model("Config", __config__={"extra": "forbid"}, task=(Arithmetic, ...))
    section = {"name": "arithmetic", "digits": 2, "operators": ["-"]}
    assert config.model_validate({"task": section}).task == Arithmetic(digits=2, operators=("-",))
    with pytest.raises(ValidationError, match="digits = 0 must be from 1"):
        config.model_validate({"task": {"digits": 0}})


@pytest.mark.parametrize(
    ("a", "operator", "b", "said"),
    [
        (34, "+", 58, "34 + 50 = 84, 4 + 8 = 12, 80 + 12 = 92"),
        (73, "-", 36, "73 - 30 = 43, 43 = 30 + 13, 13 - 6 = 7, 30 + 7 = 37"),
        (57, "-", 23, "57 - 20 = 37, 37 = 20 + 17, 17 - 3 = 14, 20 + 14 = 34"),
        (3, "*", 4, "3 * 4 = 12"),
        (3, "-", 4, "3 - 4 = -1"),
    ],
)
def test_working_splits_operands_into_tens_and_ones(a, operator, b, said):
    assert write_working(a, operator, b) == said


@pytest.mark.slow
@pytest.mark.parametrize("operators", [("+",), ("-",), ("*",)])
@pytest.mark.parametrize("digits", [1, 2, 3])
def test_equations_of_a_working_are_true_and_the_last_gives_the_answer(digits, operators):
    """Python evaluates each equation. With two digits this covers every sum and difference."""
    task = Arithmetic(digits=digits, operators=operators)
    for prompt in task.sample(0, 8100 if digits == 2 else 100):
        steps = task.working(prompt).split(", ")
        for left, right in (step.split(" = ") for step in steps):
            assert eval(left) == eval(right), steps
        assert steps[-1].endswith(f" = {prompt.answer}")
        assert task.reward(prompt, Completion((1,), (0.0,), task.working(prompt), True)).value == 1.0
