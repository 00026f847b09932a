"""Test recipes and data as editors and spreadsheets write them, and how relative paths in a recipe are resolved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pellucid import config
from pellucid.tasks.data_files import load_rows
from pellucid.tasks.dataset import clear_dataset_caches
from pellucid.types import UserError

ROWS = "".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(3))


def error_of(act, *arguments):
    with pytest.raises(UserError) as raised:
        act(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def read(path):
    return load_rows(str(path), "", "train")


@pytest.fixture(autouse=True)
def _afresh():
    clear_dataset_caches()


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
@pytest.mark.parametrize("quoted", [True, False])
def test_fields_may_have_any_length(tmp_path, ending, quoted):
    """The limit of Python's csv module is 131,072 characters."""
    mark = "," if ending == ".csv" else "\t"
    long = "long " * 60_000 + (mark if quoted else "")
    written = f'"{long}"' if quoted else long
    path = tmp_path / f"a{ending}"
    path.write_text(f"question{mark}answer\n{written}{mark}1\n")
    [(_, row)] = read(path)
    assert row == {"question": long, "answer": "1"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"question;answer\n1+1?;2\n", "a.csv, line 1: the header has semicolons and no commas"),
        ("a.tsv", b"question;answer\n1+1?;2\n", "a.tsv, line 1: the header has semicolons and no tabs"),
        ("a.csv", "question,answer\nWie groß?,2\n".encode("latin-1"), "a.csv, line 2: not UTF-8 text: .*0xdf.*latin-1"),
        ("a.csv", b"question,answer\nIt\x92s?,2\n", "iconv -f WINDOWS-1252 -t UTF-8"),
        ("a.csv", "question,answer\n1?,2\n".encode("utf-16"), "a.csv, line 1: not UTF-8 text: .*UTF-16"),
        ("a.jsonl", '{"question": "groß"}\n'.encode("latin-1"), "a.jsonl, line 1: not UTF-8 text: .*latin-1"),
    ],
)
def test_errors_of_spreadsheet_files_name_the_cause(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read(tmp_path / name)


# ---------------------------------------------------------------- recipes


def test_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[algorithm]\nsteps = 7\n")
    assert config.load_config(tmp_path / "a.toml").algorithm.steps == 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'data = "C:\Users\me\rows.jsonl"', r"in single quotes, 'C:\Users\me', or with /"),
        (r'data = "D:\data\rows.jsonl"', r"in single quotes, 'C:\Users\me', or with /"),
    ],
)
def test_windows_path_error_shows_how_to_write_it(tmp_path, line, said):
    (tmp_path / "a.toml").write_text(f'[task]\nname = "dataset"\n{line}\n')
    told = error_of(config.load_config, tmp_path / "a.toml")
    assert said in told
    assert "line 3" in told


def test_missing_windows_path_error_shows_how_to_write_it(tmp_path):
    (tmp_path / "a.toml").write_text('[task]\nname = "dataset"\ndata = "C:\\temp\\rows.jsonl"\n')
    task = config.load_config(tmp_path / "a.toml").task
    assert "write a path in single quotes, 'C:\\Users\\me', or with /" in error_of(task.sample, 0, 1)


def test_other_toml_errors_do_not_mention_paths(tmp_path):
    (tmp_path / "a.toml").write_text('[task]\nname = "dataset\n')
    assert "backslash" not in error_of(config.load_config, tmp_path / "a.toml")


def test_table_instead_of_a_list_of_tables_error_shows_the_brackets(tmp_path):
    (tmp_path / "a.toml").write_text('[task]\nname = "dataset"\ndata = "a.jsonl"\n[task.rewards]\nname = "exact"\n')
    told = error_of(config.load_config, tmp_path / "a.toml")
    assert told.endswith("a.toml: task.rewards: is a list of tables: write it in double brackets, [[task.rewards]]")


# ---------------------------------------------------------------- relative paths

RECIPE = """
[policy]
model = "model"
template = "chat.jinja"
[task]
name = "prefixed"
file = "prefixes.json"
[task.task]
name = "dataset"
data = ["train.jsonl", "parts/*.jsonl"]
test_data = "test.jsonl"
system = "test.jsonl is a text here?"
[[task.task.rewards]]
name = "{reward}.py:grade"
[[task.task.rewards]]
name = "model:judge"
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return the folder of a project with a recipe, and the working directory, which is another folder."""
    project, here = tmp_path / "project", tmp_path / "here"
    for folder in (project / "parts", project / "model", project / "judge", here):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    reward = f"grade_{tmp_path.name.replace('-', '_')}"
    (project / "a.toml").write_text(RECIPE.format(reward=reward))
    for name in ("train.jsonl", "parts/b.jsonl", "test.jsonl"):
        (project / name).write_text(ROWS.replace("?", f"{name}?"))
    for name in ("chat.jinja", "prefixes.json", "model/config.json", "judge/config.json"):
        (project / name).write_text("{}")
    (project / f"{reward}.py").write_text("def grade(completions, **columns):\n    return [0.0] * len(completions)\n")
    return project, here


def test_relative_paths_are_resolved_from_the_folder_of_the_recipe(places):
    project, here = places
    loaded = config.load_config(project / "a.toml")
    inside = loaded.task.task
    assert [Path(p).resolve() for p in (loaded.policy.model, loaded.policy.template, loaded.task.file)] == [
        project / name for name in ("model", "chat.jinja", "prefixes.json")
    ]
    assert inside.system == "test.jsonl is a text here?"
    assert Path(inside.rewards[0].name).parent.resolve() == project
    assert Path(inside.rewards[1].name.removeprefix("model:")).resolve() == project / "judge"
    assert {p.text[1]["content"] for p in inside.sample(0, 6)} >= {"0train.jsonl?", "0parts/b.jsonl?"}
    assert not list(here.iterdir())


def test_folder_of_the_recipe_takes_precedence_over_the_working_directory(places):
    project, here = places
    (here / "train.jsonl").write_text(ROWS)
    (here / "only.jsonl").write_text(ROWS)
    recipe = project / "b.toml"
    for name, found in (("train.jsonl", project / "train.jsonl"), ("only.jsonl", here / "only.jsonl")):
        recipe.write_text(f'[task]\nname = "dataset"\ndata = "{name}"\n')
        assert Path(config.load_config(recipe).task.data).resolve() == found
        assert config.load_config(recipe, ["--task.data", name]).task.data == name, (
            "of the command line it is one from here"
        )


@pytest.mark.parametrize(
    "section",
    [
        '[task]\nname = "dataset"\ndata = "none.jsonl"\n',
        '[task]\nname = "dataset"\ndata = "none/*.jsonl"\n',
        '[task]\nname = "none.py:Task"\n',
        '[policy]\ntemplate = "none.jinja"\n',
        '[policy]\nmodel = "./none"\n',
    ],
)
def test_missing_file_error_names_the_searched_folders(places, section):
    from pellucid.policy import load  # noqa: PLC0415 - as what reads it does
    from pellucid.policy.chat_template import ChatTemplate  # noqa: PLC0415

    project, here = places
    (project / "b.toml").write_text(section)

    def looked():
        loaded = config.load_config(project / "b.toml")
        ChatTemplate(loaded.policy.template).apply_to_tokenizer(None) if loaded.policy.template else None
        load.locate_model(loaded.policy.model) if "none" in loaded.policy.model else None
        loaded.task.sample(0, 1)

    told = error_of(looked)
    assert f"it was looked for in {project}, the folder of the recipe, and in {here}" in told
