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
        self._answer: Answer | None = None
        """An answer whose environment is still to come."""

    @property
    def has_ended(self) -> bool:
        """Whether the process of an idle player is gone: it has nothing to say otherwise."""
        return self.connection.poll()

    def ask(self, request: Begin | Hear | Solve, seconds: float) -> None:
        """Send a request, to be answered within so many seconds.

        GoneError where the process has ended, or does not take the request in that time.
        """
        self.deadline, self._limit = time.monotonic() + seconds + GRACE, seconds
        try:
            self._channel.send(pickle.dumps((request, seconds)), seconds + GRACE)
        except TimeoutError as error:
            raise GoneError(f"no answer within {seconds:g} s") from error
        except (OSError, ValueError) as error:
            raise GoneError("its process has ended") from error

    def answer(self) -> tuple[Answer, bytes] | None:
        """Return the answer, or None where there is none yet. GoneError where none will come."""
        try:
            while (data := self._channel.receive()) is not None:
                if self._answer is not None:
                    answer, self._answer, self.deadline = self._answer, None, math.inf
                    return answer, data
                told = json.loads(data)
                if "pid" in told:
                    self.pid = told["pid"]
                else:
                    self._answer = Answer(**told)
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            raise GoneError("its process has ended") from error
        if time.monotonic() >= self.deadline:
            raise GoneError(f"no answer within {self._limit:g} s")
        return None

    def end(self) -> None:
        """End the process and all that it has started."""
        if not self.pid:
            with suppress(GoneError):
                self.answer()  # it may have said its number since
        if self.pid and hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()  # one that is idle, or has not said its number yet, ends by itself


class Troupe:
    """Makes players."""

    def __init__(self, talk: Talk | AgentTalk, confines: Confines) -> None:
        self._talk, self._confines = pickle.dumps(talk), confines
        self._what = "agent" if isinstance(talk, AgentTalk) else "environment"
        self._forker: Any = None
        self._control: Any = None
        self._others: list[Any] = []

    def player(self) -> Player:
        """Return a new player. UserError where the user's code cannot be loaded."""
        mine, theirs = Pipe()
        if FORKS:
            if self._forker is None or not self._forker.is_alive() or not self._listens():
                self.close()
                self._forker = self._started()
            reduction.send_handle(self._control, theirs.fileno(), self._forker.pid)
        else:
            with safe_path():
                process = SPAWN.Process(target=play_alone, args=(theirs, self._talk, self._confines))
                process.start()
            self._others.append(process)
        theirs.close()
        return Player(mine)

    def _listens(self) -> bool:
        """Return whether the process that forks the others takes what is sent to it; it may hang."""
        writable = select.poll()
        writable.register(self._control.fileno(), select.POLLOUT)
        return bool(writable.poll(START_SECONDS * 1000))

    def close(self) -> None:
        """End the process that forks the others."""
        if self._forker is not None:
            self._control.close()
            self._forker.kill()
            self._forker.join()
            self._forker = None
        while self._others:
            process = self._others.pop()
            process.kill()
            process.join()

    def _started(self) -> Any:
        """Return the process that forks, which has loaded the user's code. UserError where it cannot."""
        self._control, theirs = Pipe()
        forker = SPAWN.Process(target=fork_players, args=(theirs, self._talk, self._confines))
        streams.plugged()
        with safe_path():
            forker.start()
        theirs.close()
        try:
            told = self._told()
        except (EOFError, OSError, ValueError):
            told = {"error": 'its process ended; a script needs `if __name__ == "__main__":` around what it does'}
        if error := told.get("error"):
            forker.kill()
            raise UserError(f"the {self._what} cannot be used: {error}")
        return forker

    def _told(self) -> dict[str, str]:
        """Return what the process that forks the others says of the user's code, or that it says nothing in time."""
        channel, until = Channel(self._control, MOST), time.monotonic() + START_SECONDS
        try:
            while (data := channel.receive()) is None:
                if not wait([self._control], max(0.0, until - time.monotonic())):
                    return {"error": f"it is not loaded within {START_SECONDS:g} s"}
            return json.loads(data)
        finally:
            os.set_blocking(self._control.fileno(), True)


def fork_players(control: Connection, talk: bytes, confines: Confines) -> None:
    """Load the user's code, then fork a process for each connection that comes, until the parent closes its end."""
    worker.settle(confines)
    loaded: Talk | AgentTalk = pickle.loads(talk)
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


def play_alone(connection: Connection, talk: bytes, confines: Confines) -> None:
    """Settle as the one process of a conversation, and play."""
    worker.settle(confines)
    play(connection, pickle.loads(talk))


def load(talk: Talk | AgentTalk) -> Actor | Agent:
    """Return who answers requests, with the user's code imported."""
    return Agent(talk, worker.note) if isinstance(talk, AgentTalk) else Actor(talk, worker.note)


def play(connection: Connection, talk: Talk | AgentTalk) -> None:
    """Answer requests until the parent closes its end; an agent answers one."""
    if isinstance(talk, AgentTalk):
        agent.play(connection, talk)
        return
    try:
        connection.send_bytes(json.dumps({"pid": os.getpid()}).encode())
        actor = Actor(talk, worker.note)
        while True:
            request: Begin | Hear
            request, seconds = pickle.loads(connection.recv_bytes())
            worker.watch([seconds])  # of all calls of the request together
            answer, environment = actor.answer(request)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(json.dumps(asdict(answer)).encode())
            connection.send_bytes(environment)
    except (EOFError, OSError):
        worker.leave()
