"""The choice of a sampler: a model whose decoding in transformers is wrong gets another sampler, or is refused."""

from __future__ import annotations

import pytest
import torch

from conftest import CountDigits, character_tokenizer, make_policy
from pellucid import cli
from pellucid.algorithm.batch import collate
from pellucid.models import hf_decode
from pellucid.models.hf_decode import find_cache_fault
from pellucid.policy import policy as policies
from pellucid.policy.policy import Policy
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.select import choose_sampler
from pellucid.serve import api
from pellucid.types import Sampling, UserError
from tiny_families import checkpoint, model_of


def policy_of(name, dtype=torch.float32):
    return Policy(model_of(name).eval(), character_tokenizer(), dtype)


def gap(policy, sampler):
    """Return the largest gap between sampled and scored log-probs, for prompts and completions of mixed lengths."""
    sampler.sync(policy)
    groups = sampler.generate(CountDigits().sample(0, 4), Sampling(4, max_tokens=16, seed="0/0"))
    assert len({len(group.prompt_ids) for group in groups}) > 1
    assert len({len(c.token_ids) for group in groups for c in group.completions}) > 1
    batch = collate(groups)
    return float((policy.score(batch).logprobs.detach() - batch.sampler_logprobs)[batch.response_mask].abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mamba", "mamba2", "lfm2", "falcon_h1", "gemma3"])
def test_models_with_recurrent_state_use_the_native_sampler(name, dtype):
    sampler, note = choose_sampler("native", 8, policy_of(name, dtype))
    assert isinstance(sampler, NativeSampler)
    assert note == ""
    assert gap(policy_of(name), sampler) < 1e-4


def test_model_without_padding_support_is_sampled_prompt_by_prompt():
    """Batched with longer prompts, the log-probs of RecurrentGemma would be off by a tenth of a nat."""
    policy = policy_of("recurrent_gemma")
    sampler, note = choose_sampler("native", 8, policy)
    assert isinstance(sampler, HuggingFaceSampler)
    assert sampler.one_by_one
    assert note.count("\n") == 0
    assert "hf instead of native" in note
    assert gap(policy, sampler) < 5e-3
    assert gap(policy, HuggingFaceSampler()) > 0.02


def test_model_with_its_own_cache_class_is_sampled_by_hf():
    policy = policy_of("minimax")
    sampler, note = choose_sampler("native", 8, policy)
    assert isinstance(sampler, HuggingFaceSampler)
    assert not sampler.one_by_one
    assert "MiniMax uses cache of its own" in note
    assert gap(policy, sampler) < 1e-4


def test_model_that_no_sampler_supports_is_refused():
    with pytest.raises(UserError, match=r"RwkvForCausalLM cannot be sampled from: by hf .* by native"):
        choose_sampler("hf", 8, policy_of("rwkv"))


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma"])
def test_requested_sampler_is_used_if_possible(name, architecture):
    sampler, note = choose_sampler(name, 8, make_policy(architecture))
    assert isinstance(sampler, {"native": NativeSampler, "hf": HuggingFaceSampler}[name])
    assert note == ""


@pytest.mark.parametrize("fault", ["padding", "order", "rows"])
def test_trial_detects_faults_of_batched_decoding(fault, monkeypatch):
    model, batch = make_policy("gpt2").model, hf_decode.FallbackDecodeBatch
    assert find_cache_fault(model) == ""
    if fault == "padding":
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda attention_mask=None, **given: forward(**given))
    elif fault == "order":
        monkeypatch.setattr(
            batch, "keep_rows", lambda self, rows: setattr(self, "attention_mask", self.attention_mask[rows])
        )
    else:
        keep = batch.keep_rows
        monkeypatch.setattr(batch, "keep_rows", lambda self, rows: keep(self, rows.clamp(max=0)))
    assert find_cache_fault(model)


def test_fallback_is_reported_in_one_line_before_step_1(tmp_path, capsys):
    model = checkpoint("recurrent_gemma", tmp_path / "model")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'[policy]\nmodel = "{model}"\n[sampler]\nmax_tokens = 4\n[algorithm]\nsteps = 1\nprompts_per_step = 2\n'
        "group_size = 2\n[evaluate]\nevery = 0\n[checkpoint]\nevery = 0\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(recipe), "--run", str(tmp_path / "run")])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("! sampler.name")]
    assert printed.index(line) < printed.index("step")
    assert "activations unknown" in " ".join(printed.split())


def test_model_without_padding_support_is_not_served(tmp_path):
    model = checkpoint("recurrent_gemma", tmp_path)
    with pytest.raises(UserError, match="RecurrentGemmaForCausalLM cannot be served"):
        api.load_served_model(cli.parse_command_line(["serve", str(model), "--dtype", "float32"]))


def test_native_decoder_needs_no_trial(monkeypatch):
    monkeypatch.setattr("pellucid.rollout.select.find_cache_fault", None)
    sampler, _ = choose_sampler("native", 8, policies.Policy(model_of("llama"), character_tokenizer()))
    assert isinstance(sampler, NativeSampler)
