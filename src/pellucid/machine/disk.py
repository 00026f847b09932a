"""Durable files: synced to the device, so that a power failure does not take them back; and digests."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

GONE = "the working directory is gone, and with it what relative paths name: go to one that is there"


def is_here_gone() -> bool:
    """Return whether the working directory of this process was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def sync(path: Path) -> None:
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
        sync(path)
    sync(folder)


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the content of a file, which is the old or the new whatever happens; durable at return.

    mode: who may read and write it, less what the user's umask takes away.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


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
            self._head_end = head = self._head_end or whole_lines(file, 0, self._max_bytes // 2)[0]
            start = whole_lines(file, size - self._max_bytes // 4, self._max_bytes // 4)[1]
            file.seek(start)
            newest = file.read(self._max_bytes // 4)
            file.truncate(head)
            file.seek(head)
            file.write(
                b"[left out: this file keeps its beginning and its end, %d MB at most]\n" % (self._max_bytes // 2**20)
            )
            file.write(newest)


def whole_lines(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """Return where the last line of a stretch of a file ends, and where its second begins; if it has no newline, its
    own end and start.
    """
    file.seek(start)
    stretch = file.read(length)
    last, first = stretch.rfind(b"\n"), stretch.find(b"\n")
    return (start + len(stretch), start) if last < 0 else (start + last + 1, start + first + 1)


def digest(path: Path) -> str:
    """The sha256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
