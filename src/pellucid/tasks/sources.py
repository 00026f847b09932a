"""What the setting `data` of a task names: a file, several, all that match a pattern, or a data set on the Hub."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from pellucid.machine.extras import extra
from pellucid.machine.hub import look_for_hub
from pellucid.machine.nearby import escaped, looked_for, meant, nearby
from pellucid.tasks.rows import READERS, InArrow, Row, Rows, one_line
from pellucid.types import UserError

Source = str | tuple[str, ...]


@lru_cache(maxsize=4)
def rows_of(source: Source, subset: str, hub_split: str) -> Rows:
    """Return the rows of files or of a Hub split. UserError, with its place, for an invalid row."""
    if isinstance(source, str) and not is_file_name(source):
        rows = read_hub(source, subset, hub_split)
    else:
        parts = [read_file(path) for path in files_of(source)]
        rows = parts[0] if len(parts) == 1 else Joined(parts)
    if not rows:
        raise UserError(f"{shown(source)}: there are no rows")
    return rows


def is_file_name(source: Source) -> bool:
    """Return whether a source stands for files: several always do."""
    return not isinstance(source, str) or Path(source).suffix.lower() in READERS or Path(source).expanduser().is_file()


def shown(source: Source) -> str:
    return source if isinstance(source, str) else ", ".join(source)


def is_pattern(name: str) -> bool:
    """Return whether a name such as "parts/*.jsonl" stands for all data files that match it."""
    path = os.path.expanduser(name)
    return glob.has_magic(path) and Path(path).suffix.lower() in READERS and not os.path.isfile(path)


def matching(pattern: str) -> list[Path]:
    """Return the files that match a pattern, by name; ** goes through folders of any depth."""
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    return [Path(path) for path in found if os.path.isfile(path)]


def files_of(source: Source) -> list[Path]:
    """Return the files of a source, each once. UserError where a pattern matches none."""
    found: dict[Path, Path] = {}
    for name in (source,) if isinstance(source, str) else source:
        paths = matching(name) if is_pattern(name) else [Path(name).expanduser()]
        if not paths:
            hint = some(nearby(Path(name).expanduser(), READERS))
            raise UserError(f"{name}: no file matches{hint}{looked_for(Path(name))}")
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_file(path: Path) -> Rows:
    if path.suffix.lower() not in READERS:
        raise UserError(f"{path}: unknown format; {', '.join(READERS)} can be read{escaped(str(path))}")
    if not path.is_file():
        hint = escaped(str(path)) or near(path)
        raise UserError(f"{path!s}: there is no such file{hint}{looked_for(path)}".replace("\n", "\\n"))
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class Joined(Sequence[tuple[str, Row]]):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[str, Row]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]


def read_hub(source: str, subset: str, split: str) -> Rows:
    datasets = extra("datasets", "data", f'data = "{source}" on the Hugging Face Hub')
    datasets.config.HF_HUB_OFFLINE |= not look_for_hub()  # it has looked at the environment when it was imported
    try:
        rows = datasets.load_dataset(source, name=subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        close = meant(Path(source), nearby(Path(source), READERS))
        what = "cannot be reached" if isinstance(error, ConnectionError) else "says"
        raise UserError(
            f'data = "{source}" is no local file ({", ".join(READERS)}){close}, and the Hugging Face Hub {what}:'
            f" {one_line(error)}"
        ) from error
    return InArrow(f"{source}, {split}", rows, lambda rows, index: dict(rows[index]))


# ---------------------------------------------------------------- what may have been meant


def near(path: Path) -> str:
    """Return a hint at data files near a place where there is none: the one that is meant, or some that there are."""
    found = nearby(path, READERS)
    return meant(path, found) or some(found)


def some(paths: Sequence[Path]) -> str:
    return f"; data files near it: {', '.join(map(str, paths[:3]))}" if paths else ""
