"""Test that recipes are found by name from any working directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pellucid import config
from pellucid.study import plan
from pellucid.types import UserError

SHIPPED = Path("recipes").resolve()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Change to a folder without recipes, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    {
        "arithmetic": "arithmetic.toml",
        "arithmetic.toml": "arithmetic.toml",
        "variants/dapo": "variants/dapo.toml",
        "variants/dapo.toml": "variants/dapo.toml",
        "dapo": "variants/dapo.toml",
        "techniques": "study/techniques.toml",
        "recipes/study/off_the_floor.toml": "study/off_the_floor.toml",
    }.items(),
)
def test_names_find_shipped_recipes(name, file):
    assert config.find_recipe(name) == SHIPPED / file


def test_existing_file_takes_precedence(elsewhere, monkeypatch):
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere / "arithmetic").write_text("")
    assert config.find_recipe("arithmetic") == Path("arithmetic")
    assert config.find_recipe("~/arithmetic") == elsewhere / "arithmetic"
    (elsewhere / "variants").mkdir()
    (elsewhere / "variants" / "dapo.toml").write_text("")
    assert config.find_recipe("dapo.toml", Path("variants")) == Path("variants/dapo.toml")
    assert config.find_recipe("variants/dapo.toml") == Path("variants/dapo.toml")
    assert config.find_recipe("variants/dapo") == SHIPPED / "variants/dapo.toml", "no file is called so"


def test_folder_is_not_a_recipe(elsewhere):
    (elsewhere / "arithmetic").mkdir()
    assert config.find_recipe("arithmetic") == SHIPPED / "arithmetic.toml"


def test_ambiguous_name_error_lists_the_recipes(elsewhere, monkeypatch):
    folder = Path(shutil.copytree(SHIPPED, elsewhere / "installed"))
    (folder / "study" / "dapo.toml").write_text("")
    monkeypatch.setattr(config, "PACKAGED_RECIPES_FOLDER", folder)
    with pytest.raises(UserError, match=r"^dapo may be study/dapo or variants/dapo: write one of them$"):
        config.find_recipe("dapo")
    assert config.find_recipe("variants/dapo") == folder / "variants/dapo.toml"


@pytest.mark.parametrize(
    ("name", "hints"),
    {
        "arithmetc": "; did you mean arithmetic?; near it: mine/backwards.toml",
        "dappo.toml": "; did you mean variants/dapo?; near it: mine/backwards.toml",
        "backwrds": '; did you mean "mine/backwards.toml"?',
        "mine/backwrds.toml": '; did you mean "mine/backwards.toml"?',
        "mine/xyz": "; near it: mine/backwards.toml",
    }.items(),
)
def test_unknown_name_error_gives_hints(name, hints, elsewhere):
    (elsewhere / "mine").mkdir()
    for file in ("backwards.toml", "notes.txt"):
        (elsewhere / "mine" / file).write_text("")
    with pytest.raises(UserError) as told:
        config.find_recipe(name)
    assert str(told.value) == f"{name}: there is no such file, and no recipe of this name{hints}"


@pytest.mark.parametrize("name", ["", ".", "zzz/zzz"])
def test_unknown_name_error_lists_all_recipes_if_none_is_similar(name):
    with pytest.raises(UserError, match=r"; there are arithmetic, .*, variants/weighted_k3$"):
        config.find_recipe(name)


def test_all_recipes_are_listed_with_a_description():
    listed = config.describe_recipes()
    assert [SHIPPED / f"{name}.toml" for name in listed] == list(config.find_packaged_recipes().values())
    assert {path.resolve() for path in SHIPPED.rglob("*.toml")} == set(config.find_packaged_recipes().values())
    assert listed["sorting"] == "Sort four digits, graded by place."
    assert all(line.endswith(".") for line in listed.values())


def test_shipped_recipes_load_from_any_working_directory():
    for path in map(config.find_recipe, config.describe_recipes()):
        if "variants" in config.read_settings(path):
            assert plan.load_variant_configs(plan.read_study(path)), path
        else:
            config.load_config(path)


def test_base_of_a_custom_study_may_be_a_name(elsewhere):
    study = elsewhere / "mine.toml"
    study.write_text('base = "arithmetic"\nseeds = [0]\n[variants.plain]\n')
    assert plan.read_study(study).variants["plain"]["sampler"] == {"max_tokens": 24}
