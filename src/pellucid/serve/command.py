"""`pellucid serve`: the command line."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from pellucid.machine.extras import extra
from pellucid.machine.imports import uncollected
from pellucid.serve import daemon
from pellucid.types import UserError

IN_THE_BACKGROUND = {"stop": daemon.stop, "status": daemon.status, "restart": daemon.restart}
BACKLOG = 1024
"""How many connections may wait to be accepted."""
USAGE = """pellucid serve MODEL_OR_RUN [options]        until Ctrl-C
       pellucid serve start MODEL_OR_RUN [options]  in the background
       pellucid serve stop | status | restart [--folder DIR]"""


def main(arguments: list[str]) -> int:
    action, rest = "", arguments
    if arguments and arguments[0] in ("start", *IN_THE_BACKGROUND):
        action, *rest = arguments
    if action and sys.platform == "win32":
        raise UserError(f"pellucid serve {action} needs Linux or macOS: leave a window to pellucid serve, or use WSL")
    options = parsed(rest, model=action not in IN_THE_BACKGROUND)
    if action in IN_THE_BACKGROUND:
        return IN_THE_BACKGROUND[action](options.folder)
    for library in ("fastapi", "uvicorn"):
        extra(library, "serve", "pellucid serve")
    from pellucid.serve import gate  # noqa: PLC0415 - it imports the libraries checked above

    options.token = gate.token_of(options.token)
    if warning := gate.warning(options.host, options.port, options.token):
        print(f"! {warning}", file=sys.stderr, flush=True)
    if action == "start":
        return daemon.start(options.folder, daemon.url_of(options.host, options.port), rest)
    return serve(options)


def parsed(arguments: list[str], model: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pellucid serve", usage=USAGE, allow_abbrev=False)
    if model:
        parser.add_argument("model", help="a run folder, or what --policy.model takes")
        parser.add_argument("--revision", default="", help="of a Hub id: a branch, a tag or a commit")
        parser.add_argument(
            "--trust-remote-code", action="store_true", help="run the Python code of the model's folder, as you"
        )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for whoever reaches this machine: see --token")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token", default="", help="that clients must show; better in the environment: PELLUCID_TOKEN")
    parser.add_argument("--allowed-hosts", type=names, default=[], metavar="NAME,...", help="names it is reached by")
    parser.add_argument("--name", default="", help="of the model, for clients")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64, help="answers decoded at once")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="no answer depends on the others, or it does not start"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer, where a request does not say")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a request")
    parser.add_argument("--body-bytes", type=int, default=1_000_000, help="of a request")
    parser.add_argument("--folder", type=Path, default=Path("runs/serve"), help="of pid file and log")
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> int:
    with listening(options.host, options.port) as free:
        with uncollected():
            from pellucid.serve.host import host  # noqa: PLC0415 - torch takes seconds, and the port may be taken

        host(options, free)
    return 0


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. UserError where the address cannot be used.

    It is taken before the model is loaded, so that clients which connect meanwhile wait.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        taken.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{host}:{port} cannot be listened on ({reason}): name another --port or --host") from error
    return taken


def names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]
