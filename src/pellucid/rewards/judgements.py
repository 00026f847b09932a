"""The answers of a judge on disk, in a folder that the processes of a run share, so that nothing is asked twice.

Each process appends lines to a file of its own, since not every file system lets two write one, and reads those of all.
A line that was torn by the end of its process is skipped. While a process asks, it holds a lock on the byte of the file
`claims` whose place is the digest of the request; the system frees it when the process dies.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pellucid.machine.harmless import harmless

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@dataclass(frozen=True)
class Answer:
    """What a judge said to one request."""

    text: str
    cut: bool
    """Whether it ended at its longest length, not by itself."""
    tokens: int
    """What it cost, prompt and answer."""


def digest_of(base_url: str, body: Mapping[str, Any]) -> str:
    """Return the sha256 of a request, with all that decides its answer, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([base_url, body], sort_keys=True).encode()).hexdigest()


class Judgements:
    """The answers by the digests of their requests, in memory and in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file_name = folder, f"{secrets.token_hex(4)}.jsonl"
        self._answers: dict[str, Answer] = {}
        self._read_bytes: dict[Path, int] = {}
        """How many bytes of each file are known."""
        self._is_unwritable = False

    def find(self, digest: str) -> Answer | None:
        """Return the answer to a request, also one that another process has had in the meantime."""
        if digest not in self._answers:
            self._read_new_answers()
        return self._answers.get(digest)

    def store(self, digest: str, answer: Answer) -> None:
        """Add an answer. Where the disk takes no more it is kept in memory alone, which is said once."""
        self._answers.setdefault(digest, answer)
        if self._is_unwritable:
            return
        line = json.dumps({"request": digest, **asdict(answer)}, ensure_ascii=False) + "\n"
        path = self.folder / f"{os.getpid()}-{self._file_name}"  # after a fork, another file
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line.encode(errors="replace"))
        except OSError as error:
            self._is_unwritable = True
            text = f"! {path} cannot be written ({error.strerror}): the judge goes on without it"
            print(harmless(text), flush=True)

    @contextmanager
    def open_locks(self) -> Iterator[Claims]:
        """Yield the claims of this process, which are given up at the end."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "claims", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            yield Claims(None)
            return
        try:
            yield Claims(descriptor)
        finally:
            os.close(descriptor)

    def _read_new_answers(self) -> None:
        for path in sorted(self.folder.glob("*.jsonl")):
            with suppress(OSError):
                self._read_new_lines(path)

    def _read_new_lines(self, path: Path) -> None:
        start = self._read_bytes.get(path, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as file:
            file.seek(start)
            whole = file.read().rpartition(b"\n")[0]
        self._read_bytes[path] = start + len(whole) + (1 if whole else 0)
        for line in whole.split(b"\n"):
            with suppress(
                ValueError, KeyError, TypeError, OverflowError, RecursionError
            ):  # damaged: what it held is asked again
                entry = json.loads(line)
                answer = Answer(str(entry["text"]), bool(entry["cut"]), int(entry["tokens"]))
                self._answers.setdefault(entry["request"], answer)


class Claims:
    """Which requests this process is about to make; where the file system has no locks, all that it asks for."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def acquire(self, digest: str) -> bool:
        """Claim a request. False where another process has claimed it."""
        if fcntl is None or self._descriptor is None:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place_of(digest))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def release(self, digest: str) -> None:
        if fcntl is not None and self._descriptor is not None:
            with suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place_of(digest))


def place_of(digest: str) -> int:
    return int(digest[:15], 16)
