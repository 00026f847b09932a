"""Runs llama.cpp's server as a contender of bench.py, with a slot per completion and a request per group.

The other contenders compute log-probs. The server is not asked for them, since it would sort the vocabulary for every
token.
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

MAX_PROMPT_TOKENS = 128
LOADING_TIMEOUT = 120
"""Seconds that the server may take to load its weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["sample"])
    parser.add_argument("contender", choices=["llama-server"])
    parser.add_argument("--server", required=True)
    parser.add_argument("--weights", required=True, help="a GGUF file, whose dtype is that of the matrix products")
    parser.add_argument("--chats", required=True, help="a JSON file: the prompts of each unit, as messages")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    turns.redirect_output()
    units = json.loads(Path(options.chats).read_text())
    rows = len(units[0]) * options.group
    process, url = start_server(options, rows)
    try:
        wait_until_ready(process, url)
        with ThreadPoolExecutor(len(units[0])) as clients:

            def run_unit(i: int) -> dict[str, float]:
                groups = clients.map(lambda chat: request_completions(url, chat, options, i), units[i % len(units)])
                return {"tokens": sum(completion["tokens_predicted"] for group in groups for completion in group)}

            turns.take_turns(run_unit, dtype="bfloat16")
        turns.send_answer(peak_gb=read_peak_gb(process.pid))
    finally:
        process.kill()


def start_server(options: argparse.Namespace, rows: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start the server with a slot per completion, and return its process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    settings = {
        "model": options.weights,
        "port": port,
        "parallel": rows,
        "ctx-size": rows * (MAX_PROMPT_TOKENS + options.tokens),
        "threads": threads,
        "threads-batch": threads,
    }
    command = [options.server, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509
    return process, f"http://127.0.0.1:{port}"


def die_with_parent() -> None:
    """Have the kernel kill the server when this process ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server answers. Raise SystemExit if it ends or takes too long."""
    for _ in range(LOADING_TIMEOUT * 10):
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with status {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"llama-server is not ready after {LOADING_TIMEOUT} s")


def request_completions(
    url: str, chat: list[dict[str, str]], options: argparse.Namespace, unit: int
) -> list[dict[str, Any]]:
    """Return the completions of one prompt, sampled from the full distribution. None ends before its last token."""
    prompt = post_json(f"{url}/apply-template", {"messages": chat})["prompt"]
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
    return post_json(f"{url}/completion", body)


def post_json(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def read_peak_gb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


if __name__ == "__main__":
    main()
