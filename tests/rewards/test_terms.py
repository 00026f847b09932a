import math
import sys

import pytest

from pellucid.rewards.terms import RewardTerm, grade, labels
from pellucid.tasks import rewards
from pellucid.types import Completion, Prompt, UserError

# The first four are the examples of TRL's documentation ("Using a custom reward function"), the fifth is from its
# trl.rewards; word for word, but for their names.
TRL_FUNCTIONS = r'''
import asyncio
import re


def longer_reward(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def unique_chars(completions, **kwargs):
    """Reward function that rewards completions with more unique characters."""
    return [float(len(set(c))) for c in completions]


def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def boxed_reward(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            rewards.append(1.0 if "4" in completion else -1.0)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards


async def async_reward_func(prompts, completions, **kwargs):
    # Simulate an I/O-bound call (e.g., HTTP request, database lookup)
    await asyncio.sleep(0.01)
    # Simple toy reward: 1.0 if the completion is non-empty, else 0.0
    return [1.0 if completion else 0.0 for completion in completions]


def logging_reward(prompts, completions, log_extra, log_metric, trainer_state, **kwargs):
    log_extra("text", completions)
    log_metric("one", 1.0)
    assert trainer_state is None
    return [0.5]


def all_columns(**columns):
    seen.append(columns)
    return [0.0]


def two_rewards(completions, **kwargs):
    return [1.0, 2.0]


seen = []
not_a_function = 3
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "functions_of_trl.py"
    path.write_text(TRL_FUNCTIONS)
    return path


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
        (r"$(1,\infty)$", "x>1", 1.0),  # the set where the gold answer is the condition, and not the other way round
        (r"$x>1$", r"(1,\infty)", 0.0),
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


def test_math_does_not_apply_where_the_gold_answer_cannot_be_read():
    assert value("math", "7", "some $ or other") is None


def test_math_names_the_extra_it_needs(monkeypatch):
    rewards.math_verify.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r'^[^\n]*pip install "pellucid\[data\]"$'):
        RewardTerm("math")
    monkeypatch.undo()
    rewards.math_verify.cache_clear()


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


def by(functions, name, prompt, text):
    return grade(RewardTerm(f"{functions}:{name}"), prompt, completion(text))


def test_functions_of_trls_documentation_run_unchanged_on_plain_prompts(functions):
    assert by(functions, "longer_reward", plain(), "four") == 3.0
    assert by(functions, "unique_chars", plain(), "abca") == 3.0
    assert by(functions, "boxed_reward", plain(ground_truth="4"), r" The solution is \boxed{4}.") == 1.0
    assert by(functions, "boxed_reward", plain(ground_truth="5"), r" The solution is \boxed{4}.") == 0.0
    assert by(functions, "math_reward_func", plain(task="math"), "4") == 1.0
    assert by(functions, "math_reward_func", plain(task="code"), "4") is None
    assert by(functions, "async_reward_func", plain(), "four") == 1.0
    assert by(functions, "async_reward_func", plain(), "") == 0.0
    assert by(functions, "logging_reward", plain(), "4") == 0.5


def test_functions_of_trls_documentation_run_unchanged_on_conversations(functions):
    assert by(functions, "format_reward_func", chat(), "<think>2 + 2</think><answer>4</answer>") == 1.0
    assert by(functions, "format_reward_func", chat(), "4") == 0.0
    assert by(functions, "think_format_reward", chat(), "<think>\n2 + 2\n</think>\n4") == 1.0
    assert by(functions, "think_format_reward", chat(), "<think>2 + 2") == 0.0


def test_a_function_sees_every_column_of_its_row_as_a_list_of_one(functions):
    row = {"topic": "sums", "difficulty": 3, "prompt": "hidden", "completions": "hidden"}
    for prompt in (plain(**row), chat(**row)):
        by(functions, "all_columns", prompt, "4")
    of_plain, of_chat = sys.modules["functions_of_trl"].seen
    for columns in (of_plain, of_chat):
        of_trl = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
        assert set(columns) == {"topic", "difficulty"} | of_trl
        assert (columns["topic"], columns["difficulty"], columns["completion_ids"]) == (["sums"], [3], [[5, 5, 5]])
    assert (of_plain["prompts"], of_plain["completions"]) == (["What is 2 + 2?"], ["4"])
    assert of_chat["prompts"] == [list(chat().text)]
    assert of_chat["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_a_function_must_return_one_reward_for_one_completion(functions):
    with pytest.raises(ValueError, match="two_rewards returned 2 rewards for 1 completion"):
        by(functions, "two_rewards", plain(), "4")


def test_what_is_no_function_is_refused(functions):
    with pytest.raises(UserError, match=r"is a int: name a function"):
        RewardTerm(f"{functions}:not_a_function")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "numric"}, 'reward "numric" is unknown; did you mean "numeric"?'),
        ({"name": "numeric", "pattern": "x"}, "regex needs one"),
        ({"name": "regex"}, "regex needs one"),
        ({"name": "regex", "pattern": "("}, "no regular expression"),
        ({"name": "length"}, "length needs one above 0"),
        ({"name": "length", "limit": -1}, "length needs one above 0"),
        ({"name": "exact", "limit": 5}, "length needs one above 0"),
    ],
)
def test_bad_terms_are_refused_in_one_line(settings, says):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        RewardTerm(**settings)
    assert says in str(caught.value)


def test_a_missing_function_is_refused_when_the_term_is_made(functions):
    with pytest.raises(UserError, match='did you mean "unique_chars"'):
        RewardTerm(f"{functions}:unique_char")


def test_labels_tell_namesakes_apart(functions):
    terms = [
        RewardTerm("regex", pattern="a"),
        RewardTerm("regex", pattern="b"),
        RewardTerm(f"{functions}:unique_chars"),
        RewardTerm("regex", pattern="c"),
    ]
    assert labels(terms) == ["regex", "regex-2", "unique_chars", "regex-3"]
