"""Every recipe on an accelerator: trained, evaluated, saved, resumed and served, with the numbers of the CPU.

The accelerator is the one of simulated_device.py; what needs a real one is in test_cuda.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from conftest import EOS, VOCAB, character_tokenizer, records
from pellucid import cli, compose
from pellucid.models import attention
from pellucid.samplers.native import Native
from pellucid.serve import command, host
from pellucid.serve.engine import Request
from simulated_device import WHERE, Device

RECIPES = sorted([*Path("recipes").glob("*.toml"), *Path("recipes/variants").glob("*.toml")])
SMALL = {
    "sampler.max_tokens": 6,
    "algorithm.steps": 3,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 3,
    "algorithm.minibatches": 2,
    "algorithm.micro_batch": 4,
    "evaluate.every": 2,
    "evaluate.n": 2,
    "evaluate.k": 2,
    "checkpoint.every": 2,
    "policy.dtype": "float32",
}
OWN = {
    "continuity": {"algorithm.prompts_per_step": 1, "algorithm.minibatches": 1},
    "expected": {"algorithm.prompts_per_step": 1, "algorithm.minibatches": 1},
    "study_bench": {"algorithm.similarity_layer": 1},
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """With room for every recipe's prompt, a character a token."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"Count on.\n#### {i + 1}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def one_way(monkeypatch):
    """The CPU takes the ways of an accelerator where it has one of its own; rewards stay in this process."""

    def attend(query, key, value, bias):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)

    monkeypatch.setattr(attention.FewProducts, "apply", attend)
    monkeypatch.setattr(compose, "isolated", lambda task: task)
    save = PreTrainedModel.save_pretrained

    def saved(model, folder, **settings):  # it asks where in memory a tensor lies
        save(model, folder, **settings, state_dict={name: x.cpu() for name, x in model.state_dict().items()})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)


def train(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *map(str, arguments)])
    return ended.value.code


def options(settings):
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def trained(recipe, run_dir, settings):
    """Three steps at once."""
    assert train(recipe, *options(settings), "--run", run_dir) == 0
    return run_dir


def resumed(recipe, run_dir, settings, monkeypatch):
    """Three steps, killed in the third and resumed after the second."""
    generate = Native.generate

    def dying(self, prompts, group_size, seed):
        if seed.split("/")[1] == "2":
            raise KeyboardInterrupt
        return generate(self, prompts, group_size, seed)

    with monkeypatch.context() as patched:
        patched.setattr(Native, "generate", dying)
        assert train(recipe, *options(settings), "--run", run_dir) == 130
    assert train("--resume", run_dir) == 0
    return run_dir


def served(run_dir, device):
    """What a service says of that run's model."""
    service = host.load(command.parsed([str(run_dir), "--dtype", "float32", "--device", device], model=True))
    told, engine = [], service.engine
    engine.submit(Request([1, 2, 3], told.append, n=2, max_tokens=8, seed=7))
    engine.waiting = list(engine._arrivals())
    engine._board()
    while engine.flying:
        engine._advance()
    return told


def numbers(run_dir):
    logs = {name: records(run_dir / name) for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl")}
    timeless = {
        name: [{key: x for key, x in row.items() if not key.startswith(("time/", "memory/"))} for row in rows]
        for name, rows in logs.items()
    }
    weights = load_file(run_dir / "model" / "model.safetensors")
    return timeless | {"weights": {name: x.tolist() for name, x in weights.items()}}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_on_an_accelerator_has_the_numbers_of_the_cpu(
    recipe, small_model, questions, tmp_path, monkeypatch, one_way
):
    settings = {"policy.model": small_model} | SMALL | OWN.get(recipe.stem, {})
    if recipe.stem in ("gsm8k", "gsm8k_dataset", "study_bench"):
        settings |= {"task.data": questions, "task.test_data": ""}
    here = trained(recipe, tmp_path / "here", settings | {"policy.device": "cpu"})
    said_here = served(here, "cpu")
    with Device():
        there = resumed(
            recipe, tmp_path / "there", settings | {"policy.device": WHERE}, monkeypatch
        )
        said_there = served(there, WHERE)
    for name, values in numbers(here).items():
        assert numbers(there)[name] == values, name
    assert said_there == said_here
