"""The HTTP application of a sampler server, `pellucid sampler`: one vLLM engine to which trainers push weights.

A trainer describes its model, pushes weights with a version that it chooses, and reads some back to check them. Then it
polls: each request may add rows and receives the rows that have finished since the last. Requests for another version
than the current one are rejected, and every response names the version that it was computed with.

A trainer may consist of several clients. Each gets only its own rows, by the id in its requests.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import safetensors.torch
import torch
from fastapi import Body, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp
from torch import Tensor

from pellucid.rollout.vllm import AdapterRefusedError, AdapterShape, VLLMEngine, check_vllm_installed
from pellucid.rollout.vllm_client import (
    POLL_SECONDS,
    SECRET_VARIABLE,
    VERSION_HEADER,
    SampleRequest,
    get_secret,
    get_secret_path,
    hash_model,
    publish_secret,
)
from pellucid.serve import middleware
from pellucid.serve.daemon import make_url
from pellucid.serve.middleware import (
    ERROR_HANDLERS,
    LOOPBACK_HOSTS,
    GuardMiddleware,
    RequestError,
    format_validation_errors,
    is_loopback,
    make_access_check,
)
from pellucid.serve.transfer_routes import add_transfer_routes
from pellucid.utils import hardware

_CLOSE_TIMEOUT_SECONDS = 10.0
"""Seconds that `close` waits for the engine to finish its work."""


class ModelDescription(BaseModel):
    """A model without its weights."""

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16", "float16"]
    ends: list[int]
    adapter: AdapterShape | None = None
    """The shape of an adapter that is pushed by itself."""


_VersionHeader = Annotated[str, Header(alias=VERSION_HEADER)]


@dataclass
class _WeightlessPolicy:
    """A policy without its weights, from which an engine is created."""

    config: Mapping[str, Any]
    device: torch.device
    eos_ids: Sequence[int]

    def save_config(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.config))


class _PendingWeights(NamedTuple):
    """The parts of pushed weights that have arrived so far."""

    version: str
    parts: list[bytes]
    base_version: str = ""
    """The version of the base weights under a pushed adapter; empty if all weights are pushed."""


class EngineHost:
    """One engine and the thread that uses it. Requests of other threads are handled between its steps."""

    def __init__(self, make_engine: Callable[[ModelDescription], Any]) -> None:
        self.make_engine = make_engine
        self.executor = ThreadPoolExecutor(1, "engine")
        self.engine: Any = None
        self.model_digest = self.version = ""
        self.pending = _PendingWeights("", [])
        self.finished_rows: dict[str, list[Any]] = {}
        """The finished rows that have not been sent yet, by client."""
        self.row_tokens: dict[tuple[str, int], int] = {}
        """The tokens that each unfinished row may need, by client and number."""
        self.released_clients: set[str] = set()
        """The ids under which no more rows are accepted with the present weights."""
        self.steps = 0
        self.step_future: Future[None] | None = None
        self.rows_arrived = threading.Condition()

    def describe_state(self) -> dict[str, Any]:
        longest, block = (engine.max_length, engine.block_size) if (engine := self.engine) else (0, 0)
        return {"model": self.model_digest, "version": self.version, "longest": longest, "block": block, "refusal": ""}

    def load_model(self, body: bytes) -> dict[str, Any]:
        """Create an engine without weights for the ModelDescription in `body`, unless it exists.

        Returns:
            The state, with a reason in `refusal` if vLLM cannot load the adapter without merging it.

        Raises:
            RequestError: The description is malformed.
            UserError: vLLM cannot run the model.
        """
        try:
            model = ModelDescription.model_validate_json(body)
            return self.executor.submit(self._load_engine, model, hash_model(body)).result()
        except AdapterRefusedError as error:
            return {**self.describe_state(), "refusal": str(error)}
        except ValidationError as error:
            raise RequestError(422, format_validation_errors(error.errors())) from error

    def receive_weights(
        self, version: str, part_index: int, part_count: int, part: bytes, base_version: str = ""
    ) -> None:
        """Store a part of the weights of a version, in safetensors format. After the last part, the engine loads them.

        `base_version` is the version of the base weights, if the pushed weights are an adapter.

        Raises:
            RequestError: Another trainer has pushed weights in between, or there is no engine.
        """
        if part_index == 0:
            self.pending = _PendingWeights(version, [], base_version)
        pending = self.pending
        if pending.version != version or len(pending.parts) != part_index or not self.engine:
            raise RequestError(409, "other weights arrived in between")
        pending.parts.append(part)
        if part_index + 1 == part_count:
            self.pending = _PendingWeights("", [])
            self.executor.submit(self._push_weights, pending).result()

    def run_at_version(self, version: str, work: Callable[[], Any]) -> Any:
        """Run work in the engine's thread and return its result. Raises RequestError for another weights version."""
        return self.executor.submit(self._run_at_version, version, work).result()

    def rename_version(self, version: str, name: str) -> None:
        """Give the current weights another version. Raises RequestError if they do not have the first one."""
        self.run_at_version(version, lambda: self._rename_version(name))

    def sample_rows(self, version: str, client: str, rows: Sequence[SampleRequest]) -> dict[str, Any]:
        """Add rows, wait briefly, and return all rows of this client that have finished since the last call."""
        self.run_at_version(version, lambda: self._submit_rows(client, rows))
        with self.rows_arrived:
            self.rows_arrived.wait_for(lambda: client in self.finished_rows, POLL_SECONDS)
        return self.run_at_version(version, lambda: self._take_rows(client))

    def release_rows(self, client: str) -> None:
        """Drop the rows of a client, and reject those that it may still send under this id."""
        self.executor.submit(self._release_rows, client).result()

    def close(self) -> None:
        """Close the engine. Raises TimeoutError if it does not finish its work in time."""
        self.executor.submit(lambda: self.engine and self.engine.close()).result(_CLOSE_TIMEOUT_SECONDS)
        self.executor.shutdown()

    # ------------------------------------------------------------ in the thread of the engine

    def _load_engine(self, model: ModelDescription, digest: str) -> dict[str, Any]:
        if self.model_digest != digest:  # an earlier request in the queue may have created it
            self._reset()
            if self.engine:
                self.engine.close()
            self.model_digest, self.engine = "", None
            self.engine = self.make_engine(model)
            self.model_digest = digest
        return self.describe_state()

    def _push_weights(self, pending: _PendingWeights) -> None:
        if pending.base_version:
            self._check_version(pending.base_version)
        weights: dict[str, Tensor] = {}
        while pending.parts:
            weights |= safetensors.torch.load(pending.parts.pop(0))
        self.replace_weights(pending.version, lambda: self.engine.push(weights))

    def replace_weights(self, version: str, load: Callable[[], None]) -> None:
        """Drop all rows, and load the weights of a version into the engine."""
        self._reset()
        self._guard_engine(load)
        self.version = version

    def _reset(self) -> None:
        self.version = ""
        self.released_clients.clear()
        if self.engine:
            self._drop_all_rows()
        if self.step_future and self.step_future.done():
            self.step_future = None

    def _run_at_version(self, version: str, work: Callable[[], Any]) -> Any:
        self._check_version(version)
        return self._guard_engine(work)

    def _rename_version(self, name: str) -> None:
        self.version = name

    def _check_version(self, version: str) -> None:
        if not version or version != self.version:
            raise RequestError(409, "the server has other weights now")

    def _guard_engine(self, work: Callable[[], Any]) -> Any:
        """Run work with the engine. If it fails, the engine counts as broken: the next `load_model` replaces it."""
        try:
            return work()
        except BaseException:
            self.model_digest = ""
            raise

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """Score a text. The engine's rows are dropped first, since their results would mix with it."""
        self._drop_all_rows()
        return self.engine.score_tokens(ids)

    def _drop_all_rows(self) -> None:
        self.engine.abort_all()
        self.finished_rows.clear()
        self.row_tokens.clear()

    def _release_rows(self, client: str) -> None:
        self.released_clients.add(client)
        self.finished_rows.pop(client, None)
        if keys := [key for key in self.row_tokens if key[0] == client]:
            self._guard_engine(lambda: self.engine.abort(keys))
            for key in keys:
                del self.row_tokens[key]

    def _submit_rows(self, client: str, rows: Sequence[SampleRequest]) -> None:
        if client in self.released_clients:
            raise RequestError(409, "this client has released its rows")
        for row in rows:
            key = client, row.number
            self.row_tokens[key] = len(row.ids) + row.max_tokens
            self.engine.add_request(key, row.ids, row.max_tokens, row.temperature, row.seed)
        if rows and not self.step_future:
            self.step_future = self.executor.submit(self._run_step)

    def _run_step(self) -> None:
        finished = self._guard_engine(self.engine.step) if self.engine and self.engine.unfinished else []
        self.steps += 1
        with self.rows_arrived:
            for answer in finished:
                client, number = answer.key
                self.finished_rows.setdefault(client, []).append(answer._replace(key=number))
                self.row_tokens.pop(answer.key)
            self.rows_arrived.notify_all()
        self.step_future = self.executor.submit(self._run_step) if self.engine and self.engine.unfinished else None

    def _take_rows(self, client: str) -> dict[str, Any]:
        if self.step_future and self.step_future.done():
            self.step_future.result()  # raises the error that ended the steps
        finished = self.finished_rows.pop(client, [])
        others = sum(tokens for (owner, _), tokens in self.row_tokens.items() if owner != client)
        return {"steps": self.steps, "others": others, "said": [tuple(row) for row in finished]}


def make_sampler_app(host: EngineHost, hosts: Sequence[str], secret: str) -> ASGIApp:
    app = FastAPI(title="pellucid sampler", docs_url=None, redoc_url=None, exception_handlers=ERROR_HANDLERS)

    @app.get("/state")
    async def state() -> dict[str, Any]:
        return host.describe_state()

    @app.put("/model")
    async def model(request: Request) -> dict[str, Any]:
        return await run_in_threadpool(host.load_model, await request.body())

    @app.put("/weights/{version}/{i}/{of}")
    async def weights(version: str, i: int, of: int, request: Request, onto: str = "") -> dict[str, Any]:
        await run_in_threadpool(host.receive_weights, version, i, of, await request.body(), onto)
        return {}

    @app.put("/versions/{version}/{name}")
    def rename(version: str, name: str) -> dict[str, Any]:
        host.rename_version(version, name)
        return {}

    @app.post("/read")
    def read(version: _VersionHeader, ids: Annotated[list[int], Body(embed=True)]) -> Response:
        logprobs, cached = host.run_at_version(version, lambda: host.score_tokens(ids))
        return _make_tensor_response(host.version, {"logprobs": logprobs, "cached": torch.tensor(cached)})

    @app.post("/columns")
    def read_columns(
        version: _VersionHeader, name: Annotated[str, Body()], at: Annotated[list[int], Body()]
    ) -> Response:
        columns = host.run_at_version(version, lambda: host.engine.read_columns(name, at))
        return _make_tensor_response(host.version, {str(i): column for i, column in enumerate(columns)})

    @app.post("/release")
    def release(client: str) -> dict[str, Any]:
        host.release_rows(client)
        return {}

    @app.post("/step")
    def step(version: _VersionHeader, client: str, rows: Annotated[list[SampleRequest], Body()]) -> Response:
        answers = host.sample_rows(version, client, rows)
        return JSONResponse(answers, headers={VERSION_HEADER: host.version})

    add_transfer_routes(app, host)
    return GuardMiddleware(app, make_access_check(hosts, secret))


def _make_tensor_response(version: str, tensors: Mapping[str, Tensor]) -> Response:
    body = safetensors.torch.save({name: x.detach().cpu().contiguous() for name, x in tensors.items()})
    return Response(body, media_type="application/octet-stream", headers={VERSION_HEADER: version})


def run_sampler_server(listening: socket.socket, rows: int, cache_gb: float, device: str, hosts: Sequence[str]) -> None:
    """Sample up to `rows` completions at once, until Ctrl-C. `hosts` are names by which clients reach this machine.

    Raises:
        UserError: vLLM is not installed.
    """
    check_vllm_installed()
    torch_device = hardware.pick_device(device)

    def make_engine(model: ModelDescription) -> VLLMEngine:
        policy = _WeightlessPolicy(model.config, torch_device, model.ends)
        return VLLMEngine(policy, getattr(torch, model.dtype), rows, cache_gb, model.adapter, receives=True)

    address, port = listening.getsockname()[:2]
    with _announce_secret(address, port) as secret:
        host = EngineHost(make_engine)
        print(f"sampler on {make_url(address, port)}, Ctrl-C ends it", flush=True)
        try:
            middleware.make_server(make_sampler_app(host, (*LOOPBACK_HOSTS, *hosts), secret)).run(sockets=[listening])
        finally:
            try:
                host.close()
            except TimeoutError:
                os._exit(1)  # Python would wait for the thread of the engine


@contextmanager
def _announce_secret(address: str, port: int) -> Iterator[str]:
    """Yield the secret that clients need, and print its location; it is empty if the server is open to everyone."""
    if secret := get_secret():
        yield secret
    elif is_loopback(address):
        with publish_secret(port) as secret:
            where = (
                f"its secret is in {get_secret_path(port)}: your own runs on this machine read it there; others need it"
            )
            print(f"{where} in {SECRET_VARIABLE}", flush=True)
            yield secret
    else:
        warning = f"! {address}:{port} is open to everyone who can reach it: set {SECRET_VARIABLE}"
        print(warning, file=sys.stderr, flush=True)
        yield ""
