"""Test which prompts get which prefix."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass

import pytest

from pellucid.cli import main
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.prefixed import Prefixed, take_first_words
from pellucid.types import Completion, Group, Prompt, Reward, UserError

TASK = Arithmetic(digits=2, operators=("+", "-"))


@dataclass(frozen=True)
class Silent:
    """A task without a `working` method."""

    seed: int = 0
    split: str = "train"

    def sample(self, step, n):
        return [Prompt(f"{self.split}/{step}/{i}", f"question {i}") for i in range(n)]

    def reward(self, prompt, completion):
        return Reward(float(completion.text == "begun and done"))


def prefixes(tmp_path, **sources):
    path = tmp_path / "prefixes.jsonl"
    entries = [
        {"question": f"question {i}", "answer": "", "source": source, "index": index, "text": text}
        for i in range(400)
        for source, texts in sources.items()
        for index, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"settings": {}, "complete": True}, *entries]))
    return str(path)


def given(task, step=0, n=400):
    return [prompt.prefix for prompt in task.sample(step, n)]


def test_prefix_is_the_working_and_the_question_is_unchanged():
    plain, prefixed = TASK.sample(3, 8), Prefixed(TASK, dropout=0.0).sample(3, 8)
    assert [p.question for p in prefixed] == [p.question for p in plain]
    assert [p.prefix for p in prefixed] == [TASK.working(p) for p in plain]
    assert all(p.prefix.endswith(f"= {p.answer}") for p in prefixed)


def test_prefix_is_complete_only_if_it_is_the_whole_working(tmp_path):
    assert all(p.prefix_is_complete for p in Prefixed(TASK, dropout=0.0).sample(0, 20))
    cut = Prefixed(TASK, dropout=0.0, shortest=0.0).sample(0, 200)
    assert {p.prefix_is_complete for p in cut} == {True, False}
    assert all(p.prefix_is_complete == (p.prefix == TASK.working(p)) for p in cut)

    @dataclass(frozen=True)
    class Worked(Silent):
        def working(self, prompt):
            return "begun and done\n"

    assert all(p.prefix_is_complete for p in Prefixed(Worked(), dropout=0.0).sample(0, 20)), "white space says nothing"
    file = prefixes(tmp_path, teacher=["a beginning"])
    assert not any(p.prefix_is_complete for p in Prefixed(Silent(), file=file, dropout=0.0).sample(0, 20))


def test_dropout_is_the_share_without_a_prefix():
    assert all(given(Prefixed(TASK, dropout=0.0)))
    assert not any(given(Prefixed(TASK, dropout=1.0)))
    without = given(Prefixed(TASK, dropout=0.3), n=2000).count("") / 2000
    assert abs(without - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 2000)


def test_prefixes_depend_on_the_step():
    task = Prefixed(TASK, dropout=0.5)
    assert given(task, 5) == given(task, 5)
    assert [p != "" for p in given(task, 5)] != [p != "" for p in given(task, 6)]


def test_prefixes_are_drawn_from_teacher_and_student_by_share(tmp_path):
    file = prefixes(tmp_path, teacher=["T1", "T2"], student=["S"])
    counts = Counter(given(Prefixed(Silent(), file=file, dropout=0.0, teacher_share=0.75)))
    assert abs((counts["T1"] + counts["T2"]) / 400 - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 400)
    assert counts["T1"] > 0
    assert counts["T2"] > 0


@pytest.mark.parametrize("sources", [{"teacher": ["X"], "student": []}, {"teacher": [], "student": ["X"]}])
def test_other_source_is_used_if_one_has_no_prefixes(tmp_path, sources):
    file = prefixes(tmp_path, **sources)
    assert set(given(Prefixed(Silent(), file=file, dropout=0.0, teacher_share=0.5))) == {"X"}


def test_question_without_prefixes_gets_none(tmp_path):
    file = prefixes(tmp_path, teacher=[], student=[])
    assert set(given(Prefixed(Silent(), file=file, dropout=0.0))) == {""}


def test_cosine_schedule_falls_from_full_length_to_zero_and_stays_there(tmp_path):
    file = prefixes(tmp_path, teacher=["a b c d e f g h i j"])
    task = Prefixed(Silent(), file=file, dropout=0.0, schedule="cosine", schedule_steps=100)
    lengths = [len(task.sample(step, 1)[0].prefix.split()) for step in (0, 25, 50, 75, 100, 5000)]
    # (1 + cos(x)) / 2 at x = 0, pi/4, pi/2, 3 pi/4, pi is 1, .854, .5, .146, 0.
    assert lengths == [10, 9, 5, 1, 0, 0]


def test_lengths_are_drawn_between_shortest_and_length(tmp_path):
    file = prefixes(tmp_path, teacher=["a b c d e f g h i j"])
    lengths = [len(p.split()) for p in given(Prefixed(Silent(), file=file, dropout=0.0, length=0.8, shortest=0.5))]
    assert set(lengths) == {4, 5, 6, 7, 8}


def test_prefixes_are_cut_between_words_and_keep_their_white_space():
    assert take_first_words("48 / 2 =\n 24, so", 1.0) == "48 / 2 =\n 24, so"
    assert take_first_words("48 / 2 =\n 24, so", 0.5) == "48 / 2"
    assert take_first_words("48 / 2", 0.0) == ""
    assert take_first_words("小明有 12 个苹果。", 0.5) == "小明有 12", (
        "a character is a word where no white space parts them"
    )
    assert take_first_words("", 1.0) == ""


def test_prefix_and_completion_are_graded_as_one_answer(tmp_path):
    file = prefixes(tmp_path, teacher=["begun and"])
    task = Prefixed(Silent(), file=file, dropout=0.0)
    [prompt] = task.sample(0, 1)
    assert task.reward(prompt, Completion((1,), (0.0,), " done", True)).value == 1.0
    assert task.reward(prompt, Completion((1,), (0.0,), "begun and done", True)).value == 0.0


def test_agents_are_refused_before_anything_is_loaded(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[policy]\nmodel = "nowhere"\n[task]\nname = "prefixed"\nfile = "prefixes.jsonl"\n'
        f'[task.task]\nname = "agent"\nrun = "python agent.py"\ndata = "{tmp_path / "rows.jsonl"}"\n'
    )
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(recipe), "--run", str(tmp_path / "run")])
    told = capsys.readouterr()
    [line] = (told.out + told.err).strip().splitlines()
    assert "prefixed does not work around agents" in line


def test_conversations_get_the_prefix_in_turn_one_and_grade_the_last_turn(tmp_path):
    file = prefixes(tmp_path, teacher=["begun and"])
    task = Prefixed(Silent(), file=file, dropout=0.0)
    [prompt] = task.sample(0, 1)

    def said(*turns):
        return tuple({"role": "assistant", "content": text} for text in turns)

    once = Completion((1,), (0.0,), " done", True, messages=said("begun and done"))
    twice = Completion((1,), (0.0,), "begun and done", True, messages=said("begun and told", "begun and done"))
    assert [task.reward(prompt, c).value for c in (once, twice)] == [1.0, 1.0]


def test_steps_without_prefixes_report_a_share_of_zero():
    """Without this value, the mean over a run would cover only the steps that had prefixes."""
    one, other = TASK.sample(0, 2)
    groups = [Group(one, (), (), demonstration=(1, 2, 3)), Group(other, (), ())]
    task = Prefixed(TASK)
    assert task.observe(0, groups)["prefix/share"] == 0.5
    assert task.observe(1, groups[1:])["prefix/share"] == 0.0


def test_held_out_questions_have_no_prefix():
    test = Prefixed(Curriculum(TASK), dropout=0.0).with_split("test")
    assert test == Arithmetic(digits=2, operators=("+", "-"), split="test")
    assert {p.prefix for p in test.sample(0, 50)} == {""}
    held_out = Arithmetic(digits=2, operators=("+", "-"), split="test")
    assert Prefixed(held_out, dropout=0.0).with_split("test") == held_out
    assert Prefixed(held_out).with_split("train") == Prefixed(TASK)


def test_state_of_an_inner_curriculum_passes_through():
    task, twin = (Prefixed(Curriculum(TASK, pool=20)) for _ in range(2))
    task.load_state({"step": 7, "epoch": 2, "left": [3], "accuracy": {"3": 0.5}, "dead_since": {}})
    twin.load_state(task.state())
    assert twin.state() == task.state()
    assert twin.state()["step"] == 7
    assert Prefixed(TASK).state() == {}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"dropout": 1.5}, "dropout"),
        ({"teacher_share": -0.1}, "teacher_share"),
        ({"schedule": "cosine"}, "schedule_steps"),
        ({"schedule_steps": 10}, "schedule_steps"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        Prefixed(TASK, **wrong)


def test_a_task_without_working_needs_a_file():
    with pytest.raises(UserError, match="Silent has no `working`"):
        Prefixed(Silent()).with_split("train")


def test_prefixed_cannot_wrap_prefixed():
    with pytest.raises(ValueError, match="once"):
        Prefixed(Prefixed(TASK))


HEADER = '{"settings": {}, "complete": true}\n'
NO_PREFIXES = {
    "empty": "",
    "a list": "[]\n",
    "no settings": '{"question": "a"}\n',
    "no question": HEADER + '{"answer": "7", "source": "teacher", "index": 0, "text": "abc"}\n',
    "no text": HEADER + '{"question": "a", "answer": "7", "source": "teacher", "index": 0, "text": ["abc"]}\n',
    "another source": HEADER + '{"question": "a", "answer": "7", "source": "me", "index": 0, "text": "abc"}\n',
}


@pytest.mark.parametrize("content", NO_PREFIXES.values(), ids=NO_PREFIXES)
def test_invalid_prefix_files_are_refused_with_a_hint(tmp_path, content):
    path = tmp_path / "prefixes.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="pellucid prefixes"):
        Prefixed(Silent(), file=str(path)).with_split("train")


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere\.json.*No such file"):
        Prefixed(Silent(), file="nowhere.json").with_split("train")


def test_opening_precedes_every_prefix_that_is_not_empty(tmp_path):
    """The opening is never cut, even if the prefix is shortened, and it is left out if there is no prefix."""
    file = prefixes(tmp_path, teacher=["one two three four"])
    assert set(given(Prefixed(Silent(), file=file, dropout=0.0, opening="<think>"))) == {"<think>one two three four"}
    half = Prefixed(Silent(), file=file, dropout=0.5, opening="<think>", length=0.5)
    assert set(given(half)) == {"<think>one two", ""}
    assert set(given(Prefixed(Silent(), file=file, dropout=0.0, opening="<think>", length=0.0))) == {""}
    assert all(p.prefix_is_complete for p in Prefixed(TASK, dropout=0.0, opening="<think>").sample(0, 20))
