"""Tests that `pellucid train --dry-run` refuses the settings that a run refuses before it loads the model."""

from __future__ import annotations

import math
import tomllib

import pytest

from pellucid import cli, config
from pellucid.policy import load
from pellucid.training.build import check_settings
from pellucid.types import UserError

CONTRADICTIONS = {
    "sampler.ahead = 1 needs": ["--sampler.ahead", "1"],
    'policy.dtype = "float16" needs runtime.engine': ["--runtime.engine", "fsdp2", "--policy.dtype", "float16"],
    'sampler.name = "vllm" in the training processes needs': ["--sampler.name", "vllm", "--runtime.engine", "fsdp2"],
    "its base, which never changes": [
        *("--policy.lora", "2", "--algorithm.kl_coef", "0.1"),
        *("--algorithm.kl_in", "loss", "--algorithm.reference_every", "1"),
    ],
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
@pytest.mark.parametrize("dry", [True, False], ids=["dry", "run"])
def test_contradictory_settings_are_refused_before_a_model_is_loaded(
    message, dry, recipe, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(load, "load_pretrained", None)
    arguments = ["train", str(recipe), "--run", str(tmp_path / "run"), *CONTRADICTIONS[message]]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--dry-run"] if dry else arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_prompts_must_divide_evenly_among_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"prompts_per_step = 4 must be a multiple of processes \* minibatches = 6"):
        check_settings(config.load_config(None, ["--algorithm.prompts-per-step", "4", "--algorithm.minibatches", "2"]))


def test_format_toml_writes_valid_infinities_and_nan():
    """A custom task may have them as defaults."""
    values = {"task": {"high": math.inf, "lows": [-math.inf], "unknown": math.nan}}
    read = tomllib.loads(config.format_toml(values))["task"]
    assert (read["high"], read["lows"]) == (math.inf, [-math.inf])
    assert math.isnan(read["unknown"])
