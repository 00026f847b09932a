"""Test how answers and numbers are extracted from completions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import mostly_slow
from pellucid.rewards.answers import (
    extract_answer,
    extract_marked_answer,
    extract_tagged_answer,
    find_answer_tag,
    find_last_box,
    find_last_number,
    parse_only_number,
    split_thought,
)


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
    assert find_last_number(text) == number


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
def test_commas_group_thousands_only_if_well_placed(text, number):
    assert find_last_number(text) == number


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
    assert find_last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("1/2", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)), ("48/2 = 24", 24), ("4/2", 2), ("1/0", None)],
)
def test_a_slash_divides(text, number):
    assert find_last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Let me think...7", 7),
        ("=...7", 7),
        ("is it .7?", Fraction(7, 10)),
        ("- 7", -7),
        ("x = - 7", -7),
        ("The answer is - 7.", -7),
        ("(- 7)", -7),
        ("7 - 3 - 2", 2),
        ("x - 3", 3),
        ("Total - 7", 7),
        ("7\n-3", -3),
        ("\u20137", -7),
        ("\uff0d7", -7),
        ("5\u20137", 7),
        ("\uff0d\uff11\uff0c\uff10\uff18\uff10", -1080),
    ],
)
def test_dots_and_dashes_before_a_number_are_interpreted(text, number):
    assert find_last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1 / 2", Fraction(1, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("\u00bd", Fraction(1, 2)),
        ("1\u00bd cups", Fraction(3, 2)),
        (r"\frac{1}{8}", Fraction(1, 8)),
        (r"-\dfrac{7}{2}", Fraction(-7, 2)),
        (r"\frac{-7}{2}", Fraction(-7, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"33\frac13\%", Fraction(100, 3)),
        ("1.5e3", 1500),
        ("2E-3", Fraction(1, 500)),
        (r"3 \times 10^4", 30_000),
        ("6.02\u00d710^{23}", 602 * 10**21),
        ("5k", 5000),
        ("5 kg", 5),
        ("1'080", 1080),
        ("1\u2019080", 1080),
        ("1 080", 1080),
        ("1\u202f080\u202f000", 1_080_000),
        (r"1\,080", 1080),
        (r"10,\!000", 10_000),
        (r"\$32,\!348", 32_348),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("0.333...", Fraction(1, 3)),
        ("10 80", 80),
        ("8 m^2", 8),
        ("8 m\u00b2", 8),
        (r"8\text{ cm}^{2}", 8),
        ("so 9 = x^2", 9),
    ],
)
def test_the_last_number_is_read_whole(text, number):
    assert find_last_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "12:30",
        "2^{10}",
        "2^10",
        "2**10",
        "(3)^2",
        "5\u00b2",
        "3^{2^{3}}",
        "1/2/3",
        "12/31/2024",
        "1.000.000",
        r"\sqrt{2}",
        "\u221a2",
        r"\frac{x}{8}",
        "2 3/2",
        "1e9999999999",
        r"1 \times 10^{-5000}",
        "9 and then 10^4",
    ],
)
def test_unreadable_number_is_not_read_in_part(text):
    assert find_last_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-1,080.5", Fraction(-2161, 2)),
        ("\u20135", -5),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"$3 \times 10^4$", 30_000),
        ("1.5e3", 1500),
        ("5 m^2", 5),
        ("18 dollars", 18),
        (r"\$18", 18),
        ("5%", 5),
        (r"90^\circ", 90),
        ("60 km/h", 60),
        ("6\u4e2a", 6),
        ("#### 18", 18),
        ("12:30", None),
        ("3 or 5", None),
        ("x = 5", None),
        ("3x", None),
        (r"5\pi", None),
        ("2 + 3", None),
        ("5,0", None),
        ("10^0", None),
        ("5!", None),
        ("> 5", None),
        ("5-", None),
        ("2 3/2", None),
        ("seven", None),
        ("", None),
    ],
)
def test_parse_only_number_requires_a_single_number(text, number):
    assert parse_only_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        (" so 7 \n", "so 7"),
        ("", ""),
        ("<answer>7</answer>", "7"),
        (r"\boxed{3}. <answer> 7 </answer>", "7"),
        (r"<answer>It is \boxed{7} now</answer>", "7"),
        ("<answer>7</answer> or 8", "<answer>7</answer> or 8"),
        (r"\boxed{7}", "7"),
        (r"\boxed{7}, not 8", "7"),
        (r"\boxed{0} is wrong. So \boxed{\frac{7}{2}}", r"\frac{7}{2}"),
        (r"\boxed{\text{0}}", r"\text{0}"),
        (r"\boxed{5,0}", "5,0"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\fbox{1} \boxed{\boxed{2}}", "2"),
        (r"\boxed{3} and then \boxed{4", r"\boxed{3} and then \boxed{4"),
        (r"\boxed7", "7"),
        (r"So $\boxed 73$.", "73"),
        (r"\boxed\frac{1}{\sqrt{2}}, no more", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{3}, no: \fbox{4}", "4"),
        (r"\fbox{3}, no: \framebox{\boxed{4}}", "4"),
        (r"Put it in a \boxed command: \boxed{4}", "4"),
        (r"\boxed is a command", r"\boxed is a command"),
        (r"<think>\boxed{3}?</think> No, 4.", "No, 4."),
        (r"<think>3?</think> \boxed{4}", "4"),
        (r"<think>\boxed{3}", ""),
        (r"<think>3</think> \boxed{4} <think> Hmm", ""),
        ("<think>3 <answer>4</answer>", ""),
        (r"3 \boxed{3}</think> \boxed{4}", "4"),
        ("<think>Write <answer>7</answer>.</think> <answer>4</answer>", "4"),
        (r"<think>\boxed{3}</think>", ""),
        ("</think><think>3</think>4", "4"),
        (r"<answer>3</think></answer>", "3</think>"),
    ],
)
def test_answer_is_extracted(text, answer):
    """Every grader relies on this function."""
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["", "7", "<answer>7</answer> or 8", r"\boxed{4", r"<think>\boxed{3}</think> 4"])
def test_unmarked_text_has_no_marked_answer(text):
    assert extract_marked_answer(text) is None


def test_only_the_last_box_counts_even_if_unclosed():
    assert find_last_box(r"\boxed{1} \boxed{2} \boxed{3}") == "3"
    assert find_last_box(r"\boxed{1} \boxed{2") is None
    assert find_last_box("{}") is None


@pytest.mark.parametrize("text", ["", " ", "seven", "-", ".", ",", "$", "1/0.0", "²"])
def test_text_without_a_number_gives_none(text):
    assert find_last_number(text) is None


def test_number_with_too_many_digits_is_not_read():
    """Python converts at most 4300 digits."""
    assert find_last_number("9" * 4000) == 10**4000 - 1
    for hostile in ("9" * 10_000, "0." + "9" * 10_000, "1/" + "9" * 10_000, "1" + ",111" * 3000):
        assert find_last_number(hostile) is None
    assert find_last_number("9" * 10_000 + " so 7") == 7


N = 400_000
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
    r"\boxed{" * (N // 7),
    r"\boxed{1} " + r"\boxed" + " " * N,
    r"\frac{1}" * (N // 8),
    "\n" * N,
    "a" * N,
    "- " * (N // 2),
    "1" + " " * N,
    "1 1/" * (N // 4),
    "1^{" * (N // 3),
    "x" + "^1" * (N // 2),
    "1" + ")" * N,
    "$ " * (N // 2),
    "1\u00bd" * (N // 2),
    "1e" + "9" * N,
]


@pytest.mark.parametrize("text", mostly_slow(HOSTILE, every=8), ids=range(len(HOSTILE)))
def test_hostile_texts_are_read_in_linear_time(text):
    """The texts are so long that a quadratic algorithm would exceed the time limit of a test."""
    find_last_number(text), parse_only_number(text), extract_tagged_answer(text), extract_answer(text)


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
    assert extract_tagged_answer(text) == answer


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
def test_answer_tag_counts_only_if_alone_and_last(text, answer):
    assert find_answer_tag(text) == answer


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think> 3 + 4 </think> <answer> 7 </answer>", ("3 + 4", "7")),
        ("So: <think>a\nb</think>\n\nthus <answer>7</answer> indeed", ("a\nb", "thus <answer>7</answer> indeed")),
        ("<think>3 + 4</think> 7", ("3 + 4", "7")),
        ("3 + 4</think> 7", ("3 + 4", "7")),
        (r"<think>3 + 4</think> So \boxed{7}.", ("3 + 4", "7")),
        (r"<think>3 + 4 = \boxed{7}", (r"3 + 4 = \boxed{7}", "")),
        ("<think>3 + 4</think> <answer>7", ("3 + 4", "<answer>7")),
        ("<answer>7</answer> <think>why</think>", ("why", "")),
        (" 7 ", ("", "7")),
        ("", ("", "")),
    ],
)
def test_thought_is_split_from_the_answer(text, parts):
    assert (split_thought(text)[0], extract_answer(text)) == parts


PROSE = st.text(alphabet="ab 7\n.,-\u7b54", max_size=12)


@given(PROSE, PROSE)
def test_tags_around_any_text_are_removed(reasoning, answer):
    text = f"<think>{reasoning}</think> <answer>{answer}</answer>"
    assert extract_tagged_answer(text) == find_answer_tag(text) == extract_answer(text) == answer.strip()
    assert split_thought(text)[0] == reasoning.strip()
    assert extract_tagged_answer(text + "<answer>") is None


GROUPS = st.recursive(
    st.text(alphabet="x7 ^\u00e9", max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(lambda s: "{" + "".join(s) + "}"),
)


@given(st.lists(GROUPS, max_size=4).map("".join), PROSE)
def test_box_may_contain_balanced_braces(inside, behind):
    assert find_last_box(r"\boxed{1}, no: \boxed{" + inside + "}" + behind) == inside.strip()


@st.composite
def written_numbers(draw):
    """Draw a number in one of its notations, and return the text and the value."""
    whole, places = draw(st.integers(0, 10**9)), draw(st.text(alphabet="0123456789", min_size=1, max_size=4))
    bottom, negative = draw(st.integers(1, 99)), draw(st.booleans())
    forms = {
        str(whole): Fraction(whole),
        f"{whole:,}": Fraction(whole),
        f"{whole:_}".replace("_", "\u202f"): Fraction(whole),
        f"{whole:,}.{places}": Fraction(f"{whole}.{places}"),
        f"{whole}/{bottom}": Fraction(whole, bottom),
        rf"\frac{{{whole}}}{{{bottom}}}": Fraction(whole, bottom),
        f"{whole} {bottom}/{bottom + 1}": whole + Fraction(bottom, bottom + 1),
        f"{whole}e2": Fraction(100 * whole),
        str(whole).translate({48 + digit: 0xFF10 + digit for digit in range(10)}): Fraction(whole),
    }
    form = draw(st.sampled_from(sorted(forms)))
    return ("-" + form, -forms[form]) if negative else (form, forms[form])


@given(
    written_numbers(),
    st.sampled_from(["", "so ", "3, then ", "= ", "\u7b54\u6848\u662f", "("]),
    st.sampled_from(["", ".", " cm", ")", "%"]),
)
def test_number_is_read_in_every_notation(number, before, behind):
    form, value = number
    assert find_last_number(before + form + behind) == value
    if "3" not in before and "=" not in before:
        assert parse_only_number(before + form + behind) == value


@given(st.text(alphabet="0123456789 .,'-+*/^_=(){}[]\\\\frac$%xek:\u00bd\u00b2\u2212\uff17", max_size=30))
def test_only_number_equals_the_last_number(text):
    if parse_only_number(text) is not None:
        assert parse_only_number(text) == find_last_number(text)
