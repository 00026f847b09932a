"""The sampler that runs vLLM on sampler servers: `SamplerClient` for one server, `ServerPool` for all of them.

Every answer of a server names the version of its weights, and no two pushes have the same version. An answer with
another version is refused, whether it is late or computed with the weights of another run.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import itertools
import json
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pellucid.policy.load import save_config
from pellucid.rollout.conversations import ConversationRow
from pellucid.rollout.vllm import (
    AdapterRefusedError,
    AdapterShape,
    EngineAnswer,
    VLLMSampler,
    encode_check_text,
    get_push_dtype,
    get_text_length,
    is_adapter_weight,
    score_text,
)
from pellucid.rollout.weight_check import WeightCheck
from pellucid.types import Group, Prompt, Sampling, UserError
from pellucid.utils.files import write_file_atomically
from pellucid.utils.text import escape_controls

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

SECRET_VARIABLE = "PELLUCID_SAMPLER_TOKEN"
"""The environment variable of the secret that servers and their clients share."""
VERSION_HEADER = "Weights-Version"
"""The header with the version of the weights that an answer was computed with."""
_START_COMMAND = "pellucid sampler --port {}"
MAX_PART_BYTES = 2**28
"""The most bytes of weights in a request, unless a single weight is larger."""
CONNECT_TIMEOUT_SECONDS = 5.0
"""Timeout of a connection."""
_LOAD_TIMEOUT_SECONDS = 900.0
"""Timeout of creating an engine."""
POLL_SECONDS = 0.1
"""How long to wait for an answer at a time."""
_MAX_JSON_BYTES, _MAX_TENSOR_BYTES = 2**20, 2**28
"""The most bytes of an answer in JSON, besides its rows, and of an answer with tensors."""
_MAX_TOKEN_JSON_BYTES = 64
"""The most bytes of a token and its log-prob in JSON."""
_MIN_LOGPROB, _MAX_LOGPROB = -100.0, 1e-3
"""Bounds of the log-prob of a sampled token, in nats. A token below e^-100 is never sampled; rounding may exceed 0."""


class ServerLostError(Exception):
    """A server does not answer, or not with the weights of the last push."""


class _ServerTooSmallError(ServerLostError):
    """A server does not support rows that are long enough."""


class InvalidAnswerError(ServerLostError):
    """A server sent an answer that no sampler server sends."""


class SampleRequest(NamedTuple):
    """A row of up to `max_tokens` tokens behind these."""

    number: int
    ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int


class _RemoteAnswer(NamedTuple):
    """The tokens of a row, and their log-probs in nats, at the temperature."""

    number: int
    tokens: list[int]
    logprobs: list[float]


def _parse_sampled_row(
    answer: Any, requests: Mapping[int, SampleRequest], vocabulary_size: int, eos_ids: Collection[int]
) -> _RemoteAnswer:
    """Return a row of an answer.

    Args:
        answer: the number, the tokens and the log-probs, as JSON.
        requests: the rows that the server has not answered yet, by number.
        vocabulary_size: the number of tokens of the model.
        eos_ids: the tokens that end a row.

    Raises:
        InvalidAnswerError: it cannot be the answer to one of the requests.
    """
    if not isinstance(answer, list) or len(answer) != 3:
        raise InvalidAnswerError("it sends nonsense: a row is not number, tokens and log-probs")
    number, tokens, logprobs = answer
    if type(number) is not int or number not in requests:
        raise InvalidAnswerError("it sends nonsense: a row that it was not asked for, or has answered")
    max_tokens = requests[number].max_tokens
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or len(tokens) != len(logprobs):
        raise InvalidAnswerError("it sends nonsense: a row that does not have a log-prob for each token")
    if not 0 < len(tokens) <= max_tokens:
        raise InvalidAnswerError(
            f"it sends nonsense: a row of {len(tokens)} tokens, where 1 to {max_tokens} were asked for"
        )
    if not all(type(token) is int and 0 <= token < vocabulary_size for token in tokens):
        raise InvalidAnswerError(
            f"it sends nonsense: a token that is not a whole number from 0 to {vocabulary_size - 1}"
        )
    if not all(type(x) in (int, float) and _MIN_LOGPROB <= x <= _MAX_LOGPROB for x in logprobs):
        raise InvalidAnswerError(f"it sends nonsense: a log-prob that is not a number from {_MIN_LOGPROB:g} to 0")
    if any(token in eos_ids for token in tokens[:-1]):
        raise InvalidAnswerError("it sends nonsense: a row that goes on after its end")
    if len(tokens) < max_tokens and tokens[-1] not in eos_ids:
        raise InvalidAnswerError("it sends nonsense: a row that breaks off")
    return _RemoteAnswer(number, tokens, [float(x) for x in logprobs])


class SamplerClient:
    """The engine of a server, over HTTP. Every method raises ServerLostError if the server is lost."""

    def __init__(self, url: str, timeout: float) -> None:
        """timeout: seconds without an answer after which the server counts as lost."""
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version = ""
        self.max_length = self.block_size = 0
        self.has_engine = False
        """Whether the server had an engine for the model at the last request."""
        self.weight_check = WeightCheck()
        self.vocabulary_size, self.eos_ids = 0, frozenset[int]()
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = False
        self.is_verified = False
        """Whether the weights of a push were checked. Later errors are those of the server, not of the settings."""
        self._requests: dict[int, SampleRequest] = {}
        """The unfinished rows by number."""
        self._dtype: torch.dtype | None = None
        self._steps, self._last_progress, self._step_limit = -1, 0.0, 0

    def get_state(self) -> dict[str, Any]:
        """Return the state of the server."""
        return _check_state(self._request_json("GET", "/state"))

    def load_model(self, model: bytes) -> None:
        """Create an engine for a model, as `serialize_model` describes it, unless the server has one.

        Raises:
            AdapterRefusedError: the server does not support such an adapter.
        """
        state = self.get_state()
        if state["model"] != hash_model(model):
            state = _check_state(
                self._request_json("PUT", "/model", model, timeout=max(_LOAD_TIMEOUT_SECONDS, self.timeout))
            )
        if state["refusal"]:
            raise AdapterRefusedError(format_one_line(state["refusal"]))
        if state["model"] != hash_model(model) or state["longest"] < 2 or state["block"] < 1:
            raise InvalidAnswerError("it sends nonsense: a state without the model that it was given")
        described = json.loads(model)
        self.vocabulary_size, self.eos_ids = described["vocabulary"], frozenset(described["ends"])
        self.max_length, self.block_size, self.version = state["longest"], state["block"], state["version"]
        self.has_engine = True

    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Push weights, or an adapter alone for the present base. The server drops its unfinished rows."""
        onto = f"?onto={self.version}" if all(map(is_adapter_weight, weights)) else ""
        version, parts = secrets.token_hex(8), list(split_weights(weights))
        self._requests, self._steps, self._dtype = {}, -1, next(iter(weights.values())).dtype
        for i, part in enumerate(parts):
            body = safetensors.torch.save({name: weight.cpu().contiguous() for name, weight in part.items()})
            self._request("PUT", f"/weights/{version}/{i}/{len(parts)}{onto}", body)
        self.version = version

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:
        """As `VLLMEngine.read_columns`."""
        found = self._request_tensors("/columns", {"name": name, "at": list(indices)})
        columns = [found[str(i)] for i in range(len(found)) if str(i) in found]
        sound = all(x.dim() == 2 and x.shape[1] == len(indices) and x.dtype == self._dtype for x in columns)
        if not columns or len(columns) != len(found) or not sound:
            raise InvalidAnswerError(f"it sends nonsense: no columns of {name}")
        return columns

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """As `VLLMEngine.score_tokens`."""
        found = self._request_tensors("/read", {"ids": list(ids)})
        logprobs, cached = found.get("logprobs"), found.get("cached")
        if logprobs is None or cached is None or logprobs.shape != (len(ids) - 1,) or cached.numel() != 1:
            raise InvalidAnswerError("it sends nonsense: no log-probs of the text that it was given")
        return logprobs, int(cached)

    def step(self, rows: Sequence[SampleRequest]) -> list[_RemoteAnswer]:
        """Add these rows. Return the rows that finished; wait a moment for the first one."""
        self._requests |= {row.number: row for row in rows}
        limit = _MAX_JSON_BYTES + _MAX_TOKEN_JSON_BYTES * sum(row.max_tokens for row in self._requests.values())
        answer = self._request_json("POST", "/step", json.dumps(rows).encode(), self.version, limit=limit)
        steps, answers = (answer.get("steps"), answer.get("said")) if isinstance(answer, dict) else (None, None)
        if type(steps) is not int or steps < self._steps or not isinstance(answers, list):
            raise InvalidAnswerError("it sends nonsense: no steps and rows")
        found = [self._take_answer(row) for row in answers]
        if rows or found:
            # Each step adds a token to a row, or prefills a part of a prompt.
            self._step_limit = steps + sum(len(row.ids) + row.max_tokens for row in self._requests.values())
        if steps != self._steps or rows:
            self._steps, self._last_progress = steps, time.monotonic()
        if not found and time.monotonic() - self._last_progress > self.timeout:
            raise ServerLostError(f"its engine has stood still for {self.timeout:g} s")
        if self._requests and steps > self._step_limit:
            raise InvalidAnswerError("it sends nonsense: more steps than the rows can take, and no row")
        return found

    def _take_answer(self, row: Any) -> _RemoteAnswer:
        found = _parse_sampled_row(row, self._requests, self.vocabulary_size, self.eos_ids)
        del self._requests[found.number]
        return found

    def start(self) -> None:
        """Allow requests."""
        self._stopped = False

    def stop(self) -> None:
        """End the request that another thread waits for, and refuse requests until `start`."""
        self._stopped = True
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)  # pyright: ignore[reportOptionalMemberAccess]

    # ------------------------------------------------------------ requests

    def _request_tensors(self, path: str, asked: Any) -> dict[str, Tensor]:
        answer = self._request("POST", path, json.dumps(asked).encode(), self.version, limit=_MAX_TENSOR_BYTES)
        try:
            return safetensors.torch.load(answer)
        except (SafetensorError, KeyError, ValueError):
            raise InvalidAnswerError("it sends nonsense: no tensors") from None

    def _request_json(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        version: str | None = None,
        timeout: float = 0,
        limit: int = _MAX_JSON_BYTES,
    ) -> Any:
        try:
            return json.loads(self._request(method, path, body, version, timeout, limit))
        except (ValueError, RecursionError):
            raise InvalidAnswerError("it sends nonsense: no JSON") from None

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        version: str | None = None,
        timeout: float = 0,
        limit: int = _MAX_JSON_BYTES,
    ) -> bytes:
        """Return the body of an answer. If a version is given, it was computed with those weights."""
        try:
            secret, limits = get_secret(self.url), (timeout or self.timeout, limit)
            status, theirs, answer = self._send(method, path, body, _build_headers(secret, version), *limits)
            # A server that was still starting may have written its secret after this request was sent.
            if status == 401 and (written := get_secret(self.url)) != secret:
                status, theirs, answer = self._send(method, path, body, _build_headers(written, version), *limits)
        except TimeoutError:
            raise ServerLostError(f"no answer in {timeout or self.timeout:g} s") from None
        except OSError as error:
            raise ServerLostError(error.strerror or type(error).__name__) from None
        except http.client.HTTPException as error:
            raise ServerLostError(f"an answer that breaks off ({type(error).__name__})") from None
        if status in (400, 401, 403, 404, 422) and not self.is_verified:
            raise UserError(
                f"sampler.urls: {self.url} refuses (HTTP {status}): {_extract_error_message(answer)}"
                f"{_format_secret_hint(status)}"
            )
        if status != 200:
            raise ServerLostError(f"HTTP {status}, {_extract_error_message(answer)}")
        if version is not None and theirs != version:
            raise ServerLostError("an answer computed with other weights")
        return answer

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float, limit: int
    ) -> tuple[int, str | None, bytes]:
        """Return status, version and body.

        Each request has its own connection, since one that the server has closed looks like a lost server.
        """
        if self._stopped:
            raise ServerLostError("it is no longer asked")
        url = urlsplit(self.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = connection = kind(
            url.hostname or "", url.port, timeout=min(CONNECT_TIMEOUT_SECONDS, timeout)
        )
        try:
            connection.connect()
            if self._stopped:  # in between: from here on `stop` finds the socket
                raise ServerLostError("it is no longer asked")
            connection.sock.settimeout(timeout)
            connection.request(method, url.path + path, body, headers)
            with connection.getresponse() as answer:
                return (
                    answer.status,
                    answer.getheader(VERSION_HEADER),
                    _read_answer(answer, limit, time.monotonic() + timeout),
                )
        finally:
            connection.close()


def check_servers(urls: Sequence[str], timeout: float) -> None:
    """Raise UserError if one of the servers does not answer."""
    for url in urls:
        try:
            SamplerClient(url, min(CONNECT_TIMEOUT_SECONDS, timeout)).get_state()
        except InvalidAnswerError:
            raise UserError(
                f"sampler.urls: {url} is no sampler server, which {_START_COMMAND.format('PORT')} starts"
            ) from None
        except ServerLostError as error:
            start = _START_COMMAND.format(urlsplit(url).port or 80)
            raise UserError(f"sampler.urls: {url} cannot be reached ({error}): start it there by {start}") from None


def format_servers_notice(urls: Sequence[str]) -> str:
    """Return the notice to show before the first request: where the weights go, and with which secret."""
    if get_secret():
        secret = f"with the secret in the environment variable {SECRET_VARIABLE}"
    elif all(map(get_secret, urls)):
        secret = "with the secrets that servers on this machine wrote for their user"
    else:
        secret = f"without a secret: {SECRET_VARIABLE} is not set"
    return f"sampler.urls: the weights and the prompts go to {', '.join(urls)}, {secret}"


def serialize_model(
    policy: Policy, adapter_shape: AdapterShape | None = None, dtype: torch.dtype | None = None
) -> bytes:
    """Return a description of a policy, without weights, for which a server can create an engine.

    Args:
        policy: the policy.
        adapter_shape: the shape of an adapter that will be pushed by itself.
        dtype: the dtype of the weights that will be pushed; None is the policy's.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_config(policy.model, Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
    name = str(dtype or policy.dtype).removeprefix("torch.")
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    ends = list(policy.eos_ids)
    known = {"config": config, "dtype": name, "ends": ends, "vocabulary": vocabulary, "adapter": adapter_shape}
    return json.dumps(known, sort_keys=True).encode()


def _check_state(state: Any) -> dict[str, Any]:
    """Return the state of a server. Raise InvalidAnswerError if it is none."""
    kinds = {"model": str, "version": str, "longest": int, "block": int, "refusal": str}
    sound = isinstance(state, dict) and all(type(state.get(name)) is kind for name, kind in kinds.items())
    if not sound or not re.fullmatch("[0-9a-f]{0,64}", state["version"]):
        raise InvalidAnswerError("it sends nonsense: no state")
    return state


def _read_answer(answer: http.client.HTTPResponse, limit: int, deadline: float) -> bytes:
    """Return the body of an answer. Raise InvalidAnswerError if it is larger, TimeoutError if it takes longer."""
    body = bytearray()
    while part := answer.read1(2**16):
        body += part
        if len(body) > limit:
            raise InvalidAnswerError(f"it sends nonsense: more than {limit} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(body)


def get_secret(url: str = "") -> str:
    """Return the secret of the environment; without one, the secret that a server on this machine wrote to its file.

    Raises:
        UserError: it cannot stand in a header.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret and _is_on_loopback(url):
        with suppress(OSError):
            secret = get_secret_path(urlsplit(url).port or 80).read_text(encoding="utf-8", errors="replace").strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise UserError(f"{SECRET_VARIABLE} must be letters, digits and signs of ASCII, without spaces")
    return secret


def _is_on_loopback(url: str) -> bool:
    name = urlsplit(url).hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def get_secret_path(port: int) -> Path:
    """Return the file in which a server on this machine writes its secret, for runs of the same user."""
    cache = Path(os.environ.get("PELLUCID_CACHE") or Path.home() / ".cache" / "pellucid")
    return cache / "samplers" / f"{socket.gethostname()}-{port}.secret"


@contextmanager
def publish_secret(port: int) -> Iterator[str]:
    """Yield a new secret, which is in a file that only this user can read until the end.

    Raises:
        UserError: the file cannot be written.
    """
    secret, path = secrets.token_urlsafe(32), get_secret_path(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file_atomically(path, secret + "\n", 0o600)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): set {SECRET_VARIABLE} to a secret of your own"
        ) from error
    try:
        yield secret
    finally:
        with suppress(OSError):
            if path.read_text(encoding="utf-8").strip() == secret:  # no other server has written its own since
                path.unlink()


def _format_secret_hint(status: int) -> str:
    return (
        f"; set {SECRET_VARIABLE} to the secret of the server, which says at its start where it is"
        if status == 401
        else ""
    )


def _build_headers(secret: str, version: str | None) -> dict[str, str]:
    known = {"Authorization": f"Bearer {secret}"} if secret else {}
    return known | ({VERSION_HEADER: version, "Content-Type": "application/json"} if version else {})


def split_weights(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in parts of at most MAX_PART_BYTES, or of one weight."""
    part, size = dict[str, Tensor](), 0
    for name, weight in weights.items():
        if part and size + weight.nbytes > MAX_PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = weight
        size += weight.nbytes
    yield part


def hash_model(model: bytes) -> str:
    return hashlib.sha256(model).hexdigest()


def _extract_error_message(answer: bytes) -> str:
    """Return the message of an error response in one line."""
    try:
        message = json.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = answer.decode(errors="replace")
    return format_one_line(message)


def format_one_line(text: Any) -> str:
    return escape_controls(" ".join(str(text).split())[:300])


# ---------------------------------------------------------------- a pool of servers
# A thread for each server makes requests while there are rows or weights to send. The unfinished rows of a lost server
# go to the others, and later answers of that server are dropped.


RETRY_SECONDS = 2.0
"""How long to wait until a lost server is tried again."""
_MAX_RETRY_DOUBLINGS = 5
"""How often this time may double for a server that sends invalid answers."""
REMINDER_SECONDS = 30.0
"""How often the user is reminded that no server answers."""


@dataclass(eq=False)
class _ServerState:
    """A server and its rows."""

    client: SamplerClient
    is_up: bool = False
    """Whether it has the present weights, and they were checked."""
    reason: str = ""
    """Why it is not up, or was not."""
    invalid_answers: int = 0
    """How many invalid answers it has sent in a row. Only an answered row sets this to 0, weights do not."""
    queued_rows: list[int] = field(default_factory=list)
    """Rows of the next request."""
    sent_rows: set[int] = field(default_factory=set)
    """Rows that were sent to it."""

    @property
    def pending_count(self) -> int:
        return len(self.queued_rows) + len(self.sent_rows)


class _ServerPool:
    """Servers as one engine: `add_request`, `step` until nothing is `unfinished`, `abort_all` to end its threads."""

    def __init__(self, urls: Iterable[str], timeout: float, update_server: Callable[[SamplerClient], None]) -> None:
        """update_server: pushes the present weights to a server, and checks them."""
        self.servers = [_ServerState(SamplerClient(url, timeout)) for url in urls]
        self.update_server = update_server
        self.group_size = 1
        """Rows of a group, which go to the same server."""
        self.requests: dict[int, tuple[Any, SampleRequest]] = {}
        """The unfinished rows by number, with their keys."""
        self.max_length = 0
        """The most tokens of a prompt and its completion: the least that the first servers support."""
        self.group_servers: dict[int, _ServerState] = {}
        """The server that has the prompts of a group in its prefix cache."""
        self.answers: list[EngineAnswer] = []
        self.request_numbers = itertools.count()
        self.condition = threading.Condition()
        self.executor: ThreadPoolExecutor | None = None
        self.futures: list[Future[None]] = []
        self.stopped = threading.Event()
        self.last_reminder = -REMINDER_SECONDS
        """When the user was last reminded that no server answers."""

    def update_weights(self) -> None:
        """Push the present weights to the servers that have an engine, or to all. Wait until one server is up."""
        while True:
            tried = [server for server in self.servers if server.client.has_engine] or self.servers
            for server in tried:
                server.client.start()
            with ThreadPoolExecutor(len(tried)) as pool:
                list(pool.map(self._try_update, tried))
            if up := [server for server in self.servers if server.is_up]:
                self.max_length = self.max_length or min(server.client.max_length for server in up)
                return
            self._remind()
            time.sleep(RETRY_SECONDS)

    @property
    def unfinished(self) -> Collection[Any]:
        """Rows that `step` has not returned yet."""
        with self.condition:
            return [*self.requests, *self.answers]

    def add_request(self, key: Any, ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> None:
        """Queue a row of up to `max_tokens` tokens behind these.

        key: the number of the row, or the row of a conversation.
        """
        with self.condition:
            number = next(self.request_numbers)
            self.requests[number] = key, SampleRequest(number, list(ids), max_tokens, temperature, seed)
            self._assign_rows([number])
        if not self.futures:
            self._start_threads()

    def step(self) -> list[EngineAnswer]:
        """Return the rows that finished; wait a moment for the first one."""
        with self.condition:
            self.condition.wait_for(lambda: self.answers or any(thread.done() for thread in self.futures), POLL_SECONDS)
            for thread in self.futures:
                if thread.done():
                    thread.result()  # it has failed
            answers, self.answers = self.answers, []
        if not any(server.is_up for server in self.servers):
            self._remind()
        return answers

    def abort_all(self) -> None:
        """Cancel all unfinished rows, and end all threads."""
        self.stopped.set()
        with self.condition:
            self.condition.notify_all()
        for server in self.servers:
            server.client.stop()
        if self.executor:
            self.executor.shutdown()
        for server in self.servers:
            if server.sent_rows:  # it decodes them until it gets weights
                server.is_up = False
            server.queued_rows, server.sent_rows = [], set()
        self.requests, self.group_servers, self.answers, self.executor, self.futures = {}, {}, [], None, []

    # ------------------------------------------------------------ assignment of rows

    def _assign_rows(self, numbers: Iterable[int]) -> None:
        """Assign rows to the server of their group, and a new group to the server with the fewest rows."""
        up = [server for server in self.servers if server.is_up]
        for number in numbers if up else ():
            group = self._get_group(self.requests[number][0])
            home = self.group_servers.get(group)
            if home is None or not home.is_up:
                home = self.group_servers[group] = min(up, key=lambda server: server.pending_count)
            home.queued_rows.append(number)
        self.condition.notify_all()

    def _get_group(self, key: Any) -> int:
        return (key.number if isinstance(key, ConversationRow) else key) // self.group_size

    def check_max_length(self, client: SamplerClient) -> None:
        """Raise ServerTooSmallError if a server supports only shorter rows than the first servers."""
        if client.max_length < self.max_length:
            raise _ServerTooSmallError(
                f"it takes {client.max_length} tokens a row, and this run counts on {self.max_length}: start it with a"
                " larger --cache-gb"
            )

    def _mark_up(self, server: _ServerState) -> None:
        with self.condition:
            server.is_up = True
            assigned = {number for other in self.servers for number in (*other.queued_rows, *other.sent_rows)}
            self._assign_rows([number for number in self.requests if number not in assigned])
        if not server.invalid_answers:
            self._clear_faults(server)

    def _clear_faults(self, server: _ServerState) -> None:
        if server.reason:
            print(escape_controls(f"! {server.client.url} is back, with the present weights"), flush=True)
        server.reason, server.invalid_answers = "", 0

    def _mark_down(self, server: _ServerState, error: ServerLostError | AdapterRefusedError) -> None:
        reason = str(error)
        if isinstance(error, InvalidAnswerError):
            server.invalid_answers += 1
        with self.condition:
            rows = [*server.sent_rows, *server.queued_rows]
            server.is_up, server.queued_rows, server.sent_rows = False, [], set()
            server.client.has_engine = False
            self._assign_rows(sorted(rows))
        if not server.reason or (
            isinstance(error, _ServerTooSmallError | AdapterRefusedError) and server.reason != reason
        ):
            others = "go to the others" if any(other.is_up for other in self.servers) else "wait"
            lost = f": its {len(rows)} rows {others}" if rows else ""
            print(escape_controls(f"! {server.client.url}: {reason}{lost}"), flush=True)
        server.reason = reason

    def _remind(self) -> None:
        if time.monotonic() - self.last_reminder > REMINDER_SECONDS:
            why = "; ".join(f"{server.client.url}: {server.reason or 'not yet'}" for server in self.servers)
            waiting = f"{len(self.requests)} rows wait" if self.requests else "the weights wait"
            line = f"! no sampler server answers, {waiting} ({why}): {_START_COMMAND.format('PORT')} starts one"
            print(escape_controls(line), flush=True)
            self.last_reminder = time.monotonic()

    # ------------------------------------------------------------ a thread for each server

    def _start_threads(self) -> None:
        self.stopped.clear()
        self.executor = ThreadPoolExecutor(len(self.servers))
        for server in self.servers:
            server.client.start()
            self.futures.append(self.executor.submit(self._run_server, server))

    def _try_update(self, server: _ServerState) -> None:
        try:
            self.update_server(server.client)
            self._mark_up(server)
        except ServerLostError as error:
            self._mark_down(server, error)

    def _run_server(self, server: _ServerState) -> None:
        while not self.stopped.is_set():
            try:
                if not server.is_up:
                    self.update_server(server.client)
                    self._mark_up(server)
                while not self.stopped.is_set():
                    self._exchange_rows(server)
            except (ServerLostError, AdapterRefusedError) as error:
                if not self.stopped.is_set():
                    self._mark_down(server, error)
                    self.stopped.wait(RETRY_SECONDS * 2 ** min(server.invalid_answers, _MAX_RETRY_DOUBLINGS))

    def _exchange_rows(self, server: _ServerState) -> None:
        """Send a server its queued rows, and take the rows that it has finished."""
        with self.condition:
            self.condition.wait_for(lambda: server.pending_count or self.stopped.is_set())
            numbers, server.queued_rows = server.queued_rows, []
            server.sent_rows.update(numbers)
            rows = [self.requests[number][1] for number in numbers]
        if self.stopped.is_set():
            return
        answers = server.client.step(rows)
        if answers and server.invalid_answers:
            self._clear_faults(server)
        with self.condition:
            for number, tokens, logprobs in answers:
                if number in server.sent_rows:
                    server.sent_rows.remove(number)
                    self.answers.append(EngineAnswer(self.requests.pop(number)[0], tokens, logprobs))
            self.condition.notify_all()


# ---------------------------------------------------------------- the sampler
# A server that comes back gets the weights of the last push: those of the policy, or a copy if the policy is updated
# while rows are sampled (`ahead`). For an adapter that is pushed by itself it gets the base first.

_MAX_TEXT_TOKENS = 513
"""The most tokens of the fixed text: more than a block of the KV cache, for blocks of up to 512."""


@dataclass
class VLLMServerSampler(VLLMSampler):
    """Samples with vLLM on sampler servers."""

    urls: Sequence[str] = ()
    timeout: float = 120.0
    """Seconds without an answer after which a server counts as lost."""
    ahead: bool = False
    """Whether the policy is updated while rows are sampled."""
    pool: _ServerPool | None = None

    def __post_init__(self) -> None:
        self.policy_lock = threading.Lock()
        """Held while a thread reads the policy."""
        self.model_description = b""
        self.pushed_weights: dict[str, Tensor] | None = None
        """The weights of the last push, if they are kept."""
        self.text_ids: list[int] = []
        """The token ids of the fixed text."""
        self.text_logprobs = torch.empty(0)
        """The scorer's log-probs of the fixed text, with the weights of the last push."""

    def sync(self, policy: Any, version: int = 0) -> None:
        """Push these weights to the servers, and check them.

        Raises:
            UserError: a server does not compute with them.
        """
        try:
            self._sync(policy, version)
        except AdapterRefusedError as error:
            self._fall_back_to_merged(error)
            self._sync(policy, version)

    def _sync(self, policy: Policy, version: int) -> None:
        self.policy, self.version, self.model_description = policy, version, self._describe_model(policy)
        self.pool = self.pool or _ServerPool(self.urls, self.timeout, self._update_server)
        self.pushed_weights = None  # free them before there are others
        self.pushed_weights = self._get_pushed_weights(policy, copy=self.ahead)
        self.text_ids = encode_check_text(policy, min(_MAX_TEXT_TOKENS, policy.context_length - 1))
        self.text_logprobs = score_text(policy, self.text_ids)
        try:
            self.pool.update_weights()
        finally:
            if not self.ahead:
                self.pushed_weights = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """As `VLLMSampler.generate`, by all servers."""
        self._engine.group_size = sampling.n
        return super().generate(prompts, sampling)

    @property
    def _engine(self) -> _ServerPool:
        assert self.pool
        return self.pool

    def _describe_model(self, policy: Policy) -> bytes:
        form = self._get_adapter_shape(policy)
        return serialize_model(policy, form, get_push_dtype(policy, form))

    def _update_server(self, client: SamplerClient) -> None:
        """Push the last weights to a server, and check that it computes with them."""
        last_version = client.version
        client.load_model(self.model_description)
        self._engine.check_max_length(client)
        if not last_version or client.version != last_version:  # another process, or weights of another run
            client.weight_check = WeightCheck()
        with self.policy_lock:
            weights = self.pushed_weights or self._get_pushed_weights(self.policy)
            base = self._get_base_weights(self.policy, client.weight_check)
        ids = self.text_ids[: get_text_length(client)]
        if client.version:
            client.score_tokens(ids)  # so that it is in the prefix cache, unless that is cleared
        client.push(base | weights)
        client.weight_check.check(client, base | weights, ids, self.text_logprobs[: len(ids) - 1], self.policy.dtype)
        client.is_verified = True
