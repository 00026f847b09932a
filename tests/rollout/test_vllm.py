"""vLLM in this process: its log-probs equal the scorer's, and it samples from the pushed weights."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import digits_task
from conftest import EOS, VOCAB, CountDigits, character_tokenizer, records
from pellucid.algorithm.batch import collate
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.policy.load import add_adapter
from pellucid.policy.policy import Policy
from pellucid.rollout import vllm
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.vllm import VLLMSampler
from pellucid.types import Sampling, UserError
from runs import same_run, train
from sampler_process import gap_of, gaps_of, tiny_policy
from worlds import asked

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SAMPLING = Sampling(4, max_tokens=24, seed="0/0")


policy_of = partial(tiny_policy, layers=3)


def synced(policy, world=None):
    sampler = VLLMSampler(rows=16, cache_gb=0.1, environments=world)
    sampler.sync(policy, 3)
    return sampler


@pytest.fixture(scope="module")
def sampler():
    """Return the sampler of an fp32 policy. Tests that change the policy or its weights sync again."""
    return synced(policy_of())


@pytest.fixture(autouse=True)
def _as_it_was(sampler):
    sampler.sync(policy_of(), 3)


def step(policy, by):
    """Move every weight up or down by the same amount, as an optimizer's first step does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).sign(), alpha=by)


def tokens_of(groups):
    return [c.token_ids for group in groups for c in group.completions]


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_scorers_up_to_rounding(sampler, dtype, gap, temperature):
    policy = policy_of(dtype, temperature)
    own = sampler if dtype == torch.float32 else synced(policy)
    own.sync(policy, 5)
    groups = own.generate(CountDigits().sample(0, 4), Sampling(4, temperature, max_tokens=24, seed="0/0"))
    assert gaps_of(policy, groups).mean() < gap
    assert {c.version for group in groups for c in group.completions} == {5}


def test_an_untied_head_is_pushed_and_read_back(sampler):
    policy = policy_of(tied=False)
    own = synced(policy)
    step(policy, 1e-3)
    own.sync(policy, 4)
    assert gap_of(policy, own.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4
    assert {name: len(own.engine.locate_weight(name)) for name in ("model.embed_tokens.weight", "lm_head.weight")} == {
        "model.embed_tokens.weight": 1,
        "lm_head.weight": 1,
    }
    assert len(sampler.engine.locate_weight("model.embed_tokens.weight")) == 2


def test_completions_end_with_the_end_of_sequence_token_or_at_the_limit(sampler):
    groups = sampler.generate(CountDigits().sample(0, 6), Sampling(8, max_tokens=24, seed="0/0"))
    completions = [c for group in groups for c in group.completions]
    assert {c.finished for c in completions} == {True, False}
    for c in completions:
        assert c.finished == (c.token_ids[-1] == EOS)
        assert EOS not in c.token_ids[:-1]
        assert c.finished or len(c.token_ids) == 24


def test_every_end_of_sequence_token_of_the_policy_ends_a_row(sampler):
    sampler.engine.eos_ids = [EOS, 3]
    sampler.policy.eos_ids = (3, EOS)
    completions = [c for g in sampler.generate(CountDigits().sample(0, 6), SAMPLING) for c in g.completions]
    sampler.engine.eos_ids = [EOS]
    assert {c.token_ids[-1] for c in completions if c.finished} == {EOS, 3}
    assert all(not {EOS, 3} & set(c.token_ids[:-1]) for c in completions)


def test_greedy_answers_equal_those_of_the_native_sampler(sampler):
    native, policy = NativeSampler(16), sampler.policy
    native.sync(policy)
    greedy = Sampling(1, temperature=0.0, max_tokens=24)
    prompts = CountDigits().sample(0, 8)
    ours, theirs = native.generate(prompts, greedy), sampler.generate(prompts, greedy)
    assert tokens_of(ours) == tokens_of(theirs)
    assert [g.prompt_ids for g in ours] == [g.prompt_ids for g in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.completions[0].logprobs == pytest.approx(b.completions[0].logprobs, abs=1e-4)


def test_samples_depend_on_the_seed_and_not_on_other_rows(sampler):
    prompts = CountDigits().sample(0, 6)
    together = sampler.generate(prompts, SAMPLING)
    assert tokens_of(sampler.generate(prompts, SAMPLING)) == tokens_of(together)
    alone = [group for prompt in prompts for group in sampler.generate([prompt], SAMPLING)]
    assert tokens_of(alone) == tokens_of(together)
    other = sampler.generate(prompts, Sampling(4, max_tokens=24, seed="0/1"))
    assert tokens_of(other) != tokens_of(together)
    assert len(set(tokens_of(together))) > 20


def test_sample_frequencies_match_their_probabilities(sampler):
    """Chi-square test of the first token of one prompt against the reported log-probs."""
    [prompt], n = CountDigits().sample(0, 1), 4000
    groups = sampler.generate([prompt], Sampling(n, max_tokens=1, seed="0/0"))
    completions = groups[0].completions
    likely = torch.tensor([[c.token_ids[0], c.logprobs[0]] for c in completions]).unique(dim=0)
    ids, chances = likely[:, 0].long(), likely[:, 1].exp().double()
    counts = torch.tensor([c.token_ids[0] for c in completions]).bincount(minlength=VOCAB)[ids]
    often = n * chances > 5
    expected = torch.cat([n * chances[often], (n - n * chances[often].sum())[None]])
    seen = torch.cat([counts[often], (n - counts[often].sum())[None]])
    chi = ((seen - expected).square() / expected.clamp(min=1)).sum()
    assert chi < len(expected) + 4 * (2 * len(expected)) ** 0.5


def test_sampling_leaves_the_global_generator_unchanged(sampler):
    before = torch.get_rng_state()
    sampler.sync(sampler.policy)
    sampler.generate(CountDigits().sample(0, 2), SAMPLING)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prefix_is_given_and_not_sampled(sampler):
    prompts = [prompt.__class__(prompt.id, prompt.text, prefix="12+") for prompt in CountDigits().sample(0, 2)]
    groups = sampler.generate(prompts, SAMPLING)
    assert {c.given_spans for group in groups for c in group.completions} == {((0, 3),)}
    assert gap_of(sampler.policy, groups) < 1e-4


def test_rows_of_an_interrupted_call_are_forgotten(sampler, monkeypatch):
    took, engine = sampler.engine.step, sampler.engine

    def interrupted():
        took()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.generate(CountDigits().sample(0, 3), SAMPLING)
    monkeypatch.undo()
    assert len(tokens_of(sampler.generate(CountDigits().sample(1, 2), SAMPLING))) == 8


def test_truncation_is_refused_because_vllm_reports_no_masks(sampler):
    with pytest.raises(UserError, match="top_k, top_p and min_p"):
        sampler.generate(CountDigits().sample(0, 2), Sampling(4, top_k=5))


def test_too_long_prompt_raises_user_error(sampler):
    with pytest.raises(UserError, match="leaves no room"):
        sampler.generate(CountDigits().sample(0, 2), Sampling(4, max_tokens=508))


def test_missing_vllm_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pellucid\[vllm\].*make vllm"):
        vllm.check_vllm_installed()


# ---------------------------------------------------------------- weights


def test_push_changes_the_samples(sampler):
    policy, prompts = sampler.policy, CountDigits().sample(0, 4)
    before = sampler.generate(prompts, SAMPLING)
    step(policy, 0.05)
    assert gap_of(policy, before) > 0.1
    sampler.sync(policy, 4)
    after = sampler.generate(prompts, SAMPLING)
    assert tokens_of(after) != tokens_of(before)
    assert gap_of(policy, after) < 1e-4


def test_adapter_is_merged_into_its_base_for_a_push(sampler):
    model = policy_of().model
    policy = Policy(model, character_tokenizer(), adapter=add_adapter(model, 4))
    sampler.sync(policy, 1)
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.add_(0.1 if "lora_B" in name else 0.0)
    before = sampler.generate(CountDigits().sample(0, 2), SAMPLING)
    assert gap_of(policy, before) > 0.01
    sampler.sync(policy, 2)
    assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4


def nothing(engine):
    engine.push = lambda weights: engine.llm.reset_prefix_cache()
    return "old weights: model.embed_tokens"


def but_one_layer(engine):
    whole = type(engine).push

    def push(weights):
        whole(engine, {name: x for name, x in weights.items() if ".layers.1." not in name})
        engine.shapes = {name: x.shape for name, x in weights.items()}

    engine.push = push
    return r"old weights: model\.layers\.1\."


def but_one_norm(engine):
    whole = type(engine).push

    def push(weights):
        whole(engine, {name: x for name, x in weights.items() if name != "model.norm.weight"})
        engine.shapes = {name: x.shape for name, x in weights.items()}

    engine.push = push
    return r"old weights: model\.norm\."


def but_the_tied_head(engine):
    engine.pack_tied_heads = lambda: None
    return r"old weights: model\.embed_tokens"


def but_the_cache(engine):
    engine.llm.reset_prefix_cache()  # as if later requests had evicted the check text
    engine.llm.reset_prefix_cache = lambda: True
    return "prefix cache"


@pytest.fixture
def mended(sampler):
    yield sampler
    for name in ("push", "pack_tied_heads"):
        vars(sampler.engine).pop(name, None)
    vars(sampler.engine.llm).pop("reset_prefix_cache", None)


@pytest.mark.parametrize("spoil", [nothing, but_one_layer, but_one_norm, but_the_tied_head, but_the_cache])
def test_incomplete_push_is_detected(mended, spoil):
    """The update is so small that no log-prob reveals it."""
    policy = mended.policy
    step(policy, 1e-7)
    says = spoil(mended.engine)
    with pytest.raises(UserError, match=says) as raised:
        mended.sync(policy, 4)
    assert "\n" not in str(raised.value)


def test_complete_pushes_of_tiny_updates_pass(sampler):
    policy = sampler.policy
    for i in range(20):
        step(policy, [1e-9, 1e-7, 0.0, 1e-5][i % 4])
        sampler.sync(policy, i)
    assert gap_of(policy, sampler.generate(CountDigits().sample(0, 2), SAMPLING)) < 1e-4


# ---------------------------------------------------------------- conversations


def held(sampler, world="worlds:Parrot", patient=True):
    sampler.environments, sampler.deterministic = InProcessEnvironments(EnvironmentSpec(world)), patient
    try:
        return sampler.generate(asked(), Sampling(4, max_tokens=80, turns=5, turn_tokens=9, seed="0/0"))
    finally:
        sampler.environments = None


@pytest.mark.parametrize("patient", [True, False])
def test_logprobs_of_every_turn_equal_the_scorers(sampler, patient):
    groups = held(sampler, patient=patient)
    completions = [c for group in groups for c in group.completions]
    assert max(len(c.given_spans) for c in completions) >= 2
    batch = collate(groups)
    assert gap_of(sampler.policy, groups) < 1e-4
    assert (batch.sampler_logprobs[~batch.action_mask] == 0).all()


def test_conversations_equal_those_of_the_native_sampler(sampler):
    """Greedy sampling gives equal tokens, so given spans, messages and outcomes must be equal, too."""
    policy = sampler.policy
    greedy = Sampling(1, temperature=0.0, max_tokens=80, turns=5, turn_tokens=9, seed="0/0")
    native = NativeSampler(16, environments=InProcessEnvironments(EnvironmentSpec("worlds:Parrot")))
    native.sync(policy, 3)
    sampler.environments = InProcessEnvironments(EnvironmentSpec("worlds:Parrot"))
    ours, theirs = native.generate(asked(), greedy), sampler.generate(asked(), greedy)
    sampler.environments = None
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt, a.prompt_ids) == (b.prompt, b.prompt_ids)
        [mine], [other] = a.completions, b.completions
        assert (mine.token_ids, mine.given_spans, mine.messages) == (other.token_ids, other.given_spans, other.messages)
        assert (mine.outcome, mine.finished, mine.version) == (other.outcome, other.finished, other.version)
    assert max(len(g.completions[0].given_spans) for g in ours) >= 2


def test_run_that_samples_a_step_ahead_resumes_to_the_same_bits(tmp_path):
    policy_of().save(tmp_path / "policy")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"""
[policy]
model = "{tmp_path / "policy"}"
[task]
name = "{Path(digits_task.__file__)}:Digits"
[sampler]
name = "vllm"
max_tokens = 8
ahead = 1
cache_gb = 0.1
[algorithm]
steps = 4
group_size = 4
[optimizer]
lr = 1e-2
[evaluate]
every = 2
n = 2
k = 2
[checkpoint]
every = 1
keep_last = 4
keep_finished = "all"
""")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train(recipe, "--run", whole) == 0
    shutil.copytree(whole, parted)
    for later in ("checkpoints/step-000003", "checkpoints/step-000004", "model"):
        shutil.rmtree(parted / later)
    assert train("--resume", parted) == 0
    assert sorted({record["step"] for record in records(parted / "metrics.jsonl")}) == [1, 2, 3, 4]
    same_run(whole, parted)
