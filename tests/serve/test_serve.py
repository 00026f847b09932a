"""Test the API of `pellucid serve` at a real server, with the official client and with invalid requests."""

from __future__ import annotations

import json
import math
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from conftest import CountDigits
from pellucid.algorithm.settings import GRPOConfig
from pellucid.rewards.grading import GradedTask
from pellucid.rollout.native import NativeSampler
from pellucid.serve import api
from pellucid.serve.engine import GenerationRequest, GenerationRow
from pellucid.tasks.gsm8k import Gsm8k
from pellucid.types import Completion, Group, Prompt, Reward, Sampling
from serving import chat, post, running, wait_until


@pytest.fixture(scope="module")
def service():
    with running(task=CountDigits()) as (served, url):
        yield served, url


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------- the official client


@pytest.mark.slow
def test_greedy_answers_match_the_native_sampler(service, client):
    served, _ = service
    sampler = NativeSampler(policy=served.policy)
    for text in ("2+3=", "7*8=?", "a"):
        prompt = Prompt("p", ({"role": "user", "content": text},))
        [group] = sampler.generate([prompt], Sampling(temperature=0.0, max_tokens=24))
        [expected] = group.completions
        answer = client.chat.completions.create(**chat(text, model="tiny", temperature=0))
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == ("stop" if expected.finished else "length")
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.prompt_tokens == len(group.prompt_ids)
        plain = client.completions.create(model="tiny", prompt=text, temperature=0)
        assert plain.choices[0].text == expected.text


def test_streamed_pieces_add_up_to_the_whole_answer(client):
    settings = {"model": "tiny", "n": 3, "seed": 5}
    whole = client.chat.completions.create(**chat(**settings))
    pieces = client.chat.completions.create(**chat(**settings), stream=True, stream_options={"include_usage": True})
    texts, reasons, used, number = [""] * 3, [None] * 3, None, 0
    for chunk in pieces:
        used = chunk.usage or used
        for choice in chunk.choices:
            number += 1
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert used.completion_tokens == whole.usage.completion_tokens
    assert number > 9, "the answers must have come in pieces"
    plain = client.completions.create(prompt="2+3=", stream=True, **settings)
    assert "".join(c.choices[0].text for c in plain if c.choices[0].index == 1) == texts[1]


def test_character_of_several_tokens_is_sent_once_it_is_complete():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    row, told = GenerationRow(GenerationRequest((), print), 0, torch.Generator()), []
    for byte in "aé数🙂!".encode() + b"\xf0\x9f":
        row.token_ids.append(byte)
        if row.decode_text(Bytes(), is_last=False):
            told.append(row.unsent_text)
    assert told == ["a", "aé", "aé数", "aé数🙂", "aé数🙂!"]
    assert row.decode_text(Bytes(), is_last=True)
    assert row.unsent_text == "aé数🙂!\ufffd", "what ends in the middle of a character is told as it is"


def test_seed_repeats_answers_and_unseeded_answers_differ(client):
    def texts(seed):
        answer = client.chat.completions.create(**chat(model="tiny", n=4), seed=seed)
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) > 1
    assert texts(None) != texts(None)


def test_answer_ends_at_a_stop_string_or_at_max_tokens(client):
    free = client.chat.completions.create(**chat(model="tiny", seed=3, n=8)).choices
    text = max((choice.message.content for choice in free), key=len)
    index = [choice.message.content for choice in free].index(text)
    stop = text[3:5]
    cut = client.chat.completions.create(**chat(model="tiny", seed=3, n=8), stop=[stop, "never"]).choices[index]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    short = client.chat.completions.create(**chat(model="tiny", seed=3, n=8), max_tokens=2)
    assert {len(choice.message.content) <= 2 for choice in short.choices} == {True}
    assert "length" in {choice.finish_reason for choice in short.choices}


def test_truncation_reaches_the_sampler(client):
    greedy = client.chat.completions.create(**chat(model="tiny", temperature=0)).choices[0].message.content
    cut = client.chat.completions.create(**chat(model="tiny", n=4), top_p=1e-6).choices
    assert {choice.message.content for choice in cut} == {greedy}


def test_models_are_listed_by_the_name_that_requests_use(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("huge")


# ---------------------------------------------------------------- batching


def test_concurrent_requests_share_decode_steps_and_keep_their_answers():
    with running(rows=16) as (served, url):
        bodies = [chat(f"{i}+{i}=", seed=i, max_tokens=12, n=1 + i % 2) for i in range(8)]
        alone = [post(f"{url}/v1/chat/completions", body)[1]["choices"] for body in bodies]
        steps, step = [], served.engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: steps.append(len(tokens)) or step(tokens)
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda body: post(f"{url}/v1/chat/completions", body)[1]["choices"], bodies))
        assert together == alone
        assert max(steps) > 4, "several requests must have shared a step"


def test_requests_beyond_the_row_limit_wait_their_turn():
    with running(rows=2) as (_, url):
        bodies = [chat(seed=i, n=2, max_tokens=8) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda body: post(f"{url}/v1/chat/completions", body), bodies))
        assert [status for status, _ in answers] == [200] * 6


def test_closing_a_stream_early_frees_its_rows():
    with (
        running(max_tokens=100) as (served, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        served.policy.eos_ids = (-1,)
        stream = client.chat.completions.create(**chat(model="tiny", n=8), stream=True)
        next(stream)
        stream.close()
        wait_until(lambda: not served.engine.running.requests)


def test_decoder_error_returns_500_and_the_service_recovers(monkeypatch):
    with running() as (served, url):
        before, broken = post(f"{url}/v1/chat/completions", chat(seed=1)), served.engine.running
        monkeypatch.setattr(
            served.engine.running.batch, "step", lambda _: (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        status, answer = post(f"{url}/v1/chat/completions", chat(seed=1))
        assert status == 500
        assert "no memory" in answer["error"]["message"]
        after = post(f"{url}/v1/chat/completions", chat(seed=1))
        assert (after[0], after[1]["choices"]) == (200, before[1]["choices"])
        assert served.engine.running is not broken, "what half a step left behind is not read again"
        wait_until(lambda: not served.engine.running.requests)


# ---------------------------------------------------------------- invalid requests


@pytest.mark.parametrize(
    ("path", "body", "status", "complaint"),
    [
        ("/v1/chat/completions", chat(model="huge"), 404, 'the model "huge" is not served here; "tiny" is'),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {}, 400, "messages: Field required"),
        ("/v1/chat/completions", chat(temperature=-1), 400, "temperature"),
        ("/v1/chat/completions", chat(top_p=0), 400, "top_p"),
        ("/v1/chat/completions", chat(n=17), 400, "n = 17 must be at most 16"),
        ("/v1/chat/completions", chat(max_tokens=0), 400, "max_tokens"),
        ("/v1/chat/completions", chat(max_tokens=1000), 400, "context length of 128"),
        ("/v1/chat/completions", chat("1" * 200), 400, "context length of 128"),
        ("/v1/chat/completions", {"messages": [{"role": "function", "content": "x"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "content"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/solve_question", {}, 400, "question"),
        ("/group", {"group_size": 1}, 400, "group_size"),
        ("/group", {"group_size": 64}, 400, "at most 16"),
    ],
)
def test_invalid_request_returns_4xx_with_the_reason(service, path, body, status, complaint):
    found, answer = post(service[1] + path, body)
    assert found == status
    assert complaint in answer["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"messages": "hi"}'])
def test_malformed_body_returns_400(service, raw):
    status, answer = post(f"{service[1]}/v1/chat/completions", None, raw)
    assert status == 400
    assert answer["error"]["message"]


def test_body_of_10_mb_returns_413(service):
    status, answer = post(f"{service[1]}/v1/chat/completions", chat("1" * 10_000_000))
    assert status == 413
    assert "1000000 bytes" in answer["error"]["message"]


def test_request_timeout_returns_504():
    with running(timeout=0.001) as (served, url):
        assert post(f"{url}/v1/chat/completions", chat(max_tokens=100))[0] == 504
        wait_until(lambda: not served.engine.running.requests)


# ---------------------------------------------------------------- other endpoints


def test_solve_question_returns_reasoning_and_final_answer(service, monkeypatch):
    """The response has the format of the first version of the service."""
    served, url = service
    status, answer = post(f"{url}/solve_question", {"question": "2+3=?"})
    assert status == 200
    assert answer["code"] == 0
    assert answer["elapsed_milliseconds"] >= 0
    assert answer["data"]["final_answer"] == answer["data"]["assistant_response"].strip()
    assert post(f"{url}/solve_question", {"question": "2+3=?"})[1]["data"] == answer["data"]
    tagged = "<think>two and three</think> <answer>5</answer>"
    monkeypatch.setattr(served.policy, "decode", lambda ids, **_: tagged if ids else "")
    data = post(f"{url}/solve_question", {"question": "?"})[1]["data"]
    assert data["reasoning_process"] == "two and three"
    assert data["final_answer"] == "5"
    assert "<" not in data["clean_response"]


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "final"),
    [
        ("<think>\n", r"two and three</think> So \boxed{5}.", "two and three", "5"),
        ("<think>\n", r"Is it \boxed{5}? Hmm", r"Is it \boxed{5}? Hmm", ""),
        ("", r"So \boxed{5}.", "", "5"),
        ("", "It is 5.", "", "It is 5."),
    ],
)
def test_solve_question_extracts_the_answer_like_graders(monkeypatch, opening, text, reasoning, final):
    """The chat template may open the thought. The decoded prompt then ends with that opening."""

    def decode(ids, **_):
        if tuple(ids) == prompt[-8:]:
            return f"?{opening}"
        return text if ids else ""

    with running(task=CountDigits()) as (served, url):
        prompt = served.policy.encode(Prompt("p", ({"role": "user", "content": "2+3=?"},)))
        monkeypatch.setattr(served.policy, "decode", decode)
        data = post(f"{url}/solve_question", {"question": "2+3=?"})[1]["data"]
    assert (data["reasoning_process"], data["final_answer"]) == (reasoning, final)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_custom_question_gets_the_system_prompt_of_task_or_service(tmp_path, monkeypatch, language):
    rows = [{"question": f"How many are {i} + 1?", "answer": f"#### {i + 1}"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Gsm8k(data=str(tmp_path / "rows.jsonl"), test_data="", language=language)
    encoded = []
    for asked_by, expected in (
        (GradedTask(task, in_process=True), list(task.sample(0, 1)[0].text)[:-1]),
        (None, [{"role": "system", "content": "Be brief."}]),
    ):
        with running(task=asked_by, system="Be brief.") as (served, url):
            monkeypatch.setattr(served.policy, "encode", lambda prompt: encoded.append(prompt) or (1, 2, 3))
            post(f"{url}/solve_question", {"question": "2+3=?"})
            if asked_by:
                post(f"{url}/group", {"question": "2+3=?", "group_size": 2, "max_tokens": 2})
        assert encoded
        for prompt in encoded:
            assert list(prompt.text) == [*expected, {"role": "user", "content": "2+3=?"}]
        encoded.clear()


def test_group_rewards_and_advantages_match_training(service):
    _, url = service
    _, data = post(f"{url}/group", {"group_size": 8, "seed": 1})
    rewards = torch.tensor([row["reward"] for row in data["completions"]], dtype=torch.float64)
    advantages = torch.tensor([row["advantage"] for row in data["completions"]], dtype=torch.float64)
    assert rewards.std() > 0
    torch.testing.assert_close(advantages, (rewards - rewards.mean()) / rewards.std(correction=0))
    for row in data["completions"]:
        text = row["text"]
        assert row["reward"] == pytest.approx(sum(c.isdigit() for c in text) / max(1, len(text)), abs=0.2)
        assert row["logprob"] < 0
    assert data["question"] == CountDigits().sample(0, 1)[0].question
    _, other = post(f"{url}/group", {"group_size": 8, "seed": 1, "number": 1})
    assert other["question"] != data["question"]


def test_empty_prompt_is_refused(service):
    status, answer = post(f"{service[1]}/v1/completions", {"prompt": "", "model": "tiny"})
    assert status == 400
    assert "prompt: String should have at least 1 character" in answer["error"]["message"]


@pytest.mark.slow
def test_answer_that_could_not_be_graded_has_no_reward():
    class Grader(CountDigits):
        def reward(self, prompt, completion):
            return outcomes.pop()

    outcomes = [Reward(math.nan), Reward(0.9, {"half": 0.9}, error="timed out"), Reward(0.5, {"half": 0.5})]
    with running(task=Grader()) as (_, url):
        _, data = post(f"{url}/group", {"group_size": 3, "seed": 1})
    assert [row["reward"] for row in data["completions"]] == [0.5, None, None]
    assert [row["parts"] for row in data["completions"]] == [{"half": 0.5}, {}, {}]
    assert [row["advantage"] for row in data["completions"]] == [0.0, 0.0, 0.0]


def test_group_advantages_follow_gdpo_and_min_reward_range():
    """`advantage = "gdpo"` with a term of weight 2 is computed by hand. `min_reward_range` works as in training."""
    rewards = (Reward(2.0, {"a": 1.0}, weights={"a": 2.0}), Reward(0.0, {"a": 0.0}, weights={"a": 2.0}))
    answered = Group(Prompt("p", "q"), (1,), (Completion((1,), (0.0,), "", True),) * 2, rewards)
    assert api.compute_group_advantages(GRPOConfig(advantage="gdpo", group_size=2), answered) == [1.0, -1.0]
    assert api.compute_group_advantages(GRPOConfig(group_size=2, min_reward_range=3.0), answered) == [0.0, 0.0]


def test_group_for_a_question_without_answer_has_no_rewards(service):
    _, data = post(f"{service[1]}/group", {"question": "1+1=", "group_size": 2})
    assert [row["reward"] for row in data["completions"]] == [None, None]
    assert [row["advantage"] for row in data["completions"]] == [None, None]


def test_health_is_ok_and_page_has_no_external_links(service):
    with urllib.request.urlopen(f"{service[1]}/health") as response:
        assert json.load(response)["status"] == "ok"
    with urllib.request.urlopen(service[1]) as response:
        page = response.read().decode()
    assert "<title>tiny</title>" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
