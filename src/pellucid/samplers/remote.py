"""A sampler server as an engine: its weights, the proof of them and its rows over HTTP, every answer with its version.

No two pushes have the same version, so that whatever is answered late, or for somebody else, is no answer.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pellucid.machine.disk import write_whole
from pellucid.machine.harmless import harmless
from pellucid.policy.model import describe
from pellucid.samplers.adapters import Form, RefusedError, is_of_adapter
from pellucid.samplers.freshness import Freshness
from pellucid.types import UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

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
SHORT, LONG = 2**20, 2**28
"""The most bytes of an answer: of one in JSON, besides its rows, and of one with tensors."""
TOKEN_BYTES = 64
"""The most bytes of a token and its log-prob in JSON."""
LEAST, MOST = -100.0, 1e-3
"""Bounds of the log-prob of a sampled token in nats. A token below e^-100 is never drawn; rounding may exceed 0."""


class GoneError(Exception):
    """A server that does not answer, or not with the weights that it was given last."""


class SmallError(GoneError):
    """A server with too little room."""


class NonsenseError(GoneError):
    """A server whose answer no sampler server would give."""


class Row(NamedTuple):
    """What is asked for: up to `most` tokens behind these."""

    number: int
    ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int


class Spoken(NamedTuple):
    """The tokens of a row, and their log-probs in nats, at the temperature."""

    number: int
    tokens: list[int]
    logprobs: list[float]


def spoken(answer: Any, requests: Mapping[int, Row], vocabulary_size: int, eos_ids: Collection[int]) -> Spoken:
    """Return a row of an answer. NonsenseError where it cannot be one of those that were asked for.

    Args:
        answer: the number, the tokens and the log-probs, as JSON.
        asked: the rows that the server has not answered yet, by number.
        vocabulary: the number of tokens that the model knows.
        ends: the tokens that end a row.
    """
    if not isinstance(answer, list) or len(answer) != 3:
        raise NonsenseError("it sends nonsense: a row is not number, tokens and log-probs")
    number, tokens, logprobs = answer
    if type(number) is not int or number not in requests:
        raise NonsenseError("it sends nonsense: a row that it was not asked for, or has answered")
    most = requests[number].max_tokens
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or len(tokens) != len(logprobs):
        raise NonsenseError("it sends nonsense: a row that does not have a log-prob for each token")
    if not 0 < len(tokens) <= most:
        raise NonsenseError(f"it sends nonsense: a row of {len(tokens)} tokens, where 1 to {most} were asked for")
    if not all(type(token) is int and 0 <= token < vocabulary_size for token in tokens):
        raise NonsenseError(f"it sends nonsense: a token that is not a whole number from 0 to {vocabulary_size - 1}")
    if not all(type(x) in (int, float) and LEAST <= x <= MOST for x in logprobs):
        raise NonsenseError(f"it sends nonsense: a log-prob that is not a number from {LEAST:g} to 0")
    if any(token in eos_ids for token in tokens[:-1]):
        raise NonsenseError("it sends nonsense: a row that goes on after its end")
    if len(tokens) < most and tokens[-1] not in eos_ids:
        raise NonsenseError("it sends nonsense: a row that breaks off")
    return Spoken(number, tokens, [float(x) for x in logprobs])


class Remote:
    """The engine of a server. GoneError from every method, where it is not what it was."""

    def __init__(self, url: str, timeout: float) -> None:
        """timeout: seconds without an answer after which it hangs."""
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version = ""
        self.max_length = self.block_size = 0
        self.has_engine = False
        """Whether it had an engine for the model when it was asked last."""
        self.weight_check = Freshness()
        self.vocabulary_size, self.eos_ids = 0, frozenset[int]()
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = False
        self.is_verified = False
        """Whether it has had proven weights before, so that an error is its own and not one of the settings."""
        self._requests: dict[int, Row] = {}
        """The rows that it has not answered yet, by number."""
        self._dtype: torch.dtype | None = None
        self._steps, self._last_progress, self._step_limit = -1, 0.0, 0

    def get_state(self) -> dict[str, Any]:
        return checked_state(self._request_json("GET", "/state"))

    def load_model(self, model: bytes) -> None:
        """Have it make an engine for a model as `described`, where it has none of it.

        RefusedError where it makes none with such an adapter.
        """
        state = self.get_state()
        if state["model"] != digest(model):
            state = checked_state(self._request_json("PUT", "/model", model, timeout=max(LOADING, self.timeout)))
        if state["refusal"]:
            raise RefusedError(in_one_line(state["refusal"]))
        if state["model"] != digest(model) or state["longest"] < 2 or state["block"] < 1:
            raise NonsenseError("it sends nonsense: a state without the model that it was given")
        described = json.loads(model)
        self.vocabulary_size, self.eos_ids = described["vocabulary"], frozenset(described["ends"])
        self.max_length, self.block_size, self.version = state["longest"], state["block"], state["version"]
        self.has_engine = True

    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Give it these weights, or an adapter alone beside those that it has; it forgets what it was asked before."""
        onto = f"?onto={self.version}" if all(map(is_of_adapter, weights)) else ""
        version, parts = secrets.token_hex(8), list(parted(weights))
        self._requests, self._steps, self._dtype = {}, -1, next(iter(weights.values())).dtype
        for i, part in enumerate(parts):
            body = safetensors.torch.save({name: weight.cpu().contiguous() for name, weight in part.items()})
            self._request("PUT", f"/weights/{version}/{i}/{len(parts)}{onto}", body)
        self.version = version

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:
        """As `Engine.columns`."""
        found = self._request_tensors("/columns", {"name": name, "at": list(indices)})
        columns = [found[str(i)] for i in range(len(found)) if str(i) in found]
        sound = all(x.dim() == 2 and x.shape[1] == len(indices) and x.dtype == self._dtype for x in columns)
        if not columns or len(columns) != len(found) or not sound:
            raise NonsenseError(f"it sends nonsense: no columns of {name}")
        return columns

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """As `Engine.read`."""
        found = self._request_tensors("/read", {"ids": list(ids)})
        logprobs, cached = found.get("logprobs"), found.get("cached")
        if logprobs is None or cached is None or logprobs.shape != (len(ids) - 1,) or cached.numel() != 1:
            raise NonsenseError("it sends nonsense: no log-probs of the text that it was given")
        return logprobs, int(cached)

    def step(self, rows: Sequence[Row]) -> list[Spoken]:
        """Ask for these rows, too; return what is sampled, and wait a moment for the first of it."""
        self._requests |= {row.number: row for row in rows}
        limit = SHORT + TOKEN_BYTES * sum(row.max_tokens for row in self._requests.values())
        answer = self._request_json("POST", "/step", json.dumps(rows).encode(), self.version, limit=limit)
        steps, said = (answer.get("steps"), answer.get("said")) if isinstance(answer, dict) else (None, None)
        if type(steps) is not int or steps < self._steps or not isinstance(said, list):
            raise NonsenseError("it sends nonsense: no steps and rows")
        found = [self._take_answer(row) for row in said]
        if rows or found:
            # Each step adds a token to a row, or reads some of a prompt.
            self._step_limit = steps + sum(len(row.ids) + row.max_tokens for row in self._requests.values())
        if steps != self._steps or rows:
            self._steps, self._last_progress = steps, time.monotonic()
        if not found and time.monotonic() - self._last_progress > self.timeout:
            raise GoneError(f"its engine has stood still for {self.timeout:g} s")
        if self._requests and steps > self._step_limit:
            raise NonsenseError("it sends nonsense: more steps than the rows can take, and no row")
        return found

    def _take_answer(self, row: Any) -> Spoken:
        found = spoken(row, self._requests, self.vocabulary_size, self.eos_ids)
        del self._requests[found.number]
        return found

    def start(self) -> None:
        self._stopped = False

    def stop(self) -> None:
        """End the request that another thread waits for, and let it make no more until `begin`."""
        self._stopped = True
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)  # pyright: ignore[reportOptionalMemberAccess]

    # ------------------------------------------------------------ requests

    def _request_tensors(self, path: str, asked: Any) -> dict[str, Tensor]:
        answer = self._request("POST", path, json.dumps(asked).encode(), self.version, limit=LONG)
        try:
            return safetensors.torch.load(answer)
        except (SafetensorError, KeyError, ValueError):
            raise NonsenseError("it sends nonsense: no tensors") from None

    def _request_json(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        version: str | None = None,
        timeout: float = 0,
        limit: int = SHORT,
    ) -> Any:
        try:
            return json.loads(self._request(method, path, body, version, timeout, limit))
        except (ValueError, RecursionError):
            raise NonsenseError("it sends nonsense: no JSON") from None

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        version: str | None = None,
        timeout: float = 0,
        limit: int = SHORT,
    ) -> bytes:
        """The body of an answer; where a version is given, computed with those weights."""
        try:
            secret, limits = token(self.url), (timeout or self.timeout, limit)
            status, theirs, answer = self._send(method, path, body, headers_of(secret, version), *limits)
            # A server that was still starting may have written its secret after this request was sent.
            if status == 401 and (written := token(self.url)) != secret:
                status, theirs, answer = self._send(method, path, body, headers_of(written, version), *limits)
        except TimeoutError:
            raise GoneError(f"no answer in {timeout or self.timeout:g} s") from None
        except OSError as error:
            raise GoneError(error.strerror or type(error).__name__) from None
        except http.client.HTTPException as error:
            raise GoneError(f"an answer that breaks off ({type(error).__name__})") from None
        if status in (400, 401, 403, 404, 422) and not self.is_verified:
            raise UserError(f"sampler.urls: {self.url} refuses (HTTP {status}): {message(answer)}{hint(status)}")
        if status != 200:
            raise GoneError(f"HTTP {status}, {message(answer)}")
        if version is not None and theirs != version:
            raise GoneError("an answer computed with other weights")
        return answer

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float, limit: int
    ) -> tuple[int, str | None, bytes]:
        """A connection for each request: an old one that the server has closed would look like a server that died."""
        if self._stopped:
            raise GoneError("it is no longer asked")
        url = urlsplit(self.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = connection = kind(url.hostname or "", url.port, timeout=min(CONNECT, timeout))
        try:
            connection.connect()
            if self._stopped:  # in between: from here on `end` finds the socket
                raise GoneError("it is no longer asked")
            connection.sock.settimeout(timeout)
            connection.request(method, url.path + path, body, headers)
            with connection.getresponse() as answer:
                return answer.status, answer.getheader(VERSION), whole(answer, limit, time.monotonic() + timeout)
        finally:
            connection.close()


def reach(urls: Sequence[str], timeout: float) -> None:
    """UserError where one of the servers does not answer."""
    for url in urls:
        try:
            Remote(url, min(CONNECT, timeout)).get_state()
        except NonsenseError:
            raise UserError(f"sampler.urls: {url} is no sampler server, which {START.format('PORT')} starts") from None
        except GoneError as error:
            start = START.format(urlsplit(url).port or 80)
            raise UserError(f"sampler.urls: {url} cannot be reached ({error}): start it there by {start}") from None


def note(urls: Sequence[str]) -> str:
    """Return the line that must be shown before the first request: where the weights go, and with which secret."""
    if token():
        secret = f"with the secret in the environment variable {TOKEN}"
    elif all(map(token, urls)):
        secret = "with the secrets that servers on this machine wrote for their user"
    else:
        secret = f"without a secret: {TOKEN} is not set"
    return f"sampler.urls: the weights and the prompts go to {', '.join(urls)}, {secret}"


def described(policy: Policy, adapter_shape: Form | None = None, dtype: torch.dtype | None = None) -> bytes:
    """Return what a server must know of a policy to make an engine for it, besides the weights.

    form: of an adapter that is pushed by itself. dtype: of the weights that will be pushed; None is the policy's.
    """
    with tempfile.TemporaryDirectory() as folder:
        describe(policy.model, Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
    name = str(dtype or policy.dtype).removeprefix("torch.")
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    ends = list(policy.eos_ids)
    known = {"config": config, "dtype": name, "ends": ends, "vocabulary": vocabulary, "adapter": adapter_shape}
    return json.dumps(known, sort_keys=True).encode()


def checked_state(state: Any) -> dict[str, Any]:
    """Return the state of a server. NonsenseError where it is none."""
    kinds = {"model": str, "version": str, "longest": int, "block": int, "refusal": str}
    sound = isinstance(state, dict) and all(type(state.get(name)) is kind for name, kind in kinds.items())
    if not sound or not re.fullmatch("[0-9a-f]{0,64}", state["version"]):
        raise NonsenseError("it sends nonsense: no state")
    return state


def whole(answer: http.client.HTTPResponse, limit: int, deadline: float) -> bytes:
    """Return the body of an answer. NonsenseError where it is larger, TimeoutError where it takes longer."""
    body = bytearray()
    while part := answer.read1(2**16):
        body += part
        if len(body) > limit:
            raise NonsenseError(f"it sends nonsense: more than {limit} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(body)


def token(url: str = "") -> str:
    """Return the secret of the environment; without one, for a server on the loopback, the one that it wrote down.

    UserError where no header can hold it.
    """
    secret = os.environ.get(TOKEN, "")
    if not secret and is_on_loopback(url):
        with suppress(OSError):
            secret = secret_file(urlsplit(url).port or 80).read_text(encoding="utf-8", errors="replace").strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise UserError(f"{TOKEN} must be letters, digits and signs of ASCII, without spaces")
    return secret


def is_on_loopback(url: str) -> bool:
    name = urlsplit(url).hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def secret_file(port: int) -> Path:
    """Return where a server on this machine's loopback writes its secret, for runs of the same user."""
    cache = Path(os.environ.get("PELLUCID_CACHE") or Path.home() / ".cache" / "pellucid")
    return cache / "samplers" / f"{socket.gethostname()}-{port}.secret"


@contextmanager
def written_secret(port: int) -> Iterator[str]:
    """Yield a new secret, which stands meanwhile in a file that this user alone can read.

    UserError where it cannot be written.
    """
    secret, path = secrets.token_urlsafe(32), secret_file(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, secret + "\n", 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): set {TOKEN} to a secret of your own") from error
    try:
        yield secret
    finally:
        with suppress(OSError):
            if path.read_text(encoding="utf-8").strip() == secret:  # no other server has written its own since
                path.unlink()


def hint(status: int) -> str:
    return f"; set {TOKEN} to the secret of the server, which says at its start where it is" if status == 401 else ""


def headers_of(secret: str, version: str | None) -> dict[str, str]:
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
    except (ValueError, KeyError, TypeError, RecursionError):
        said = answer.decode(errors="replace")
    return in_one_line(said)


def in_one_line(text: Any) -> str:
    return harmless(" ".join(str(text).split())[:300])
