"""Tasks around tasks: what reaches the one inside."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pellucid.protocols import with_split
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.wrappers import innermost, seeded, wraps

INSIDE = Arithmetic(digits=2, seed=5)


@pytest.mark.parametrize("wrapped", [INSIDE, Curriculum(INSIDE), Prefixed(Curriculum(INSIDE))])
def test_the_innermost_task_is_found_and_its_split_turned(wrapped):
    assert innermost(wrapped) is INSIDE
    assert with_split(wrapped, "test") == Arithmetic(digits=2, seed=5, split="test")
    assert with_split(wrapped, "train") == wrapped
    assert (wrapped.seed, wrapped.split) == (5, "train")


def test_a_seed_of_its_own_stays_and_a_missing_one_is_filled_in():
    assert seeded(Prefixed(Curriculum(INSIDE)), 7) == Prefixed(Curriculum(INSIDE))
    assert seeded(Prefixed(Curriculum(Arithmetic())), 7) == Prefixed(Curriculum(Arithmetic(seed=7)))
    assert seeded(INSIDE, 7).seed == 5


def test_a_wrapper_is_known_by_its_field():
    assert wraps(Curriculum)
    assert wraps(Prefixed(INSIDE))
    assert not wraps(INSIDE)
    assert not wraps(object())


def test_a_setting_that_is_called_task_wraps_nothing():
    @dataclass(frozen=True)
    class Named:
        task: str = "sum"

    assert not wraps(Named)
    assert innermost(Named()) == Named()
