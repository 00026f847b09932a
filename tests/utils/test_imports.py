"""The garbage collector rests while torch is imported, and only then."""

from __future__ import annotations

import gc
import sys

import pytest

from pellucid.utils.plugins import pause_garbage_collection


@pytest.fixture
def without_torch(monkeypatch):
    """As a process begins, but for what the suite has frozen itself."""
    monkeypatch.delitem(sys.modules, "torch")


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_nothing_is_looked_for_in_the_first_import_nor_in_what_it_brought_later_on():
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        assert not gc.isenabled()
        brought: list[object] = []
        assert any(each is brought for each in gc.get_objects())
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(each is brought for each in gc.get_objects())


@pytest.mark.usefixtures("without_torch")
def test_an_import_that_fails_leaves_the_collector_at_work():
    with pytest.raises(ImportError), pause_garbage_collection():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.usefixtures("without_torch")
def test_a_collector_that_is_switched_off_stays_so():
    gc.disable()
    try:
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_heap_of_a_program_that_has_torch_is_its_own():
    with pause_garbage_collection():
        assert gc.isenabled()
        brought: list[object] = []
    assert any(each is brought for each in gc.get_objects())
