"""Test the judge: a served model, a faulty proxy in front of it, and the cache of answers on disk."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from contextlib import closing, suppress

import pytest
import torch

from conftest import character_tokenizer, records, tiny_llama
from pellucid import cli, config
from pellucid.policy.policy import Policy
from pellucid.reporting.loggers import format_json_line
from pellucid.rewards import judge as asking
from pellucid.rewards import judge as rubric
from pellucid.rewards.grading import GradedTask
from pellucid.rewards.judge import Judge, JudgeAnswer, JudgeCache, TransientError, compute_wait, parse_retry_after
from pellucid.rewards.settings import JudgeSettings
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks.dataset import Dataset
from pellucid.types import Completion, Prompt, UserError
from pellucid.utils import endpoint
from proxies import KEY, proxied, says
from serving import chat, post, running

RUBRIC = "2+2=?"
TEXTS = ["abc", "bad", "cab 7", "-3", "", "9 9 9", "fig", "jig"]


@pytest.fixture(scope="module")
def service():
    """Yield the URL of a served model with random weights that never generates an EOS token."""
    torch.manual_seed(0)
    policy = Policy(tiny_llama(positions=256), character_tokenizer())
    policy.eos_ids = (-1,)
    with running(policy=policy) as (_, url):
        yield url


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(asking, "FIRST_WAIT_SECONDS", 0.01)


def settings(url, **changes):
    usual = {"rubric": RUBRIC, "template": "{prompt}{completion}{rubric}", "max_tokens": 12}
    return JudgeSettings(url, "tiny", **{**usual, **changes})


def judged(url, texts=TEXTS, cache=None, prompt=None, **changes):
    return Judge(settings(url, **changes), cache).grade(pairs(texts, prompt))


def pairs(texts, prompt=None):
    return [(prompt or Prompt("p", "1+1=? "), Completion((1,), (0.0,), text, True)) for text in texts]


def asked_of(body):
    """Return the completion in the body of a request made with `settings`."""
    return body["messages"][-1]["content"].removeprefix("1+1=? ").removesuffix(RUBRIC)


def errors(parts):
    return [part.error for part in parts]


# ---------------------------------------------------------------- pellucid serve as the judge


@pytest.mark.slow
def test_grade_is_the_number_that_the_served_model_answers(service):
    parts = judged(f"{service}/v1", pattern="([0-9]).", max_tokens=20)
    assert len(parts) == len(TEXTS) and set(errors(parts)) == {""}
    for text, part in zip(TEXTS, parts, strict=True):
        body = chat(f"1+1=? {text}{RUBRIC}", model="tiny", temperature=0, max_tokens=20)
        _, answer = post(f"{service}/v1/chat/completions", body)
        said = answer["choices"][0]["message"]["content"]
        assert part.extra == {"judge": said}
        assert part.value == int(re.findall("[0-9]", said[:-1])[-1]) / 10
        assert part.logged["judge/tokens"] == answer["usage"]["total_tokens"]
        assert (part.logged["judge/cached"], part.logged["judge/retries"]) == (0, 0)
        assert part.logged["judge/seconds"] > 0
    assert len({part.value for part in parts}) > 2


def test_judge_works_inside_a_running_event_loop(service):
    async def notebook():
        return judged(f"{service}/v1", TEXTS[:2], pattern="([0-9]).", max_tokens=20)

    assert asyncio.run(notebook()) and errors(asyncio.run(notebook())) == ["", ""]


@pytest.mark.slow
def test_concurrency_limits_the_requests_in_flight(service):
    with proxied(service, lambda *_: says("7"), delay=0.2) as proxy:
        judged(proxy.url, concurrency=3)
        times = [when for when, _ in proxy.seen]
    assert all(later - earlier >= 0.2 for earlier, later in zip(times, times[3:], strict=False))
    assert times[-1] - times[0] < 0.2 * (len(TEXTS) - 1), "as one after the other would take at least"


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{prompt}|{completion}|{answer}|{rubric}", "Why?|Be{answer}cause|42|R"),
        ("{{completion}} {completion}", "{completion} Be{answer}cause"),
        ('{{"score": 7}} {} {completion}', '{"score": 7} {} Be{answer}cause'),
        ("{topic} {tags} {none}", 'sums ["a", "é"] '),
    ],
)
def test_a_template_is_filled_once(template, expected):
    known = {"prompt": "Why?", "completion": "Be{answer}cause", "answer": "42", "rubric": "R"}
    columns = {"completion": "hidden", "topic": "sums", "tags": ["a", "é"], "none": None}
    assert rubric.fill_template(template, known, columns) == expected


def test_conversation_is_formatted_as_text():
    turns = ("user", "Hi"), ("assistant", "Yes?"), ("user", "2+2?")
    messages = tuple({"role": role, "content": content} for role, content in turns)
    assert rubric.format_question(Prompt("p", messages)) == "user: Hi\n\nassistant: Yes?\n\nuser: 2+2?"
    assert rubric.format_question(Prompt("p", messages[-1:])) == rubric.format_question(Prompt("p", "2+2?")) == "2+2?"


TALK = (
    {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [{"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}],
    },
    {"role": "tool", "name": "add", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
)


def test_a_judge_reads_all_turns_of_a_conversation(service):
    talked = Completion((1,), (0.0,), "It is 42.", True, messages=TALK)
    once = Completion((1,), (0.0,), "It is 42.", True, messages=TALK[-1:])
    with proxied(service, lambda *_: says("7")) as proxy:
        Judge(settings(proxy.url, template="{completion}", rubric=""), None).grade(
            [(Prompt("p", "Q"), c) for c in (talked, once)]
        )
    assert sorted(request["messages"][-1]["content"] for request in proxy.bodies) == [
        "It is 42.",
        'assistant: I add.\n{"name": "add", "arguments": {"a": "é"}}\n\ntool: 42\n\nassistant: It is 42.',
    ]


def test_request_follows_the_settings(service):
    body = {"seed": 3, "temperature": 0.5, "max_completion_tokens": 40, "chat_template_kwargs": {"thinking": False}}
    prompt = Prompt("p", "Q", "gold", {"topic": "sums"})
    with proxied(service, lambda *_: says("7")) as proxy:
        template = "{topic} {answer} {completion}"
        [part] = judged(proxy.url, ["A\ud800"], prompt=prompt, template=template, system="{rubric}!", body=body)
        assert part.value == 0.7
        messages = [{"role": "system", "content": "2+2=?!"}, {"role": "user", "content": "sums gold A?"}]
        assert proxy.bodies == [{"model": "tiny", "messages": messages, **body}]


def test_missing_column_is_an_error_before_any_request(service):
    with proxied(service) as proxy:
        prompt = Prompt("p", "Q", columns={"topic": "sums"})
        [part] = judged(proxy.url, ["A"], prompt=prompt, template="{completion}{tropic}{rubric}")
        assert (part.error, proxy.seen) == (
            'the template has {tropic}, and the row has no such column; did you mean "topic"?',
            [],
        )


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("answer", "pattern", "cut", "number"),
    [
        (" 7\n", "", False, 7.0),
        ("7.5", "", False, 7.5),
        ("7.", "", False, 7.0),
        ("-1", "", False, -1.0),
        ("<think>3 or 4?</think>\n8", "", False, 8.0),
        ("<think>8", r"([0-9]+)", False, None),
        ("7/10", "", False, None),
        ("7 of 10", "", False, None),
        ("Grade: 7", "", False, None),
        ("seven", "", False, None),
        ("\u0667", "", False, None),
        ("1e1", "", False, None),
        ("", "", False, None),
        ("1\n2", "", False, None),
        ("1", "", True, None),
        ("1\n", "", True, 1.0),
        ("3, no: Grade: 7!", r"Grade: ([0-9]+)", False, 7.0),
        ("Grade: 3. Grade: 7.", r"Grade: ([0-9]+)", False, 7.0),
        ("Grade: 1", r"Grade: ([0-9]+)", True, None),
        ("Grade: 10. Wh", r"Grade: ([0-9]+)", True, 10.0),
        ("Grade: good", r"Grade: (\w+)", False, None),
    ],
)
def test_a_number_is_read_strictly(answer, pattern, cut, number):
    assert rubric.parse_number(rubric.extract_grade(answer, pattern, cut) or "") == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ('{"why": "polite", "score": 7}', 7.0),
        ('<think>{"score": 1}</think> {"score": 7.5}', 7.5),
        ('{"score": "7"}', None),
        ('{"score": true}', None),
        ('{"grade": 7}', None),
        ('So {"score": 7}', None),
        ('{"score": 7', None),
        ("[7]", None),
        ("7", None),
        ('{"score": 1' + "0" * 400 + "}", None),
        ("[" * 100_000, None),
    ],
)
def test_number_in_a_json_object_is_read_strictly(answer, number):
    assert rubric.parse_json_number(answer, "score") == number


@pytest.mark.parametrize(
    ("said", "changes", "value"),
    [
        ("7", {}, 0.7),
        ("0", {}, 0.0),
        ("10", {}, 1.0),
        ("2", {"range": (1, 5)}, 0.25),
        ("-1", {"range": (-1, 1)}, 0.0),
        ('{"score": 4}', {"json_field": "score", "range": (1, 5)}, 0.75),
        ("Yes.", {"words": {"yes": 1, "no": -1}}, 1.0),
        ("It is negative", {"words": {"positive": 1, "negative": 0.25}, "pattern": "(negative|positive)"}, 0.25),
    ],
)
def test_grade_is_converted_to_a_reward_value(said, changes, value, service):
    with proxied(service, lambda *_: says(said)) as proxy:
        [part] = judged(proxy.url, ["A"], **changes)
    assert (part.value, part.error) == (value, "")


@pytest.mark.parametrize(
    ("said", "changes", "error"),
    [
        (says("11"), {}, 'no number from 0 to 10 in "11"'),
        (says("-0.5"), {}, 'no number from 0 to 10 in "-0.5"'),
        (says("I am\nsure. " * 20), {}, 'no number from 0 to 10 in "I am sure. I am sure. I am sure. I'),
        (says("7", "length"), {}, 'no number from 0 to 10 in "7", cut at max_tokens = 12'),
        (says(None, "length"), {}, 'no number from 0 to 10 in "", cut at max_tokens = 12'),
        (says("Yes and no"), {"words": {"yes": 1, "no": 0}}, 'none of yes, no in "Yes and no"'),
        (says('{"score": NaN}'), {"json_field": "score"}, "no number from 0 to 10 in"),
    ],
)
def test_unreadable_answer_is_an_error_and_not_retried(said, changes, error, service, tmp_path):
    with proxied(service, lambda _, body: said if asked_of(body) == "bad" else says("7")) as proxy:
        parts = judged(proxy.url, ["good", "bad", "fine"], tmp_path / "judge", **changes)
        assert len(proxy.seen) == 3
        if not changes:
            assert [part.value for part in parts] == [0.7, None, 0.7]
        assert parts[1].value is None and parts[1].error.startswith(error)
        judged(proxy.url, ["bad"], tmp_path / "judge", **changes)
        assert len(proxy.seen) == 4, "what could not be read is not kept"


# ---------------------------------------------------------------- faulty endpoints


FAULTS = {
    "429 0.2": "HTTP 429 Wrong: [key] and [key]",
    "500": "HTTP 500 Wrong: [key] and [key]",
    "503": "HTTP 503 Wrong: [key] and [key]",
    "drop": "the connection was dropped",
    "stall": "no answer within 1 s",
    "late": "no answer within 1 s",
    "garbage": "the answer is not JSON",
    "twice": "the answer is not JSON",
    '{"error": "overloaded"}': "the answer holds no completion",
    '{"choices": [null]}': "the answer holds no completion",
    "{}": "the answer holds no completion",
}


@pytest.mark.slow
def test_failed_requests_are_retried_counted_and_named(service, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    texts, lock, failed = [f"{n}a" for n in range(len(FAULTS))], threading.Lock(), set()
    faults = dict(zip(texts, FAULTS, strict=True))

    def fault(_, body):
        text = asked_of(body)
        with lock:
            again, _ = text in failed, failed.add(text)
        return says("7") if again else faults[text]

    with proxied(service, fault) as proxy:
        parts = judged(proxy.url, texts, tmp_path / "judge", timeout=1.0)
        assert len(proxy.seen) == 2 * len(texts)
        when = [at for (at, _), body in zip(proxy.seen, proxy.bodies, strict=True) if asked_of(body) == texts[0]]
    assert errors(parts) == [""] * len(texts)
    assert [part.value for part in parts] == [0.7] * len(texts)
    assert [part.extra["judge_failures"] for part in parts] == [[said] for said in FAULTS.values()]
    assert {part.logged["judge/retries"] for part in parts} == {1}
    assert when[1] - when[0] >= 0.2, "Retry-After"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("500", "HTTP 500 Wrong: [key] and [key], after 3 requests"),
        ("stall", "no answer within 0.5 s, after 3 requests"),
        ("400", "HTTP 400 Wrong: [key] and [key]"),
    ],
)
def test_persistent_failure_fails_only_its_completion(fault, error, service, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with proxied(service, lambda _, body: fault if asked_of(body) == "bad" else says("7")) as proxy:
        parts = judged(proxy.url, ["good", "bad", "fine"], timeout=0.5, retries=2)
        assert len(proxy.seen) == 2 + (1 if fault == "400" else 3)
    assert errors(parts) == ["", error, ""]
    assert parts[1].logged["judge/retries"] == (0 if fault == "400" else 2)


@pytest.mark.parametrize(
    ("fault", "mend"),
    [
        ("401", "put a valid key into the environment variable OPENAI_API_KEY"),
        ("403", "put a valid key into the environment variable OPENAI_API_KEY"),
        ("404", "has no model 'tiny' (HTTP 404): choose another with model, or fix base_url, which often ends in /v1"),
        ("402", "the quota of OPENAI_API_KEY is used up"),
    ],
)
def test_fatal_http_errors_stop_all_requests_and_name_the_fix(fault, mend, service):
    with proxied(service, lambda *_: fault, delay=0.05) as proxy:
        parts = judged(proxy.url, concurrency=2)
        assert len(proxy.seen) == 2, "the others are not asked"
    assert all(mend in error for error in errors(parts)) and len(set(errors(parts))) == 1


def replies(*arguments, **headers):
    """Return a proxy fault that sends this answer. A list of pieces is sent without Content-Length."""

    def reply(handler):
        if not isinstance(arguments[1], list):
            handler.reply(*arguments, **headers)
            return
        handler.send_response(arguments[0])
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.close_connection = True
        with suppress(OSError):
            for piece in arguments[1]:
                handler.wfile.write(piece)

    return reply


BODIES = {
    "nested lists": (replies(200, "[" * 100_000), "the answer is JSON that is nested too deeply"),
    "nested objects": (  # never closed, which Python 3.14 reports first
        replies(200, '{"choices":' * 9_000),
        "the answer is (JSON that is nested too deeply|not JSON)",
    ),
    "nested in its place": (
        replies(200, '{"choices": ' + "[" * 900 + "]" * 900 + "}"),
        "the answer (holds no completion|is JSON that is nested too deeply)",
    ),
    "nested error": (replies(500, "[" * 100_000), r"HTTP 500"),
    "too long": (replies(200, says("7" + " " * 200_000)), "the answer is longer than 100,000 bytes"),
    "endless": (replies(200, [b" " * 4096] * 100), "the answer is longer than 100,000 bytes"),
    "long error": (replies(500, "7" * 200_000), "the answer is longer than 100,000 bytes"),
    "long text": (replies(200, says("7" + " " * 60_000)), "the answer is longer than 50,000 characters"),
    "gzip": (
        replies(200, gzip.compress(b" " * 10_000_000), Content_Encoding="gzip"),
        r"the answer is compressed \(gzip\), which was not asked for",
    ),
    "another host": (
        replies(307, "", Location="http://judge.example:81/v1/chat/completions"),
        r"http://127.0.0.1:\d+ redirects to http://judge.example:81: if you trust it, use it as the address",
    ),
    "another scheme": (replies(308, "", Location="https://127.0.0.1/x"), r"redirects to https://127.0.0.1: "),
    "no address": (replies(307, "", Location="http://[::1"), "the connection was dropped"),
    "in circles": (replies(307, "", Location="/v1/chat/completions"), "the connection was dropped"),
    "a year that no calendar has": (
        replies(429, "{}", retry_after="Mon, 01 Jan 99999 00:00:00 GMT"),
        "HTTP 429",
    ),
    "a wait of many digits": (replies(429, "{}", retry_after="1 Jan 99999999999999999999 00:00"), "HTTP 429"),
    "no bytes of a text": (replies(200, b'{"choices": "\xff\xfe'), "the answer is not JSON"),
    "a number of too many digits": (replies(200, '{"choices": ' + "9" * 5000 + "}"), "the answer is not JSON"),
    "a choice that is a number": (replies(200, {"choices": 7}), "the answer holds no completion"),
    "choices by name": (replies(200, {"choices": {"0": 7}}), "the answer holds no completion"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_malformed_answers_become_errors_and_never_raise(kind, service, monkeypatch, tmp_path):
    monkeypatch.setattr(endpoint, "MAX_ANSWER_BYTES", 100_000)
    monkeypatch.setattr(asking, "MAX_ANSWER_CHARACTERS", 50_000)
    fault, error = BODIES[kind]
    with proxied(service, lambda _, body: fault if asked_of(body) == "bad" else says("7")) as proxy:
        bad, good = judged(proxy.url, ["bad", "good"], tmp_path, retries=1, concurrency=1)
    assert re.match(f"(.*){error}", bad.error)
    assert bad.value is None
    assert good.value == 0.7 or "redirects" in error or "compressed" in error, (
        "where all would be refused, no other is asked"
    )
    format_json_line({"extra": bad.extra})


@pytest.mark.parametrize("tokens", [10**400, -1, 2**70, "7", None, True, 1.5])
def test_invalid_token_counts_become_zero(tokens, service, tmp_path):
    """True is an int, so it counts as 1."""
    with proxied(service, lambda *_: says("7", tokens=tokens)) as proxy:
        [part] = judged(proxy.url, ["x"], tmp_path)
    assert (part.value, part.logged["judge/tokens"]) == (0.7, float(tokens is True))
    with JudgeCache(tmp_path).open() as cache:
        [answer] = map(cache.find, digests(tmp_path))
    assert answer.tokens == (1 if tokens is True else 0)


def digests(folder):
    """Return the digests of the requests whose answers were stored."""
    with closing(sqlite3.connect(folder / "answers.sqlite3")) as connection:
        return [digest for [digest] in connection.execute("SELECT request FROM answers")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "pattern", "value"),
    [
        ("7" + " " * 400_000 + ".", "", None),
        ("7" + " " * 400_000, "", 0.7),
        (" " * 400_000 + "7", "", 0.7),
        ("7" + "\n\t " * 100_000 + ".", r"(?:\s+)([0-9])", "pattern"),
        ("a" * 50_000 + "!", "(a+)+$", "pattern"),
        ("Grade: " * 50_000 + "7", "Grade: ([0-9]+)", 0.7),
        ("<think>" * 50_000 + "7", "", None),
        ("</think>" * 50_000 + "7", "", 0.7),
        ("9" * 400_000, "", None),
        ("-." * 200_000, "", None),
    ],
)
def test_hostile_answers_are_parsed_in_bounded_time(said, pattern, value, service, tmp_path, monkeypatch):
    """Quadratic or exponential parsing would take minutes to years. The time of a pattern is limited."""
    monkeypatch.setattr(rubric, "PATTERN_TIMEOUT_SECONDS", 0.2)
    settings_of = settings(f"{service}/v1", pattern=pattern)
    if value == "pattern":
        with pytest.raises(rubric.NoGradeError, match="took more than"):
            Judge(settings_of, None).compute_reward(JudgeAnswer(said, False, 1))
        with proxied(service, lambda *_: says(said)) as proxy:
            [part] = judged(proxy.url, ["x"], tmp_path, pattern=pattern)
        assert part.value is None
        assert part.error.startswith(f'pattern = "{pattern}" took more than 0.2 s')
        assert part.extra["judge"] == said[:500]
    elif value is None:
        with pytest.raises(rubric.NoGradeError, match="no number from 0 to 10 in "):
            Judge(settings_of, None).compute_reward(JudgeAnswer(said, False, 1))
    else:
        assert Judge(settings_of, None).compute_reward(JudgeAnswer(said, False, 1)) == value


@pytest.mark.parametrize("part", [KEY, KEY[:12], KEY[9:20], KEY[-6:], f"{KEY[:8]} {KEY[8:16]}", KEY * 1000])
def test_parts_of_a_key_in_an_answer_are_redacted(part, service, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    answers = {
        "A": says(f"Grade: 7 ({part})"),
        "B": replies(400, {"error": {"message": f"no ({part}) here"}}),
        "C": replies(200, "", Content_Encoding=part[:30]),
        "D": replies(307, "", Location=f"http://{part[:30].replace(' ', '')}.example/"),
    }
    with proxied(service, lambda _, body: answers[asked_of(body)]) as proxy:
        parts = [judged(proxy.url, [text], tmp_path, pattern="Grade: ([0-9]+)", retries=0)[0] for text in answers]
    assert parts[0].value == 0.7
    kept = (tmp_path / "answers.sqlite3").read_bytes().decode(errors="replace") + str(parts)
    assert not any(KEY[i : i + 6] in kept for i in range(len(KEY) - 5))
    assert "([key]" in kept


def test_words_that_resemble_a_key_are_kept():
    assert endpoint.remove_key("skill, project, 7", KEY) == "skill, project, 7"
    assert endpoint.remove_key("10 of 10", "10") == "10 of 10", "no secret is as short"
    assert endpoint.remove_key("none of it", endpoint.NO_KEY) == "none of it"


def test_a_redirect_within_the_endpoint_is_followed(service):
    def moved(handler):
        if handler.path.endswith("/"):
            handler.reply(200, says("7"))
        else:
            handler.reply(307, "", Location=f"{handler.path}/")

    with proxied(service, lambda *_: moved) as proxy:
        [part] = judged(proxy.url, ["x"])
    assert part.value == 0.7


@pytest.mark.slow
def test_step_timeout_limits_a_judge_that_never_answers(service):
    start = time.monotonic()
    with proxied(service, lambda _, body: says("7") if asked_of(body) == TEXTS[0] else "stall") as proxy:
        parts = judged(proxy.url, step_timeout=1.0, concurrency=2, timeout=3.0, retries=1)
    assert time.monotonic() - start < 10
    assert errors(parts) == ["", *["no answer within step_timeout = 1 s"] * (len(TEXTS) - 1)]


def test_unreachable_judge_is_an_error_with_its_address(service):
    with proxied(service) as proxy:
        judge = Judge(settings(proxy.url, retries=1), None)
    [part] = judge.grade(pairs(["A"]))
    assert re.fullmatch(r"http://\S+ cannot be reached \(.+\): start .+, after 2 requests", part.error)
    with pytest.raises(UserError, match=r"\(Connection refused\): start the service, or fix base_url$"):
        Judge(settings(proxy.url), None)


def test_retry_waits_double_up_to_a_limit_with_jitter():
    plain, told, long = TransientError("500"), TransientError("429", 3.0), TransientError("429", 3600.0)
    for n, least in ((1, 0.01), (3, 0.04), (30, asking.MAX_WAIT_SECONDS)):
        assert least <= compute_wait(plain, n) <= 1.25 * least
    assert 3.0 <= compute_wait(told, 1) <= 3.75
    assert compute_wait(long, 1) <= 1.25 * asking.MAX_RETRY_AFTER_SECONDS
    assert len({compute_wait(plain, 1) for _ in range(5)}) == 5


def test_retry_after_is_a_number_of_seconds():
    assert [parse_retry_after(said) for said in ("2", "0.5", "", "soon", "-3", "nan", "inf")] == [2.0, 0.5, *[None] * 5]


@pytest.fixture
def ctrl_c():
    """Make SIGINT raise KeyboardInterrupt, even if a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_does_not_wait_for_an_answer(alone, service, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "Q"}\n')
    with proxied(service, lambda *_: "stall") as proxy:
        judge = Judge(settings(proxy.url, step_timeout=12.0), tmp_path)
        term = RewardTerm("judge", judge=judge.settings)
        task = GradedTask(Dataset(data=str(tmp_path / "q.jsonl"), rewards=(term,)), graders={0: judge}, in_process=True)

        def interrupt():
            while not proxy.seen:
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            judge.grade(pairs(["A"])) if alone else task.reward_all(pairs(["A"]))
        assert time.monotonic() - start < 9


# ---------------------------------------------------------------- cache


def test_equal_completions_are_judged_once(service, tmp_path):
    with proxied(service, lambda *_: says("7")) as proxy:
        parts = judged(proxy.url, ["A", "B", "A", "A"])
        assert len(proxy.seen) == 2
    assert [part.value for part in parts] == [0.7] * 4
    assert [part.logged["judge/cached"] for part in parts] == [0, 0, 1, 1]
    assert [part.logged["judge/tokens"] for part in parts] == [5, 5, 0, 0]


def test_cache_on_disk_answers_only_identical_requests(service, tmp_path):
    with proxied(service, lambda *_: says("7")) as proxy:
        for repeated in range(2):
            parts = judged(proxy.url, ["A", "B"], tmp_path)
            assert [part.logged["judge/cached"] for part in parts] == [repeated] * 2
            assert [part.value for part in parts] == [0.7] * 2
        assert len(proxy.seen) == 2
        judged(proxy.url, ["A", "B"], tmp_path, range=(0, 7), concurrency=1)
        assert len(proxy.seen) == 2, "read otherwise, asked the same"
        changes = [{"rubric": "Other"}, {"max_tokens": 13}, {"system": "S"}, {"body": {"seed": 1}}, {"cache": False}]
        for n, change in enumerate(changes, 1):
            Judge(settings(proxy.url, **change), tmp_path).grade(pairs(["A", "B"]))
            assert len(proxy.seen) == 2 + 2 * n, change
    with proxied(service, lambda *_: says("6")) as other:
        assert [part.value for part in judged(other.url, ["A", "B"], tmp_path)] == [0.6] * 2


def test_damaged_cache_warns_once_and_requests_are_sent_again(service, tmp_path, capfd):
    (tmp_path / "answers.sqlite3").write_bytes(b"no database " * 1000)
    with proxied(service, lambda *_: says("7")) as proxy:
        judge = Judge(settings(proxy.url), tmp_path)
        for cached in range(2):
            parts = judge.grade(pairs(["A", "B"]))
            assert errors(parts) == ["", ""]
            assert [part.logged["judge/cached"] for part in parts] == [cached] * 2, "in memory"
    [line] = capfd.readouterr().out.splitlines()
    assert line.endswith("answers.sqlite3 cannot be written (file is not a database): the judge goes on without it")


def test_read_only_cache_is_still_read(service, tmp_path, capfd, monkeypatch):
    with proxied(service, lambda *_: says("7")) as proxy:
        judged(proxy.url, ["A"], tmp_path)
        monkeypatch.setattr(rubric.sqlite3, "connect", open_read_only)
        parts = judged(proxy.url, ["A", "B"], tmp_path)
    assert [part.logged["judge/cached"] for part in parts] == [1, 0]
    [line] = capfd.readouterr().out.splitlines()
    assert "cannot be written (attempt to write a readonly database)" in line


def open_read_only(path, connect=sqlite3.connect, **settings):
    return connect(f"file:{path}?mode=ro", uri=True, **settings)


def test_unwritable_cache_warns_once_and_the_judge_continues(service, tmp_path, capfd):
    (tmp_path / "judge").write_text("a file where a folder should be")
    with proxied(service, lambda *_: says("7")) as proxy:
        parts = judged(proxy.url, ["A", "B"], tmp_path / "judge")
    assert errors(parts) == ["", ""]
    [line] = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"! .*\.sqlite3 cannot be written \(.+\): the judge goes on without it", line)


TWIN = """
import sys
from pathlib import Path
from pellucid.rewards.judge import Judge
from pellucid.rewards.settings import JudgeSettings
from pellucid.types import Completion, Prompt

url, folder, *texts = sys.argv[1:]
judge = Judge(JudgeSettings(url, "tiny", template="{completion}", timeout=20), Path(folder))
print([part.value for part in judge.grade([(Prompt("p", ""), Completion((), (), text, True)) for text in texts])])
"""


def twin(url, folder, *texts):
    command = [sys.executable, "-c", TWIN, url, str(folder), *texts]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_store_their_answers_in_one_file(service, tmp_path):
    with proxied(service, lambda *_: says("7"), delay=0.5) as proxy:
        both = [twin(proxy.url, tmp_path, *TEXTS) for _ in range(2)]
        said = [process.communicate() for process in both]
        assert [json.loads(out) for out, _ in said] == [[0.7] * len(TEXTS)] * 2, said
        asked = len(proxy.seen)
        third = twin(proxy.url, tmp_path, *TEXTS)
        assert json.loads(third.communicate()[0]) == [0.7] * len(TEXTS)
        assert len(proxy.seen) == asked


# ---------------------------------------------------------------- runs


JUDGED = """
[policy]
model = "{model}"
dtype = "float32"
[task]
name = "dataset"
data = "{data}"
chat = false
[[task.rewards]]
name = "judge"
[task.rewards.judge]
base_url = "{url}"
model = "tiny"
key = "JUDGE_KEY"
template = "{{completion}}"
[sampler]
max_tokens = 6
[algorithm]
steps = 2
prompts_per_step = 2
group_size = 4
[evaluate]
every = 2
n = 2
[checkpoint]
every = 2
"""


def train(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *map(str, words)])
    assert ended.value.code == 0


def different_signs(body):
    """Answer with the number of distinct characters, or without a grade if the text begins with "a"."""
    text = body["messages"][0]["content"]
    return says("Ah" if text.startswith("a") else str(len(set(text))))


@pytest.mark.slow
def test_judge_grades_a_run_and_its_resume_without_repeats(service, model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    recipe, data, run = tmp_path / "judge.toml", tmp_path / "q.jsonl", tmp_path / "run"
    data.write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(9)))
    with proxied(service, lambda _, body: different_signs(body)) as proxy:
        recipe.write_text(JUDGED.format(model=model_dir, data=data, url=proxy.url))
        train(recipe, "--run", run)
        asked = len(proxy.bodies)
        train("--resume", run, "--algorithm.steps", 4)
        texts = [body["messages"][0]["content"] for body in proxy.bodies]
    readable = [text for text in texts if not text.startswith("a")]
    assert len(texts) > asked and len(readable) == len(set(readable))
    lines, steps = records(run / "rollouts.jsonl"), records(run / "metrics.jsonl")
    assert len(lines) == 32 and all(line["extra"]["judge"] for line in lines)
    for line in lines:
        text = line["completion"]
        assert line["parts"] == ({} if text.startswith("a") else {"judge": len(set(text)) / 10})
    assert 0 < sum(line["parts"] == {} for line in lines) == sum(step["reward/failed"] for step in steps)
    for name in ("tokens", "seconds", "cached", "retries"):
        assert all(f"logged/judge/{name}" in step for step in steps)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in written and digests(run / "judge")


def test_resume_may_change_the_judge_address_but_not_its_model(service, model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    recipe, data, run = tmp_path / "judge.toml", tmp_path / "q.jsonl", tmp_path / "run"
    data.write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(9)))
    with proxied(service, lambda *_: says("7")) as proxy:
        recipe.write_text(JUDGED.format(model=model_dir, data=data, url=proxy.url))
        train(recipe, "--run", run, "--algorithm.steps", 1)
    with proxied(service, lambda *_: says("8")) as proxy:
        there = ["--resume", run, "--task.rewards.0.judge.base-url", proxy.url, "--task.rewards.0.judge.retries", 0]
        with pytest.raises(SystemExit, match="2"):
            cli.main([*map(str, ["train", *there, "--task.rewards.0.judge.model", "other"])])
        assert "was trained with task.rewards = " in capsys.readouterr().err
        train(*there, "--algorithm.steps", 2)
        assert proxy.bodies
    assert {row["extra"]["judge"] for row in records(run / "rollouts.jsonl") if row["step"] == 2} == {"8"}


# ---------------------------------------------------------------- keys


def test_the_key_is_in_the_request_and_nowhere_else(service, monkeypatch, tmp_path, caplog, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    faults = {"A": "401", "B": "400", "C": says(f"7 {KEY}"), "D": "429"}
    written = ""
    for text, fault in faults.items():
        with proxied(service, lambda *_, fault=fault: fault) as proxy:
            judge = Judge(settings(proxy.url, key="JUDGE_KEY", retries=1, pattern="^([0-9]+) "), tmp_path)
            written += f"{judge.grade(pairs([text]))} {judge!r} {vars(judge)}"
            assert proxy.keys[0] == f"Bearer {KEY}"
    monkeypatch.setattr(asking, "parse_answer", lambda completion: 1 / 0)
    with proxied(service, lambda *_: says("7")) as proxy, pytest.raises(ZeroDivisionError) as raised:
        Judge(settings(proxy.url, key="JUDGE_KEY"), tmp_path).grade(pairs(["E"]))
    frames = traceback.TracebackException.from_exception(raised.value, capture_locals=True).stack[1:]
    assert any(frame.locals and "self" in frame.locals for frame in frames)
    written += "".join(str(frame.locals) for frame in frames)
    written += caplog.text + "".join(capfd.readouterr())
    kept = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert any("7 [key]" in text for text in kept) and "HTTP 400" in written
    assert KEY[:9] not in written + "".join(kept)


def test_key_in_a_recipe_is_refused_and_not_printed(tmp_path):
    for key in (KEY, "hf_abcdefghijklmnop", "0123456789ABCDEF"):
        recipe = tmp_path / "judge.toml"
        recipe.write_text(
            f'[task]\nname = "dataset"\ndata = "q.jsonl"\n[[task.rewards]]\nname = "judge"\n[task.rewards.judge]\n'
            f'base_url = "http://127.0.0.1:1/v1"\nmodel = "m"\nrubric = "R"\nkey = "{key}"\n'
        )
        with pytest.raises(UserError, match="key must name an environment variable, in capitals") as told:
            config.load_config(recipe)
        lines = "".join(traceback.format_exception(told.value))
        assert key not in lines


def test_missing_key_is_refused_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match="needs a key: put it into the environment variable NO_SUCH_KEY"):
        Judge(settings("https://judge.example/v1", key="NO_SUCH_KEY"), None)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base_url": "127.0.0.1:8100"}, "base_url '127.0.0.1:8100' is not an address: write http://HOST:PORT/v1"),
        ({"base_url": "https://me:secret@judge.example/v1"}, "base_url must not contain a secret"),
        ({"model": ""}, 'model = "" must name the model that judges'),
        ({"key": "my key"}, "key must name an environment variable"),
        ({"template": "{prompt} {rubric}"}, "template must have {completion}"),
        ({"template": '{completion} {"score": 7} {rubric}'}, "which is no placeholder: write {{...}}"),
        ({"rubric": ""}, 'rubric = "": set it if, and only if, the template has {rubric}'),
        ({"template": "{completion}"}, 'rubric = "R": set it if, and only if'),
        ({"range": (5, 5)}, "range = [5, 5] must be two numbers, the lowest grade and the highest"),
        ({"range": (0, float("nan"))}, "must be two numbers"),
        ({"pattern": "("}, "is not a valid regular expression"),
        ({"pattern": "[0-9]"}, "needs a group around the grade"),
        ({"pattern": "([0-9])", "json_field": "score"}, "leave out one"),
        ({"words": {"yes": 1}, "json_field": "score"}, "leave out one"),
        ({"words": {"yes": float("nan")}}, "words must map to finite numbers"),
        ({"body": {"model": "other"}}, "body must not set model: leave it out"),
        ({"body": {"since": object()}}, "body must be serializable as JSON"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"concurrency": 0}, "concurrency = 0 must be at least 1"),
        ({"retries": -1}, "retries = -1 must be at least 0"),
        ({"timeout": 0.0}, "timeout = 0.0 must be a positive number of seconds"),
        ({"step_timeout": float("inf")}, "step_timeout = inf must be a positive number of seconds"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(changes, told):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        JudgeSettings(**{"base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "R", **changes})
    assert told in str(caught.value)
    assert "secret@" not in str(caught.value)


def test_only_judge_terms_take_a_judge_table():
    judge = JudgeSettings("http://127.0.0.1:1/v1", "m", rubric="R")
    assert RewardTerm("judge", judge=judge).judge is judge
    for term in ({"name": "judge"}, {"name": "exact", "judge": judge}):
        with pytest.raises(ValueError, match=r"only judge takes a table \[task.rewards.judge\], and requires it"):
            RewardTerm(**term)


def test_judge_settings_survive_a_round_trip(tmp_path):
    recipe = tmp_path / "judge.toml"
    recipe.write_text(
        '[task]\nname = "dataset"\ndata = "q.jsonl"\n[[task.rewards]]\nname = "judge"\nweight = 2.0\n'
        '[task.rewards.judge]\nbase_url = "http://127.0.0.1:1/v1"\nmodel = "m"\nrubric = "R"\nrange = [1, 5]\n'
        '[task.rewards.judge.body]\nresponse_format = { type = "json_object" }\n[[task.rewards]]\nname = "exact"\n'
    )
    cfg = config.load_config(recipe, ["--task.rewards.0.judge.model", "other"])
    [term, _] = cfg.task.rewards
    body = {"response_format": {"type": "json_object"}}
    expected = JudgeSettings("http://127.0.0.1:1/v1", "other", rubric="R", range=(1.0, 5.0), body=body)
    assert (term.judge, term.weight) == (expected, 2.0)
    again = config.build_config(json.loads(json.dumps(config.dump_config(cfg))), "config.json")
    assert again == cfg
    assert hash(again.task) == hash(cfg.task), "as the rows of a task are found by it"
