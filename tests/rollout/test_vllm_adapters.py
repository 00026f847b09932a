"""Adapters in vLLM in this process: only the adapter is pushed, and every push is checked."""

from __future__ import annotations

import pytest
import torch

from conftest import CountDigits, character_tokenizer
from pellucid.policy.load import add_adapter, copy_model
from pellucid.policy.policy import Policy
from pellucid.rollout.vllm import (
    LORA_A_SUFFIX,
    LORA_B_SUFFIX,
    VLLMEngine,
    VLLMSampler,
    encode_check_text,
    write_adapter,
)
from pellucid.types import Sampling, UserError
from sampler_process import gap_of, gaps_of, tiny_policy

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")


def adapted(dtype=torch.float32, rank=3, alpha=7.0, targets=()):
    """Return a policy whose adapter scale, 7 / 3, is exact in no dtype."""
    model = copy_model(tiny_policy(layers=3).model, dtype)
    policy = Policy(model, character_tokenizer(), dtype, adapter=add_adapter(model, rank, alpha, targets))
    for p in policy.trainable().values():
        p.data = p.data.float()
    return policy


def step(policy, by):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=generator).sign(), alpha=by)


def synced(policy):
    sampler = VLLMSampler(rows=16, cache_gb=0.1, adapter="request")
    sampler.sync(policy, 3)
    return sampler


@pytest.fixture(scope="module")
def made():
    return synced(adapted())


@pytest.fixture
def sampler(made):
    """Return the sampler with a nonzero adapter, whose policy no other test uses."""
    policy = adapted()
    step(policy, 0.05)
    made.sync(policy, 3)
    return made


def pushed(sampler, monkeypatch):
    """Return a list that collects the names of the weights of each later push."""
    names, push = [], sampler.engine.push

    def seen(weights):
        names.append(set(weights))
        push(weights)

    monkeypatch.setattr(sampler.engine, "push", seen)
    return names


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_logprobs_are_those_of_the_adapted_policy(sampler, dtype, gap):
    policy, prompts = adapted(dtype), CountDigits().sample(0, 4)
    own = sampler if dtype == torch.float32 else synced(policy)
    own.sync(policy, 4)
    before = own.generate(prompts, SAMPLING)
    step(policy, 0.1)
    assert gaps_of(policy, before).mean() > 5 * gap
    own.sync(policy, 5)
    after = own.generate(prompts, SAMPLING)
    assert gaps_of(policy, after).mean() < gap
    assert {c.version for group in after for c in group.completions} == {5}


def test_merged_bf16_policy_is_sampled_in_fp32():
    """In bf16, rounding would lose most of the update."""
    policy, prompts = adapted(torch.bfloat16), CountDigits().sample(0, 4)
    sampler = VLLMSampler(rows=16, cache_gb=0.1)
    for version in (1, 2):
        step(policy, 0.05)
        sampler.sync(policy, version)
        groups = sampler.generate(prompts, SAMPLING)
    exact = adapted()
    exact.load_trainable(policy.trainable())
    for name, p in exact.weights().items():
        p.data = policy.weights()[name].data.float()
    assert gaps_of(exact, groups).mean() < 1e-4


def test_later_pushes_send_only_the_adapter_and_remove_old_ones(sampler, monkeypatch):
    policy, names = sampler.policy, pushed(sampler, monkeypatch)
    for version in (4, 5):
        step(policy, 1e-3)
        sampler.sync(policy, version)
    layers = {name.rpartition(".lora_")[0] for name in policy.trainable()}
    assert len(layers) == 3 * 7
    assert names == [{layer + matrix for layer in layers for matrix in (LORA_A_SUFFIX, LORA_B_SUFFIX)}] * 2
    assert sampler.engine.llm.llm_engine.list_loras() == {sampler.engine.adapter.lora_int_id}


def test_a_new_engine_gets_the_base_too(sampler, monkeypatch):
    policy = sampler.policy
    sampler.engine.close()
    sampler.sync(policy, 4)
    step(policy, 0.05)
    sampler.sync(policy, 5)
    assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4


def nothing(engine):
    engine.load_adapter = lambda adapter: None
    return r"vLLM has no adapter on model\.layers\.0"


def but_one_layer(engine):
    whole = type(engine).load_adapter
    engine.load_adapter = lambda adapter: whole(
        engine, {k: x for k, x in adapter.items() if ".layers.1.mlp.up" not in k}
    )
    return r"old weights: model\.layers\.1\.mlp\.up_proj\.lora_"


def but_one_part_of_a_joined_layer(engine):
    whole = type(engine).load_adapter
    engine.load_adapter = lambda adapter: whole(
        engine, {k: x for k, x in adapter.items() if ".layers.2.self_attn.k" not in k}
    )
    return r"old weights: model\.layers\.2\.self_attn\.k_proj\.lora_"


def but_the_scale(engine):
    whole = type(engine).load_adapter
    engine.load_adapter = lambda adapter: whole(
        engine, {k: x * (3 / 7 if k.endswith(LORA_B_SUFFIX) else 1) for k, x in adapter.items()}
    )
    return r"old weights: .*lora_B"


@pytest.fixture
def mended(sampler):
    yield sampler
    vars(sampler.engine).pop("load_adapter", None)
    for name in ("generate", "reset_prefix_cache"):
        vars(sampler.engine.llm).pop(name, None)


@pytest.mark.parametrize("spoil", [nothing, but_one_layer, but_one_part_of_a_joined_layer, but_the_scale])
def test_incomplete_push_of_an_adapter_is_detected(mended, spoil):
    """The update is so small that no log-prob reveals it."""
    step(mended.policy, 1e-7)
    says = spoil(mended.engine)
    with pytest.raises(UserError, match=says) as raised:
        mended.sync(mended.policy, 4)
    assert "\n" not in str(raised.value)


def test_rows_without_the_adapter_are_detected_by_the_check_text(mended):
    llm = mended.engine.llm
    mended.sync(mended.policy, 4)
    llm.generate = lambda *told, lora_request, **more: type(llm).generate(llm, *told, **more)
    with pytest.raises(UserError, match="off the scorer's"):
        mended.sync(mended.policy, 5)


def test_prefix_cache_of_another_adapter_is_not_used(mended):
    """vLLM keys its cache by adapter, so the next adapter recomputes a text even if the cache was not cleared."""
    engine, policy = mended.engine, mended.policy
    ids = encode_check_text(policy, 3 * engine.block_size)
    engine.score_tokens(ids)
    assert engine.score_tokens(ids)[1] >= 2 * engine.block_size
    engine.llm.reset_prefix_cache = lambda: True
    step(policy, 1e-7)
    mended.sync(policy, 4)
    assert engine.score_tokens(ids)[1] <= len(ids) - engine.block_size


def test_adapter_replaced_in_place_with_a_stale_cache_is_detected(mended, tmp_path):
    engine, policy = mended.engine, mended.policy

    def in_place(adapter):
        write_adapter(adapter, tmp_path)
        engine.adapter = engine.lora_request_class("kept", 999, str(tmp_path), load_inplace=True)
        engine.llm.llm_engine.add_lora(engine.adapter)

    engine.load_adapter = in_place
    for version in (4, 5):
        step(policy, 1e-7)
        mended.sync(policy, version)
    assert gap_of(policy, mended.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4
    engine.llm.reset_prefix_cache()
    engine.llm.reset_prefix_cache = lambda: True
    step(policy, 1e-7)
    with pytest.raises(UserError, match="prefix cache"):
        mended.sync(policy, 6)


def test_complete_pushes_of_tiny_updates_pass(sampler):
    policy = sampler.policy
    for i in range(20):
        step(policy, [1e-9, 1e-7, 0.0, 1e-5][i % 4])
        sampler.sync(policy, i)
    assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4


def test_adapter_that_vllm_refuses_is_merged_with_a_notice(monkeypatch, capsys):
    """This happens on layers whose adapters vLLM keeps in another form."""

    def elsewhere(engine, name):
        raise UserError("vLLM has no adapter on q_proj")

    monkeypatch.setattr(VLLMEngine, "_get_adapter_matrix", elsewhere)
    policy = adapted(targets=("q_proj",))
    sampler = synced(policy)
    said = '! sampler.adapter = "merged" is used instead of "request" (vLLM has no adapter on q_proj)\n'
    assert capsys.readouterr().out == said
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.add_(0.05 if "q_proj.lora_B" in name else 0.0)
    sampler.sync(policy, 4)
    assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4
    assert capsys.readouterr().out == ""


def test_model_without_lora_support_in_vllm_gets_merged_weights(monkeypatch, capsys):
    monkeypatch.setattr("vllm.v1.worker.lora_model_runner_mixin.supports_lora", lambda model: False)
    policy = adapted()
    sampler = synced(policy)
    why = "vLLM: LlamaForCausalLM does not support LoRA yet."
    said = f'! sampler.adapter = "merged" is used instead of "request" ({why})\n'
    assert capsys.readouterr().out == said
    step(policy, 0.05)
    sampler.sync(policy, 4)
    assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4
