"""The command `pellucid serve`."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from pellucid import config
from pellucid.serve import daemon
from pellucid.types import UserError
from pellucid.utils.plugins import did_you_mean, import_extra, pause_garbage_collection

_DAEMON_ACTIONS = {"stop": daemon.stop_daemon, "status": daemon.print_status, "restart": daemon.restart_daemon}
_USAGE = "[start] MODEL_OR_RUN | stop | status | restart"


@dataclass(frozen=True)
class ServeCommand:
    """Serve a model through an OpenAI-compatible HTTP API, until Ctrl-C, or in the background with `start`."""

    words: Positional[Annotated[tuple[str, ...], arg(metavar=_USAGE)]]
    """A run folder, or a model as for --policy.model. `start` runs the server in the background; `stop`, `status` and
    `restart` control it."""
    revision: str = ""
    """The branch, tag or commit of a Hub model."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder, with your permissions."""
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 accepts other machines: see --token."""
    port: int = 8000
    """The port to listen on; 0 means any free port."""
    token: str = ""
    """The token that clients must send; better set as PELLUCID_TOKEN in the environment."""
    allowed_hosts: Annotated[str, arg(metavar="NAME,...")] = ""
    """Host names under which the server is reached."""
    name: str = ""
    """The name of the model, for clients."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype that the model computes in."""
    device: str = "auto"
    """The device of the model."""
    rows: int = 64
    """Answers decoded at once."""
    batch_invariant: bool = False
    """Make answers independent of others in the batch; refuse to start if the model cannot."""
    max_tokens: int = 512
    """The default maximum length of an answer, in tokens."""
    timeout: float = 120.0
    """The time limit of a request, in seconds."""
    body_bytes: int = 1_000_000
    """The maximum size of a request body, in bytes."""
    folder: Path = Path("runs/serve")
    """The folder of pid file and log."""

    @property
    def model(self) -> str:
        return self.words[-1]

    def __call__(self) -> int:
        first = self.words[0] if self.words else ""
        action = first if first in ("start", *_DAEMON_ACTIONS) else ""
        if action and sys.platform == "win32":
            raise UserError(
                f"pellucid serve {action} needs Linux or macOS: keep pellucid serve open in a window, or use WSL"
            )
        if len(self.words) != (2 if action == "start" else 1):
            raise UserError(f"serve takes {_USAGE}, got {' '.join(self.words) or 'nothing'}")
        if not action and (close := did_you_mean(first, ("start", *_DAEMON_ACTIONS))) and not Path(first).exists():
            raise UserError(f"serve takes {_USAGE}, got {first}{close}")
        if action in _DAEMON_ACTIONS:
            return _DAEMON_ACTIONS[action](self.folder)
        config.refuse_recipe_as_run(self.model, "pellucid train {} makes one; serve takes a run or a model")
        if action and not self.port:
            raise UserError("serve start --port 0: a server in the background needs a fixed port; name one")
        for library in ("fastapi", "uvicorn"):
            import_extra(library, "serve", "pellucid serve")
        from pellucid.serve import middleware  # noqa: PLC0415 - it imports the libraries checked above

        guarded = replace(self, token=middleware.read_token(self.token))
        if warning := middleware.make_access_warning(self.host, self.port, guarded.token):
            print(f"! {warning}", file=sys.stderr, flush=True)
        if action == "start":
            return daemon.start_daemon(self.folder, daemon.make_url(self.host, self.port), self.build_arguments())
        with open_listening_socket(self.host, self.port) as listening:
            with pause_garbage_collection():
                from pellucid.serve.api import serve_model  # noqa: PLC0415 - torch takes seconds; the port may be taken

            serve_model(guarded, listening)
        return 0

    def build_arguments(self) -> list[str]:
        """Return the command-line arguments that start the same server."""
        words = [self.model]
        for option in fields(self)[1:]:
            value = getattr(self, option.name)
            if value != option.default:
                flag = f"--{option.name.replace('_', '-')}"
                words.append(flag if value is True else f"{flag}={value}")
        return words


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that clients may connect while the model is loaded.

    Raises:
        UserError: The address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot listen on {host}:{port} ({reason}): choose another --port or --host") from error
    return listening
