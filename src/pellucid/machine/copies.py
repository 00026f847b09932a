"""Copies of a process that somebody else's code has forked in it, and that come back into ours."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress


def end_copy(owner_pid: int, error: BaseException | None = None) -> None:
    """End this process where it is not the process `owner` but a copy of it; else do nothing.

    Call it behind code that may fork. The copy ends as Python would end it, without running the code of its owner.

    owner: the process id before that code was called. error: what that code raised.
    """
    if os.getpid() == owner_pid:
        return
    status = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            status = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
