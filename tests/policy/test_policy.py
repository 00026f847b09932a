"""Tests of scoring against a token-by-token loop, and of padding, precision, masters and adapters."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from conftest import (
    ARCHITECTURES,
    EOS,
    VOCAB,
    CountDigits,
    OneProcessRuntime,
    character_tokenizer,
    make_policy,
    tiny_gpt2,
    tiny_llama,
)
from pellucid.algorithm.batch import collate
from pellucid.algorithm.grpo import update_policy
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy import policy as policy_module
from pellucid.policy.load import add_adapter, pick_end_token
from pellucid.policy.policy import LoraReference, Policy
from pellucid.policy.scorer import check_lm_head
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, Group, Prompt, Sampling, UserError


def batch_of(policy, n=3, size=3, max_tokens=10):
    sampling = Sampling(size, max_tokens=max_tokens, seed="0/0")
    return collate(NativeSampler(policy=policy).generate(CountDigits().sample(0, n), sampling))


def one_token_at_a_time(policy, batch):
    """Return log pi(token | everything before it), from one forward pass per token without padding."""
    rows = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for b in range(len(batch)):
        context = list(batch.prompt_ids[int(batch.prompt_indices[b])])
        for t in range(int(batch.response_mask[b].sum())):
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
def test_scoring_turns_dropout_off(make, checkpointing):
    """Dropout exists as modules and, in attention, as a number; the ratio of a policy to itself must be 1."""
    policy = Policy(make(), character_tokenizer(), gradient_checkpointing=checkpointing, engine="transformers")
    batch = batch_of(policy)
    policy.model.train()
    one, two = policy.score(batch).logprobs, policy.score(batch).logprobs
    assert ((one - two).exp() - 1)[batch.response_mask].abs().max() < 1e-5


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


def test_padding_content_does_not_affect_scores():
    policy = make_policy()
    batch = batch_of(policy, max_tokens=24, size=8)
    assert not bool(batch.response_mask.all())
    rubbish = torch.where(batch.response_mask, batch.response_ids, torch.randint(EOS, batch.response_ids.shape))
    torch.testing.assert_close(policy.score(replace(batch, response_ids=rubbish)), policy.score(batch), rtol=0, atol=0)


def test_bf16_policy_computes_in_bf16_and_keeps_fp32_gradients():
    fp32, bf16 = (make_policy("llama, heads of 64", dtype) for dtype in (torch.float32, torch.bfloat16))
    batch = batch_of(fp32)
    gap = (fp32.score(batch).logprobs - bf16.score(batch).logprobs).abs()
    assert 1e-6 < gap.max() < 0.5
    bf16.score(batch).logprobs.sum().backward()
    assert {p.grad.dtype for p in bf16.trainable().values()} == {torch.float32}


def test_inference_copy_has_the_compute_dtype_and_follows_the_weights():
    policy = make_policy(dtype=torch.bfloat16, engine="transformers")
    weights = policy.trainable()
    for _ in range(2):
        copied = dict(policy.get_inference_model().named_parameters())
        assert policy.trainable().keys() == weights.keys()
        for name, p in weights.items():
            assert p.dtype == torch.float32
            assert torch.equal(copied[name], p.to(torch.bfloat16))
            p.data.add_(1.0)


def test_all_end_tokens_of_the_checkpoint_are_used():
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


def test_unknown_change_of_the_logits_is_refused():
    model = tiny_llama()
    check_lm_head(model)
    plain = model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    with pytest.raises(UserError, match="changes its logits"):
        check_lm_head(model)


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """Return a Gemma 2 checkpoint with logits large enough for its soft-cap to bend them."""
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        max_position_embeddings=128,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        initializer_range=0.5,
        final_logit_softcapping=30.0,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("capped")
    Gemma2ForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "settings", [{}, {"lora_rank": 2}, {"offload_masters": True}, {"lora_rank": 2, "offload_masters": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_soft_cap_is_applied_in_every_dtype(capped, settings, dtype):
    policy = policy_module.load_policy(str(capped), torch.device("cpu"), dtype, 1.0, **settings)
    group = Group(Prompt("p", "a"), (1, 2, 3), (Completion((4, EOS), (-1.0, -1.0), "", True),) * 2)
    scored = policy.score(collate([group])).logprobs.detach()
    whole = policy_module.load_policy(str(capped), torch.device("cpu"), torch.float32, 1.0)
    torch.testing.assert_close(scored, whole.score(collate([group])).logprobs.detach(), rtol=0, atol=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_one_percent_change_of_the_soft_cap_is_refused_in_every_dtype(capped, dtype, factor):
    """This is less than the error of rounding a soft-cap to bf16."""
    model = AutoModelForCausalLM.from_pretrained(capped, dtype=dtype)
    check_lm_head(model)
    model.config.final_logit_softcapping *= factor
    unlike = model.forward

    def capped_otherwise(*args, **kwargs):
        model.config.final_logit_softcapping /= factor
        output = unlike(*args, **kwargs)
        model.config.final_logit_softcapping *= factor
        return output

    model.forward = capped_otherwise
    with pytest.raises(UserError, match="changes its logits"):
        check_lm_head(model)


def test_a_reference_has_no_gradient(model_dir):
    reference = policy_module.load_frozen_policy(str(model_dir), torch.device("cpu"), torch.float32, 1.0)
    assert reference.trainable() == {}
    assert not reference.score(batch_of(reference)).logprobs.requires_grad


def bytes_held(policy):
    """Return the bytes of parameters and cast copies; shared memory counts once."""
    tensors = [*policy.weights().values(), *(part.get_cast_copy() for part in policy.decoder.list_cast_weights())]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_frozen_policy_holds_its_matrices_once_and_scores_the_same_bits(dtype, model_dir):
    narrow, wide = (
        policy_module.load_frozen_policy(str(model_dir), torch.device("cpu"), dtype, 1.0, keep_fp32=keep)
        for keep in (False, True)
    )
    batch = batch_of(narrow)
    for found, expected in zip(narrow.score(batch)[:2], wide.score(batch)[:2], strict=True):
        assert torch.equal(found, expected)
    norms = sum(4 * p.numel() for p in wide.weights().values() if p.ndim < 2)
    matrices = sum(p.numel() for p in wide.weights().values() if p.ndim >= 2)
    assert bytes_held(narrow) == norms + dtype.itemsize * matrices
    assert bytes_held(wide) == norms + (4 + dtype.itemsize % 4) * matrices


def test_a_frozen_policy_of_transformers_modules_stays_in_fp32(model_dir):
    """These modules use embeddings and norms in the dtype in which they are stored."""
    policy = policy_module.load_frozen_policy(
        str(model_dir), torch.device("cpu"), torch.bfloat16, 1.0, engine="transformers"
    )
    assert {p.dtype for p in policy.weights().values()} == {torch.float32}


@pytest.mark.parametrize("settings", [{"dtype": torch.float32}, {"dtype": torch.bfloat16, "offload_masters": True}])
def test_weights_in_the_compute_dtype_train_the_same_without_a_copy(settings, model_dir, monkeypatch):
    def trained(is_shared):
        policy = policy_module.load_policy(
            str(model_dir), torch.device("cpu"), settings["dtype"], 1.0, offload_masters="offload_masters" in settings
        )
        if not is_shared:
            for p in policy.trainable().values():  # a view of a larger buffer, as in an engine
                p.data = torch.cat([p.data.flatten(), p.data.new_zeros(1)])[:-1].view(p.shape)
        runtime = Runtime(policy, AdamWConfig(lr=1e-2, offload="offload_masters" in settings), total_updates=2)
        for _ in range(2):
            runtime.backward(policy.score(batch_of(policy)).logprobs.sum())
            runtime.step()
        return policy

    shared, copied = trained(is_shared=True), trained(is_shared=False)
    for name, p in shared.masters().items():
        assert torch.equal(p, copied.masters()[name]), name
    assert torch.equal(shared.score(batch_of(shared)).logprobs, copied.score(batch_of(copied)).logprobs)
    assert bytes_held(shared) == sum(p.nbytes for p in shared.weights().values())
    assert bytes_held(copied) > 1.2 * bytes_held(shared)


# ---------------------------------------------------------------- masters on the CPU


def test_masters_keep_the_unrounded_weights_from_load_to_save(model_dir, tmp_path):
    """This also holds after an optimizer step; the weights are the rounded masters."""
    exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    policy = policy_module.load_policy(str(model_dir), torch.device("cpu"), torch.bfloat16, 1.0, offload_masters=True)
    runtime = Runtime(policy, AdamWConfig(lr=1e-5, offload=True), total_updates=1)

    def all_agree():
        policy.save(tmp_path)
        saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
        for name, p in policy.trainable().items():
            expected = exact.get_parameter(name).detach()
            assert p.dtype == (torch.float32 if p.ndim < 2 else torch.bfloat16)
            for master in (policy.masters()[name], saved[name].detach()):
                assert master.dtype == torch.float32
                torch.testing.assert_close(master, expected, rtol=0, atol=1e-8)
            assert torch.equal(p, policy.masters()[name].to(p.dtype))

    all_agree()
    for p in policy.trainable().values():
        p.grad = torch.ones_like(p)
    runtime.step()
    with torch.no_grad():
        for p in exact.parameters():
            p.sub_(1e-5)  # the first step of Adam has the size of the learning rate
    all_agree()


def test_load_trainable_sets_the_masters_and_rounds_the_weights(model_dir):
    policy = policy_module.load_policy(str(model_dir), torch.device("cpu"), torch.bfloat16, 1.0, offload_masters=True)
    others = {name: torch.randn(p.shape) for name, p in policy.trainable().items()}
    policy.load_trainable(others)
    for name, p in policy.trainable().items():
        assert torch.equal(policy.masters()[name], others[name])
        assert torch.equal(p, others[name].to(p.dtype))


def test_adapter_weights_stay_in_fp32(model_dir):
    policy = policy_module.load_policy(
        str(model_dir), torch.device("cpu"), torch.bfloat16, 1.0, lora_rank=2, offload_masters=True
    )
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert all(policy.masters()[name] is not p for name, p in policy.trainable().items())


# ---------------------------------------------------------------- empty prompts


def test_empty_prompt_is_refused_by_encode_and_collate():
    """Otherwise its response would be predicted from the end of the prompt before it."""
    policy = make_policy()
    for prompt in (Prompt("train/7/0", ""), Prompt("train/7/0", "", prefix="1 + 1 =")):
        with pytest.raises(UserError, match="prompt train/7/0: it is empty"):
            policy.encode(prompt)
    answers = (Completion((1, EOS), (-1.0, -1.0), "", True),) * 2
    groups = [Group(Prompt("a", "a"), (1, 2, 3), answers), Group(Prompt("b", ""), (), answers)]
    with pytest.raises(ValueError, match="a prompt without a token"):
        collate(groups)


def test_begin_token_makes_an_empty_prompt_valid():
    policy = make_policy()
    policy.tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    assert policy.encode(Prompt("p", "")) == (EOS,)
    assert policy.encode(Prompt("p", "", prefix="12")) == (EOS, 1, 2), "a prefix begins no text"


# ---------------------------------------------------------------- LoRA


@pytest.fixture
def lora():
    torch.manual_seed(0)
    model = tiny_llama()
    return Policy(model, character_tokenizer(), adapter=add_adapter(model, 4))


def test_lora_trains_the_adapter_and_nothing_else(lora):
    names = lora.trainable()
    assert names
    assert all("lora_" in name for name in names)


def test_adapter_scale_does_not_depend_on_the_rank():
    for rank in (1, 4):
        layers = [m for m in add_adapter(tiny_llama(), rank).modules() if hasattr(m, "lora_A")]
        assert {layer.scaling["default"] for layer in layers} == {2.0}


def test_the_reference_of_a_lora_policy_is_the_policy_without_its_adapter(lora, tmp_path):
    batch = batch_of(lora)
    start, states = lora.score(batch).logprobs.detach(), lora.compute_hidden_states(batch)[0].detach()
    with torch.no_grad():
        for p in lora.trainable().values():
            p.add_(0.3 * torch.randn_like(p))
    assert (lora.score(batch).logprobs - start).abs().max() > 1e-2
    torch.testing.assert_close(LoraReference(lora).score(batch).logprobs, start, rtol=0, atol=0)
    torch.testing.assert_close(LoraReference(lora).compute_hidden_states(batch)[0], states, rtol=0, atol=0)

    lora.save(tmp_path)
    merged = Policy(AutoModelForCausalLM.from_pretrained(tmp_path), character_tokenizer())
    torch.testing.assert_close(merged.score(batch).logprobs, lora.score(batch).logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(LoraReference(lora).score(batch).logprobs, start, rtol=0, atol=0)


def test_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r'^policy.lora needs peft: pip install "pellucid\[lora\]"$'):
        add_adapter(tiny_llama(), 2)


def test_the_base_of_a_lora_policy_does_not_move(lora):
    before = {name: p.clone() for name, p in lora.model.named_parameters()}
    batch = batch_of(lora)
    batch = replace(batch, advantages=batch.broadcast_to_tokens(torch.randn(len(batch), dtype=torch.float64)))
    update_policy(lora, batch, OneProcessRuntime(lora, lr=1.0), GRPOConfig())
    moved = {name for name, p in lora.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert moved <= lora.trainable().keys()


def test_a_checkpoint_of_another_model_is_refused(lora):
    own = dict(lora.trainable())
    name = next(iter(own))
    for tensors in (
        make_policy().trainable(),
        own | {"another": own[name]},
        {n: p for n, p in own.items() if n != name},
    ):
        with pytest.raises(UserError, match="made with another policy"):
            lora.load_trainable(tensors)


def test_a_response_may_be_a_single_token():
    policy = make_policy()
    group = Group(Prompt("p", "a"), (1, 2, 3), (Completion((EOS,), (-1.0,), "", True),) * 2)
    assert policy.score(collate([group])).logprobs.shape == (2, 1)


def test_end_token_of_an_answer_follows_the_chat_template():
    """The chat template's end token comes first, then the tokenizer's, then any other."""
    tokenizer = character_tokenizer()
    turn = tokenizer("k")["input_ids"][0]
    assert pick_end_token(tokenizer, (turn, EOS)) == EOS
    assert pick_end_token(tokenizer, (turn,)) == turn
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ 'j' if m.role == 'user' else 'k' }}{% endfor %}"
    of_question = tokenizer("j")["input_ids"][0]
    assert pick_end_token(tokenizer, (of_question, turn, EOS)) == turn
