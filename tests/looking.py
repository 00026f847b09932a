"""Run the server of the microscope during a test."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Thread

from pellucid.inspect.run_reader import RunReader
from pellucid.inspect.server import InspectServer


@contextmanager
def looking(*folders, port=0):
    with InspectServer([RunReader(folder) for folder in folders], port) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
