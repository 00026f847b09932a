"""Durable files, bounded logs, digests, locks between processes, and the exit of forked copies of a process."""

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

import psutil

from pellucid.types import UserError
from pellucid.utils.text import escape_controls

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

WORKING_DIRECTORY_GONE = "the working directory is gone, and relative paths with it: change to a directory that exists"
_LOCKS_UNSUPPORTED_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


def get_cache_folder() -> Path:
    """Return the cache folder of this user, for files that can be computed again."""
    return Path(os.environ.get("PELLUCID_CACHE") or Path.home() / ".cache" / "pellucid")


# ---------------------------------------------------------------- durable files


def is_working_directory_gone() -> bool:
    """Return whether the working directory of this process was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk. A rename is durable once its folder is synced."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and writes their entries to the disk by itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync a folder, and every file and folder below it."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def write_file_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the content of a file. A crash leaves the old or the new content; at return, the new one is durable."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    sync_path(partial)
    partial.replace(path)
    sync_path(path.parent)


class BoundedLog:
    """Bounds the size of a file to which other processes append. They must open it with O_APPEND to leave no holes.

    The first half and the newest quarter of `max_bytes` are kept, and a line between them says that text was left out.
    The file may exceed `max_bytes` by the output of `interval_seconds`. Lines that are written during the milliseconds
    in which the file is cut may be lost or be out of order.
    """

    def __init__(self, path: Path, max_bytes: int = 2**24, interval_seconds: float = 0.5) -> None:
        self._path, self._max_bytes, self._interval_seconds = path, max_bytes, interval_seconds
        self._head_end = 0
        """The offset of the end of the first half, once text after it was left out; 0 before."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bounded log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Check the size once more, and stop."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(self._interval_seconds):
            self._trim()
        self._trim()

    def _trim(self) -> None:
        # The file may not exist yet, or not be writable. Others may append while it is cut, so this appends, too.
        with suppress(OSError), self._path.open("r+b") as file, self._path.open("ab") as end:
            size = file.seek(0, os.SEEK_END)
            if size <= self._max_bytes:
                return
            self._head_end = head = self._head_end or _find_line_bounds(file, 0, self._max_bytes // 2)[0]
            start = _find_line_bounds(file, size - self._max_bytes // 4, self._max_bytes // 4)[1]
            file.seek(start)
            newest = file.read(self._max_bytes // 4)
            file.truncate(head)
            megabytes = self._max_bytes // 2**20
            end.write(b"[left out: this file keeps its beginning and its end, %d MB at most]\n" % megabytes + newest)


def _find_line_bounds(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """Return where the last whole line of a part of a file ends, and where the second line of the part begins.

    If the part has no newline, return its end and its start.
    """
    file.seek(start)
    part = file.read(length)
    last, first = part.rfind(b"\n"), part.find(b"\n")
    return (start + len(part), start) if last < 0 else (start + last + 1, start + first + 1)


def compute_file_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- locks
# The system releases a lock when its holders die, so no lock file has to be removed by hand.


@contextmanager
def hold_lock(path: Path, activity: str) -> Iterator[TextIOWrapper]:
    """Hold the lock on a file within the block.

    Children that inherit the open file hold the lock as well, even after the death of their parent; see
    `write_lock_holder`. Python passes no open files to children unless it is asked to.

    Args:
        path: The lock file, which contains the process ids of the holders.
        activity: The verb for a holder's activity in the error message, such as "reads".

    Raises:
        UserError: Another process holds the lock.
    """
    if fcntl is None:
        raise UserError("training needs Linux or macOS, whose file locks end with their process: on Windows, use WSL")
    with path.open("a+", encoding="utf-8") as file:
        if not _lock(file, fcntl.LOCK_EX, activity):
            text = f"! {path.parent}: its file system has no locks: make sure that no other process {activity}"
            print(escape_controls(text), flush=True)
        file.truncate(0)
        write_lock_holder(file, os.getpid())
        yield file


def check_unlocked(path: Path, activity: str) -> None:
    """Raise UserError if a process holds the lock, without taking it."""
    if path.is_file() and fcntl is not None:
        with path.open(encoding="utf-8") as file:
            _lock(file, fcntl.LOCK_SH, activity)


def _lock(file: TextIOWrapper, kind: int, activity: str) -> bool:
    """Lock a file, or return False if its file system has no locks. Raises UserError if another process holds it."""
    assert fcntl is not None
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(describe_lock_holder(file, activity)) from error
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED_ERRNOS:
            raise
        return False
    return True


def write_lock_holder(lock: TextIOWrapper, pid: int) -> None:
    """Add a process that has inherited the open lock file to the holders that the file lists."""
    print(pid, file=lock, flush=True)


def describe_lock_holder(file: TextIOWrapper, activity: str) -> str:
    """Return, for example, "process 7 reads: wait for it, or stop it (since 2026-01-31 12:00:00)"."""
    file.seek(0)
    alive = [pid for pid in file.read().split() if pid.isdecimal() and psutil.pid_exists(int(pid))]
    who = f"process {' and '.join(alive)}" if alive else "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.fstat(file.fileno()).st_mtime))
    return f"{who} {activity}: wait for it, or stop it (since {since})"


# ---------------------------------------------------------------- forked copies


def exit_if_forked(owner_pid: int, error: BaseException | None = None) -> None:
    """If user code forked this process, exit as Python would, without running our code.

    `owner_pid` is the process id before the user code was called, and `error` is the exception that it raised, if any.
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
