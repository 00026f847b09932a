"""Documents that say what the source says, and no marks of a merge."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from pellucid.config import load_config
from pellucid.types import Completion

SOURCES = sorted(Path("src").rglob("*.py"))
README = Path("README.md").read_text()


def test_no_merge_has_left_its_marks():
    folders = ("src", "tests", "docs", "recipes", "examples", "benchmarks")
    kinds = {".py", ".md", ".toml", ".html"}
    paths = [path for folder in folders for path in Path(folder).rglob("*") if path.suffix in kinds]
    marks = re.compile("^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [path for path in [*paths, *Path().glob("*.*")] if path.is_file() and marks.search(path.read_text())] == []


def test_the_lowest_versions_that_are_tested_are_the_bounds_of_the_package():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = ("lora", "data", "tensorboard", "serve", "plots", "agents")
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
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
def test_possessive_groups_are_matched_by_regex():
    """Python's own `re` loses matches of them before 3.11.5, as in Debian 12, and says nothing."""
    libraries = set()
    for source in filter(possessive, map(Path.read_text, SOURCES)):
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        for function in (call.func for call in calls if possessive(ast.get_source_segment(source, call))):
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                libraries.add(function.value.id)
    assert libraries == {"regex"}


def possessive(pattern):
    return re.search(r"\)[?*+]\+", pattern)


def test_the_loop_in_the_readme_is_the_loop_in_the_source():
    source = Path("src/pellucid/algorithm/grpo.py").read_text()
    start = source.index("    sampler.sync(policy, state.step)\n    for step in range")
    loop = source[start : source.index("\n\n\n", start)]
    shown = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    dedented = "\n".join(line.removeprefix("    ") for line in loop.splitlines()) + "\n"
    assert dedented in shown


def test_train_and_update_fit_a_screen():
    source = Path("src/pellucid/algorithm/grpo.py").read_text()
    for name in ("train", "update_policy"):
        body = re.search(rf"\ndef {name}\(.*?(?=\n\n\n)", source, re.DOTALL)
        assert len(body[0].splitlines()) < 45


def test_the_task_in_the_readme_works(tmp_path):
    """Fifteen lines that a newcomer copies: they must load, sample and grade."""
    [code] = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class" in block]
    (tmp_path / "haiku_task.py").write_text(code)
    cls = re.search(r"class (\w+)", code)[1]
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'[task]\nname = "{tmp_path}/haiku_task.py:{cls}"\n')
    task = load_config(recipe).task
    prompts = task.sample(0, 3)
    assert prompts == task.sample(0, 3)
    assert task.reward(prompts[0], Completion((1,), (0.0,), prompts[0].answer, True)).is_correct
    assert not task.reward(prompts[0], Completion((1,), (0.0,), "", True)).is_correct


def test_every_file_that_the_readme_names_exists():
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    for path in re.findall(r"\]\((?!http|#)([^)]+)\)", prose):
        assert Path(path).exists(), path
    for recipe in re.findall(r"recipes/[\w/]+\.toml", README):
        assert Path(recipe).exists(), recipe
