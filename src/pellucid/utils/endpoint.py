"""An OpenAI-compatible endpoint of somebody else's: its address, its key, which stays in the environment, its refusals.

What is said of an endpoint names the settings as the caller calls them, and never holds the key.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

from pellucid.types import UserError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
NO_KEY = "none"
"""What stands for a key where none is needed."""
MIN_REDACTED_CHARACTERS = 6
"""How many characters of a key in a row are never stored or shown. Fewer are in ordinary words."""
MAX_ANSWER_BYTES = 2**24
"""The most bytes of an answer: thousands of tokens with log-probs are fewer."""
UNCOMPRESSED_HEADERS = {"Accept-Encoding": "identity"}
"""The header that asks for answers as they are: a few kilobytes of gzip may be gigabytes of text."""


class RefusedAnswerError(Exception):
    """An answer that is not read: it is too long, compressed, or leads to another origin.

    always: whether every answer of the endpoint would be refused.
    """

    def __init__(self, reason: str, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent


@dataclass(frozen=True)
class SettingNames:
    """What the settings of an endpoint are called where the user writes them.

    Example: Names("--base-url", "--teacher", "--key-env")
    """

    base_url: str
    model: str
    key: str


def find_address_mistake(base_url: str, names: SettingNames) -> str:
    """Return what is wrong with an address, in one line that holds no password; empty where it is right."""
    try:
        parts = urlsplit(base_url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        parts, whole = None, False
    if parts is None or not whole:
        said = "" if "@" in base_url else f" {base_url!r}"  # with "@" it may hold a password
        return f"{names.base_url}{said} is no address: write http://HOST:PORT/v1 or https://HOST/v1"
    if parts.username or parts.password or parts.query:
        return f"{names.base_url} must hold no secret: put the key into the variable that {names.key} names"
    return ""


def is_loopback(base_url: str) -> bool:
    return urlsplit(base_url).hostname in LOOPBACK_HOSTS


def get_api_key(base_url: str, variable: str) -> str:
    """Return the key in the environment variable. UserError where there is none, except on the loopback: NO_KEY."""
    key = os.environ.get(variable, "").strip()
    if not key and not is_loopback(base_url):
        raise UserError(f"{base_url} needs a key: put it into the environment variable {variable}")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {variable} holds no key: keys are ASCII, in one line")
    return key or NO_KEY


def is_key_variable(variable: str) -> bool:
    """Return whether an environment variable is named as those that clients send as a key: *_KEY or *_TOKEN.

    Names with SECRET, PRIVATE or PASSWORD in them are for signing and logging in, and no service wants to be sent them.

    Example: is_for_keys("OPENAI_API_KEY"); not is_for_keys("AWS_SECRET_ACCESS_KEY"); not is_for_keys("HOME")
    """
    words = variable.split("_")
    return words[-1] in ("KEY", "TOKEN") and not {"SECRET", "PRIVATE", "PASSWORD"} & set(words)


def describe_destination(base_url: str, variable: str, content: str) -> str:
    """Return the line that must be shown before the first request: what goes where, and which variable goes with it."""
    sent = bool(os.environ.get(variable, "").strip())
    key = f"with the key in the environment variable {variable}" if sent else f"without a key: {variable} is not set"
    return f"{content} go to {base_url}, {key}"


def redact_and_shorten(text: str, key: str) -> str:
    """Return at most 200 characters of a text without the key: [key] replaces its parts, and words that begin as it."""
    whole_words = text if key == NO_KEY else re.sub(rf"{re.escape(key[:4])}\S*", "[key]", text)
    return " ".join(remove_key(whole_words, key).split())[:200]


def remove_key(text: str, key: str) -> str:
    """Replace the key, and every part of it that has SHORTEST_PART characters or more, by [key].

    Example: without_key("7 for sk-abcdefgh", "sk-abcdefghijkl") == "7 for [key]"
    """
    if key == NO_KEY or len(key) < 4:
        return text
    parts = {key[i : i + MIN_REDACTED_CHARACTERS] for i in range(max(1, len(key) - MIN_REDACTED_CHARACTERS + 1))}
    found = [part for part in parts if part in text]
    if not found:
        return text
    covered = bytearray(len(text))
    for part in found:
        start = text.find(part)
        while start >= 0:
            covered[start : start + len(part)] = b"\1" * len(part)
            start = text.find(part, start + 1)
    stretches = groupby(zip(text, covered, strict=True), itemgetter(1))
    return "".join("[key]" if hidden else "".join(map(itemgetter(0), pairs)) for hidden, pairs in stretches)


def extract_message_text(content: Any) -> str:
    """Return the text of a message, which may be a list of parts, or nothing."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def limit_answer(response: Any) -> None:
    """Bound an answer of httpx before its body is read; an event hook for responses of a client.

    RefusedAnswerError for a redirect to another origin, where neither prompts nor key belong, for a compressed body, or
    for one of more than LONGEST_ANSWER bytes, raised as soon as they have come.
    """
    asked = response.request.url
    if response.has_redirect_location:
        target = asked.join(response.headers["location"])
        if (target.scheme, target.host, target.port) != (asked.scheme, asked.host, asked.port):
            raise RefusedAnswerError(
                f"{asked.scheme}://{asked.netloc.decode()} redirects to {target.scheme}://{target.netloc.decode()}:"
                " if you trust that, name it as the address",
                is_permanent=True,
            )
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise RefusedAnswerError(
            f"the answer is compressed ({encoding[:20]}), which was not asked for", is_permanent=True
        )
    response.stream = limit_stream(response.stream)


async def limit_answer_async(response: Any) -> None:
    """Bound an answer as `guard` does, for an asynchronous client."""
    limit_answer(response)


def limit_stream(stream: Any) -> Any:
    """Return a stream of httpx that ends with RefusedAnswerError after LONGEST_ANSWER bytes."""
    import httpx  # noqa: PLC0415 - it comes with the clients of the extras

    class Bounded(httpx.SyncByteStream, httpx.AsyncByteStream):
        left = MAX_ANSWER_BYTES

        def counted(self, chunk: bytes) -> bytes:
            self.left -= len(chunk)
            if self.left < 0:
                raise RefusedAnswerError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
            return chunk

        def __iter__(self) -> Iterator[bytes]:
            return map(self.counted, stream)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for chunk in stream:
                yield self.counted(chunk)

        def close(self) -> None:
            stream.close()

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def describe_error(error: Any, key: str) -> str:
    """Return the status of an answer that is an error of the client, and what the endpoint says, without the key."""
    said = error.body.get("message", "") if isinstance(error.body, Mapping) else ""
    return f"HTTP {error.status_code} {redact_and_shorten(str(said), key)}".strip()


def find_permanent_refusal(error: Any, base_url: str, model: str, variable: str, names: SettingNames) -> str:
    """Return why every request would be refused as this one was, and the mend; empty where others may succeed."""
    if error.status_code in (401, 403):
        return (
            f"{base_url} does not take the key (HTTP {error.status_code}): put one that it takes into the"
            f" environment variable {variable}"
        )
    if error.status_code == 404:
        return (
            f"{base_url} knows no model {model!r} (HTTP 404): name another with {names.model}, or mend"
            f" {names.base_url}, which often ends in /v1"
        )
    if error.status_code == 402 or error.code == "insufficient_quota":
        return f"{base_url} says that the quota of {variable} is used up: add to it, then run this again"
    return ""


def check_reachable(base_url: str, names: SettingNames) -> None:
    """Raise UserError at once where no service answers; a client would notice only after all its retries."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except OSError as error:
        raise UserError(describe_unreachable(base_url, error, names)) from None


def describe_unreachable(base_url: str, error: OSError, names: SettingNames) -> str:
    reason = error.strerror or "no answer"
    return f"{base_url} cannot be reached ({reason}): start the service, or mend {names.base_url}"


def find_first_cause(error: BaseException) -> BaseException:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return error
