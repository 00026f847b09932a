"""`pellucid sampler`: vLLM on this machine, for the trainers whose `sampler.urls` name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from pellucid.machine.extras import extra
from pellucid.machine.imports import uncollected
from pellucid.serve.command import listening


@dataclass(frozen=True)
class Sampler:
    """Sample by vLLM on this machine for a run on another, which brings the model and its weights, until Ctrl-C."""

    host: str = "127.0.0.1"
    """0.0.0.0 for whoever reaches this machine and has the secret in PELLUCID_SAMPLER_TOKEN. On the loopback a server
    without one makes its own."""
    port: int = 8001
    """Where it listens; 0 is any free port."""
    allowed_hosts: Annotated[str, arg(metavar="NAME,...")] = ""
    """Names that it is reached by, besides its addresses."""
    rows: int = 256
    """Completions decoded at once."""
    cache_gb: float = 4.0
    """Memory of keys and values, in GB."""
    device: str = "auto"
    """The device of the model."""

    def __call__(self) -> int:
        for library in ("fastapi", "uvicorn"):
            extra(library, "serve", "pellucid sampler")
        with listening(self.host, self.port) as free:
            with uncollected():
                from pellucid.serve.sampling import host  # noqa: PLC0415 - torch takes seconds

            host(free, self.rows, self.cache_gb, self.device, list(filter(None, self.allowed_hosts.split(","))))
        return 0
