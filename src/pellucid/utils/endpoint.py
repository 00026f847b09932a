"""OpenAI-compatible endpoints: their addresses, keys, limits of answers, and errors.

A key stays in an environment variable. Messages name the settings as the user does, and never contain the key.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pellucid.types import UserError

NO_KEY = "none"
"""The key for endpoints that need none."""
_MIN_KEY_CHARACTERS = 4
"""Shorter keys are not redacted, because ordinary words contain them."""
_MIN_REDACTED_CHARACTERS = 6
"""Parts of a key of at least this length are never stored or shown. Ordinary words contain shorter ones."""
MAX_ANSWER_BYTES = 2**24
"""The maximum size of an answer. Thousands of tokens with log-probs are smaller."""
UNCOMPRESSED_HEADERS = {"Accept-Encoding": "identity"}
"""The header that asks for uncompressed answers: a few kilobytes of gzip may be gigabytes of text."""


# ---------------------------------------------------------------- addresses and keys


class RefusedAnswerError(Exception):
    """An answer was refused, because it is too long, is compressed, or redirects to another origin.

    If `is_permanent`, every answer of the endpoint would be refused.
    """

    def __init__(self, reason: str, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent


@dataclass(frozen=True)
class SettingNames:
    """The user's names for the settings of an endpoint, such as --base-url."""

    base_url: str
    model: str
    key: str


def split_address(url: str) -> SplitResult | None:
    """Return the parts of an HTTP address; None if it is incomplete."""
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        return parts if is_complete else None
    except ValueError:
        return None


def find_address_mistake(base_url: str, names: SettingNames) -> str:
    """Return what is wrong with an address, in one line without passwords; empty if it is right."""
    parts = split_address(base_url)
    if parts is None:
        shown = "" if "@" in base_url else f" {base_url!r}"  # with "@" it may contain a password
        return f"{names.base_url}{shown} is not an address: write http://HOST:PORT/v1 or https://HOST/v1"
    if parts.username or parts.password or parts.query:
        return f"{names.base_url} must not contain a secret: put the key into the variable that {names.key} names"
    return ""


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def get_api_key(base_url: str, variable: str) -> str:
    """Return the key in an environment variable; NO_KEY for a loopback address without one.

    Raise UserError if the key is missing or malformed.
    """
    key = os.environ.get(variable, "").strip()
    if not key and not is_loopback(base_url):
        raise UserError(f"{base_url} needs a key: put it into the environment variable {variable}")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"the environment variable {variable} holds no valid key: a key is one line of printable ASCII characters"
        )
    return key or NO_KEY


def is_key_variable(variable: str) -> bool:
    """Return whether an environment variable has the name of a key that clients send: *_KEY or *_TOKEN.

    Names with SECRET, PRIVATE or PASSWORD are for signing and logging in, and must not be sent.

    Example: is_key_variable("OPENAI_API_KEY"), but not is_key_variable("AWS_SECRET_ACCESS_KEY")
    """
    words = variable.split("_")
    return words[-1] in ("KEY", "TOKEN") and not {"SECRET", "PRIVATE", "PASSWORD"} & set(words)


def describe_destination(base_url: str, variable: str, content: str) -> str:
    """Return the line that must be shown before the first request: what is sent where, and with which key."""
    has_key = bool(os.environ.get(variable, "").strip())
    key = f"with the key in the environment variable {variable}" if has_key else f"without a key: {variable} is not set"
    return f"{content} go to {base_url}, {key}"


# ---------------------------------------------------------------- redaction


def redact_and_shorten(text: str, key: str) -> str:
    """Return at most 200 characters of a text. [key] replaces parts of the key, and words that begin like the key."""
    if key != NO_KEY and len(key) >= _MIN_KEY_CHARACTERS:
        text = re.sub(rf"{re.escape(key[:_MIN_KEY_CHARACTERS])}\S*", "[key]", text)
    return " ".join(remove_key(text, key).split())[:200]


def remove_key(text: str, key: str) -> str:
    """Replace the key, and every part of it with _MIN_REDACTED_CHARACTERS or more, by [key].

    Example: remove_key("7 for sk-abcdefgh", "sk-abcdefghijkl") == "7 for [key]"
    """
    if key == NO_KEY or len(key) < _MIN_KEY_CHARACTERS:
        return text
    size = min(len(key), _MIN_REDACTED_CHARACTERS)
    parts = {key[i : i + size] for i in range(len(key) - size + 1)}
    starts = [match.start() for match in re.finditer(f"(?={'|'.join(map(re.escape, parts))})", text)]
    covered = {start + i for start in starts for i in range(size)}
    stretches = groupby(enumerate(text), lambda pair: pair[0] in covered)
    return "".join("[key]" if hidden else "".join(character for _, character in pairs) for hidden, pairs in stretches)


def extract_message_text(content: Any) -> str:
    """Return the text of a message's content, which is a string, a list of parts, or None."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


# ---------------------------------------------------------------- limits of answers


def limit_answer(response: Any) -> None:
    """Limit an answer before its body is read; an event hook for responses of httpx clients.

    Raises:
        RefusedAnswerError: The answer is a redirect to another origin, which must get neither prompts nor key, or is
            compressed, or more than MAX_ANSWER_BYTES are read.
    """
    url = response.request.url
    if response.has_redirect_location:
        target = url.join(response.headers["location"])
        if (target.scheme, target.host, target.port) != (url.scheme, url.host, url.port):
            raise RefusedAnswerError(
                f"{url.scheme}://{url.netloc.decode()} redirects to {target.scheme}://{target.netloc.decode()}:"
                " if you trust it, use it as the address",
                is_permanent=True,
            )
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise RefusedAnswerError(
            f"the answer is compressed ({encoding[:20]}), which was not asked for", is_permanent=True
        )
    response.stream = _limit_stream(response.stream)


async def limit_answer_async(response: Any) -> None:
    limit_answer(response)


def _limit_stream(stream: Any) -> Any:
    """Return a stream of httpx that raises RefusedAnswerError after MAX_ANSWER_BYTES."""
    import httpx  # noqa: PLC0415 - the clients of the extras install it

    class LimitedStream(httpx.SyncByteStream, httpx.AsyncByteStream):
        remaining_bytes = MAX_ANSWER_BYTES

        def count(self, chunk: bytes) -> bytes:
            self.remaining_bytes -= len(chunk)
            if self.remaining_bytes < 0:
                raise RefusedAnswerError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
            return chunk

        def __iter__(self) -> Iterator[bytes]:
            return map(self.count, stream)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for chunk in stream:
                yield self.count(chunk)

        def close(self) -> None:
            stream.close()

        async def aclose(self) -> None:
            await stream.aclose()

    return LimitedStream()


# ---------------------------------------------------------------- errors


def describe_error(error: Any, key: str) -> str:
    """Return the status and the message of an error that the client raised, without the key."""
    message = error.body.get("message", "") if isinstance(error.body, Mapping) else ""
    return f"HTTP {error.status_code} {redact_and_shorten(str(message), key)}".strip()


def find_permanent_refusal(error: Any, base_url: str, model: str, variable: str, names: SettingNames) -> str:
    """Return why every request would be refused as this one was, and what to do; empty if others may succeed."""
    if error.status_code in (401, 403):
        return (
            f"{base_url} rejects the key (HTTP {error.status_code}): put a valid key into the"
            f" environment variable {variable}"
        )
    if error.status_code == 404:
        return (
            f"{base_url} has no model {model!r} (HTTP 404): choose another with {names.model}, or fix"
            f" {names.base_url}, which often ends in /v1"
        )
    if error.status_code == 402 or error.code == "insufficient_quota":
        return f"{base_url} says that the quota of {variable} is used up: add to it, then run this again"
    return ""


def check_reachable(base_url: str, names: SettingNames) -> None:
    """Raise UserError at once if no service answers; a client would notice only after all its retries."""
    try:
        try_connection(base_url, timeout_seconds=5)
    except OSError as error:
        raise UserError(describe_unreachable(base_url, error, names)) from None


def try_connection(url: str, timeout_seconds: float) -> None:
    """Connect to the host of a URL once. Raises OSError if that fails."""
    parts = urlsplit(url)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    socket.create_connection((parts.hostname or "", port), timeout_seconds).close()


def describe_unreachable(base_url: str, error: OSError, names: SettingNames) -> str:
    reason = error.strerror or "no answer"
    return f"{base_url} cannot be reached ({reason}): start the service, or fix {names.base_url}"


def find_first_cause(error: BaseException) -> BaseException:
    """Return the exception from which a chain of exceptions started."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return error
