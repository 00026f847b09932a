"""Test that every task supports the rounds of dynamic sampling, whose numbers lie far beyond the steps of a run."""

from __future__ import annotations

import json

import pytest

from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.continuity import Continuity
from pellucid.tasks.countdown import Countdown
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.expected import Expected
from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.sorting import Sorting
from pellucid.types import ROUND_STRIDE

TASKS = (
    Arithmetic(digits=1),
    Arithmetic(digits=4),
    Continuity(),
    Countdown(),
    Curriculum(Arithmetic(digits=2), pool=64),
    Expected(),
    Prefixed(Arithmetic(digits=2)),
    Sorting(),
)


def rounds(task, step, n, count=4):
    return [task.sample(step + number * ROUND_STRIDE, n) for number in range(count)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_prompts_of_different_rounds_have_different_ids(task):
    """The id of a prompt seeds its samples."""
    ids = [prompt.id for prompts in rounds(task, 3, 4) + rounds(task, 4, 4) for prompt in prompts]
    assert len(set(ids)) == 32


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(100)))
    return Dataset(data=str(path), test_share=0.5)


def test_the_rounds_of_a_step_read_no_row_twice(rows):
    for step in range(12):  # 4 of 50 rows per step: the first epoch ends in the next step
        asked = [prompt.question for prompts in rounds(rows, step, 4, 5) for prompt in prompts]
        assert len(set(asked)) == 20, step
    walk = [prompt.question for step in range(12) for prompt in rows.sample(step, 4)]
    assert len(set(walk)) == 48, "the first rounds read on as if there were no others"


def test_prefixes_of_later_rounds_are_as_long_as_those_of_their_step():
    task = Prefixed(Arithmetic(digits=2), dropout=0.0, schedule="cosine", schedule_steps=100)
    assert all(prompt.prefix for prompts in rounds(task, 0, 20) for prompt in prompts)
    assert not any(prompt.prefix for prompts in rounds(task, 100, 20) for prompt in prompts)
