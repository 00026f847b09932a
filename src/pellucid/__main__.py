"""Where the process begins: what it prints may go nowhere, and a stop request may come before all is imported."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        here = os.getcwd()
    except OSError:  # it was removed, which cli.py says
        here = ""
    # `python -m` puts the working directory first: a file of the user's called tomllib.py would be taken for Python's.
    if sys.path[0] == here:
        del sys.path[0]

import signal

from pellucid.machine.interrupts import end_at_once, stop_signals
from pellucid.machine.streams import unheard


def main() -> None:
    for number in stop_signals():
        signal.signal(number, end_at_once)
    sys.stdout, sys.stderr = unheard(sys.stdout, 1), unheard(sys.stderr, 2)
    from pellucid.cli import main  # noqa: PLC0415 - takes its time, in which a stop request may come

    main()


if __name__ == "__main__":
    main()
