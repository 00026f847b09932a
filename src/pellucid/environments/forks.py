"""Processes for conversations: each has one to itself, forked from a process that has imported the user's code.

What hangs, ends or fills the memory of its process costs its own conversation. Where processes cannot be forked they
are started one by one, which takes a second each.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from pellucid.environments import agent
from pellucid.environments.actor import Actor, Answer, Begin, Hear
from pellucid.environments.agent import Agent, AgentTalk, Solve
from pellucid.environments.talk import Talk
from pellucid.machine import streams
from pellucid.machine.channel import Channel
from pellucid.rewards import worker
from pellucid.rewards.process import GRACE, MOST, SPAWN, START_SECONDS, safe_path
from pellucid.rewards.worker import Confines
from pellucid.types import UserError

FORKS = sys.platform == "linux"


class GoneError(Exception):
    """The process of a conversation has ended or is late; the message says so in words."""


class Player:
    """The process of one conversation at a time, as its parent holds it.

    connection: what to wait on. It brings an answer, or the end of the process. pid: 0 before it has said it.
    """

    def __init__(self, connection: Any) -> None:
        self.connection, self.deadline, self.pid = connection, math.inf, 0
        self._channel = Channel(connection, MOST)
        self._pending_answer: Answer | None = None
        """An answer whose environment is still to come."""

    @property
    def has_ended(self) -> bool:
        """Whether the process of an idle player is gone: it has nothing to say otherwise."""
        return self.connection.poll()

    def send_request(self, request: Begin | Hear | Solve, timeout: float) -> None:
        """Send a request, to be answered within so many seconds.

        GoneError where the process has ended, or does not take the request in that time.
        """
        self.deadline, self._timeout = time.monotonic() + timeout + GRACE, timeout
        try:
            self._channel.send(pickle.dumps((request, timeout)), timeout + GRACE)
        except TimeoutError as error:
            raise GoneError(f"no answer within {timeout:g} s") from error
        except (OSError, ValueError) as error:
            raise GoneError("its process has ended") from error

    def receive_answer(self) -> tuple[Answer, bytes] | None:
        """Return the answer, or None where there is none yet. GoneError where none will come."""
        try:
            while (data := self._channel.receive()) is not None:
                if self._pending_answer is not None:
                    answer, self._pending_answer, self.deadline = self._pending_answer, None, math.inf
                    return answer, data
                told = json.loads(data)
                if "pid" in told:
                    self.pid = told["pid"]
                else:
                    self._pending_answer = Answer(**told)
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            raise GoneError("its process has ended") from error
        if time.monotonic() >= self.deadline:
            raise GoneError(f"no answer within {self._timeout:g} s")
        return None

    def terminate(self) -> None:
        """End the process and all that it has started."""
        if not self.pid:
            with suppress(GoneError):
                self.receive_answer()  # it may have said its number since
        if self.pid and hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()  # one that is idle, or has not said its number yet, ends by itself


class Troupe:
    """Makes players."""

    def __init__(self, spec: Talk | AgentTalk, config: Confines) -> None:
        self._spec_bytes, self._config = pickle.dumps(spec), config
        self._kind = "agent" if isinstance(spec, AgentTalk) else "environment"
        self._fork_server: Any = None
        self._control: Any = None
        self._spawned: list[Any] = []

    def create_worker(self) -> Player:
        """Return a new player. UserError where the user's code cannot be loaded."""
        mine, theirs = Pipe()
        if FORKS:
            if self._fork_server is None or not self._fork_server.is_alive() or not self._is_accepting():
                self.close()
                self._fork_server = self._start_fork_server()
            reduction.send_handle(self._control, theirs.fileno(), self._fork_server.pid)
        else:
            with safe_path():
                process = SPAWN.Process(target=play_alone, args=(theirs, self._spec_bytes, self._config))
                process.start()
            self._spawned.append(process)
        theirs.close()
        return Player(mine)

    def _is_accepting(self) -> bool:
        """Return whether the process that forks the others takes what is sent to it; it may hang."""
        writable = select.poll()
        writable.register(self._control.fileno(), select.POLLOUT)
        return bool(writable.poll(START_SECONDS * 1000))

    def close(self) -> None:
        """End the process that forks the others."""
        if self._fork_server is not None:
            self._control.close()
            self._fork_server.kill()
            self._fork_server.join()
            self._fork_server = None
        while self._spawned:
            process = self._spawned.pop()
            process.kill()
            process.join()

    def _start_fork_server(self) -> Any:
        """Return the process that forks, which has loaded the user's code. UserError where it cannot."""
        self._control, theirs = Pipe()
        forker = SPAWN.Process(target=fork_players, args=(theirs, self._spec_bytes, self._config))
        streams.plugged()
        with safe_path():
            forker.start()
        theirs.close()
        try:
            told = self._receive_load_report()
        except (EOFError, OSError, ValueError):
            told = {"error": 'its process ended; a script needs `if __name__ == "__main__":` around what it does'}
        if error := told.get("error"):
            forker.kill()
            raise UserError(f"the {self._kind} cannot be used: {error}")
        return forker

    def _receive_load_report(self) -> dict[str, str]:
        """Return what the process that forks the others says of the user's code, or that it says nothing in time."""
        channel, until = Channel(self._control, MOST), time.monotonic() + START_SECONDS
        try:
            while (data := channel.receive()) is None:
                if not wait([self._control], max(0.0, until - time.monotonic())):
                    return {"error": f"it is not loaded within {START_SECONDS:g} s"}
            return json.loads(data)
        finally:
            os.set_blocking(self._control.fileno(), True)


def fork_players(control: Connection, spec: bytes, config: Confines) -> None:
    """Load the user's code, then fork a process for each connection that comes, until the parent closes its end."""
    worker.settle(config)
    loaded: Talk | AgentTalk = pickle.loads(spec)
    control.send_bytes(worker.attempt(lambda: load(loaded) and None))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        try:
            handle = reduction.recv_handle(control)
        except (EOFError, OSError, RuntimeError):
            worker.leave()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            control.close()
            play(Connection(handle), loaded)
        os.close(handle)


def play_alone(connection: Connection, spec: bytes, config: Confines) -> None:
    """Settle as the one process of a conversation, and play."""
    worker.settle(config)
    play(connection, pickle.loads(spec))


def load(spec: Talk | AgentTalk) -> Actor | Agent:
    """Return who answers requests, with the user's code imported."""
    return Agent(spec, worker.note) if isinstance(spec, AgentTalk) else Actor(spec, worker.note)


def play(connection: Connection, spec: Talk | AgentTalk) -> None:
    """Answer requests until the parent closes its end; an agent answers one."""
    if isinstance(spec, AgentTalk):
        agent.play(connection, spec)
        return
    try:
        connection.send_bytes(json.dumps({"pid": os.getpid()}).encode())
        actor = Actor(spec, worker.note)
        while True:
            request: Begin | Hear
            request, seconds = pickle.loads(connection.recv_bytes())
            worker.watch([seconds])  # of all calls of the request together
            answer, environment = actor.handle(request)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(json.dumps(asdict(answer)).encode())
            connection.send_bytes(environment)
    except (EOFError, OSError):
        worker.leave()
