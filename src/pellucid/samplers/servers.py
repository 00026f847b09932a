"""vLLM on other machines: rows spread over servers, each push of weights proved for every one of them.

Threads ask the servers only while there are rows or weights to bring. A server that comes back is given what was pushed
last: the policy's weights, or a copy where those change while rows are drawn (`ahead`). What a server has not answered
when it falls silent goes to the others; what it answers later is dropped.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pellucid.samplers.freshness import Freshness
from pellucid.samplers.remote import POLL, START, GoneError, Remote, Row, described
from pellucid.samplers.talks import Row as TalkRow
from pellucid.samplers.vllm import VLLM, fixed_text, length_of_text, scored, weights_of
from pellucid.samplers.vllm_engine import Said
from pellucid.types import Group, Prompt, Sampling

AGAIN = 2.0
"""Seconds until a server that is gone is tried again."""
READ = 256
"""Tokens of the fixed text at most: a block of the cache and more, as large as blocks are."""
TOLD = 30.0
"""Seconds until it is said again that nobody answers."""


@dataclass(eq=False)
class Server:
    """A server, and what it was given."""

    remote: Remote
    up: bool = False
    """Whether it has the present weights, and has proved it."""
    reason: str = ""
    """Why it is not up."""
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

    @property
    def longest(self) -> int:
        """How long prompt and answer may be, for all those who are up."""
        return min(server.remote.longest for server in self.servers if server.remote.longest)

    def renew(self) -> None:
        """Bring the present weights to those who answer, or to all where none does. Wait until one has them."""
        while True:
            tried = [server for server in self.servers if server.remote.ready] or self.servers
            for server in tried:
                server.remote.begin()
            with ThreadPoolExecutor(len(tried)) as pool:
                list(pool.map(self._renewed, tried))
            if any(server.up for server in self.servers):
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

    def _rise(self, server: Server) -> None:
        with self.news:
            server.up = True
            given = {number for other in self.servers for number in (*other.dealt, *other.sent)}
            self._deal([number for number in self.rows if number not in given])
        if server.reason:
            print(f"! {server.remote.url} is back, with the present weights", flush=True)
        server.reason = ""

    def _fall(self, server: Server, reason: str) -> None:
        with self.news:
            rows = [*server.sent, *server.dealt]
            server.up, server.dealt, server.sent = False, [], set()
            server.remote.ready = False
            self._deal(sorted(rows))
        if not server.reason:
            others = "go to the others" if any(other.up for other in self.servers) else "wait"
            lost = f": its {len(rows)} rows {others}" if rows else ""
            print(f"! {server.remote.url}: {reason}{lost}", flush=True)
        server.reason = reason

    def _tell(self) -> None:
        if time.monotonic() - self.told > TOLD:
            why = "; ".join(f"{server.remote.url}: {server.reason or 'not yet'}" for server in self.servers)
            waiting = f"{len(self.rows)} rows wait" if self.rows else "the weights wait"
            print(f"! no sampler server answers, {waiting} ({why}): {START.format('PORT')} starts one", flush=True)
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
        except GoneError as error:
            self._fall(server, str(error))
        else:
            self._rise(server)

    def _serve(self, server: Server) -> None:
        while not self.over.is_set():
            try:
                if not server.up:
                    self.bring(server.remote)
                    self._rise(server)
                while not self.over.is_set():
                    self._exchange(server)
            except GoneError as error:
                if not self.over.is_set():
                    self._fall(server, str(error))
                    self.over.wait(AGAIN)

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
        with self.news:
            for number, tokens, logprobs in spoken:
                if number in server.sent:
                    server.sent.remove(number)
                    self.said.append(Said(self.rows.pop(number)[0], tokens, logprobs))
            self.news.notify_all()


@dataclass
class Servers(VLLM):
    """vLLM's rows and conversations, by servers."""

    urls: Sequence[str] = ()
    timeout: float = 120.0
    """Seconds without an answer after which a server hangs."""
    ahead: bool = False
    """Whether the policy changes while rows are drawn."""
    fleet: Fleet | None = None

    def __post_init__(self) -> None:
        self.alone = threading.Lock()
        """One thread at a time reads the policy."""
        self.model = b""
        self.weights: dict[str, Tensor] | None = None
        """What was pushed last, where it is kept."""
        self.right = torch.empty(0)
        """The scorer's log-probs of the fixed text, by what was pushed last."""

    def sync(self, policy: Any, version: int = 0) -> None:
        """UserError where a server does not compute with the weights that were pushed."""
        self.policy, self.version, self.model = policy, version, described(policy)
        self.fleet = self.fleet or Fleet(self.urls, self.timeout, self._bring)
        self.weights = weights_of(policy, copy=self.ahead)
        self.right = scored(policy, fixed_text(policy, min(READ, policy.context_length - 1)))
        try:
            self.fleet.renew()
        finally:
            if not self.ahead:
                self.weights = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        self._engine.size = sampling.n
        return super().generate(prompts, sampling)

    @property
    def _engine(self) -> Fleet:
        assert self.fleet
        return self.fleet

    def _bring(self, remote: Remote) -> None:
        """Give a server what was pushed last, and prove that it computes with that."""
        held = remote.version
        remote.load(self.model)
        if not held or remote.version != held:  # another process, or somebody else's weights
            remote.freshness = Freshness()
        with self.alone:
            weights = self.weights or weights_of(self.policy)
        ids = fixed_text(self.policy, min(READ, length_of_text(remote)))
        if remote.version:
            remote.read(ids)  # so that it would be in a cache which is not cleared
        remote.push(weights)
        remote.freshness.check(remote, weights, ids, self.right[: len(ids) - 1])
