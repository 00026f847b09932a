import json
import re
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from pellucid.tasks.gsm8k import Gsm8k, grade_literally
from pellucid.types import Completion, Prompt

ROWS = [
    {"question": f"How many are {i} + 1,000?", "answer": f"{i} + 1000 = {i + 1000}\n#### {i + 1000:,}"}
    for i in range(40)
]


def completion(text):
    return Completion((1, 2), (-0.5, -0.5), text, True)


def solve(prompt):
    worked = prompt.columns.get("answer", prompt.answer).partition("####")[0].strip()
    return f"<think>{worked}</think> <answer>{prompt.answer}</answer>"


def graded(text, gold, **settings):
    return Gsm8k(**settings).reward(Prompt("p", "?", gold), completion(text))


@pytest.fixture
def files(tmp_path):
    paths = {"data": tmp_path / "train.jsonl", "test_data": tmp_path / "test.jsonl"}
    for path, rows in zip(paths.values(), (ROWS[:30], ROWS[30:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("text", "gold", "strict", "literal"),
    [
        ("<think>5 + 1</think> <answer>6</answer>", "6", 1.0, 1.0),
        ("<answer>6</answer>", "6", 1.0, 1.0),
        ("<answer>6个苹果</answer>", "6", 1.0, 0.5),
        ("<answer>16</answer>", "6", 0.0, 0.5),
        ("<answer> 6 </answer>", "6", 1.0, 0.5),
        ("<answer>1,080</answer>", "1080", 1.0, 1.0),
        ("<answer>1080</answer>", "1,080", 1.0, 1.0),
        ("<answer>It is 12,200.</answer>", "12200", 1.0, 0.5),
        ("<answer>1,08</answer>", "108", 0.0, 0.01),
        ("<answer>1,0800</answer>", "10800", 0.0, 0.01),
        ("<think>5 + 1 <answer>6</answer>", "6", 0.0, 1.0),  # strict grading finds no answer in an unclosed thought
        ("<think><answer>5</answer>?</think> <answer>6</answer>", "6", 1.0, 0.01),
        ("<answer>\n1080.0\n</answer>", "1080", 1.0, 0.5),
        ("<answer>7</answer>", "6", 0.0, 0.01),
        ("<answer></answer>", "6", 0.0, 0.01),
        ("6", "6", 0.0, 0.0),
        ("", "6", 0.0, 0.0),
        ("<answer>0123456789</answer>", "6", 0.0, 0.5),
        ("<answer>6</answer><answer>7</answer>", "6", 0.0, 1.0),  # literal grading reads the first answer
        (r"<answer>\boxed{6} and not 7</answer>", "6", 1.0, 0.5),
        (r"<answer>\frac{1}{6}</answer>", "6", 0.0, 0.5),
        (r"\boxed{6}", "6", 0.0, 0.0),
    ],
)
def test_grades_by_hand(text, gold, strict, literal):
    assert graded(text, gold).value == strict
    assert graded(text, gold, grading="literal").value == literal
    assert grade_literally(text, gold) == literal


def test_literal_grades_match_the_published_example():
    """The example grades twelve candidates by its own rule for the answer 6个."""
    answers = ["6个", "6", "6个苹果", "6", "6", "5个", "需要计算", "10个", "5", "6", "6个", "6个苹果"]
    grades = [grade_literally(f"<think>?</think><answer>{answer}</answer>", "6个") for answer in answers]
    assert grades == [1, 0.01, 0.5, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 1, 0.5]


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "6", "16", "\n", "<answer", ">"]), max_size=12).map("".join))
def test_literal_grading_matches_the_published_rule(text):
    """The rule is the original regular expression, which takes a step for each pair of tags that do not close."""
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    described = 0.0 if found is None else 1.0 if found[1] == "6" else 0.5 if "6" in found[1] else 0.01
    assert grade_literally(text, "6") == described


def test_literal_grading_reads_unclosed_tags_in_one_pass():
    """The text has four million characters: a step for each pair of tags would take hours."""
    assert grade_literally("<answer>" * 500_000, "6") == 0.0
    assert grade_literally("<answer>" * 500_000 + "6</answer>", "6") == 0.5


@pytest.mark.parametrize("grading", ["strict", "literal"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_gold_answer_scores_1_and_commas_do_not_count(files, split, grading):
    task = Gsm8k(**files, split=split, grading=grading)
    for prompt in task.sample(0, 10):
        assert prompt.answer.isdigit()
        reward = task.reward(prompt, completion(solve(prompt)))
        assert reward.value == 1.0
        assert reward.is_correct
        assert reward.parts["format"] == 1.0
        for garbage in ("", "no", "<answer>", "<answer>" * 5000, "9" * 9999):
            assert not task.reward(prompt, completion(garbage)).is_correct


def test_splits_come_from_their_files_and_prompts_ask_for_tags(files):
    train = {p.question for p in Gsm8k(**files).sample(0, 30)}
    test = {p.question for p in Gsm8k(**files, split="test").sample(0, 10)}
    assert train == {row["question"] for row in ROWS[:30]}
    assert test == {row["question"] for row in ROWS[30:]}
    system, _ = Gsm8k(**files).sample(0, 1)[0].text
    assert all(tag in system["content"] for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def test_chinese_copy_with_an_answer_column_is_graded(tmp_path):
    rows = [{"question": f"{i}加1等于几？", "answer": f"{i}+1={i + 1}", "answer_only": str(i + 1)} for i in range(30)]
    path = tmp_path / "zh.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = Gsm8k(data=str(path), test_data="", answer="answer_only", answer_pattern="", language="zh")
    prompts = task.sample(0, 5)
    assert all(task.reward(p, completion(solve(p))).value == 1.0 for p in prompts)
    assert "思考" in prompts[0].text[0]["content"]
    assert Gsm8k(data=str(path), test_data="", answer="answer_only", answer_pattern="", system="S").sample(0, 1)[
        0
    ].text[0] == {"role": "system", "content": "S"}


def test_worked_solution_of_a_row_is_a_complete_answer(tmp_path):
    """Calculator annotations are left out. A column that holds only the answer has no worked solution."""
    rows = [{"question": "Q", "answer": "48/2 = <<48/2=24>>24 clips.\n24*50 = <<24*50=1200>>1,200\n#### 1,200"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Gsm8k(data=str(path), test_data="", format_reward=0.1)
    [prompt] = task.sample(0, 1)
    assert task.working(prompt) == "<think>48/2 = 24 clips.\n24*50 = 1,200</think> <answer>1200</answer>"
    assert task.reward(prompt, completion(task.working(prompt))).value == pytest.approx(1.1)
    path.write_text(json.dumps({"question": "Q", "answer": "7"}) + "\n")
    bare = Gsm8k(data=str(path), test_data="", answer_pattern="")
    assert bare.working(bare.sample(0, 1)[0]) == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("../shared/data/gsm8k/train.jsonl").exists(), reason="the data is not beside the project")
def test_every_gold_answer_of_the_real_data_is_read():
    folder = "../shared/data/gsm8k"
    for split in ("train", "test"):
        task = Gsm8k(data=f"{folder}/train.jsonl", test_data=f"{folder}/test.jsonl", split=split)
        prompts = task.sample(0, 1000)
        assert all(task.reward(p, completion(solve(p))).value == 1.0 for p in prompts)


def test_missing_data_is_refused():
    with pytest.raises(ValueError, match="data"):
        Gsm8k(data="")
