"""The server of the microscope, for as long as a test looks."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Thread

from pellucid.look.reading import Run
from pellucid.look.server import Looking


@contextmanager
def looking(*folders, port=0):
    with Looking([Run(folder) for folder in folders], port) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
