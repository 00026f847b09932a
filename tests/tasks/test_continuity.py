import pytest

from pellucid.tasks.continuity import (
    ORIGINAL_PROBLEM,
    PARSED_WEIGHTS,
    Continuity,
    PiecewiseProblem,
    extract_equations,
    extract_final_answer,
    grade_parts,
    list_problems,
)
from pellucid.types import Completion


def completion(text):
    return Completion((1, 2), (-0.5, -0.5), text, True)


def solve(prompt):
    """Return a completion that earns every part of the reward."""
    f = PiecewiseProblem(**prompt.columns["pieces"])
    at_right, at_left = f.m * f.right + f.q, f.m * f.left + f.q
    sign = "+" if f.p >= 0 else "-"
    return (
        f"f must agree with itself at x = {f.right} and at x = {f.left}. {f.right}a {sign} {abs(f.p)} = {at_right}, so"
        f" a = {f.a}. {at_left} = {f.k * f.left} - b, so b = {f.b}. \\boxed{{{f.a + f.b}}}"
    )


def graded(text, **settings):
    task = Continuity(**settings)
    [prompt] = task.sample(0, 1)
    return task.reward(prompt, completion(text)).value


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ""),
        ("a + b = 0", "sum"),
        ("\\boxed{0}", "sum"),
        ("The answer is 10", ""),
        ("a + b = 0.5", ""),
        ("\\boxed{99}", ""),
        ("a + b = 0 ... no, \\boxed{1}", ""),
        ("at x = 2 and x = -2", "points"),
        ("only x = 2", ""),
        ("f(x) = 2, f(x) = -2", ""),
        ("(x = 2), (at x = -2)", "points"),
        ("x=-20, x=25", ""),
        ("2a + 3 = -3", "right equation"),
        ("2a + 3 = 2 - 5", "right equation"),
        ("$2a + 3 = 2 - 5 = -3$", "right equation"),
        ("-3 = 3 + a \\cdot 2", "right equation"),
        ("2a + 6 = 0", "right equation"),
        ("a(2) + 3 = (2) - 5", "right equation"),
        ("so 2a = -6 and a = -3.", "right equation, a"),
        ("a = -39", ""),
        ("b = 30", ""),
        ("a = -3 but no, a = 4", "right equation"),
        ("-7 = -4 - b", "left equation"),
        ("-2 - 5 = 2(-2) - b", "left equation"),
        ("b = 7 - 4 = 3", "left equation, b"),
        ("b = 3", "left equation, b"),
        (r"a = \frac{-6}{2}, $b=\dfrac{6}{2}$", "right equation, a, left equation, b"),
        ("**a = -3**", "right equation, a"),
        ("So **a** = **-3**.", "right equation, a"),
        ("*a = -3*", "right equation, a"),
        ("`a = -3`", "right equation, a"),
        ("- a = -3", "right equation, a"),
        ("* a = -3\n* b = 3", "right equation, a, left equation, b"),
        ("1. a = -3\n2) b = 3", "right equation, a, left equation, b"),
        ("so - a = 3", "right equation"),
        (r"\begin{align} a &= -3 \\ b &= 3 \end{align}", "right equation, a, left equation, b"),
        (r"\begin{align*}2a+3&=2-5\\[2pt]a&=-3\end{align*}", "right equation, a"),
        ("\u00a0a\u00a0=\u00a0-3", "right equation, a"),
        ("a = \u20133", "right equation, a"),
        ("a = -3 (from the first)", "right equation, a"),
        ("a = -3 (2a = -6)", "right equation, a"),
        ("(the first) a = -3", "right equation, a"),
        (r"2a = -6 \implies a = -3", "right equation, a"),
        ("a = -3**2", ""),
        (r"\boxed{0} is wrong. So \boxed{\frac{7}{2}}", ""),
        (r"\boxed{5,0}", ""),
        (r"\boxed{10^0}", ""),
        (r"\boxed{0 or 1}", ""),
        (r"\boxed{\text{0}}", "sum"),
        (r"\boxed{a + b = 0}", "sum"),
        ("a + b = 1. <answer>0</answer>", "sum"),
        ("<think>Is it \\boxed{1}?</think> a + b = 0", "sum"),
        ("\\boxed{0}" + 3000 * " not so." + "\\boxed{1}", ""),
    ],
)
def test_parts_by_hand(text, parts):
    found = {name for name, value in grade_parts(text, ORIGINAL_PROBLEM).items() if value}
    assert found == set(parts.split(", ") if parts else [])
    assert graded(text) == pytest.approx(sum(PARSED_WEIGHTS[name] for name in found))


def test_literal_grading_accepts_known_cheats():
    """The strings are the published examples of how literal grading is cheated."""
    cheat = r"continuous x=2 a=-3 -7=-4-b b=3 so \boxed{99}"
    assert graded(cheat, grading="literal") == 1.0
    assert graded(cheat) < 0.7
    assert graded("the answer is 10", grading="literal") == pytest.approx(0.2)
    assert graded("a+b=0.5", grading="literal") == pytest.approx(0.2)
    assert graded("b=30, a=-39", grading="literal") == pytest.approx(0.55)
    assert graded("the answer is 10") == graded("a+b=0.5") == graded("b=30, a=-39") == 0.0


def test_other_parts_do_not_replace_the_answer():
    assert sum(PARSED_WEIGHTS.values()) == pytest.approx(1.0)
    task = Continuity()
    [prompt] = task.sample(0, 1)
    all_but_the_sum = solve(prompt).replace("\\boxed{0}", "\\boxed{99}")
    reward = task.reward(prompt, completion(all_but_the_sum))
    assert reward.value == pytest.approx(0.7)
    assert not reward.is_correct


@pytest.mark.parametrize("settings", [{}, {"grading": "literal"}, {"problems": "family"}])
def test_the_gold_answer_scores_1_and_garbage_does_not(settings):
    task = Continuity(**settings)
    for prompt in task.sample(0, 200 if settings else 2):
        reward = task.reward(prompt, completion(solve(prompt)))
        assert reward.value == 1.0, (prompt.question, solve(prompt), reward)
        assert reward.is_correct
        assert prompt.answer in solve(prompt)
    for garbage in ("", "hm", "=" * 9999, "a=" * 9999, "(" * 9999, "x = " + "9" * 9999, "a+b" * 5000):
        assert task.reward(prompt, completion(garbage)).value == 0.0


def test_every_problem_of_the_family_is_continuous():
    """Evaluate the three pieces at both joins."""
    for f in list_problems("train", 0.2) + list_problems("test", 0.2):
        assert f.a * f.right + f.p == f.m * f.right + f.q
        assert f.k * f.left - f.b == f.m * f.left + f.q
    assert (ORIGINAL_PROBLEM.a, ORIGINAL_PROBLEM.b) == (-3, 3)


def test_the_splits_of_the_family_share_no_problem():
    train, test = set(list_problems("train", 0.2)), set(list_problems("test", 0.2))
    assert train.isdisjoint(test)
    assert 0.15 < len(test) / len(train | test) < 0.25
    assert len(train | test) > 1000
    questions = {f.format_question() for f in train}
    assert questions.isdisjoint(f.format_question() for f in test)


def test_default_question_is_the_original_problem():
    [prompt] = Continuity().sample(0, 1)
    for piece in ("ax + 3 for x > 2", "x - 5 for -2 <= x <= 2", "2x - b for x < -2"):
        assert piece in prompt.question
    assert PiecewiseProblem(1, -1, -2, 1, 3, 2).format_question().count("x - b") == 1


def test_sampling_is_a_function_of_seed_split_and_step():
    task = Continuity(problems="family")
    assert task.sample(1, 6) == task.sample(1, 6) != task.sample(2, 6)
    assert len({p.question for p in task.sample(1, 6)}) == 6
    assert len(Continuity().sample(0, 5)) == 5


@pytest.mark.parametrize(
    ("text", "value"), [("", None), ("a + b = -3 + 3 = 0", 0), ("b + a = 4", 4), ("\\boxed{a + b = 7}", 7)]
)
def test_final_answer_is_the_last_one_stated(text, value):
    assert extract_final_answer(text, extract_equations(text)) == value


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match="literal"):
        Continuity(grading="literal", problems="family")
    with pytest.raises(ValueError, match="test_share"):
        Continuity(test_share=0.0)
