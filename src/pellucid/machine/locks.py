"""One process at a time. A lock that dies with its holders: no file is left that would have to be removed by hand."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from pellucid.machine.harmless import harmless
from pellucid.types import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


@contextmanager
def locked(path: Path, activity: str) -> Iterator[TextIOWrapper]:
    """The lock on a file, with the process ids of those who hold it. UserError, saying what they do, where others do.

    Children that inherit the file hold it as well, after the death of their parent too: see `note_holder`. No child
    does unless it is told to: Python passes on no open files.
    """
    if fcntl is None:
        raise UserError("training needs Linux or macOS, whose file locks die with a process: on Windows use WSL")
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(refusal(file, activity)) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            text = f"! {path.parent}: its file system has no locks: see to it that no other process {activity}"
            print(harmless(text), flush=True)
        file.truncate(0)
        note_holder(file, os.getpid())
        yield file


def refuse_locked(path: Path, activity: str) -> None:
    """UserError where a process holds the lock; it is not taken."""
    if path.is_file() and fcntl is not None:
        with path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(refusal(file, activity)) from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise


def note_holder(lock: TextIOWrapper, pid: int) -> None:
    print(pid, file=lock, flush=True)


def refusal(file: TextIOWrapper, activity: str) -> str:
    """Example: "process 7 reads: wait for it, or stop it (since 2026-01-31 12:00:00)"."""
    file.seek(0)
    alive = [pid for pid in file.read().split() if is_alive(int(pid))]
    who = f"process {' and '.join(alive)}" if alive else "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.fstat(file.fileno()).st_mtime))
    return f"{who} {activity}: wait for it, or stop it (since {since})"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
