from fractions import Fraction

import pytest

from pellucid.tasks.answers import answer_tag, last_number, reasoning_and_answer, tagged


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("The answer is 7.", 7),
        ("7.50", Fraction(15, 2)),
        (".5", Fraction(1, 2)),
        ("it is -.5", Fraction(-1, 2)),
        ("first 3, then 4", 4),
        ("007", 7),
        ("答案是7个", 7),
        ("\uff17", 7),
        ("**7**", 7),
        (r"\boxed{-7}", -7),
        ("7%", 7),
    ],
)
def test_the_last_number_is_read(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,080", 1080),
        ("$1,080.00", 1080),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("#### 1,080", 1080),
        ("1,08", 8),
        ("1,0800", 800),
        ("1234,567", 567),
        ("3, 4", 4),
        ("3,4", 4),
        ("1,080, 2", 2),
        ("so 1,080, done", 1080),
    ],
)
def test_commas_group_thousands_only_where_they_are_well_placed(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-7", -7),
        ("\u22127", -7),
        ("x = -7", -7),
        ("是-7", -7),
        ("-$1,080.50", Fraction(-2161, 2)),
        ("$-5", -5),
        (r"-\$5", -5),
        ("10--3", -3),
        ("2*-3", -3),
        ("7-3", 3),
        ("7 - 3", 3),
        ("x-3", 3),
        ("(4)-3", 3),
        ("7\u22123", 3),
    ],
)
def test_a_minus_belongs_to_the_number_it_touches_unless_it_subtracts(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("1/2", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)), ("48/2 = 24", 24), ("4/2", 2), ("1/0", None)],
)
def test_a_slash_divides(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize("text", ["", " ", "seven", "-", ".", ",", "$", "1/0.0", "²"])
def test_where_there_is_no_number_none_is_read(text):
    assert last_number(text) is None


def test_a_number_that_python_would_not_convert_is_no_answer():
    assert last_number("9" * 4000) == 10**4000 - 1
    for hostile in ("9" * 10_000, "0." + "9" * 10_000, "1/" + "9" * 10_000, "1" + ",111" * 3000):
        assert last_number(hostile) is None
    assert last_number("9" * 10_000 + " so 7") == 7


N = 4_000_000
HOSTILE = [
    "9" * N,
    "1" + ",111" * (N // 4),
    "1" + ",111" * (N // 4) + "1",
    "1/" * (N // 2),
    "-" * N,
    "." * N,
    "1." * (N // 2),
    "1,1" * (N // 3),
    "-$" * (N // 2),
    "<think></think>" * (N // 15),
    "<think>" + "</think><answer>" * (N // 16),
    "<think></think>" + " " * N + "<answer>",
    "<think>" + " " * (N // 2) + "</think>" + " " * (N // 2) + "x<answer></answer>",
    "<answer>" * (N // 17) + "</answer>" * (N // 17),
    "\0\ud800\U0010ffff",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_read_to_their_end(text):
    """Four million characters: what took a step for each pair of them would take hours, not be merely slow."""
    last_number(text), tagged(text), answer_tag(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>3 + 4</think><answer>7</answer>", "7"),
        (" <think>\n3 + 4\n</think>\n\n<answer>\n7\n</answer>\n", "7"),
        ("<think></think> <answer></answer>", ""),
        ("<think>3</think> so <answer>7</answer>", None),
        ("well <think>3</think><answer>7</answer>", None),
        ("<think>3</think><answer>7</answer> indeed", None),
        ("<think><think>3</think><answer>7</answer>", None),
        ("<think>3</think><answer>7</answer><answer>8</answer>", None),
        ("<answer>7</answer><think>3</think>", None),
        ("<think>3<answer>7</answer></think>", None),
        ("<answer>7</answer>", None),
        ("<think>3</think>7", None),
        ("", None),
    ],
)
def test_tagged_is_strict_about_the_whole_text(text, answer):
    assert tagged(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I think so. <answer> 7 </answer>\n", "7"),
        ("<answer></answer>", ""),
        ("<answer>7</answer> or 8", None),
        ("<answer>7</answer><answer>8</answer>", None),
        ("</answer><answer>", None),
        ("<answer>7<answer>8</answer>", None),
        ("<answer>7", None),
        ("7", None),
    ],
)
def test_an_answer_tag_counts_where_it_is_alone_and_last(text, answer):
    assert answer_tag(text) == answer


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think> 3 + 4 </think> <answer> 7 </answer>", ("3 + 4", "7")),
        ("So: <think>a\nb</think>\n\nthus <answer>7</answer> indeed", ("a\nb", "7")),
        ("<think>3 + 4</think> 7", ("", "<think>3 + 4</think> 7")),
        ("<think>3 + 4</think> <answer>7", ("", "<think>3 + 4</think> <answer>7")),
        ("<answer>7</answer> <think>why</think>", ("", "<answer>7</answer> <think>why</think>")),
        (" 7 ", ("", "7")),
        ("", ("", "")),
    ],
)
def test_reasoning_and_answer_are_told_apart_only_where_both_are_there(text, parts):
    assert reasoning_and_answer(text) == parts
