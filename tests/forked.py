"""One command in several processes, which share what takes long to import: python forked.py COUNT SCRIPT|-m MODULE ...

Each has the environment that torchrun gives to its processes. Exit status: the first that is not 0, else 0.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from contextlib import suppress

from pellucid.machine.imports import uncollected


def forked(count):
    """Return the rank, in one process for each, and -1 in their parent; and their process ids."""
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return rank, []
    return -1, pids


def ended_together(running):
    """The first status that is not 0, else 0. Whoever is left behind one that has failed is asked to end."""
    status = 0
    while running:
        pid, raw = os.wait()
        running.remove(pid)
        if os.waitstatus_to_exitcode(raw) and not status:
            status = abs(os.waitstatus_to_exitcode(raw))
            for other in running:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return status


def main(count, *command):
    with uncollected():
        import pellucid.training.run  # noqa: F401, PLC0415 - for all processes

    rank, pids = forked(int(count))
    if rank < 0:
        sys.exit(ended_together(pids))
    named = command[0] == "-m"
    sys.argv = list(command[named:])
    if named:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
