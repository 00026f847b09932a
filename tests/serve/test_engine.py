"""Test the serving engine alone: failures of single requests, the queue, stop strings and throughput."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from conftest import make_policy
from pellucid.models.sampling import Truncation
from pellucid.serve import engine as engines
from pellucid.serve.engine import (
    GenerationRequest,
    GenerationRow,
    SampledToken,
    ServingEngine,
    ThroughputMeter,
)
from pellucid.serve.middleware import RequestError
from serving import wait_until


class Texts:
    """A policy that decodes each token id to a given text."""

    eos_ids = (-1,)

    def __init__(self, *texts):
        self.texts, self.read = texts, 0

    def decode(self, ids):
        self.read += len(ids)
        return "".join(self.texts[i] for i in ids)

    @property
    def token_bytes(self):
        return SimpleNamespace(get_bytes=lambda token: self.texts[token].encode())


@pytest.fixture
def engine():
    policy = make_policy("llama")
    policy.eos_ids = (-1,)
    return ServingEngine(policy, max_rows=8, max_waiting=4)


def asked(engine, **settings):
    """Submit a request. Return it and the list that receives its events."""
    told = []
    request = GenerationRequest((1, 2, 3), told.append, **{"max_tokens": 6, "seed": 1, **settings})
    engine.submit(request)
    return request, told


def flown(engine):
    """Step the engine until no request is left."""
    while engine.waiting or engine.running.requests:
        engine.step()


def said(told):
    """Return the token ids and the last event."""
    pieces = [piece for piece in told if isinstance(piece, tuple)]
    return [token.token_id for piece in pieces for token in piece.tokens], told[-1]


def alone(**settings):
    policy = make_policy("llama")
    policy.eos_ids = (-1,)
    engine = ServingEngine(policy, max_rows=8)
    _, told = asked(engine, **settings)
    flown(engine)
    return said(told)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "bad", [{"truncation": Truncation(top_k=1.5)}, {"temperature": 1e-46}], ids=["top_k", "temperature"]
)
def test_request_with_invalid_sampling_settings_fails_alone(engine, bad):
    """The service refuses such settings. If one gets past it, no other request may fail."""
    _, good = asked(engine)
    _, failed = asked(engine, **bad)
    _, after = asked(engine, seed=2)
    flown(engine)
    assert isinstance(failed[-1], Exception)
    assert said(good) == alone()
    assert said(after) == alone(seed=2)
    assert engine.error_count == 1


def test_broken_row_fails_alone_among_rows_sampled_together(engine, monkeypatch):
    """A prompt that overflows fp16 gives a row of NaN. Its neighbors have the same sampling settings."""
    draw = engines.sample_tokens

    def refuses_nan(logits, *settings):
        if logits.isnan().any():
            raise RuntimeError("index out of range")
        return draw(logits, *settings)

    monkeypatch.setattr(engines, "sample_tokens", refuses_nan)
    asked_for = [asked(engine, seed=seed, n=2)[1] for seed in (1, 2, 3)]
    engine._admit()
    engine.running.logits[2] = math.nan
    flown(engine)
    assert str(asked_for[1][-1]) == "index out of range"
    for seed, told in ((1, asked_for[0]), (3, asked_for[2])):
        assert said(told) == alone(seed=seed, n=2)


def test_row_that_cannot_be_decoded_fails_alone(engine):
    decode, first = engine.policy.decode, []

    def unreadable(ids, **settings):
        if (
            engine.running.requests
            and engine.running.requests[0].token_ids[-len(ids) :] == ids
            and len(first) < 1
            and ids
        ):
            first.append(ids)
            raise KeyError("no such token")
        return decode(ids, **settings)

    engine.policy.decode = unreadable
    _, failed = asked(engine)
    _, good = asked(engine, seed=2)
    flown(engine)
    assert isinstance(failed[-1], KeyError)
    assert said(good) == alone(seed=2)
    assert engine.last_error == "KeyError: 'no such token'"


def test_listener_that_raises_counts_as_a_client_that_left(engine):
    """A closed event loop raises when an event is sent to it."""

    def tell(_):
        raise RuntimeError("Event loop is closed")

    deaf = GenerationRequest((1, 2, 3), tell, max_tokens=100)
    engine.submit(deaf)
    _, good = asked(engine, seed=2)
    engine._admit()
    assert [row.request is deaf for row in engine.running.requests] == [True, False]
    engine.step()
    assert [row.request is deaf for row in engine.running.requests] == [False], "its row is free at once"
    flown(engine)
    assert said(good) == alone(seed=2)


@pytest.mark.parametrize("error", [ValueError("v"), IndexError("i"), MemoryError(), AssertionError("a")])
def test_error_in_a_step_is_reported_and_the_engine_continues(error):
    policy = make_policy("llama")
    policy.eos_ids = (-1,)
    engine = ServingEngine(policy, max_rows=8)
    broken, over = engine.running, threading.Event()

    def step(_):
        raise error

    broken.step = step
    lost, told = [], []
    thread = threading.Thread(target=engine.run, daemon=True)
    engine.submit(GenerationRequest((1, 2, 3), lambda news: (lost.append(news), over.set()), max_tokens=6))
    thread.start()
    assert over.wait(60)
    wait_until(lambda: engine.running is not broken)
    ended = threading.Event()
    engine.submit(
        GenerationRequest(
            (1, 2, 3), lambda news: (told.append(news), news is None and ended.set()), max_tokens=6, seed=1
        )
    )
    assert ended.wait(60)
    engine.close()
    thread.join()
    assert lost[-1] is error
    assert said(told) == alone()
    assert engine.describe_state()["errors"] == 1
    assert engine.describe_state()["last_error"].startswith(type(error).__name__)


def test_unrecoverable_error_fails_all_requests_and_is_raised():
    policy = make_policy("llama")
    policy.eos_ids = (-1,)
    engine = ServingEngine(policy, max_rows=1)
    told = [asked(engine, max_tokens=100)[1] for _ in range(3)]

    def broken(*_):
        raise RuntimeError("the device is lost")

    engine.running.batch.admit = policy.create_decode_batch = broken
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.run()
    assert [type(news[-1]) for news in told] == [RuntimeError, RequestError, RequestError]
    with pytest.raises(RequestError, match="shutting down"):
        asked(engine)


# ---------------------------------------------------------------- the queue


def test_requests_beyond_the_queue_limit_are_refused(engine):
    """The engine has eight rows and a queue of four. Queued requests that it has already seen count as well."""
    for seed in range(8):
        asked(engine, seed=seed, n=1, max_tokens=100)
        engine._admit()
    assert len(engine.running.requests) == 8
    for _ in range(4):
        asked(engine)
        engine._admit()
    with pytest.raises(RequestError, match="too many requests are waiting"):
        asked(engine)
    assert engine.describe_state()["waiting"] == 4
    engine.waiting[0].cancelled = True
    asked(engine)  # a canceled request makes room
    with pytest.raises(RequestError):
        asked(engine)


def test_prompts_are_prefilled_together_up_to_the_score_limit(engine, monkeypatch):
    monkeypatch.setattr(engines, "MAX_PREFILL_SCORES", 2 * 20**2)
    read, admit = [], engine.running.batch.admit
    engine.running.batch.admit = lambda prompts, n: (
        read.append([len(prompt) for prompt in prompts]) or admit(prompts, n)
    )
    for length in (5, 6, 7, 20):
        engine.submit(GenerationRequest([1] * length, print, max_tokens=2))
    engine._admit()
    assert read == [[5, 6, 7], [20]]


def test_long_prompt_waits_until_the_kv_cache_has_room(engine, monkeypatch):
    """Each prompt in flight is padded to the longest one. A prompt that runs alone is served at any length."""
    monkeypatch.setattr(engines, "MAX_CACHED_PROMPT_TOKENS", 60)
    for length in (10, 10, 20, 100):
        engine.submit(GenerationRequest([1] * length, lambda _: None, max_tokens=3))
    engine._admit()
    assert [len(row.request.prompt_ids) for row in engine.running.requests] == [10, 10, 20]
    while engine.running.requests:
        engine.scheduler.step()
    engine._admit()
    assert [len(row.request.prompt_ids) for row in engine.running.requests] == [100]


def test_heap_is_trimmed_after_each_step_and_before_the_engine_waits(engine):
    """The memory of finished prompts is measured after every step and returned before the engine waits."""
    happened, over = [], threading.Event()
    engine.heap.trim_after_step = lambda: happened.append("step")
    engine.heap.trim = lambda: happened.append("given back")
    engine.submit(GenerationRequest((1, 2, 3), lambda news: news is None and over.set(), max_tokens=5))
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    assert over.wait(60)
    wait_until(lambda: len(happened) == 6)
    engine.close()
    thread.join()
    assert happened == ["step"] * 5 + ["given back"]


# ---------------------------------------------------------------- text


def test_only_new_text_is_searched_for_stop_strings():
    """Neither the text kept for the search nor the tokens decoded per step grow with the length of the answer."""
    policy, told = Texts("aaaa"), ""
    row = GenerationRow(GenerationRequest((), print, max_tokens=10**6, stop=["a" * 40 + "b"]), 0, torch.Generator())
    for number in range(500):
        piece = row.append_token(SampledToken(0, 0.0), policy)
        told += piece.text if piece else ""
        assert len(row.unsent_text) == min(40, 4 * (number + 1))
        assert told + row.unsent_text == "aaaa" * (number + 1), "what cannot begin a stop is told at once"
    assert policy.read <= 500 * 3


def test_only_text_that_may_begin_a_stop_string_is_held_back():
    texts = ["one E", "N", "D", "ED", " EN", "DING"]
    row = GenerationRow(GenerationRequest((), print, max_tokens=100, stop=["ENDING", "never"]), 0, torch.Generator())
    pieces = [row.append_token(SampledToken(i, 0.0), Texts(*texts)) for i in range(6)]
    assert [piece and piece.text for piece in pieces] == ["one ", None, None, "ENDED", " ", ""]
    assert pieces[-1].finish_reason == "stop"
    assert [token.token_id for piece in pieces if piece for token in piece.tokens] == [0, 1, 2, 3, 4, 5]


def test_earliest_of_several_stop_strings_ends_the_text():
    row = GenerationRow(GenerationRequest((), print, max_tokens=100, stop=["yz", "xyz", "q"]), 0, torch.Generator())
    piece = row.append_token(SampledToken(0, 0.0), Texts("wxyzq"))
    assert (piece.text, piece.finish_reason) == ("w", "stop")


def test_character_that_never_completes_does_not_hold_back_text():
    """To decode all held tokens again at each step would take quadratic time."""
    policy = Texts("\ufffd")
    row = GenerationRow(GenerationRequest((), print, max_tokens=10**6), 0, torch.Generator())
    told = [piece.text for _ in range(320) if (piece := row.append_token(SampledToken(0, 0.0), policy))]
    assert "".join(told) == "\ufffd" * 320
    assert policy.read <= 320 * 3 * 16


# ---------------------------------------------------------------- throughput


def test_throughput_is_the_mean_over_the_last_ten_seconds():
    meter = ThroughputMeter()
    for now, count in ((100.2, 5), (100.9, 5), (101.0, 20), (109.9, 10), (110.5, 1000)):
        meter.add(count, now)
    assert meter.compute_rate(110.6) == pytest.approx((5 + 5 + 20 + 10) / 10)
    assert meter.compute_rate(111.0) == pytest.approx((20 + 10 + 1000) / 10)
    assert meter.compute_rate(200.0) == 0.0
