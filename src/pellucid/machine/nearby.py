"""Files that may have been meant where a path leads to none."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

RECIPE_FOLDERS: list[Path] = []
"""The folder of the recipe that was read last, from which relative paths in it lead first."""
MOST_LOOKED_AT = 1000
"""How many files of a folder are looked at."""


def remember(folder: Path | None) -> None:
    """Note the folder of a recipe, which messages name where they say where a file was looked for; None for none."""
    RECIPE_FOLDERS[:] = [folder] if folder else []


def looked_for(path: Path) -> str:
    """Return where a relative path was looked for, if that was in more than one place; else nothing."""
    folders = [folder for folder in RECIPE_FOLDERS if folder.resolve() != Path().resolve()]
    if path.expanduser().is_absolute() or not folders:
        return ""
    return f"; it was looked for in {folders[0].resolve()}, the folder of the recipe, and in {Path().resolve()}"


def escaped(name: str) -> str:
    """Return a hint where a file name has a control character, as of a backslash in double quotes in TOML."""
    if name.isprintable():
        return ""
    return "; in double quotes a backslash begins an escape: write a path in single quotes, 'C:\\temp', or with /"


def meant(path: Path, candidates: Sequence[Path]) -> str:
    """Return a hint at the file of the same name elsewhere, or else at one of a similar name; empty for neither."""
    same = [each for each in candidates if each.name == path.name]
    similar = get_close_matches(path.stem, [each.stem for each in candidates], n=1)
    close = same or [each for each in candidates if each.stem in similar]
    return f'; did you mean "{close[0]}"?' if close else ""


def nearby(path: Path, suffixes: Container[str]) -> list[Path]:
    """Return files with one of these endings, such as ".toml": those in the folder of a path, or in the nearest that
    exists above it, and one level below.
    """
    folder = next((above for above in path.parents if above.is_dir()), Path())
    below = [each for each in listed(folder) if each.is_dir() and not each.name.startswith(".")]
    return [each for place in (folder, *below) for each in listed(place) if each.suffix.lower() in suffixes]


def listed(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(islice(folder.iterdir(), MOST_LOOKED_AT))
