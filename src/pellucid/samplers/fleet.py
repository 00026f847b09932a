"""Sampler servers as one engine: who gets which rows, and what becomes of them when a server goes or comes back.

Threads ask the servers only while there are rows or weights to bring. What a server has not answered when it falls
silent goes to the others; what it answers later is dropped.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pellucid.machine.harmless import harmless
from pellucid.samplers.adapters import RefusedError
from pellucid.samplers.remote import POLL, START, GoneError, NonsenseError, Remote, Row, SmallError
from pellucid.samplers.talks import Row as TalkRow
from pellucid.samplers.vllm_engine import Said

AGAIN = 2.0
"""Seconds until a server that is gone is tried again."""
SELDOM = 5
"""How many times this is doubled for a server that sends nonsense."""
TOLD = 30.0
"""Seconds until it is said again that nobody answers."""


@dataclass(eq=False)
class Server:
    """A server, and what it was given."""

    remote: Remote
    up: bool = False
    """Whether it has the present weights, and has proved it."""
    reason: str = ""
    """Why it is not up, or is doubted."""
    nonsense: int = 0
    """How many times in a row it has sent nonsense: then it is doubted until it answers a row, whatever its weights."""
    dealt: list[int] = field(default_factory=list)
    """Rows that it is asked for next."""
    sent: set[int] = field(default_factory=set)
    """Rows that it was asked for."""

    @property
    def load(self) -> int:
        return len(self.dealt) + len(self.sent)


class Fleet:
    """Servers as one engine: `ask`, then `step` until nothing is `asked`, then `drop`, behind which no thread runs."""

    def __init__(self, urls: Iterable[str], timeout: float, bring: Callable[[Remote], None]) -> None:
        """bring: gives a server the present weights and proves them."""
        self.servers = [Server(Remote(url, timeout)) for url in urls]
        self.bring = bring
        self.size = 1
        """Rows of a group, which stay together."""
        self.rows: dict[int, tuple[Any, Row]] = {}
        """Those that have not been answered, by number, with their keys."""
        self.longest = 0
        """How many tokens prompt and answer may have: what all those take who were there first."""
        self.homes: dict[int, Server] = {}
        """Who has the prompts of a group in its cache."""
        self.said: list[Said] = []
        self.numbers = itertools.count()
        self.news = threading.Condition()
        self.pool: ThreadPoolExecutor | None = None
        self.threads: list[Future[None]] = []
        self.over = threading.Event()
        self.told = -TOLD
        """When it was said that nobody answers."""

    def renew(self) -> None:
        """Bring the present weights to those who answer, or to all where none does. Wait until one has them."""
        while True:
            tried = [server for server in self.servers if server.remote.ready] or self.servers
            for server in tried:
                server.remote.begin()
            with ThreadPoolExecutor(len(tried)) as pool:
                list(pool.map(self._renewed, tried))
            if up := [server for server in self.servers if server.up]:
                self.longest = self.longest or min(server.remote.longest for server in up)
                return
            self._tell()
            time.sleep(AGAIN)

    @property
    def asked(self) -> Collection[Any]:
        """Rows that `step` has not returned yet."""
        with self.news:
            return [*self.rows, *self.said]

    def ask(self, key: Any, ids: Sequence[int], most: int, temperature: float, seed: int) -> None:
        """Ask for up to `most` tokens behind these. key: the number of the row, or the row of a conversation."""
        with self.news:
            number = next(self.numbers)
            self.rows[number] = key, Row(number, list(ids), most, temperature, seed)
            self._deal([number])
        if not self.threads:
            self._start()

    def step(self) -> list[Said]:
        """Return the answers that have come; wait a moment for the first."""
        with self.news:
            self.news.wait_for(lambda: self.said or any(thread.done() for thread in self.threads), POLL)
            for thread in self.threads:
                if thread.done():
                    thread.result()  # it has failed
            said, self.said = self.said, []
        if not any(server.up for server in self.servers):
            self._tell()
        return said

    def drop(self) -> None:
        """Forget what was asked and has not been answered, and end all threads."""
        self.over.set()
        with self.news:
            self.news.notify_all()
        for server in self.servers:
            server.remote.end()
        if self.pool:
            self.pool.shutdown()
        for server in self.servers:
            if server.sent:  # it goes on with them, until it gets weights
                server.up = False
            server.dealt, server.sent = [], set()
        self.rows, self.homes, self.said, self.pool, self.threads = {}, {}, [], None, []

    # ------------------------------------------------------------ who gets what

    def _deal(self, numbers: Iterable[int]) -> None:
        """Give rows to whoever has their group; a group that nobody has to whoever has least to do."""
        up = [server for server in self.servers if server.up]
        for number in numbers if up else ():
            group = self._group(self.rows[number][0])
            home = self.homes.get(group)
            if home is None or not home.up:
                home = self.homes[group] = min(up, key=lambda server: server.load)
            home.dealt.append(number)
        self.news.notify_all()

    def _group(self, key: Any) -> int:
        return (key.number if isinstance(key, TalkRow) else key) // self.size

    def check_room(self, remote: Remote) -> None:
        """SmallError where a server takes shorter rows than those who were there first."""
        if remote.longest < self.longest:
            raise SmallError(
                f"it takes {remote.longest} tokens a row, and this run counts on {self.longest}: start it with a larger"
                " --cache-gb"
            )

    def _rise(self, server: Server) -> None:
        with self.news:
            server.up = True
            given = {number for other in self.servers for number in (*other.dealt, *other.sent)}
            self._deal([number for number in self.rows if number not in given])
        if not server.nonsense:
            self._trust(server)

    def _trust(self, server: Server) -> None:
        if server.reason:
            print(harmless(f"! {server.remote.url} is back, with the present weights"), flush=True)
        server.reason, server.nonsense = "", 0

    def _fall(self, server: Server, error: GoneError | RefusedError) -> None:
        reason = str(error)
        if isinstance(error, NonsenseError):
            server.nonsense += 1
        with self.news:
            rows = [*server.sent, *server.dealt]
            server.up, server.dealt, server.sent = False, [], set()
            server.remote.ready = False
            self._deal(sorted(rows))
        if not server.reason or (isinstance(error, SmallError | RefusedError) and server.reason != reason):
            others = "go to the others" if any(other.up for other in self.servers) else "wait"
            lost = f": its {len(rows)} rows {others}" if rows else ""
            print(harmless(f"! {server.remote.url}: {reason}{lost}"), flush=True)
        server.reason = reason

    def _tell(self) -> None:
        if time.monotonic() - self.told > TOLD:
            why = "; ".join(f"{server.remote.url}: {server.reason or 'not yet'}" for server in self.servers)
            waiting = f"{len(self.rows)} rows wait" if self.rows else "the weights wait"
            line = f"! no sampler server answers, {waiting} ({why}): {START.format('PORT')} starts one"
            print(harmless(line), flush=True)
            self.told = time.monotonic()

    # ------------------------------------------------------------ a thread for each server

    def _start(self) -> None:
        self.over.clear()
        self.pool = ThreadPoolExecutor(len(self.servers))
        for server in self.servers:
            server.remote.begin()
            self.threads.append(self.pool.submit(self._serve, server))

    def _renewed(self, server: Server) -> None:
        try:
            self.bring(server.remote)
            self._rise(server)
        except GoneError as error:
            self._fall(server, error)

    def _serve(self, server: Server) -> None:
        while not self.over.is_set():
            try:
                if not server.up:
                    self.bring(server.remote)
                    self._rise(server)
                while not self.over.is_set():
                    self._exchange(server)
            except (GoneError, RefusedError) as error:
                if not self.over.is_set():
                    self._fall(server, error)
                    self.over.wait(AGAIN * 2 ** min(server.nonsense, SELDOM))

    def _exchange(self, server: Server) -> None:
        """Send a server the rows that it was dealt, and take what it has sampled."""
        with self.news:
            self.news.wait_for(lambda: server.load or self.over.is_set())
            dealt, server.dealt = server.dealt, []
            server.sent.update(dealt)
            rows = [self.rows[number][1] for number in dealt]
        if self.over.is_set():
            return
        spoken = server.remote.step(rows)
        if spoken and server.nonsense:
            self._trust(server)
        with self.news:
            for number, tokens, logprobs in spoken:
                if number in server.sent:
                    server.sent.remove(number)
                    self.said.append(Said(self.rows.pop(number)[0], tokens, logprobs))
            self.news.notify_all()
