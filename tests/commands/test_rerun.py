"""Test the recipe that is made from a run: tomllib reads it, and it gives the same settings again."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid import config
from pellucid.share import format_toml, make_recipe, redact_value, shorten_path
from pellucid.training import run_dir as files

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), TEXT
)
VALUES = st.recursive(PLAIN, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXT, inside, max_size=3))


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_tomllib_reads_what_was_written(values):
    assert tomllib.loads(format_toml(values)) == values


def recorded(tmp_path, recipe, *overrides):
    """Return a run folder that holds only the settings of this recipe."""
    path = tmp_path / "recipe.toml"
    path.write_text(recipe)
    settings = files.dump_settings(config.resolve_config(config.load_config(path, overrides)))
    (tmp_path / "run").mkdir()
    known = {**settings, "digests": files.digest_named_files(settings)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(known))
    return tmp_path / "run"


RECIPES = [path for path in sorted(Path("recipes").rglob("*.toml")) if path.parent.name != "study"]


def test_every_recipe_round_trips_with_all_its_settings(tmp_path):
    for i, path in enumerate(RECIPES):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "again.toml").write_text(make_recipe(recorded(folder, path.read_text(), "--algorithm.seed", "3")))
        again = config.resolve_config(config.load_config(folder / "again.toml"))
        expected = config.dump_config(config.resolve_config(config.load_config(path, ["--algorithm.seed", "3"])))
        if Path(str(expected["task"].get("data"))).is_file():  # the recipe of a run omits the folder of the data
            expected["task"]["data"] = Path(expected["task"]["data"]).name
        assert config.dump_config(again) == expected, path


def test_only_settings_that_differ_from_defaults_are_written(tmp_path):
    recipe = '[task]\nname = "arithmetic"\ndigits = 2\n[algorithm]\nsteps = 30\ngroup_size = 4\nseed = 7\n'
    assert tomllib.loads(make_recipe(recorded(tmp_path, recipe))) == {
        "policy": {"model": "smollm2-135m"},
        "algorithm": {"group_size": 4, "seed": 7},
        "task": {"name": "arithmetic", "digits": 2},
    }


def test_nested_tasks_are_written_without_their_defaults(tmp_path):
    recipe = (
        '[task]\nname = "curriculum"\npool = 32\n[task.task]\nname = "sorting"\nlength = 3\n[algorithm]\nseed = 7\n'
    )
    inside = {"name": "sorting", "length": 3}
    found = tomllib.loads(make_recipe(recorded(tmp_path, recipe)))
    assert found["task"] == {"name": "curriculum", "pool": 32, "task": inside}


def test_user_files_are_named_without_their_folder(tmp_path, monkeypatch):
    home = tmp_path / "my folder"
    home.mkdir()
    (home / "mine.py").write_text("def brief(completions, **columns):\n    return [0.0] * len(completions)\n")
    (home / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    monkeypatch.chdir(home)
    recipe = """
        [task]
        name = "dataset"
        data = "rows.jsonl"
        template = "/no_think {question}"
        [[task.rewards]]
        name = "numeric"
        [[task.rewards]]
        name = "mine.py:brief"
        weight = 0.5
        """
    found = make_recipe(recorded(tmp_path, recipe))
    assert str(tmp_path) not in found and "my folder" not in found
    task = tomllib.loads(found)["task"]
    assert task["data"] == "rows.jsonl" and task["template"] == "/no_think {question}"
    assert task["rewards"] == [{"name": "numeric"}, {"name": "mine.py:brief", "weight": 0.5}]
    Path("again.toml").write_text(found)
    assert config.load_config(Path("again.toml")).task.rewards[1].weight == 0.5


def test_task_with_missing_code_is_written_whole_without_secrets(tmp_path):
    (tmp_path / "judged.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Judged:\n"
        "    seed: int = 0\n"
        "    split: str = 'train'\n"
        "    api_key: str = ''\n"
        "    folder: str = ''\n"
        "    task: str = 'sums'\n"
    )
    task = f'[task]\nname = "{tmp_path}/judged.py:Judged"\napi_key = "sk-123"\nfolder = "{tmp_path}/judges"\n'
    run_dir = recorded(tmp_path, task)
    (tmp_path / "judged.py").unlink()
    found = tomllib.loads(make_recipe(run_dir))["task"]
    assert found == {"name": "judged.py:Judged", "split": "train", "api_key": "...", "folder": "judges", "task": "sums"}


@pytest.mark.parametrize("secret", ["sk-1", ["sk-1", "sk-2"], {"main": "hf_1"}, [{"of": ["hf_1"]}], 1234])
def test_values_under_secret_names_are_redacted(secret):
    settings = {"name": "judged", "judges": [{"api_key": secret, "max_tokens": 9, "token": ""}], "hf_token": secret}
    hidden = {"name": "judged", "judges": [{"api_key": "...", "max_tokens": 9, "token": ""}], "hf_token": "..."}
    assert redact_value(settings, set(), "task") == hidden


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("/home/me/runs/first/model", "first/model"),
        ("/home/me/parts/*.jsonl", "*.jsonl"),
        ("~/models/small.gguf", "small.gguf"),
        (r"C:\Users\me\rewards.py:brief", "rewards.py:brief"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("modelscope:me/model", "modelscope:me/model"),
        ("model:/home/me/judges/small", "model:small"),
        ("model:me/small", "model:me/small"),
        ("/no_think", "/no_think"),
        ("/think/ {question}", "/think/ {question}"),
        ("https://hub/me/it", "https://hub/me/it"),
    ],
)
def test_paths_are_shortened_and_other_texts_are_kept(value, name):
    assert shorten_path(value) == name


def test_path_with_spaces_is_recognized_if_it_exists(tmp_path):
    folder = tmp_path / "my judges"
    assert shorten_path(str(folder)) == str(folder)
    folder.mkdir()
    assert shorten_path(str(folder)) == "my judges"
    assert shorten_path(str(folder) + " that are not there", is_file=True) == "my judges that are not there"
