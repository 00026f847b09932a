"""Test names of TRL's settings: each is a setting here, or the error says what replaces it or why nothing does."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import tomllib
from pathlib import Path

import pytest

from pellucid import cli, config, trl_hints
from pellucid.api import group_settings_by_section
from pellucid.config import get_field_types
from pellucid.tasks.dataset import Dataset
from pellucid.tasks.environment import Environment
from pellucid.trl_hints import explain_trl_name
from pellucid.types import UserError


def names_of_trl():
    """Return every field of TRL's GRPOConfig and every argument of its GRPOTrainer."""
    trl = pytest.importorskip("trl")
    fields = [field.name for field in dataclasses.fields(trl.GRPOConfig)]
    arguments = list(inspect.signature(trl.GRPOTrainer.__init__).parameters)[1:]
    return [*fields, *arguments, "warmup_ratio", "max_prompt_length"]


def refused(act, *arguments):
    """Return the error message for the arguments, or "" if they are accepted."""
    try:
        act(*arguments)
    except (UserError, ValueError) as error:
        return str(error)
    return ""


def places(name):
    """Return the sections in which our settings have this name."""
    return [section for section, cls in config.SECTIONS.items() if name in get_field_types(cls)]


def test_every_trl_name_is_a_setting_or_explained():
    """Names are tried as a keyword, as an option, on the command line and in a recipe."""
    names = names_of_trl()
    assert len(names) > 200
    for name in names:
        explained = f"TRL's {name} is ", f"TRL's {name} has no counterpart, as "
        assert place_told(name) or any(
            words in refused(group_settings_by_section, {name: 1}, Dataset) for words in explained
        ), name
        option = refused(cli.parse_command_line, ["train", f"--{name}", "1"])
        assert any(words in option for words in (*explained, f".{name}", f"did you mean --{name}")) or name == "resume"
        for section in ("algorithm", "sampler", "evaluate"):
            if section not in places(name):
                for said in (
                    refused(config.load_config, None, [f"--{section}.{name}", "1"]),
                    refused(config.build_config, {section: {name: 1}}, "recipe.toml"),
                ):
                    assert any(words in said for words in explained), (name, said)
                    assert "\n" not in said


def place_told(name):
    """Return whether a name is a keyword, or one of several settings that the message names."""
    said = refused(group_settings_by_section, {name: 1}, Dataset)
    return name in ("model",) or not said or f"{name} is a setting of " in said


def test_hints_name_existing_settings_and_reasons_have_an_alternative():
    known = {f"{section}.{key}" for section, cls in config.SECTIONS.items() for key in get_field_types(cls)}
    known |= {f"task.{key}" for cls in (Dataset, Environment) for key in get_field_types(cls)} | {"run", "resume"}
    tables = tomllib.loads(Path(trl_hints.__file__).with_suffix(".toml").read_text())
    for text in [*tables["counterparts"].values(), *tables["without_counterpart"]]:
        assert set(re.findall(r"\{(.*?)\}", text)) <= known, text
    assert all(re.fullmatch(".+: .+", text) for text in tables["without_counterpart"])
    names = [*tables["counterparts"], *itertools.chain(*tables["without_counterpart"].values())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "num_train_epochs": "data_epochs, from which steps follows; epochs are passes over the rollouts of one step",
        "per_device_train_batch_size": "prompts_per_step = per_device_train_batch_size * gradient_accumulation_steps *"
        " devices / num_generations; micro_batch bounds memory",
        "use_vllm": 'sampler_name "vllm"',
        "eval_strategy": 'evaluate_every: 0 for "no"',
        "disable_dropout": "dropout is always off",
        "callbacks": "no hooks are called: a loop over `pellucid.train` has each step",
        "tools": 'task "environment" with tools',
        "environment_factory": 'task "environment" with environment "file.py:Class"',
        "optim": "the optimizer is AdamW on fp32 weights",
        "warmup_ratio": "warmup = warmup_ratio * steps * epochs * minibatches, since it counts optimizer steps",
        "eval_steps": "eval_steps is evaluate_every * epochs * minibatches",
        "save_steps": "save_steps is checkpoint_every * epochs * minibatches",
        "loss_type": '"constant" for "dr_grpo" (in TRL, too, scale_rewards is separate: advantage)',
        "scale_rewards": '"centered" for "none" or False',
        "eval_dataset": "test_data: files, a split of the Hub data set or, in Python, rows",
        "reward_funcs": "TRL's reward_funcs is here reward",
    }.items(),
)
def test_keyword_errors_explain_trl_names(name, said):
    assert said in refused(group_settings_by_section, {name: 1}, None)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("advantage", False, "or 'gdpo' (got False); scale_rewards=False of TRL is advantage = \"centered\""),
        ("aggregate", "dr_grpo", 'loss_type="dr_grpo" of TRL is aggregate = "constant"'),
        ("aggregate", "tokne", "'sequence' or 'constant' (got 'tokne')"),
    ],
)
def test_error_for_a_trl_value_names_our_value(setting, value, said):
    told = refused(config.build_config, {"algorithm": {setting: value}}, "here")
    assert told.endswith(said) or f"{said}, and" in told
    assert told.startswith(f"here: algorithm.{setting}: Input should be '")
    assert told.count("'sequence'") == (setting == "aggregate")


@pytest.mark.parametrize(
    ("batch", "added_up", "generations", "each"), [(8, 3, 4, None), (8, 3, 4, 6), (16, 1, 8, None)]
)
def test_formulas_count_as_trl_does(batch, added_up, generations, each, tmp_path):
    trl = pytest.importorskip("trl")
    theirs = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=added_up,
        num_generations=generations, steps_per_generation=each, use_cpu=True, bf16=False,
        gradient_checkpointing=None, activation_checkpointing=False,
    )  # fmt: skip
    minibatches = theirs.steps_per_generation / added_up
    prompts_per_step = batch * added_up * 1 / generations * minibatches
    assert prompts_per_step == theirs.generation_batch_size / generations


def test_error_for_a_trl_name_names_our_option(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--num-generations", "4"])
    said = (
        "train has no option --num-generations; TRL's num_generations is here --algorithm.group-size"
        " (docs/how-to/from-trl.md)"
    )
    assert said in capsys.readouterr().err
    assert explain_trl_name("group_size") == ""


def test_all_unknown_names_are_reported_at_once(tmp_path):
    said = refused(group_settings_by_section, {"stpes": 3, "lr": 1.0, "num_generations": 4, "bateau": 1}, None)
    assert said == (
        "pellucid.train has no setting stpes; did you mean steps? pellucid.train has no setting num_generations; TRL's"
        " num_generations is here group_size (docs/how-to/from-trl.md). pellucid.train has no setting bateau;"
        " docs/reference/python.md says how settings are named"
    )
    said = refused(cli.parse_command_line, ["train", "--rnu", "a", "--reusme", "b"])
    assert (
        said
        == 'train has no option --rnu; did you mean "--run"? train has no option --reusme; did you mean "--resume"?'
    )
    recipe = tmp_path / "r.toml"
    recipe.write_text("[algorithm]\nstpes = 3\nsteps = 0\ngroup_sise = 4\n[optimiser]\nlr = 1.0\n[task]\ndigit = 2\n")
    said = refused(config.load_config, recipe, ["--evaluate.evry", "2"])
    for name in ("algorithm.stpes", "algorithm.group_sise", "optimiser", "task.digit"):
        assert f"{recipe}: {name}: no such key; did you mean" in said
    assert 'the command line: evaluate.evry: no such key; did you mean "every"?' in said
    assert "\n" not in said
    assert "must be" not in said, "of known keys it is told when all names are right"
