"""Tests for training with top-k, top-p and min-p: every stage uses only the tokens that sampling kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from conftest import VOCAB, CountDigits, OneProcessRuntime, make_policy
from pellucid.algorithm.batch import collate, concat_batches
from pellucid.algorithm.grpo import add_old_and_reference_logprobs, compute_loss, compute_token_weights
from pellucid.algorithm.sampling_mask import SamplingMask, collate_masks, count_bitmap_words, pack_masks
from pellucid.algorithm.settings import GRPOConfig
from pellucid.models.sampling import Truncation, sample_tokens_with_mask, truncate_masses
from pellucid.policy import logprobs
from pellucid.policy.load import add_adapter
from pellucid.policy.logprobs import LMHead, compute_token_logprobs
from pellucid.policy.policy import LoraReference
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import Completion, Group, Prompt, Sampling
from runs import same_run, train

SAMPLERS = {"native": NativeSampler, "hf": HuggingFaceSampler}
CUTS = {"top_k": {"top_k": 4}, "top_p": {"top_p": 0.7}, "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.05}}


def drawn(policy, truncation=CUTS["top_p"], sampler=NativeSampler, temperature=1.0, prompts=3):
    samples = sampler()
    samples.sync(policy)
    return samples.generate(CountDigits().sample(0, prompts), Sampling(4, temperature, 9, seed="s", **truncation))


# ---------------------------------------------------------------- masks


def random_masks(n, vocabulary):
    """Return masks that keep one token, all tokens, and every share in between."""
    kept = torch.rand(n, vocabulary) < torch.linspace(0, 1, n)[:, None]
    kept[torch.arange(n), torch.randint(vocabulary, (n,))] = True
    return kept


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100, 1000])
def test_packed_mask_unpacks_to_the_ids_of_its_tokens(vocabulary):
    kept = random_masks(23, vocabulary)
    rows = pack_masks(kept)
    words, spans = collate_masks([rows[:5], rows[5:6], rows[6:]])
    there = torch.tensor([[i < n for i in range(17)] for n in (5, 1, 17)])
    ids, present = SamplingMask(words, spans[there]).unpack_ids(vocabulary)
    assert [row[p].tolist() for row, p in zip(ids, present, strict=True)] == [
        row.nonzero()[:, 0].tolist() for row in kept
    ]
    assert present.shape[1] == int(kept.sum(-1).max())


def test_masks_are_packed_as_ids_if_few_and_as_bits_if_many():
    kept = torch.zeros(4, 320, dtype=torch.bool)
    for row, n in enumerate((1, 9, 10, 320)):
        kept[row, :n] = True
    assert count_bitmap_words(320) == 10
    assert [len(words) for words in pack_masks(kept)] == [1, 9, 10, 10]


def test_masks_can_be_unpacked_for_selected_tokens_only():
    kept = random_masks(9, 50)
    words, spans = collate_masks([pack_masks(kept)])
    ids, present = SamplingMask(words, spans[0]).select_tokens(torch.tensor([7, 2])).unpack_ids(50)
    assert [row[p].tolist() for row, p in zip(ids, present, strict=True)] == [
        kept[row].nonzero()[:, 0].tolist() for row in (7, 2)
    ]


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_on_a_large_vocabulary_matches_a_full_sort(top_p, spread):
    masses = (spread * torch.randn(20, 5000)).exp() * torch.rand(20, 1) * 100
    ordered, order = masses.double().sort(descending=True)
    inside = ordered.cumsum(-1) - ordered < top_p * ordered.sum(-1, keepdim=True)
    expected = torch.zeros_like(inside).scatter(-1, order, inside)
    found = truncate_masses(masses, Truncation(top_p=top_p)) > 0
    # One token may differ if the sum reaches top_p within the rounding of fp32.
    assert int((found != expected).sum(-1).max()) <= 1
    assert float((found != expected).any(-1).float().mean()) <= 0.1


def test_top_p_keeps_all_tokens_of_equal_mass():
    assert bool((truncate_masses(torch.ones(3, 5000), Truncation(top_p=0.5)) == 1).all())


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize("cut", CUTS)
def test_sampled_logprobs_are_normalized_over_the_kept_tokens(cut):
    logits, by = 3 * torch.randn(200, 70), Truncation(**CUTS[cut])
    warpers = LogitsProcessorList([TopPLogitsWarper(by.top_p)])
    if by.top_k:
        warpers.insert(0, TopKLogitsWarper(by.top_k))
    if by.min_p:
        warpers.append(MinPLogitsWarper(by.min_p))
    expected = warpers(torch.zeros(200, 0, dtype=torch.long), logits / 0.7).log_softmax(-1)
    tokens, found, kept = sample_tokens_with_mask(logits, torch.rand(200, dtype=torch.float64), 0.7, by)
    torch.testing.assert_close(found, expected.gather(-1, tokens[:, None])[:, 0])
    assert torch.equal(kept, expected.isfinite())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_scorer_and_sampler_agree_only_with_the_mask(sampler, architecture, cut):
    policy = make_policy(architecture, temperature=1.3)
    batch = collate(drawn(policy, CUTS[cut], SAMPLERS[sampler], 1.3))
    ours = policy.score(batch).logprobs.detach()
    torch.testing.assert_close(
        ours[batch.response_mask], batch.sampler_logprobs[batch.response_mask], rtol=0, atol=2e-5
    )
    whole = policy.score(replace(batch, sampling_mask_words=None, sampling_mask_spans=None)).logprobs.detach()
    assert float((whole - batch.sampler_logprobs)[batch.response_mask].abs().mean()) > 0.05


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_full_and_greedy_sampling_store_no_mask(sampler):
    for settings in ({}, {"temperature": 0.0, **CUTS["top_p"]}):
        samples = SAMPLERS[sampler]()
        samples.sync(make_policy())
        groups = samples.generate(CountDigits().sample(0, 1), Sampling(2, max_tokens=3, **settings))
        assert collate(groups).get_sampling_mask(torch.device("cpu")) is None


def test_an_empty_completion_does_not_hide_the_masks_of_its_siblings():
    kept = torch.tensor([[True, False, True], [False, True, False]])
    empty = Completion((), (), "", False)
    masked = Completion((0, 1), (-0.1, -0.2), "", True, tuple(pack_masks(kept)))
    for completions in ((empty, masked), (masked, empty)):
        batch = collate([Group(Prompt("p", "?"), (1,), completions)])
        ids, present = batch.get_sampling_mask(torch.device("cpu")).unpack_ids(3)
        assert [row[p].tolist() for row, p in zip(ids, present, strict=True)] == [[0, 2], [1]]


# ---------------------------------------------------------------- scoring


@pytest.fixture
def inputs():
    hidden, ref_hidden = (torch.randn(13, size, dtype=torch.float64).requires_grad_() for size in (8, 6))
    weight, ref_weight = (torch.randn(29, size, dtype=torch.float64).requires_grad_() for size in (8, 6))
    kept = random_masks(13, 29)
    tokens = torch.multinomial(kept.float(), 1)[:, 0]
    return hidden, weight, ref_hidden, ref_weight, kept, tokens


@pytest.mark.parametrize("tokens_at_once", [1, 4, 100])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.7, 0.5, 0.0), (1.3, 0.5, 2.0)])
def test_logprobs_entropy_and_kl_match_autograd_over_kept_tokens(
    monkeypatch, inputs, tokens_at_once, temperature, scale, softcap
):
    """The second implementation uses all logits, masks those that were cut off, and takes torch's own gradients."""
    monkeypatch.setattr(logprobs, "MAX_MATMUL_LOGITS", 29 * tokens_at_once)
    monkeypatch.setattr(logprobs, "MAX_ELEMENTWISE_LOGITS", 29 * max(1, tokens_at_once // 2))
    hidden, weight, ref_hidden, ref_weight, kept, tokens = inputs
    bias, ref_bias = (torch.randn(29, dtype=torch.float64).requires_grad_() for _ in range(2))
    words, spans = collate_masks([pack_masks(kept)])

    def distribution(hidden, weight, bias):
        logits = (hidden @ weight.T + bias) * scale
        logits = (softcap * (logits / softcap).tanh() if softcap else logits) / temperature
        return torch.distributions.Categorical(logits=logits.masked_fill(~kept, -1e300))

    theirs, other = distribution(hidden, weight, bias), distribution(ref_hidden, ref_weight, ref_bias).logits.detach()
    kl = (theirs.probs * (theirs.logits - other)).masked_fill(~kept, 0.0).sum(-1)
    entropy = -(theirs.probs * theirs.logits).masked_fill(~kept, 0.0).sum(-1)
    ours = compute_token_logprobs(
        hidden,
        LMHead(weight, weight, bias, scale, softcap),
        tokens,
        temperature,
        entropy_grad=True,
        reference=(ref_hidden, LMHead(ref_weight, ref_weight, ref_bias, scale, softcap)),
        sampling_mask=SamplingMask(words, spans[0]),
    )
    upstream = torch.randn(3, 13, dtype=torch.float64)
    leaves, gradients = (hidden, weight, bias), []
    for found in (ours, (theirs.log_prob(tokens), entropy, kl)):
        gradients.append(torch.autograd.grad((torch.stack(found) * upstream).sum(), leaves))
    for mine, expected in zip(ours, (theirs.log_prob(tokens), entropy, kl), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_expected_gradient_matches_the_truncated_policy():
    """Weight every possible first token by its probability and compare with autograd of the expected reward."""
    policy = make_policy("gpt2", dtype=torch.float64)
    prompt_ids, rewards = (5, 11, 3, 7), torch.randn(VOCAB, dtype=torch.float64)
    logits = policy.model(torch.tensor([prompt_ids])).logits[0, -1]
    with torch.no_grad():
        kept = truncate_masses(logits.softmax(-1)[None], Truncation(top_p=0.8))[0] > 0
    every = kept.nonzero()[:, 0].tolist()
    assert 1 < len(every) < VOCAB - 5
    truncated_policy = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    exact = torch.autograd.grad((truncated_policy * rewards).sum(), list(policy.trainable().values()))

    chances = truncated_policy.detach()[every]
    completions = [
        Completion((a,), (float(chances[i].log()),), "", True, pack_masks(kept[None])) for i, a in enumerate(every)
    ]
    batch = collate([Group(Prompt("p", "p"), prompt_ids, tuple(completions))])
    cfg = GRPOConfig(group_size=len(every), aggregate="constant", constant_length=1)
    batch = replace(
        batch,
        advantages=batch.broadcast_to_tokens(rewards[every]),
        token_weights=chances[:, None] * batch.response_mask,
    )
    loss, metrics = compute_loss(policy.score(batch), batch, cfg)
    found = torch.autograd.grad(-loss, list(policy.trainable().values()))
    assert max(float(x.abs().max()) for x in exact) > 1e-2
    for mine, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(metrics["entropy"], -(chances * chances.log()).sum().expand(len(every)))

    of_the_whole = replace(batch, sampling_mask_words=None, sampling_mask_spans=None)
    wrong = torch.autograd.grad(
        -compute_loss(policy.score(of_the_whole), of_the_whole, cfg)[0], list(policy.trainable().values())
    )
    assert max(float((x - y).abs().max()) for x, y in zip(wrong, exact, strict=True)) > 1e-2


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "exact"])
@pytest.mark.parametrize("reference", ["frozen", "adapter off"])
def test_ratio_is_one_and_kl_is_zero_at_equal_weights(reference, kl):
    policy, other = make_policy(temperature=0.8), make_policy(temperature=0.8)
    if reference == "adapter off":
        policy.adapter = add_adapter(policy.model, 2)
        other = LoraReference(policy)
    if kl == "exact":
        policy.set_kl_reference(other)
    cfg = GRPOConfig(group_size=4, kl=kl, kl_in="loss", kl_coef=0.1, epochs=2)
    runtime = OneProcessRuntime(policy)
    batch = collate(drawn(policy, temperature=0.8))
    batch = add_old_and_reference_logprobs(batch, policy, other, runtime, cfg)
    batch = replace(
        batch,
        advantages=batch.broadcast_to_tokens(torch.randn(len(batch))),
        token_weights=compute_token_weights(batch, runtime, cfg),
    )
    _, metrics = compute_loss(policy.score(batch), batch, cfg)
    for name in ("kl", "sampler/gap_mean"):
        assert float(metrics[name].detach().abs().max()) < 2e-5, name
    assert torch.equal(policy.score(batch).logprobs.detach(), batch.old_logprobs)
    if kl != "exact":
        torch.testing.assert_close(
            batch.ref_logprobs[batch.response_mask], batch.old_logprobs[batch.response_mask], rtol=0, atol=1e-6
        )
        whole = other.score(replace(batch, sampling_mask_words=None, sampling_mask_spans=None)).logprobs.detach()
        assert float((batch.ref_logprobs - whole)[batch.response_mask].abs().mean()) > 0.05


# ---------------------------------------------------------------- batches and runs


def test_rows_of_a_batch_and_joined_batches_keep_their_masks():
    policy = make_policy()
    groups = drawn(policy, prompts=5)
    whole, score = collate(groups), lambda batch: policy.score(batch).logprobs.detach()[batch.response_mask]
    parts = [collate(groups[:2]), collate(groups[2:])]
    joined = concat_batches(parts)
    assert torch.equal(score(joined), score(whole))
    chosen = torch.tensor([1, 6, 7, 19])
    expected = policy.score(whole).logprobs.detach()[chosen][whole.response_mask[chosen]]
    torch.testing.assert_close(score(joined.select_rows(chosen)), expected)
    pieces = torch.cat([score(piece) for piece in joined.split_into_chunks(3)])
    torch.testing.assert_close(pieces, score(whole))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resumed_top_p_run_with_replay_is_bitwise_identical(recipe, tmp_path, sampler):
    settings = ["--sampler.top_p", 0.8, "--sampler.name", sampler, "--algorithm.max_staleness", 2]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    settings += ["--optimizer.schedule", "constant"]
    assert train(recipe, "--run", whole, *settings, "--algorithm.steps", 4) == 0
    assert train(recipe, "--run", halves, *settings, "--algorithm.steps", 2) == 0
    assert train("--resume", halves, "--algorithm.steps", 4) == 0
    same_run(whole, halves)


@pytest.mark.parametrize(
    "setting", [("top_k", -1), ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1)], ids=str
)
@pytest.mark.parametrize("section", ["sampler", "evaluate"])
def test_invalid_truncation_settings_exit_with_one_line(recipe, capsys, section, setting):
    name, value = setting
    recipe.write_text(recipe.read_text().replace(f"[{section}]", f"[{section}]\n{name} = {value}"))
    assert train(recipe) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{section}.{name}: " in line
    assert f"(got {value})" in line
