"""Test the built-in reward terms and the checks of gold answers."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.rewards import terms as rewards
from pellucid.rewards.functions import build_trainer_state
from pellucid.rewards.terms import RewardTerm, compute_term_parts, find_gold_fault, label_terms
from pellucid.types import Completion, Progress, Prompt, UserError

FUNCTIONS = Path(__file__).with_name("trl_functions.py")


def grade(term, prompt, completion):
    return compute_term_parts(term, [(prompt, completion)], build_trainer_state(Progress(), None))[0].value


def plain(text="What is 2 + 2?", answer="", **columns):
    return Prompt("train/0/0", text, answer, columns)


def chat(answer="", **columns):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"})
    return Prompt("train/0/0", messages, answer, columns)


def completion(text, tokens=3):
    return Completion((5,) * tokens, (-1.0,) * tokens, text, True)


def value(name, text, answer="", **settings):
    return grade(RewardTerm(name, **settings), plain(answer=answer), completion(text))


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("Paris", "paris", 1.0),
        ("  New\n York ", "new york", 1.0),
        ("I think <answer> Paris </answer>", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("16", "6", 0.0),
        ("", "Paris", 0.0),
        ("<answer>London</answer> or Paris", "Paris", 0.0),
        (r"So \boxed{Paris}.", "Paris", 1.0),
        (r"\boxed{Paris}? No: <answer>Rome</answer>", "Paris", 0.0),
        ("<think>Rome? No.</think>Paris", "Paris", 1.0),
    ],
)
def test_exact_ignores_case_and_white_space_only(text, gold, expected):
    assert value("exact", text, gold) == expected


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("1080", "1,080", 1.0),
        ("so $1,080.00.", "1080.0", 1.0),
        ("first 80, then 1,080", "1,080", 1.0),
        ("080", "1,080", 0.0),
        ("1", "1,080", 0.0),
        ("0123456789", "6", 0.0),
        ("16", "6", 0.0),
        ("-6", "6", 0.0),
        ("6 <answer>7</answer>", "7", 1.0),
        ("7 <answer>none</answer>", "7", 0.0),
        ("9" * 10_000, "9", 0.0),
        ("9" * 10_000, "9" * 10_000, 0.0),
        ("none", "none", 0.0),
        (r"\boxed{7}, which is 3 + 4", "7", 1.0),
        (r"\boxed{7}. No: \boxed{\frac{8}{2}}", "4", 1.0),
        (r"<think>\boxed{7}</think> It is 8.", "7", 0.0),
        (r"\boxed{\frac{1}{8}}", "8", 0.0),
        ("8 m^2", "2", 0.0),
        ("8 m^2", "8", 1.0),
        ("- 7", "7", 0.0),
    ],
)
def test_numeric_compares_the_last_numbers_as_numbers(text, gold, expected):
    assert value("numeric", text, gold) == expected


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (r"The solution is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", 1.0),
        (r"The solution is $\boxed{0.5}$.", r"\frac{1}{2}", 1.0),
        (r"<answer>\frac{2}{4}</answer>", r"$\frac12$", 1.0),
        (r"$\boxed{1 + x^2}$", "x^2+1", 1.0),
        (r"$\boxed{1080}$", "1,080", 1.0),
        ("She makes 18 dollars", "18", 1.0),
        (r"$(1,\infty)$", "x>1", 1.0),
        (r"$x>1$", r"(1,\infty)", 1.0),
        (r"$\boxed{x^2}$", "x^2+1", 0.0),
        (r"$\boxed{\frac{1}{3}}$", r"\frac{1}{2}", 0.0),
        ("no idea", r"\frac{1}{2}", 0.0),
        ("", r"\frac{1}{2}", 0.0),
        (r"\frac{" * 300, "7", 0.0),
        ("9" * 10_000, "7", 0.0),
    ],
)
def test_math_compares_expressions(text, gold, expected):
    assert value("math", text, gold) == expected


def test_math_does_not_apply_to_an_unreadable_gold_answer():
    assert value("math", "7", "some $ or other") is None


@pytest.mark.parametrize("name", ["exact", "numeric", "math"])
def test_any_of_several_gold_answers_is_right(name):
    prompt = Prompt("0", "?", "7", alternatives=("some $ or other", "9"))
    grades = [grade(RewardTerm(name), prompt, completion(text)) for text in (r"\boxed{7}", r"\boxed{9}", r"\boxed{8}")]
    assert grades == [1.0, 1.0, 0.0]
    unreadable = replace(prompt, answer="9^{9^{9^9}}", alternatives=("some $ or other",))
    assert (grade(RewardTerm(name), unreadable, completion("7")) is None) == (name == "math")


@pytest.mark.parametrize(
    ("name", "text", "gold", "alone", "behind_think"),
    [
        ("numeric", r"So \boxed{4}? Hmm", "4", 1.0, 0.0),
        ("math", r"So \boxed{4}? Hmm", "4", 1.0, 0.0),
        ("exact", r"So \boxed{4}? Hmm", "4", 1.0, 0.0),
        ("numeric", "It is 3.</think> 4", "4", 1.0, 1.0),
        ("math", r"\boxed{3}</think> \boxed{4}", "4", 1.0, 1.0),
        ("tagged", "2 + 2</think> <answer>4</answer>", "4", 0.0, 1.0),
        ("numeric", "2 + 2 <answer>4</answer>", "4", 1.0, 0.0),
    ],
)
def test_think_tag_from_the_chat_template_counts_as_opened(name, text, gold, alone, behind_think):
    said = completion(text)
    assert grade(RewardTerm(name), plain(answer=gold), said) == alone
    assert grade(RewardTerm(name), plain(answer=gold), replace(said, thinking=True)) == behind_think
    assert grade(RewardTerm(name), plain(answer=gold), replace(said, text="<think>" + text)) == behind_think


@pytest.mark.parametrize(
    "gold",
    [
        *(
            "7",
            "1,080",
            r"10,\!000",
            r"\$32,\!348",
            r"\frac{1}{2}",
            "90^\\circ",
            r"60\%",
            "5 cm",
            "x^2+1",
            "(1,2)",
            "June 20",
            "yes",
        ),
        *(
            "The cat sat on the mat.",
            r"We add. It is $\boxed{\frac{1}{2}}$.",
            "The answer is 0.5",
            "12:30",
            r"\text{12}",
            "-1",
        ),
        *(
            "(-5,3)",
            r"x \ge 0",
            r"0.\overline{3}",
            "Route 66",
            r"\pm 3",
            r"\frac{1}{2^{99}}",
            "3 or 5",
            "100",
            "99",
            "0",
            "A",
            "(B)",
        ),
    ],
)
def test_common_gold_answers_have_no_fault(gold):
    assert find_gold_fault("math", gold) is None


@pytest.mark.parametrize(
    ("name", "gold", "reason"),
    [
        ("numeric", "seven", "holds no number"),
        ("numeric", "3 or 5", "not a single number"),
        ("math", "some $ or other", "cannot be read by the reward math"),
        ("math", "9^{9^{9^9}}", "cannot be read by the reward math"),
        ("math", "He had $5 and then bought 3 apples", "answer_pattern"),
    ],
)
def test_unusable_gold_answer_is_reported_with_the_reason(name, gold, reason):
    assert reason in (find_gold_fault(name, gold) or "")


def test_gold_answer_that_credits_another_number_is_reported(monkeypatch):
    """The grader credits everything: the check does not rely on correct graders."""
    find_gold_fault.cache_clear()
    monkeypatch.setitem(rewards.GOLD_GRADERS, "math", lambda text, gold: 1.0)
    assert "another number" in (find_gold_fault("math", "7") or "")
    assert find_gold_fault("math", "yes") is None
    find_gold_fault.cache_clear()


def test_math_names_the_extra_it_needs(monkeypatch):
    rewards.load_math_verify.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r'^[^\n]*pip install "pellucid\[data\]"$'):
        RewardTerm("math")
    monkeypatch.undo()
    rewards.load_math_verify.cache_clear()


def test_tagged_rates_the_layout_and_not_the_answer():
    assert value("tagged", "<think>2 + 2</think>\n<answer>5</answer>", "4") == 1.0
    assert value("tagged", "<answer>4</answer>", "4") == 0.0


def test_regex_searches_the_completion():
    assert value("regex", "so \\boxed{4}.", pattern=r"\\boxed\{\d+\}") == 1.0
    assert value("regex", "so 4.", pattern=r"\\boxed\{\d+\}") == 0.0


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (1, -0.25), (4, -1.0), (9, -1.0)])
def test_length_is_minus_the_share_of_the_limit(tokens, expected):
    found = grade(RewardTerm("length", limit=4), plain(), completion("", tokens))
    assert found == expected
    assert math.copysign(1, found or 0.0) == (1 if tokens == 0 else -1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "numric"}, 'reward "numric" is unknown; did you mean "numeric"?'),
        ({"name": "numeric", "pattern": "x"}, "only regex takes one"),
        ({"name": "regex"}, "only regex takes one"),
        ({"name": "regex", "pattern": "("}, "not a valid regular expression"),
        ({"name": "length"}, "only length takes one"),
        ({"name": "length", "limit": -1}, "only length takes one"),
        ({"name": "exact", "limit": 5}, "only length takes one"),
    ],
)
def test_bad_terms_are_refused_in_one_line(settings, says):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        RewardTerm(**settings)
    assert says in str(caught.value)


def test_labels_of_equal_names_are_numbered():
    terms = [
        RewardTerm("regex", pattern="a"),
        RewardTerm("regex", pattern="b"),
        RewardTerm(f"{FUNCTIONS}:unique_chars"),
        RewardTerm("regex", pattern="c"),
    ]
    assert label_terms(terms) == ["regex", "regex-2", "unique_chars", "regex-3"]
