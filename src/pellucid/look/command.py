"""`pellucid look`: the page, on the loopback or in a file."""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread

from pellucid.look import packing
from pellucid.look.reading import opened
from pellucid.look.server import Looking
from pellucid.machine.harmless import harmless
from pellucid.types import UserError


def look(run_dirs: Sequence[Path], port: int, output: Path | None, open_browser: bool) -> int:
    """Serve the page until Ctrl-C, or write it as a file. UserError where there is nothing to look at."""
    if not 1 <= len(run_dirs) <= 2:
        raise UserError("look takes a RUN, or two to see side by side")
    runs = [opened(folder) for folder in run_dirs]
    if output:
        if not output.parent.is_dir():
            raise UserError(f"there is no folder {output.parent}: name another --output, or make it")
        try:
            left_out = packing.write(runs, output)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} went while it was read, as a resume deletes it: look again") from error
        size = output.stat().st_size / 1e6
        page = f"page     {output}, {size:.1f} MB, works without network"
        print(harmless(page + (f"\n         {left_out}" if left_out else "")))
        return 0
    with Looking(runs, port) as server, ExitStack() as door:
        print(f"look at {server.url}  (Ctrl-C ends it)", flush=True)
        Thread(target=server.prepare_questions, daemon=True).start()
        if open_browser:  # beside the server: a browser of the terminal is waited for
            Thread(target=webbrowser.open, args=(door.enter_context(redirection(server.url)),), daemon=True).start()
        server.serve_forever()
    return 0


@contextmanager
def redirection(url: str) -> Iterator[str]:
    """Yield the address of a file that leads to a page and that this user alone can read.

    The command line of a browser can be read by every user of the machine, and the address of the page has a token.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-look-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">\n')
        yield file.as_uri()
