"""The routes of a sampler server about weights over NCCL, see `pellucid.rollout.nccl_transfer`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from pellucid.rollout.nccl_transfer import ReceiverState, WeightReceiver, find_connection_fault, get_gpu_name
from pellucid.serve.middleware import RequestError
from pellucid.utils.text import format_one_line

_WATCH_SECONDS = 1.0
"""The time between two checks that the trainer of a transfer still waits."""


class _Host(Protocol):
    """An `EngineHost`."""

    engine: Any
    model_digest: str

    @property
    def executor(self) -> Executor: ...

    def replace_weights(self, version: str, load: Callable[[], None]) -> None: ...


class _Group(BaseModel):
    """A group that a trainer forms."""

    group: str
    seconds: float
    """How long this may take."""
    init_info: dict[str, Any]
    """The address of the group, in the format of vLLM."""


class _Update(BaseModel):
    """The weights that a trainer is about to send."""

    group: str
    seconds: float
    """How long the transfer may take."""
    update_info: dict[str, Any]
    """Names, dtypes and shapes of the weights in order, in the format of vLLM."""


def add_transfer_routes(app: FastAPI, host: _Host) -> None:
    """Add the routes by which trainers form an NCCL group with the engine of a host, and send it weights."""

    process = secrets.token_hex(8)  # trainers try NCCL again with a new process

    def get_receiver() -> WeightReceiver | None:
        return host.engine.receiver if host.engine else None

    def receive(receiver: WeightReceiver, version: str, update: _Update) -> None:
        if receiver.group != update.group or not host.model_digest:
            raise RequestError(409, "another trainer has formed a group in between, or the engine has failed")
        host.replace_weights(version, lambda: host.engine.receive(update.update_info))

    @app.get("/transfer")
    def describe(address: str = "", port: int = 0) -> dict[str, str]:
        if receiver := get_receiver():
            fault = find_connection_fault(address, port) if port else ""
            return ReceiverState(fault, get_gpu_name(receiver.device), process, receiver.group)._asdict()
        return ReceiverState("the server's engine is not on a GPU", "", process, "")._asdict()

    @app.put("/transfer")
    async def join(request: Request) -> dict[str, Any]:
        group = _Group.model_validate_json(await request.body())
        if not (receiver := get_receiver()):
            raise RequestError(409, "the server has another engine now")
        work = host.executor.submit(receiver.join, group.group, group.init_info, group.seconds)
        try:
            await run_in_threadpool(work.result)
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError(503, format_one_line(error)) from error
        return {}

    @app.put("/transfer/{version}")
    async def update(version: str, request: Request) -> dict[str, Any]:
        update = _Update.model_validate_json(await request.body())
        if not (receiver := get_receiver()):
            raise RequestError(409, "the server has another engine now")
        deadline = time.monotonic() + update.seconds
        work = asyncio.create_task(run_in_threadpool(host.executor.submit(receive, receiver, version, update).result))
        while not (await asyncio.wait([work], timeout=_WATCH_SECONDS))[0]:
            if time.monotonic() > deadline or await request.is_disconnected():
                await run_in_threadpool(receiver.abort)
                deadline = float("inf")
        return await work or {}
