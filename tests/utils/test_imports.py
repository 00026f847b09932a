"""Tests that the garbage collector pauses while torch is imported, and only then."""

from __future__ import annotations

import gc
import sys

import pytest

from pellucid.utils.plugins import pause_garbage_collection


@pytest.fixture
def without_torch(monkeypatch):
    """Hide torch, as at the start of a process. Objects that the test suite has frozen stay frozen."""
    monkeypatch.delitem(sys.modules, "torch")


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_collector_pauses_during_the_import_and_freezes_its_objects():
    before = gc.get_freeze_count()
    with pause_garbage_collection():
        assert not gc.isenabled()
        brought: list[object] = []
        assert any(each is brought for each in gc.get_objects())
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(each is brought for each in gc.get_objects())


@pytest.mark.usefixtures("without_torch")
def test_failed_import_reenables_the_collector():
    with pytest.raises(ImportError), pause_garbage_collection():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.usefixtures("without_torch")
def test_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collector_keeps_running_if_torch_is_already_imported():
    with pause_garbage_collection():
        assert gc.isenabled()
        brought: list[object] = []
    assert any(each is brought for each in gc.get_objects())
