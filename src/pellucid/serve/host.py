"""From a model or a run to a service that answers until it is told to stop."""

from __future__ import annotations

import argparse
import signal
import socket
import threading

import uvicorn

from pellucid import config, folder, hardware, policy
from pellucid.serve.api import Served, application
from pellucid.serve.engine import Engine
from pellucid.settings import GRPOConfig
from pellucid.tasks.gsm8k import SYSTEM
from pellucid.tasks.sandbox import Sandboxed
from pellucid.tasks.wrappers import with_split


def host(options: argparse.Namespace, listening: socket.socket) -> None:
    """Options as `command.parsed` has them."""
    served = load(options)
    address, port = listening.getsockname()[:2]
    print(f"{served.name} on http://{address}:{port}, Ctrl-C ends it", flush=True)
    settings = uvicorn.Config(application(served), timeout_graceful_shutdown=10, log_level="warning")
    server = uvicorn.Server(settings)

    def answer() -> None:
        server.run(sockets=[listening])
        served.engine.close()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, server.handle_exit)
    threading.Thread(target=answer, name="http").start()
    served.engine.run()


def load(options: argparse.Namespace) -> Served:
    """The policy; from a run also the task that taught it, and how that run compares answers."""
    hardware.keep_freed_memory()
    run = folder.run_of(options.model)
    settings = config.load(run / "config.json") if run else None
    model = str(folder.model_of(run)) if run else options.model
    device = hardware.pick_device(options.device)
    frozen = policy.load_frozen(model, device, hardware.pick_dtype(options.dtype, device), temperature=1.0)
    return Served(
        name=options.name or options.model.rstrip("/").rpartition("/")[2],
        policy=frozen,
        engine=Engine(frozen, options.rows),
        task=Sandboxed(with_split(settings.task, "test"), settings.reward) if settings else None,
        algorithm=settings.algorithm if settings else GRPOConfig(),
        system=SYSTEM["en"],
        max_tokens=options.max_tokens,
        timeout=options.timeout,
        body_bytes=options.body_bytes,
    )
