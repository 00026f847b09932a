"""Test `benchmarks/hostile_clients.py` in a run of a few seconds with a tiny model."""

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
    # The tiny model has a context of about a hundred tokens and knows few characters.
    monkeypatch.setattr(module, "QUESTIONS", [f"{a}+{a}=" for a in range(8)])
    long = next(case for case in module.CASES if case.name == "a long prompt")
    short = long._replace(body=module.make_body("12345 " * 15))
    monkeypatch.setattr(module, "CASES", tuple(short if case is long else case for case in module.CASES))
    monkeypatch.setattr(module, "STORY", {"max_tokens": 80})
    return module


@pytest.mark.slow
def test_hostile_clients_neither_break_requests_nor_change_greedy_answers(hostile):
    with running(task=CountDigits()) as (_, url):
        storm = hostile.StressTest(url, "tiny")
        memory, facts = hostile.run_clients(storm, os.getpid(), clients=10, seconds=3.0)
    assert storm.failures == []
    assert sum(storm.mismatches.values()) == 0
    assert len(set(storm.baseline.values())) > 1, "answers that are all alike show nothing"
    assert {"greedy", "greedy, streamed", "hangs up"} < {name for name, _ in storm.outcomes}
    assert (facts["rows"], facts["waiting"], facts["errors"]) == (0, 0, 0), facts["last_error"]
    assert "0 of" in hostile.format_report(storm, memory, facts).splitlines()[-1]


@pytest.mark.slow
def test_unexpected_status_is_a_failure(hostile):
    """The service refuses every request, which the stress test must report."""
    with running(task=CountDigits(), token="unknown") as (_, url):
        storm = hostile.StressTest(url, "tiny")
        hostile.run_clients(storm, os.getpid(), clients=2, seconds=0.5)
    assert any(failure.startswith("greedy: 401") for failure in storm.failures)


@pytest.mark.parametrize("name", ["half a character", "another origin", "body of 3 MB", "prompt of 900 kB"])
def test_each_hostile_request_gets_its_expected_status(hostile, name):
    case = next(case for case in hostile.CASES if case.name == name)
    with running() as (_, url):
        assert hostile.StressTest(url, "tiny").send(case)[0] == case.expected
