"""The engine alone: what belongs to one request stays with it, whatever it is."""

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
    """A policy that decodes tokens to texts of its own."""

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
    """A request on board, and what it is told."""
    told = []
    request = GenerationRequest((1, 2, 3), told.append, **{"max_tokens": 6, "seed": 1, **settings})
    engine.submit(request)
    return request, told


def flown(engine):
    """Until nobody is left."""
    while engine.waiting or engine.running.requests:
        engine.step()


def said(told):
    """The tokens, and how it ended."""
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
def test_settings_that_cannot_be_drawn_by_fail_alone(engine, bad):
    """They pass no door of the service; should they come in, nobody else may hear of it."""
    _, good = asked(engine)
    _, failed = asked(engine, **bad)
    _, after = asked(engine, seed=2)
    flown(engine)
    assert isinstance(failed[-1], Exception)
    assert said(good) == alone()
    assert said(after) == alone(seed=2)
    assert engine.error_count == 1


def test_of_rows_that_are_drawn_together_the_broken_one_fails_alone(engine, monkeypatch):
    """As a row of NaN may be, where a prompt has overflowed fp16: its neighbours have the same settings."""
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


def test_a_row_whose_text_cannot_be_read_fails_alone(engine):
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


def test_a_listener_that_is_gone_is_one_that_left(engine):
    """A closed event loop raises where it is told anything."""

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
def test_whatever_goes_wrong_in_a_step_is_told_and_the_engine_goes_on(error):
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


def test_an_engine_that_cannot_go_on_tells_everybody_and_says_why():
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


def test_as_many_wait_as_may_and_no_more_wherever_they_wait(engine):
    """Room for eight rows and four who wait: those whom the engine has seen count as those whom it has not."""
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
    asked(engine)  # whoever has left makes room
    with pytest.raises(RequestError):
        asked(engine)


def test_prompts_are_read_together_while_their_scores_have_room(engine, monkeypatch):
    monkeypatch.setattr(engines, "MAX_PREFILL_SCORES", 2 * 20**2)
    read, admit = [], engine.running.batch.admit
    engine.running.batch.admit = lambda prompts, n: (
        read.append([len(prompt) for prompt in prompts]) or admit(prompts, n)
    )
    for length in (5, 6, 7, 20):
        engine.submit(GenerationRequest([1] * length, print, max_tokens=2))
    engine._admit()
    assert read == [[5, 6, 7], [20]]


def test_a_long_prompt_waits_until_others_leave_it_room(engine, monkeypatch):
    """Each prompt in flight has the room of the longest. One alone is served, however long."""
    monkeypatch.setattr(engines, "MAX_CACHED_PROMPT_TOKENS", 60)
    for length in (10, 10, 20, 100):
        engine.submit(GenerationRequest([1] * length, lambda _: None, max_tokens=3))
    engine._admit()
    assert [len(row.request.prompt_ids) for row in engine.running.requests] == [10, 10, 20]
    while engine.running.requests:
        engine.scheduler.step()
    engine._admit()
    assert [len(row.request.prompt_ids) for row in engine.running.requests] == [100]


def test_memory_follows_what_is_in_flight_and_goes_back_when_nobody_is(engine):
    """What is kept of prompts that have left is measured after every step, and given back before the engine waits."""
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


def test_only_new_text_is_searched_for_stops():
    """What is kept to be searched never grows beyond the longest stop and the news, nor what is decoded."""
    policy, told = Texts("aaaa"), ""
    row = GenerationRow(GenerationRequest((), print, max_tokens=10**6, stop=["a" * 40 + "b"]), 0, torch.Generator())
    for number in range(500):
        piece = row.append_token(SampledToken(0, 0.0), policy)
        told += piece.text if piece else ""
        assert len(row.unsent_text) == min(40, 4 * (number + 1))
        assert told + row.unsent_text == "aaaa" * (number + 1), "what cannot begin a stop is told at once"
    assert policy.read <= 500 * 3


def test_what_may_begin_a_stop_is_held_back_and_no_more():
    texts = ["one E", "N", "D", "ED", " EN", "DING"]
    row = GenerationRow(GenerationRequest((), print, max_tokens=100, stop=["ENDING", "never"]), 0, torch.Generator())
    pieces = [row.append_token(SampledToken(i, 0.0), Texts(*texts)) for i in range(6)]
    assert [piece and piece.text for piece in pieces] == ["one ", None, None, "ENDED", " ", ""]
    assert pieces[-1].finish_reason == "stop"
    assert [token.token_id for piece in pieces if piece for token in piece.tokens] == [0, 1, 2, 3, 4, 5]


def test_the_first_of_several_stops_ends_a_text():
    row = GenerationRow(GenerationRequest((), print, max_tokens=100, stop=["yz", "xyz", "q"]), 0, torch.Generator())
    piece = row.append_token(SampledToken(0, 0.0), Texts("wxyzq"))
    assert (piece.text, piece.finish_reason) == ("w", "stop")


def test_a_character_that_never_becomes_whole_is_not_waited_for():
    """Tokens that are read again each time would be a square of them."""
    policy = Texts("\ufffd")
    row = GenerationRow(GenerationRequest((), print, max_tokens=10**6), 0, torch.Generator())
    told = [piece.text for _ in range(320) if (piece := row.append_token(SampledToken(0, 0.0), policy))]
    assert "".join(told) == "\ufffd" * 320
    assert policy.read <= 320 * 3 * 16


# ---------------------------------------------------------------- the meter


def test_tokens_are_counted_by_the_second_over_the_last_ten():
    meter = ThroughputMeter()
    for now, count in ((100.2, 5), (100.9, 5), (101.0, 20), (109.9, 10), (110.5, 1000)):
        meter.add(count, now)
    assert meter.compute_rate(110.6) == pytest.approx((5 + 5 + 20 + 10) / 10)
    assert meter.compute_rate(111.0) == pytest.approx((20 + 10 + 1000) / 10)
    assert meter.compute_rate(200.0) == 0.0
