"""Tests of LoRA in the decoder against peft on the model of transformers."""

from __future__ import annotations

from itertools import pairwise

import peft
import pytest
import torch
from torch import nn

from architectures import adapted, batch_of, model_of, plain_logprobs, sequences
from conftest import CountDigits, character_tokenizer, mostly_slow, products_know_no_neighbors
from pellucid.algorithm.batch import collate
from pellucid.models import linear
from pellucid.models.decoder import Decoder, project
from pellucid.models.linear import GEMM_BLOCK, AdaptedMatrix
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import LoraReference, Policy
from pellucid.rollout.native import NativeSampler
from pellucid.types import Sampling

BF16 = torch.bfloat16
FAMILIES = ("llama", "qwen2", "qwen3", "llama, biases everywhere", "mistral, a window")
TARGETS = {
    "all": {"target_modules": "all-linear"},
    "q v": {"target_modules": ["q_proj", "v_proj"]},
    "k o up": {"target_modules": ["k_proj", "o_proj", "up_proj"]},
    "down": {"target_modules": ["down_proj"]},
    "ranks": {"target_modules": "all-linear", "rank_pattern": {"k_proj": 2, "gate_proj": 40}},
    "scales": {"target_modules": "all-linear", "alpha_pattern": {"v_proj": 3, "up_proj": 1}, "use_rslora": True},
}
CASES = [(family, targets) for family in FAMILIES for targets in TARGETS]


def scatter(model):
    """Set all weights of an adapter to random numbers: B is 0 at first.

    With numbers twice as large, fp32 rounds some gradients by more than 1e-5 of their norm, in peft as well.
    """
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.05 * torch.randn_like(p))


def policy_of(family, targets="all", **how):
    model = model_of(family)
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=7, **TARGETS[targets]))
    scatter(model)
    return Policy(model, character_tokenizer(), adapter=adapter, **how)


def plain_entropy(model, batch):
    """Return the entropies [N] from all logits, computed row by row."""
    rows = [model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1) for ids, start in sequences(batch)]
    return torch.cat([-(log_probs.exp() * log_probs).sum(-1) for log_probs in rows])


@pytest.mark.parametrize(("family", "targets"), mostly_slow(CASES, every=4))
@pytest.mark.parametrize("sharded", [False, True])
def test_scores_and_gradients_match_peft(family, targets, sharded):
    """In fp32, with whole weights and with weights that are gathered for each layer."""
    policy, batch = policy_of(family, targets), batch_of()
    assert policy.decoder, policy.find_fallback_reason()
    expected = plain_logprobs(policy.model, batch)
    weights = torch.randn(len(expected))
    (expected * weights).sum().backward()
    gradients = {name: p.grad for name, p in policy.trainable().items()}
    policy.model.zero_grad()

    if sharded:
        policy.decoder.disable_cast_copies()
    scores = policy.score(batch)
    torch.testing.assert_close(scores.logprobs[batch.response_mask], expected, rtol=0, atol=1e-5)
    entropy = plain_entropy(policy.model, batch).detach()
    torch.testing.assert_close(scores.entropy[batch.response_mask], entropy, rtol=0, atol=1e-5)
    (scores.logprobs[batch.response_mask] * weights).sum().backward()
    assert {name for name, p in policy.model.named_parameters() if p.grad is not None} == gradients.keys()
    for name, p in policy.trainable().items():
        assert (p.grad - gradients[name]).norm() < 1e-5 * gradients[name].norm(), name


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, every=5))
def test_recomputing_layers_changes_no_bit_of_a_gradient(family):
    found = []
    for recompute in (False, True):
        policy = policy_of(family, gradient_checkpointing=recompute)
        policy.score(batch_of()).logprobs.square().sum().backward()
        found.append([p.grad for p in policy.trainable().values()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(("family", "targets"), mostly_slow(CASES, every=7))
def test_sampled_log_probs_match_peft(family, targets):
    policy = policy_of(family, targets)
    groups = NativeSampler(8, policy).generate(CountDigits().sample(0, 3), Sampling(3, max_tokens=12, seed="0"))
    batch = collate(groups)
    with torch.no_grad():
        expected = plain_logprobs(policy.model, batch)
    torch.testing.assert_close(batch.sampler_logprobs[batch.response_mask].float(), expected, rtol=1e-5, atol=1e-5)


def test_disabled_or_merged_adapter_adds_nothing():
    """It adds nothing to scores, to sampled log-probs, and to the scores of a reference."""
    policy, batch = policy_of("qwen2"), batch_of()
    plain = Policy(model_of("qwen2"), character_tokenizer())
    asked, sampling = CountDigits().sample(0, 3), Sampling(3, max_tokens=8, seed="0")

    def found(policy):
        groups = NativeSampler(8, policy).generate(asked, sampling)
        return policy.score(batch).logprobs.detach(), collate(groups).sampler_logprobs

    base, whole = found(plain), found(policy)
    assert (whole[0] - base[0]).abs().max() > 0.1
    with policy.adapter.disable_adapter():
        for ours, theirs in zip(found(policy), base, strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(LoraReference(policy).score(batch).logprobs, base[0])
    for ours, theirs in zip(found(policy), whole, strict=True):
        assert torch.equal(ours, theirs)
    policy.adapter.merge_adapter()
    torch.testing.assert_close(policy.score(batch).logprobs, whole[0], rtol=0, atol=1e-4)
    policy.adapter.unmerge_adapter()
    torch.testing.assert_close(policy.score(batch).logprobs, whole[0], rtol=0, atol=1e-4)


def test_next_pass_uses_weights_of_the_optimizer_step():
    """Fused optimizers change parameters without a new version."""
    policy, batch = policy_of("llama"), batch_of()
    before = policy.score(batch).logprobs
    before.sum().backward()
    torch.optim.AdamW(policy.trainable().values(), lr=0.1, fused=True).step()
    after = policy.score(batch).logprobs.detach()
    assert (after - before).abs().max() > 0.1
    with torch.no_grad():
        expected = plain_logprobs(policy.model, batch)
    torch.testing.assert_close(after[batch.response_mask], expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize(
    "family", mostly_slow(("llama", "qwen2.5, heads of 64", "qwen3", "llama, heads of 64"), every=2)
)
def test_bf16_scorer_with_an_adapter_matches_the_sampler_bit_for_bit(family):
    """Only the last sum over the vocabulary differs, as without an adapter."""
    policy = adapted(family, BF16)
    assert policy.decoder
    groups = NativeSampler(16, policy).generate(CountDigits().sample(0, 4), Sampling(8, max_tokens=24, seed="0/0"))
    for some in (groups, *([group] for group in groups)):
        batch = collate(some)
        gap = (policy.score(batch).logprobs.detach() - batch.sampler_logprobs)[batch.response_mask].abs()
        assert gap.mean() < 0.02
        if products_know_no_neighbors():
            assert gap.max() < 5e-6


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("family", mostly_slow(("llama", "qwen2", "llama, heads of 64"), every=3))
def test_half_precision_is_about_as_close_to_fp32_as_transformers(family, dtype):
    """This compares mean errors of log-probs and adapter gradients to fp32 with the same rounded weights."""
    batch, found = batch_of(), []
    for how in (torch.float32, dtype, "transformers"):
        narrow = adapted(family, dtype)
        model = narrow.model.float() if how == torch.float32 else narrow.model
        engine = "transformers" if how == "transformers" else "auto"
        policy = Policy(model, character_tokenizer(), how if how == torch.float32 else dtype, engine=engine)
        logprobs = policy.score(batch).logprobs[batch.response_mask]
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients = torch.cat([p.grad.float().flatten() for p in policy.trainable().values()])
        found.append((logprobs.detach().float(), gradients))
    exact, ours, theirs = found
    for i in range(2):
        assert 0 < (ours[i] - exact[i]).abs().mean() < 1.3 * (theirs[i] - exact[i]).abs().mean()


def test_scale_is_multiplied_before_b_is_rounded():
    """bf16 cannot represent the scale, 7 / 3."""
    layer = nn.Linear(32, 64, bias=False).to(BF16)
    wrapped = peft.get_peft_model(nn.Sequential(layer), peft.LoraConfig(r=3, lora_alpha=7, target_modules=["0"]))
    scatter(wrapped)
    [part] = [m for m in wrapped.modules() if hasattr(m, "lora_A")]
    adapter = linear.CastAdapter([part], BF16).get_adapter(is_uncached=False)
    a, b = (getattr(part, name)["default"].weight for name in ("lora_A", "lora_B"))
    assert adapter.a.shape == (GEMM_BLOCK, 32) and not adapter.a[3:].any()
    assert torch.equal(adapter.a[:3], a.to(BF16))
    assert torch.equal(adapter.b[:, :3], (b.float() * (7 / 3)).to(BF16))
    assert not torch.equal(adapter.b[:, :3], b.to(BF16) * (7 / 3))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_projection_matches_the_merged_matrix(rows, dtype):
    """The matrix joins several layers. Some have an adapter, and their ranks differ."""
    layers = nn.ModuleList(nn.Linear(64, n, bias=False) for n in (32, 96, 64)).to(dtype)
    config = peft.LoraConfig(r=5, target_modules=["0", "2"], rank_pattern={"2": 9}, lora_alpha=4)
    wrapped = peft.get_peft_model(layers, config)
    scatter(wrapped)
    parts = list(layers)
    weights = linear.CastWeights(
        [(getattr(x, "base_layer", x), "weight") for x in parts], dtype, linear.CastAdapter(parts, dtype)
    )
    x = torch.randn(rows, 64, dtype=dtype)
    found = weights.get_weights()
    assert isinstance(found, AdaptedMatrix)
    y = project(x, found)
    whole = torch.cat([p.weight + p.get_delta_weight("default") if hasattr(p, "lora_A") else p.weight for p in parts])
    expected = x.double() @ whole.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert torch.equal(project(x, weights.get_weights()), y)


# ---------------------------------------------------------------- memory


def test_base_weights_are_in_memory_once():
    """Joined matrices replace their parts. Nothing else of the size of a matrix is kept."""
    policy = adapted("llama", BF16)
    policy.score(batch_of())
    weights = policy.decoder.list_cast_weights()
    copies = {part.cast_copy.untyped_storage().data_ptr() for part in weights if part.cast_copy is not None}
    frozen = [p for name, p in policy.model.named_parameters() if "_proj" in name and "lora_" not in name]
    joined = [p for p in frozen if p.untyped_storage().data_ptr() in copies]
    assert len(joined) == 2 * 5  # q, k, v, gate and up of two layers
    for first, second in pairwise(joined):
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() or (
            first.data_ptr() + first.numel() * first.element_size() <= second.data_ptr()
        )


def test_inputs_of_untrained_matrices_are_not_kept():
    kept = []
    policy, batch = policy_of("llama", "down"), batch_of()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        policy.score(batch).logprobs.sum()
    tokens = max(len(x) for x in kept if x.ndim == 2 and x.shape[1] == 48)
    assert [x.shape[1] for x in kept if x.ndim == 2 and len(x) == tokens].count(48) == 2, "of two layers, of down alone"


@pytest.mark.parametrize("trained", [False, True])
def test_gathered_matrices_keep_their_input_only_if_trained(trained):
    x, kept = torch.randn(5, 8, requires_grad=True), []
    parts = [nn.Parameter(torch.randn(n, 8), requires_grad=trained) for n in (4, 6)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = linear.JoinedLinear.apply(x, None, *parts)
    assert (x.shape in kept) == trained
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.cat(parts).sum(0).expand(5, -1).detach())
    assert all((p.grad is not None) == trained for p in parts)


# ---------------------------------------------------------------- fallbacks to transformers


REFUSED = {
    "an adapter of embed_tokens": {"target_modules": ["embed_tokens", "q_proj"]},
    "an adapter that is not plain LoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "an adapter with biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "weights that are trained beside an adapter": {"target_modules": ["q_proj"], "bias": "all"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_adapters_use_transformers_and_give_a_reason(reason):
    model = model_of("llama, biases")
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, **REFUSED[reason]))
    policy = Policy(model, character_tokenizer(), adapter=adapter)
    assert policy.find_fallback_reason() == reason
    assert policy.decoder is None


def test_two_adapters_have_a_fallback_reason():
    model = model_of("llama")
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapter.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert Policy(model, character_tokenizer(), adapter=adapter).find_fallback_reason() == "several adapters"


def test_adapters_of_our_settings_use_the_decoder():
    for targets in ((), ("q_proj",), ("gate_proj", "o_proj")):
        model = model_of("llama")
        policy = Policy(model, character_tokenizer(), adapter=add_adapter(model, 2, targets=targets))
        assert isinstance(policy.decoder, Decoder)
        assert policy.decoder.is_adapted
