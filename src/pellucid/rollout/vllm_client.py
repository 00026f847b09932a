"""Clients of sampler servers, which run vLLM in their own processes: `SamplerClient` for one, `ServerPool` for all.

Every push of weights gets a new version, and every response names the version that it was computed with. A response
with another version is rejected, whether it is late or computed with the weights of another run.

In a run of several processes, each samples its own prompts as a client of all servers. Rank 0 alone pushes: it checks
the weights on a server under a version that the others do not know, and then renames this version to the common one.
"""

from __future__ import annotations

import hashlib
import http.client
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pellucid.policy.load import save_config
from pellucid.rollout.nccl_transfer import WeightSender
from pellucid.rollout.server_errors import InvalidAnswerError, ServerLostError
from pellucid.rollout.vllm import (
    SINGLE_RANK,
    AdapterRefusedError,
    AdapterShape,
    EngineAnswer,
    Ranks,
    encode_check_text,
    gather_base_weights,
    gather_push_weights,
    get_base_weights,
    get_push_dtype,
    get_push_weights,
    get_text_length,
    is_adapter_weight,
    score_text,
)
from pellucid.rollout.weight_check import WeightCheck
from pellucid.rollout.weight_spool import WeightSpool, spool_weights, view_bytes
from pellucid.types import UserError
from pellucid.utils.endpoint import is_loopback
from pellucid.utils.files import get_cache_folder, write_file_atomically
from pellucid.utils.text import escape_controls, format_one_line

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

_CPU = torch.device("cpu")
SECRET_VARIABLE = "PELLUCID_SAMPLER_TOKEN"
"""The environment variable with the secret that servers and their clients share."""
VERSION_HEADER = "Weights-Version"
"""The header with the version of the weights that a response was computed with."""
MAX_PART_BYTES = 2**28
"""The maximum bytes of weights in one request, unless a single weight is larger."""
CONNECT_TIMEOUT_SECONDS = 5.0
_LOAD_TIMEOUT_SECONDS = 900.0
"""The timeout for creating an engine."""
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
POLL_SECONDS = 0.1
"""How long one poll waits for finished rows."""
_MAX_JSON_BYTES, _MAX_TENSOR_BYTES = 2**20, 2**28
"""The maximum bytes of a JSON response without its rows, and of a response with tensors."""
_MAX_TOKEN_JSON_BYTES = 64
"""The maximum bytes of one token and its log-prob in JSON."""
_MIN_LOGPROB, _MAX_LOGPROB = -100.0, 1e-3
"""Bounds of a sampled token's log-prob. Probabilities below e^-100 are never sampled; rounding may exceed 0 nats."""


class _ServerTooSmallError(ServerLostError):
    """A server does not support rows as long as this run needs."""


def require(is_valid: bool, fault: str) -> None:
    if not is_valid:
        raise InvalidAnswerError(fault)


def check_row(
    tokens: Sequence[Any], logprobs: Sequence[Any], max_tokens: int, vocabulary_size: int, eos_ids: frozenset[int]
) -> None:
    """Raise InvalidAnswerError unless a row of a server is one that the policy can have sampled."""
    require(0 < len(tokens) <= max_tokens, f"a row of {len(tokens)} tokens instead of 1 to {max_tokens}")
    are_ids = all(type(token) is int and 0 <= token < vocabulary_size for token in tokens)
    require(are_ids, f"a token that is not a whole number from 0 to {vocabulary_size - 1}")
    are_logprobs = all(type(x) in (int, float) and _MIN_LOGPROB <= x <= _MAX_LOGPROB for x in logprobs)
    require(are_logprobs, f"a log-prob that is not a number from {_MIN_LOGPROB:g} to 0")
    require(eos_ids.isdisjoint(tokens[:-1]), "a row that continues after an end token")
    require(len(tokens) == max_tokens or tokens[-1] in eos_ids, "a row that stops early without an end token")


class SampleRequest(NamedTuple):
    """A request to sample up to `max_tokens` tokens after the prompt `ids`."""

    number: int
    ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int


class ServerClient(Protocol):
    """A client of one server: a `SamplerClient` or an `SGLangClient`. Requests raise ServerLostError."""

    start_command: str
    """The command that starts a server on port {}."""
    url: str
    timeout: float
    version: str
    max_length: int
    block_size: int
    has_engine: bool
    is_verified: bool
    weight_check: WeightCheck

    def get_state(self) -> dict[str, Any]: ...

    def load_model(self, model: bytes) -> None: ...

    def push(self, weights: Mapping[str, Tensor], device: torch.device) -> None: ...

    def rename_version(self, version: str) -> None: ...

    def follow(self, model: bytes, version: str) -> None: ...

    def return_to(self, version: str) -> None: ...

    def check_version(self) -> None: ...

    def release_rows(self, timeout: float = 0) -> None: ...

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]: ...

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]: ...

    def step(self, rows: Sequence[SampleRequest]) -> list[EngineAnswer]: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class _WeightsBody:
    """Weights in safetensors format, as the body of a request. They are read one at a time while they are sent."""

    def __init__(self, weights: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self.weights, self.names, self.length = weights, names, 0
        header = dict[str, Any]()
        for name in names:
            form = weights.entries[name] if isinstance(weights, WeightSpool) else weights[name]
            offsets = self.length, self.length + form.nbytes
            dtype, self.length = _SAFETENSORS_DTYPES[form.dtype], offsets[1]
            header[name] = {"dtype": dtype, "shape": list(form.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the weights are aligned
        self.header = len(text).to_bytes(8, "little") + text

    def __len__(self) -> int:
        return len(self.header) + self.length

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self.header
        for name in self.names:
            yield view_bytes(self.weights[name].detach().cpu().contiguous())


class SamplerClient:
    """HTTP client of one server's engine. Requests raise ServerLostError if the server is lost."""

    start_command = "pellucid sampler --port {}"

    def __init__(self, url: str, timeout: float) -> None:
        """timeout: seconds without a response after which the server counts as lost."""
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version = ""
        self.client_id = secrets.token_hex(8)
        """The server keeps the rows of different ids apart."""
        self.max_length = self.block_size = 0
        self.has_engine = False
        """Whether the server had an engine for the model at the last request."""
        self.weight_check = WeightCheck()
        self.vocabulary_size, self.eos_ids = 0, frozenset[int]()
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = False
        self.is_verified = False
        """Whether pushed weights have passed the check, or rows have been sampled. Later errors are the server's fault,
        not the settings'."""
        self._requests: dict[int, SampleRequest] = {}
        """The unfinished rows by number."""
        self._dtype: torch.dtype | None = None
        self._steps, self._last_progress, self._step_limit = -1, 0.0, 0
        self._other_tokens = 0
        """The tokens that unfinished rows of other clients may need."""
        self._sender = WeightSender(self.url, self._request, timeout)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the server."""
        return _parse_state(self._request("GET", "/state"))

    def load_model(self, model: bytes) -> None:
        """Create an engine for a model described by `serialize_model`, unless the server has one.

        Raise AdapterRefusedError if the server does not support the adapter.
        """
        state = self.get_state()
        if state["model"] != hash_model(model):
            timeout = max(_LOAD_TIMEOUT_SECONDS, self.timeout)
            state = _parse_state(self._request("PUT", "/model", model, timeout=timeout))
        if state["refusal"]:
            raise AdapterRefusedError(escape_controls(format_one_line(state["refusal"])))
        is_loaded = state["model"] == hash_model(model) and state["longest"] >= 2 and state["block"] >= 1
        require(is_loaded, "a state without the requested model")
        self._describe_tokens(model)
        self.max_length, self.block_size, self.version = state["longest"], state["block"], state["version"]
        self.has_engine = True

    def _describe_tokens(self, model: bytes) -> None:
        description = json.loads(model)
        self.vocabulary_size, self.eos_ids = description["vocabulary"], frozenset(description["ends"])

    def push(self, weights: Mapping[str, Tensor], device: torch.device = _CPU) -> None:
        """Push all weights, or an adapter for the server's current base. The server drops all unfinished rows.

        device: the trainer's. All weights go over NCCL from a GPU, if the server can receive them.
        """
        onto = f"?onto={self.version}" if all(map(is_adapter_weight, weights)) else ""
        version = secrets.token_hex(8)
        self._forget_rows()
        self._dtype = next(iter(weights.values())).dtype
        if any(map(is_adapter_weight, weights)) or not self._sender.send(weights, version, device):
            self._send_parts(weights, split_weights(weights), version, onto)
        self.version = version

    def _send_parts(
        self, weights: Mapping[str, Tensor], parts: Sequence[Sequence[str]], version: str, onto: str
    ) -> None:
        """Send the weights, one request for each part."""
        for i, names in enumerate(parts):
            body = _WeightsBody(weights, names)
            self._request("PUT", f"/weights/{version}/{i}/{len(parts)}{onto}", body)

    def rename_version(self, version: str) -> None:
        """Give the server's weights, which this client has pushed and checked, the version that other clients use."""
        self._request("PUT", f"/versions/{self.version}/{version}")
        self.version = version

    def follow(self, model: bytes, version: str) -> None:
        """Use weights that another client has pushed to the server, without contacting it."""
        self._describe_tokens(model)
        self.version = version
        self._forget_rows()

    def return_to(self, version: str) -> None:
        """Use the server again if it has these weights. Raise ServerLostError if it does not."""
        self.version = version
        self.check_version()
        self.release_rows()

    def check_version(self) -> None:
        """Raise ServerLostError if the server has other weights than this client."""
        if self.get_state()["version"] != self.version:
            raise ServerLostError("it has other weights now")

    def release_rows(self, timeout: float = 0) -> None:
        """Drop this client's rows on the server. A late request for some of them is then rejected."""
        self._request("POST", f"/release?client={self.client_id}", timeout=timeout)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.client_id = secrets.token_hex(8)
        self._requests, self._steps, self._other_tokens = {}, -1, 0

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:
        """See `VLLMEngine.read_columns`."""
        tensors = self._request_tensors("/columns", {"name": name, "at": list(indices)})
        columns = [tensors[str(i)] for i in range(len(tensors)) if str(i) in tensors]
        is_valid = all(x.dim() == 2 and x.shape[1] == len(indices) and x.dtype == self._dtype for x in columns)
        require(is_valid and 0 < len(columns) == len(tensors), f"no columns of {name}")
        return columns

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """See `VLLMEngine.score_tokens`."""
        tensors = self._request_tensors("/read", {"ids": list(ids)})
        logprobs, cached = tensors.get("logprobs"), tensors.get("cached")
        if logprobs is None or cached is None or logprobs.shape != (len(ids) - 1,) or cached.numel() != 1:
            raise InvalidAnswerError("no log-probs of the given text")
        return logprobs, int(cached)

    def step(self, rows: Sequence[SampleRequest]) -> list[EngineAnswer]:
        """Add rows and return the finished ones, with their numbers. Wait briefly if none has finished."""
        self._requests |= {row.number: row for row in rows}
        limit = _MAX_JSON_BYTES + _MAX_TOKEN_JSON_BYTES * sum(row.max_tokens for row in self._requests.values())
        path, body = f"/step?client={self.client_id}", json.dumps(rows).encode()
        answer = _parse_json(self._request("POST", path, body, self.version, limit=limit))
        counts = answer if isinstance(answer, dict) else {}
        steps, others, finished = (counts.get(name) for name in ("steps", "others", "said"))
        if type(steps) is not int or type(others) is not int or not isinstance(finished, list):
            raise InvalidAnswerError("no steps and rows")
        require(steps >= self._steps and others >= 0, "no steps and rows")
        answers = [self._take_answer(row) for row in finished]
        if rows or answers or others != self._other_tokens:
            # Each step decodes a token of a row, or prefills part of a prompt, of this client or of another.
            own = sum(len(row.ids) + row.max_tokens for row in self._requests.values())
            self._step_limit, self._other_tokens = steps + own + others, others
        if steps != self._steps or rows:
            self._steps, self._last_progress = steps, time.monotonic()
        if not answers and time.monotonic() - self._last_progress > self.timeout:
            raise ServerLostError(f"its engine has made no progress for {self.timeout:g} s")
        require(not self._requests or steps <= self._step_limit, "more steps than the rows can need, and no row")
        self.is_verified = True
        return answers

    def _take_answer(self, row: Any) -> EngineAnswer:
        """Validate one row of a response, and return it as the answer to its request."""
        require(isinstance(row, list) and len(row) == 3, "a row that is not [number, tokens, log-probs]")
        number, tokens, logprobs = row
        require(type(number) is int and number in self._requests, "a row that was not requested, or is finished")
        is_paired = isinstance(tokens, list) and isinstance(logprobs, list) and len(tokens) == len(logprobs)
        require(is_paired, "a row that does not have a log-prob for each token")
        check_row(tokens, logprobs, self._requests[number].max_tokens, self.vocabulary_size, self.eos_ids)
        del self._requests[number]
        return EngineAnswer(number, tokens, [float(x) for x in logprobs])

    def start(self) -> None:
        """Allow requests."""
        self._stopped = self._sender.is_stopped = False

    def stop(self) -> None:
        """Abort the request that another thread waits for, and reject requests until `start`."""
        self._stopped = self._sender.is_stopped = True
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)  # pyright: ignore[reportOptionalMemberAccess]

    # ------------------------------------------------------------ requests

    def _request_tensors(self, path: str, arguments: Any) -> dict[str, Tensor]:
        answer = self._request("POST", path, json.dumps(arguments).encode(), self.version, limit=_MAX_TENSOR_BYTES)
        try:
            return safetensors.torch.load(answer)
        except (SafetensorError, KeyError, ValueError):
            raise InvalidAnswerError("no tensors") from None

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | _WeightsBody = b"",
        version: str | None = None,
        timeout: float = 0,
        limit: int = _MAX_JSON_BYTES,
    ) -> bytes:
        """Return the body of a response. If `version` is given, reject responses computed with other weights."""
        timeout, secret = timeout or self.timeout, get_secret(self.url)
        try:
            status, answer_version, answer = self._send(method, path, body, secret, version, timeout, limit)
            # A server that was still starting may have written its secret after this request was sent.
            if status == 401 and (written := get_secret(self.url)) != secret:
                status, answer_version, answer = self._send(method, path, body, written, version, timeout, limit)
        except TimeoutError:
            raise ServerLostError(f"no answer in {timeout:g} s") from None
        except OSError as error:
            raise ServerLostError(error.strerror or type(error).__name__) from None
        except http.client.HTTPException as error:
            raise ServerLostError(f"its response is incomplete ({type(error).__name__})") from None
        if status in (400, 401, 403, 404, 422) and not self.is_verified:
            hint = f"; set {SECRET_VARIABLE} to the server's secret, whose location the server prints when it starts"
            raise UserError(
                f"sampler.urls: {self.url} rejects the request (HTTP {status}): {extract_error_message(answer)}"
                f"{hint if status == 401 else ''}"
            )
        if status != 200:
            raise ServerLostError(f"HTTP {status}, {extract_error_message(answer)}")
        if version is not None and answer_version != version:
            raise ServerLostError("its response was computed with other weights")
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | _WeightsBody,
        secret: str,
        version: str | None,
        timeout: float,
        limit: int,
    ) -> tuple[int, str | None, bytes]:
        """Return status, version and body of the response.

        Each request opens a connection: a reused one that the server has closed would look like a lost server.
        """
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        if version:
            headers |= {VERSION_HEADER: version, "Content-Type": "application/json"}
        if isinstance(body, _WeightsBody):
            headers["Content-Length"] = str(len(body))
        url = urlsplit(self.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=min(CONNECT_TIMEOUT_SECONDS, timeout))
        self._connection = connection
        try:
            if not self._stopped:
                connection.connect()
            if self._stopped:  # from here on `stop` finds the socket
                raise ServerLostError("the request was stopped")
            connection.sock.settimeout(timeout)
            connection.request(method, url.path + path, body, headers)
            with connection.getresponse() as answer:
                content = read_answer(answer, limit, time.monotonic() + timeout)
                return answer.status, answer.getheader(VERSION_HEADER), content
        finally:
            connection.close()


def check_servers(
    urls: Sequence[str], timeout: float, make_client: Callable[[str, float], ServerClient] = SamplerClient
) -> None:
    """Raise UserError if one of the servers does not answer."""
    for url in urls:
        client = make_client(url, min(CONNECT_TIMEOUT_SECONDS, timeout))
        try:
            client.get_state()
        except InvalidAnswerError:
            raise UserError(
                f"sampler.urls: {url} is not a sampler server; {client.start_command.format('PORT')} starts one",
                page="how-to/vllm",
            ) from None
        except ServerLostError as error:
            start = client.start_command.format(urlsplit(url).port or 80)
            message = f"sampler.urls: {url} cannot be reached ({error}): start one there with {start}"
            raise UserError(message, page="how-to/vllm") from None


def format_servers_notice(urls: Sequence[str]) -> str:
    """Return the notice to show before the first request: where the weights go, and with which secret."""
    if get_secret():
        secret = f"with the secret in the environment variable {SECRET_VARIABLE}"
    elif all(map(get_secret, urls)):
        secret = "with the secrets that servers on this machine wrote for their user"
    else:
        secret = f"without a secret: {SECRET_VARIABLE} is not set"
    return f"sampler.urls: the weights and the prompts go to {', '.join(urls)}, {secret}"


def serialize_model(policy: Policy, adapter_shape: AdapterShape | None = None) -> bytes:
    """Return a description of a policy without weights, from which a server can create an engine.

    adapter_shape: the shape of an adapter that will be pushed without its base.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_config(policy.model, Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
    description = {
        "config": config,
        "dtype": str(get_push_dtype(policy, adapter_shape)).removeprefix("torch."),
        "ends": list(policy.eos_ids),
        "vocabulary": policy.vocabulary_size,
        "adapter": adapter_shape,
    }
    return json.dumps(description, sort_keys=True).encode()


def hash_model(model: bytes) -> str:
    return hashlib.sha256(model).hexdigest()


def split_weights(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the weights in parts of at most MAX_PART_BYTES, or of one larger weight."""
    is_spooled = isinstance(weights, WeightSpool)
    sizes = weights.get_sizes() if is_spooled else {name: weight.nbytes for name, weight in weights.items()}
    parts, part_bytes = list[list[str]](), 0
    for name, size in sizes.items():
        if not parts or part_bytes + size > MAX_PART_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(name)
        part_bytes += size
    return parts


# ---------------------------------------------------------------- answers


def read_answer(answer: http.client.HTTPResponse, limit: int, deadline: float) -> bytes:
    """Return the body. Raise InvalidAnswerError if it exceeds `limit` bytes, TimeoutError after `deadline`."""
    body = bytearray()
    while part := answer.read1(2**16):
        body += part
        require(len(body) <= limit, f"more than {limit} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(body)


def _parse_json(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise InvalidAnswerError("no JSON") from None


def _parse_state(answer: bytes) -> dict[str, Any]:
    state, kinds = _parse_json(answer), {"model": str, "version": str, "longest": int, "block": int, "refusal": str}
    is_valid = isinstance(state, dict) and all(type(state.get(name)) is kind for name, kind in kinds.items())
    require(is_valid and bool(re.fullmatch("[0-9a-f]{0,64}", state["version"])), "no state")
    return state


def extract_error_message(answer: bytes) -> str:
    """Return the message of an error response as one line."""
    try:
        message = json.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = answer.decode(errors="replace")
    return escape_controls(format_one_line(message))


# ---------------------------------------------------------------- secrets


def get_secret(url: str = "") -> str:
    """Return the secret in the environment, or else the one that a server on this machine wrote to its file.

    Raise UserError if it cannot be sent in a header.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret and is_loopback(url):
        with suppress(OSError):
            secret = get_secret_path(urlsplit(url).port or 80).read_text(encoding="utf-8", errors="replace").strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise UserError(f"{SECRET_VARIABLE} must consist of printable ASCII characters without spaces")
    return secret


def get_secret_path(port: int) -> Path:
    """Return the file to which a server on this machine writes its secret, for runs of the same user."""
    return get_cache_folder() / "samplers" / f"{socket.gethostname()}-{port}.secret"


@contextmanager
def publish_secret(port: int) -> Iterator[str]:
    """Yield a new secret. Until the context ends, it is in a file that only this user can read.

    Raise UserError if the file cannot be written.
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


# ---------------------------------------------------------------- a pool of servers
# A thread per server makes requests while there are rows or weights to send. The unfinished rows of a lost server go to
# the others, and its later responses are dropped.
#
# A server that comes back gets the weights of the last push: those of the policy, or a copy on the disk if the policy
# is updated while rows are sampled (`ahead`), if it is sharded, or if there are several ranks. If only an adapter is
# pushed, the server also gets the base weights.
#
# With several ranks, the threads of rank 0 never end between two pushes: they watch the servers also when rank 0 has no
# rows, so that a server that comes back gets its weights while other ranks still sample.


RETRY_SECONDS = 2.0
"""How long to wait before a lost server is tried again, and between two looks at a server without rows."""
_MAX_RETRY_DOUBLINGS = 5
"""How many times this wait may double for a server that sends invalid responses."""
REMINDER_SECONDS = 30.0
"""The time between two reminders that no server responds."""
_HEARTBEAT_SECONDS = 5.0
"""How often rank 0 tells the others that it still pushes, since they wait for it only as long as runtime.timeout."""
_MAX_TEXT_TOKENS = 513
"""The maximum length of the check text: more than one block of the KV cache, for blocks of up to 512 tokens."""


class _PushOutcome(NamedTuple):
    """How a push ended, for all ranks."""

    version: str = ""
    max_length: int = 0
    up: tuple[int, ...] = ()
    """The servers that have the weights."""
    error: str = ""
    """Why the run must end; empty if the push succeeded."""
    is_refusal: bool = False
    """Whether the error is that a server does not support the adapter."""


@dataclass(eq=False)
class _ServerState:
    """A server and its rows."""

    client: ServerClient
    is_up: bool = False
    """Whether it has the current weights, and they passed the check."""
    reason: str = ""
    """Why it is or was down; empty once it works again."""
    invalid_answers: int = 0
    """The number of consecutive invalid responses. Only a finished row resets it, a push does not."""
    queued_rows: list[int] = field(default_factory=list)
    """Rows to send with the next request."""
    sent_rows: set[int] = field(default_factory=set)
    """Rows that were sent to it."""

    @property
    def pending_count(self) -> int:
        return len(self.queued_rows) + len(self.sent_rows)


class ServerPool:
    """Servers with the interface of a `VLLMEngine`, for `VLLMSampler`. `close` ends its threads."""

    is_open = True
    policy: Policy

    def __init__(
        self,
        urls: Iterable[str],
        timeout: float = 120.0,
        ahead: bool = False,
        make_client: Callable[[str, float], ServerClient] = SamplerClient,
    ) -> None:
        """Create a pool without contacting the servers.

        Args:
            urls: the addresses of the servers.
            timeout: seconds without a response after which a server counts as lost.
            ahead: whether the policy is updated while rows are sampled.
            make_client: makes the client of a server from its address and the timeout.
        """
        self.servers = [_ServerState(make_client(url, timeout)) for url in urls]
        self.ahead = ahead
        self.ranks: Ranks = SINGLE_RANK
        """The processes of the run. All of them call `sync` together."""
        self.version = ""
        """The version of the last push, the same on all servers and ranks."""
        self.adapter_shape: AdapterShape | None = None
        self.model_description = b""
        self.policy_lock = threading.Lock()
        """Held while a thread reads the policy."""
        self.pushed_weights: Mapping[str, Tensor] | None = None
        """The weights of the last push, if they are kept."""
        self.base_weights: WeightSpool | None = None
        """The base of an adapter that is pushed by itself, if it is kept; it never changes."""
        self.spool_error: UserError | None = None
        """Why weights could not be written to the disk."""
        self.text_ids: list[int] = []
        """The token ids of the check text."""
        self.text_logprobs = torch.empty(0)
        """The scorer's log-probs of the check text, with the weights of the last push."""
        self.requests: dict[int, tuple[Any, SampleRequest]] = {}
        """The unfinished rows by number, with their keys."""
        self.max_length = 0
        """The row length that all servers of the first sync support."""
        self.group_servers: dict[int, _ServerState] = {}
        """The server of each group, which has its prompt in the prefix cache."""
        self.answers: list[EngineAnswer] = []
        self.request_numbers = itertools.count()
        self.condition = threading.Condition()
        self.executor: ThreadPoolExecutor | None = None
        self.futures: list[Future[None]] = []
        self.stopped = threading.Event()
        self.last_reminder = -REMINDER_SECONDS
        """When the user was last reminded that no server responds."""

    @property
    def is_main(self) -> bool:
        """Whether this rank pushes the weights."""
        return self.ranks.rank == 0

    @property
    def watches_servers(self) -> bool:
        """Whether this rank pushes to servers that come back also when it has no rows."""
        return self.is_main and self.ranks.world_size > 1

    @property
    def unfinished(self) -> Collection[Any]:
        """The rows that `step` has not returned yet."""
        with self.condition:
            return [*self.requests, *self.answers]

    def add_request(
        self, key: tuple[int, int], ids: Sequence[int], max_tokens: int, temperature: float, seed: int
    ) -> None:
        """Queue a row for the server of its group. key: the indices of its prompt and its sample."""
        with self.condition:
            number = next(self.request_numbers)
            self.requests[number] = key, SampleRequest(number, list(ids), max_tokens, temperature, seed)
            self._assign_rows([number])
        self._start_threads()

    def step(self) -> list[EngineAnswer]:
        """Return the finished rows. Wait briefly if none has finished."""
        with self.condition:
            self.condition.wait_for(lambda: self.answers or any(thread.done() for thread in self.futures), POLL_SECONDS)
            for thread in self.futures:
                if thread.done():
                    thread.result()  # raises the error that ended the thread
            answers, self.answers = self.answers, []
        if not any(server.is_up for server in self.servers):
            self._remind()
        return answers

    def abort_all(self) -> None:
        """Cancel all unfinished rows. End all threads, except those of a rank that watches the servers."""
        if self.watches_servers and not self.unfinished:
            self.group_servers = {}
            return
        self._end_threads()
        for server in self.servers:
            if server.sent_rows:
                server.is_up = server.is_up and self._release_rows(server.client)
            server.queued_rows, server.sent_rows = [], set()
        self.requests, self.group_servers, self.answers = {}, {}, []

    def close(self) -> None:
        """End all threads, and delete the copies of the weights."""
        self._end_threads()
        for weights in (self.pushed_weights, self.base_weights):
            if isinstance(weights, WeightSpool):
                weights.close()
        self.pushed_weights = self.base_weights = None

    @staticmethod
    def _release_rows(client: ServerClient) -> bool:
        """Have a server drop the rows of this client, which it would decode to the end. Return whether it did."""
        client.start()
        try:
            client.release_rows(min(CONNECT_TIMEOUT_SECONDS, client.timeout))
        except ServerLostError:
            return False
        return True

    def _start_threads(self) -> None:
        if not self.executor:
            self.stopped.clear()
            self.executor = ThreadPoolExecutor(len(self.servers))
            for server in self.servers:
                server.client.start()
                self.futures.append(self.executor.submit(self._run_server, server))

    def _end_threads(self) -> BaseException | None:
        """End all threads. Return the error of one that has failed."""
        self.stopped.set()
        with self.condition:
            self.condition.notify_all()
        for server in self.servers:
            server.client.stop()
        if self.executor:
            self.executor.shutdown()
        errors = [thread.exception() for thread in self.futures]
        self.executor, self.futures = None, []
        return next(filter(None, errors), None)

    # ------------------------------------------------------------ weights

    def sync(self, policy: Policy, adapter_shape: AdapterShape | None) -> None:
        """Push and check weights on the servers with an engine, or on all if none has one. Wait until one is up.

        All ranks call this together: they gather the weights and score the check text together, and rank 0 pushes.
        """
        error = self._end_threads()
        if error and not isinstance(error, UserError):
            raise error
        self.policy, self.adapter_shape = policy, adapter_shape
        self.model_description = serialize_model(policy, adapter_shape)
        self.text_ids = encode_check_text(policy, min(_MAX_TEXT_TOKENS, policy.context_length - 1))
        self.text_logprobs = score_text(policy, self.text_ids)
        self._collect_weights()
        try:
            outcome = self._push_for_all(error or self.spool_error)
        finally:
            if not isinstance(self.pushed_weights, WeightSpool):
                self.pushed_weights = None
        if outcome.error:
            raise AdapterRefusedError(outcome.error) if outcome.is_refusal else UserError(outcome.error)
        if not self.is_main:
            self._follow(outcome)
        if self.watches_servers:
            self._start_threads()

    def _collect_weights(self) -> None:
        """Set the weights to push. Copies on the disk are written by rank 0, while all ranks gather them."""
        last, self.pushed_weights = self.pushed_weights, None  # free the old copy before the next is made
        if isinstance(last, WeightSpool):
            last.close()
        self.spool_error = None
        if not (self.ahead or self.ranks.world_size > 1 or self.policy.sharded_modules):
            self.pushed_weights = get_push_weights(self.policy, self.adapter_shape)
            return
        if self.adapter_shape and self.base_weights is None:
            self.base_weights = self._spool(gather_base_weights(self.policy))
        self.pushed_weights = self._spool(gather_push_weights(self.policy, self.adapter_shape))

    def _spool(self, weights: Iterable[tuple[str, Tensor]]) -> WeightSpool:
        """Write weights to the disk in rank 0; the others take part in gathering them, and keep nothing.

        If they cannot be written, the push ends with the error, which all ranks raise.
        """
        if not self.is_main:
            for _ in weights:
                pass
            return WeightSpool({})
        try:
            return spool_weights(weights)
        except UserError as error:
            self.spool_error = error
            return WeightSpool({})

    def _push_for_all(self, error: UserError | None) -> _PushOutcome:
        """Push in rank 0, or end the push with `error`. Return in all ranks how it ended."""
        self.stopped.clear()
        with ThreadPoolExecutor(1) as executor:
            push = executor.submit(self._push, error) if self.is_main else None
            try:
                outcome = None
                while outcome is None:
                    outcome = self.ranks.gather([self._wait_for_push(push) if push else None])[0]
            finally:
                if push and not push.done():  # interrupted, or another rank has ended
                    self._end_threads()
        return outcome

    def _wait_for_push(self, push: Future[None]) -> _PushOutcome | None:
        """Return how the push ended; None if it goes on."""
        if not wait([push], _HEARTBEAT_SECONDS).done:
            return None
        try:
            push.result()
        except UserError as error:
            return _PushOutcome(error=str(error), is_refusal=isinstance(error, AdapterRefusedError))
        up = tuple(i for i, server in enumerate(self.servers) if server.is_up)
        return _PushOutcome(self.version, self.max_length, up)

    def _push(self, error: UserError | None) -> None:
        if error:
            raise error
        self.version = secrets.token_hex(8)
        while not self.stopped.is_set() and not self._update_servers():
            self._remind()
            self.stopped.wait(RETRY_SECONDS)

    def _update_servers(self) -> bool:
        """Update the servers. Return whether at least one has the current weights."""
        tried = [server for server in self.servers if server.client.has_engine] or self.servers
        for server in tried:
            server.client.start()
        with ThreadPoolExecutor(len(tried)) as pool:
            list(pool.map(self._try_update, tried))
        up = [server.client for server in self.servers if server.is_up]
        self.max_length = self.max_length or min((client.max_length for client in up), default=0)
        return bool(up)

    def _try_update(self, server: _ServerState) -> None:
        try:
            self._update_server(server)
        except ServerLostError as error:
            if not self.stopped.is_set():
                self._mark_down(server, error)

    def _follow(self, outcome: _PushOutcome) -> None:
        """Sample with the weights that rank 0 has pushed."""
        self.version, self.max_length = outcome.version, outcome.max_length
        for i, server in enumerate(self.servers):
            server.is_up = i in outcome.up
            server.client.follow(self.model_description, self.version)
            if server.is_up and not server.invalid_answers:
                self._clear_faults(server)

    def _update_server(self, server: _ServerState) -> None:
        """Have a server use the current weights, and assign it the waiting rows. Only rank 0 pushes to it."""
        if self.is_main:
            self._push_to_server(server.client)
        else:
            server.client.return_to(self.version)
        with self.condition:
            server.is_up = True
            assigned = {number for other in self.servers for number in (*other.queued_rows, *other.sent_rows)}
            self._assign_rows([number for number in self.requests if number not in assigned])
        if not server.invalid_answers:
            self._clear_faults(server)

    def _push_to_server(self, client: ServerClient) -> None:
        """Push the current weights to a server, unless it has them, and check that it uses them."""
        last_version = client.version
        client.load_model(self.model_description)
        if client.max_length < self.max_length:
            raise _ServerTooSmallError(
                f"it supports rows of {client.max_length} tokens, but this run needs {self.max_length}: start it with a"
                " larger --cache-gb"
            )
        if client.version == self.version:  # it was only slow
            client.release_rows()
            return
        if not last_version or client.version != last_version:  # a new process, or weights of another run
            client.weight_check = WeightCheck()
        weights = self._get_weights(with_base=not client.weight_check.column_sums)
        ids = self.text_ids[: get_text_length(client.max_length, client.block_size)]
        if client.version:
            client.score_tokens(ids)  # fills the prefix cache: the check fails unless the push clears it
        client.push(weights, self.policy.device)
        client.weight_check.check(client, weights, ids, self.text_logprobs[: len(ids) - 1], self.policy.dtype)
        client.is_verified = True
        client.rename_version(self.version)

    def _get_weights(self, with_base: bool) -> Mapping[str, Tensor]:
        """Return the weights of the last push. with_base: with the base of an adapter that is pushed by itself."""
        with_base = with_base and self.adapter_shape is not None
        if isinstance(self.pushed_weights, WeightSpool):
            return self.base_weights | self.pushed_weights if with_base and self.base_weights else self.pushed_weights
        with self.policy_lock:
            weights = dict(self.pushed_weights or get_push_weights(self.policy, self.adapter_shape))
            return get_base_weights(self.policy) | weights if with_base else weights

    # ------------------------------------------------------------ assignment of rows

    def _assign_rows(self, numbers: Iterable[int]) -> None:
        """Assign rows to the server of their group, and a new group to the server with the fewest rows.

        Each rank begins with another server, so that few groups per rank do not all go to the same one.
        """
        first = self.ranks.rank % len(self.servers)
        up = [server for server in (*self.servers[first:], *self.servers[:first]) if server.is_up]
        for number in numbers if up else ():
            group, _ = self.requests[number][0]
            home = self.group_servers.get(group)
            if home is None or not home.is_up:
                home = self.group_servers[group] = min(up, key=lambda server: server.pending_count)
            home.queued_rows.append(number)
        self.condition.notify_all()

    def _clear_faults(self, server: _ServerState) -> None:
        if server.reason:
            self._print(f"{server.client.url} is back with the current weights")
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
        is_setting = isinstance(error, _ServerTooSmallError | AdapterRefusedError)
        if not server.reason or (is_setting and server.reason != reason):
            others = "go to the others" if any(other.is_up for other in self.servers) else "wait"
            lost = f": its {len(rows)} rows {others}" if rows else ""
            self._print(f"{server.client.url}: {reason}{lost}")
        server.reason = reason

    def _remind(self) -> None:
        if time.monotonic() - self.last_reminder > REMINDER_SECONDS:
            why = "; ".join(f"{server.client.url}: {server.reason or 'no response yet'}" for server in self.servers)
            start = self.servers[0].client.start_command.format("PORT")
            waiting = f"{len(self.requests)} rows wait" if self.requests else "the weights wait"
            self._print(f"no sampler server answers, {waiting} ({why}): {start} starts one")
            self.last_reminder = time.monotonic()

    def _print(self, note: str) -> None:
        """Print a line, with the rank unless it is 0."""
        rank = f"rank {self.ranks.rank}: " if self.ranks.rank else ""
        print(escape_controls(f"! {rank}{note}"), flush=True)

    # ------------------------------------------------------------ a thread for each server

    def _is_over(self) -> bool:
        """Whether threads must end. Without the main thread, a thread that watches a server would never end."""
        return self.stopped.is_set() or not threading.main_thread().is_alive()

    def _run_server(self, server: _ServerState) -> None:
        while not self._is_over():
            try:
                if not server.is_up:
                    self._update_server(server)
                while not self._is_over():
                    self._exchange_rows(server)
            except (ServerLostError, AdapterRefusedError) as error:
                if not self.stopped.is_set():
                    self._mark_down(server, error)
                    self.stopped.wait(RETRY_SECONDS * 2 ** min(server.invalid_answers, _MAX_RETRY_DOUBLINGS))

    def _exchange_rows(self, server: _ServerState) -> None:
        """Send a server its queued rows, and collect the rows that it has finished."""
        with self.condition:
            patience = RETRY_SECONDS if self.watches_servers else None
            self.condition.wait_for(lambda: server.pending_count or self.stopped.is_set(), patience)
            numbers, server.queued_rows = server.queued_rows, []
            server.sent_rows.update(numbers)
            rows = [self.requests[number][1] for number in numbers]
        if self.stopped.is_set():
            return
        if not server.sent_rows:  # other ranks may have rows on it
            server.client.check_version()
            return
        answers = server.client.step(rows)
        if answers and server.invalid_answers:
            self._clear_faults(server)
        with self.condition:
            for answer in answers:
                if answer.key in server.sent_rows:
                    server.sent_rows.remove(answer.key)
                    key, _ = self.requests.pop(answer.key)
                    self.answers.append(answer._replace(key=key))
            self.condition.notify_all()
