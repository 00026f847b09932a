"""Durable files: synced to the device, so that a power failure does not take them back; and digests."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from pellucid.types import UserError
from pellucid.utils.text import escape_controls

WORKING_DIRECTORY_GONE = "the working directory is gone, and with it what relative paths name: go to one that is there"


def is_working_directory_gone() -> bool:
    """Return whether the working directory of this process was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def sync_path(path: Path) -> None:
    """Sync the content of a file, or the names in a folder: a rename is durable when its folder is."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders, and has its names on disk by itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync every file and every folder below this one."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def write_file_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the content of a file, which is the old or the new whatever happens; durable at return.

    mode: who may read and write it, less what the user's umask takes away.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    sync_path(partial)
    partial.replace(path)
    sync_path(path.parent)


class BoundedLog:
    """Keeps a file that other processes append to near `most` bytes: its first half, and its newest quarter.

    A thread looks at the file every `every` seconds, so it may be larger by what is written in that time. A line in the
    file says that something was left out there. Writers must append (O_APPEND), or they would leave holes.
    """

    def __init__(self, path: Path, max_bytes: int = 2**24, interval_seconds: float = 0.5) -> None:
        self._path, self._max_bytes, self._interval_seconds = path, max_bytes, interval_seconds
        self._head_end = 0
        """Where the beginning that is kept ends, once something was left out behind it."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bounded log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look once more, and stop."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(self._interval_seconds):
            self._trim()
        self._trim()

    def _trim(self) -> None:
        with suppress(OSError), self._path.open("r+b") as file:  # it may not be there yet, or not be ours
            size = file.seek(0, os.SEEK_END)
            if size <= self._max_bytes:
                return
            self._head_end = head = self._head_end or find_line_bounds(file, 0, self._max_bytes // 2)[0]
            start = find_line_bounds(file, size - self._max_bytes // 4, self._max_bytes // 4)[1]
            file.seek(start)
            newest = file.read(self._max_bytes // 4)
            file.truncate(head)
            file.seek(head)
            file.write(
                b"[left out: this file keeps its beginning and its end, %d MB at most]\n" % (self._max_bytes // 2**20)
            )
            file.write(newest)


def find_line_bounds(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """Return where the last line of a stretch of a file ends, and where its second begins; if it has no newline, its
    own end and start.
    """
    file.seek(start)
    stretch = file.read(length)
    last, first = stretch.rfind(b"\n"), stretch.find(b"\n")
    return (start + len(stretch), start) if last < 0 else (start + last + 1, start + first + 1)


def compute_file_digest(path: Path) -> str:
    """The sha256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- locks
# One process at a time. A lock that dies with its holders: no file is left that would have to be removed by hand.


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCKS_UNSUPPORTED_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


@contextmanager
def hold_lock(path: Path, activity: str) -> Iterator[TextIOWrapper]:
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
            raise UserError(describe_lock_holder(file, activity)) from error
        except OSError as error:
            if error.errno not in LOCKS_UNSUPPORTED_ERRNOS:
                raise
            text = f"! {path.parent}: its file system has no locks: see to it that no other process {activity}"
            print(escape_controls(text), flush=True)
        file.truncate(0)
        write_lock_holder(file, os.getpid())
        yield file


def check_unlocked(path: Path, activity: str) -> None:
    """UserError where a process holds the lock; it is not taken."""
    if path.is_file() and fcntl is not None:
        with path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(describe_lock_holder(file, activity)) from error
            except OSError as error:
                if error.errno not in LOCKS_UNSUPPORTED_ERRNOS:
                    raise


def write_lock_holder(lock: TextIOWrapper, pid: int) -> None:
    print(pid, file=lock, flush=True)


def describe_lock_holder(file: TextIOWrapper, activity: str) -> str:
    """Example: "process 7 reads: wait for it, or stop it (since 2026-01-31 12:00:00)"."""
    file.seek(0)
    alive = [pid for pid in file.read().split() if is_process_alive(int(pid))]
    who = f"process {' and '.join(alive)}" if alive else "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.fstat(file.fileno()).st_mtime))
    return f"{who} {activity}: wait for it, or stop it (since {since})"


def is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


# ---------------------------------------------------------------- copies
# Copies of a process that somebody else's code has forked in it, and that come back into ours.


def exit_if_forked(owner_pid: int, error: BaseException | None = None) -> None:
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
