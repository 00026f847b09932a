"""What "on disk" means: synced to the device, so that a power failure does not take it back; and digests of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file's content, or the names in a folder: a rename is on disk with its folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders, and has its names on disk by itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Every file below, and every folder's names."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def write_whole(path: Path, text: str) -> None:
    """The new content or the old one, whatever happens in between; on disk at return."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def digest(path: Path) -> str:
    """sha256 in hexadecimals."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
