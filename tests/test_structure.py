"""Test that documents match the source, and that no merge conflict markers are left."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

SOURCES = sorted(Path("src").rglob("*.py"))


def test_no_merge_conflict_markers_are_left():
    folders = ("src", "tests", "docs", "recipes", "examples", "benchmarks")
    kinds = {".py", ".md", ".toml", ".html"}
    paths = [path for folder in folders for path in Path(folder).rglob("*") if path.suffix in kinds]
    marks = re.compile("^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [path for path in [*paths, *Path().glob("*.*")] if path.is_file() and marks.search(path.read_text())] == []


def test_lowest_tested_versions_equal_the_bounds_of_the_package():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    apart = {"verifiers", "vllm", "deepspeed", "docs", "dev", "all"}  # not installed by `make test-lowest`
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras.keys() - apart for one in extras[extra])]
    bounds = dict(map(at_least, wanted))
    lines = Path("constraints-lowest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tested.keys() == bounds.keys()
    assert {name: Version(version) for name, version in tested.items()} == bounds


def at_least(requirement):
    parsed = Requirement(requirement)
    [bound] = parsed.specifier
    assert bound.operator == ">="
    return parsed.name, Version(bound.version)


@pytest.mark.slow
def test_possessive_quantifiers_are_matched_by_regex():
    """Python's own `re` silently loses some of their matches before 3.11.5, as in Debian 12."""
    libraries = set()
    for source in filter(possessive, map(Path.read_text, SOURCES)):
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        for function in (call.func for call in calls if possessive(ast.get_source_segment(source, call))):
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                libraries.add(function.value.id)
    assert libraries == {"regex"}


def possessive(pattern):
    return re.search(r"\)[?*+]\+", pattern)


def test_train_and_update_policy_fit_on_a_screen():
    source = Path("src/pellucid/algorithm/grpo.py").read_text()
    for name in ("train", "update_policy"):
        body = re.search(rf"\ndef {name}\(.*?(?=\n\n\n)", source, re.DOTALL)
        assert len(body[0].splitlines()) < 45
