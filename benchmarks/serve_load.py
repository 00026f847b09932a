"""Measures the tokens per second of `pellucid serve` with one client and with many, and counts failed requests.

    python benchmarks/serve_load.py                       starts a service of the embedded model
    python benchmarks/serve_load.py --clients 32 --seconds 60

Clients use the official openai library. Each sends its next request as soon as the last one is answered.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import nan
from statistics import median
from typing import NamedTuple

import openai


class Load(NamedTuple):
    """The requests of one client, or of all clients of a measurement."""

    requests: int
    tokens: int
    seconds: float
    waits: list[float]
    """Seconds until each answer."""
    failures: Counter[str]
    """Failed requests by the name of the exception."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_service("start", options.model, "--port", str(options.port), "--folder", folder)
        try:
            print("| clients | requests | tokens a second | median wait, s | 95% of waits, s | failures |")
            print("|---|---|---|---|---|---|")
            single = measure_load(options, 1, options.seconds / 3)
            many = measure_load(options, options.clients, options.seconds)
            if single.tokens:
                ratio = many.tokens / many.seconds / (single.tokens / single.seconds)
                print(f"\n{ratio:.1f} times the tokens per second of one client")
        finally:
            run_service("stop", "--folder", folder)
    sys.exit(bool(single.failures or many.failures))


def run_service(*arguments: str) -> None:
    """Run a subcommand of `pellucid serve`."""
    subprocess.run([sys.executable, "-m", "pellucid", "serve", *arguments], check=True)


def measure_load(options: argparse.Namespace, clients: int, seconds: float) -> Load:
    """Run the clients at once for some seconds, and print a row of the table."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        loads = list(pool.map(lambda i: run_client(options, i, start + seconds), range(clients)))
    elapsed = time.perf_counter() - start
    waits = [wait for load in loads for wait in load.waits]
    failures = sum((load.failures for load in loads), Counter())
    total = Load(len(waits), sum(load.tokens for load in loads), elapsed, waits, failures)
    wait, slow = (median(waits), sorted(waits)[int(0.95 * len(waits))]) if waits else (nan, nan)
    cells = [f"{clients}", f"{total.requests}", f"{total.tokens / elapsed:.0f}", f"{wait:.2f}", f"{slow:.2f}"]
    print(f"| {' | '.join(cells)} | {dict(failures) or 'none'} |", flush=True)
    return total


def run_client(options: argparse.Namespace, number: int, until: float) -> Load:
    """Send one request after another until a time on the performance counter."""
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{options.port}/v1", api_key="none", max_retries=0)
    tokens, waits, failures = 0, [], Counter()
    while (start := time.perf_counter()) < until:
        question = f"What is {number} + {len(waits)}? Explain in a sentence."
        try:
            answer = api.chat.completions.create(
                model=options.model, messages=[{"role": "user", "content": question}], max_tokens=options.tokens
            )
        except openai.OpenAIError as error:
            failures[type(error).__name__] += 1
            time.sleep(0.1)
            continue
        tokens += answer.usage.completion_tokens if answer.usage else 0
        waits.append(time.perf_counter() - start)
    return Load(len(waits), tokens, 0.0, waits, failures)


if __name__ == "__main__":
    main()
