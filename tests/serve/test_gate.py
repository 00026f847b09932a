"""Who is let in: hosts, origins, tokens; at a real server, with what browsers send."""

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
def test_a_name_that_is_not_ours_is_refused(service, host):
    """As that of a page which has made its own name lead to 127.0.0.1."""
    for path, body in (("/health", None), (CHAT, chat(max_tokens=1)), ("/", None)):
        status, answer = request(service + path, body, headers={"Host": host})
        assert status == 400
        assert "--allowed-hosts" in answer["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000", "192.168.1.7:8000", "box.example.org", "a.lan.example.org"],
)
def test_our_names_and_addresses_in_digits_are_served(service, host):
    """An address in digits leads where it says: no name server has a part in it."""
    assert request(f"{service}/health", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", "http://localhost:1", "http://127.0.0.1", ""])
def test_pages_of_other_origins_may_not_use_the_service(service, origin):
    status, answer = request(service + CHAT, chat(max_tokens=1), headers={"Origin": origin})
    assert status == 403
    assert "may not use this service" in answer["error"]["message"]


def test_its_own_page_may(service):
    own = {"Origin": service, "Host": service.removeprefix("http://")}
    assert request(service + CHAT, chat(max_tokens=1), headers=own)[0] == 200
    behind_a_proxy = {"Origin": "https://box.example.org", "Host": "box.example.org"}
    assert request(service + CHAT, chat(max_tokens=1), headers=behind_a_proxy)[0] == 200


def test_no_other_page_is_told_that_it_may(service):
    asking = urllib.request.Request(f"{service}/health")
    with urllib.request.urlopen(asking) as response:
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer open-sesam", "Bearer open-sesame-2", "Basic open-sesame", "Bearer \xe9"]
)
def test_without_the_token_nothing_is_done(locked, shown):
    for path, body in ((CHAT, chat(max_tokens=1)), ("/group", {}), ("/v1/models", None), ("/docs", None)):
        status, answer = request(locked + path, body, headers={"Authorization": shown} if shown else {})
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"


def test_the_official_client_shows_it_as_its_key(locked):
    with openai.OpenAI(base_url=f"{locked}/v1", api_key="open-sesame", max_retries=0) as client:
        assert client.chat.completions.create(**chat(model="tiny", max_tokens=1)).choices
    with (
        openai.OpenAI(base_url=f"{locked}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_whoever_watches_and_the_page_need_no_token(locked):
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
def test_a_service_that_is_open_to_all_says_so(host):
    assert f"{host}:8000 is open to everyone" in middleware.make_access_warning(host, 8000, "")
    assert middleware.make_access_warning(host, 8000, "secret") == ""
    assert not any(
        middleware.make_access_warning(inside, 8000, "") for inside in ("127.0.0.1", "127.0.0.2", "::1", "localhost")
    )


@pytest.mark.slow
def test_a_name_on_the_page_is_text():
    with running(name="<script>alert(1)</script>") as (_, url), urllib.request.urlopen(url) as page:
        assert "<script>alert" not in page.read().decode()


def test_refusals_are_in_the_form_of_the_api(service):
    for path, status in (("/nowhere", 404), ("/solve_question", 405)):
        found, answer = request(service + path)
        assert found == status
        assert set(answer["error"]) == {"message", "type", "code", "param"}, json.dumps(answer)
