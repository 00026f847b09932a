"""The scheduler alone: admission of requests, and removal of finished and canceled rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from conftest import EOS, make_policy
from pellucid.rollout.groups import generate_uniforms, sample_tokens
from pellucid.rollout.scheduler import RowState, Scheduler
from pellucid.types import Sampling

SAMPLING = Sampling(max_tokens=24)


@dataclass(eq=False)
class Row:
    uniforms: Iterator[float]
    tokens: list[int] = field(default_factory=list)


def append_tokens(row, ids, logprobs, extras):
    n = next((i + 1 for i, token in enumerate(ids) if token == EOS), len(ids))
    row.tokens += ids[:n]
    finished = row.tokens[-1] == EOS or len(row.tokens) == SAMPLING.max_tokens
    return RowState.FINISHED if finished else RowState.DECODING


def make_scheduler(max_rows=8, **settings):
    return Scheduler(
        make_policy("llama"),
        max_rows,
        lambda _, logits, uniforms: sample_tokens(logits, uniforms, SAMPLING),
        append_tokens,
        **settings,
    )


def add_requests(scheduler, sizes):
    requests = [[Row(generate_uniforms(100 * p + g)) for g in range(size)] for p, size in enumerate(sizes)]
    for p, rows in enumerate(requests):
        scheduler.add_request([1, 2, 3 + p], rows)
    return requests


@pytest.mark.parametrize("compacts_at_once", [True, False])
@pytest.mark.parametrize("tokens", [1, 8])
def test_tokens_do_not_depend_on_when_finished_rows_are_dropped(compacts_at_once, tokens):
    expected, scheduler = make_scheduler(max_rows=100), make_scheduler(compacts_at_once=compacts_at_once)
    (at_once, later) = (add_requests(each, [4, 4, 4, 4, 4]) for each in (expected, scheduler))
    while expected.has_requests:
        expected.step()
    while scheduler.has_requests:
        longest = max((len(row.tokens) for row in scheduler.decoding), default=0)
        scheduler.step(min(tokens, SAMPLING.max_tokens - longest))
    assert [[row.tokens for row in rows] for rows in later] == [[row.tokens for row in rows] for rows in at_once]
    assert not scheduler.running.requests


def test_a_small_request_never_overtakes_a_large_one():
    scheduler = make_scheduler()
    first, large, small = add_requests(scheduler, [4, 6, 1])
    scheduler.admit()
    assert set(scheduler.running.requests) == scheduler.decoding == set(first)
    assert [request.rows for request in scheduler.waiting] == [large, small]


def test_slots_of_finished_rows_are_free_when_on_finished_is_called():
    finished = []

    def on_finished(rows):
        finished.extend(rows)
        assert not set(rows) & {*scheduler.running.requests, *scheduler.decoding}

    scheduler = make_scheduler(on_finished=on_finished)
    requests = add_requests(scheduler, [4, 2, 8])
    while scheduler.has_requests:
        scheduler.step()
    assert len(finished) == 14
    assert set(finished) == {row for rows in requests for row in rows}


def test_a_canceled_row_leaves_no_cache_behind():
    """Neither a row that is paused in its slot nor an evicted row keeps its cache."""
    scheduler = make_scheduler()
    [rows] = add_requests(scheduler, [4])
    scheduler.append_tokens = lambda row, *_: RowState.PAUSED if row in rows[:2] else RowState.DECODING
    scheduler.step()
    scheduler.evict(rows[:1])
    assert (list(scheduler.evicted), list(scheduler.paused)) == (rows[:1], rows[1:2])
    scheduler.cancel(rows[:2])
    assert not scheduler.evicted
    assert not scheduler.paused
    assert scheduler.running.requests == rows[2:]
    scheduler.step()
    assert len(scheduler.running.logits) == 2
