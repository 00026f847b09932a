"""llama.cpp's server as a contender of bench.py: a slot for each completion, and a request for each group.

It is asked for no log-probs, which the others compute: it would sort the vocabulary for every token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import turns

ROOM = 128
"""Tokens of a prompt, at most."""
PATIENCE = 120
"""Seconds in which the server must have loaded its weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["sample"])
    parser.add_argument("contender", choices=["llama-server"])
    parser.add_argument("--server", required=True)
    parser.add_argument("--weights", required=True, help="a GGUF file: its dtype is that of the products")
    parser.add_argument("--chats", required=True, help="JSON: prompts of each unit, as messages")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    turns.begin()
    units = json.loads(Path(options.chats).read_text())
    rows = len(units[0]) * options.group
    process, url = served(options, rows)
    try:
        wait_for(process, url)
        with ThreadPoolExecutor(len(units[0])) as clients:

            def unit(i: int) -> dict[str, float]:
                groups = clients.map(lambda chat: asked(url, chat, options, i), units[i % len(units)])
                return {"tokens": sum(completion["tokens_predicted"] for group in groups for completion in group)}

            turns.take(unit, dtype="bfloat16")
        turns.answer(peak_gb=peak_gb(process.pid))
    finally:
        process.kill()


def served(options: argparse.Namespace, rows: int) -> tuple[subprocess.Popen[bytes], str]:
    """The server with as many slots as there are completions, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    settings = {
        "model": options.weights,
        "port": port,
        "parallel": rows,
        "ctx-size": rows * (ROOM + options.tokens),
        "threads": threads,
        "threads-batch": threads,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [options.server, *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509
    return process, f"http://127.0.0.1:{port}"


def die_with_parent() -> None:
    """However this process ends, its server ends with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    """Until it answers. SystemExit where it ended or takes too long."""
    for _ in range(PATIENCE * 10):
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with status {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"llama-server is not ready after {PATIENCE} s")


def asked(url: str, chat: list[dict[str, str]], options: argparse.Namespace, unit: int) -> list[dict[str, Any]]:
    """The completions of one prompt: drawn from the whole distribution, all to the last token."""
    prompt = posted(f"{url}/apply-template", {"messages": chat})["prompt"]
    body = {
        "prompt": prompt,
        "n_cmpl": options.group,
        "n_predict": options.tokens,
        "ignore_eos": True,
        "samplers": ["temperature"],
        "temperature": 1.0,
        "seed": unit,
        "response_fields": ["tokens_predicted"],
    }
    return posted(f"{url}/completion", body)


def posted(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def peak_gb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


if __name__ == "__main__":
    main()
