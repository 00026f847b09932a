"""Test log-probs and token ids in answers to the official client against log-probs from transformers."""

from __future__ import annotations

import json

import openai
import pytest
import torch

from conftest import EOS, make_policy
from pellucid.serve.engine import CompletionChunk, GenerationRequest, ServingEngine
from serving import chat, post, running

IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def service():
    with running() as (served, url):
        yield served, url


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


@torch.no_grad()
def distributions(policy, prompt_ids, token_ids, temperature):
    """Return the log-probs [T, V] at each token of an answer, computed by the transformers model."""
    logits = policy.model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    return (logits[len(prompt_ids) - 1 : -1].double() / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chat_logprobs_match_the_model(temperature, service, client):
    policy = service[0].policy
    told = client.chat.completions.create(
        **chat(model="tiny", n=3, seed=4, temperature=temperature), logprobs=True, top_logprobs=5, extra_body=IDS
    )
    for choice in told.choices:
        expected = distributions(policy, told.prompt_token_ids, choice.token_ids, temperature or 1.0)
        assert len(choice.logprobs.content) == len(choice.token_ids)
        for entry, token, row in zip(choice.logprobs.content, choice.token_ids, expected, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert entry.token == policy.decode([token], special=True)
            assert bytes(entry.bytes).decode() == entry.token
            most = row.topk(5)
            assert [top.token for top in entry.top_logprobs] == [policy.decode([i], special=True) for i in most.indices]
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(most.values.tolist(), abs=1e-4)


def test_text_completion_logprobs_match_the_model(service, client):
    policy = service[0].policy
    told = client.completions.create(model="tiny", prompt="2+3=", n=2, seed=1, logprobs=2, extra_body=IDS)
    for choice in told.choices:
        expected = distributions(policy, choice.prompt_token_ids, choice.token_ids, 1.0)
        texts = [policy.decode([token], special=True) for token in choice.token_ids]
        assert choice.logprobs.tokens == texts
        chosen = [row[token].item() for row, token in zip(expected, choice.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
        assert choice.logprobs.text_offset == [len("".join(texts[:i])) for i in range(len(texts))]
        for top, row, text, logprob in zip(choice.logprobs.top_logprobs, expected, texts, chosen, strict=True):
            most = row.topk(2)
            pairs = zip(most.indices, most.values.tolist(), strict=True)
            likely = {policy.decode([i], special=True): value for i, value in pairs}
            assert top == pytest.approx(likely | {text: logprob}, abs=1e-4)


@pytest.mark.parametrize("settings", [{"logprobs": True, "top_logprobs": 2}, {"logprobs": True}, {}])
def test_streamed_chat_logprobs_match_the_whole_answer(settings, client):
    settings |= chat(model="tiny", n=2, seed=9, stop=["zz", "0a"])
    whole = client.chat.completions.create(**settings, extra_body=IDS)
    entries, ids, prompts = [[], []], [[], []], []
    for chunk in client.chat.completions.create(**settings, extra_body=IDS, stream=True):
        [choice] = chunk.choices
        prompts.append(getattr(chunk, "prompt_token_ids", None))
        ids[choice.index] += choice.token_ids
        entries[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert ids == [choice.token_ids for choice in whole.choices]
    assert entries == [choice.logprobs.content if choice.logprobs else [] for choice in whole.choices]
    assert prompts == [whole.prompt_token_ids] + [None] * (len(prompts) - 1)


def test_streamed_text_logprobs_match_the_whole_answer(client):
    settings = {"model": "tiny", "prompt": "2+3=", "n": 2, "seed": 9, "stop": ["zz", "0a"], "logprobs": 0}
    whole = client.completions.create(**settings)
    parts = [[], []]
    for chunk in client.completions.create(**settings, stream=True):
        [choice] = chunk.choices
        parts[choice.index].append(choice.logprobs)
    for choice, pieces in zip(whole.choices, parts, strict=True):
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for piece in pieces for x in getattr(piece, name)] == getattr(choice.logprobs, name)
        assert [list(top) for top in choice.logprobs.top_logprobs] == [[token] for token in choice.logprobs.tokens]


def test_each_request_gets_its_own_number_of_top_logprobs():
    """Rows with the same temperature are sampled together even if they need different numbers of top log-probs."""
    policy, told = make_policy(), {}
    engine = ServingEngine(policy, max_rows=4)

    def listener(count):
        def tell(news):
            if isinstance(news, CompletionChunk):
                told.setdefault(count, []).extend(len(drawn.top_logprobs) for drawn in news.tokens)
            elif len(told) == 3:
                engine.close()

        return tell

    for count in (0, 3, 1):
        engine.submit(GenerationRequest((1, 2, 3), listener(count), max_tokens=2, top_logprob_count=count))
    engine.run()
    assert {count: set(lengths) for count, lengths in told.items()} == {0: {0}, 1: {1}, 3: {3}}


def test_answer_has_no_logprobs_or_token_ids_by_default(client):
    told = client.chat.completions.create(**chat(model="tiny"))
    assert told.choices[0].logprobs is None
    assert "token_ids" not in told.choices[0].model_extra
    assert "prompt_token_ids" not in told.model_extra


def test_logprob_of_an_impossible_token_is_finite_in_json(service):
    body = chat(temperature=1e-6, logprobs=True, top_logprobs=20, max_tokens=3)
    status, told = post(f"{service[1]}/v1/chat/completions", body)
    assert status == 200
    least = [top["logprob"] for entry in told["choices"][0]["logprobs"]["content"] for top in entry["top_logprobs"]]
    assert min(least) == -9999.0
    assert "Infinity" not in json.dumps(told)


def test_prompt_of_token_ids_equals_the_prompt_of_its_text(service, client):
    ids = list(service[0].policy.tokenizer("2+3=")["input_ids"])
    by_ids, by_text = (
        client.completions.create(model="tiny", prompt=prompt, seed=2, extra_body=IDS) for prompt in (ids, "2+3=")
    )
    assert by_ids.choices == by_text.choices
    assert by_ids.prompt_token_ids == by_text.prompt_token_ids == ids
    assert by_ids.usage == by_text.usage


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "prompt: List should have at least 1 item"),
        ([0, -1], "prompt.1: Input should be greater than or equal to 0"),
        ([True], "prompt.0: Input should be a valid integer"),
        ([EOS + 1], "a token that the model does not know"),
        ([0] * 127 + [1] * 5, "context length of 128"),
        (3, "prompt: Input should be a valid string"),
    ],
)
def test_invalid_prompts_of_token_ids_are_refused(prompt, complaint, service):
    status, answer = post(f"{service[1]}/v1/completions", {"prompt": prompt})
    assert status == 400
    assert complaint in answer["error"]["message"]
