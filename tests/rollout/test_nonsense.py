"""Malformed responses of sampler servers, made by a proxy: the run continues on the other server."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import safetensors.torch
import torch

from conftest import EOS, VOCAB, CountDigits
from pellucid.rollout import vllm_client
from pellucid.rollout.vllm import VLLMSampler, get_push_weights
from pellucid.rollout.vllm_client import (
    InvalidAnswerError,
    SamplerClient,
    SampleRequest,
    ServerPool,
    serialize_model,
)
from pellucid.serve.vllm_server import EngineHost
from pellucid.types import Sampling
from sampler_process import Plain, served, tiny_policy

SAMPLING = Sampling(4, max_tokens=8, seed="0/0")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", 0.05)


@contextmanager
def altered(url, alter):
    """Yield the address of a proxy. `alter` gets the path and body of each response, and returns a new body."""

    class Proxy(BaseHTTPRequestHandler):
        def do(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            # The trainer may hang up before it has read the response: close the connection to the server even then.
            with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)) as there:
                there.request(self.command, self.path, body, headers | {"Host": "localhost"})
                answer = there.getresponse()
                told = alter(self.path.partition("?")[0], answer.read())
            with suppress(ConnectionError):
                self.send_response(answer.status)
                if version := answer.getheader(vllm_client.VERSION_HEADER):
                    self.send_header(vllm_client.VERSION_HEADER, version)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

        do_GET = do_PUT = do_POST = do  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def rows(change):
    """Return an alteration that changes every row of a response."""

    def alter(path, body):
        if path != "/step" or not (answer := json.loads(body)).get("said"):
            return body
        return json.dumps(answer | {"said": [change(*row) for row in answer["said"]]}).encode()

    return alter


def body_of(path, text):
    return lambda asked, body: text if asked == path else body


def more(path, body):
    """Alter a response: its first row is in it twice."""
    answer = json.loads(body) if path == "/step" else {}
    if answer.get("said"):
        answer["said"].append(answer["said"][0])
        return json.dumps(answer).encode()
    return body


def idle():
    """Return an alteration that counts steps but never finishes a row."""
    steps = itertools.count(0, 20)
    return lambda path, body: (
        json.dumps({"steps": next(steps), "others": 0, "said": []}).encode() if path == "/step" else body
    )


ROWS = {
    "unknown token": (lambda n, t, p: [n, [*t[:-1], VOCAB], p], f"a token that is not a whole number from 0 to {EOS}"),
    "negative token": (lambda n, t, p: [n, [-1, *t[1:]], p], "a token that is not"),
    "fraction": (lambda n, t, p: [n, [0.5, *t[1:]], p], "a token that is not"),
    "whole fraction": (lambda n, t, p: [n, [1.0, *t[1:]], p], "a token that is not"),
    "boolean token": (lambda n, t, p: [n, [True, *t[1:]], p], "a token that is not"),
    "text": (lambda n, t, p: [n, "12345678", p], "a log-prob for each token"),
    "no log-probs": (lambda n, t, p: [n, t, []], "a log-prob for each token"),
    "null": (lambda n, t, p: [n, t, None], "a log-prob for each token"),
    "NaN": (lambda n, t, p: [n, t, [float("nan"), *p[1:]]], "a log-prob that is not a number from -100 to 0"),
    "positive": (lambda n, t, p: [n, t, [50.0, *p[1:]]], "a log-prob that is not"),
    "absurd": (lambda n, t, p: [n, t, [-1e9, *p[1:]]], "a log-prob that is not"),
    "infinite": (lambda n, t, p: [n, t, [float("-inf"), *p[1:]]], "a log-prob that is not"),
    "enormous": (lambda n, t, p: [n, t, [-(10**400), *p[1:]]], "a log-prob that is not"),
    "boolean log-prob": (lambda n, t, p: [n, t, [False, *p[1:]]], "a log-prob that is not"),
    "too many tokens": (lambda n, t, p: [n, t * 500, p * 500], "instead of 1 to 8"),
    "no tokens": (lambda n, t, p: [n, [], []], "a row of 0 tokens"),
    "breaks off": (lambda n, t, p: [n, [1], [-1.0]], "a row that stops early"),
    "after its end": (lambda n, t, p: [n, [EOS, 1], [-1.0, -1.0]], "continues after an end token"),
    "never asked for": (lambda n, t, p: [n + 10**6, t, p], "a row that was not requested"),
    "no number": (lambda n, t, p: [None, t, p], "a row that was not requested"),
    "a list": (lambda n, t, p: [[n], t, p], "a row that was not requested"),
    "two fields": (lambda n, t, p: [n, t], "a row that is not [number, tokens, log-probs]"),
    "no row": (lambda n, t, p: 3, "a row that is not [number"),
}
BODIES = {
    "a row twice": (more, "or is finished"),
    "no JSON": (body_of("/step", b"<html>"), "no JSON"),
    "nested": (body_of("/step", b"[" * 100_000), "no JSON"),
    "a list": (body_of("/step", b"[]"), "no steps and rows"),
    "no steps": (body_of("/step", b'{"said": []}'), "no steps and rows"),
    "rows are no list": (body_of("/step", b'{"steps": 1, "said": {}}'), "no steps and rows"),
    "steps without rows": (idle(), "more steps than the rows can need"),
    "too large": (body_of("/step", b" " * 2**21), "bytes"),
}


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def pair():
    """Yield the addresses of two real servers."""
    with served(EngineHost(Plain)) as first, served(EngineHost(Plain)) as second:
        yield first, second


@pytest.fixture(scope="module")
def right(policy, pair):
    sampler = VLLMSampler(engine=ServerPool(pair[:1], 30.0))
    sampler.sync(policy, 1)
    return sampler.generate(CountDigits().sample(0, 4), SAMPLING)


def altering(case):
    return (rows(ROWS[case][0]), ROWS[case][1]) if case in ROWS else BODIES[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["NaN", "too many tokens", "never asked for", "a row twice", "no JSON"])
def test_server_with_invalid_responses_is_dropped_with_one_line(case, policy, pair, right, capsys):
    alter, says = altering(case)
    with altered(pair[1], alter) as url:
        sampler = VLLMSampler(engine=ServerPool([pair[0], url], 30.0))
        sampler.sync(policy, 1)
        for _ in range(3):
            assert sampler.generate(CountDigits().sample(0, 4), SAMPLING) == right
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"! {url}: it sent an invalid response: ")
    assert says in line
    assert line.endswith("rows go to the others")


@pytest.mark.slow
def test_server_is_taken_back_when_its_responses_are_valid_again(policy, pair, right, capsys):
    mad = threading.Event()
    mad.set()
    with altered(pair[1], lambda path, body: rows(ROWS["NaN"][0])(path, body) if mad.is_set() else body) as url:
        sampler = VLLMSampler(engine=ServerPool([pair[0], url], 30.0))
        sampler.sync(policy, 1)
        assert sampler.generate(CountDigits().sample(0, 4), SAMPLING) == right
        mad.clear()
        said = ""
        while "is back" not in said:
            sampler.sync(policy, 1)
            assert sampler.generate(CountDigits().sample(0, 4), SAMPLING) == right
            said += capsys.readouterr().out
    assert len(said.splitlines()) == 2


@pytest.fixture(scope="module")
def bent(policy, pair):
    """Yield a dict that holds the alteration of a proxy, and the trainer's client of the server behind it."""
    bend = {}
    with altered(pair[0], lambda *answer: bend["by"](*answer)) as url:  # noqa: PLW0108 - it is exchanged
        yield bend, SamplerClient(url, 30.0)


@pytest.mark.parametrize("case", [*ROWS, *BODIES])
def test_malformed_responses_raise_invalid_answer_error(case, policy, bent):
    bend, asked = bent
    alter, says = altering(case)
    bend["by"] = lambda path, body: body
    asked.load_model(serialize_model(policy))
    asked.push(get_push_weights(policy))
    bend["by"] = alter

    def all_steps():
        asked.step([SampleRequest(7, [1, 2], 8, 1.0, 0)])
        for _ in range(100):
            asked.step([])

    with pytest.raises(InvalidAnswerError, match="invalid response") as raised:
        all_steps()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


TENSORS = {
    "/read": [b"", b"{}", {"x": torch.zeros(2)}, {"logprobs": torch.zeros(7), "cached": torch.tensor(0)}],
    "/columns": [b"\x00" * 64, {}, {"1": torch.zeros(3, 1)}, {"0": torch.zeros(3)}, {"0": torch.zeros(3, 1).long()}],
}


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, bodies in TENSORS.items() for body in bodies])
def test_malformed_tensors_raise_invalid_answer_error(path, body, policy, bent):
    bend, asked = bent
    bend["by"] = lambda path, body: body
    asked.load_model(serialize_model(policy))
    asked.push(get_push_weights(policy))
    bend["by"] = body_of(path, body if isinstance(body, bytes) else safetensors.torch.save(body))
    with pytest.raises(InvalidAnswerError):
        asked.score_tokens([1, 2, 3]) if path == "/read" else asked.read_columns("model.embed_tokens.weight", [0])


@pytest.mark.parametrize(
    "state",
    [
        {"longest": "512"},
        {"block": True},
        {"version": "a\r\nHost: x"},
        {"model": None},
        {"longest": 0},
        {"block": 0},
        {"refusal": 3},
    ],
)
def test_malformed_state_raises_invalid_answer_error(state, policy, bent):
    bend, asked = bent
    bend["by"] = lambda path, body: body
    asked.load_model(serialize_model(policy))
    bend["by"] = lambda path, body: json.dumps(json.loads(body) | state).encode() if path == "/state" else body
    with pytest.raises(InvalidAnswerError):
        asked.load_model(serialize_model(policy))


def test_control_characters_in_server_messages_are_escaped(policy, bent):
    bend, asked = bent
    bend["by"] = lambda path, body: json.dumps(json.loads(body) | {"refusal": "\x1b]0;x\x07"}).encode()
    with pytest.raises(vllm_client.AdapterRefusedError) as raised:
        asked.load_model(serialize_model(policy))
    assert str(raised.value) == "\\x1b]0;x\\x07"
