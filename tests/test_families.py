"""Test `benchmarks/families.py` on a few families, and that its page has a row for each known family."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from test_docs import table
from tiny_families import FAMILIES, OTHERS

HANDFUL = ("mistral", "lfm2", "recurrent_gemma", "gemma3", "rwkv", "t5")


@pytest.fixture
def families(monkeypatch):
    monkeypatch.syspath_prepend(Path("benchmarks").absolute())
    return importlib.import_module("families")


def in_words(row):
    """Return a row of the page without numbers, which depend on the machine, and without messages of libraries."""
    family, computed, sampler, steps, gap, served = row
    return family, computed, sampler.partition(" (")[0], steps.partition(":")[0], gap == "-", served.partition(":")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", HANDFUL)
def test_row_of_a_family_matches_a_new_trial(name, families, tmp_path):
    row = families.try_family(name, tmp_path)
    [written] = [each for each in table("reference/models.md") if each[0] == name]
    assert in_words(row) == in_words(written)
    assert row.gap == "-" or float(row.gap) < 5e-3


def test_page_has_a_row_for_each_family_of_the_script():
    rows = table("reference/models.md")
    assert [row[0] for row in rows] == [*FAMILIES, *OTHERS]
    assert sum(row[3] == "trained" for row in rows) >= 50
    for row in rows:
        assert row[3] == "trained" or row[3].startswith("refused: "), row
        assert "traceback" not in " ".join(row)


def test_family_with_a_traceback_is_reported_as_broken(families, monkeypatch, tmp_path, capsys):
    def broken(*_):
        raise ZeroDivisionError("somewhere")

    monkeypatch.setattr(families, "train", broken)
    assert families.try_family("llama", tmp_path).steps == families.BROKEN
    assert "ZeroDivisionError: somewhere" in capsys.readouterr().err
