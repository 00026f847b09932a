"""The recipe that trains a run again, as TOML: the model, and what its config.json has beside the defaults."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic_core import to_jsonable_python

from pellucid.config import SECTIONS, Config
from pellucid.renames import renamed
from pellucid.reporting.run_folder import Record
from pellucid.reporting.shareable import shareable
from pellucid.tasks import TASKS, task_class

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def recipe_of(run_dir: Path) -> str:
    """The recipe, which names files without their folders and holds no secrets.

    No code of the user's is loaded: of a task of their own, all settings are given.
    """
    sections = {name: section for name, section in shareable(run_dir).items() if name in SECTIONS}
    sections, defaults = renamed(sections, ""), Config()
    task, algorithm = sections.pop("task"), sections["algorithm"]
    kept = {name: unlike(section, type(getattr(defaults, name))) for name, section in sections.items()}
    kept["policy"] = {"model": sections["policy"]["model"], **kept["policy"]}
    if algorithm.get("max_length") == sections["sampler"]["max_tokens"]:  # as config.resolved fills it in
        kept["algorithm"].pop("max_length", None)
    return toml({**{name: section for name, section in kept.items() if section}, "task": task_of(task, algorithm)})


def task_of(section: Record, algorithm: Record) -> dict[str, Any]:
    """The section of a task without its defaults, and without a seed that is the algorithm's."""
    name, wrapped = section["name"], section.get("task")
    own = {key: value for key, value in section.items() if key not in ("name", "task")}
    if own.get("seed") == algorithm.get("seed"):
        del own["seed"]
    own = unlike(own, task_class(name)) if name in TASKS else own
    if isinstance(wrapped, Mapping) and "name" in wrapped:
        return {"name": name, **own, "task": task_of(wrapped, algorithm)}
    return {"name": name, **own, **({} if wrapped is None else {"task": wrapped})}


def unlike(values: Record, cls: type) -> dict[str, Any]:
    """The settings of a dataclass that are not its defaults, and of those within it, which may be in a list."""
    kinds, kept = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.name in values and not is_default(values[field.name], field):
            value, inner = values[field.name], get_args(kinds[field.name])
            kept[field.name] = within(value, inner[0]) if inner and dataclasses.is_dataclass(inner[0]) else value
    return kept


def within(value: Any, cls: Any) -> Any:
    return [unlike(item, cls) for item in value] if isinstance(value, list) else unlike(value, cls)


def is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return value == to_jsonable_python(field.default_factory())
    return field.default is not dataclasses.MISSING and value == to_jsonable_python(field.default)


# ---------------------------------------------------------------- TOML


def toml(values: Record) -> str:
    """The text that tomllib reads as these values. None, which TOML does not have, is left out of tables."""
    return "\n".join(lines_of(values, ())).strip() + "\n"


def lines_of(table: Record, path: tuple[str, ...]) -> Iterator[str]:
    """Plain settings first: whatever follows the head of another table belongs to that."""
    inside = {key: value for key, value in table.items() if isinstance(value, Mapping) or are_tables(value)}
    for key, value in table.items():
        if key not in inside and value is not None:
            yield f"{name_of(key)} = {written(value)}"
    for key, value in inside.items():
        names = ".".join(map(name_of, (*path, key)))
        head = f"[{names}]" if isinstance(value, Mapping) else f"[[{names}]]"
        for each in [value] if isinstance(value, Mapping) else value:
            yield from ("", head, *lines_of(each, (*path, key)))


def are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def written(value: Any) -> str:
    """A value on one line. JSON's texts are TOML's, but for DEL."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name_of(key)} = {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def name_of(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else written(key)
