"""Test models that are read shard by shard: each process reads only its slice and gets the weights of a full load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))

from test_packaged import SIZES, TOKENS, write_gguf

from conftest import EOS, VOCAB, character_tokenizer, kernel_qwen, tiny_gpt2, tiny_llama
from pellucid.policy import load
from pellucid.types import UserError
from runs import in_processes

LOADS = Path(__file__).with_name("loads.py")


def untied_llama():
    """Return a model whose sizes are not divisible by the number of processes."""
    sizes = {"hidden_size": 36, "intermediate_size": 53, "num_attention_heads": 6, "num_key_value_heads": 3}
    ids = {"eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS}
    config = LlamaConfig(vocab_size=VOCAB + 1, num_hidden_layers=2, tie_word_embeddings=False, **sizes, **ids)
    return LlamaForCausalLM(config)


def saved(folder, model, dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = model().to(dtype)
    model.save_pretrained(folder, **options)
    character_tokenizer(size=model.config.vocab_size).save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return models in all kinds of files."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(1)
    gguf = tmp_path / "m.gguf"
    matrix = torch.randn(len(TOKENS), SIZES["hidden_size"])
    write_gguf(gguf, matrix, torch.randn_like(matrix))
    several = saved(tmp_path / "several", untied_llama, max_shard_size="20KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    return {
        "tied": saved(tmp_path / "tied", tiny_llama),
        "several files": several,
        "qwen in bf16": saved(tmp_path / "qwen", kernel_qwen, torch.bfloat16),
        "gguf": gguf,
    }


def every_case(folders):
    cases = [f"{case}={folders[kind]}" for kind in ("tied", "several files") for case in ("fp32", "bf16", "lora")]
    cases += [f"{case}={folders['gguf']}" for case in ("fp32", "lora")]
    return [*cases, f"bf16={folders['qwen in bf16']}", f"lora, bf16={folders['qwen in bf16']}"]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "processes"), [("fsdp2", 2), ("fsdp2", 3), ("fsdp2/2", 4)])
def test_shards_are_slices_of_the_fully_loaded_model(engine, processes, folders):
    """Shards are compared exactly, whether equal, unequal or replicated. Parameters after three steps are compared,
    too.
    """
    cases = every_case(folders) if processes == 2 else [f"fp32={folders['several files']}", f"lora={folders['tied']}"]
    done = in_processes(processes, LOADS, engine, *cases)
    assert done.stdout.count("loaded") == processes


@pytest.mark.deepspeed
@pytest.mark.usefixtures("deepspeed_on_cpus")
@pytest.mark.parametrize("processes", [2, 3])
def test_zero_3_partitions_are_slices_of_the_fully_loaded_model(processes, folders):
    cases = every_case(folders) if processes == 2 else [f"bf16={folders['several files']}", f"lora={folders['tied']}"]
    done = in_processes(processes, LOADS, "deepspeed/3", *cases)
    assert done.stdout.count("loaded") == processes


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("kind", ["tied", "several files", "qwen in bf16"])
def test_placeholders_take_no_memory_and_match_the_model_otherwise(kind, folders):
    """The generation config, the config and the rows that are read are those of the fully loaded model."""
    folder = folders[kind]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], "temperature": 0.7}))
    expected, _ = load.load_pretrained(str(folder), torch.float32)
    model, _, stored = load.load_placeholders(str(folder), torch.float32)
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {4}
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.generation_config.eos_token_id == [3, 5]
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.training == expected.training is False
    for (name, found), (_, buffer) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(found, buffer), name
    for name, p in expected.named_parameters():
        for start, rows in ((0, len(p)), (1, 3), (len(p) - 1, 1), (len(p), 0)):
            out = torch.full((rows, *p.shape[1:]), torch.nan)
            stored.read_rows(name, start, out)
            assert torch.equal(out, p[start : start + rows]), (name, start)
        flat, count = p.flatten(), p.numel()
        for start, elements in ((0, count), (5, 7), (count - 3, 5), (count + 2, 4)):
            out = torch.full((elements,), torch.nan)
            stored.read_elements(name, start, out)
            part = flat[start : start + elements]
            assert torch.equal(out, torch.cat([part, part.new_zeros(elements - len(part))])), (name, start)


def with_bin_file(folder):
    [file] = folder.glob("*.safetensors")
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def with_two_heads(folder):
    """Add an output matrix to a checkpoint whose config says that embeddings are tied."""
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("model", "change", "options", "reason"),
    [
        (tiny_llama, lambda _: None, {"engine": "transformers"}, "transformers computes it (policy.engine)"),
        (tiny_gpt2, lambda _: None, {}, "transformers computes it (architecture gpt2)"),
        (tiny_llama, lambda _: None, {"lora_targets": ["embed"]}, "(other layers with an adapter)"),
        (tiny_llama, with_bin_file, {}, "its parameters are not tensors of safetensors files"),
        (tiny_llama, with_two_heads, {}, "its parameters are not tensors of safetensors files"),
    ],
)
def test_model_that_cannot_be_read_by_shards_is_loaded_fully_with_a_reason(model, change, options, reason, tmp_path):
    change(saved(tmp_path, model))
    expected, _ = load.load_pretrained(str(tmp_path), torch.float32)
    found, _, stored = load.load_placeholders(str(tmp_path), torch.float32, **options)
    assert not stored
    assert reason in stored.reason
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def without_a_layer(folder):
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, file, {"format": "pt"})


def cut(folder):
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])


def without_a_file(folder):
    max(folder.glob("*.safetensors")).unlink()


def with_a_wrong_shape(folder):
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize("change", [without_a_layer, cut, with_a_wrong_shape])
def test_damaged_files_give_the_same_error_as_a_full_load(change, tmp_path, monkeypatch):
    """The model is not loaded a second time."""
    change(saved(tmp_path, tiny_llama))
    with pytest.raises(UserError) as whole:
        load.load_pretrained(str(tmp_path), torch.float32)
    monkeypatch.setattr(load, "AutoModelForCausalLM", None)
    with pytest.raises(UserError) as by_shards:
        load.load_placeholders(str(tmp_path), torch.float32)
    assert str(by_shards.value) == str(whole.value)


# ---------------------------------------------------------------- files that one process cannot read


APART = """
import os
from pathlib import Path
from pellucid import cli
from pellucid.policy import policy

os.chdir(Path(__file__).parent / os.environ["RANK"])
found = policy.load_policy


def load_policy(*arguments, **options):
    loaded = found(*arguments, **options)
    if {late} and os.environ["RANK"] == "1":
        max(Path("model").glob("*.safetensors")).unlink()
    return loaded


policy.load_policy = load_policy
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", [cut, without_a_file, None], ids=["cut", "missing", "removed meanwhile"])
def test_file_that_one_process_cannot_read_ends_all_with_one_line(change, recipe, model_dir, tmp_path):
    for rank in ("0", "1"):
        saved(tmp_path / rank / "model", untied_llama, max_shard_size="20KB")
    if change:
        change(tmp_path / "1" / "model")
    (tmp_path / "apart.py").write_text(APART.format(late=change is None))
    recipe.write_text(recipe.read_text().replace(str(model_dir), "./model"))
    settings = ["--run", tmp_path / "run", "--runtime.engine", "fsdp2", "--evaluate.every", 0]
    done = in_processes(2, tmp_path / "apart.py", "train", recipe, *settings, fails=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("pellucid:")]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert "policy.model = './model' cannot be loaded" in lines[0]


CONVERTED = """
import os
from pathlib import Path
from pellucid import cli
from pellucid.policy import load

settings = load.GgufConfig


def counted(**options):
    with Path(__file__).with_name("converted").open("a") as file:
        file.write(os.environ["RANK"])
    return settings(**options)


load.GgufConfig = counted
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.slow
def test_gguf_file_is_converted_only_by_the_first_process(folders, recipe, model_dir, tmp_path):
    (tmp_path / "counting.py").write_text(CONVERTED)
    recipe.write_text(recipe.read_text().replace(str(model_dir), str(folders["gguf"])))
    settings = ["--runtime.engine", "fsdp2", "--evaluate.every", 0, "--algorithm.steps", 1]
    for name in ("first", "again"):
        done = in_processes(2, tmp_path / "counting.py", "train", recipe, "--run", tmp_path / name, *settings)
        assert (tmp_path / "converted").read_text() == "0"
        assert done.stdout.count("is converted to safetensors, once and whole") == (name == "first")
