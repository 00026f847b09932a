"""The HTTP application of a sampler server: one engine, the weights that trainers push to it, and its rows.

A trainer describes its model, pushes weights by a version of its own making, and reads them back; then it asks for
rows, again and again, and each time takes what was sampled meanwhile. A push of others' weights, or a request for other
weights than those that are here, is refused: every answer says with which it was computed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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
    LOOPBACK_HOSTS,
    AccessMiddleware,
    RequestError,
    ShutdownMiddleware,
    install_error_handlers,
    is_loopback,
)
from pellucid.types import UserError
from pellucid.utils import hardware

CLOSE_TIMEOUT_SECONDS = 10.0
"""Seconds that the engine has to end with what it does."""


class ModelDescription(BaseModel):
    """A model without its weights."""

    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16", "float16"]
    ends: list[int]
    adapter: AdapterShape | None = None
    """Of an adapter that is pushed by itself."""


VersionHeader = Annotated[str, Header(alias=VERSION_HEADER)]


@dataclass
class WeightlessPolicy:
    """What an engine is made for: a policy without its weights."""

    config: Mapping[str, Any]
    device: torch.device
    eos_ids: Sequence[int]

    def save_config(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.config))


class PendingWeights(NamedTuple):
    """Weights of which the rest is still to come."""

    version: str
    parts: list[bytes]
    base_version: str = ""
    """The version of the weights that an adapter is pushed to alone; empty where all weights come."""


class EngineHost:
    """One engine, which one thread works with: what is asked of it in others waits for its turn between two steps."""

    def __init__(self, make_engine: Callable[[ModelDescription], Any]) -> None:
        self.make_engine = make_engine
        self.executor = ThreadPoolExecutor(1, "engine")
        self.engine: Any = None
        self.model_digest = self.version = ""
        self.pending = PendingWeights("", [])
        self.finished_rows: list[Any] = []
        self.steps = 0
        self.step_future: Future[None] | None = None
        self.rows_arrived = threading.Condition()

    def describe_state(self) -> dict[str, Any]:
        longest, block = (engine.max_length, engine.block_size) if (engine := self.engine) else (0, 0)
        return {"model": self.model_digest, "version": self.version, "longest": longest, "block": block, "refusal": ""}

    def load_model(self, body: bytes) -> dict[str, Any]:
        """Make an engine for this model, where there is none; it has no weights yet. Where none with its adapter can be
        made, say why.
        """
        try:
            model = ModelDescription.model_validate_json(body)
            return self.executor.submit(self._load_engine, model, hash_model(body)).result()
        except AdapterRefusedError as error:
            return {**self.describe_state(), "refusal": str(error)}
        except (ValidationError, UserError) as error:
            raise RequestError(422, str(error)) from error

    def receive_weights(
        self, version: str, part_index: int, part_count: int, part: bytes, base_version: str = ""
    ) -> None:
        """Take part i of the weights of this version; with the last of them the engine has these and no other, or these
        and the weights below the adapter of the version `onto`.
        """
        if part_index == 0:
            self.pending = PendingWeights(version, [], base_version)
        coming = self.pending
        if coming.version != version or len(coming.parts) != part_index or not self.engine:
            raise RequestError(409, "other weights have come in between")
        coming.parts.append(part)
        if part_index + 1 == part_count:
            self.pending = PendingWeights("", [])
            self.executor.submit(self._push_weights, coming).result()

    def run_at_version(self, version: str, work: Callable[[], Any]) -> tuple[str, Any]:
        """Return what the engine answers with the weights of this version, behind the version that it has."""
        return self.executor.submit(self._run_at_version, version, work).result()

    def sample_rows(self, version: str, rows: Sequence[SampleRequest]) -> tuple[str, Any]:
        """As `do`: ask for these rows, and return what is sampled; wait a moment for the first of it."""
        self.run_at_version(version, lambda: self._submit_rows(rows))
        with self.rows_arrived:
            self.rows_arrived.wait_for(lambda: self.finished_rows, POLL_SECONDS)
        return self.run_at_version(version, self._take_rows)

    def close(self) -> None:
        """End the engine. TimeoutError where it does not come to an end with what it does."""
        self.executor.submit(lambda: self.engine and self.engine.close()).result(CLOSE_TIMEOUT_SECONDS)
        self.executor.shutdown()

    # ------------------------------------------------------------ in the thread of the engine

    def _load_engine(self, model: ModelDescription, name: str) -> dict[str, Any]:
        if self.model_digest != name:  # it may have been asked for again while it was made
            self._reset()
            if self.engine:
                self.engine.close()
            self.model_digest, self.engine = "", None
            self.engine = self.make_engine(model)
            self.model_digest = name
        return self.describe_state()

    def _push_weights(self, pending: PendingWeights) -> None:
        if pending.base_version:
            self.check_version(pending.base_version)
        self._reset()
        weights: dict[str, Tensor] = {}
        while pending.parts:
            weights |= safetensors.torch.load(pending.parts.pop(0))
        self._guard_engine(lambda: self.engine.push(weights))
        self.version = pending.version

    def _reset(self) -> None:
        self.version = ""
        self.finished_rows = []
        if self.engine:
            self.engine.abort_all()
        if self.step_future and self.step_future.done():
            self.step_future = None

    def _run_at_version(self, version: str, work: Callable[[], Any]) -> tuple[str, Any]:
        self.check_version(version)
        return self.version, self._guard_engine(work)

    def check_version(self, version: str) -> None:
        if not version or version != self.version:
            raise RequestError(409, "these are other weights here")

    def _guard_engine(self, work: Callable[[], Any]) -> Any:
        """Where this fails, the engine is broken, and a new one is made for whoever asks."""
        with ExitStack() as failing:
            failing.callback(setattr, self, "model_digest", "")
            done = work()
            failing.pop_all()
        return done

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """Read a text; rows that somebody was not told of would be answered with it."""
        self.engine.abort_all()
        self.finished_rows = []
        return self.engine.score_tokens(ids)

    def _submit_rows(self, rows: Sequence[SampleRequest]) -> None:
        for row in rows:
            self.engine.add_request(row.number, row.ids, row.max_tokens, row.temperature, row.seed)
        if rows and not self.step_future:
            self.step_future = self.executor.submit(self._run_step)

    def _run_step(self) -> None:
        said = self._guard_engine(self.engine.step) if self.engine and self.engine.unfinished else []
        self.steps += 1
        with self.rows_arrived:
            self.finished_rows += said
            self.rows_arrived.notify_all()
        self.step_future = self.executor.submit(self._run_step) if self.engine and self.engine.unfinished else None

    def _take_rows(self) -> dict[str, Any]:
        if self.step_future and self.step_future.done():
            self.step_future.result()  # it has failed
        said, self.finished_rows = self.finished_rows, []
        return {"steps": self.steps, "said": [tuple(answer) for answer in said]}


def make_sampler_app(held: EngineHost, hosts: Sequence[str], secret: str) -> ASGIApp:
    app = FastAPI(title="pellucid sampler", docs_url=None, redoc_url=None)
    install_error_handlers(app)

    @app.get("/state")
    async def state() -> dict[str, Any]:
        return held.describe_state()

    @app.put("/model")
    async def model(request: Request) -> dict[str, Any]:
        return await run_in_threadpool(held.load_model, await request.body())

    @app.put("/weights/{version}/{i}/{of}")
    async def weights(version: str, i: int, of: int, request: Request, onto: str = "") -> dict[str, Any]:
        await run_in_threadpool(held.receive_weights, version, i, of, await request.body(), onto)
        return {}

    @app.post("/read")
    def read(version: VersionHeader, ids: Annotated[list[int], Body(embed=True)]) -> Response:
        here, (logprobs, cached) = held.run_at_version(version, lambda: held.score_tokens(ids))
        return make_tensor_response(here, {"logprobs": logprobs, "cached": torch.tensor(cached)})

    @app.post("/columns")
    def columns(version: VersionHeader, name: Annotated[str, Body()], at: Annotated[list[int], Body()]) -> Response:
        try:
            here, found = held.run_at_version(version, lambda: held.engine.read_columns(name, at))
        except UserError as error:
            raise RequestError(422, str(error)) from error
        return make_tensor_response(here, {str(i): column for i, column in enumerate(found)})

    @app.post("/step")
    def step(version: VersionHeader, rows: Annotated[list[SampleRequest], Body()]) -> Response:
        here, answers = held.sample_rows(version, rows)
        return JSONResponse(answers, headers={VERSION_HEADER: here})

    return AccessMiddleware(ShutdownMiddleware(app), hosts, secret)


def make_tensor_response(version: str, found: Mapping[str, Tensor]) -> Response:
    body = safetensors.torch.save({name: x.detach().cpu().contiguous() for name, x in found.items()})
    return Response(body, media_type="application/octet-stream", headers={VERSION_HEADER: version})


def run_sampler_server(listening: socket.socket, rows: int, cache_gb: float, device: str, hosts: Sequence[str]) -> None:
    """Sample for whoever asks until told to stop. UserError where vLLM is missing."""
    check_vllm_installed()
    secret, (address, port) = get_secret(), listening.getsockname()[:2]
    with ExitStack() as running:
        if not secret and is_loopback(address):
            secret = running.enter_context(publish_secret(port))
            print(
                f"its secret is in {get_secret_path(port)}: your own runs on this machine read it there; others need it in"
                f" {SECRET_VARIABLE}",
                flush=True,
            )
        elif not secret:
            print(
                f"! {address}:{port} is open to everyone who can reach it: set {SECRET_VARIABLE}",
                file=sys.stderr,
                flush=True,
            )
        serve_sampler(listening, rows, cache_gb, device, hosts, secret)


def serve_sampler(
    listening: socket.socket, rows: int, cache_gb: float, device: str, hosts: Sequence[str], secret: str
) -> None:
    """Sample for those who know the secret, or for everyone where it is empty, until told to stop."""
    address, port = listening.getsockname()[:2]
    place = hardware.pick_device(device)

    def made(model: ModelDescription) -> VLLMEngine:
        described = WeightlessPolicy(model.config, place, model.ends)
        return VLLMEngine(described, getattr(torch, model.dtype), rows, cache_gb, model.adapter)

    held = EngineHost(made)
    print(f"sampler on {make_url(address, port)}, Ctrl-C ends it", flush=True)
    try:
        middleware.make_server(make_sampler_app(held, (*LOOPBACK_HOSTS, *hosts), secret)).run(sockets=[listening])
    finally:
        try:
            held.close()
        except TimeoutError:
            os._exit(1)  # Python would wait for the thread of the engine
