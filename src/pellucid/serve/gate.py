"""Which requests are let in: by their Host and Origin headers, and by a token.

Every page in the user's browser can reach a service on the loopback. A page of another site may post to it: the browser
hides the answer from that page, but the work is done. A page whose host name is made to resolve to 127.0.0.1 (DNS
rebinding) even counts as the same site. The first is recognized by its Origin, the second by its Host.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.serve.errors import RequestError, refused
from pellucid.types import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/", "/health")
"""Paths that need no token: the page asks the user for it, and whoever watches over the service needs none."""
TOKEN = "PELLUCID_TOKEN"
"""The environment variable of the token: a command line can be read by every user of the machine."""


class Gate:
    """ASGI middleware that refuses the requests for which `check` raises.

    starlette's TrustedHostMiddleware would not tell clients why they are refused, and would refuse IP addresses,
    which, unlike a name, nobody can make to lead elsewhere.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] = LOOPBACK, token: str = "") -> None:
        self.app, self.allowed_hosts, self.token = app, allowed_hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self.check_access(scope["path"], Headers(scope=scope))
        except RequestError as refusal:
            await refused(refusal)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check_access(self, path: str, headers: Headers) -> None:
        """Raise RequestError for a request that is not let in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not trusted(name := name_of(host), self.allowed_hosts):
            raise RequestError(
                400,
                f'this service is not known as "{name}": ask for 127.0.0.1, or start it with --allowed-hosts {name}',
                "host_not_allowed",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestError(403, f'a page of "{origin}" may not use this service', "origin_not_allowed")
        if self.token and path not in OPEN and not self.is_authorized(headers.get("authorization", "")):
            raise RequestError(401, "this service needs its token, as: Authorization: Bearer TOKEN", "invalid_api_key")

    def is_authorized(self, authorization: str) -> bool:
        """Return whether the token is right, in a time that does not depend on how much of it is."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), self.token.encode())


def name_of(host: str) -> str:
    """Return the name in a Host header, empty where there is none. Example: name_of("[::1]:8000") == "::1" """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def trusted(name: str, hosts: Sequence[str]) -> bool:
    """Return whether a name is an IP address or matches one of the hosts.

    Example: trusted("a.example.org", ["*.example.org"]); trusted("10.0.0.7", [])
    """
    return bool(name) and (is_address(name) or any(matches(name, host.lower()) for host in hosts))


def matches(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def token_of(option: str) -> str:
    """Return the token of the options or of the environment; empty for none. UserError where no header can hold it."""
    token = option or os.environ.get(TOKEN, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError("the token must be letters, digits and signs of ASCII, without spaces")
    return token


def warning(host: str, port: int, token: str) -> str:
    """Return a warning that everybody gets in; empty where only this machine does, or only those with the token."""
    if token or is_loopback(host):
        return ""
    return f"{host}:{port} is open to everyone who can reach it: set {TOKEN}, or give --token"
