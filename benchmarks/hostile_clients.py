"""Checks that `pellucid serve` survives clients that hang up or send invalid requests, and still answers the others.

    python benchmarks/hostile_clients.py                     five minutes of 32 clients, with the embedded model
    python benchmarks/hostile_clients.py --seconds 30 --clients 8 --batch-invariant

Other options are passed to `pellucid serve`.

A fifth of the clients hang up on every request. The others ask questions, and send an invalid or unusual request one
time in three. Prints requests by outcome, the memory of the service over time, and the number of greedy answers that
differ from those of an idle service. The exit status is 1 if a request has an unexpected outcome, or if the service has
rows left at the end; greedy answers that differ are only counted. Set OMP_NUM_THREADS=1 on a machine that is not idle.
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
TOPICS = ("rain", "bread", "stones", "Paris", "ants", "iron", "sleep", "chess", "salt", "wind", "trees", "clocks")
QUESTIONS = [
    *(f"What is {a} {sign} {b}?" for a, b in ((3, 4), (17, 5), (8, 8), (60, 7)) for sign in "+-*"),
    *(f"Say something about {topic}." for topic in TOPICS),
]
STORY = {"max_tokens": 400}
"""The settings of a long answer."""
TIMEOUT = 180.0
"""Seconds to wait for an answer. The service gives up sooner."""


class Case(NamedTuple):
    """A request, and the status that the service should answer with."""

    name: str
    body: dict[str, object] | str
    expected: int = 400
    path: str = CHAT
    headers: tuple[tuple[str, str], ...] = ()


def make_body(content: str, **settings: object) -> dict[str, object]:
    """Return the body of a chat request with one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16} | settings


CASES = (
    Case("empty prompt", {"prompt": "", "max_tokens": 4}, path=TEXT),
    Case("top_p 1e-46", make_body("hello", top_p=1e-46)),
    Case("temperature 1e-40", make_body("hello", temperature=1e-40)),
    Case("stop of 150 kB", make_body("hello", stop="x" * 150_000)),
    Case("half a character", '{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
    Case("half a character as model", '{"model": "\\ud83d", "messages": [{"role": "user", "content": "a"}]}'),
    Case("prompt of 900 kB", make_body("a b" * 300_000)),
    Case("body of 3 MB", make_body("a" * 3_000_000), 413),
    Case("nested arrays", '{"messages": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    Case("another host", make_body("hello"), headers=(("Host", "evil.example.com"),)),
    Case("another origin", make_body("hello"), 403, headers=(("Origin", "https://evil.example.com"),)),
    Case("no such path", make_body("hello"), 404, path="/v1/embeddings"),
    Case("too many tokens", make_body("hello", max_tokens=10**9)),
    # Unusual but valid:
    Case(
        "four stops that nearly match",
        make_body("Count: 1 2 3", stop=["1 2 3 4 5 6 7", "  ", "9" * 256, "\n\n\n"]),
        200,
    ),
    Case("the least temperature", make_body("hello", temperature=1e-6), 200),
    Case("the least top_p", make_body("hello", top_p=1e-6, n=2), 200),
    Case("the highest temperature", make_body("hello", temperature=10, n=4), 200),
    Case("many rows", make_body("hello", n=8), 200),
    Case("a long prompt", make_body("one two three four " * 200), 200),
    Case("a group", {"question": "What is 3 + 4?", "group_size": 4, "max_tokens": 16}, 200, path=GROUP),
)


@dataclass
class StressTest:
    """A service under test, and the outcomes of all requests so far."""

    url: str
    model: str
    baseline: dict[str, str] = field(default_factory=dict)
    """The greedy answer of an idle service to each question."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by the name of the case, and the status or error."""
    failures: list[str] = field(default_factory=list)
    mismatches: Counter[str] = field(default_factory=Counter)
    """Greedy answers by question that differ from the baseline."""

    def make_connection(self) -> HTTPConnection:
        return HTTPConnection(self.url.removeprefix("http://"), timeout=TIMEOUT)

    def send(self, case: Case) -> tuple[int, str]:
        """Return the status and the body of the answer."""
        connection, headers = self.make_connection(), {"Content-Type": "application/json", **dict(case.headers)}
        try:
            connection.request("POST", case.path, encode_body(case.body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def get_health(self) -> dict[str, float]:
        connection = self.make_connection()
        try:
            connection.request("GET", "/health")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def check(self, case: Case, is_right: Callable[[str], bool]) -> str:
        """Send a request, and record the outcome. Return the body, or "" if it is not the expected one."""
        try:
            status, body = self.send(case)
        except (OSError, HTTPException) as error:
            status, body = 0, f"{type(error).__name__}: {error}"
        self.outcomes[case.name, str(status or body)] += 1
        if status == case.expected and is_right(body):
            return body
        self.failures.append(f"{case.name}: {status} {body[:300]}")
        return ""

    def get_greedy_answer(self, question: str, stream: bool) -> str:
        body = make_body(question, temperature=0, stream=stream, model=self.model)
        case = Case("greedy, streamed" if stream else "greedy", body, 200)
        answer = self.check(case, lambda body: not stream or body.endswith("data: [DONE]\n\n"))
        return read_stream(answer) if stream else read_completion(answer)


def encode_body(body: dict[str, object] | str) -> bytes:
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def read_completion(body: str) -> str:
    return json.loads(body)["choices"][0]["message"]["content"] if body else ""


def read_stream(body: str) -> str:
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def run_patient_client(test: StressTest, number: int, until: float) -> None:
    """Compare greedy answers with the baseline, and send one of CASES one time in three."""
    random = Random(f"patient {number}")
    while time.monotonic() < until:
        if random.random() < 1 / 3:
            case = random.choice(CASES)
            test.check(case, lambda body, case=case: case.expected == 200 or bool(json.loads(body)["error"]["message"]))
            continue
        question = random.choice(list(test.baseline))
        answer = test.get_greedy_answer(question, stream=random.random() < 0.5)
        test.mismatches[question] += answer != test.baseline[question]


def run_leaving_client(test: StressTest, number: int, until: float) -> None:
    """Hang up while the headers or the body are sent, or during the answer, which may be streamed."""
    random = Random(f"leaves {number}")
    while time.monotonic() < until:
        path, body = random.choice(
            [
                (CHAT, make_body("Tell me a story.", n=4, **STORY)),
                (CHAT, make_body("Tell me a story.", n=4, stream=True, **STORY)),
                (TEXT, {"prompt": "Once upon a time", "stream": True, **STORY}),
                (GROUP, {"question": "Tell me a story.", "group_size": 4, **STORY}),
            ]
        )
        data = encode_body(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        connection = test.make_connection()
        try:
            connection.connect()
            connection.sock.sendall(request[: random.choice([20, len(request) - 5, *[len(request)] * 4])])
            time.sleep(min(random.expovariate(1.0), max(0.0, until - time.monotonic())))
            test.outcomes["hangs up", "gone"] += 1
        except OSError as error:
            test.failures.append(f"hangs up: {type(error).__name__}: {error}")
        finally:
            connection.close()


def sample_memory(pid: int, until: float, every: float) -> list[float]:
    """Return the resident size of a process in GB, measured every so many seconds."""
    sizes = []
    while True:
        sizes.append(psutil.Process(pid).memory_info().rss / 1e9)
        if time.monotonic() > until:
            return sizes
        time.sleep(every)


def run_clients(test: StressTest, pid: int, clients: int, seconds: float) -> tuple[list[float], dict[str, float]]:
    """Return the memory of the service over time, and its health after all clients have left."""
    test.baseline = {question: test.get_greedy_answer(question, stream=False) for question in QUESTIONS}
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(clients + 1) as pool:
        memory = pool.submit(sample_memory, pid, until, seconds / 10)
        for number in range(clients):
            client = run_leaving_client if number % 5 == 0 else run_patient_client
            pool.submit(client, test, number, until).add_done_callback(
                lambda done: done.exception() and test.failures.append(f"this program: {done.exception()!r}")
            )
    health, deadline = test.get_health(), time.monotonic() + 30
    while health["rows"] + health["waiting"] and time.monotonic() < deadline:
        time.sleep(0.2)
        health = test.get_health()
    if health["rows"] + health["waiting"]:
        test.failures.append(f"the service still has rows: {health}")
    return memory.result(), health


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8019)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    options, serve_options = parser.parse_known_args()
    test = StressTest(f"http://127.0.0.1:{options.port}", "hostile")
    with tempfile.TemporaryDirectory() as folder:
        own_options = ["--name", "hostile", "--port", options.port, "--folder", folder]
        run_service("start", options.model, *own_options, *serve_options)
        try:
            pid = json.loads((Path(folder) / "serve.pid").read_text())["pid"]
            memory, health = run_clients(test, pid, options.clients, options.seconds)
        finally:
            run_service("stop", "--folder", folder)
    print(format_report(test, memory, health))
    sys.exit(bool(test.failures))


def run_service(*arguments: object) -> None:
    """Run a subcommand of `pellucid serve`."""
    subprocess.run([sys.executable, "-m", "pellucid", "serve", *map(str, arguments)], check=True)


def format_report(test: StressTest, memory: list[float], health: dict[str, float]) -> str:
    rows = [f"| {name} | {outcome} | {count} |" for (name, outcome), count in sorted(test.outcomes.items())]
    greedy = sum(count for (name, _), count in test.outcomes.items() if name.startswith("greedy")) - len(test.baseline)
    return "\n".join(
        [
            "| what was asked | status | requests |",
            "|---|---|---|",
            *rows,
            f"\nresident, GB: {' '.join(f'{gb:.2f}' for gb in memory)}",
            f"greedy answers that differ from those of an idle service: {sum(test.mismatches.values())} of {greedy},"
            f" to {sum(map(bool, test.mismatches.values()))} of {len(test.baseline)} questions",
            f"at the end: {json.dumps(health)}",
            *(f"FAILED {failure}" for failure in test.failures[:20]),
            f"{len(test.failures)} of {sum(test.outcomes.values())} requests had an unexpected outcome",
        ]
    )


if __name__ == "__main__":
    main()
