"""Test that all links, commands, settings, tests, metrics, recipes and files named in the documentation exist."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import chdir
from pathlib import Path

import pytest

from conftest import mostly_slow, records
from doc_blocks import LANGUAGES, MARKERS, USER_PAGES, drop_blocks, is_placeholder, read_blocks, split_commands
from pellucid import cli, config
from pellucid.config import SECTIONS
from pellucid.rewards.settings import JudgeSettings, RewardModelSettings
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks import TASKS, load_task_class
from pellucid.types import UserError
from runs import train

DOCS = sorted(page for page in Path("docs").rglob("*.md") if page.parts[1] not in ("studies", "systems"))
READMES = (Path("README.md"), Path("README.zh.md"))
PAGES = [*DOCS, *READMES, Path("CONTRIBUTING.md"), Path("benchmarks/README.md")]
REFERENCE = Path("docs/reference")
BLOCKS = [block for page in USER_PAGES for block in read_blocks(page)]
SOURCE = "".join(path.read_text(encoding="utf-8") for path in sorted(Path("src/pellucid").rglob("*.py")))
LIMIT = 2000
GENERATED = {"settings", "commands", "errors", "models"}


def table(page):
    """Return the cells of each row, without the header."""
    rows = [line for line in (Path("docs") / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows if "---" not in row][1:]


# ---------------------------------------------------------------- pages and links


def slug(heading):
    """Return the anchor that GitHub and the site make for a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    return {slug(line.lstrip("#")) for line in drop_blocks(page.read_text()).splitlines() if re.match(r"#+ ", line)}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_has_a_target(page):
    prose = re.sub(r"`[^`\n]*`", "", drop_blocks(page.read_text()))
    for link, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", prose):
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}#{anchor}"


def test_every_page_is_listed_in_its_section():
    for section in ("tutorials", "how-to", "explanation", "reference", "contributing"):
        folder = Path("docs") / section
        listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\): .", (folder / "index.md").read_text(), re.MULTILINE)
        assert sorted(listed) == sorted(path.name for path in folder.glob("*.md") if path.name != "index.md")
    assert [path.name for path in Path("docs").glob("*.md")] == ["index.md"]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_user_pages_are_short(page):
    words = [word for word in page.read_text().split() if re.search(r"\w", word)]
    assert page.stem in GENERATED or len(words) <= LIMIT


def test_every_docs_page_named_in_the_code_exists():
    pages = set(re.findall(r"docs/[\w/-]+\.md", SOURCE)) | {
        f"docs/{page}.md" for page in re.findall(r'page="([^"]+)"', SOURCE)
    }
    assert len(pages) > 10
    assert [page for page in pages if not Path(page).is_file()] == []


def test_error_message_ends_with_the_page_that_helps():
    assert str(UserError("no", page="how-to/rewards")) == "no (docs/how-to/rewards.md)"
    assert str(UserError("no")) == "no"


# ---------------------------------------------------------------- code blocks and commands


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_code_blocks_are_marked_and_can_be_parsed(page, tmp_path):
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    root, folder = Path.cwd(), tmp_path
    for block in read_blocks(page):
        assert block.language in LANGUAGES, block.place
        assert block.marker in MARKERS, block.place
        assert bool(block.value) == (block.marker in ("file", "needs", "from")), block.place
        if block.marker == "file":
            file = folder / block.value
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        if block.marker == "from":
            assert_lines_stand_in(block, (root / block.value).read_text())
        elif block.language == "python":
            compile(block.text, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        elif block.language == "toml":
            assert_settings_exist(tomllib.loads(block.text), block.place)
        elif block.language in ("json", "jsonl"):
            for text in block.text.splitlines() if block.language == "jsonl" else [block.text]:
                json.loads(text)
        elif block.language == "sh":
            assert "$ " not in block.text or "$ (" in block.text, f"{block.place}: a command without a prompt"
            with chdir(folder):
                for words in split_commands(block.text):
                    assert_command_exists(words, root, block.place)
                    if words[0] == "cd" and Path(words[1]).is_dir():
                        os.chdir(words[1])
                    if words[:2] == ["pellucid", "init"]:
                        cli.parse_command_line(words[1:])()
                folder = Path.cwd()


def assert_lines_stand_in(block, text):
    rest = iter([line.strip() for line in text.splitlines()])
    for line in block.text.splitlines():
        if line.strip() not in ("", "..."):
            assert any(line.strip() == each for each in rest), f"{block.place}: {line}"


def assert_settings_exist(sections, place):
    if "variants" in sections or "base" in sections:
        return  # a study
    for name, section in sections.items():
        if name not in SECTIONS:
            continue
        assert set(section) - {"name"} <= set(list_keys(name, section)), f"{place}: {name}"


def list_keys(name, section):
    if name != "task":
        return config.get_field_types(SECTIONS[name])
    task = section.get("name", "")
    if ":" in task or not task:  # a custom task, or a section that is combined with another
        return section
    return config.get_field_types(load_task_class(task))


def assert_command_exists(words, root, place):
    """Check that a command of the package has these options, and that a script or Makefile target exists."""
    program, *rest = words
    if program == "pellucid" and rest and not any(map(is_placeholder, rest[:1])):
        if "--help" in rest or "--help-all" in rest:
            rest = [word for word in rest if not word.startswith("--help")]
            assert not rest or rest[0] in cli.COMMANDS, place
            return
        cli.parse_command_line(rest)
        own, settings = config.split_setting_flags(rest[1:])
        recipe = own[0] if rest[0] == "train" and own and not own[0].startswith("-") else ""
        if recipe and not is_placeholder(recipe):
            assert_settings_exist(config.merge_settings(config.read_settings(config.find_recipe(recipe)), {}), place)
        assert_flags_exist(settings, place)
    if program == "make":
        targets = set(re.findall(r"^([\w./-]+):", (root / "Makefile").read_text(), re.MULTILINE))
        named = [word for word in rest if not word.startswith("-") and "=" not in word]
        assert set(named) <= targets, place
    if program in ("python", "torchrun", "jupytext"):
        for script in [word for word in rest if re.fullmatch(r"(benchmarks|examples|tests)/[\w/]+\.py", word)]:
            assert (root / script).is_file(), f"{place}: {script}"


def assert_flags_exist(flags, place):
    for name, section in config.parse_setting_flags(flags).items():
        assert name in SECTIONS, f"{place}: --{name}"
        if name != "task":
            keys = {
                key.removeprefix("no_") if key not in config.get_field_types(SECTIONS[name]) else key for key in section
            }
            assert keys <= set(config.get_field_types(SECTIONS[name])), f"{place}: {name}"


def inline_code(page):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", drop_blocks(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_in_the_prose_exist(page, tmp_path):
    root = Path.cwd()
    with chdir(tmp_path):
        for code in inline_code(root / page):
            if re.match(r"(make|python|torchrun) ", code):
                for words in split_commands(code):
                    assert_command_exists(words, root, str(page))
            if (match := re.match(r"pellucid ([\w-]+)", code)) and not is_placeholder(match[1]):
                assert match[1] in cli.COMMANDS, code
                flags = set(re.findall(r"(--[a-z][\w-]*)(?![\w.-])", code)) - {"--help", "--help-all", "--version"}
                assert flags <= set(cli.collect_option_types(match[1])), code


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_named_setting_exists(page):
    text = page.read_text()
    if page.stem.startswith("from-"):  # the first column has the names of another library
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    for section, key in re.findall(r"`(?:--)?([a-z]+)\.(?:no-)?([a-z][a-z_-]+)(?=[` ])", text):
        cls = SECTIONS.get(section)
        if dataclasses.is_dataclass(cls) and key != "py":
            assert key.replace("-", "_") in {f.name for f in dataclasses.fields(cls)}, f"{section}.{key}"


TESTS = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_named_test_exists(page):
    if page.stem == "lab-book":
        pytest.skip("a diary names tests that have gone")
    text = page.read_text()
    for named in set(re.findall(r"`(test_\w+)`", text)) - {"test_data", "test_share"}:  # these two are settings
        assert f"def {named}(" in TESTS, named
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert Path(file).exists(), file


# ---------------------------------------------------------------- reference


def test_every_line_next_to_an_equation_is_in_its_file():
    rows = [row for row in table("contributing/equations.md") if row[0].isdigit()]
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    for _, equation, file, line in rows:
        source = (Path("src/pellucid") / file.strip("`")).read_text()
        assert line.strip("`") in source, equation


def test_table_of_variants_matches_the_recipes():
    recipes = {path.stem: tomllib.loads(path.read_text()) for path in Path("recipes/variants").glob("*.toml")}
    keys = {name: ", ".join(key for section in recipe.values() for key in section) for name, recipe in recipes.items()}
    rows = {
        re.search(r"variants/(\w+)\.toml", recipe)[1]: sets for _, _, recipe, sets, _ in table("reference/variants.md")
    }
    assert rows == keys


def test_architecture_page_matches_the_files_and_folders():
    text = Path("docs/contributing/architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|\.html|/))`", text))
    assert {name for name in named if not (Path("src/pellucid") / name).exists()} == set()
    folders = {f"{path.parent.name}/" for path in Path("src/pellucid").glob("*/__init__.py")}
    assert folders - named == set()


METRIC = re.compile(
    r'f?"((?:reward|groups|completion|ratio|clip|effect|kl|prefix|curriculum|sampler|time|memory|update|tools|turns|failed|logged|skipped)/[\w{}/]+)"'
)


def documented_metrics():
    text = (REFERENCE / "metrics.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .* \|$", text.partition("## Rewards")[2], re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([\w/@]+)`", row)}


def test_every_recorded_or_computed_metric_is_documented():
    """Checks the keys of recorded runs and the keys in the code."""
    documented = documented_metrics()
    patterns = {
        re.compile(re.sub(r"NAME|KIND", r"[\\w:.-]+", key)) for key in documented if re.search("NAME|KIND", key)
    }
    recorded = {
        key
        for name in ("metrics.jsonl", "evals.jsonl")
        for path in Path("docs").rglob(name)
        for line in path.read_text().splitlines()
        for key in json.loads(line)
    }
    emitting = [path for path in Path("src/pellucid").rglob("*.py") if path.parent.name not in ("inspect", "study")]
    computed = {key for path in emitting for key in METRIC.findall(path.read_text()) if "{" not in key}
    computed -= {"groups/dead", "time/drawn"}  # a prefix of several metrics, and a mark of the clock
    assert computed - documented == set()
    assert {key for key in recorded - documented if not any(pattern.fullmatch(key) for pattern in patterns)} == set()


@pytest.mark.parametrize(
    "settings",
    mostly_slow(
        [
            [],
            ["--algorithm.kl-coef", "0.1", "--log.tokens", "1", "--algorithm.advantage", "rloo"],
            [
                "--algorithm.kl-coef",
                "0.1",
                "--algorithm.kl-in",
                "loss",
                "--algorithm.kl",
                "k2",
                "--algorithm.max-rounds",
                "2",
            ],
        ],
        every=3,
    ),
)
def test_every_metric_that_a_run_writes_is_documented(settings, recipe, tmp_path):
    assert train(recipe, "--run", tmp_path / "run", "--algorithm.steps", "1", *settings) == 0
    documented = documented_metrics()
    for name in ("metrics.jsonl", "evals.jsonl"):
        for row in records(tmp_path / "run" / name):
            assert row.keys() - documented == set()


def test_every_documented_metric_exists():
    for key in documented_metrics() - {"n", "k", "step"}:
        prefix, _, last = key.rpartition("/")
        names = [f'"{key}"', f'"{key.removeprefix("logged/")}"']
        names += [f'"{last}"'] if prefix == "time" else []  # a lap of the clock
        names += [f'"{prefix}/{{'] if last in ("NAME", "KIND") else []
        assert any(name in SOURCE for name in names), key


def test_documented_error_messages_are_in_the_package():
    source = re.sub(r'"\s*\n\s*f?"|\'\s*\n\s*f?"|"\s*\n\s*f?\'', "", SOURCE)
    source = re.sub(r"\{\w+ = |\{[^{}\"']*\}", "{}", source)
    for cause in tomllib.loads(Path("benchmarks/errors.toml").read_text())["cause"]:
        for message, _ in cause.get("messages", []):
            assert message in SOURCE or message in source, message


@pytest.mark.slow
@pytest.mark.parametrize("script", ["settings", "transcript commands", "transcript errors"])
def test_generated_pages_are_up_to_date(script):
    """The pages are generated in a separate process, because help follows the width of a terminal."""
    name, *words = script.split()
    page = REFERENCE / f"{(words or [name])[-1]}.md"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, f"benchmarks/{name}.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == page.read_text(encoding="utf-8"), f"{' '.join(command[1:])} > {page}"


def test_every_setting_is_documented():
    text = (REFERENCE / "settings.md").read_text()
    classes = [cls for name, cls in SECTIONS.items() if name != "task"]
    classes += [*map(load_task_class, TASKS), RewardTerm, JudgeSettings, RewardModelSettings]
    for cls in classes:
        for key in config.get_field_types(cls):
            assert key in ("name", "task") or f"| `{key}` |" in text, f"{cls.__name__}.{key}"
    assert re.findall(r"^\| `\w+` .*\|  \|$", text, re.MULTILINE) == [], "a setting without a docstring"


# ---------------------------------------------------------------- READMEs and recorded runs


def test_chinese_readme_matches_the_english_one():
    def outline(path):
        text = path.read_text()
        code = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        rows = [row for row in prose.splitlines() if row.startswith("| ")]
        return {
            "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
            "code": code,
            "links": sorted(set(re.findall(r"\]\(([^)]+)\)", prose)) - set(map(str, READMES))),
            "commands": sorted(re.findall(r"`((?:pellucid|make|torchrun|--)[^`]*)`", prose)),
            "numbers": [sorted(re.findall(r"\d+(?:\.\d+)?", row)) for row in rows],
        }

    english, chinese = map(outline, READMES)
    assert chinese == english


def test_recorded_runs_contain_no_absolute_paths():
    assert [path for path in Path("docs").rglob("config.json") if '"/' in path.read_text()] == []
