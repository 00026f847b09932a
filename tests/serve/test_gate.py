"""Test the access checks for hosts, origins and tokens at a real server, with the headers that browsers send."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest

from pellucid.serve import middleware
from pellucid.types import UserError
from serving import chat, request, running

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def service():
    with running(hosts=(*middleware.LOOPBACK_HOSTS, "box.example.org", "*.lan.example.org")) as (_, url):
        yield url


@pytest.fixture(scope="module")
def locked():
    with running(token="open-sesame") as (_, url):
        yield url


@pytest.mark.parametrize(
    "host", ["evil.example.com", "127.0.0.1.evil.example.com", "localhost.evil.com", "", "[::1", "org"]
)
def test_unknown_host_is_refused(service, host):
    """A page may make its own name resolve to 127.0.0.1 (DNS rebinding)."""
    for path, body in (("/health", None), (CHAT, chat(max_tokens=1)), ("/", None)):
        status, answer = request(service + path, body, headers={"Host": host})
        assert status == 400
        assert "--allowed-hosts" in answer["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000", "192.168.1.7:8000", "box.example.org", "a.lan.example.org"],
)
def test_allowed_hosts_and_ip_addresses_are_served(service, host):
    """No name server resolves an IP address, so it cannot be rebound."""
    assert request(f"{service}/health", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", "http://localhost:1", "http://127.0.0.1", ""])
def test_other_origins_are_refused(service, origin):
    status, answer = request(service + CHAT, chat(max_tokens=1), headers={"Origin": origin})
    assert status == 403
    assert "may not use this service" in answer["error"]["message"]


def test_own_origin_is_allowed(service):
    own = {"Origin": service, "Host": service.removeprefix("http://")}
    assert request(service + CHAT, chat(max_tokens=1), headers=own)[0] == 200
    behind_a_proxy = {"Origin": "https://box.example.org", "Host": "box.example.org"}
    assert request(service + CHAT, chat(max_tokens=1), headers=behind_a_proxy)[0] == 200


def test_responses_have_no_cors_headers(service):
    asking = urllib.request.Request(f"{service}/health")
    with urllib.request.urlopen(asking) as response:
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer open-sesam", "Bearer open-sesame-2", "Basic open-sesame", "Bearer \xe9"]
)
def test_requests_without_the_token_return_401(locked, shown):
    for path, body in ((CHAT, chat(max_tokens=1)), ("/group", {}), ("/v1/models", None), ("/docs", None)):
        status, answer = request(locked + path, body, headers={"Authorization": shown} if shown else {})
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"


def test_official_client_sends_the_token_as_its_api_key(locked):
    with openai.OpenAI(base_url=f"{locked}/v1", api_key="open-sesame", max_retries=0) as client:
        assert client.chat.completions.create(**chat(model="tiny", max_tokens=1)).choices
    with (
        openai.OpenAI(base_url=f"{locked}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_health_and_the_page_need_no_token(locked):
    assert request(f"{locked}/health")[1]["status"] == "ok"
    with urllib.request.urlopen(locked) as page:
        assert "open-sesame" not in page.read().decode()


def test_a_token_comes_from_the_option_or_the_environment(monkeypatch):
    monkeypatch.delenv(middleware.TOKEN_VARIABLE, raising=False)
    assert middleware.read_token("") == ""
    monkeypatch.setenv(middleware.TOKEN_VARIABLE, "theirs")
    assert middleware.read_token("") == "theirs"
    assert middleware.read_token("mine") == "mine"
    for bad in ("two words", "caf\xe9", "tab\t"):
        with pytest.raises(UserError, match="token must be"):
            middleware.read_token(bad)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "box.example.org"])
def test_warning_is_given_for_open_hosts_without_a_token(host):
    assert f"{host}:8000 is open to everyone" in middleware.make_access_warning(host, 8000, "")
    assert middleware.make_access_warning(host, 8000, "secret") == ""
    assert not any(
        middleware.make_access_warning(inside, 8000, "") for inside in ("127.0.0.1", "127.0.0.2", "::1", "localhost")
    )


@pytest.mark.slow
def test_model_name_on_the_page_is_escaped():
    with running(name="<script>alert(1)</script>") as (_, url), urllib.request.urlopen(url) as page:
        assert "<script>alert" not in page.read().decode()


def test_http_errors_have_the_format_of_the_api(service):
    for path, status in (("/nowhere", 404), ("/solve_question", 405)):
        found, answer = request(service + path)
        assert found == status
        assert set(answer["error"]) == {"message", "type", "code", "param"}, json.dumps(answer)
