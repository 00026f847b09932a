"""Weights over NCCL: from a trainer to a sampler server, with the weight transfer engine of vLLM.

Both sides need vLLM and a GPU of their own. Only the weights go over NCCL. All agreements go over HTTP: the
trainer asks whether the server can receive, announces the address at which they form an NCCL group of two, and at each
push the version and the names, dtypes and shapes of the weights in order. If anything fails before weights are sent,
they go over HTTP, too.

A side that dies during a transfer leaves the other one waiting in NCCL, which has no timeout. Therefore both sides
watch the HTTP request that belongs to the transfer, and abort the NCCL group when it fails or takes too long.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from pellucid.rollout.server_errors import ServerLostError
from pellucid.types import UserError
from pellucid.utils.text import escape_controls, format_one_line

TRANSFER_DEVICE = "cuda"
"""The type of the device that the weights must be on, on both sides."""
BUFFER_BYTES = 2**28
"""The size of a buffer in which vLLM packs weights, unless a weight is larger. Each side has two of them."""
CONNECT_SECONDS = 5.0
"""How long a server tries to reach the trainer's address."""
_BYTES_PER_SECOND = 10**8
"""The lowest rate of a transfer. A slower one counts as hung."""
_ABORT_SECONDS = 10.0
"""How long an aborted transfer may take to end."""
_WATCH_SECONDS = 0.1
_TRANSFER_LOCK = threading.Lock()
"""Held during a transfer: servers get their weights one after another, since vLLM has one set of streams a GPU."""
_TRANSFER_ERRORS = (
    *(ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError, AssertionError),
    *(ServerLostError, UserError),
)
"""The errors that vLLM, NCCL and the rendezvous raise; torch's distributed errors are RuntimeErrors."""

T = TypeVar("T")


class SendRequest(Protocol):
    """Sends an HTTP request to the server and returns the body of its response, or raises ServerLostError."""

    def __call__(self, method: str, path: str, body: bytes = ..., *, timeout: float = ...) -> bytes: ...


class ReceiverState(NamedTuple):
    """The server's side of the transfer, as it describes it."""

    refusal: str
    """Why it cannot receive weights over NCCL; empty if it can."""
    gpu: str
    """The UUID of its GPU."""
    process: str
    """A random name of its process."""
    group: str
    """The NCCL group that it is in, by the name that the trainer gave it."""


# ---------------------------------------------------------------- the trainer


class WeightSender:
    """Sends weights from this process to one server over NCCL, if both can."""

    def __init__(self, url: str, request: SendRequest, timeout: float) -> None:
        """Create a sender that is in no group yet.

        Args:
            url: the address of the server.
            request: sends a request to it.
            timeout: seconds without a response after which the server counts as lost.
        """
        self.url, self.request, self.timeout = url, request, timeout
        self.is_stopped = False
        """Whether requests are aborted on purpose: a transfer that fails then is no fault of NCCL."""
        self._group = self._notice = ""
        self._engine: Any = None
        """vLLM's trainer side of the group."""
        self._source = _WeightSource()
        self._process = self._failed_process = self._failure = ""
        """The server's process at the last request, the one with which NCCL failed, and why."""

    def send(self, weights: Mapping[str, Tensor], version: str, device: torch.device) -> bool:
        """Send weights under a new version. Print once how they go to this server, if the trainer has a GPU.

        Args:
            weights: the weights by name. They are copied to the device one at a time if they are elsewhere.
            version: their new version.
            device: the trainer's device.

        Returns:
            False if nothing was sent and the weights must go over HTTP.

        Raises:
            ServerLostError: The server or the transfer failed. The server's engine may have a part of the weights.
        """
        if device.type != TRANSFER_DEVICE:
            return False
        reason = self._join_server(weights, device)
        self._print_notice(reason)
        if reason:
            return False
        self._source.weights, self._source.device = weights, device
        seconds = self.timeout + sum(weight.nbytes for weight in weights.values()) / _BYTES_PER_SECOND
        control = _ServerControl(self.request, self._group, seconds, version, self._engine.shutdown)
        self._engine.client = control
        try:
            _synchronize(device)  # vLLM packs the weights on streams that do not wait for what computes them
            with _TRANSFER_LOCK:
                _run_bounded(self._engine.send_weights, seconds, device, control.failed, _ABORT_SECONDS)
        except _TRANSFER_ERRORS as error:
            self._shut_down()
            cause = control.error or error
            failure = f"a transfer over NCCL failed: {format_one_line(cause)}"
            if not self.is_stopped:
                self._note_failure(failure)
            raise ServerLostError(failure) from cause
        finally:
            self._source.weights = {}
        return True

    def _join_server(self, weights: Mapping[str, Tensor], device: torch.device) -> str:
        """Form a group with the server, unless there is one. Return why there is none; empty if there is."""
        if importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed here"
        state = _parse_state(self.request("GET", "/transfer"))
        self._process = state.process
        if state.refusal or (self._engine and state.group == self._group):
            return state.refusal
        if state.gpu and state.gpu == get_gpu_name(device):
            return "the server uses the same GPU, and NCCL needs two"
        if self._process != self._failed_process:  # one that failed once might fail at every push
            self._form_group(weights, device)
        return "" if self._engine else self._failure

    def _form_group(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._shut_down()
        buffer_bytes = max(BUFFER_BYTES, *(weight.nbytes for weight in weights.values()))
        self._group = secrets.token_hex(8)
        control = _ServerControl(self.request, self._group, self.timeout)
        try:
            address, port = self._find_address()
            create = partial(self._create_engine, control, address, port, buffer_bytes)
            self._engine = _run_bounded(create, 2 * self.timeout, device, control.failed)
        except _TRANSFER_ERRORS as error:
            if self.is_stopped:
                raise ServerLostError("the request was stopped") from error
            self._note_failure(f"no NCCL group with the server: {format_one_line(control.error or error)}")

    def _find_address(self) -> tuple[str, int]:
        """Return an address and a free port of this machine that the server can reach.

        vLLM would wait for minutes if a firewall is in between.
        """
        address = find_own_address(self.url)
        with socket.create_server((address, 0)) as listening:
            port = listening.getsockname()[1]
            state = _parse_state(self.request("GET", f"/transfer?address={address}&port={port}"))
        if state.refusal:
            raise OSError(state.refusal)
        return address, port

    def _note_failure(self, failure: str) -> None:
        self._failed_process, self._failure = self._process, failure

    def _shut_down(self) -> None:
        if self._engine:
            self._engine.shutdown()
        self._engine = None

    def _create_engine(self, control: _ServerControl, address: str, port: int, buffer_bytes: int) -> Any:
        """Form a group with the server, which joins it by a request of `control`."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        transfer = importlib.import_module("vllm.distributed.weight_transfer")
        nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
        info = nccl.NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=port, world_size=2, packed_buffer_size_bytes=buffer_bytes
        )
        engine = transfer.WeightTransferTrainerFactory.trainer_init(info, client=control, source=self._source)
        if engine.model_update_group.disabled:  # vLLM only logs this, and then sends nothing
            raise RuntimeError("vLLM finds no NCCL library")
        return engine

    def _print_notice(self, reason: str) -> None:
        notice = f"{self.url}: its weights go over {f'HTTP ({reason})' if reason else 'NCCL'}"
        if notice != self._notice:
            print(escape_controls(notice), flush=True)
        self._notice = notice


class _WeightSource:
    """The weights of a push, as vLLM's `WeightSource`."""

    def __init__(self) -> None:
        self.weights: Mapping[str, Tensor] = {}
        self.device = torch.device("cpu")

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each weight, in the order in which they are sent."""
        meta = importlib.import_module("vllm.distributed.weight_transfer").ParamMeta
        return [meta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.to(self.device)) for name, weight in self.weights.items())


class _ServerControl:
    """The requests of vLLM's trainer side to the server. Implements vLLM's `VLLMWeightSyncClient`."""

    def __init__(
        self,
        request: SendRequest,
        group: str,
        seconds: float,
        version: str = "",
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self.request, self.group, self.seconds, self.version, self.abort = request, group, seconds, version, abort
        self.failed = threading.Event()
        self.error: Exception | None = None
        """Why a request failed, once `failed` is set."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._request("/transfer", {"group": self.group, "seconds": self.seconds, "init_info": init_info})

    def start_weight_update(self) -> None:
        """Do nothing: the request of `update_weights` also starts and finishes the update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        body = {"group": self.group, "seconds": self.seconds, "update_info": update_info}
        self._request(f"/transfer/{self.version}", body)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing, see `start_weight_update`."""

    def _request(self, path: str, body: Any) -> None:
        try:
            self.request("PUT", path, json.dumps(body).encode(), timeout=self.seconds + _ABORT_SECONDS)
        except (ServerLostError, UserError) as error:
            self.error = error
            self.failed.set()
            self.abort()
            raise


def _parse_state(answer: bytes) -> ReceiverState:
    with suppress(ValueError, TypeError, RecursionError):
        state = ReceiverState(**json.loads(answer))
        if all(isinstance(value, str) for value in state):
            return state
    return ReceiverState("the server does not say whether it can receive them", "", "", "")


def find_own_address(url: str) -> str:
    """Return the IPv4 address of this machine from which it reaches the server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect((parts.hostname or "", parts.port or 80))
        return probe.getsockname()[0]


# ---------------------------------------------------------------- the server


class WeightReceiver:
    """Receives weights for a vLLM engine of this process, which was created with `RECEIVER_SETTINGS`."""

    def __init__(self, llm: Any, device: torch.device) -> None:
        """Create a receiver that is in no group yet. device: the engine's."""
        self.llm, self.device = llm, device
        self.group = ""
        """The NCCL group that it is in, by the name that the trainer gave it."""
        self._engines: list[Any] = llm.collective_rpc(_get_transfer_engine)
        """vLLM's side of the transfer, once for each GPU of the engine."""
        self._aborted = False

    def join(self, group: str, init_info: Mapping[str, Any], seconds: float) -> None:
        """Form a group with the trainer that announced it; the earlier group ends.

        Raises:
            RuntimeError: vLLM cannot form it.
            TimeoutError: There is no group after `seconds`.
        """
        self.group = ""
        self.llm.shutdown_weight_transfer_engine()
        request = {"init_info": dict(init_info)}
        _run_bounded(lambda: self.llm.init_weight_transfer_engine(request), seconds, self.device)
        self.group = group

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Receive and load weights. Raise RuntimeError if the transfer was aborted: the engine then has wrong ones."""
        self._aborted = False
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": dict(update_info)})
        self.llm.finish_weight_update()
        if self._aborted:
            raise RuntimeError("the transfer was aborted")

    def abort(self) -> None:
        """End the group, so that a transfer that waits in NCCL fails."""
        self._aborted, self.group = True, ""
        for engine in self._engines:
            engine.shutdown()


RECEIVER_SETTINGS = {"weight_transfer_config": {"backend": "nccl"}}
"""The settings of a vLLM engine that can receive weights."""


def _get_transfer_engine(worker: Any) -> Any:
    return worker.weight_transfer_engine


def find_connection_fault(address: str, port: int) -> str:
    """Return why a trainer that listens at an address cannot be reached; empty if it can."""
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"the server cannot reach the trainer at {address}:{port} ({error.strerror or error})"
    return ""


# ---------------------------------------------------------------- both


def get_gpu_name(device: torch.device) -> str:
    """Return the UUID of a GPU; empty if it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run_bounded(
    work: Callable[[], T],
    seconds: float,
    device: torch.device,
    failed: threading.Event | None = None,
    grace_seconds: float = 0.0,
) -> T:
    """Run work in a thread of its own, and return its result.

    Args:
        work: what to run.
        seconds: how long to wait for it. A thread that hangs in NCCL cannot be ended; it is abandoned.
        device: the device on which it runs.
        failed: once it is set, the work cannot succeed.
        grace_seconds: how long to wait for the work after that.

    Raises:
        TimeoutError: The work did not end in time.
    """
    future = Future[T]()

    def run() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    deadline, has_failed = time.monotonic() + seconds, False
    while not wait([future], _WATCH_SECONDS).done:
        if failed and failed.is_set() and not has_failed:
            deadline, has_failed = time.monotonic() + grace_seconds, True
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done in {seconds:g} s")
    return future.result()
