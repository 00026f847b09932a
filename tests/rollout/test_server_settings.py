"""Settings of `sampler.urls` and `pellucid sampler`: mistakes are one-line errors before anything is loaded."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid import cli, config
from pellucid.rollout import vllm
from pellucid.rollout.vllm_client import ServerPool
from pellucid.training import preflight, run_dir
from pellucid.training.build import pick_sampler
from pellucid.types import UserError

DECODED: Any = SimpleNamespace(decoder=object(), adapter=None, dtype=torch.float32)


def settings_of(*words):
    return config.load_config(None, ["--sampler.name", "vllm", *words])


def test_settings_reach_the_sampler():
    words = ["--sampler.urls", "http://a:8001", "http://[::1]:8002", "--sampler.timeout", "7", "--sampler.rows", "9"]
    sampler = pick_sampler(settings_of(*words, "--policy.deterministic"), DECODED, None)
    assert isinstance(sampler.engine, ServerPool)
    clients = [server.client for server in sampler.engine.servers]
    assert [(client.url, client.timeout) for client in clients] == [("http://a:8001", 7.0), ("http://[::1]:8002", 7.0)]
    assert (sampler.rows, sampler.deterministic) == (9, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sampler.urls", "gpu2:8001"], "'gpu2:8001' is not an address: write http://HOST:PORT"),
        (["--sampler.urls", "http://a:8001", "ftp://b"], "'ftp://b' is not an address"),
        (["--sampler.urls", "http://a:80x1"], "not an address"),
        (["--sampler.urls", "http://me:secret@a"], "PELLUCID_SAMPLER_TOKEN"),
        (["--sampler.urls", "http://a", "--sampler.name", "native"], 'urls are for name = "vllm"'),
        (["--sampler.timeout", "0"], "sampler.timeout: Input should be greater than 0"),
    ],
)
def test_a_bad_address_is_refused(words, says):
    with pytest.raises(UserError) as raised:
        settings_of(*words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "me:secret" not in str(raised.value)


def test_unreachable_server_ends_the_run_before_it_begins(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)  # vLLM is not needed for remote servers
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(UserError, match=rf"{url} cannot be reached.*pellucid sampler --port {port}"):
        preflight.run_preflight_checks(settings_of("--sampler.urls", url), tmp_path)
    sent = f"! sampler.urls: the weights and the prompts go to {url}, "
    assert capsys.readouterr().out == f"{sent}without a secret: PELLUCID_SAMPLER_TOKEN is not set\n"
    monkeypatch.setenv("PELLUCID_SAMPLER_TOKEN", "hidden")
    with pytest.raises(UserError, match="cannot be reached"):
        preflight.run_preflight_checks(settings_of("--sampler.urls", url), tmp_path)
    assert capsys.readouterr().out == f"{sent}with the secret in the environment variable PELLUCID_SAMPLER_TOKEN\n"


@pytest.mark.slow
def test_service_that_is_not_a_sampler_server_is_refused(monkeypatch, tmp_path):
    from http.server import BaseHTTPRequestHandler, HTTPServer  # noqa: PLC0415
    from threading import Thread  # noqa: PLC0415

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="is not a sampler server"):
            preflight.run_preflight_checks(
                settings_of("--sampler.urls", f"http://127.0.0.1:{server.server_port}"), tmp_path
            )
        server.shutdown()


def test_addresses_may_change_on_resume():
    assert all(key.startswith(run_dir.CHANGEABLE_SETTINGS) for key in ("sampler.urls", "sampler.timeout"))
    assert not "sampler.name".startswith(run_dir.CHANGEABLE_SETTINGS)


def test_sampler_command_without_vllm_exits_with_an_error(monkeypatch, capsys):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["sampler", "--port", "0"])
    assert ended.value.code == 2
    assert "make vllm" in capsys.readouterr().err


def test_occupied_port_exits_with_an_error(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as ended:
            cli.main(["sampler", "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "cannot listen on" in capsys.readouterr().err
