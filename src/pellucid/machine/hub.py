"""Whether the Hub is there. Where it is not, its client asks six times for each file, 23 seconds long, before it looks
into its cache.
"""

from __future__ import annotations

import functools
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from pellucid.machine.harmless import harmless

PATIENCE = 10.0
"""Seconds in which a connection must have been made."""


def look_for_hub() -> bool:
    """Whether the Hub may be asked. Where it cannot be reached, say so, once a process, and leave it to its cache."""
    from huggingface_hub import constants  # noqa: PLC0415 - it reads the environment when it is imported

    if not constants.HF_HUB_OFFLINE and not reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


@functools.cache
def reachable(endpoint: str) -> bool:
    """Whether somebody answers there, and a line where nobody does. What stands behind a proxy is taken for there."""
    address = urlsplit(endpoint)
    if getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), PATIENCE).close()
    except OSError as error:
        reason = error.strerror or error
        text = f"! {endpoint} cannot be reached ({reason}): only what is cached can be loaded"
        print(harmless(text), flush=True)
        return False
    return True
