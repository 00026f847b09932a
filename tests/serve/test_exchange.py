"""Test clients that are slow, hang up or send invalid values, and shutdown with requests in flight."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from conftest import CountDigits
from pellucid.serve.api import create_completion
from pellucid.serve.schemas import ChatRequest
from pellucid.types import Prompt, Reward
from serving import chat, post, request, running, wait_until

CHAT = "/v1/chat/completions"


def endless(served):
    """Make answers end only at their token limit, and return the service."""
    served.policy.eos_ids = (-1,)
    return served


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def sent(url, path, body):
    """Open a connection, send a whole request and return the connection."""
    data = json.dumps(body).encode()
    client = connected(url)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


# ---------------------------------------------------------------- clients that hang up


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(n=4, max_tokens=110)),
        (CHAT, chat(n=4, max_tokens=110, stream=True)),
        ("/v1/completions", {"prompt": "2+3=", "n": 4, "max_tokens": 110, "stream": True}),
        ("/group", {"question": "2+3=", "group_size": 4, "max_tokens": 110}),
        ("/solve_question", {"question": "2+3="}),
    ],
)
def test_hanging_up_frees_the_rows_at_once(path, body):
    """The engine is paused until the client has left, so no answer can finish before that."""
    with running(max_tokens=100) as (served, url):
        go_on, step = threading.Event(), endless(served).engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: go_on.wait(60) and step(tokens)
        client = sent(url, path, body)
        wait_until(lambda: served.engine.running.requests)
        [asked] = {row.request for row in served.engine.running.requests}
        client.close()
        wait_until(lambda: asked.cancelled)
        go_on.set()
        wait_until(lambda: not served.engine.running.requests)
        assert asked.max_tokens > 90
        assert len(served.engine.meter.counts) < 90, "nobody was decoded for"
        assert request(f"{url}/health")[1]["rows"] == 0


def test_stream_that_never_started_frees_its_rows():
    """The client leaves between the request and the first byte, so no code of the stream ever runs."""

    async def leave_at_once():
        request = ChatRequest(**chat(stream=True))
        await create_completion(served, request, Prompt("p", "2+3="), is_chat=True, max_tokens=100)
        while not served.engine.running.requests:
            await asyncio.sleep(0.01)
        [decoded] = {row.request for row in served.engine.running.requests}
        assert not decoded.cancelled
        return decoded

    with running() as (served, _):
        go_on, step = threading.Event(), endless(served).engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: go_on.wait(60) and step(tokens)
        assert asyncio.run(leave_at_once()).cancelled
        go_on.set()


def test_hanging_up_removes_the_request_from_the_queue():
    with running(rows=1, waiting=1) as (served, url):
        go_on, step = threading.Event(), endless(served).engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: go_on.wait(60) and step(tokens)
        first = sent(url, CHAT, chat(max_tokens=100))
        wait_until(lambda: served.engine.running.requests)
        second = sent(url, CHAT, chat(max_tokens=1))
        wait_until(lambda: served.engine.waiting)
        assert post(url + CHAT, chat())[0] == 503
        second.close()
        wait_until(lambda: served.engine.waiting[0].cancelled)
        first.close()
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(post, url + CHAT, chat(max_tokens=2))
            go_on.set()
            assert third.result()[0] == 200


def test_health_shows_rows_queue_and_errors():
    with running(rows=2, waiting=7) as (served, url):
        go_on, step = threading.Event(), endless(served).engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: go_on.wait(60) and step(tokens)
        clients = [sent(url, CHAT, chat(n=2, max_tokens=3)) for _ in range(3)]
        wait_until(lambda: served.engine.running.requests and len(served.engine.waiting) == 2)
        facts = request(f"{url}/health")[1]
        assert {key: facts[key] for key in ("rows", "rows_at_most", "waiting", "waiting_at_most", "errors")} == {
            "rows": 2, "rows_at_most": 2, "waiting": 2, "waiting_at_most": 7, "errors": 0,
        }  # fmt: skip
        go_on.set()
        for client in clients:
            with client:
                assert b"200 OK" in client.recv(1000)
        served.engine.running.batch.step = lambda _: {}["broken"]
        assert post(url + CHAT, chat())[0] == 500
        facts = request(f"{url}/health")[1]
        assert (facts["rows"], facts["errors"], facts["last_error"]) == (0, 1, "KeyError: 'broken'")
        assert facts["requests"] == 6
        assert sum(count for _, count in served.engine.meter.counts) >= 3 * 2 * 3


# ---------------------------------------------------------------- slow clients


def ends(client):
    """Return all that the server sends before it closes the connection. If it never does, the suite's timeout fires."""
    said = b""
    with client, suppress(ConnectionResetError):
        while chunk := client.recv(10_000):
            said += chunk
    return said


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "answered"])
def test_unfinished_headers_close_the_connection(first):
    """This holds for a new connection and after an answer, even if a byte arrives now and then."""
    with running(patience=0.5) as (_, url):
        client = connected(url)
        if first:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in client.recv(10_000)
        closed = threading.Event()
        client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        threading.Thread(target=drip, args=(client, closed), daemon=True).start()
        assert b"200 OK" not in ends(client)
        closed.set()
        assert request(f"{url}/health")[0] == 200


def drip(client, closed):
    while not closed.wait(0.05):
        try:
            client.sendall(b"x")
        except OSError:
            return


@pytest.mark.slow
def test_silent_connection_is_closed():
    with running(patience=0.5) as (_, url):
        assert ends(connected(url)) == b""


@pytest.mark.slow
def test_unfinished_body_returns_408():
    with running(body_seconds=0.3) as (_, url):
        client = connected(url)
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        said = ends(client)
        assert b"408" in said.splitlines()[0]
        assert b"did not come within 0.3 seconds" in said
        assert request(f"{url}/health")[0] == 200


@pytest.mark.slow
def test_request_of_a_client_that_reads_nothing_is_canceled(monkeypatch):
    """Texts are made 100,000 times longer, more than the sockets can buffer."""
    with running(send_seconds=0.3, patience=0.5, max_tokens=100) as (served, url):
        decode = endless(served).policy.decode
        monkeypatch.setattr(served.policy, "decode", lambda ids, **settings: 100_000 * decode(ids, **settings))
        client = sent(url, CHAT, chat(n=8, max_tokens=100, stream=True))
        wait_until(lambda: served.engine.running.requests)
        [asked] = {row.request for row in served.engine.running.requests}
        wait_until(lambda: asked.cancelled)
        wait_until(lambda: not served.engine.running.requests)
        ends(client)
        assert request(f"{url}/health")[0] == 200


@pytest.mark.slow
def test_request_timeout_includes_grading():
    class Slow(CountDigits):
        def reward(self, prompt, completion):
            graded.append(completion)
            go_on.wait(60)
            return Reward(1.0)

    graded, go_on = [], threading.Event()
    with running(task=Slow(), timeout=1.0) as (served, url):
        assert request(f"{url}/group", {"group_size": 8, "max_tokens": 2})[0] == 504
        go_on.set()
        served.grading_pool.shutdown()
        assert len(graded) == 1, "nobody waits for the other seven"


@pytest.mark.slow
def test_tokenizing_a_long_text_does_not_block_other_requests():
    with running() as (served, url):
        encode, begun, go_on = served.policy.encode, threading.Event(), threading.Event()

        def slow(prompt):
            begun.set()
            go_on.wait(60)
            return encode(prompt)

        with ThreadPoolExecutor(1) as pool:
            served.policy.encode = slow
            long = pool.submit(post, url + CHAT, chat("1" * 500_000))
            assert begun.wait(60)
            served.policy.encode = encode
            assert request(f"{url}/health")[0] == 200
            assert post(url + CHAT, chat(max_tokens=2))[0] == 200
            go_on.set()
            assert long.result()[1]["error"]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- invalid text, values out of range


HALF = '"\\ud83d"'


@pytest.mark.parametrize(
    "raw",
    [
        f'{{"messages": [{{"role": "user", "content": {HALF}}}]}}',
        f'{{"model": {HALF}, "messages": [{{"role": "user", "content": "a"}}]}}',
        f'{{"messages": [{{"role": {HALF}, "content": "a"}}]}}',
        f'{{{HALF}: 1, "messages": [{{"role": "user", "content": "a"}}]}}',
        f'{{"messages": [{{"role": "user", "content": "a"}}], "stop": [{HALF}]}}',
        f'{{"messages": [{{"role": "user", "content": "a"}}], "user": {HALF}}}',
        '{"messages": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"messages": [{"role": "user", "content": "a"}], "seed": ' + "9" * 5000 + "}",
        '{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}',
    ],
)
def test_json_values_that_cannot_be_used_return_400_with_a_message(service, raw):
    status, answer = post(service[1] + CHAT, None, raw.encode())
    assert status == 400
    assert answer["error"]["message"]
    assert "\ud83d" not in answer["error"]["message"]


@pytest.fixture(scope="module")
def service():
    with running(task=CountDigits()) as (served, url):
        yield served, url


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"top_p": 1e-46}, "top_p"),
        ({"top_p": 9e-7}, "top_p"),
        ({"temperature": 1e-40}, "temperature: Value error, must be 0, for the likeliest token, or at least 1e-06"),
        ({"temperature": 9e-7}, "temperature"),
        ({"stop": "x" * 150_000}, "stop.0: String should have at most 256 characters"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop: List should have at most 4 items"),
        ({"stop": 5}, "stop"),
        ({"model": "x" * 1000}, "model"),
        ({"user": "x" * 1000}, "user"),
        ({"seed": 2**63}, "seed"),
        ({"top_k": 10**20}, "top_k"),
        ({"n": 10**20}, "n"),
        ({"max_tokens": 10**20}, "max_tokens"),
        ({"min_p": 1.1}, "min_p"),
    ],
)
def test_field_out_of_range_returns_400_and_is_no_engine_error(service, settings, complaint):
    served, url = service
    errors = served.engine.error_count
    status, answer = post(url + CHAT, chat(**settings))
    assert status == 400
    assert complaint in answer["error"]["message"]
    assert served.engine.error_count == errors


@pytest.mark.parametrize("settings", [{"top_p": 1e-6}, {"temperature": 1e-6}, {"top_p": 1e-6, "temperature": 1e-6}])
def test_smallest_top_p_and_temperature_give_the_greedy_answer(service, settings):
    """The likeliest of 28 tokens has a probability of at least 1/28, and fp32 logits differ by more than 1e-6 here."""
    greedy = post(service[1] + CHAT, chat(temperature=0))[1]["choices"]
    assert [c["message"] for c in post(service[1] + CHAT, chat(**settings))[1]["choices"]] == [
        choice["message"] for choice in greedy
    ]


def test_token_beyond_the_model_vocabulary_returns_400():
    """The tokenizer has the token and the model does not. To look it up would break the engine for all requests."""
    with running() as (served, url):
        served.policy.tokenizer.add_tokens(["<|new|>"])
        status, answer = post(url + CHAT, chat("<|new|>"))
        assert status == 400
        assert "is beyond the 28 tokens that the model has" in answer["error"]["message"]


def test_chat_that_the_template_refuses_returns_400():
    with running() as (served, url):
        served.policy.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        status, answer = post(url + CHAT, chat())
        assert status == 400
        assert "roles must alternate" in answer["error"]["message"]


# ---------------------------------------------------------------- shutdown


def test_requests_in_flight_finish_before_shutdown():
    with running(grace=60.0) as (served, url):
        go_on, step = threading.Event(), endless(served).engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: go_on.wait() and step(tokens)
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(post, url + CHAT, chat(max_tokens=100)) for _ in range(12)]
            wait_until(lambda: len(served.engine.running.requests) + len(served.engine.waiting) == 12)
            served.stop()
            go_on.set()
            found = [answer.result() for answer in answers]
        assert {status for status, _ in found} == {200}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_requests_unfinished_at_shutdown_get_an_api_error(stream):
    with running(grace=0.5, rows=4) as (served, url):
        step = endless(served).engine.running.batch.step
        served.engine.running.batch.step = lambda tokens: time.sleep(0.2) or step(tokens)
        clients = [sent(url, CHAT, chat(max_tokens=100, stream=stream)) for _ in range(12)]
        wait_until(lambda: len(served.engine.running.requests) == 4 and len(served.engine.waiting) == 8)
        served.stop()
        for client in clients:
            head, _, body = ends(client).partition(b"\r\n\r\n")
            assert (b"200 OK" if stream else b"503 Service Unavailable") in head
            assert b'"message"' in body
            assert b"the service is shutting down" in body


@pytest.mark.slow
def test_request_in_grading_at_shutdown_gets_an_api_error():
    """Grading takes longer than the grace period. uvicorn cancels it and would answer with a plain 500."""

    class Slow(CountDigits):
        def reward(self, prompt, completion):
            go_on.wait(60)
            return Reward(1.0)

    go_on = threading.Event()
    with running(task=Slow(), grace=0.5) as (served, url):
        client = sent(url, "/group", {"group_size": 2, "max_tokens": 2})
        wait_until(lambda: served.grading_pool._threads)
        served.stop()
        head, _, body = ends(client).partition(b"\r\n\r\n")
        go_on.set()
        assert b"503 Service Unavailable" in head
        assert json.loads(body)["error"]["message"] == "the service is shutting down"


@pytest.mark.slow
def test_half_a_body_at_shutdown_gets_an_api_error_without_traceback(caplog):
    """The log is what the terminal shows."""
    with running(grace=0.5) as (served, url):
        client = connected(url)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        client.sendall(head.encode() + b"{")
        wait_until(lambda: request(f"{url}/health")[1]["requests"] >= 2)
        served.stop()
        head, _, body = ends(client).partition(b"\r\n\r\n")
    assert b"503 Service Unavailable" in head
    assert json.loads(body)["error"]["message"] == "the service is shutting down"
    assert not [record for record in caplog.records if record.exc_info]
