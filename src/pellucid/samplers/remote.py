"""A sampler server as an engine: its weights, the proof of them and its rows over HTTP, every answer with its version.

No two pushes have the same version, so that whatever is answered late, or for somebody else, is no answer.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import safetensors.torch
import torch
from torch import Tensor

from pellucid.policy.model import describe
from pellucid.samplers.adapters import Form, RefusedError, is_of_adapter
from pellucid.samplers.freshness import Freshness
from pellucid.types import UserError

TOKEN = "PELLUCID_SAMPLER_TOKEN"
"""The environment variable of the secret that servers and those who ask them share."""
VERSION = "Weights-Version"
"""The header of an answer that says which weights it was computed with."""
START = "pellucid sampler --port {}"
PART = 2**28
"""Bytes of weights in a request, where none of them is larger by itself."""
CONNECT = 5.0
"""Seconds until a connection is given up."""
LOADING = 900.0
"""Seconds that a server may take to make an engine."""
POLL = 0.1
"""Seconds that an answer is waited for at a time."""


class GoneError(Exception):
    """A server that does not answer, or not with the weights that it was given last."""


class SmallError(GoneError):
    """A server with too little room."""


class Row(NamedTuple):
    """What is asked for: up to `most` tokens behind these."""

    number: int
    ids: Sequence[int]
    most: int
    temperature: float
    seed: int


class Spoken(NamedTuple):
    """The tokens of a row, and their log-probs in nats, at the temperature."""

    number: int
    tokens: list[int]
    logprobs: list[float]


class Remote:
    """The engine of a server. GoneError from every method, where it is not what it was."""

    def __init__(self, url: str, timeout: float) -> None:
        """timeout: seconds without an answer after which it hangs."""
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version = ""
        self.longest = self.block = 0
        self.ready = False
        """Whether it had an engine for the model when it was asked last."""
        self.freshness = Freshness()
        self._connection: http.client.HTTPConnection | None = None
        self._ended = False
        self._steps, self._moved = -1, 0.0

    def state(self) -> Any:
        return self._json("GET", "/state")

    def load(self, model: bytes) -> None:
        """Have it make an engine for a model as `described`, where it has none of it.

        RefusedError where it makes none with such an adapter.
        """
        state = self.state()
        if state["model"] != digest(model):
            state = self._json("PUT", "/model", model, timeout=max(LOADING, self.timeout))
        if state["refusal"]:
            raise RefusedError(state["refusal"])
        self.longest, self.block, self.version = state["longest"], state["block"], state["version"]
        self.ready = True

    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Give it these weights, or an adapter alone beside those that it has; it forgets what it was asked before."""
        onto = f"?onto={self.version}" if all(map(is_of_adapter, weights)) else ""
        version, parts = secrets.token_hex(8), list(parted(weights))
        for i, part in enumerate(parts):
            body = safetensors.torch.save({name: weight.cpu().contiguous() for name, weight in part.items()})
            self._answer("PUT", f"/weights/{version}/{i}/{len(parts)}{onto}", body)
        self.version = version

    def columns(self, name: str, at: Sequence[int]) -> list[Tensor]:
        """As `Engine.columns`."""
        found = self._tensors("/columns", {"name": name, "at": list(at)})
        return [found[str(i)] for i in range(len(found))]

    def read(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """As `Engine.read`."""
        found = self._tensors("/read", {"ids": list(ids)})
        return found["logprobs"], int(found["cached"])

    def step(self, rows: Sequence[Row]) -> list[Spoken]:
        """Ask for these rows, too; return what is sampled, and wait a moment for the first of it."""
        answer = self._json("POST", "/step", json.dumps(rows).encode(), self.version)
        if answer["steps"] != self._steps or rows:
            self._steps, self._moved = answer["steps"], time.monotonic()
        if not answer["said"] and time.monotonic() - self._moved > self.timeout:
            raise GoneError(f"its engine has stood still for {self.timeout:g} s")
        return [Spoken(*said) for said in answer["said"]]

    def begin(self) -> None:
        self._ended = False

    def end(self) -> None:
        """End the request that another thread waits for, and let it make no more until `begin`."""
        self._ended = True
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)  # pyright: ignore[reportOptionalMemberAccess]

    # ------------------------------------------------------------ requests

    def _tensors(self, path: str, asked: Any) -> dict[str, Tensor]:
        return safetensors.torch.load(self._answer("POST", path, json.dumps(asked).encode(), self.version))

    def _json(self, method: str, path: str, body: bytes = b"", version: str | None = None, timeout: float = 0) -> Any:
        try:
            return json.loads(self._answer(method, path, body, version, timeout))
        except ValueError:
            raise UserError(
                f"sampler.urls: {self.url} is no sampler server, which {START.format('PORT')} starts"
            ) from None

    def _answer(
        self, method: str, path: str, body: bytes = b"", version: str | None = None, timeout: float = 0
    ) -> bytes:
        """The body of an answer; where a version is given, computed with those weights."""
        try:
            status, theirs, answer = self._exchanged(method, path, body, version, timeout or self.timeout)
        except TimeoutError:
            raise GoneError(f"no answer in {timeout or self.timeout:g} s") from None
        except OSError as error:
            raise GoneError(error.strerror or type(error).__name__) from None
        except http.client.HTTPException as error:
            raise GoneError(f"an answer that breaks off ({type(error).__name__})") from None
        if status in (400, 401, 403, 404, 422):
            raise UserError(f"sampler.urls: {self.url} refuses (HTTP {status}): {message(answer)}")
        if status != 200:
            raise GoneError(f"HTTP {status}, {message(answer)}")
        if version is not None and theirs != version:
            raise GoneError("an answer computed with other weights")
        return answer

    def _exchanged(
        self, method: str, path: str, body: bytes, version: str | None, timeout: float
    ) -> tuple[int, str | None, bytes]:
        """A connection for each request: an old one that the server has closed would look like a server that died."""
        if self._ended:
            raise GoneError("it is no longer asked")
        url = urlsplit(self.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = connection = kind(url.hostname or "", url.port, timeout=min(CONNECT, timeout))
        try:
            connection.connect()
            if self._ended:  # in between: from here on `end` finds the socket
                raise GoneError("it is no longer asked")
            connection.sock.settimeout(timeout)
            connection.request(method, url.path + path, body, headers_of(version))
            answer = connection.getresponse()
            return answer.status, answer.getheader(VERSION), answer.read()
        finally:
            connection.close()


def reach(urls: Sequence[str], timeout: float) -> None:
    """UserError where one of the servers does not answer."""
    for url in urls:
        try:
            Remote(url, min(CONNECT, timeout)).state()
        except GoneError as error:
            start = START.format(urlsplit(url).port or 80)
            raise UserError(f"sampler.urls: {url} cannot be reached ({error}): start it there by {start}") from None


def note(urls: Sequence[str]) -> str:
    """Return the line that must be shown before the first request: where the weights go, and with which secret."""
    secret = (
        f"with the secret in the environment variable {TOKEN}" if token() else f"without a secret: {TOKEN} is not set"
    )
    return f"sampler.urls: the weights and the prompts go to {', '.join(urls)}, {secret}"


def described(policy: Any, form: Form | None = None, dtype: torch.dtype | None = None) -> bytes:
    """Return what a server must know of a policy to make an engine for it, besides the weights.

    form: of an adapter that is pushed by itself. dtype: of the weights that will be pushed; None is the policy's.
    """
    with tempfile.TemporaryDirectory() as folder:
        describe(policy.model, Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
    name = str(dtype or policy.dtype).removeprefix("torch.")
    known = {"config": config, "dtype": name, "ends": list(policy.eos_ids), "adapter": form}
    return json.dumps(known, sort_keys=True).encode()


def token() -> str:
    """The secret, or nothing. UserError where no header can hold it."""
    secret = os.environ.get(TOKEN, "")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise UserError(f"{TOKEN} must be letters, digits and signs of ASCII, without spaces")
    return secret


def headers_of(version: str | None) -> dict[str, str]:
    secret = token()
    known = {"Authorization": f"Bearer {secret}"} if secret else {}
    return known | ({VERSION: version, "Content-Type": "application/json"} if version else {})


def parted(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The weights in parts of at most PART bytes, or of one weight."""
    part, size = dict[str, Tensor](), 0
    for name, weight in weights.items():
        if part and size + weight.nbytes > PART:
            yield part
            part, size = {}, 0
        part[name] = weight
        size += weight.nbytes
    yield part


def digest(model: bytes) -> str:
    return hashlib.sha256(model).hexdigest()


def message(answer: bytes) -> str:
    """What an answer that is an error says, in one line."""
    try:
        said = json.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = answer.decode(errors="replace")
    return " ".join(str(said).split())[:300]
