"""Tests that end-of-sequence tokens not flagged as special are left out of decoded text."""

from __future__ import annotations

import pytest

from conftest import CHARACTERS, CountDigits, character_tokenizer, tiny_llama
from pellucid.policy.policy import Policy
from pellucid.policy.tool_calls import parse_turn
from pellucid.rollout.groups import decode_completion
from pellucid.rollout.select import choose_sampler
from pellucid.types import Sampling
from serving import post, running

END = CHARACTERS.index("k")


@pytest.fixture
def policy():
    """Return a policy whose checkpoint lists the letter k as an end token, besides <eos>."""
    model = tiny_llama()
    model.generation_config.eos_token_id = [END, len(CHARACTERS)]
    return Policy(model, character_tokenizer())


@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_completion_text_excludes_the_end_token(policy, sampler):
    sampling, _ = choose_sampler(sampler, 16, policy)
    sampling.sync(policy, 0)
    groups = sampling.generate(CountDigits().sample(0, 4), Sampling(8, max_tokens=40))
    ended = [c for group in groups for c in group.completions if c.token_ids[-1] == END]
    assert ended
    for completion in ended:
        assert completion.finished
        assert completion.text == "".join(CHARACTERS[i] for i in completion.token_ids[:-1])


def test_text_after_a_prefix_excludes_the_end_token(policy):
    ids = [CHARACTERS.index(c) for c in "12k"]
    assert decode_completion(policy, ids[:1], ids[1:]) == "2"
    assert policy.decode(ids[:2]) == "12", "what does not end with it is whole"
    assert policy.decode([END, *ids]) == "k12", "one that does not end the text is text"
    assert policy.decode(ids, special=True) == "12k"


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "add"}}]])
def test_conversation_turn_excludes_the_end_token(policy, tools):
    ids = [CHARACTERS.index(c) for c in "12k"]
    assert parse_turn(policy.tokenizer, ids, (), tools, policy.eos_ids).message["content"] == "12"
    assert parse_turn(policy.tokenizer, ids[:2], (), tools, policy.eos_ids).message["content"] == "12"


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_served_answer_excludes_the_end_token(policy, kind):
    asked = {"prompt": "1?"} if kind == "completions" else {"messages": [{"role": "user", "content": "1?"}]}
    with running(policy=policy) as (_, url):
        status, answer = post(f"{url}/v1/{kind}", {"model": "tiny", "n": 8, "max_tokens": 60, "seed": 1, **asked})
    assert status == 200
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    assert "stop" in {choice["finish_reason"] for choice in answer["choices"]}
    assert "k" not in "".join(texts)
