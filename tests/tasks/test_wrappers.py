"""Test tasks that wrap other tasks: finding the inner task, its split and its seed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.wrappers import get_innermost_task, is_task_wrapper, with_seed
from pellucid.types import with_split

INSIDE = Arithmetic(digits=2, seed=5)


@pytest.mark.parametrize("wrapped", [INSIDE, Curriculum(INSIDE), Prefixed(Curriculum(INSIDE))])
def test_innermost_task_is_found_and_its_split_is_changed(wrapped):
    assert get_innermost_task(wrapped) is INSIDE
    assert with_split(wrapped, "test") == Arithmetic(digits=2, seed=5, split="test")
    assert with_split(wrapped, "train") == wrapped
    assert (wrapped.seed, wrapped.split) == (5, "train")


def test_explicit_seed_is_kept_and_missing_seed_is_filled_in():
    assert with_seed(Prefixed(Curriculum(INSIDE)), 7) == Prefixed(Curriculum(INSIDE))
    assert with_seed(Prefixed(Curriculum(Arithmetic())), 7) == Prefixed(Curriculum(Arithmetic(seed=7)))
    assert with_seed(INSIDE, 7).seed == 5


def test_wrappers_are_recognized_by_their_task_field():
    assert is_task_wrapper(Curriculum)
    assert is_task_wrapper(Prefixed(INSIDE))
    assert not is_task_wrapper(INSIDE)
    assert not is_task_wrapper(object())


def test_setting_named_task_does_not_make_a_wrapper():
    @dataclass(frozen=True)
    class Named:
        task: str = "sum"

    assert not is_task_wrapper(Named)
    assert get_innermost_task(Named()) == Named()
