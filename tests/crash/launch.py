"""Launch a command with its marks (`marks/sitecustomize.py`), watch it, and kill it at a given point."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

MARKS = Path(__file__).parent / "marks"
PATIENCE = 120
"""Seconds a launch may continue after it was killed, or without a mark."""


class Process(Protocol):
    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Begin = Callable[..., Process]
"""Starts a command with `stdout`, `stderr` and `env`, like subprocess.Popen."""


class Kill(NamedTuple):
    """Kill a process `delay` seconds into a visit of a stage. Visits count from 1."""

    stage: str
    visit: int
    delay: float
    everyone: bool
    """Whether the launcher and the other processes are killed, too."""


@dataclass
class Trace:
    """The marks of one launch so far. The visits are those of the main process."""

    stack: defaultdict[int, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))
    """The current stages of each process, innermost last."""
    entered: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Durations of the finished visits."""

    def add(self, line: str) -> tuple[int, str, int] | None:
        """Add a mark. Return the process, stage and number of the visit if it begins with this mark."""
        pid, rank, edge, stage = line.split()
        stack = self.stack[int(pid)]
        if edge == "+":
            stack.append((stage, time.monotonic()))
            self.entered[stage] += rank == "0"
            return (int(pid), stage, self.entered[stage]) if rank == "0" else None
        _, since = stack.pop()
        if rank == "0":
            self.seconds[stage].append(time.monotonic() - since)
        return None

    def where(self, pid: int) -> str:
        stage = self.stack[pid][-1][0] if self.stack[pid] else "after the end"
        return "between" if stage == "train" else stage


class Ended(NamedTuple):
    status: int
    died: str
    """The stage in which the process was killed, or "" if it was not killed."""
    trace: Trace


def launch(command: Sequence[str], log: Path, begin: Begin, kill: Kill | None = None) -> Ended:
    """Run a command until it ends or is killed."""
    pipe = log.with_suffix(".marks")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    marks = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # also for writing, so that reads never hit the end
    paths = [str(MARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PELLUCID_MARKS": str(pipe)}
    with log.open("a") as output:
        process = begin(command, stdout=output, stderr=output, env=env)
    try:
        return follow(process, marks, kill)
    finally:
        os.close(marks)


def follow(process: Process, marks: int, kill: Kill | None) -> Ended:
    trace, victim, due, died, rest = Trace(), 0, float("inf"), "", b""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        now = time.monotonic()
        if now >= deadline:
            end(process, [process.pid, *trace.stack])
            raise TimeoutError(f"nothing happened for {PATIENCE} s")
        if select.select([marks], [], [], max(0.0, min(due - now, 0.1)))[0]:
            *lines, rest = (rest + os.read(marks, 2**16)).split(b"\n")
            deadline = deadline if died else time.monotonic() + PATIENCE
            for line in lines:
                visit = trace.add(line.decode())
                if visit and kill and visit[1:] == kill[:2]:
                    victim, due = visit[0], time.monotonic() + kill.delay
        elif kill and time.monotonic() >= due:
            died, due = trace.where(victim), float("inf")
            end(process, [process.pid, *trace.stack] if kill.everyone else [victim])
    return Ended(process.wait(), died, trace)


def end(process: Process, pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has already ended
    if process.pid in pids:
        process.wait()
