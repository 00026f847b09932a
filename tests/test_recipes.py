"""Recipes by name, from wherever one stands."""

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
    """No recipe lies here."""
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
def test_a_name_is_that_of_a_shipped_recipe(name, file):
    assert config.find_recipe(name) == SHIPPED / file


def test_a_file_that_exists_stays_what_it_is(elsewhere, monkeypatch):
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere / "arithmetic").write_text("")
    assert config.find_recipe("arithmetic") == Path("arithmetic")
    assert config.find_recipe("~/arithmetic") == elsewhere / "arithmetic"
    (elsewhere / "variants").mkdir()
    (elsewhere / "variants" / "dapo.toml").write_text("")
    assert config.find_recipe("dapo.toml", Path("variants")) == Path("variants/dapo.toml")
    assert config.find_recipe("variants/dapo.toml") == Path("variants/dapo.toml")
    assert config.find_recipe("variants/dapo") == SHIPPED / "variants/dapo.toml", "no file is called so"


def test_a_folder_is_no_recipe(elsewhere):
    (elsewhere / "arithmetic").mkdir()
    assert config.find_recipe("arithmetic") == SHIPPED / "arithmetic.toml"


def test_a_name_of_several_is_theirs_to_complete(elsewhere, monkeypatch):
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
def test_what_is_neither_is_told_what_there_is(name, hints, elsewhere):
    (elsewhere / "mine").mkdir()
    for file in ("backwards.toml", "notes.txt"):
        (elsewhere / "mine" / file).write_text("")
    with pytest.raises(UserError) as told:
        config.find_recipe(name)
    assert str(told.value) == f"{name}: there is no such file, and no recipe of this name{hints}"


@pytest.mark.parametrize("name", ["", ".", "zzz/zzz"])
def test_where_nothing_is_near_all_of_them_are_named(name):
    with pytest.raises(UserError, match=r"; there are arithmetic, .*, variants/weighted_k3$"):
        config.find_recipe(name)


def test_all_are_listed_each_with_a_sentence_of_its_own():
    listed = config.describe_recipes()
    assert [SHIPPED / f"{name}.toml" for name in listed] == list(config.find_packaged_recipes().values())
    assert {path.resolve() for path in SHIPPED.rglob("*.toml")} == set(config.find_packaged_recipes().values())
    assert listed["sorting"] == "Sort four digits, graded by place."
    assert all(line.endswith(".") for line in listed.values())


def test_each_is_whole_wherever_it_is_read():
    for path in map(config.find_recipe, config.describe_recipes()):
        if "variants" in config.read_settings(path):
            assert plan.load_variant_configs(plan.read_study(path)), path
        else:
            config.load_config(path)


def test_the_base_of_a_study_of_ones_own_may_be_a_name(elsewhere):
    study = elsewhere / "mine.toml"
    study.write_text('base = "arithmetic"\nseeds = [0]\n[variants.plain]\n')
    assert plan.read_study(study).variants["plain"]["sampler"] == {"max_tokens": 24}
