"""The server of the page: to this machine, by its name, and nothing but GET."""

from __future__ import annotations

import http.client
import json

import pytest

from looking import looking
from made_runs import small_run
from pellucid.look import server as serving
from pellucid.look.reading import Run
from pellucid.look.server import Looking
from pellucid.types import UserError


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with looking(small_run(tmp_path_factory.mktemp("look") / "run", steps=2)) as server:
        yield server


def asked(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_page_forbids_whatever_is_not_its_own(server):
    answer, body = asked(server, "/")
    policy = answer.headers["Content-Security-Policy"]
    assert answer.status == 200
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "innerHTML" not in body


def test_data_by_its_key(server):
    answer, body = asked(server, "/data/0/summaries/0")
    assert [step["step"] for step in json.loads(body)] == [1, 2]
    assert answer.headers["Cache-Control"] == "no-store"
    answer, body = asked(server, "/data/0/tokens/7")
    assert answer.status == 404
    assert "no tokens of step 7" in json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/etc/passwd", "/../config.json", "/data/1/overview", "/data/0/../x", "/data/"])
def test_there_is_nothing_else(server, path):
    assert asked(server, path)[0].status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", ""])
def test_another_name_for_this_machine_is_refused(server, host):
    answer, body = asked(server, "/data/0/overview", Host=host.format(port=server.server_port))
    assert answer.status == 403
    assert "charts" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "127.0.0.1:{port}"])
def test_this_machine_may_be_called_by_another_port(server, host):
    """As through a tunnel."""
    assert asked(server, "/data/0/overview", Host=host.format(port=server.server_port))[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_get(server, method):
    assert asked(server, "/", method)[0].status == 501


def test_it_listens_on_the_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_questions_are_read_before_they_are_asked_for_and_answers_come_in_between(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "AT_A_TIME", 2)
    run = Run(small_run(tmp_path / "run", steps=5))
    with Looking([run], 0) as server:
        between = []
        monkeypatch.setattr(
            serving.time, "sleep", lambda _: between.append((len(run.asked.marks), server.answer("runs")))
        )
        monkeypatch.setattr(server, "answer", lambda key: server.lock.locked())
        server.prepare()
        assert between == [(2, False), (4, False), (5, False)]
        monkeypatch.setattr(run, "summarised", None)  # nothing is read again
        assert [each["times"] for each in run.answer("questions")] == [5, 5, 5]


def test_a_port_in_use_is_one_line(server):
    with pytest.raises(UserError, match=f"{server.server_port} cannot be listened on .*--port"):
        Looking([], server.server_port)
