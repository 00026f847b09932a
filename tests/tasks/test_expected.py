import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.tasks.expected import QUESTIONS, Expected, normalize_literally, normalize_text
from pellucid.types import Completion, Prompt


def completion(text):
    return Completion((1, 2), (-0.5, -0.5), text, True)


def graded(text, gold, **settings):
    return Expected(**settings).reward(Prompt("p", "?", gold), completion(text)).value


@pytest.mark.parametrize(
    ("text", "gold", "whole", "literal"),
    [
        ("4", "4", 1 - 0.002, 1 - 0.002),
        ("4.", "4", 1 - 0.002, 1 - 0.002),
        ("４！", "4", 1 - 0.002, -1 - 0.004),  # fullwidth characters
        ("14", "4", -1 - 0.004, 1 - 0.004),
        ("czq是神", "czq是神！", 1 - 0.010, -1 - 0.010),
        ("CZQ 是神！", "czq是神！", 1 - 0.010, 1 - 0.012),
        ("I like machine learning.", "I like machine learning", 1 - 0.040, 1 - 0.040),
        ("I don't like machine learning", "I like machine learning", -1 - 0.048, -1 - 0.048),
        ("", "4", -1, -1),
        ("0123456789", "4", -1.02, 1 - 0.020),
    ],
)
def test_grades_by_hand(text, gold, whole, literal):
    assert graded(text, gold) == pytest.approx(whole)
    assert graded(text, gold, matching="literal") == pytest.approx(literal)


def test_right_answer_beats_a_wrong_one_at_any_length_unless_literal():
    gold = "x" * 5000
    assert graded(gold, gold) > graded("", gold)
    assert graded(gold, gold, matching="literal") < graded("", gold, matching="literal")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("matching", ["whole", "literal"])
@pytest.mark.parametrize("language", ["zh", "en"])
def test_the_gold_answer_is_right_and_garbage_is_not(split, matching, language):
    task = Expected(split=split, matching=matching, language=language)
    prompts = task.sample(0, 4)
    assert {p.answer for p in prompts} == set(QUESTIONS[language])
    for prompt in prompts:
        assert task.reward(prompt, completion(prompt.answer)).is_correct
        for garbage in ("", "?", "\x00" * 99, "法" * 9999):
            assert not task.reward(prompt, completion(garbage)).is_correct


@pytest.mark.parametrize("language", ["zh", "en"])
def test_all_questions_come_before_any_repeats_and_splits_share_none(language):
    task = Expected(language=language)
    walk = [p.question for step in range(4) for p in task.sample(step, 3)]
    train, test = ({asked[i] for asked in QUESTIONS[language].values()} for i in (0, 1))
    assert all(set(walk[i : i + 4]) == train for i in (0, 4, 8))
    assert train.isdisjoint(test)
    assert {p.question for p in Expected(language=language, split="test").sample(0, 4)} == test
    assert task.sample(2, 3) == task.sample(2, 3)
    assert task.sample(0, 1)[0].text[0]["role"] == "system"


def test_text_is_normalized_for_both_kinds_of_matching():
    assert normalize_text("Ｃzq 是\u3000神！") == "czq是神"
    assert normalize_literally(' "Hi", you! \n') == "hiyou"
    assert normalize_literally("是神！") == "是神！"


@given(st.text(alphabet="a\u00e9e\u0301\u0323\u0316\uff21\u0f73\uac00 .", max_size=30))
def test_text_is_normalized_by_nfkc_and_casefold(text):
    folded = unicodedata.normalize("NFKC", text).casefold()
    assert normalize_text(text) == "".join(c for c in folded if not c.isspace() and c != ".")


@pytest.mark.parametrize("settings", [{"hit_reward": -1.0}, {"length_penalty": -0.1}])
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Expected(**settings)
