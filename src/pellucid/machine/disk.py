"""Durable files: synced to the device, so that a power failure does not take them back; and digests."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


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


def digest(path: Path) -> str:
    """The sha256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
