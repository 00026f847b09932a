"""Joins and leaves the process group of a run, and names the ranks that no longer answer."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from pellucid.types import StrandedError, UserError

T = TypeVar("T")
ROLL_CALL_TIMEOUT_SECONDS = 5.0
"""The time limit for answering a roll call. Ranks that do not answer are reported as missing."""
_STORE_RANK = 0
"""The rank that hosts the store."""


class ProcessGroup(Protocol):
    """The processes of a run, for evaluations and checkpoints: `Runtime`, or `SingleProcess` if there is only one."""

    @property
    def is_main(self) -> bool: ...
    def shard(self, items: Sequence[Any]) -> Sequence[Any]: ...
    def gather(self, items: Sequence[Any]) -> list[Any]: ...


class SingleProcess:
    is_main = True

    def shard(self, items: Sequence[Any]) -> Sequence[Any]:
        return items

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


SINGLE_PROCESS = SingleProcess()


def join_process_group(device: torch.device, timeout_minutes: float) -> PartialState:
    """Join the process group of the run, with a timeout for each collective operation.

    The group is left at exit, since an open group may abort the exit. On GPUs it also has gloo, for tensors
    that an engine keeps in host memory.
    """
    if device.type == "cuda" and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=timeout_minutes))  # pyright: ignore[reportPrivateImportUsage]
    state = PartialState(cpu=device.type == "cpu", timeout=timedelta(minutes=timeout_minutes))
    atexit.unregister(_leave_process_group)
    atexit.register(_leave_process_group, os.getpid())
    return state


def set_group_timeouts(minutes: float) -> None:
    """Set the timeout of all process groups, including those that an engine made with torch's default timeout."""
    if dist.is_available() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


def _leave_process_group(owner_pid: int) -> None:
    """Leave the process group if this is the process that joined it, and not a fork of that process."""
    if os.getpid() == owner_pid and dist.is_available() and dist.is_initialized():
        gc.collect()  # threads of the group may abort an exit while objects refer to it
        dist.destroy_process_group()


def broadcast_decision(decide: Callable[[], str], device: torch.device, timeout_minutes: float) -> str:
    """Return the decision of the main process in every process, since each would measure different values."""
    state = join_process_group(device, timeout_minutes)
    return broadcast_object_list([decide() if state.is_main_process else ""])[0]


def raise_in_all_processes(action: Callable[[], T]) -> T:
    """Return the result of an action. All processes call this together.

    If the action raises a UserError in one of them, raise it in all, so that none waits for one that has ended.
    """
    result: list[T] = []
    error: UserError | None = None
    try:
        result.append(action())
    except UserError as raised:
        error = raised
    if dist.is_initialized() and dist.get_world_size() > 1:
        messages: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(messages, "" if error is None else str(error))
        if message := next(filter(None, messages), ""):
            raise UserError(message) from error
    if error is not None:
        raise error
    return result[0]


@contextmanager
def detect_lost_processes(run_dir: Path) -> Iterator[None]:
    """Raise StrandedError if another process has ended, or has not answered within runtime.timeout."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception class of its own, but its messages name its source files.
        if not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        missing = ", ".join(map(str, find_missing_ranks())) or "unknown: the connection broke"
        raise StrandedError(
            f"another process of this run has ended or does not answer (rank {missing}); saved files are intact:"
            f" resume with the same number of processes and --resume {run_dir}"
        ) from error


def find_missing_ranks() -> list[int]:
    """Return the ranks that do not answer a roll call over the store that started the group."""
    results: list[list[int]] = []
    # If the network is down, calls to the store never return.
    thread = Thread(target=lambda: results.append(_call_roll()), daemon=True)
    thread.start()
    thread.join(ROLL_CALL_TIMEOUT_SECONDS + 1)
    return results[0] if results else [_STORE_RANK]


def _call_roll() -> list[int]:
    """Announce this rank in the store, and return the ranks that do not announce themselves in time."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    others, end = set(range(dist.get_world_size())) - {rank}, time.monotonic() + ROLL_CALL_TIMEOUT_SECONDS
    try:
        store.set(f"pellucid/left/{rank}", "")
        while others and time.monotonic() < end:
            others = {other for other in others if not store.check([f"pellucid/left/{other}"])}
            time.sleep(0.1)
    except (RuntimeError, dist.DistError):
        return [_STORE_RANK]
    return sorted(others)
