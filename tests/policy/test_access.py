"""Tests of Hub revisions, from a cache laid out by hand, and of checkpoints with custom code; no network."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import pellucid
from conftest import character_tokenizer, tiny_llama
from pellucid.config import PolicyConfig
from pellucid.policy import load, policy
from pellucid.policy.access import ModelAccess
from pellucid.serve import api, command
from pellucid.training import memory
from pellucid.types import UserError
from runs import answered, train, weights

NAME = "some/tiny"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
FEW = ["--algorithm.steps", 1, "--evaluate.every", 0, "--checkpoint.every", 1]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return the cache folder of a model whose two revisions have different weights; the Hub is offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "models--some--tiny"
    (folder / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(COMMITS.items()):
        torch.manual_seed(seed)
        tiny_llama().save_pretrained(folder / "snapshots" / commit)
        character_tokenizer().save_pretrained(folder / "snapshots" / commit)
        (folder / "refs" / revision).write_text(commit)
    return folder


def weights_of(hub, revision):
    return AutoModelForCausalLM.from_pretrained(hub / "snapshots" / COMMITS[revision]).state_dict()


def same(one, two):
    return all(torch.equal(x, two[name]) for name, x in one.items())


# ---------------------------------------------------------------- revisions


@pytest.mark.parametrize(
    ("asked", "revision"),
    [("", "main"), ("main", "main"), ("v1", "v1"), (COMMITS["v1"], "v1"), (COMMITS["main"], "main")],
)
def test_revision_can_be_a_branch_tag_or_commit(hub, asked, revision):
    model, _ = load.load_pretrained(NAME, torch.float32, access=ModelAccess(asked))
    assert same(weights_of(hub, revision), model.state_dict())
    assert load.resolve_commit(NAME, ModelAccess(asked)) == COMMITS[revision]


def test_config_and_tokenizer_come_from_the_same_revision(hub):
    snapshot = hub / "snapshots" / COMMITS["v1"]
    character_tokenizer("ab").save_pretrained(snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert len(load.load_tokenizer(NAME, ModelAccess("v1"))) == 3 < len(load.load_tokenizer(NAME))
    assert (
        memory.describe_model(PolicyConfig(NAME, revision="v1")).parameter_count
        < memory.describe_model(PolicyConfig(NAME)).parameter_count
    )
    model, words = load.load_pretrained(NAME, torch.float32, access=ModelAccess("v1"))
    assert (model.config.num_hidden_layers, len(words)) == (1, 3)


@pytest.mark.slow
def test_resume_uses_the_recorded_commit_after_the_branch_moves(hub, recipe, tmp_path):
    """Otherwise the base of the adapter would change between two steps."""
    settings = ["--policy.model", NAME, "--policy.lora", 2, *FEW, "--optimizer.schedule", "constant"]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["policy"]["revision"] == COMMITS["main"]
    assert train(recipe, "--run", tmp_path / "long", *settings, "--algorithm.steps", 2) == 0
    (hub / "refs" / "main").write_text(COMMITS["v1"])
    assert train("--resume", tmp_path / "run", "--algorithm.steps", 2) == 0
    assert same(weights(tmp_path / "long"), weights(tmp_path / "run"))


@pytest.mark.slow
def test_resume_accepts_only_names_of_the_recorded_commit(hub, recipe, tmp_path, capsys):
    settings = ["--policy.model", NAME, "--policy.revision", "v1", *FEW]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    again = ["--resume", tmp_path / "run", "--algorithm.steps", 2]
    assert train(*again, "--policy.revision", "main") == 2
    assert f"policy.revision = {COMMITS['v1']}, now {COMMITS['main']}" in capsys.readouterr().err
    assert train(*again, "--policy.revision", "v1") == 0


def test_reference_model_uses_the_same_revision(hub, recipe, tmp_path):
    """The KL between policy and reference is 0 before the first step."""
    settings = ["--policy.model", NAME, "--policy.revision", "v1", "--algorithm.kl-coef", 0.1]
    once = ["--algorithm.epochs", 1, "--algorithm.minibatches", 1]
    assert train(recipe, "--run", tmp_path / "run", *settings, *once, *FEW) == 0
    [step] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_eval_loads_revisions_and_refuses_unknown_ones(hub, recipe, tmp_path, capsys):
    settings = ["--policy.model", NAME, "--policy.revision", "v1", *FEW]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    assert answered("eval", tmp_path / "run", "--show", 1) == 0
    assert answered("eval", NAME, "--task", recipe, "--policy.revision", "v1", "--show", 1) == 0
    assert answered("eval", NAME, "--task", recipe, "--policy.revision", "v7") == 2
    assert f"policy.model = '{NAME}', revision 'v7', cannot be loaded" in capsys.readouterr().err


@pytest.mark.slow
def test_recipe_revision_applies_only_to_its_own_model(hub, recipe, model_dir, capsys):
    text = recipe.read_text()
    other = hub.parent / "models--some--other"
    shutil.copytree(hub, other)
    shutil.rmtree(other / "snapshots" / COMMITS["v1"])
    (other / "refs" / "v1").unlink()
    recipe.write_text(text.replace(str(model_dir), NAME).replace("[policy]", '[policy]\nrevision = "v1"'))
    assert answered("eval", "some/other", "--task", recipe, "--show", 1) == 0
    assert answered("eval", "some/other", "--task", recipe, "--policy.revision", "v1") == 2
    assert "policy.model = 'some/other', revision 'v1', cannot be loaded" in capsys.readouterr().err
    shutil.rmtree(hub / "snapshots" / COMMITS["main"])
    assert answered("eval", NAME, "--task", recipe, "--show", 1) == 0


@pytest.mark.parametrize("kind", ["folder", "gguf", "embedded"])
def test_revision_of_a_local_model_is_refused(kind, model_dir, tmp_path, recipe, capsys, monkeypatch):
    monkeypatch.setattr(load, "_unpack_gguf_file", lambda _: Path(model_dir))
    monkeypatch.setattr(load, "_unpack_packaged_model", lambda _: Path(model_dir))
    (tmp_path / "m.gguf").write_bytes(b"")
    name = {"folder": str(model_dir), "gguf": str(tmp_path / "m.gguf"), "embedded": "smollm2-135m"}[kind]
    assert train(recipe, "--run", tmp_path / "run", "--policy.model", name, "--policy.revision", "v1") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"pellucid: policy.revision = 'v1' is for models of a hub, and {name} is not one: omit it"


# ---------------------------------------------------------------- custom code

CONFIGURATION = """
from pathlib import Path

from transformers import LlamaConfig

Path({ran!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = {kind!r}
"""
MODEL = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(params=["own", "llama"])
def own(request, tmp_path, model_dir, monkeypatch):
    """Return a checkpoint folder that contains its own code, under a new or a known model type."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in [module for module in sys.modules if module.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, module)  # left by another test
    folder, ran = Path(shutil.copytree(model_dir, tmp_path / f"own_{request.param}")), tmp_path / "ran"
    (folder / "configuration_own.py").write_text(CONFIGURATION.format(ran=str(ran), kind=request.param))
    (folder / "modeling_own.py").write_text(MODEL)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    own = {"model_type": request.param, "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config | own))
    return folder


def ran(own):
    return (own.parent / "ran").exists()


@pytest.mark.slow
def test_untrusted_code_never_runs(own, recipe, tmp_path, capsys):
    """A new model type exits with one line and no prompt; a known one uses the class in transformers."""
    status = train(recipe, "--run", tmp_path / "run", "--policy.model", own, *FEW)
    assert not ran(own)
    if own.name == "own_llama":
        assert status == 0
        return
    assert status == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"pellucid: policy.model = '{own}' needs the Python code in its own folder, which would run with all"
        " your permissions: read it, then set policy.trust_remote_code"
    )
    for arguments in (["eval", own, "--task", recipe], ["doctor", "--plan", recipe, "--policy.model", own]):
        assert answered(*arguments) == 2
        assert "would run with all your permissions" in capsys.readouterr().err
    assert not ran(own)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_trusted_code_is_announced_trained_and_saved_with_the_model(own, recipe, tmp_path, capsys, lora):
    settings = ["--policy.model", own, "--policy.trust-remote-code", "--policy.lora", lora, *FEW]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"! policy.trust_remote_code: Python code of {own} runs with your permissions\n")
    assert "transformers (custom code)" in " ".join(printed.split())
    assert ran(own)
    shutil.rmtree(own)
    assert (tmp_path / "run" / "model" / "modeling_own.py").is_file()
    assert answered("eval", tmp_path / "run", "--show", 1) == 0
    assert (
        f"! policy.trust_remote_code: Python code of {tmp_path}/run/model runs with your permissions"
        in capsys.readouterr().out
    )
    with (
        pytest.raises(UserError, match="would run with all your permissions")
        if own.name == "own_own"
        else torch.no_grad()
    ):
        policy.load_frozen_policy(str(tmp_path / "run" / "model"), torch.device("cpu"), torch.float32, 1.0)


def trusting(recipe, model_dir, model, name):
    """Write a copy of the recipe that uses this model and trusts its code; return its path."""
    text = (
        recipe.read_text().replace(str(model_dir), str(model)).replace("[policy]", "[policy]\ntrust_remote_code = true")
    )
    (recipe.parent / name).write_text(text)
    return recipe.parent / name


@pytest.mark.slow
def test_recipe_trust_applies_only_to_its_own_model(own, recipe, model_dir, capsys):
    """Another model is trusted only if the command line says so."""
    other, itself = trusting(recipe, model_dir, model_dir, "a.toml"), trusting(recipe, model_dir, own, "b.toml")
    status = 2 if own.name == "own_own" else 0
    assert answered("eval", own, "--task", other, "--show", 1) == status
    assert answered("eval", own, "--task", itself, "--policy.no-trust-remote-code", "--show", 1) == status
    assert not ran(own) and "runs with your permissions" not in capsys.readouterr().out
    assert answered("eval", own, "--task", other, "--policy.trust-remote-code", "--show", 1) == 0
    assert ran(own)
    (own.parent / "ran").unlink()
    capsys.readouterr()
    assert answered("eval", own, "--task", itself, "--show", 1) == 0
    assert f"! policy.trust_remote_code: Python code of {own} runs with your permissions" in capsys.readouterr().out


@pytest.mark.slow
def test_recorded_trust_of_a_run_overrides_the_recipe(own, recipe, model_dir, tmp_path, capsys):
    settings = ["--policy.model", own, "--policy.trust-remote-code", *FEW]
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    assert answered("eval", tmp_path / "run", "--task", recipe, "--show", 1) == 0
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    record["policy"]["trust_remote_code"] = False
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    capsys.readouterr()
    other = trusting(recipe, model_dir, model_dir, "a.toml")
    assert answered("eval", tmp_path / "run", "--task", other, "--show", 1) == (2 if own.name == "own_own" else 0)
    assert "runs with your permissions" not in capsys.readouterr().out


def test_save_config_also_saves_the_custom_code(own, tmp_path):
    """Processes that shard the weights save a model this way."""
    trusted = policy.load_frozen_policy(str(own), torch.device("cpu"), torch.float32, 1.0, access=ModelAccess("", True))
    (tmp_path / "saved").mkdir()
    trusted.save_config(tmp_path / "saved")
    assert memory.describe_model(PolicyConfig(str(tmp_path / "saved"), trust_remote_code=True)).parameter_count > 0


def test_trusted_code_is_served(own, capsys):
    if own.name == "own_own":
        with pytest.raises(
            UserError, match=r"would run with all your permissions: read it, then give --trust-remote-code$"
        ):
            api.load_served_model(command.ServeCommand((str(own),)))
    served = api.load_served_model(command.ServeCommand((str(own),), trust_remote_code=True))
    assert served.policy.find_fallback_reason() == "custom code"
    assert capsys.readouterr().out == f"! policy.trust_remote_code: Python code of {own} runs with your permissions\n"


def test_run_with_unavailable_rewards_is_served_with_its_trusted_code(own, tmp_path, capsys):
    def nothing(completions, **columns):
        return [0.0] * len(completions)

    rows = [{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(9)]
    few = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "max_tokens": 8, "evaluate_every": 0}
    trusted = {"model": own, "trust_remote_code": True, "dtype": "float32", "run": tmp_path / "run"}
    pellucid.train(data=rows, reward=nothing, **trusted, **few).finish()
    capsys.readouterr()
    served = api.load_served_model(command.ServeCommand((str(tmp_path / "run"),)))
    assert served.task is None and served.policy.find_fallback_reason() == "custom code"
    assert (
        f"! policy.trust_remote_code: Python code of {tmp_path}/run runs with your permissions"
        in capsys.readouterr().out
    )


def test_doctor_plan_announces_trusted_code(own, recipe, capsys):
    assert answered("doctor", "--plan", recipe, "--policy.model", own, "--policy.trust-remote-code") == 0
    assert "\n! policy.trust_remote_code: Python code of" in capsys.readouterr().out


def test_trust_in_the_policy_does_not_extend_to_another_student(own, recipe, tmp_path, capsys):
    """Both commands exit with 2, since the questions are too long; this is noticed after the model is loaded."""
    command = ["prefixes", recipe, "--student", own, "--output", tmp_path / "p.json", "--n", 2]
    assert answered(*command, "--policy.trust-remote-code") == 2
    assert not ran(own)
    assert answered(*command, "--policy.model", own, "--policy.trust-remote-code") == 2
    assert f"! policy.trust_remote_code: Python code of {own} runs with your permissions" in capsys.readouterr().out
    assert ran(own)
