"""One process at a time. A lock that dies with its holders: no file is left that would have to be removed by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from pellucid.types import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def locked(path: Path, doing: str) -> Iterator[TextIOWrapper]:
    """The lock on a file, with the process ids of those who hold it. UserError, saying what they do, where others do.

    Children that inherit the file hold it as well, after the death of their parent too: see `note_holder`.
    """
    if fcntl is None:
        raise UserError("training needs Linux or macOS, whose file locks die with a process: on Windows use WSL")
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            alive = " and ".join(pid for pid in file.read().split() if is_alive(int(pid)))
            raise UserError(f"process {alive} {doing}: wait for it, or stop it") from error
        file.truncate(0)
        note_holder(file, os.getpid())
        yield file


def note_holder(lock: TextIOWrapper, pid: int) -> None:
    print(pid, file=lock, flush=True)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
