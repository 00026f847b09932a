"""The secret of `pellucid sampler` on the loopback: made at startup, readable by its owner only, always required."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from conftest import EOS
from pellucid.rollout.vllm import get_push_weights
from pellucid.rollout.vllm_client import SamplerClient, serialize_model
from pellucid.serve import middleware, vllm_server
from pellucid.serve.command import open_listening_socket
from pellucid.types import UserError
from sampler_process import Plain, tiny_policy

MAKE = middleware.make_server


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PELLUCID_SAMPLER_TOKEN", raising=False)


@contextmanager
def hosted(monkeypatch, address="127.0.0.1", opened=None):
    """Run the command's server with a plain engine instead of vLLM. Yield its address."""
    servers = []

    def engine(model, *_, receives):
        return Plain(SimpleNamespace(config=model.config, dtype="float32", ends=[EOS]))

    def started(app):
        servers.append(MAKE(app, grace=0.5))
        hosted.server = servers[0]
        return servers[0]

    monkeypatch.setattr(vllm_server, "check_vllm_installed", lambda: None)
    monkeypatch.setattr(vllm_server, "VLLMEngine", engine)
    monkeypatch.setattr(middleware, "make_server", started)
    with nullcontext(opened) if opened else open_listening_socket(address, 0) as free:
        thread = threading.Thread(target=vllm_server.run_sampler_server, args=(free, 4, 0.1, "cpu", []))
        thread.start()
        try:
            while not (servers and servers[0].started):
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            servers[0].should_exit = True
            thread.join(20)


def status_of(url, body=None):
    asked = urllib.request.Request(url, body, method="PUT" if body else "GET")
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_loopback_server_writes_a_secret_for_runs_of_its_owner(monkeypatch, tmp_path, capsys):
    policy = tiny_policy()
    with hosted(monkeypatch) as url:
        [file] = (tmp_path / "cache" / "samplers").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert str(file) in capsys.readouterr().out
        for path, body in [("/state", None), ("/model", b"{}"), ("/weights/a/0/1", b"0" * 1000)]:
            assert status_of(url + path, body) == 401
        mine = SamplerClient(url, 10.0)
        mine.load_model(serialize_model(policy))
        mine.push(get_push_weights(policy))
        assert mine.score_tokens([1, 2, 3])[0].shape == (2,)
        secret = file.read_text().strip()
        monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "of another user"))
        with pytest.raises(UserError, match=r"401.*set PELLUCID_SAMPLER_TOKEN to the server's secret"):
            SamplerClient(url, 10.0).get_state()
        monkeypatch.setenv("PELLUCID_SAMPLER_TOKEN", secret)  # as for a server behind a tunnel
        assert SamplerClient(url, 10.0).get_state()["model"]
        monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    assert not file.exists()


def test_request_during_server_startup_is_answered(monkeypatch):
    """The port is open before torch is imported and before the secret is written."""
    with open_listening_socket("127.0.0.1", 0) as free:
        asked = SamplerClient(f"http://127.0.0.1:{free.getsockname()[1]}", 10.0)
        answers, sent = [], threading.Event()
        write_secret = vllm_server.publish_secret

        def once_asked(port):
            assert sent.wait(10)
            return write_secret(port)

        monkeypatch.setattr(vllm_server, "publish_secret", once_asked)
        monkeypatch.setattr(http.client.HTTPConnection, "request", sent_before(sent))
        run = threading.Thread(target=lambda: answers.append(asked.get_state()))
        run.start()
        with hosted(monkeypatch, opened=free):
            run.join(10)
        assert "model" in answers[0]


def sent_before(event):
    """Return an `HTTPConnection.request` that sets an event once a request was sent."""
    request = http.client.HTTPConnection.request

    def sent(self, *arguments, **keywords):
        request(self, *arguments, **keywords)
        event.set()

    return sent


def test_each_start_makes_a_new_secret_unless_the_environment_sets_one(monkeypatch, tmp_path):
    secrets = []
    for _ in range(2):
        with hosted(monkeypatch):
            secrets += [file.read_text() for file in (tmp_path / "cache" / "samplers").iterdir()]
    assert len(set(secrets)) == 2
    monkeypatch.setenv("PELLUCID_SAMPLER_TOKEN", "open-sesame")
    with hosted(monkeypatch) as url:
        assert not list((tmp_path / "cache" / "samplers").iterdir())
        assert status_of(f"{url}/state") == 401
        assert json.dumps(SamplerClient(url, 10.0).get_state())


def test_secret_that_cannot_be_written_raises_user_error(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(vllm_server, "check_vllm_installed", lambda: None)
    with open_listening_socket("127.0.0.1", 0) as free, pytest.raises(UserError, match="set PELLUCID_SAMPLER_TOKEN"):
        vllm_server.run_sampler_server(free, 4, 0.1, "cpu", [])


@pytest.mark.slow
def test_interrupted_upload_leaves_no_traceback_on_shutdown(monkeypatch, caplog):
    monkeypatch.setenv("PELLUCID_SAMPLER_TOKEN", "open-sesame")
    with hosted(monkeypatch) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 20) as client:
        head = "PUT /weights/a/0/1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer open-sesame\r\n"
        client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        while not [c for c in hosted.server.server_state.connections if c.cycle]:
            time.sleep(0.01)
        hosted.server.should_exit = True
        assert b"503 Service Unavailable" in client.recv(10_000)
    assert not [record for record in caplog.records if record.exc_info]
