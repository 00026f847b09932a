"""Scoring against a token-by-token loop, with every kind of padding, precision and adapter."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import (
    ARCHITECTURES,
    EOS,
    CountDigits,
    OneProcessRuntime,
    character_tokenizer,
    make_policy,
    tiny_gpt2,
    tiny_llama,
)
from pellucid import policy as policy_module
from pellucid.batch import collate
from pellucid.grpo import update
from pellucid.policy import AdapterOff, Policy, check_head, end_of_answer
from pellucid.samplers.native import Native
from pellucid.settings import GRPOConfig
from pellucid.types import Completion, Group, Prompt, UserError


def batch_of(policy, n=3, size=3, max_tokens=10):
    sampler = Native(max_tokens=max_tokens)
    sampler.sync(policy)
    return collate(sampler.generate(CountDigits().sample(0, n), size, seed="0/0"), policy.device)


def one_token_at_a_time(policy, batch):
    """log pi(token | everything before it), a forward pass a token, nothing padded."""
    rows = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for b in range(len(batch)):
        context = list(batch.prompt_ids[int(batch.prompt_of[b])])
        for t in range(int(batch.mask[b].sum())):
            logits = policy.model(torch.tensor([context])).logits[0, -1]
            token = int(batch.response_ids[b, t])
            rows[b, t] = logits.double().log_softmax(-1)[token]
            context.append(token)
    return rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_scores_equal_a_token_by_token_loop(architecture):
    policy = make_policy(architecture, dtype=torch.float64, engine="transformers")
    batch = batch_of(policy)
    assert len({len(ids) for ids in batch.prompt_ids}) > 1
    torch.testing.assert_close(policy.score(batch).logprobs, one_token_at_a_time(policy, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [lambda: tiny_gpt2(dropout=0.5), lambda: tiny_llama(dropout=0.5)])
def test_dropout_is_off_the_ratio_of_a_policy_to_itself_is_one(make, checkpointing):
    policy = Policy(make(), character_tokenizer(), gradient_checkpointing=checkpointing)
    batch = batch_of(policy)
    policy.model.train()
    one, two = policy.score(batch).logprobs, policy.score(batch).logprobs
    assert ((one - two).exp() - 1)[batch.mask].abs().max() < 1e-5


def test_gradient_checkpointing_changes_no_gradient():
    def gradient(checkpointing):
        policy = make_policy(dtype=torch.float64, gradient_checkpointing=checkpointing)
        batch = batch_of(policy)
        policy.score(batch).logprobs.sum().backward()
        return {name: p.grad for name, p in policy.trainable().items()}

    plain, recomputed = gradient(False), gradient(True)
    for name, expected in plain.items():
        torch.testing.assert_close(recomputed[name], expected, rtol=0, atol=1e-10)


def test_checkpointing_really_recomputes():
    policy = make_policy(gradient_checkpointing=True, engine="transformers")
    calls = []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = batch_of(policy)
    calls.clear()
    policy.score(batch).logprobs.sum().backward()
    assert len(calls) == 2


def test_what_the_padding_holds_is_never_looked_at():
    policy = make_policy()
    batch = batch_of(policy, max_tokens=24, size=8)
    assert not bool(batch.mask.all())
    rubbish = torch.where(batch.mask, batch.response_ids, torch.randint(EOS, batch.response_ids.shape))
    torch.testing.assert_close(policy.score(replace(batch, response_ids=rubbish)), policy.score(batch), rtol=0, atol=0)


def test_bf16_is_computed_in_and_fp32_is_kept():
    fp32, bf16 = make_policy(), make_policy(dtype=torch.bfloat16)
    batch = batch_of(fp32)
    gap = (fp32.score(batch).logprobs - bf16.score(batch).logprobs).abs()
    assert 1e-6 < gap.max() < 0.5
    bf16.score(batch).logprobs.sum().backward()
    assert {p.grad.dtype for p in bf16.trainable().values()} == {torch.float32}


def test_every_eos_that_the_checkpoint_names_counts():
    model = tiny_llama()
    model.generation_config.eos_token_id = [3, 5]
    assert Policy(model, character_tokenizer()).eos_ids == (3, 5, EOS)


def test_a_saved_policy_is_a_plain_transformers_model(tmp_path):
    policy = make_policy()
    policy.save(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), policy.model.parameters(), strict=True))
    assert tokenizer("1+2=").input_ids == policy.tokenizer("1+2=").input_ids


def test_messages_pass_through_the_chat_template_and_strings_do_not():
    policy = make_policy()
    conversation = Prompt("p", ({"role": "user", "content": "1+1?"},))
    assert policy.decode(policy.encode(conversation)).strip() == "1+1?"
    policy.tokenizer.chat_template = (
        "{% for m in messages %}a{{ m.content }}b{% endfor %}{% if add_generation_prompt %}c{% endif %}"
    )
    assert policy.decode(policy.encode(conversation)) == "a1+1?bc"
    assert policy.decode(policy.encode(Prompt("p", "1+1?"))) == "1+1?"


def test_an_unknown_trick_behind_the_head_is_refused():
    model = tiny_llama()
    check_head(model)
    plain = model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    with pytest.raises(UserError, match="changes its logits"):
        check_head(model)


# ---------------------------------------------------------------- LoRA


@pytest.fixture
def lora():
    torch.manual_seed(0)
    model = tiny_llama()
    return Policy(model, character_tokenizer(), adapter=policy_module.add_adapter(model, 4))


def test_lora_trains_the_adapter_and_nothing_else(lora):
    names = lora.trainable()
    assert names
    assert all("lora_" in name for name in names)


def test_the_reference_of_a_lora_policy_is_the_policy_without_its_adapter(lora, tmp_path):
    batch = batch_of(lora)
    start = lora.score(batch).logprobs.detach()
    with torch.no_grad():
        for p in lora.trainable().values():
            p.add_(0.3 * torch.randn_like(p))
    assert (lora.score(batch).logprobs - start).abs().max() > 1e-2
    torch.testing.assert_close(AdapterOff(lora).score(batch).logprobs, start, rtol=0, atol=0)

    lora.save(tmp_path)
    merged = Policy(AutoModelForCausalLM.from_pretrained(tmp_path), character_tokenizer())
    torch.testing.assert_close(merged.score(batch).logprobs, lora.score(batch).logprobs, rtol=0, atol=1e-4)


def test_lora_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r'^policy.lora needs peft: pip install "pellucid\[lora\]"$'):
        policy_module.add_adapter(tiny_llama(), 2)


def test_the_base_of_a_lora_policy_does_not_move(lora):
    before = {name: p.clone() for name, p in lora.model.named_parameters()}
    batch = batch_of(lora)
    batch = replace(batch, advantages=torch.randn(len(batch), dtype=torch.float64))
    update(lora, batch, OneProcessRuntime(lora, lr=1.0), GRPOConfig())
    moved = {name for name, p in lora.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert moved <= lora.trainable().keys()


def test_a_checkpoint_of_another_model_is_refused(lora):
    with pytest.raises(UserError, match="made with another policy"):
        lora.load_trainable(make_policy().trainable())


def test_a_response_may_be_a_single_token():
    policy = make_policy()
    group = Group(Prompt("p", "a"), (1, 2, 3), (Completion((EOS,), (-1.0,), "", True),) * 2)
    assert policy.score(collate([group], policy.device)).logprobs.shape == (2, 1)


def test_an_answer_ends_as_the_chat_template_ends_it():
    """Of several end-of-sequence tokens: the template's, else the tokenizer's, else whichever there is."""
    tokenizer = character_tokenizer()
    turn = tokenizer("k")["input_ids"][0]
    assert end_of_answer(tokenizer, (turn, EOS)) == EOS
    assert end_of_answer(tokenizer, (turn,)) == turn
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}k{% endfor %}"
    assert end_of_answer(tokenizer, (turn, EOS)) == turn
