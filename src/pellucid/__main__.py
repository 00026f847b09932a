"""The entry point. It tolerates a closed output, and handles signals that arrive during the imports."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        here = os.getcwd()
    except OSError:  # it was removed, which cli.py reports
        here = ""
    # `python -m` puts the working directory first: a user's file called tomllib.py would replace Python's.
    if sys.path[0] == here:
        del sys.path[0]

import signal

from pellucid.utils.signals import exit_immediately, list_stop_signals, make_tolerant_stream


def main() -> None:
    for number in list_stop_signals():
        signal.signal(number, exit_immediately)
    sys.stdout, sys.stderr = make_tolerant_stream(sys.stdout, 1), make_tolerant_stream(sys.stderr, 2)
    from pellucid.cli import main  # noqa: PLC0415 - it is slow, and a signal may come meanwhile

    main()


if __name__ == "__main__":
    main()
