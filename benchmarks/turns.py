"""Lets a contender take turns: a unit of work per line on stdin, and a line of JSON with the results on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

ANSWERS: list[TextIO] = []
"""The original stdout, after `redirect_output`."""


def redirect_output() -> None:
    """Send everything that libraries print to stderr, so that stdout has only the answers."""
    ANSWERS.append(os.fdopen(os.dup(1), "w", buffering=1))
    os.dup2(2, 1)


def send_answer(**values: float | str) -> None:
    print(json.dumps(values), file=ANSWERS[-1])


def wait_for_turn() -> None:
    """Wait for a line on stdin. The orchestrator ends the process by closing stdin, which raises EOFError."""
    if not sys.stdin.readline():
        raise EOFError


def take_turns(
    run_unit: Callable[[int], dict[str, float]], clock: Callable[[], float] = time.perf_counter, **ready: float | str
) -> None:
    """Run one unit of work per turn until the orchestrator closes stdin.

    Args:
        run_unit: Runs the unit with the given index and returns its results. Its "seconds" replace the measured ones.
        clock: Returns the time in seconds.
        ready: What the answer before the first turn contains.
    """
    send_answer(ready=1, **ready)
    i = 0
    try:
        while True:
            wait_for_turn()
            start = clock()
            results = run_unit(i)
            send_answer(**{"seconds": clock() - start, **results})
            i += 1
    except EOFError:
        return
