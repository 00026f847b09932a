"""What is no causal language model is refused in one line, where its configuration shows it before weights are read."""

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
def test_a_configuration_is_enough_to_be_refused(name, tmp_path, monkeypatch):
    checkpoint(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not a causal language model") as refused:
        load.load_pretrained(str(tmp_path), torch.float32)
    assert BY_CONFIGURATION[name] in str(refused.value)


def test_a_body_without_its_head_is_not_given_a_random_one(tmp_path):
    checkpoint("llama, without its head", tmp_path)
    with pytest.raises(UserError, match=r"has no weights for lm_head.weight, which LlamaForCausalLM needs"):
        load.load_pretrained(str(tmp_path), torch.float32)


def test_a_head_that_is_the_embedding_is_not_missed(tmp_path):
    checkpoint("gpt2", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load.load_pretrained(str(tmp_path), torch.float32)


def test_a_model_that_reads_what_is_to_come_is_none(tmp_path):
    with pytest.raises(UserError, match="BertLMHeadModel attends to later tokens"):
        policy.check_lm_head(model_of("bert"))


def test_a_model_that_cannot_be_scored_is_said_in_one_line():
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
def test_a_folder_that_does_not_fit_together_is_one_line(name, tmp_path, capsys):
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


def test_weights_that_are_damaged_are_one_line(tmp_path):
    checkpoint("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "layers.1" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has no weights for model.layers.1.* and \d+ more"):
        load.load_pretrained(str(tmp_path), torch.float32)
