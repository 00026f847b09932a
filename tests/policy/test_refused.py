"""Tests that models other than causal language models are refused in one line, from the configuration if possible."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid import cli
from pellucid.policy import load, policy
from pellucid.types import UserError
from tiny_families import checkpoint, model_of

BY_CONFIGURATION = {
    "t5": "t5 has an encoder and a decoder",
    "clip_text": "transformers has none for clip_text_model",
    "llama, a reward model": "it was saved as LlamaForSequenceClassification, which has another head",
}


def changed(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("name", BY_CONFIGURATION)
def test_model_is_refused_from_its_configuration_alone(name, tmp_path, monkeypatch):
    checkpoint(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not a causal language model") as refused:
        load.load_pretrained(str(tmp_path), torch.float32)
    assert BY_CONFIGURATION[name] in str(refused.value)


def test_model_without_head_weights_is_refused(tmp_path):
    checkpoint("llama, without its head", tmp_path)
    with pytest.raises(UserError, match=r"has no weights for lm_head.weight, which LlamaForCausalLM needs"):
        load.load_pretrained(str(tmp_path), torch.float32)


def test_tied_head_needs_no_weights_of_its_own(tmp_path):
    checkpoint("gpt2", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load.load_pretrained(str(tmp_path), torch.float32)


def test_model_that_attends_to_later_tokens_is_refused(tmp_path):
    with pytest.raises(UserError, match="BertLMHeadModel attends to later tokens"):
        policy.check_lm_head(model_of("bert"))


def test_model_that_cannot_be_scored_is_refused_in_one_line():
    model = model_of("gpt2")
    model.set_output_embeddings(torch.nn.Linear(5, 5))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel cannot be scored here \(RuntimeError: .*\): not supported"):
        policy.check_lm_head(model)


MISFITS = {
    "sizes": ({"hidden_size": 64}, "cannot be loaded"),
    "no number": ({"hidden_size": "many"}, "cannot be loaded"),
    "an architecture of tomorrow": ({"model_type": "tomorrow"}, "cannot be loaded"),
    "weights that need a library": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "cannot be loaded"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_inconsistent_checkpoint_exits_with_one_line(name, tmp_path, capsys):
    settings, said = MISFITS[name]
    checkpoint("llama", tmp_path / "model")
    changed(tmp_path / "model", **settings)
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{tmp_path}/model"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(recipe), "--run", str(tmp_path / "run")])
    assert ended.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pellucid: ")]
    assert said in line
    assert not (tmp_path / "run").exists()


def test_checkpoint_with_missing_weights_is_refused(tmp_path):
    checkpoint("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "layers.1" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has no weights for model.layers.1.* and \d+ more"):
        load.load_pretrained(str(tmp_path), torch.float32)
