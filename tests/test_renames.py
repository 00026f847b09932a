"""Names that settings used to have: they are read as the new ones, and whoever wrote them is told."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re

import pytest

from pellucid import cli, config
from pellucid.flags import fields_of
from pellucid.renames import KEYS, TRL, VALUES, of_trl

OLD = '[algorithm]\nobjective = "dynamic"\nmin_spread = 0.25\n'


def test_an_old_recipe_has_the_settings_of_the_new_one_and_is_told_their_names(tmp_path, capsys):
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(OLD)
    new.write_text('[algorithm]\nobjective = "dcpo"\nmin_reward_range = 0.25\n')
    assert config.dump(config.load(old)) == config.dump(config.load(new))
    assert capsys.readouterr().err.splitlines() == [
        f'{old}: algorithm.objective = "dynamic" is now called objective = "dcpo"',
        f'{old}: algorithm.min_spread = "0.25" is now called min_reward_range = "0.25"',
    ]


def test_an_old_run_is_read_without_a_word(tmp_path, capsys):
    settings = config.dump(config.load(None))
    settings["algorithm"] |= {"objective": "naive", "min_spread": settings["algorithm"].pop("min_reward_range")}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert config.load(tmp_path / "config.json").algorithm.objective == "reinforce"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "flags",
    [
        ["--algorithm.objective", "unclipped", "--algorithm.min-spread", "0.5"],
        ["--algorithm.objective=unclipped", "--algorithm.min_spread=0.5"],
    ],
)
def test_old_flags_are_the_new_ones(flags, capsys):
    algorithm = config.load(None, [*flags, "--algorithm.kl", "k2"]).algorithm
    assert (algorithm.objective, algorithm.min_reward_range, algorithm.kl) == ("importance_weighted", 0.5, "k2")
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_value_that_is_spelt_like_an_old_name_elsewhere_stays(capsys):
    assert config.load(None, ["--policy.model", "clipped", "--log.project=naive"]).policy.model == "clipped"
    assert capsys.readouterr().err == ""


def test_every_new_name_is_a_setting():
    known = config.dump(config.load(None))
    assert all(new in known[section] and old not in known[section] for (section, old), new in KEYS.items())
    for (section, key), names in VALUES.items():
        for old, new in names.items():
            assert config.load(None, [f"--{section}.{key}", new])
            assert old not in names.values()


def test_names_of_trl_are_trl_s_and_what_they_are_here_is_a_setting():
    trl = pytest.importorskip("trl")
    theirs = {field.name for cls in (trl.GRPOConfig, trl.ModelConfig) for field in dataclasses.fields(cls)}
    theirs |= set(inspect.signature(trl.GRPOTrainer.__init__).parameters) | {
        "resume_from_checkpoint",
        "max_prompt_length",
    }
    assert set(TRL) <= theirs
    sections = {name: list(fields_of(cls)) for name, cls in config.SECTIONS.items()}
    ours = {"data", "test_data", "reward", "run", "resume"} | {key for keys in sections.values() for key in keys}
    ours |= {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    for here in TRL.values():
        if not here.startswith(("nothing: ", "each setting", "a weight")):
            named = re.split(r", which|, a |, in |, groups| = ", here)[0]
            assert set(re.split(", | and | or ", named)) <= ours, here


def test_a_name_of_trl_is_told_ours(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--num-generations", "4"])
    said = "train has no option --num-generations; TRL's num_generations is group_size here (docs/library.md)"
    assert said in capsys.readouterr().err
    assert of_trl("group_size") == ""
