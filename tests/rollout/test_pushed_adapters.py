"""Adapters that are pushed without their base: the pushed matrices, and the adapters that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from conftest import character_tokenizer
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.rollout.vllm import (
    LORA_A_SUFFIX,
    LORA_B_SUFFIX,
    AdapterRefusedError,
    copy_adapter_weights,
    get_adapter_shape,
    get_base_weights,
    get_push_weights,
    write_adapter,
)
from sampler_process import tiny_policy


def adapted(**settings):
    model = tiny_policy(tied=False).model
    usual = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]}
    policy = Policy(model, character_tokenizer(), adapter=get_peft_model(model, LoraConfig(**usual | settings)))
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape))
    return policy


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}])
def test_base_plus_adapter_equals_the_merged_weights(settings):
    policy = adapted(**settings)
    base, adapter, merged = get_base_weights(policy), copy_adapter_weights(policy), get_push_weights(policy)
    assert base.keys() == merged.keys()
    layers = {name.removesuffix(LORA_A_SUFFIX) for name in adapter if name.endswith(LORA_A_SUFFIX)}
    assert layers == {f"model.layers.{i}.{path}" for i in (0, 1) for path in ("self_attn.q_proj", "mlp.down_proj")}
    for name, whole in merged.items():
        layer = name.removesuffix(".weight")
        added = adapter[layer + LORA_B_SUFFIX] @ adapter[layer + LORA_A_SUFFIX] if layer in layers else torch.zeros(())
        torch.testing.assert_close(base[name] + added, whole, rtol=0, atol=1e-5)
        assert added.abs().max() > 1 or layer not in layers


def test_adapter_matrices_are_copies():
    policy = adapted()
    adapter = copy_adapter_weights(policy)
    before = {name: x.clone() for name, x in adapter.items()}
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(1.0)
    assert all(torch.equal(adapter[name], x) for name, x in before.items())


def test_lora_b_is_rounded_once():
    """The scale 7 / 3 is inexact in bfloat16: rounding the scale or B before the product would give other bits."""
    policy = adapted()
    policy.dtype = torch.bfloat16
    [name] = [name for name in policy.trainable() if "layers.1.mlp.down_proj.lora_B" in name]
    exact = policy.trainable()[name].detach().double() * 7 / 3
    held = copy_adapter_weights(policy)["model.layers.1.mlp.down_proj.lora_B"]
    assert held.dtype == torch.bfloat16
    off = (held.double() - exact).abs()
    assert (off <= (held.nextafter(torch.full_like(held, torch.inf)) - held).double().abs() * 0.501).all()


def test_adapter_shape_has_a_padded_rank_and_matching_zeros():
    policy = adapted(r=9)
    form = get_adapter_shape(policy)
    assert (form.rank, form.padded_rank) == (9, 16)
    shapes = {name: x.shape for name, x in copy_adapter_weights(policy).items()}
    assert {name: x.shape for name, x in form.create_zeros(torch.float32).items()} == shapes


def test_written_adapter_has_the_format_of_peft_with_a_scale_of_1(tmp_path):
    adapter = copy_adapter_weights(adapted())
    write_adapter(adapter, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == settings["r"] == 3
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(
        written[f"base_model.model.model.layers.0.mlp.down_proj{LORA_B_SUFFIX}.weight"],
        adapter[f"model.layers.0.mlp.down_proj{LORA_B_SUFFIX}"],
    )
    assert len(written) == len(adapter) == 8


@pytest.mark.filterwarnings("ignore:.*merging LoRA weights", "ignore:.*a tied layer is part of the adapter")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, r"0\.self_attn\.q_proj is not a plain linear layer"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.* is trained as well"),
        ({"lora_bias": True}, r"lora_B\.default\.bias is trained as well"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A.* is trained as well"),
        ({"r": 513}, "policy.lora is above 512"),
    ],
)
def test_adapters_that_vllm_cannot_load_are_refused(settings, says):
    policy = adapted(**settings)
    with pytest.raises(AdapterRefusedError, match=says):
        get_adapter_shape(policy)


def test_adapter_on_every_linear_layer_has_a_shape():
    model = tiny_policy().model
    form = get_adapter_shape(Policy(model, character_tokenizer(), adapter=add_adapter(model, 512)))
    assert (form.padded_rank, len(form.layers)) == (512, 2 * 7)
    assert form.layers["model.layers.0.mlp.up_proj"] == (64, 96)
