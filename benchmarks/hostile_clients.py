"""The service under clients that mean it no good, among others that only want an answer.

    python benchmarks/hostile_clients.py                     five minutes of 32 clients, of the embedded model
    python benchmarks/hostile_clients.py --seconds 30 --clients 8 --batch-invariant

Other options are those of `pellucid serve`.

A fifth of the clients hang up on every request, in all manners; the others ask, one time in three for what must be
refused, or is odd. Prints requests by what came of them, the memory of the service over time, and greedy answers that
differ from those given alone. Exit status 1 where a request came to another end than it should, or rows stay behind;
greedy answers are counted and do not matter to it. On a machine that does other work besides: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

CHAT, TEXT, GROUP = "/v1/chat/completions", "/v1/completions", "/group"
THINGS = ("rain", "bread", "stones", "Paris", "ants", "iron", "sleep", "chess", "salt", "wind", "trees", "clocks")
QUESTIONS = [
    *(f"What is {a} {sign} {b}?" for a, b in ((3, 4), (17, 5), (8, 8), (60, 7)) for sign in "+-*"),
    *(f"Say something about {thing}." for thing in THINGS),
]
STORY = {"max_tokens": 400}
SECONDS = 180.0
"""For any answer: beyond the service's own time-out, so that this one is never the reason."""


class Case(NamedTuple):
    """A request, and the statuses that it may have."""

    name: str
    body: dict[str, object] | str
    expected: int = 400
    path: str = CHAT
    headers: tuple[tuple[str, str], ...] = ()


def asking(content: str, **settings: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16} | settings


HALF = '{"messages": [{"role": "user", "content": "\\ud83d"}]}'
HOSTILE = (
    Case("empty prompt", {"prompt": "", "max_tokens": 4}, path=TEXT),
    Case("top_p 1e-46", asking("hello", top_p=1e-46)),
    Case("temperature 1e-40", asking("hello", temperature=1e-40)),
    Case("stop of 150 kB", asking("hello", stop="x" * 150_000)),
    Case("half a character", HALF),
    Case("half a character as model", '{"model": "\\ud83d", "messages": [{"role": "user", "content": "a"}]}'),
    Case("prompt of 900 kB", asking("a b" * 300_000)),
    Case("body of 3 MB", asking("a" * 3_000_000), 413),
    Case("nested arrays", '{"messages": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    Case("another host", asking("hello"), headers=(("Host", "evil.example.com"),)),
    Case("another origin", asking("hello"), 403, headers=(("Origin", "https://evil.example.com"),)),
    Case("no such path", asking("hello"), 404, path="/v1/embeddings"),
    Case("too many tokens", asking("hello", max_tokens=10**9)),
    # Odd, and served:
    Case(
        "four stops that nearly match", asking("Count: 1 2 3", stop=["1 2 3 4 5 6 7", "  ", "9" * 256, "\n\n\n"]), 200
    ),
    Case("the least temperature", asking("hello", temperature=1e-6), 200),
    Case("the least top_p", asking("hello", top_p=1e-6, n=2), 200),
    Case("the highest temperature", asking("hello", temperature=10, n=4), 200),
    Case("many rows", asking("hello", n=8), 200),
    Case("a long prompt", asking("one two three four " * 200), 200),
    Case("a group", {"question": "What is 3 + 4?", "group_size": 4, "max_tokens": 16}, 200, path=GROUP),
)


@dataclass
class Storm:
    """What has happened so far."""

    url: str
    model: str
    alone: dict[str, str] = field(default_factory=dict)
    """Greedy answers, each given while nobody else asked."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(what was asked, how it ended)."""
    failures: list[str] = field(default_factory=list)
    greedy: Counter[str] = field(default_factory=Counter)
    """Answers by question that differ from those given alone."""

    def connection(self) -> HTTPConnection:
        return HTTPConnection(self.url.removeprefix("http://"), timeout=SECONDS)

    def asked(self, case: Case) -> tuple[int, str]:
        """Status and body."""
        connection, headers = self.connection(), {"Content-Type": "application/json", **dict(case.headers)}
        try:
            connection.request("POST", case.path, encoded(case.body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def health(self) -> dict[str, float]:
        connection = self.connection()
        try:
            connection.request("GET", "/health")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def tried(self, case: Case, right: Callable[[str], bool]) -> str:
        """The body, where it came to the end that it should."""
        try:
            status, body = self.asked(case)
        except (OSError, HTTPException) as error:
            status, body = 0, f"{type(error).__name__}: {error}"
        self.outcomes[case.name, str(status or body)] += 1
        if status == case.expected and right(body):
            return body
        self.failures.append(f"{case.name}: {status} {body[:300]}")
        return ""

    def greedy_answer(self, question: str, stream: bool) -> str:
        body = asking(question, temperature=0, stream=stream, model=self.model)
        case = Case("greedy, streamed" if stream else "greedy", body, 200)
        told = self.tried(case, lambda body: not stream or body.endswith("data: [DONE]\n\n"))
        return streamed_text(told) if stream else whole_text(told)


def encoded(body: dict[str, object] | str) -> bytes:
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def whole_text(body: str) -> str:
    return json.loads(body)["choices"][0]["message"]["content"] if body else ""


def streamed_text(body: str) -> str:
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def patient_client(storm: Storm, number: int, until: float) -> None:
    """Asks, waits, compares; one time in three asks for what must be refused, or is odd."""
    random = Random(f"patient {number}")
    while time.monotonic() < until:
        if random.random() < 1 / 3:
            case = random.choice(HOSTILE)
            storm.tried(
                case, lambda body, case=case: case.expected == 200 or bool(json.loads(body)["error"]["message"])
            )
            continue
        question = random.choice(list(storm.alone))
        answer = storm.greedy_answer(question, stream=random.random() < 0.5)
        storm.greedy[question] += answer != storm.alone[question]


def client_that_hangs_up(storm: Storm, number: int, until: float) -> None:
    """In the middle of the headers, of the body, or of what it is answered; streamed or not."""
    random = Random(f"leaves {number}")
    while time.monotonic() < until:
        path, body = random.choice(
            [
                (CHAT, asking("Tell me a story.", n=4, **STORY)),
                (CHAT, asking("Tell me a story.", n=4, stream=True, **STORY)),
                (TEXT, {"prompt": "Once upon a time", "stream": True, **STORY}),
                (GROUP, {"question": "Tell me a story.", "group_size": 4, **STORY}),
            ]
        )
        data = encoded(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        connection = storm.connection()
        try:
            connection.connect()
            connection.sock.sendall(whole[: random.choice([20, len(whole) - 5, *[len(whole)] * 4])])
            time.sleep(min(random.expovariate(1.0), max(0.0, until - time.monotonic())))
            storm.outcomes["hangs up", "gone"] += 1
        except OSError as error:
            storm.failures.append(f"hangs up: {type(error).__name__}: {error}")
        finally:
            connection.close()


def memory_of(pid: int, until: float, every: float) -> list[float]:
    """GB resident, now and from time to time."""
    found = []
    while True:
        found.append(psutil.Process(pid).memory_info().rss / 1e9)
        if time.monotonic() > until:
            return found
        time.sleep(every)


def rage(storm: Storm, pid: int, clients: int, seconds: float) -> tuple[list[float], dict[str, float]]:
    """The memory over time, and what the service says of itself when all are gone."""
    storm.alone = {question: storm.greedy_answer(question, stream=False) for question in QUESTIONS}
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(clients + 1) as pool:
        memory = pool.submit(memory_of, pid, until, seconds / 10)
        for number in range(clients):
            pool.submit(
                client_that_hangs_up if number % 5 == 0 else patient_client, storm, number, until
            ).add_done_callback(
                lambda done: done.exception() and storm.failures.append(f"this program: {done.exception()!r}")
            )
    facts, patience = storm.health(), time.monotonic() + 30
    while facts["rows"] + facts["waiting"] and time.monotonic() < patience:
        time.sleep(0.2)
        facts = storm.health()
    if facts["rows"] + facts["waiting"]:
        storm.failures.append(f"rows are left behind: {facts}")
    return memory.result(), facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8019)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    options, of_service = parser.parse_known_args()
    storm = Storm(f"http://127.0.0.1:{options.port}", "hostile")
    with tempfile.TemporaryDirectory() as folder:
        place = ["--name", "hostile", "--port", options.port, "--folder", folder]
        service("start", options.model, *place, *of_service)
        try:
            pid = json.loads((Path(folder) / "serve.pid").read_text())["pid"]
            memory, facts = rage(storm, pid, options.clients, options.seconds)
        finally:
            service("stop", "--folder", folder)
    print(report(storm, memory, facts))
    sys.exit(bool(storm.failures))


def service(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pellucid", "serve", *map(str, arguments)], check=True)


def report(storm: Storm, memory: list[float], facts: dict[str, float]) -> str:
    rows = [f"| {name} | {end} | {count} |" for (name, end), count in sorted(storm.outcomes.items())]
    differ = sum(storm.greedy.values())
    asked = sum(count for (name, _), count in storm.outcomes.items() if name.startswith("greedy")) - len(storm.alone)
    return "\n".join(
        [
            "| what was asked | status | requests |",
            "|---|---|---|",
            *rows,
            f"\nresident, GB: {' '.join(f'{gb:.2f}' for gb in memory)}",
            f"greedy answers that differ from those given alone: {differ} of {asked},"
            f" of {sum(map(bool, storm.greedy.values()))} of {len(storm.alone)} questions",
            f"at the end: {json.dumps(facts)}",
            *(f"FAILED {failure}" for failure in storm.failures[:20]),
            f"{len(storm.failures)} of {sum(storm.outcomes.values())} requests came to another end than they should",
        ]
    )


if __name__ == "__main__":
    main()
