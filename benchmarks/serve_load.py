"""The service under load: one client for a while, then many at once; tokens a second of both, and every failure.

    python benchmarks/serve_load.py                       starts a service of the embedded model for itself
    python benchmarks/serve_load.py --clients 32 --seconds 60

Each client sends its next request when its last is answered, through the official openai client.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles
from typing import NamedTuple

import openai


class Load(NamedTuple):
    requests: int
    tokens: int
    seconds: float
    waits: list[float]
    failures: Counter[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = ["--folder", folder]
        service("start", options.model, "--port", str(options.port), *where)
        try:
            print("| clients | requests | tokens a second | median wait, s | 95% of waits, s | failures |")
            print("|---|---|---|---|---|---|")
            alone = measured(options, 1, options.seconds / 3)
            crowd = measured(options, options.clients, options.seconds)
            print(
                f"\n{crowd.tokens / crowd.seconds / (alone.tokens / alone.seconds):.1f} times the tokens of one client"
            )
        finally:
            service("stop", *where)
    sys.exit(bool(alone.failures or crowd.failures))


def service(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pellucid", "serve", *arguments], check=True)


def measured(options: argparse.Namespace, clients: int, seconds: float) -> Load:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        loads = list(pool.map(lambda i: client(options, i, start + seconds), range(clients)))
    elapsed = time.perf_counter() - start
    waits = [wait for load in loads for wait in load.waits]
    failures = sum((load.failures for load in loads), Counter())
    whole = Load(len(waits), sum(load.tokens for load in loads), elapsed, waits, failures)
    slow = quantiles(waits, n=20)[-1] if len(waits) > 1 else waits[0]
    cells = [f"{clients}", f"{whole.requests}", f"{whole.tokens / elapsed:.0f}", f"{median(waits):.2f}", f"{slow:.2f}"]
    print(f"| {' | '.join(cells)} | {dict(failures) or 'none'} |", flush=True)
    return whole


def client(options: argparse.Namespace, number: int, until: float) -> Load:
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
