"""What the documentation names exists: lines, tests, recipes, files."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pellucid.config import SECTIONS

DOCS = sorted(Path("docs").glob("*.md"))
READMES = (Path("README.md"), Path("README.zh.md"))


def table(name):
    """The cells of each row, without the heading."""
    rows = [line for line in Path(f"docs/{name}.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "---" not in row][1:]


def test_every_line_beside_an_equation_stands_in_its_file():
    rows = table("algorithm")
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    for _, equation, file, line in rows:
        source = (Path("src/pellucid") / file.strip("`")).read_text()
        assert line.strip("`") in source, equation


@pytest.mark.parametrize(
    "name",
    [
        "sharp-edges",
        "kl",
        "algorithm",
        "variants",
        "platforms",
        "reliability",
        "serve",
        "one-file",
        "systems",
        "rewards",
    ],
)
def test_every_test_that_is_named_exists(name):
    text = Path(f"docs/{name}.md").read_text()
    tests = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))
    for named in re.findall(r"`(test_\w+)`", text):
        assert f"def {named}(" in tests, named
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert Path(file).exists(), file


def test_the_sharp_edges_that_matter_most_are_all_there():
    named = {row[0] for row in table("sharp-edges")}
    must = "E4-1 E2-1 E2-2 E2-3 E2-6 E1-1 E1-3 E1-5 E0-2 E3-3 E3-4 G-2"
    assert set(must.split()) <= named


def test_every_link_leads_somewhere():
    for path in [*DOCS, *READMES]:
        for link in re.findall(r"\]\((?!http|#)([^)#]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_the_table_of_variants_is_the_folder_of_recipes():
    recipes = {path.stem: tomllib.loads(path.read_text()) for path in Path("recipes/variants").glob("*.toml")}
    keys = {name: ", ".join(key for section in recipe.values() for key in section) for name, recipe in recipes.items()}
    rows = {re.search(r"variants/(\w+)\.toml", recipe)[1]: sets for _, _, recipe, sets, _ in table("variants")}
    assert rows == keys


def test_every_file_of_the_plan_exists_and_every_folder_is_in_it():
    text = Path("docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|\.html|/))`", text))
    assert {name for name in named if not (Path("src/pellucid") / name).exists()} == set()
    folders = {f"{path.parent.name}/" for path in Path("src/pellucid").glob("*/__init__.py")}
    assert folders - named == set()


def test_every_item_of_the_systems_has_its_row_and_what_shows_it():
    rows = [row for row in table("systems") if len(row) == 4 and row[0][0].isdigit()]
    assert [int(n) for row in rows for n in row[0].split(", ")] == list(range(1, 79))
    for *_, shown in rows:
        named = re.findall(r"`([\w/]+\.py)`", shown)
        assert named, shown
        for file in named:
            assert (Path("tests") / file).exists(), file


def test_every_setting_that_is_named_exists():
    for path in [*DOCS, *READMES]:
        for section, key in re.findall(r"`(?:--)?([a-z]+)\.(?:no-)?([a-z][a-z_-]+)(?=[` ])", path.read_text()):
            cls = SECTIONS.get(section)
            if dataclasses.is_dataclass(cls) and key != "py":
                assert key.replace("-", "_") in {f.name for f in dataclasses.fields(cls)}, f"{path}: {section}.{key}"


def test_the_chinese_readme_keeps_step_with_the_english_one():
    def outline(path):
        text = path.read_text()
        code = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        return {
            "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
            "code": code,
            "links": sorted(set(re.findall(r"\]\(([^)]+)\)", prose)) - set(map(str, READMES))),
            "commands": sorted(re.findall(r"`((?:pellucid|make|torchrun|--)[^`]*)`", prose)),
            "numbers": [re.findall(r"[\d.]+", row) for row in prose.splitlines() if row.startswith("| ")],
        }

    english, chinese = map(outline, READMES)
    assert chinese == english


def test_no_record_names_a_folder_of_the_machine_it_was_made_on():
    assert [path for path in Path("docs").rglob("config.json") if '"/' in path.read_text()] == []


@pytest.mark.slow
def test_the_page_of_the_command_line_is_what_the_commands_say():
    """By benchmarks/transcript.py, in a process of its own: help follows the width of a terminal."""
    command = [sys.executable, "benchmarks/transcript.py"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == Path("docs/command-line.md").read_text(encoding="utf-8")
