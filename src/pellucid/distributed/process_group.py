"""The group of processes of a run: how it is joined and left, and what is said where one of them is gone."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from pellucid.types import StrandedError

ROLL_CALL_TIMEOUT_SECONDS = 5.0
"""Seconds in which those that are left say so, before the others are named."""
STORE_RANK = 0
"""The rank that keeps the store."""


def join_process_group(device: torch.device, timeout_minutes: float) -> PartialState:
    """Join the process group of the run, in which each waits `timeout` minutes for the others.

    It is left at exit, since an open group may abort a process that ends. On GPUs it has gloo besides, for what an
    engine keeps in the memory of the host.
    """
    if device.type == "cuda" and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=timeout_minutes))  # pyright: ignore[reportPrivateImportUsage]
    state = PartialState(cpu=device.type == "cpu", timeout=timedelta(minutes=timeout_minutes))
    atexit.unregister(leave_process_group)
    atexit.register(leave_process_group, os.getpid())
    return state


def set_group_timeouts(minutes: float) -> None:
    """In every group that there is, also in those that an engine made, whose timeouts are torch's own."""
    if dist.is_available() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


def leave_process_group(owner_pid: int) -> None:
    """Leave the process group. Objects that still hold it are collected first: its threads may abort an exit.

    A fork of the process `owner`, which has joined it, leaves it open.
    """
    if os.getpid() == owner_pid and dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def broadcast_decision(decide: Callable[[], str], device: torch.device, timeout_minutes: float) -> str:
    """The decision of the main process, in every process: each measures for itself, and measurements differ."""
    state = join_process_group(device, timeout_minutes)
    return broadcast_object_list([decide() if state.is_main_process else ""])[0]


@contextmanager
def detect_lost_processes(run_dir: Path) -> Iterator[None]:
    """Raise StrandedError where another process is gone, or has not answered for runtime.timeout."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class for it, but says where it was.
        if not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        silent = ", ".join(map(str, find_missing_ranks())) or "unknown: the connection broke"
        raise StrandedError(
            f"another process of this run has ended or does not answer (rank {silent}); what was saved is whole: go on"
            f" with as many processes and --resume {run_dir}"
        ) from error


def find_missing_ranks() -> list[int]:
    """The ranks that do not answer a roll call, which is held over the store that started the group."""
    found: list[list[int]] = []
    # A store behind a cut cable does not even refuse: its calls never return.
    call = Thread(target=lambda: found.append(call_roll()), daemon=True)
    call.start()
    call.join(ROLL_CALL_TIMEOUT_SECONDS + 1)
    return found[0] if found else [STORE_RANK]


def call_roll() -> list[int]:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    others, end = set(range(dist.get_world_size())) - {rank}, time.monotonic() + ROLL_CALL_TIMEOUT_SECONDS
    try:
        store.set(f"pellucid/left/{rank}", "")
        while others and time.monotonic() < end:
            others = {other for other in others if not store.check([f"pellucid/left/{other}"])}
            time.sleep(0.1)
    except (RuntimeError, dist.DistError):
        return [STORE_RANK]
    return sorted(others)
