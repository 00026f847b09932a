"""Load a model, or that of a run, and serve it until told to stop."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

from pellucid import config
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.machine import hardware
from pellucid.machine.harmless import harmless
from pellucid.machine.plugins import NotHereError
from pellucid.models import invariance
from pellucid.policy import policy
from pellucid.policy.access import Access
from pellucid.protocols import with_split
from pellucid.reporting import run_folder
from pellucid.rewards.graded import Graded
from pellucid.rewards.graders import graders_of, notes_on
from pellucid.samplers.choice import fault_of
from pellucid.serve import connections
from pellucid.serve.api import application
from pellucid.serve.command import Serve
from pellucid.serve.daemon import INSTANCE, url_of
from pellucid.serve.decoding import Served
from pellucid.serve.engine import Engine
from pellucid.serve.gate import LOOPBACK
from pellucid.tasks.gsm8k import SYSTEM
from pellucid.types import UserError


def host(options: Serve, listening: socket.socket) -> None:
    """Serve until told to stop, by the options of the command."""
    served = load(options)
    print(harmless(f"{served.name} on {url_of(*listening.getsockname()[:2])}, Ctrl-C ends it"), flush=True)
    server = connections.server(application(served))

    def answer() -> None:
        try:
            server.run(sockets=[listening])
        finally:
            served.engine.close()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, connections.stopper(server, served.engine.close))
    threading.Thread(target=answer, name="http").start()
    try:
        served.engine.run()
    finally:
        server.should_exit = True


def load(options: Serve) -> Served:
    """Return the policy to be served; from a run also its task, on held-out questions, and its algorithm's settings."""
    hardware.keep_freed_memory()
    if options.batch_invariant:
        invariance.leave_amx()
    run = run_folder.run_of(options.model)
    settings = settings_of(run) if run else None
    model = str(run_folder.model_of(run)) if run else options.model
    device = hardware.pick_device(options.device)
    trusted = options.trust_remote_code or (run is not None and run_folder.trusts_code(run))
    access = Access(options.revision, trusted, "give --trust-remote-code")
    for note in filter(None, (access.format_warning(options.model), *(notes_on(settings.task) if settings else ()))):
        print(harmless(f"! {note}"), flush=True)
    asked = options.dtype
    if run and run_folder.has_merged_adapter(run):
        asked = "float32" if asked == "auto" else asked
        run_folder.warn_of_rounding(asked)
    dtype = hardware.pick_dtype(asked, device)
    frozen = policy.load_frozen(model, device, dtype, temperature=1.0, access=access)
    if fault := fault_of(frozen):
        kind = type(frozen.model).__name__
        raise UserError(f"{options.model}: {kind} cannot be served, since rows come and go beside one another: {fault}")
    if options.batch_invariant:
        invariance.check(frozen, options.rows)
    return Served(
        name=options.name or name_of(options.model),
        policy=frozen,
        engine=Engine(frozen, options.rows),
        task=graded(settings) if settings else None,
        algorithm=settings.algorithm if settings else GRPOConfig(),
        system=SYSTEM["en"],
        max_tokens=options.max_tokens,
        group_tokens=settings.sampler.max_tokens if settings else 0,
        timeout=options.timeout,
        body_bytes=options.body_bytes,
        hosts=(*LOOPBACK, options.host, *names(options.allowed_hosts)),
        token=options.token,
        instance=os.environ.get(INSTANCE, ""),
    )


def name_of(model: str) -> str:
    """Return the name by which clients call a model: the last part of its path or of its Hub id."""
    name = Path(model).name
    return Path(model).resolve().name if name in ("", "..") else name


def graded(settings: Config) -> Graded:
    """Return the held-out task of a run, with its rewards."""
    return Graded(with_split(settings.task, "test"), settings.reward, graders=graders_of(settings.task))


def names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def settings_of(run: Path) -> Config | None:
    """Return the settings of a run; None, and a line, where its rewards were functions of another process."""
    path = run / "config.json"
    config.refuse_other_variables(config.read(path), (), path, f"serve its model alone: pellucid serve {run / 'model'}")
    try:
        return config.load(path)
    except NotHereError as error:
        print(harmless(f"! {error}; the model is served without its rewards"), flush=True)
        return None
