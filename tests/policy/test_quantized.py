"""Tests of adapters on a 4-bit base; most of them need bitsandbytes."""

from __future__ import annotations

import importlib.util
import sys

import peft
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from conftest import CountDigits, records
from pellucid import cli
from pellucid.algorithm.batch import collate
from pellucid.config import load_config
from pellucid.policy import load, policy
from pellucid.rollout.select import choose_sampler
from pellucid.training import memory, preflight
from pellucid.types import Sampling
from runs import same_run, train, weights
from tiny_families import checkpoint

CPU = torch.device("cpu")
IN_4BIT = ["--policy.lora", "2", "--policy.load-in-4bit"]
FEW = ["--evaluate.every", "0", "--checkpoint.every", "1", "--optimizer.schedule", "constant"]
BITSANDBYTES = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(folder, dtype=torch.float32, in_4bit=True):
    torch.manual_seed(0)
    learner = policy.load_policy(str(folder), CPU, dtype, 1.0, lora_rank=2, load_in_4bit=in_4bit)
    with torch.no_grad():
        for p in learner.trainable().values():
            p.copy_(0.1 * torch.randn_like(p))
    return learner


def rollouts(learner):
    sampler, note = choose_sampler("native", 8, learner)
    assert note == ""
    sampler.sync(learner)
    return collate(sampler.generate(CountDigits().sample(0, 3), Sampling(2, max_tokens=8)))


def dequantized(learner, folder):
    """Return the same policy with the dequantized values of its 4-bit weights, in fp32."""
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415 - not everywhere

    plain = adapted(folder, in_4bit=False)
    values = dict(plain.model.named_parameters())
    with torch.no_grad():
        for name, p in learner.model.named_parameters():
            values[name].copy_(dequantize_4bit(p.data, p.quant_state) if load.is_quantized(p) else p)
    return plain


@BITSANDBYTES
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_log_probs_and_gradients_match_the_dequantized_weights(name, tmp_path):
    """This also holds after passes without gradient, in which bitsandbytes would repack its layers."""
    checkpoint(name, tmp_path)
    learner = adapted(tmp_path)
    batch, plain = rollouts(learner), dequantized(learner, tmp_path)
    scored, expected = learner.score(batch).logprobs, plain.score(batch).logprobs
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-4)
    scored.sum().backward()
    expected.sum().backward()
    for parameter, p in learner.trainable().items():
        torch.testing.assert_close(p.grad, plain.trainable()[parameter].grad, rtol=1e-3, atol=1e-3, msg=parameter)
    assert learner.find_fallback_reason() == "an adapter on a 4-bit base"


@BITSANDBYTES
def test_quantized_weights_have_four_bits_and_approximate_the_base(tmp_path):
    checkpoint("llama", tmp_path)
    learner, whole = adapted(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    values = dict(dequantized(learner, tmp_path).model.named_parameters())
    narrow = {name: p for name, p in learner.model.named_parameters() if load.is_quantized(p)}
    assert {name.split(".")[-3] for name in narrow} == MATRICES
    for name, p in narrow.items():
        weight = whole.get_parameter(name.replace(".base_layer", ""))
        assert 2 * p.numel() == weight.numel() == load.count_weights(p)
        assert 0.9 < F.cosine_similarity(values[name].flatten(), weight.flatten(), dim=0) < 0.9999


@BITSANDBYTES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_resumes_bit_for_bit_and_saves_a_whole_model_and_an_adapter(recipe, tmp_path, dtype, capsys):
    """The saved model is the base as on disk, not its 4-bit weights, with the adapter added in fp32."""
    settings = [*IN_4BIT, *FEW, "--policy.dtype", dtype]
    assert train(recipe, "--run", tmp_path / "whole", *settings, "--algorithm.steps", 2) == 0
    assert "by transformers (an adapter on a 4-bit base)" in " ".join(capsys.readouterr().out.split())
    assert train(recipe, "--run", tmp_path / "parted", *settings, "--algorithm.steps", 1) == 0
    assert train("--resume", tmp_path / "parted", "--algorithm.steps", 2) == 0
    same_run(tmp_path / "whole", tmp_path / "parted")
    gap = records(tmp_path / "whole" / "metrics.jsonl")[0]["sampler/gap_max"]
    assert gap < {"float32": 1e-4, "bfloat16": 0.2}[dtype]

    base = AutoModelForCausalLM.from_pretrained(load_config(recipe).policy.model, dtype=torch.float32)
    before = base.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    added = peft.PeftModel.from_pretrained(base, tmp_path / "whole" / "adapter").merge_and_unload().state_dict()
    saved = weights(tmp_path / "whole")
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, added[name], rtol=0, atol=1e-6)
    assert not torch.equal(saved["model.layers.0.mlp.up_proj.weight"], before)
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", str(tmp_path / "whole"), "--show", "1"])
    assert ended.value.code == 0


@BITSANDBYTES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_counts_the_bytes_that_are_held(tmp_path, recipe, dtype):
    """The plan counts the parameters of the base alone; a loaded model also counts those of the adapter."""
    checkpoint("llama", tmp_path / "base")
    settings = ["--policy.model", str(tmp_path / "base"), *IN_4BIT, "--policy.dtype", dtype]
    cfg, learner = load_config(recipe, settings), adapted(tmp_path / "base", getattr(torch, dtype))
    model, loaded = memory.describe_model(cfg.policy), preflight.describe_loaded_model(learner)
    assert (model.trained_count, model.quantized_count) == (loaded.trained_count, loaded.quantized_count)
    assert model.parameter_count + model.trained_count == loaded.parameter_count
    plain = [p for p in learner.model.parameters() if not load.is_quantized(p)]
    held = sum(p.numel() * p.element_size() for p in plain) + memory.BYTES_PER_4BIT_WEIGHT * model.quantized_count
    copied = 2 * model.trained_count if dtype == "bfloat16" else 0
    assert memory.estimate_training_state(loaded, cfg)["weights"] * 1e9 == pytest.approx(held + copied, rel=1e-6)


def test_plan_for_4bit_weights_offers_only_ddp_without_offload(tmp_path, recipe, capsys):
    """The plan needs no bitsandbytes. The weights take less than 0.3 of the memory, and no engine shards them."""
    for settings in (IN_4BIT, IN_4BIT[:2]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", "--plan", str(recipe), "--policy.model", "recipes/shapes/qwen2.5-3b", *settings])
        assert ended.value.code == 0
    narrow, whole = (part.splitlines() for part in capsys.readouterr().out.split("GB on each device at the peak\n")[1:])
    heads, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in narrow if line.startswith("| ")]
    assert [row[:2] for row in rows if row[0].isdigit()] == [[n, "ddp"] for n in "1248"]
    assert "with offload" not in heads
    weights = [float(next(line for line in part if line.startswith("| 1 ")).split("|")[3]) for part in (narrow, whole)]
    assert weights[0] < 0.3 * weights[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--policy.load-in-4bit"], "load_in_4bit needs an adapter: set lora, its rank"),
        ([*IN_4BIT, "--runtime.engine", "fsdp2"], 'runtime.engine = "fsdp2" cannot shard 4-bit weights: use "ddp"'),
        ([*IN_4BIT, "--runtime.engine", "deepspeed"], 'runtime.engine = "deepspeed" cannot shard 4-bit weights'),
        ([*IN_4BIT, "--optimizer.offload"], "optimizer.offload gains nothing, since an adapter is small: leave it out"),
    ],
    ids=["whole", "fsdp2", "deepspeed", "offload"],
)
def test_unsupported_settings_are_refused(recipe, tmp_path, settings, said, capsys, monkeypatch):
    monkeypatch.setattr(load, "check_bitsandbytes_installed", lambda: None)
    assert train(recipe, "--run", tmp_path / "run", *settings) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_missing_bitsandbytes_names_the_extra(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert train(recipe, "--run", tmp_path / "run", *IN_4BIT) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == 'pellucid: policy.load_in_4bit needs bitsandbytes: pip install "pellucid[quantized]"'
