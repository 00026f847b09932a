"""Test rewards that are computed in the training process: they must equal those of a reward process."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import pytest

from pellucid.rewards.grading import GradedTask
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.gsm8k import Gsm8k
from pellucid.tasks.wrappers import is_process_bound
from pellucid.types import Completion, Prompt, Reward, UserError
from pellucid.utils.plugins import provide_objects

PROMPT, ANSWER = Prompt("0", "1+1?", "2", {"answer": "2"}), Completion((1,), (0.0,), "2", True)


@dataclass(frozen=True)
class Broken:
    """A task whose reward misbehaves, at module level so that a reward process can load it."""

    how: str = ""
    seed: int = 0
    split: str = "train"

    def sample(self, step, n):
        return [PROMPT] * n

    def reward(self, prompt, completion):
        if self.how == "raises":
            raise KeyError("no such\nkey")
        if self.how == "exits":
            raise SystemExit(3)
        return {
            "none": None,
            "nan": Reward(math.nan),
            "huge": Reward(1e300),
            "text": Reward("a lot"),
            "good": Reward(1, parts={"numeric": 1}, correct=1),
        }[self.how]


@pytest.mark.parametrize("how", ["raises", "exits", "none", "nan", "huge", "text", "good"])
def test_in_process_reward_equals_that_of_a_reward_process(how, tmp_path):
    here, there = GradedTask(Broken(how), log=tmp_path / "log", in_process=True), GradedTask(Broken(how))
    try:
        expected = there.reward(PROMPT, ANSWER)
    finally:
        there.close()
    found = here.reward(PROMPT, ANSWER)
    assert repr(found) == repr(expected)
    assert found.failed == (how != "good")


def test_keyboard_interrupt_is_raised():
    class Interrupted(Broken):
        def reward(self, prompt, completion):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GradedTask(Interrupted(), in_process=True).reward(PROMPT, ANSWER)


def test_traceback_of_each_kind_of_error_is_logged_once(tmp_path):
    task = GradedTask(Broken("raises"), log=tmp_path / "log", in_process=True)
    for each in (task, task, task.with_split("test")):
        assert each.reward(PROMPT, ANSWER).failed
    assert (tmp_path / "log").read_text().count("Traceback") == 1
    assert task.with_split("test").task.split == "test"
    assert task.how == "raises"


def rows(tmp_path, *terms):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    return Dataset(data=str(tmp_path / "rows.jsonl"), rewards=tuple(map(RewardTerm, terms)))


def twice(completions, answer, **columns):
    return [2.0 * (c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]


async def later(completions, **columns):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def test_provided_functions_grade_only_while_they_are_provided(tmp_path):
    with provide_objects({"here:twice": twice, "here:later": later}):
        task = rows(tmp_path, "here:twice", "here:later", "numeric")
        prompt = task.sample(0, 1)[0]
        right = Completion((1,), (0.0,), prompt.answer, True)
        assert task.reward(prompt, right).parts == {"twice": 2.0, "later": 0.5, "numeric": 1.0}

        async def in_a_notebook():
            return task.reward(prompt, right)

        assert asyncio.run(in_a_notebook()).parts["later"] == 0.5
        with provide_objects({"here:twice": lambda **_: [7.0], "here:later": later}):
            assert task.reward(prompt, right).parts["twice"] == 7.0, "defined anew"
        assert is_process_bound(task)
    message = (
        "this run's reward `twice` is a Python function, which commands cannot load: go on with the run in Python,"
        ' pellucid.train(resume="RUN", reward=...)'
    )
    with pytest.raises(UserError) as told:
        rows(tmp_path, "here:twice")
    assert str(told.value) == message


def test_only_tasks_of_local_classes_are_process_bound(tmp_path):
    @dataclass(frozen=True)
    class Local(Broken):
        pass

    assert not is_process_bound(Gsm8k())
    assert not is_process_bound(rows(tmp_path, "numeric"))
    assert not is_process_bound(Broken())
    assert is_process_bound(Local())
