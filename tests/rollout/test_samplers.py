"""Samplers: log-probs equal the scorer's, and completions are deterministic and independent of other rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from conftest import EOS, VOCAB, CountDigits, make_policy
from pellucid.algorithm.grpo import collate
from pellucid.models.sampling import Truncation, sample_tokens, truncate_masses
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling, UserError

SAMPLERS = {"native": NativeSampler, "hf": HuggingFaceSampler}


def sampled(policy, name="native", temperature=1.0, n=3, size=8, max_tokens=24):
    sampler = SAMPLERS[name]()
    sampler.sync(policy)
    return sampler.generate(CountDigits().sample(0, n), Sampling(size, temperature, max_tokens, seed="0/0"))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("name", ["native", "hf"])
def test_sampler_logprobs_equal_the_scorers(name, architecture, temperature):
    policy = make_policy(architecture, temperature=temperature)
    groups = sampled(policy, name, temperature)
    assert len({len(g.prompt_ids) for g in groups}) > 1, "prompts must need padding"
    assert len({len(c.token_ids) for g in groups for c in g.completions}) > 1, "completions must end at different times"
    batch = collate(groups)
    with torch.no_grad():
        gap = (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.response_mask].abs().max()
    assert gap < 1e-4


@pytest.mark.parametrize("name", ["native", "hf"])
def test_a_completion_ends_with_the_first_eos_or_at_the_limit(name):
    policy = make_policy()
    policy.eos_ids = (3, EOS)  # a checkpoint may name several
    completions = [c for g in sampled(policy, name, size=32) for c in g.completions]
    for c in completions:
        assert c.finished == (c.token_ids[-1] in policy.eos_ids)
        assert c.finished or len(c.token_ids) == 24
        assert not set(c.token_ids[:-1]) & set(policy.eos_ids)
        assert len(c.logprobs) == len(c.token_ids)
    assert {c.token_ids[-1] for c in completions if c.finished} == {3, EOS}
    assert not all(c.finished for c in completions)


def test_native_and_hf_agree_on_greedy_answers():
    policy = make_policy()
    native, hf = (sampled(policy, name, temperature=0.0, size=1) for name in ("native", "hf"))
    assert [g.completions[0].token_ids for g in native] == [g.completions[0].token_ids for g in hf]


def test_a_completion_does_not_depend_on_its_neighbors():
    policy = make_policy()
    sampler, sampling = NativeSampler(policy=policy), Sampling(8, max_tokens=24, seed="7/3")
    prompts = CountDigits().sample(0, 4)
    together = sampler.generate(prompts, sampling)
    alone = [sampler.generate([prompt], sampling)[0] for prompt in prompts]
    fewer = sampler.generate(prompts, replace(sampling, n=3))
    tokens = [[c.token_ids for c in g.completions] for g in together]
    assert [[c.token_ids for c in g.completions] for g in alone] == tokens
    assert [[c.token_ids for c in g.completions] for g in fewer] == [row[:3] for row in tokens]
    assert len({ids for row in tokens for ids in row}) > 20, "different rows draw different samples"
    other_step = sampler.generate(prompts, replace(sampling, seed="7/4"))
    assert [[c.token_ids for c in g.completions] for g in other_step] != tokens


@pytest.mark.slow
def test_samples_follow_the_exact_distribution_eos_included():
    """Chi-square of two-token completions against the product of exact conditionals."""
    policy = make_policy(seed=1)
    n = 20_000
    [group] = NativeSampler(policy=policy).generate([Prompt("p", "a?")], Sampling(n, max_tokens=2, seed="chi"))
    seen = Counter(c.token_ids for c in group.completions)

    def next_probs(ids):
        return policy.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)

    with torch.no_grad():
        first = next_probs(list(group.prompt_ids))
        expected = {(EOS,): float(first[EOS])}
        for a in range(VOCAB - 1):
            second = next_probs([*group.prompt_ids, a])
            expected |= {(a, b): float(first[a] * second[b]) for b in range(VOCAB)}
    assert abs(sum(expected.values()) - 1) < 1e-9
    assert expected[(EOS,)] > 1e-3, "stopping at once must be among the tested events"
    common = {ids: p * n for ids, p in expected.items() if p * n >= 5}
    rare = n - sum(common.values())
    statistic = sum((seen[ids] - e) ** 2 / e for ids, e in common.items())
    statistic += (n - sum(seen[ids] for ids in common) - rare) ** 2 / rare
    freedom = len(common)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_inverse_cdf_maps_each_token_to_its_interval():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]])
    at = {0.0: 1, 0.4999: 1, 0.5: 3, 0.7499: 3, 0.75: 4, 1 - 2**-53: 4}
    for uniform, token in at.items():
        drawn, logprob = sample_tokens(probs.log(), torch.tensor([uniform], dtype=torch.float64), 1.0)
        assert int(drawn) == token
        assert abs(float(logprob) - float(probs[0, token].log())) < 1e-6


def test_token_with_zero_probability_is_never_sampled():
    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 255, 256, 257, 49152):
        logits = torch.randn(64, vocab, generator=generator) * 10
        logits[:, vocab // 2 :] = -torch.inf if vocab > 1 else 0.0
        edges = torch.tensor([0.0, 1 - 2**-53] * 32, dtype=torch.float64)
        drawn, logprob = sample_tokens(logits, edges, 1.0)
        assert bool(logprob.isfinite().all())
        assert int(drawn.max()) < max(1, vocab // 2)


CUTS = {
    "top_k": Truncation(top_k=3),
    "top_k beyond the vocabulary": Truncation(top_k=10**6),
    "top_p": Truncation(top_p=0.8),
    "almost nothing of top_p": Truncation(top_p=1e-6),
    "min_p": Truncation(min_p=0.1),
    "all three": Truncation(top_k=20, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("name", CUTS)
def test_truncation_equals_that_of_transformers(name):
    by = CUTS[name]
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TopPLogitsWarper(by.top_p)])
    if by.top_k:
        warpers.insert(0, TopKLogitsWarper(by.top_k))
    if by.min_p:
        warpers.append(MinPLogitsWarper(by.min_p))
    expected = warpers(torch.zeros(64, 0, dtype=torch.long), logits).softmax(-1)
    masses = truncate_masses(logits.exp(), by)
    torch.testing.assert_close(masses / masses.sum(-1, keepdim=True), expected)
    assert by.top_k > 300 or bool((expected == 0).any())


def test_truncated_sampling_reports_untruncated_logprobs():
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).expand(1001, -1)
    uniforms = torch.arange(1001, dtype=torch.float64) / 1001
    drawn, logprob = sample_tokens(probs.log(), uniforms, 1.0, Truncation(top_k=2))
    assert drawn.bincount(minlength=4).tolist() == [0, 668, 0, 333]  # 2/3 and 1/3 of the unit interval
    torch.testing.assert_close(logprob, probs.log().gather(-1, drawn[:, None])[:, 0])


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_apply_truncation(name):
    """With top_p = 1e-6 only the likeliest token is left, so sampling equals greedy decoding."""
    policy = make_policy("llama")
    greedy, cut = ({"temperature": 0.0}, {"temperature": 1.5, "top_p": 1e-6})
    samples = []
    for settings in (greedy, cut):
        sampler = SAMPLERS[name]()
        sampler.sync(policy)
        samples.append(sampler.generate(CountDigits().sample(0, 3), Sampling(2, max_tokens=8, **settings)))
    assert [[c.token_ids for c in g.completions] for g in samples[0]] == [
        [c.token_ids for c in g.completions] for g in samples[1]
    ]


def test_logprobs_are_computed_at_the_sampling_temperature():
    logits = torch.tensor([[0.0, 2.0]])
    cold = float(sample_tokens(logits, torch.tensor([0.5], dtype=torch.float64), 0.5)[1])
    assert abs(cold - float(torch.tensor([0.0, 4.0]).log_softmax(-1)[1])) < 1e-6


def test_sampling_leaves_the_policy_unchanged():
    policy = make_policy(dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in policy.trainable().items()}
    own = policy.model.generation_config
    for name in SAMPLERS:
        sampled(policy, name)
    assert policy.model.generation_config is own
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in policy.trainable().items())


def test_sampler_uses_the_new_weights_after_a_sync():
    policy = make_policy(dtype=torch.bfloat16)
    sampler, sampling = NativeSampler(policy=policy), Sampling(4, max_tokens=4, seed="s")
    prompts = CountDigits().sample(0, 2)
    before = sampler.generate(prompts, sampling)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.mul_(1.5)
    sampler.sync(policy)
    fresh = NativeSampler(policy=replace_policy(policy))
    assert sampler.generate(prompts, sampling) == fresh.generate(prompts, sampling) != before


def replace_policy(policy):
    other = make_policy(dtype=torch.bfloat16, seed=99)
    other.load_trainable(policy.trainable())
    return other


def test_rotary_frequencies_keep_their_precision_in_the_sampling_copy():
    policy = make_policy(dtype=torch.bfloat16)
    copy = policy.get_inference_model()
    assert {b.dtype for b in copy.buffers()} == {b.dtype for b in policy.model.buffers()} == {torch.float32}
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}


def test_prompt_too_long_for_the_context_raises_user_error():
    with pytest.raises(UserError, match="shorten the prompts"):
        NativeSampler(policy=make_policy()).generate([Prompt("p", "1" * 60)], Sampling(2, max_tokens=100))


@pytest.mark.parametrize(
    ("cut", "masked"), [({}, False), ({"top_k": 2}, True), ({"top_p": 0.5}, True), ({"min_p": 0.1}, True)]
)
def test_sampling_does_not_depend_on_earlier_calls(cut, masked):
    """One sampler alternates between greedy and other sampling, with and without truncation."""
    sampler, prompts = NativeSampler(policy=make_policy()), CountDigits().sample(0, 2)
    sampling = Sampling(3, 0.9, 6, seed="s", **cut)
    first = sampler.generate(prompts, sampling)
    [[greedy], _] = (group.completions for group in sampler.generate(prompts, Sampling(temperature=0.0, max_tokens=6)))
    assert sampler.generate(prompts, sampling) == first
    assert bool(first[0].completions[0].sampling_mask) == masked == sampling.truncates
    assert not greedy.sampling_mask
