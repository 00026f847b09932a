"""`benchmarks/hostile_clients.py` in its short form: a tiny model, a few seconds, everything that it does."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from conftest import CountDigits
from serving import running


@pytest.fixture
def hostile(monkeypatch):
    spec = importlib.util.spec_from_file_location("hostile_clients", "benchmarks/hostile_clients.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hostile_clients", module)
    spec.loader.exec_module(module)
    # The tiny model knows a hundred tokens at once, and few characters.
    monkeypatch.setattr(module, "QUESTIONS", [f"{a}+{a}=" for a in range(8)])
    long = next(case for case in module.HOSTILE if case.name == "a long prompt")
    short = long._replace(body=module.asking("12345 " * 15))
    monkeypatch.setattr(module, "HOSTILE", tuple(short if case is long else case for case in module.HOSTILE))
    monkeypatch.setattr(module, "STORY", {"max_tokens": 80})
    return module


@pytest.mark.slow
def test_among_hostile_clients_nobody_fails_who_should_not_and_greedy_answers_are_those_given_alone(hostile):
    with running(task=CountDigits()) as (_, url):
        storm = hostile.Storm(url, "tiny")
        memory, facts = hostile.rage(storm, os.getpid(), clients=10, seconds=3.0)
    assert storm.failures == []
    assert sum(storm.greedy.values()) == 0
    assert len(set(storm.alone.values())) > 1, "answers that are all alike show nothing"
    assert {"greedy", "greedy, streamed", "hangs up"} < {name for name, _ in storm.outcomes}
    assert (facts["rows"], facts["waiting"], facts["errors"]) == (0, 0, 0), facts["last_error"]
    assert "0 of" in hostile.report(storm, memory, facts).splitlines()[-1]


@pytest.mark.slow
def test_what_comes_to_another_end_is_a_failure(hostile):
    """The storm itself can fail: a service that refuses everybody."""
    with running(task=CountDigits(), token="unknown") as (_, url):
        storm = hostile.Storm(url, "tiny")
        hostile.rage(storm, os.getpid(), clients=2, seconds=0.5)
    assert any(failure.startswith("greedy: 401") for failure in storm.failures)


@pytest.mark.parametrize("name", ["half a character", "another origin", "body of 3 MB", "prompt of 900 kB"])
def test_each_hostile_request_has_the_status_that_it_should(hostile, name):
    case = next(case for case in hostile.HOSTILE if case.name == name)
    with running() as (_, url):
        assert hostile.Storm(url, "tiny").asked(case)[0] == case.expected
