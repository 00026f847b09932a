"""Test that the server of the page answers only GET requests from this machine that have its token."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

import pytest

from looking import looking
from made_runs import small_run
from pellucid.inspect import server as command
from pellucid.inspect import server as serving
from pellucid.inspect.run_reader import RunReader
from pellucid.inspect.server import InspectServer
from pellucid.types import UserError


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with looking(small_run(tmp_path_factory.mktemp("look") / "run", steps=2)) as server:
        yield server


def asked(server, path, method="GET", token=True, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, f"/{server.url.split('/')[3]}{path}" if token else path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_content_security_policy_allows_only_the_pages_own_code(server):
    answer, body = asked(server, "/")
    policy = answer.headers["Content-Security-Policy"]
    assert answer.status == 200
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert body.count(policy.split("'nonce-")[1].split("'")[0]) == 5  # policy twice; style, import map and script


def test_modules_are_served_by_name(server):
    answer, body = asked(server, "/page/app.js")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert "hashchange" in body
    assert asked(server, "/page/app.js", token=False)[0].status == 403


def test_data_is_served_by_key(server):
    answer, body = asked(server, "/data/0/summaries/0")
    assert [step["step"] for step in json.loads(body)] == [1, 2]
    assert answer.headers["Cache-Control"] == "no-store"
    answer, body = asked(server, "/data/0/tokens/7")
    assert answer.status == 404
    assert "no tokens of step 7" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../config.json",
        "/page/words.json",
        "/page/../page/app.js",
        "/data/1/overview",
        "/data/0/../x",
        "/data/",
    ],
)
def test_other_paths_return_404(server, path):
    assert asked(server, path)[0].status == 404


@pytest.mark.parametrize(
    "path", ["/", "/data/runs", "/data/0/overview", "/x/data/runs", "//data/runs", "/é/", "x", "*"]
)
def test_requests_without_the_token_of_the_url_return_403(server, path):
    """Any user of this machine can reach the loopback."""
    path = path.encode().decode("latin-1")
    with socket.create_connection(("127.0.0.1", server.server_port), 10) as client:
        client.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: client.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.0 403")
    assert server.url.split("/")[3].encode() not in answer
    assert len(answer) < 1000


def test_each_server_has_its_own_token_and_no_command_line_shows_it(server, monkeypatch, tmp_path):
    with InspectServer([], 0) as other:
        assert other.url.split("/")[3] != server.url.split("/")[3]
        assert len(other.url.split("/")[3]) > 20
        with command.create_redirect_file(other.url) as address:
            file = Path(address.removeprefix("file://"))
            assert other.url in file.read_text()
            assert file.parent.stat().st_mode & 0o077 == 0
            assert other.url.split("/")[3] not in address
        assert not file.exists()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
@pytest.mark.parametrize("slowly", [False, True])
def test_silent_connections_are_closed(server, monkeypatch, sent, slowly):
    """One timeout limits each read, and the other ends requests that arrive byte by byte."""
    monkeypatch.setattr(serving.InspectHandler, "timeout", 60.0 if slowly else 0.3)
    monkeypatch.setattr(serving, "CLIENT_TIMEOUT_SECONDS", 0.3 if slowly else 60.0)
    with socket.create_connection(("127.0.0.1", server.server_port), 20) as client:
        client.sendall(sent)
        assert client.recv(1000) == b""
    assert asked(server, "/")[0].status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", ""])
def test_other_host_names_are_refused(server, host):
    answer, body = asked(server, "/data/0/overview", Host=host.format(port=server.server_port))
    assert answer.status == 403
    assert "charts" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "127.0.0.1:{port}"])
def test_host_header_may_name_another_port(server, host):
    """A tunnel may use another port."""
    assert asked(server, "/data/0/overview", Host=host.format(port=server.server_port))[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_methods_other_than_get_return_501(server, method):
    assert asked(server, "/", method)[0].status == 501


def test_server_listens_only_on_the_loopback(server):
    assert server.server_address[0] == "127.0.0.1"


def test_questions_are_read_ahead_in_batches_that_release_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "STEPS_PER_BATCH", 2)
    run = RunReader(small_run(tmp_path / "run", steps=5))
    with InspectServer([run], 0) as server:
        between = []
        monkeypatch.setattr(
            serving.time,
            "sleep",
            lambda _: between.append((len(run.question_history.fingerprints), server.answer("runs"))),
        )
        monkeypatch.setattr(server, "answer", lambda key: server.lock.locked())
        server.prepare_questions()
        assert between == [(2, False), (4, False), (5, False)]
        monkeypatch.setattr(run, "compute_summary", None)  # nothing is read again
        assert [each["times"] for each in run.answer("questions")] == [5, 5, 5]


def test_port_in_use_raises_user_error(server):
    with pytest.raises(UserError, match=f"cannot listen on .*:{server.server_port} .*--port"):
        InspectServer([], server.server_port)
