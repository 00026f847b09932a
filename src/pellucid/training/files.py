"""The files that settings name: their absolute paths, since a run may go on from any folder, and their digests."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pellucid.config import Config, PolicyConfig, dump
from pellucid.machine import disk
from pellucid.machine.plugins import HERE, load_object
from pellucid.reporting.run_folder import Record
from pellucid.rewards.terms import MODEL
from pellucid.tasks.sources import is_pattern, matching

AXES = ("advantage", "objective")
"""Of `[algorithm]`: settings that may name a function of the user's own."""


def recorded(cfg: Config) -> dict[str, Any]:
    """All settings as JSON, as `config.dump` gives them, with the absolute paths of all files that exist."""
    values = dump(cfg)
    model = values["policy"]["model"]
    if model != PolicyConfig.model and os.path.exists(os.path.expanduser(model)):
        values["policy"]["model"] = absolute(model)
    values["policy"]["template"] = located(values["policy"]["template"])
    own = {axis: located(values["algorithm"][axis]) for axis in AXES}
    return {**values, "task": located(values["task"]), "algorithm": {**values["algorithm"], **own}}


def located(value: Any) -> Any:
    """A task's section, or a value in it, with absolute paths."""
    if isinstance(value, Mapping):
        return {key: located(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [located(item) for item in value]
    return with_path(value) if isinstance(value, str) else value


def with_path(value: str) -> str:
    """A text with the absolute path of the files or the reward model that it names; any other as it is."""
    if is_pattern(value):
        return absolute(value)
    if value.startswith(MODEL):
        folder = value.removeprefix(MODEL)
        return MODEL + absolute(folder) if os.path.isdir(os.path.expanduser(folder)) else value
    if file_of(value) is None:
        return value
    source, colon, name = value.rpartition(":")
    if source.endswith(".py"):
        return f"{absolute(source)}{colon}{name}"
    return value if colon else absolute(value)


def digests(settings: Record) -> dict[str, str]:
    """By dotted key, the sha256 of each file that the settings of task, axes and policy name: code, prefixes, data.

    Of what was given to `pellucid.train` it is that of its source.
    """
    axes = {axis: settings["algorithm"][axis] for axis in AXES}
    template = {"template": settings["policy"].get("template", "")}
    named = [
        *named_files(settings["task"], "task"),
        *named_files(axes, "algorithm"),
        *named_files(template, "policy"),
    ]
    return {key: digest_of(what) for key, what in named}


def of_code(settings: Record) -> dict[str, str]:
    """By dotted key, the sha256 of each file of code that the settings of task and axes name."""
    named = {**settings["task"], **{axis: settings["algorithm"][axis] for axis in AXES}}
    found = [(key, path) for key, path in named_files(named, "") if isinstance(path, Path) and path.suffix == ".py"]
    return {key.removeprefix("."): digest_of(path) for key, path in found}


def digest_of(source: Path | Sequence[Path] | str) -> str:
    """The sha256 of a file, of several, or of a source."""
    if isinstance(source, str):
        return hashlib.sha256(source.encode()).hexdigest()
    return disk.digest(source) if isinstance(source, Path) else digest_of_all(source)


def digest_of_all(paths: Sequence[Path]) -> str:
    """The sha256 of what `sha256sum` prints of files, by their names: it tells one more, one less and one edited."""
    lines = "".join(f"{disk.digest(path)}  {path.name}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()


def named_files(value: Any, key: str) -> Iterator[tuple[str, Path | list[Path] | str]]:
    """What is behind settings, by dotted key: a file, all that match a pattern, or the source of what has no file."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from named_files(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from named_files(item, f"{key}.{i}")
    elif isinstance(value, str) and is_pattern(value):
        yield key, matching(value)
    elif isinstance(value, str) and value.startswith(HERE):
        yield from ((key, source) for source in [source_of(load_object(value))] if source)
    elif isinstance(value, str) and (path := file_of(value)):
        yield key, path


def file_of(value: str) -> Path | None:
    """The file behind `path/to/file.ext`, `path/to/file.py:Name` or, once it is imported, `module:Name`."""
    source, _, name = value.rpartition(":")
    if name.isidentifier() and source in sys.modules:
        origin = getattr(sys.modules[source], "__file__", None)
        return Path(origin) if origin else None
    path = Path(os.path.expanduser(source if source.endswith(".py") else value))
    return path if path.suffix and os.path.isfile(path) else None


def source_of(thing: Any) -> str:
    """The source of a function or a class; empty where it has none of its own, as a lambda in the middle of a line."""
    if getattr(thing, "__name__", "<lambda>") == "<lambda>":
        return ""
    with suppress(OSError, TypeError):
        return inspect.getsource(getattr(thing, "original", thing))
    return ""


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
