"""Tests for reading a study file into the settings of its variants."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pellucid import cli, config
from pellucid.study import plan
from pellucid.types import UserError

WRAPPERS = Path(__file__).with_name("wrapper_tasks.py")
OUTER, INNER = f"{WRAPPERS}:Outer", f"{WRAPPERS}:Inner"
BASE = """
[task]
name = "arithmetic"
digits = 2
[algorithm]
steps = 9
group_size = 8
[optimizer]
lr = 1e-5
"""


@pytest.fixture
def study_file(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)

    def write(text, head='base = "base.toml"\nseeds = [0, 1]\n'):
        path = tmp_path / "study.toml"
        path.write_text(head + text)
        return path

    return write


def task_of(study_file, text):
    return plan.read_study(study_file(text)).variants["one"]["task"]


def test_variants_override_common_settings_which_override_the_base(study_file):
    study = plan.read_study(
        study_file("""
        [common.algorithm]
        steps = 40
        [variants.plain]
        [variants.centered.algorithm]
        advantage = "centered"
        group_size = 4
        """)
    )
    assert list(study.variants) == ["plain", "centered"]
    assert study.variants["plain"]["algorithm"] == {"steps": 40, "group_size": 8}
    assert study.variants["centered"]["algorithm"] == {"steps": 40, "group_size": 4, "advantage": "centered"}
    assert all(settings["optimizer"] == {"lr": 1e-5} for settings in study.variants.values())


def test_task_of_the_same_name_or_without_a_name_is_merged(study_file):
    merged = {"name": "arithmetic", "digits": 2, "operators": ["+"]}
    for name in ("", 'name = "arithmetic"'):
        assert task_of(study_file, f'[variants.one.task]\n{name}\noperators = ["+"]') == merged


def test_different_task_takes_no_setting_of_the_base(study_file):
    assert task_of(study_file, '[variants.one.task]\nname = "sorting"') == {"name": "sorting"}


def test_wrapper_encloses_the_task_of_the_base(study_file):
    base = {"name": "arithmetic", "digits": 2}
    around = task_of(study_file, f'[variants.one.task]\nname = "{OUTER}"\nsize = 3')
    assert around == {"name": OUTER, "size": 3, "task": base}
    twice = f'[variants.one.task]\nname = "{OUTER}"\n[variants.one.task.task]\nname = "{INNER}"'
    innermost = {"name": INNER, "task": base}
    assert task_of(study_file, twice) == {"name": OUTER, "task": innermost}


def test_task_inside_a_wrapper_is_merged_like_any_other(study_file):
    head = f'[variants.one.task]\nname = "{OUTER}"\n[variants.one.task.task]\n'
    assert task_of(study_file, head + "digits = 3")["task"] == {"name": "arithmetic", "digits": 3}
    assert task_of(study_file, head + 'name = "sorting"')["task"] == {"name": "sorting"}


def test_variant_overrides_settings_of_a_common_wrapper(study_file):
    common = f'[common.task]\nname = "{OUTER}"\nsize = 3\n[variants.one.task]\nsize = 4\n'
    inside = {"name": "arithmetic", "digits": 2}
    assert task_of(study_file, common) == {"name": OUTER, "size": 4, "task": inside}
    inner = "[variants.one.task.task]\ndigits = 1"
    assert task_of(study_file, common + inner)["task"] == {"name": "arithmetic", "digits": 1}


def test_base_without_a_task_has_the_default_task(study_file, tmp_path):
    path = study_file(f'[variants.one.task]\nname = "{OUTER}"')
    (tmp_path / "base.toml").write_text("[algorithm]\nsteps = 9\n")
    assert plan.read_study(path).variants["one"]["task"]["task"] == {"name": "arithmetic"}


def test_all_variants_run_their_first_seed_before_any_runs_its_second(study_file):
    study = plan.read_study(study_file("[variants.a]\n[variants.b]"))
    runs = [(cell.variant, cell.seed) for cell in study.list_runs(Path("runs/s"))]
    assert runs == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [(cell.variant, cell.seed) for cell in study.list_runs(Path("runs/s"), ["b"])] == [("b", 0), ("b", 1)]


def test_cell_runs_a_plain_train_command():
    command = ["train", "runs/s/a/recipe.json", "--algorithm.seed", "1", "--run", "runs/s/a/seed-1"]
    assert plan.StudyRun(Path("runs/s"), "a", 1).arguments == command


def test_written_recipe_reads_back_as_the_settings(study_file, tmp_path):
    study = plan.read_study(study_file("[variants.a.algorithm]\nsteps = 3"))
    plan.write_variant_recipe(tmp_path / "a" / "recipe.json", study.variants["a"])
    assert json.loads((tmp_path / "a" / "recipe.json").read_text()) == study.variants["a"]
    assert plan.load_variant_configs(study)["a"].algorithm.steps == 3


HEAD = 'base = "base.toml"\nseeds = [0, 1]\n'
MISTAKES = {
    "seeds = [0]\n[variants.a]": "base must name the recipe",
    'base = "nowhere.toml"\nseeds = [0]\n[variants.a]': "nowhere.toml: there is no such file, and no recipe of",
    'base = "base.toml"\n[variants.a]': "seeds must be a list of different whole numbers",
    'base = "base.toml"\nseeds = [0, 0]\n[variants.a]': "seeds must be a list of different whole numbers",
    'base = "base.toml"\nseeds = [true]\n[variants.a]': "seeds must be a list of different whole numbers",
    HEAD: "there are no variants",
    HEAD + "[variant.a]": 'variant: no such key; did you mean "variants"?',
    HEAD + "[variants]\na = 3": "variants.a must be a table of settings, as [variants.a.algorithm]",
    HEAD + "common = 3\n[variants.common]": "common must be a table of settings, as [common.algorithm]",
    HEAD + "[common.algorithm]\nseed = 3\n[variants.common]": "common sets algorithm.seed",
    HEAD + "[variants.a.task]\nname = 3": "variants.a: ",
    HEAD + '[variants.a.task]\nname = "prefixed"\nfile = "no.json"': "variants.a: task.file = no.json: cannot be read",
    HEAD + '[variants."../a"]': "variants.'../a' names a folder",
    HEAD + "[variants.a.algorithm]\nseed = 3": "a sets algorithm.seed",
    HEAD + "[common.algorithm]\nseed = 3\n[variants.a]": "common sets algorithm.seed",
    HEAD + "[variants.b]\n[variants.a.algorithm]\nstep = 3": "variants.a: algorithm.step: no such key; did you mean",
    HEAD + '[variants.a.task]\nname = "arithmetics"': 'variants.a: task "arithmetics" is unknown',
    HEAD + "[variants.a]\ntask = 3": "variants.a: task: must be a table",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_exit_with_one_line_before_anything_is_written(study_file, tmp_path, capsys, monkeypatch, text):
    monkeypatch.setattr(sys, "executable", "false")  # training fails at once if it starts after all
    with pytest.raises(SystemExit) as exit_:
        cli.main(["study", str(study_file(text, head="")), "--into", str(tmp_path / "into")])
    assert exit_.value.code == 2
    complaints = capsys.readouterr().err
    assert MISTAKES[text] in complaints
    assert complaints.count("\n") == 1
    assert not (tmp_path / "into").exists()


def test_unknown_variant_is_refused(study_file):
    study = plan.read_study(study_file("[variants.grpo]"))
    with pytest.raises(UserError, match='no variant "gpo"; did you mean "grpo"'):
        study.list_runs(Path("runs/s"), ["gpo"])


@pytest.mark.parametrize("path", sorted(Path("recipes/study").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_studies_can_start(path):
    study = plan.read_study(path)
    recipes = plan.load_variant_configs(study)
    assert len(recipes) >= 6
    assert len(study.seeds) >= 3
    assert next(iter(recipes)) == "grpo"
    assert len({json.dumps(config.dump_config(recipe), sort_keys=True) for recipe in recipes.values()}) == len(
        recipes
    ), "no two alike"


def test_misspelled_section_is_refused(tmp_path):
    """Otherwise recipe.json would lose it, and the variant would equal the baseline."""
    path = tmp_path / "study.toml"
    base = Path("recipes/arithmetic.toml").resolve()
    path.write_text(f'base = "{base}"\nseeds = [0]\n[variants.grpo]\n[variants.dr.algoritm]\nadvantage = "centered"\n')
    with pytest.raises(UserError, match=r"variants\.dr: algoritm: no such key; did you mean .algorithm"):
        plan.load_variant_configs(plan.read_study(path))
