"""Tests that a half-precision LoRA policy is saved, served and pushed with its whole update."""

from __future__ import annotations

import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pellucid
from conftest import CountDigits, character_tokenizer
from pellucid.algorithm.batch import collate
from pellucid.policy import policy
from pellucid.policy.load import add_adapter, copy_model, locate_model
from pellucid.policy.lora import save_adapter
from pellucid.policy.policy import Policy
from pellucid.reporting.run_files import find_run_dir
from pellucid.rollout.select import choose_sampler
from pellucid.rollout.vllm import VLLMSampler, get_push_weights
from pellucid.rollout.vllm_client import ServerPool
from pellucid.serve import api
from pellucid.serve.command import ServeCommand
from pellucid.serve.vllm_server import EngineHost
from pellucid.training import run as exam
from pellucid.types import Sampling
from runs import answered, train
from sampler_process import Plain, served, tiny_policy
from simulated_device import Decomposed
from tiny_families import checkpoint

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def step(adapted, size=1e-3):
    """Move the adapter about as far as a few Adam steps do: B from 0, by about the learning rate."""
    with torch.no_grad():
        for name, p in adapted.trainable().items():
            p.add_(torch.randn_like(p), alpha=size if "lora_B" in name else 0.0)


def update_of(adapted):
    """Return, by name, the update of each adapted weight: B A times its scale, in float64."""
    found = {}
    for path, module in adapted.model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = (getattr(module, name)["default"].weight.double() for name in ("lora_A", "lora_B"))
            found[f"{path}.weight"] = module.scaling["default"] * (b @ a).detach()
    return found


def error_of(weights, base, update):
    """Return the largest relative error of the update in weights that should be base + update."""
    assert update
    return max(((weights[n].double() - base[n].double() - u).norm() / u.norm()).item() for n, u in update.items())


def mean_kl(p, q, ids):
    """Return KL(p, q) in nats per token, with both models computed in fp32."""
    with torch.no_grad():
        p, q = (model.float().eval()(ids).logits.double().log_softmax(-1) for model in (p, q))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def brevity(completions, **columns):
    return [-float(len(messages[0]["content"])) for messages in completions]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_the_saved_model_has_the_whole_update(dtype, narrow, tmp_path):
    """The base is still the rounded one that the policy was trained with."""
    checkpoint("llama", tmp_path / "base")
    adapted = policy.load_policy(str(tmp_path / "base"), CPU, dtype, 1.0, lora_rank=2, offload_masters=narrow)
    step(adapted)
    adapted.load_trainable({name: p.clone() for name, p in adapted.trainable().items()})  # also sets the masters
    adapted.save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert saved.dtype == torch.float32
    assert error_of(saved.state_dict(), base, update_of(adapted)) < 1e-3
    assert {n for n, x in saved.state_dict().items() if not torch.equal(x, base[n].float())} == set(update_of(adapted))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # raised by peft for fused experts
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_loading_separates_the_saved_adapter_from_the_merged_model(name, tmp_path):
    """Base and adapter are restored bit for bit, so that our decoder in bf16 gives the log-probs of training."""
    checkpoint(name, tmp_path / "base")
    adapted = policy.load_policy(str(tmp_path / "base"), CPU, BF16, 1.0, lora_rank=2)
    step(adapted)
    adapted.save(tmp_path / "model")
    save_adapter(adapted.adapter, adapted.trainable(), tmp_path / "adapter")
    frozen = policy.load_frozen_policy(str(tmp_path / "model"), CPU, BF16, 1.0, merged_adapter=tmp_path / "adapter")
    expected, found = adapted.model.state_dict(), frozen.model.state_dict()
    assert expected.keys() == found.keys()
    for key, x in found.items():
        assert torch.equal(x.to(expected[key]), expected[key]), key
    sampler, _ = choose_sampler("native", 8, adapted)
    sampler.sync(adapted)
    torch.testing.assert_close(get_push_weights(frozen), get_push_weights(adapted), rtol=0, atol=0)
    batch = collate(sampler.generate(CountDigits().sample(0, 3), Sampling(2, max_tokens=8)))
    if adapted.decoder:  # transformers' modules multiply by the fp32 weights, our decoder does not
        assert torch.equal(frozen.score(batch).logprobs, adapted.score(batch).logprobs)


@pytest.mark.slow
def test_every_exported_model_has_the_whole_update(recipe, tmp_path, capsys, monkeypatch):
    settings = {"lora": 2, "policy_dtype": "bfloat16", "evaluate_every": 0, "steps": 2, "optimizer_lr": 1e-4}
    run = pellucid.train(recipe=recipe, run=tmp_path / "run", **settings).finish()
    base = AutoModelForCausalLM.from_pretrained(run._cfg.policy.model, dtype=BF16)
    adapted = peft.PeftModel.from_pretrained(base.float(), run.folder / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    ways = {
        "model/": load_file(run.folder / "model" / "model.safetensors"),
        "run.model": run.model.state_dict(),
        "run.save": load_file(run.save(tmp_path / "saved") / "model.safetensors"),
    }
    for name, found in ways.items():
        assert {x.dtype for x in found.values()} == {torch.float32}, name
        for key, x in found.items():
            torch.testing.assert_close(x, expected[key], rtol=0, atol=1e-7, msg=f"{name}: {key}")
    loaded = [api.load_served_model(ServeCommand((str(run.folder),), device="cpu", dtype="bfloat16")).policy]
    load = exam.load_frozen_policy
    monkeypatch.setattr(exam, "load_frozen_policy", lambda *a, **named: loaded.append(load(*a, **named)) or loaded[-1])
    assert answered("export", run.folder) == 0
    for model in (run.folder, run.folder / "model", run.folder / "exported"):
        assert answered("eval", model, "--policy.dtype", "bfloat16") == 0
    assert len(loaded) == 4
    for frozen in loaded:
        assert frozen.dtype == BF16
        for key, x in frozen.build_merged_model({}, CPU).state_dict().items():
            torch.testing.assert_close(x, expected[key], rtol=0, atol=1e-7)
    capsys.readouterr()
    shutil.rmtree(run.folder / "adapter")
    assert answered("eval", run.folder, "--policy.dtype", "bfloat16") == 0
    assert "adapter is missing: only dtype float32 keeps all" in capsys.readouterr().out
    assert answered("eval", run.folder, "--policy.dtype", "float32") == 0
    assert "is missing" not in capsys.readouterr().out
    assert [policy.adapter for policy in loaded[4:]] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["--policy.lora", "2"], []], ids=["adapter", "whole"])
def test_model_is_saved_in_the_requested_dtype(settings, recipe, tmp_path):
    few = ["--evaluate.every", 0, "--algorithm.steps", 1, "--policy.dtype", "bfloat16"]
    assert train(recipe, "--run", tmp_path / "run", *settings, *few, "--policy.save-dtype", "float16") == 0
    assert find_run_dir(str(tmp_path / "run"))
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.float16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="auto")
    assert model.dtype == torch.float16


@pytest.mark.slow
def test_a_merged_push_has_the_whole_update():
    """The last push imitates a server that has restarted."""
    model = copy_model(tiny_policy().model, BF16)
    adapted = Policy(model, character_tokenizer(), BF16, adapter=add_adapter(model, 3, 7.0))
    for p in adapted.trainable().values():
        p.data = p.data.float()
    base = copy_model(tiny_policy().model, BF16).state_dict()
    held = EngineHost(Plain)
    with served(held) as url:
        sampler = VLLMSampler(engine=ServerPool((url,), 10.0))
        for version in (1, 2):
            step(adapted)
            sampler.sync(adapted, version)
            assert held.engine.model.dtype == torch.float32
            assert error_of(held.engine.model.state_dict(), base, update_of(adapted)) < 1e-3
        before = held.engine.pushed
        held.version = ""
        sampler.sync(adapted, 3)
        assert held.engine.pushed > before


@pytest.mark.slow
def test_smollm2_is_saved_and_pushed_as_it_was_trained(tmp_path):
    """The reference is the bf16 base with the adapter added by peft, after 8 steps at the default learning rate."""
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(9) for b in range(9)]
    settings = {"lora": 8, "dtype": "bfloat16", "steps": 8, "evaluate_every": 0, "checkpoint_every": 0}
    few = {"prompts_per_step": 2, "group_size": 2, "max_tokens": 6}
    with Decomposed():  # a CPU without instructions for bf16 takes minutes for its products
        run = pellucid.train(data=rows, reward=brevity, run=tmp_path / "run", **settings, **few).finish()
    assert run._cfg.optimizer.lr == pellucid.config.Config().optimizer.lr
    location = locate_model("smollm2-135m")
    base = AutoModelForCausalLM.from_pretrained(location, dtype=BF16).float()
    plain = AutoModelForCausalLM.from_pretrained(location, dtype=BF16).float()
    trained = peft.PeftModel.from_pretrained(base, run.folder / "adapter")
    text = " ".join(row["question"] for row in rows[:8])
    ids = torch.tensor([AutoTokenizer.from_pretrained(location)(text)["input_ids"]])
    moved = mean_kl(trained, plain, ids)
    assert moved > 1e-6
    held = EngineHost(Plain)
    with served(held) as url:
        VLLMSampler(engine=ServerPool((url,), 60.0)).sync(run._training_run.policy, 8)
        for model in (AutoModelForCausalLM.from_pretrained(run.folder / "model"), held.engine.model):
            assert mean_kl(trained, model, ids) < min(1e-5, 1e-3 * moved)
