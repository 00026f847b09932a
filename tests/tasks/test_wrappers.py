"""Tasks around tasks: what reaches the one inside."""

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
def test_the_innermost_task_is_found_and_its_split_turned(wrapped):
    assert get_innermost_task(wrapped) is INSIDE
    assert with_split(wrapped, "test") == Arithmetic(digits=2, seed=5, split="test")
    assert with_split(wrapped, "train") == wrapped
    assert (wrapped.seed, wrapped.split) == (5, "train")


def test_a_seed_of_its_own_stays_and_a_missing_one_is_filled_in():
    assert with_seed(Prefixed(Curriculum(INSIDE)), 7) == Prefixed(Curriculum(INSIDE))
    assert with_seed(Prefixed(Curriculum(Arithmetic())), 7) == Prefixed(Curriculum(Arithmetic(seed=7)))
    assert with_seed(INSIDE, 7).seed == 5


def test_a_wrapper_is_known_by_its_field():
    assert is_task_wrapper(Curriculum)
    assert is_task_wrapper(Prefixed(INSIDE))
    assert not is_task_wrapper(INSIDE)
    assert not is_task_wrapper(object())


def test_a_setting_that_is_called_task_wraps_nothing():
    @dataclass(frozen=True)
    class Named:
        task: str = "sum"

    assert not is_task_wrapper(Named)
    assert get_innermost_task(Named()) == Named()
