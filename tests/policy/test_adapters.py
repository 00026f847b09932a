"""Tests of adapters on every model family: training, saving, merging, and their settings."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import CountDigits
from pellucid import cli
from pellucid.algorithm.batch import collate
from pellucid.config import PolicyConfig, load_config
from pellucid.policy import lora, policy
from pellucid.policy.load import add_adapter
from pellucid.rollout.select import choose_sampler
from pellucid.training import memory
from pellucid.training.build import build_components
from pellucid.types import Sampling, UserError
from runs import train
from tiny_families import checkpoint, model_of

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # raised by peft for fused experts
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba", "falcon_h1", "recurrent_gemma"])
def test_the_merged_model_has_the_log_probs_of_base_and_adapter(name, tmp_path):
    """Fused experts nest their adapters, and a recurrent layer keeps a state with gradient from its last pass."""
    checkpoint(name, tmp_path / "base")
    adapted = policy.load_policy(str(tmp_path / "base"), CPU, torch.float32, 1.0, lora_rank=2)
    with torch.no_grad():
        for p in adapted.trainable().values():
            p.copy_(0.3 * torch.randn_like(p))
    sampler, _ = choose_sampler("native", 8, adapted)
    sampler.sync(adapted)
    batch = collate(sampler.generate(CountDigits().sample(0, 3), Sampling(2, max_tokens=8)))
    scored = adapted.score(batch).logprobs
    scored.sum().backward()
    adapted.save(tmp_path / "merged")
    merged = policy.load_frozen_policy(str(tmp_path / "merged"), CPU, torch.float32, 1.0)
    torch.testing.assert_close(merged.score(batch).logprobs, scored.detach(), rtol=0, atol=2e-3)
    base = policy.load_frozen_policy(str(tmp_path / "base"), CPU, torch.float32, 1.0)
    assert (base.score(batch).logprobs - scored.detach())[batch.response_mask].abs().max() > 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # raised by peft for fused experts
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba"])
def test_run_saves_a_peft_adapter_beside_the_merged_model(name, tmp_path, recipe):
    base, run_dir = tmp_path / "base", tmp_path / "run"
    checkpoint(name, base)
    settings = ["--policy.model", base, "--policy.lora", 2, "--policy.lora-alpha", 8, "--algorithm.steps", 1]
    assert train(recipe, "--run", run_dir, *settings, "--evaluate.every", 0) == 0
    whole = AutoModelForCausalLM.from_pretrained(run_dir / "model").eval()
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = plain(ids).logits
        adapted = peft.PeftModel.from_pretrained(plain, run_dir / "adapter").eval()
        torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, rtol=0, atol=2e-4)
    assert (whole(ids).logits - before).abs().max() > 0.01
    assert not [path for path in run_dir.iterdir() if path.suffix == ".partial"]


@pytest.mark.parametrize(
    ("name", "revision", "named"),
    [
        ("o/n", "v1", "o/n"),
        ("smollm2-135m", "", "smollm2-135m"),
        ("a/m", "", "{here}/a/m"),
        ("~/m", "", "{here}/m"),
    ],
)
def test_adapter_config_names_its_base_and_revision(name, revision, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("a/m", "m", "smollm2-135m"):
        (tmp_path / folder).mkdir(parents=True)
    adapter = add_adapter(model_of("llama"), 2)
    lora.set_base_name(adapter, name, revision)
    lora.save_adapter(adapter, dict(adapter.base_model.model.named_parameters()), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == named.format(here=tmp_path)
    assert (written["revision"], written["r"]) == (revision or None, 2)


def test_adapter_works_on_a_bf16_model_with_an_fp32_residual_stream(tmp_path):
    """Mamba's residual stream is in fp32."""
    checkpoint("mamba", tmp_path)
    adapted = policy.load_policy(str(tmp_path), CPU, torch.bfloat16, 1.0, lora_rank=2)
    assert choose_sampler("native", 8, adapted)[1] == ""


def test_model_that_peft_refuses_raises_one_line(monkeypatch):
    def refuse(*_):
        raise ValueError("Target modules\nnot found")

    monkeypatch.setattr("peft.get_peft_model", refuse)
    with pytest.raises(UserError, match=r"policy\.lora: peft has no adapter for GPT2LMHeadModel: .* modules not found"):
        add_adapter(model_of("gpt2"), 2)


def test_adapter_uses_the_given_targets_and_alpha():
    model = model_of("llama")
    add_adapter(model, 2, alpha=3.0, targets=("q_proj", "v_proj"))
    adapted = {path.rpartition(".")[2]: m for path, m in model.named_modules() if hasattr(m, "lora_A")}
    assert adapted.keys() == {"q_proj", "v_proj"}
    x, layer = torch.randn(3, 32), adapted["q_proj"]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
        low = layer.lora_B["default"](layer.lora_A["default"](x))
        torch.testing.assert_close(layer(x) - layer.base_layer(x), 3.0 / 2 * low)


def test_recipe_sets_the_alpha_and_targets_of_its_adapter(recipe):
    settings = ["--policy.lora", "2", "--policy.lora-alpha", "3", "--policy.lora-targets", "q_proj"]
    parts = build_components(load_config(recipe, settings))
    parts.close()
    adapted = {path.rpartition(".")[2]: m for path, m in parts.policy.model.named_modules() if hasattr(m, "lora_A")}
    assert {name: module.scaling["default"] for name, module in adapted.items()} == {"q_proj": 1.5}


def test_plan_counts_only_adapters_of_the_target_layers(tmp_path):
    checkpoint("llama", tmp_path)
    adapted = policy.load_policy(
        str(tmp_path), CPU, torch.float32, 1.0, lora_rank=2, lora_targets=("q_proj", "down_proj")
    )
    settings = PolicyConfig(str(tmp_path), lora=2, lora_targets=("q_proj", "down_proj"))
    counted = memory.describe_model(settings).trained_count
    assert counted == sum(p.numel() for p in adapted.trainable().values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["--policy.lora", "2", "--policy.lora-targets", "q_prj"],
            "no linear layer is called q_prj; there are down_proj",
        ),
        (["--policy.lora", "2", "--policy.lora-targets", "q_proj", "lm_head"], "lm_head is the output layer"),
        (
            ["--policy.lora", "2", "--policy.lora-alpha", "-1"],
            "policy.lora_alpha: Input should be greater than or equal to 0",
        ),
        (["--policy.lora-alpha", "4"], "need an adapter: set lora, its rank"),
        (
            ["--policy.lora", "2", "--policy.lora-dropout", "0.1"],
            "dropout would make the policy that is updated differ",
        ),
    ],
)
def test_invalid_adapter_settings_are_refused(settings, said, tmp_path, capsys):
    checkpoint("llama", tmp_path / "model")
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[policy]\nmodel = "{tmp_path}/model"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(recipe), "--run", str(tmp_path / "run"), *settings])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
