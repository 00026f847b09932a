import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.tasks.countdown import Countdown, extract_expression, generate_expression
from pellucid.types import Completion, Prompt


def completion(text):
    return Completion((1, 2), (-0.5, -0.5), text, True)


def graded(text, numbers=(3, 5, 2), target=13, **settings):
    prompt = Prompt("p", "?", str(target), {"numbers": list(numbers)})
    return Countdown(**settings).reward(prompt, completion(text)).value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 * 5 - 2", 1.0),
        ("(3*5)-2 = 13", 1.0),
        ("Let me think: 3 + 5 + 2 = 10.\n3 * 5 - 2", 1.0),
        ("<think>2 * 5 + 3 = 13</think><answer>2 * 5 + 3</answer>", 1.0),
        ("It is \\boxed{2 \u00d7 5 + 3}, as you see", 1.0),
        ("3 + 5 + 2", 0.1),  # the right numbers, another value
        ("3 + 5 + 5", 0.0),  # 13, with a number twice
        ("10 + 3", 0.0),
        ("13", 0.0),
        ("3 * 5 - 2.0", 0.0),
        ("3 * 5 - 2 + 0", 0.0),
        ("3 * 5 - 2 = 14", 1.0),  # text after the equals sign is not part of the expression
        ("The answer is 3 * 5 - 2", 0.0),
        ("", 0.0),
        ("3 / (5 - 5) + 2", 0.0),
    ],
)
def test_grades_by_hand(text, value):
    assert graded(text) == value


@pytest.mark.parametrize(
    "text",
    [
        r"11 \times (14 - 1)",
        r"$11 \cdot (14 - 1)$",
        "`11 * (14 - 1)`",
        "**11 * (14 - 1)**",
        "**`11 * (14 - 1)`**.",
        "143 = 11 * (14 - 1)",
        "143 = 11 * (14 - 1) = 143",
        "11 * (14 - 1).",
        r"\boxed{11 \times \left(14 - 1\right)}",
        r"\boxed{14} is wrong. So \boxed{11{(14-1)}}",
        r"\[143 = 11\times(14-1)\]",
        "\uff0814\uff0d1\uff09\u00d711",
        "<think>14 - 1 = 13</think> 11 * (14 - 1)",
        "<answer>(14\n- 1) * 11</answer>",
        "-11 * (1 - 14)",
    ],
)
def test_other_notations_of_the_same_expression_score_1(text):
    assert graded(text, (14, 1, 11), 143) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "(14+1+11)*0.0+143.0",
        "(14+1+11)*0+143",
        "(14+1+11)*.0+143.",
        "14+1+11+117.",
        "14.0+1+11+117",
        "(14+1+11)*1E-99+143",
        "11*(14-1)**1",
        "11*(14-1)+0j",
        "0XB*(14-1)",
        "1_1*(14-1)",
        "~-11*(14-1)*-1",
        "11*(14-1)//1",
        "11*(14-1)%1000",
        "11*(14-1) if 1 else 0",
        "max(11*(14-1), 1)",
        "143 = 143",
        r"\boxed{11 * (14 - 1)} no, \boxed{\frac{143}{1}}",
    ],
)
def test_expressions_with_other_constants_or_operators_score_zero(text):
    """The first text once earned 1 for any question, because the check counted whole numbers only."""
    assert graded(text, (14, 1, 11), 143) == 0.0


SCRAPS = [*"0123 .()+-*/=_~", "0.0*", "+0", "-0.5", "e0", "E0", "**1", "//1", "1_", "0X", "j", "13=", "=13"]


@st.composite
def nearly_right(draw):
    """Draw an expression of the three numbers with up to three scraps inserted anywhere."""
    text = draw(st.sampled_from(["3*5-2", "3+2*5", "(5*3)-2", "2-(-3*5)-4", "3+5+2", "5-2*3"]))
    for scrap in draw(st.lists(st.sampled_from(SCRAPS), max_size=3)):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + scrap + text[place:]
    return text


@given(nearly_right())
def test_rewarded_expressions_use_exactly_the_given_numbers(text):
    """Check against an independent reader: Python counts the runs of digits and evaluates the expression."""
    value = graded(text)
    if value:
        side = extract_expression(text)
        assert set(side) <= set("0123456789 +-*/()")
        assert "**" not in side
        assert "//" not in side
        assert Counter(map(int, re.findall(r"\d+", side))) == Counter([3, 5, 2])
    if value == 1.0:
        products = re.sub(r"(?<=[\d)])(?=\()|(?<=\))(?=\d)", "*", side)
        assert eval(re.sub(r"(\d+)", r"Fraction(\1)", products), {"Fraction": Fraction}) == 13


def test_the_format_reward_is_a_setting():
    assert graded("3 + 5 + 2", format_reward=0.5) == 0.5


@pytest.mark.parametrize("numbers", [2, 3, 4, 6])
def test_gold_answer_scores_1_and_uses_the_given_numbers(numbers):
    task = Countdown(numbers=numbers)
    for prompt in task.sample(0, 50):
        reward = task.reward(prompt, completion(prompt.columns["solution"]))
        assert reward.value == 1.0
        assert reward.is_correct
        assert len(prompt.columns["numbers"]) == numbers
        assert all(str(n) in prompt.question for n in [*prompt.columns["numbers"], prompt.answer])
        for garbage in (prompt.answer, "0", "x" * 10_000, "(" * 10_000, "1/0"):
            assert task.reward(prompt, completion(garbage)).value == 0.0


def test_splits_share_no_set_of_numbers_in_any_order():
    def sets(split):
        prompts = [p for step in range(20) for p in Countdown(split=split, largest=9).sample(step, 20)]
        return {tuple(sorted(p.columns["numbers"])) for p in prompts}

    train, test = sets("train"), sets("test")
    assert len(train) > 50 < len(test) + 45
    assert train.isdisjoint(test)


def test_sampling_is_a_function_of_seed_split_and_step():
    draws = [Countdown(seed=s).sample(step, 8) for s, step in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert draws[0] == draws[1]
    for one, other in pairwise(draws[1:]):
        assert [p.question for p in one] != [p.question for p in other]


def test_random_expressions_have_balanced_brackets():
    for seed in range(50):
        text, _ = generate_expression([2, 3, 4, 5], Random(seed))
        depth = 0
        for c in text:
            depth += {"(": 1, ")": -1}.get(c, 0)
            assert depth >= 0
        assert depth == 0


def test_expression_is_extracted_from_the_text():
    assert extract_expression("a\n\n 1 + 2 = 3 \n ") == "1 + 2"
    assert extract_expression("\\boxed{1} \\boxed{2 * 3}") == "2 * 3"
    assert extract_expression("") == ""


@pytest.mark.parametrize(
    "settings",
    [{"numbers": 1}, {"numbers": 7}, {"largest": 4}, {"format_reward": 1.0}, {"test_share": 0.0}, {"template": "?"}],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Countdown(**settings)
