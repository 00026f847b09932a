"""The client of SGLang servers, with the interface of `SamplerClient`.

SGLang offers no way to read a weight back that works for all models. Therefore every push first overwrites all weights
of the server with random numbers, by SGLang's weights checker, and then sends all weights. A weight that the push left
out is random afterwards: its checksum has not changed, and the log-probs of the check text are far off the scorer's.
The weight version of the server names an unfinished push until the push is complete, so that no trainer trusts it.

Weights go as pickles in base64 in HTTP requests, so servers need not share a machine or a file system with the trainer.
The format is that of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import http.client
import json
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from pellucid.rollout.server_errors import InvalidAnswerError, ServerLostError
from pellucid.rollout.vllm import EngineAnswer
from pellucid.rollout.vllm_client import (
    CONNECT_TIMEOUT_SECONDS,
    POLL_SECONDS,
    SECRET_VARIABLE,
    SamplerClient,
    SampleRequest,
    ServerClient,
    check_row,
    extract_error_message,
    get_secret,
    read_answer,
    require,
    split_weights,
)
from pellucid.rollout.weight_check import WeightCheck
from pellucid.types import UserError
from pellucid.utils.text import escape_controls, print_notes

_CPU = torch.device("cpu")
_CONCURRENT_ROWS = 256
"""How many rows are requested from a server at once."""
_MIN_BLOCK_TOKENS = 64
"""The check text has more than two blocks of at least this length; SGLang's own blocks may have one token."""
_MAX_ANSWER_BYTES, _MAX_TOKEN_BYTES = 2**24, 128
"""The maximum bytes of a response without its tokens, and of one token in JSON."""
_FLUSH_SECONDS = 10.0
"""How long SGLang may wait for aborted requests before it clears its prefix cache."""
_UNFINISHED = "-unfinished"
"""The suffix of the weight version during a push."""


class SGLangClient:
    """HTTP client of one SGLang server. Requests raise ServerLostError if the server is lost."""

    start_command = "python -m sglang.launch_server --model-path MODEL --dtype DTYPE --port {}"

    def __init__(self, url: str, timeout: float) -> None:
        """timeout: seconds without progress after which the server counts as lost."""
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version = ""
        self.max_length = self.block_size = 0
        self.has_engine = self.is_verified = False
        self.weight_check = WeightCheck()
        self.vocabulary_size, self.eos_ids = 0, frozenset[int]()
        self._ranks = 1
        self._stopped = threading.Event()
        self._connections: set[http.client.HTTPConnection] = set()
        self._executor: ThreadPoolExecutor | None = None
        self._futures: set[Future[EngineAnswer]] = set()
        self._last_progress = 0.0
        self._is_noted = False

    def get_state(self) -> dict[str, Any]:
        """Return the settings of the server."""
        info = self._request("GET", "/server_info")
        is_sglang = {"tp_size": int, "dp_size": int, "page_size": int, "max_req_input_len": int}
        require(all(type(info.get(name)) is kind for name, kind in is_sglang.items()), "no settings of SGLang")
        return info

    def load_model(self, model: bytes) -> None:
        """Check that the server runs a model described by `serialize_model`, in the dtype of the weights.

        Raises:
            UserError: It runs another model, or it was started with settings that are not supported.
        """
        info, served, description = self.get_state(), self._request("GET", "/model_info"), json.loads(model)
        asked, present = description["config"].get("architectures"), served.get("architectures")
        if asked and present and asked != present:
            raise UserError(f"sampler.urls: {self.url} runs a {present[0]}, not a {asked[0]}: start it with the model")
        dtype = description["dtype"]
        if info.get("dtype") not in (dtype, "half" if dtype == "float16" else dtype):
            raise UserError(f"sampler.urls: {self.url} computes in {info.get('dtype')}: start it with --dtype {dtype}")
        if info["dp_size"] != 1:
            raise UserError(f"sampler.urls: {self.url} has --dp-size {info['dp_size']}: start one server a replica")
        version = served.get("weight_version")
        require(isinstance(version, str), "no weight version")
        self._describe_tokens(model)
        self.max_length, self.block_size = info["max_req_input_len"], max(info["page_size"], _MIN_BLOCK_TOKENS)
        self._ranks, self.version, self.has_engine = info["tp_size"], str(version), True
        if not info.get("enable_deterministic_inference") and not self._is_noted:
            print_notes(
                f"{self.url}: without --enable-deterministic-inference SGLang ignores seeds, and a resumed run samples"
                " other tokens"
            )
        self._is_noted = True

    def _describe_tokens(self, model: bytes) -> None:
        description = json.loads(model)
        self.vocabulary_size, self.eos_ids = description["vocabulary"], frozenset(description["ends"])

    def push(self, weights: Mapping[str, Tensor], device: torch.device = _CPU) -> None:  # noqa: ARG002 - a ServerClient has it
        """Push all weights. The server aborts all of its requests.

        Raises:
            UserError: It has kept other weights in a tensor.
        """
        version = secrets.token_hex(8)
        self._drop_rows()
        self._request("POST", "/update_weight_version", self._make_version(version + _UNFINISHED))
        with suppress(ServerLostError):  # it refuses, unless an earlier push was interrupted
            self._request("POST", "/end_weight_update", {})
        self._request("POST", "/weights_checker", {"action": "reset_tensors"})
        random = self._fetch_checksums()
        self._request("POST", "/begin_weight_update", {})
        for names in split_weights(weights):
            copies = [(name, weights[name].detach().cpu().contiguous().clone()) for name in names]
            payload = base64.b64encode(pickle.dumps(copies)).decode()
            body = {"serialized_named_tensors": [payload] * self._ranks, "flush_cache": False}
            self._request("POST", "/update_weights_from_tensor", body)
        self._request("POST", "/end_weight_update", {})
        self._request("POST", f"/flush_cache?timeout={_FLUSH_SECONDS:g}", {}, is_json=False)
        for before, after in zip(random, self._fetch_checksums(), strict=True):
            for name in before.items() & after.items():
                raise UserError(
                    f"sampler.urls: {self.url} has a tensor {escape_controls(name[0])} that the pushed weights do not"
                    ' fill: SGLang cannot be used for this model; set sampler.name = "native"'
                )
        if self._request("GET", "/model_info").get("weight_version") != version + _UNFINISHED:
            raise ServerLostError("another run has pushed weights in between: give each run servers of its own")
        self._request("POST", "/update_weight_version", self._make_version(version))
        self.version = version
        self._check_temperature()

    def rename_version(self, version: str) -> None:
        """Give the server's weights, which this client has pushed and checked, the version that other clients use."""
        self.check_version()
        self._request("POST", "/update_weight_version", self._make_version(version))
        self.version = version

    def follow(self, model: bytes, version: str) -> None:
        """Use weights that another client has pushed to the server, without contacting it."""
        self._describe_tokens(model)
        self.version = version
        self._drop_rows()

    def return_to(self, version: str) -> None:
        """Use the server again if it has these weights. Raise ServerLostError if it does not."""
        self.version = version
        self.check_version()
        self._drop_rows()

    def check_version(self) -> None:
        """Raise ServerLostError if the server has other weights than this client."""
        if self._request("GET", "/model_info").get("weight_version") != self.version:
            raise ServerLostError("it has other weights now")

    def release_rows(self, timeout: float = 0) -> None:  # noqa: ARG002 - a ServerClient has it
        """Drop this client's rows: SGLang notices that their connections are closed."""
        self._drop_rows()

    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:  # noqa: ARG002 - a ServerClient has it
        """Return nothing: `push` has shown that the server has no weight but those of this push."""
        return []

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """Return the log-probs of ids[1:] at temperature 1, and how many tokens of the text were in the prefix cache.

        These are two requests, since SGLang does not use its cache for a text whose log-probs it returns.
        """
        request = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        cached = self._generate(request).get("cached_tokens")
        if type(cached) is not int:
            raise InvalidAnswerError("no number of cached tokens")
        scored = self._generate(request | {"return_logprob": True, "logprob_start_len": 0})
        tokens, logprobs = _split_logprobs(scored.get("input_token_logprobs"))
        require(tokens[-len(ids) + 1 :] == list(ids[1:]), "no log-probs of the given text")
        return torch.tensor(logprobs[-len(ids) + 1 :]), cached

    def step(self, rows: Sequence[SampleRequest]) -> list[EngineAnswer]:
        """Add rows and return the finished ones, with their numbers. Wait briefly if none has finished."""
        self._executor = self._executor or ThreadPoolExecutor(_CONCURRENT_ROWS)
        if rows:
            self._last_progress = time.monotonic()
        self._futures |= {self._executor.submit(self._sample_row, row) for row in rows}
        done, self._futures = wait(self._futures, POLL_SECONDS, FIRST_COMPLETED)
        if done:
            self._last_progress = time.monotonic()
        elif self._futures and time.monotonic() - self._last_progress > self.timeout:
            try:  # a row may take longer than a server may be silent
                self._request("GET", "/health_generate", is_json=False)
            except ServerLostError:
                self._drop_rows()
                raise
            self._last_progress = time.monotonic()
        return [future.result() for future in done]

    def start(self) -> None:
        """Allow requests."""
        self._stopped.clear()

    def stop(self) -> None:
        """Abort all requests that threads wait for, and reject requests until `start`."""
        self._stopped.set()
        self._drop_rows()

    # ------------------------------------------------------------ rows

    def _drop_rows(self) -> None:
        """Abort the requests of unfinished rows, which SGLang notices."""
        for future in self._futures:
            future.cancel()
        self._futures = set()
        for connection in list(self._connections):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _sample_row(self, row: SampleRequest) -> EngineAnswer:
        sampling = {
            "max_new_tokens": row.max_tokens,
            "temperature": row.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": sorted(self.eos_ids),
            "sampling_seed": row.seed,
        }
        request = {"input_ids": list(row.ids), "sampling_params": sampling, "return_logprob": True}
        answer = self._generate(request, self._get_deadline_seconds(row), row.max_tokens)
        tokens, logprobs = _split_logprobs(answer.get("output_token_logprobs"))
        check_row(tokens, logprobs, row.max_tokens, self.vocabulary_size, self.eos_ids)
        return EngineAnswer(row.number, tokens, logprobs)

    def _get_deadline_seconds(self, row: SampleRequest) -> float:
        """Return how long to wait for a row. `step` notices earlier if the server hangs."""
        return self.timeout * (1 + row.max_tokens)

    def _generate(self, request: Mapping[str, Any], timeout: float = 0, max_tokens: int = 1) -> dict[str, Any]:
        """Return what the server says about a completion. Reject those of other weights."""
        limit = _MAX_ANSWER_BYTES + _MAX_TOKEN_BYTES * max_tokens
        answer = self._request("POST", "/generate", {**request, "stream": False}, timeout=timeout, limit=limit)
        about = answer.get("meta_info")
        if not isinstance(about, dict):
            raise InvalidAnswerError("no completion")
        spans = about.get("weight_versions", [])
        versions = {about.get("weight_version"), *(span.get("version") for span in spans)}
        if versions != {self.version}:
            raise ServerLostError("its response was computed with other weights")
        return about

    def _check_temperature(self) -> None:
        """Raise UserError if the log-probs are not those of the distribution that is sampled from.

        The difference of the log-probs of two tokens is halved at temperature 2.
        """
        pair, differences = [0, self.vocabulary_size - 1], list[float]()
        for temperature in (1.0, 2.0):
            sampling = {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
            request = {"input_ids": pair, "sampling_params": sampling, "return_logprob": True}
            answer = self._generate(request | {"token_ids_logprob": pair})
            found = answer.get("output_token_ids_logprobs")
            tokens, logprobs = _split_logprobs(found[0] if isinstance(found, list) and found else None)
            require(sorted(tokens) == sorted(pair), "no log-probs of two given tokens")
            of = dict(zip(tokens, logprobs, strict=True))
            differences.append(of[pair[0]] - of[pair[1]])
        at_one, at_two = differences
        if abs(at_two - at_one) < abs(at_two - at_one / 2):
            raise UserError(
                f"sampler.urls: {self.url} returns log-probs of another temperature than it samples at: start it"
                " without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    # ------------------------------------------------------------ requests

    def _make_version(self, version: str) -> dict[str, Any]:
        return {"new_version": version, "abort_all_requests": True}

    def _fetch_checksums(self) -> list[dict[str, str]]:
        """Return the checksum of each tensor by its name, for each of the server's GPUs."""
        ranks = self._request("POST", "/weights_checker", {"action": "checksum"}).get("ranks")
        require(isinstance(ranks, list) and all(isinstance(rank, dict) for rank in ranks), "no checksums")
        return [rank.get("checksums", {}) for rank in ranks or []]

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 0,
        limit: int = _MAX_ANSWER_BYTES,
        is_json: bool = True,
    ) -> dict[str, Any]:
        """Return the JSON object of a response; an empty one if the response is no JSON."""
        timeout = timeout or self.timeout
        try:
            status, answer = self._send(method, path, body, timeout, limit)
        except TimeoutError:
            raise ServerLostError(f"no answer in {timeout:g} s") from None
        except OSError as error:
            raise ServerLostError(error.strerror or type(error).__name__) from None
        except http.client.HTTPException as error:
            raise ServerLostError(f"its response is incomplete ({type(error).__name__})") from None
        if status in (401, 403) and not self.is_verified:
            message = f"sampler.urls: {self.url} rejects the request: set {SECRET_VARIABLE} to its --api-key"
            raise UserError(message)
        if status != 200:
            raise ServerLostError(f"HTTP {status} for {path}, {extract_error_message(answer)}")
        if not is_json:
            return {}
        with suppress(ValueError, RecursionError):
            parsed = json.loads(answer)
            if isinstance(parsed, dict):
                return parsed
        raise InvalidAnswerError("no JSON object")

    def _send(self, method: str, path: str, body: Any, timeout: float, limit: int) -> tuple[int, bytes]:
        url, secret = urlsplit(self.url), get_secret(self.url)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        content = b"" if body is None else json.dumps(body).encode()
        headers |= {"Content-Type": "application/json"} if content else {}
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=min(CONNECT_TIMEOUT_SECONDS, timeout))
        self._connections.add(connection)
        try:
            if not self._stopped.is_set():
                connection.connect()
            if self._stopped.is_set():  # from here on `stop` finds the socket
                raise ServerLostError("the request was stopped")
            connection.sock.settimeout(timeout)
            connection.request(method, url.path + path, content, headers)
            with connection.getresponse() as answer:
                return answer.status, read_answer(answer, limit, time.monotonic() + timeout)
        finally:
            self._connections.discard(connection)
            connection.close()


def _split_logprobs(found: Any) -> tuple[list[int], list[float]]:
    """Return tokens and log-probs of SGLang's list of [log-prob, token, text]. The first token may have no log-prob."""
    is_list = isinstance(found, list) and all(isinstance(entry, list) and len(entry) >= 2 for entry in found)
    require(is_list, "no list of log-probs")
    entries = [entry for entry in found if entry[0] is not None]
    are_numbers = all(type(entry[0]) in (int, float) and type(entry[1]) is int for entry in entries)
    require(are_numbers, "log-probs that are not numbers")
    return [entry[1] for entry in entries], [float(entry[0]) for entry in entries]


SERVER_CLIENTS: dict[str, Callable[[str, float], ServerClient]] = {"vllm": SamplerClient, "sglang": SGLangClient}
"""The clients of servers by sampler.name."""
