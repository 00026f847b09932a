"""The settings of a run: the command line overrides recipe.toml, which overrides the defaults.

Each section is a dataclass; a task's class is the section `[task]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import tyro
from pydantic import BaseModel, ConfigDict, Field

from pellucid.algorithm.settings import AdamWConfig, GRPOConfig, RewardConfig
from pellucid.renames import renamed, renamed_flags
from pellucid.runtimes.settings import RuntimeConfig
from pellucid.sections import CheckpointConfig, EvaluateConfig, LogConfig, PolicyConfig, SamplerConfig
from pellucid.tasks import task_class
from pellucid.tasks.wrappers import seeded, wraps
from pellucid.types import UserError


class Config(BaseModel):
    """The settings of a run, as recipe.toml and the command line name them. Besides: --run DIR, --resume RUN."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyConfig = PolicyConfig()
    task_names: ClassVar[tuple[str, ...]] = ("arithmetic",)
    """The names of the task and of those that it wraps, from the outside in."""
    task: Any = None
    reward: RewardConfig = RewardConfig()
    sampler: SamplerConfig = SamplerConfig()
    algorithm: GRPOConfig = GRPOConfig()
    optimizer: AdamWConfig = AdamWConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def task_name(self) -> str:
        """Return the name of the innermost task, whose questions are asked."""
        return self.task_names[-1]


def load(recipe: Path | None, overrides: Sequence[str] = (), prog: str = "pellucid train") -> Config:
    """Return the settings of a recipe (or of a run's config.json) with `--section.key VALUE` overrides.

    UserError, one line, for a mistake in the file or a number that is not finite. Other mistakes on the command line
    are printed by tyro, which exits with status 2.
    """
    typed, schema = _built(read(recipe) if recipe else {}, str(recipe or "the default recipe"))
    if overrides:
        flat = (tyro.conf.AvoidSubcommands,)
        typed = tyro.cli(schema, default=typed, args=renamed_flags(overrides), config=flat, prog=prog)
    return _checked(typed, schema)


def build(values: Mapping[str, Any], source: str) -> Config:
    """Return the settings of nested sections, as they stand in a recipe. UserError, naming `source`, as in `load`."""
    return _checked(*_built(values, source))


def _built(values: Mapping[str, Any], source: str) -> tuple[Config, type[Config]]:
    schema = _schema(values.get("task", {}), source)
    if "task" in values:
        values = {**values, "task": _nameless(values["task"], _type_of(schema, "task"))}
    try:
        return schema.model_validate(values), schema
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {_explain(error, schema)}") from error


def _checked(typed: Config, schema: type[Config]) -> Config:
    for key, value in _floats({name: getattr(typed, name) for name in schema.model_fields}):
        if not math.isfinite(value):
            raise UserError(f"{key.removeprefix('.')} = {value} must be a finite number")
    return typed.model_copy(update={"task": _untyped(typed.task, schema.task_names)})


def _floats(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield every setting that is a float, however deep, with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from _floats(item, f"{key}.{name}")


def resolved(config: Config) -> Config:
    """Return the settings with max_length and the task's seed filled in, which follow from other sections."""
    algorithm = config.algorithm
    length = algorithm.max_length or config.sampler.max_tokens
    return config.model_copy(
        update={"algorithm": replace(algorithm, max_length=length), "task": seeded(config.task, algorithm.seed)}
    )


def dump(config: Config) -> dict[str, Any]:
    """Return all settings as JSON values that `load` reads back."""
    values = config.model_dump(mode="json")
    return {**values, "task": _named(values["task"], config.task_names)}


def read(path: Path) -> dict[str, Any]:
    """Return the settings that stand in a TOML file or in a run's config.json. UserError for an unreadable file."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return renamed({key: value for key, value in json.loads(text).items() if key in Config.model_fields}, "")
        return renamed(tomllib.loads(text), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, KeyError) as error:
        raise UserError(f"{path}: {error}") from error


def _schema(task: Any, source: str) -> type[Config]:
    """Return a Config class whose field `task` has the class that `task.name` stands for."""
    cls, names = _typed_task(task, source, "task")
    schema = pydantic.create_model("Config", __base__=Config, task=(cls, Field(default_factory=cls)))
    schema.task_names = names
    return schema


def _typed_task(section: Any, source: str, path: str) -> tuple[type, tuple[str, ...]]:
    """Return the class of a task section, and the names of its tasks from the outside in. UserError for a bad section.

    In the class of a wrapper the field `task` has the class of the task inside.
    """
    if not isinstance(section, Mapping):
        raise UserError(f"{source}: {path} must be a table: [{path}] with name = ...")
    name = section.get("name", Config.task_names[0])
    cls = task_class(name) if isinstance(name, str) else None
    if not dataclasses.is_dataclass(cls):
        raise UserError(f"{source}: {path}.name = {name!r} is no dataclass: put @dataclass(frozen=True) above it")
    if not wraps(cls):
        return cls, (name,)
    inside, names = _typed_task(section.get("task", {}), source, f"{path}.task")
    own = [("task", inside, dataclasses.field(default_factory=inside))]
    return dataclasses.make_dataclass(cls.__name__, own, bases=(cls,), frozen=True), (name, *names)


def _untyped(task: Any, names: Sequence[str]) -> Any:
    """Return the task with wrappers of their own classes: those made by `_typed_task` cannot be pickled."""
    if not wraps(task):
        return task
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return task_class(names[0])(**{**values, "task": _untyped(task.task, names[1:])})


def _nameless(section: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """Return the section without `name` where the class of the task has no such field."""
    known = {field.name: field.type for field in dataclasses.fields(cls)}
    kept = {key: value for key, value in section.items() if key != "name" or "name" in known}
    if wraps(cls) and "task" in kept:
        kept["task"] = _nameless(kept["task"], known["task"])
    return kept


def _named(section: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    inside = {"task": _named(section["task"], names[1:])} if len(names) > 1 else {}
    return {**section, **inside, "name": names[0]}


def _explain(error: pydantic.ValidationError, schema: type[Config]) -> str:
    """Return the first error as one line, with the key that was probably meant."""
    first = error.errors()[0]
    *section, key = [str(part) for part in first["loc"]]
    path = ".".join([*section, key])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys(schema, section)
        close = difflib.get_close_matches(key, known, 1)
        return f"{path}: no such key; " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}")
    return f"{path}: {first['msg'].removeprefix('Value error, ')}"


def _keys(schema: type[Config], section: Sequence[str]) -> list[str]:
    cls = _type_of(schema, *section)
    if cls is schema:
        return list(schema.model_fields)
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _type_of(schema: type[Config], *section: str) -> Any:
    """Return the type of a section such as task, task.task or algorithm; None where there is no such section."""
    if not section:
        return schema
    cls: Any = schema.model_fields[section[0]].annotation
    for name in section[1:]:
        cls = {f.name: f.type for f in dataclasses.fields(cls)}.get(name) if dataclasses.is_dataclass(cls) else None
    return cls
