"""How a contender takes turns: a unit of work for every line on stdin, a line of JSON for each on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

ANSWERS: list[TextIO] = []


def begin() -> None:
    """From now on whatever a library prints goes to stderr, and answers alone to stdout."""
    ANSWERS.append(os.fdopen(os.dup(1), "w", buffering=1))
    os.dup2(2, 1)


def answer(**facts: float | str) -> None:
    print(json.dumps(facts), file=ANSWERS[-1])


def wait() -> None:
    """For the next turn. The orchestrator ends the process by closing stdin: EOFError."""
    if not sys.stdin.readline():
        raise EOFError


def take(
    unit: Callable[[int], dict[str, float]], clock: Callable[[], float] = time.perf_counter, **ready: float | str
) -> None:
    """Turns until the orchestrator has enough. A unit whose seconds are not all that it takes says them itself.

    ready: what is told before the first one.
    """
    answer(ready=1, **ready)
    i = 0
    try:
        while True:
            wait()
            start = clock()
            facts = unit(i)
            answer(**{"seconds": clock() - start, **facts})
            i += 1
    except EOFError:
        return
