"""Parts that all samplers share: seeds, lengths, and the decoding of tokens into text."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from architectures import SMALL
from conftest import EOS, CountDigits, character_tokenizer, make_policy
from pellucid.policy.policy import Policy
from pellucid.rollout.groups import build_groups, generate_uniforms
from pellucid.rollout.hf import HuggingFaceSampler
from pellucid.rollout.native import NativeSampler
from pellucid.types import Prompt, Sampling, UserError

SAMPLERS = {"native": NativeSampler, "hf": HuggingFaceSampler}


def tokens(sampler, prompts, seed="s", size=4, max_tokens=12):
    groups = sampler.generate(prompts, Sampling(size, max_tokens=max_tokens, seed=seed))
    return [[c.token_ids for c in group.completions] for group in groups]


def synced(name, policy, **settings):
    sampler = SAMPLERS[name](**settings)
    sampler.sync(policy)
    return sampler


@pytest.mark.parametrize("name", SAMPLERS)
def test_equal_seeds_give_equal_samples_and_other_seeds_do_not(name):
    sampler, prompts = synced(name, make_policy()), CountDigits().sample(0, 3)
    assert tokens(sampler, prompts) == tokens(sampler, prompts)
    assert tokens(sampler, prompts) != tokens(sampler, prompts, seed="t")


def test_repeated_question_gets_different_samples():
    one, other = tokens(synced("native", make_policy()), [Prompt("a", "1+1?"), Prompt("b", "1+1?")])
    assert one != other


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampling_leaves_the_global_generator_unchanged(name):
    sampler, before = synced(name, make_policy()), torch.get_rng_state()
    tokens(sampler, CountDigits().sample(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_generation_config_of_a_checkpoint_is_ignored_and_kept():
    """In fp32 the sampler uses the trained model itself, not a copy."""
    policy, prompts = make_policy(), CountDigits().sample(0, 3)
    plain = tokens(synced("hf", policy), prompts)
    own = policy.model.generation_config
    own.update(no_repeat_ngram_size=1, min_p=0.5, top_k=2, repetition_penalty=3.0)
    assert tokens(synced("hf", policy), prompts) == plain
    assert policy.model.generation_config is own


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_come_from_the_whole_vocabulary(name):
    """The default of transformers keeps the likeliest 50 tokens; here all 200 are equally likely."""
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 200}))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    policy = Policy(model, character_tokenizer())
    policy.decode = lambda ids: ""
    [drawn] = tokens(synced(name, policy), [Prompt("p", "1+1?")], size=2000, max_tokens=1)
    assert len(set(drawn)) > 190


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_prompt_may_fill_the_context_to_the_last_token(name):
    """The model has 128 positions, 100 of them for the completion. The longest of several prompts counts."""
    sampler, sampling = synced(name, make_policy()), Sampling(2, max_tokens=100)
    assert sampler.generate([Prompt("p", "1" * 28)], sampling)
    with pytest.raises(UserError, match="a prompt of 29 tokens"):
        sampler.generate([Prompt("p", "1" * 28), Prompt("q", "1" * 29), Prompt("r", "1")], sampling)


class Spaced:
    """A tokenizer that drops the space before the first token, as SentencePiece does."""

    eos_ids, end_id = (EOS,), EOS

    def encode_prefix(self, prompt):
        return tuple(range(len(prompt.prefix.split())))

    def decode(self, ids):
        return "".join(f" {'abcdefgh'[i]}" for i in ids).lstrip()


def test_completion_is_decoded_after_its_own_prefix():
    prompts = [Prompt("p", "?", prefix="a b"), Prompt("q", "?")]
    groups = build_groups(Spaced(), 3, prompts, [(1, 0, 1), (1,)], [[5], [6, 7], [5], [6, 7]], [[0.0]] * 4, [()] * 4)
    assert [[c.text for c in group.completions] for group in groups] == [[" f", " g h"], ["f", "g h"]]
    assert [group.prompt_ids for group in groups] == [(1,), (1,)]
    assert [group.completions[0].token_ids for group in groups] == [(0, 1, 5), (5,)]
    assert [group.completions[0].logprobs for group in groups] == [(0.0, 0.0, 0.0), (0.0,)]
    assert [group.completions[0].given_spans for group in groups] == [((0, 2),), ()]
    assert [group.demonstration for group in groups] == [(0, 1), ()]
    assert {completion.version for group in groups for completion in group.completions} == {3}


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_rows_admitted_late_sample_the_same_tokens(engine):
    """Three of eight groups fit at once, and completion lengths vary: groups are admitted while others decode."""
    policy = make_policy(engine=engine)
    prompts, boarding = CountDigits().sample(0, 8), []
    flight = policy.create_decode_batch

    def watched(rows):
        craft = flight(rows)
        admit, step = craft.admit, craft.step
        craft.admit = lambda *a: boarding.append(len(a[0])) or admit(*a)
        craft.step = lambda tokens: boarding.append(0) or step(tokens)
        return craft

    at_once = tokens(synced("native", policy), prompts, max_tokens=60)
    policy.create_decode_batch = watched
    assert tokens(synced("native", policy, rows=12), prompts, max_tokens=60) == at_once
    assert boarding[0] == 3
    assert sum(map(bool, boarding)) > 2, "they boarded in more than two goes"


def test_random_numbers_have_the_precision_of_a_double():
    """With 24 bits, a token of probability 1e-9 would be sampled never, or 60 times as often."""
    numbers = torch.tensor(list(islice(generate_uniforms(7), 1000)), dtype=torch.float64)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    assert ((numbers * 2**24) % 1 != 0).double().mean() > 0.99


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_random_numbers_do_not_depend_on_the_chunk_size(chunk):
    assert list(islice(generate_uniforms(7, chunk), 100)) == list(islice(generate_uniforms(7, 100), 100))
