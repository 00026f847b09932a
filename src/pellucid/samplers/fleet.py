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

    client: Remote
    is_up: bool = False
    """Whether it has the present weights, and has proved it."""
    reason: str = ""
    """Why it is not up, or is doubted."""
    invalid_answers: int = 0
    """How many times in a row it has sent nonsense: then it is doubted until it answers a row, whatever its weights."""
    queued_rows: list[int] = field(default_factory=list)
    """Rows that it is asked for next."""
    sent_rows: set[int] = field(default_factory=set)
    """Rows that it was asked for."""

    @property
    def pending_count(self) -> int:
        return len(self.queued_rows) + len(self.sent_rows)


class Fleet:
    """Servers as one engine: `ask`, then `step` until nothing is `asked`, then `drop`, behind which no thread runs."""

    def __init__(self, urls: Iterable[str], timeout: float, update_server: Callable[[Remote], None]) -> None:
        """bring: gives a server the present weights and proves them."""
        self.servers = [Server(Remote(url, timeout)) for url in urls]
        self.update_server = update_server
        self.group_size = 1
        """Rows of a group, which stay together."""
        self.requests: dict[int, tuple[Any, Row]] = {}
        """Those that have not been answered, by number, with their keys."""
        self.max_length = 0
        """How many tokens prompt and answer may have: what all those take who were there first."""
        self.group_servers: dict[int, Server] = {}
        """Who has the prompts of a group in its cache."""
        self.answers: list[Said] = []
        self.request_numbers = itertools.count()
        self.condition = threading.Condition()
        self.executor: ThreadPoolExecutor | None = None
        self.futures: list[Future[None]] = []
        self.stopped = threading.Event()
        self.last_reminder = -TOLD
        """When it was said that nobody answers."""

    def update_weights(self) -> None:
        """Bring the present weights to those who answer, or to all where none does. Wait until one has them."""
        while True:
            tried = [server for server in self.servers if server.client.has_engine] or self.servers
            for server in tried:
                server.client.start()
            with ThreadPoolExecutor(len(tried)) as pool:
                list(pool.map(self._try_update, tried))
            if up := [server for server in self.servers if server.is_up]:
                self.max_length = self.max_length or min(server.client.max_length for server in up)
                return
            self._remind()
            time.sleep(AGAIN)

    @property
    def unfinished(self) -> Collection[Any]:
        """Rows that `step` has not returned yet."""
        with self.condition:
            return [*self.requests, *self.answers]

    def add_request(self, key: Any, ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> None:
        """Ask for up to `most` tokens behind these. key: the number of the row, or the row of a conversation."""
        with self.condition:
            number = next(self.request_numbers)
            self.requests[number] = key, Row(number, list(ids), max_tokens, temperature, seed)
            self._assign_rows([number])
        if not self.futures:
            self._start_threads()

    def step(self) -> list[Said]:
        """Return the answers that have come; wait a moment for the first."""
        with self.condition:
            self.condition.wait_for(lambda: self.answers or any(thread.done() for thread in self.futures), POLL)
            for thread in self.futures:
                if thread.done():
                    thread.result()  # it has failed
            said, self.answers = self.answers, []
        if not any(server.is_up for server in self.servers):
            self._remind()
        return said

    def abort_all(self) -> None:
        """Forget what was asked and has not been answered, and end all threads."""
        self.stopped.set()
        with self.condition:
            self.condition.notify_all()
        for server in self.servers:
            server.client.stop()
        if self.executor:
            self.executor.shutdown()
        for server in self.servers:
            if server.sent_rows:  # it goes on with them, until it gets weights
                server.is_up = False
            server.queued_rows, server.sent_rows = [], set()
        self.requests, self.group_servers, self.answers, self.executor, self.futures = {}, {}, [], None, []

    # ------------------------------------------------------------ who gets what

    def _assign_rows(self, numbers: Iterable[int]) -> None:
        """Give rows to whoever has their group; a group that nobody has to whoever has least to do."""
        up = [server for server in self.servers if server.is_up]
        for number in numbers if up else ():
            group = self._get_group(self.requests[number][0])
            home = self.group_servers.get(group)
            if home is None or not home.is_up:
                home = self.group_servers[group] = min(up, key=lambda server: server.pending_count)
            home.queued_rows.append(number)
        self.condition.notify_all()

    def _get_group(self, key: Any) -> int:
        return (key.number if isinstance(key, TalkRow) else key) // self.group_size

    def check_max_length(self, client: Remote) -> None:
        """SmallError where a server takes shorter rows than those who were there first."""
        if client.max_length < self.max_length:
            raise SmallError(
                f"it takes {client.max_length} tokens a row, and this run counts on {self.max_length}: start it with a larger"
                " --cache-gb"
            )

    def _mark_up(self, server: Server) -> None:
        with self.condition:
            server.is_up = True
            given = {number for other in self.servers for number in (*other.queued_rows, *other.sent_rows)}
            self._assign_rows([number for number in self.requests if number not in given])
        if not server.invalid_answers:
            self._clear_faults(server)

    def _clear_faults(self, server: Server) -> None:
        if server.reason:
            print(harmless(f"! {server.client.url} is back, with the present weights"), flush=True)
        server.reason, server.invalid_answers = "", 0

    def _mark_down(self, server: Server, error: GoneError | RefusedError) -> None:
        reason = str(error)
        if isinstance(error, NonsenseError):
            server.invalid_answers += 1
        with self.condition:
            rows = [*server.sent_rows, *server.queued_rows]
            server.is_up, server.queued_rows, server.sent_rows = False, [], set()
            server.client.has_engine = False
            self._assign_rows(sorted(rows))
        if not server.reason or (isinstance(error, SmallError | RefusedError) and server.reason != reason):
            others = "go to the others" if any(other.is_up for other in self.servers) else "wait"
            lost = f": its {len(rows)} rows {others}" if rows else ""
            print(harmless(f"! {server.client.url}: {reason}{lost}"), flush=True)
        server.reason = reason

    def _remind(self) -> None:
        if time.monotonic() - self.last_reminder > TOLD:
            why = "; ".join(f"{server.client.url}: {server.reason or 'not yet'}" for server in self.servers)
            waiting = f"{len(self.requests)} rows wait" if self.requests else "the weights wait"
            line = f"! no sampler server answers, {waiting} ({why}): {START.format('PORT')} starts one"
            print(harmless(line), flush=True)
            self.last_reminder = time.monotonic()

    # ------------------------------------------------------------ a thread for each server

    def _start_threads(self) -> None:
        self.stopped.clear()
        self.executor = ThreadPoolExecutor(len(self.servers))
        for server in self.servers:
            server.client.start()
            self.futures.append(self.executor.submit(self._run_server, server))

    def _try_update(self, server: Server) -> None:
        try:
            self.update_server(server.client)
            self._mark_up(server)
        except GoneError as error:
            self._mark_down(server, error)

    def _run_server(self, server: Server) -> None:
        while not self.stopped.is_set():
            try:
                if not server.is_up:
                    self.update_server(server.client)
                    self._mark_up(server)
                while not self.stopped.is_set():
                    self._exchange_rows(server)
            except (GoneError, RefusedError) as error:
                if not self.stopped.is_set():
                    self._mark_down(server, error)
                    self.stopped.wait(AGAIN * 2 ** min(server.invalid_answers, SELDOM))

    def _exchange_rows(self, server: Server) -> None:
        """Send a server the rows that it was dealt, and take what it has sampled."""
        with self.condition:
            self.condition.wait_for(lambda: server.pending_count or self.stopped.is_set())
            dealt, server.queued_rows = server.queued_rows, []
            server.sent_rows.update(dealt)
            rows = [self.requests[number][1] for number in dealt]
        if self.stopped.is_set():
            return
        spoken = server.client.step(rows)
        if spoken and server.invalid_answers:
            self._clear_faults(server)
        with self.condition:
            for number, tokens, logprobs in spoken:
                if number in server.sent_rows:
                    server.sent_rows.remove(number)
                    self.answers.append(Said(self.requests.pop(number)[0], tokens, logprobs))
            self.condition.notify_all()
