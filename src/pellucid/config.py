"""The settings of a run: the command line overrides recipe.toml, which overrides the defaults.

Each section is a dataclass; that of `[task]` is the class of the task, inside which a wrapper has that of another task.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import reprlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pydantic

from pellucid import flags
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.machine import nearby
from pellucid.machine.endpoint import is_for_keys
from pellucid.machine.plugins import HERE, did_you_mean, in_one_line
from pellucid.renames import of_trl, renamed
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.terms import MODEL, is_function
from pellucid.runtimes.settings import RuntimeConfig
from pellucid.sections import CheckpointConfig, EvaluateConfig, LogConfig, PolicyConfig, SamplerConfig
from pellucid.tasks import TASKS, task_class
from pellucid.tasks.sources import is_pattern, matching
from pellucid.tasks.wrappers import seeded, wraps
from pellucid.types import MissingFileError, UserError

AT_LINE = re.compile(r"\(at line (\d+)")
IN_QUOTES = re.compile(r'"[^"\n]*\\')
Values = Mapping[str, Any]
Place = Sequence[str]
"""Where a setting stands: its section, then its key, and so on inwards."""


class MistakeError(Exception):
    """What is wrong with the setting or the section at a place, in one line.

    unknown: the key is not known. others: further keys of the section that are not known.
    """

    def __init__(
        self, key_path: Place, message: str, is_unknown_key: bool = False, further_errors: Sequence[MistakeError] = ()
    ) -> None:
        super().__init__(message)
        self.key_path, self.is_unknown_key, self.further_errors = key_path, is_unknown_key, further_errors


@dataclass(frozen=True)
class Config:
    """The settings of a run, section by section, as recipe.toml and the command line name them."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    task: Any = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    task_names: tuple[str, ...] = ("arithmetic",)
    """The names of the task and of those that it wraps, from the outside in; no section of a recipe."""

    @property
    def task_name(self) -> str:
        """Return the name of the innermost task, whose questions are asked."""
        return self.task_names[-1]


SECTIONS = {name: kind for name, kind in get_type_hints(Config).items() if name != "task_names"}
"""The class of each section by its name; that of the task is not known before its name is."""


def load(recipe: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a recipe (or of a run's config.json) with `--section.key VALUE` overrides.

    UserError, one line, for a mistake in either.
    """
    over = renamed(flags.sections(overrides), flags.COMMAND_LINE)
    nearby.remember(None)
    values = read(recipe) if recipe else {}
    if "variants" in values and "base" in values:
        raise UserError(f"{recipe} is a study, and no recipe: pellucid study {recipe} trains its variants")
    try:
        return build(values, str(recipe or "the default recipe"), over)
    except MissingFileError as error:
        raise UserError(f"{error}{nearby.looked_for(error.path)}") from error


def build(values: Values, source: str, overrides: Values | None = None) -> Config:
    """Return the settings of nested sections, as they stand in a recipe, with those of the command line over them.

    UserError, one line, that names `source` or the command line, for a mistake.
    """
    overrides = overrides or {}
    whole, sections, task, names = merged(values, overrides), dict[str, Any](), None, ()
    mistakes = [
        MistakeError([name], _unknown(name, list(SECTIONS)), is_unknown_key=True)
        for name in whole
        if name not in SECTIONS
    ]
    try:
        task, names = _task(whole.get("task", {}), ["task"])
    except MistakeError as mistake:
        mistakes += [mistake, *mistake.further_errors]
    for name, cls in SECTIONS.items():
        try:
            sections |= {} if name == "task" else {name: _section(cls, whole.get(name, {}), [name])}
        except MistakeError as mistake:
            mistakes += [mistake, *mistake.further_errors]
    if mistakes:
        unknown = [mistake for mistake in mistakes if mistake.is_unknown_key]
        told = (_told(mistake, source, overrides) for mistake in unknown or mistakes[:1])
        raise UserError(in_one_line(told)) from mistakes[0]
    for key, value in _floats({**sections, "task": task}):
        if not math.isfinite(value):
            raise UserError(f"{key.removeprefix('.')} = {value} must be a finite number")
    if sections["sampler"].other_arithmetic and "correction" not in whole.get("algorithm", {}):
        sections["algorithm"] = replace(sections["algorithm"], correction="token")  # whoever wants none can say it
    return Config(**sections, task=task, task_names=names)


def resolved(config: Config) -> Config:
    """Return the settings with max_length and the task's seed filled in, which follow from other sections."""
    algorithm = config.algorithm
    length = algorithm.max_length or config.sampler.max_tokens
    return replace(config, algorithm=replace(algorithm, max_length=length), task=seeded(config.task, algorithm.seed))


def dump(config: Config) -> dict[str, Any]:
    """Return all settings as JSON values that `load` reads back."""
    sections = {name: _plain(getattr(config, name)) for name in SECTIONS if name != "task"}
    return {**sections, "task": _named(config.task, config.task_names)}


def read(path: Path) -> dict[str, Any]:
    """Return the settings that stand in a TOML file or in a run's config.json. UserError for an unreadable file."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors put a mark of the encoding before it
        if path.suffix == ".json":
            record = json.loads(text)
            if not isinstance(record, dict):
                raise UserError(f"{path}: no object of settings, as in the config.json of a run")
            return renamed({key: value for key, value in record.items() if key in SECTIONS}, "")
        nearby.remember(path.parent)
        return beside(renamed(tomllib.loads(text), str(path)), path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: {error}{backslash(text, str(error))}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {error}") from error


# ---------------------------------------------------------------- what a file may do by itself


def code_in(values: Values) -> list[str]:
    """Return the code of the user's or of others that sections name, which runs once they are loaded.

    Example: code_in({"task": {"name": "my_task.py:Riddles"}}) == ["my_task.py:Riddles"]
    """
    algorithm = values.get("algorithm", {})
    axes = [algorithm.get(key) for key in ("advantage", "objective")] if isinstance(algorithm, Mapping) else []
    tasks = list(_task_sections(values.get("task")))
    named = [*axes, *(value for section in tasks for value in _named_in_task(section))]
    found = [value for value in named if isinstance(value, str) and ":" in value and not value.startswith(HERE)]
    commands = [run for section in tasks if isinstance(run := section.get("run"), str) and run and run not in found]
    return list(dict.fromkeys([*found, *commands]))


def refuse_other_variables(values: Values, overrides: Sequence[str], source: Any, advice: str = "") -> None:
    """Raise UserError if a file by itself has a judge send an environment variable that is not named for keys.

    What the command line names is the user's own choice. The name is not told: it may be the key itself.
    """
    for section in _task_sections(merged(values, renamed(flags.sections(overrides), flags.COMMAND_LINE)).get("task")):
        terms = section.get("rewards")
        for i, term in enumerate(terms if isinstance(terms, list) else []):
            judge = term.get("judge") if isinstance(term, Mapping) else None
            key = judge.get("key") if isinstance(judge, Mapping) else None
            if isinstance(key, str) and not is_for_keys(key):
                setting = f"rewards.{i}.judge.key"
                own = advice or f"if you mean another, say so on the command line: --task.{setting} NAME"
                raise UserError(
                    f"{source}: {setting} is sent to an address of this file, and by itself it may only name a variable"
                    f" that is named for keys, *_KEY or *_TOKEN, without SECRET, PRIVATE or PASSWORD; {own}"
                )


def _task_sections(section: Any) -> Iterator[Values]:
    """Yield the section of a task and those of the tasks inside."""
    if isinstance(section, Mapping):
        yield section
        yield from _task_sections(section.get("task"))


def _named_in_task(section: Values) -> Iterator[Any]:
    """Yield what may name code in the section of a task, wherever it stands."""
    if (name := section.get("name")) not in list(TASKS):  # it may be of any type
        yield name
    terms = section.get("rewards")
    for term in terms if isinstance(terms, list) else []:
        name = term.get("name") if isinstance(term, Mapping) else term
        if isinstance(name, str) and is_function(name):
            yield name
    environment, tools = section.get("environment"), section.get("tools")
    yield from environment.values() if isinstance(environment, Mapping) else [environment]
    yield from tools if isinstance(tools, list) else [tools]


# ---------------------------------------------------------------- what a file states


def backslash(text: str, error: str) -> str:
    """Return a hint where the line that TOML cannot read has a backslash in double quotes, as in a path of Windows."""
    found = AT_LINE.search(error)
    line = text.splitlines()[int(found[1]) - 1] if found and int(found[1]) <= len(text.splitlines()) else ""
    if not IN_QUOTES.search(line):
        return ""
    return "; in double quotes a backslash begins an escape: write a path in single quotes, 'C:\\Users\\me', or with /"


def beside(values: Any, folder: Path, place: Place = ()) -> Any:
    """Return the values of a recipe, the relative paths in them that lead to files from its folder as seen from here.

    Others stay as they are: they lead to files from the working directory, or to none.
    """
    if folder.resolve() == Path().resolve():
        return values
    if isinstance(values, Mapping):
        return {key: beside(value, folder, (*place, key)) for key, value in values.items()}
    if isinstance(values, list):
        return [beside(value, folder, place) for value in values]
    return path_beside(values, folder, place) if isinstance(values, str) else values


def path_beside(value: str, folder: Path, place: Place) -> str:
    model = value.removeprefix(MODEL) if value.startswith(MODEL) else value
    if place == ("base",):  # of a study, which looks for it beside itself
        return value
    if not model or "\n" in value or os.path.isabs(os.path.expanduser(model)):
        return value
    joined = os.path.join(folder, model)
    if (value.startswith(MODEL) or place == ("policy", "model")) and value != PolicyConfig.model:
        found = os.path.isfile(os.path.join(joined, "config.json")) or os.path.isfile(joined)
        return f"{value[: len(value) - len(model)]}{joined}" if found else value
    source, colon, name = value.rpartition(":")
    if colon and source.endswith(".py") and name.isidentifier():
        return os.path.join(folder, value) if os.path.isfile(os.path.join(folder, source)) else value
    if is_pattern(value):
        return joined if matching(joined) else value
    return joined if Path(value).suffix and os.path.isfile(joined) else value


# ---------------------------------------------------------------- one over the other


def merged(base: Values, overrides: Values) -> dict[str, Any]:
    """Return `base` with the values of `over` in place of its own, table by table."""
    return {**base, **{key: _laid(key, base.get(key, {}), value) for key, value in overrides.items()}}


def _laid(key: str, base: Any, over: Any) -> Any:
    if isinstance(base, list) and isinstance(over, Mapping) and all(place.isdecimal() for place in over):
        if beyond := [place for place in over if int(place) >= len(base)]:
            raise UserError(f"{flags.COMMAND_LINE}: {key}.{beyond[0]}: the last there is is {key}.{len(base) - 1}")
        return list(merged(dict(zip(map(str, range(len(base))), base, strict=True)), over).values())
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    return _merged_task(base, over) if key == "task" else merged(base, over)


def _merged_task(base: Values, over: Values) -> Any:
    """Return the task section of `base`, changed by `over`.

    A task of another name replaces that of the base and takes none of its settings; a wrapper goes around it.
    """
    base_name = _name(base)
    name = _name(over, base_name)
    if name == base_name:
        return merged(base, over)
    wrapper = isinstance(name, str) and wraps(task_class(name))  # `named_task` refuses other names
    return {**over, "task": _laid("task", base, over.get("task", {}))} if wrapper else over


def _name(section: Values, otherwise: Any = Config.task_names[0]) -> Any:
    """Return the name of a task's section, which may still be a word of the command line."""
    name = section.get("name", otherwise)
    return " ".join(name) if isinstance(name, flags.Words) else name


# ---------------------------------------------------------------- sections and values


def _section(cls: Any, values: Any, place: Place) -> Any:
    """Return the section as its class. MistakeError where it cannot be that."""
    if not isinstance(values, Mapping):
        raise MistakeError(place, f"must be a table: [{'.'.join(place)}]")
    try:
        return _adapter(cls).validate_python((flags.typed(values, cls, ".".join(place)),))[0]
    except pydantic.ValidationError as error:
        unknown = [each["loc"][1:] for each in error.errors() if each["type"] == "unexpected_keyword_argument"]
        if unknown:
            first, *others = [_unknown_at(cls, place, inside) for inside in unknown]
            raise MistakeError(first.key_path, str(first), True, others) from error
        first = error.errors()[0]
        inside = first["loc"][1:]
        told = f"{first['msg']} (got {reprlib.repr(first['input'])})"
        if first["type"] in ("tuple_type", "list_type") and isinstance(first["input"], Mapping):
            told = f"is a list of tables: write it in double brackets, [[{'.'.join([*place, *map(str, inside)])}]]"
        if first["type"] == "value_error":
            told = first["msg"].removeprefix("Value error, ")
        raise MistakeError([*place, *map(str, inside)], told) from error


def _unknown_at(cls: Any, place: Place, inside: Sequence[int | str]) -> MistakeError:
    """Return the mistake that a key in a section is not known."""
    told = _unknown(str(inside[-1]), _keys(cls, inside[:-1]))
    if place[0] == "task" and len(inside) == 1 and (others := _tasks_with(str(inside[-1]))):
        told = f"no such key in this task; {' and '.join(others)} has it: name the task with task.name"
    return MistakeError([*place, *map(str, inside)], told, is_unknown_key=True)


def _told(mistake: MistakeError, source: str, over: Values) -> str:
    stated = flags.COMMAND_LINE if _states(over, mistake.key_path) else source
    return f"{stated}: {'.'.join(mistake.key_path)}: {mistake}"


def named_task(section: Any, place: Place) -> tuple[str, type[Any]]:
    """Return the name in the section of a task, and the class that it stands for. MistakeError where there is none."""
    if not isinstance(section, Mapping):
        raise MistakeError(place, f"must be a table: [{'.'.join(place)}] with name = ...")
    name = _name(section)
    if not isinstance(name, str):
        raise MistakeError([*place, "name"], f"must be a text (got {name!r})")
    cls = task_class(name)
    if not dataclasses.is_dataclass(cls):
        raise MistakeError([*place, "name"], f"{name!r} is no dataclass: put @dataclass(frozen=True) above it")
    return name, cls


def _task(section: Any, place: Place) -> tuple[Any, tuple[str, ...]]:
    """Return the task of a section, and the names of its tasks from the outside in. MistakeError where it is none."""
    name, cls = named_task(section, place)
    own = {key: value for key, value in section.items() if key != "name" or key in flags.fields_of(cls)}
    if not wraps(cls):
        return _section(cls, own, place), (name,)
    inside, names = _task(section.get("task", {}), [*place, "task"])
    return _section(cls, {**own, "task": inside}, place), (name, *names)


@cache
def _adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    """Return what reads and writes a section. In a tuple, since a dataclass by itself would overlook unknown keys."""
    alone: Any = tuple.__class_getitem__(cls)
    return pydantic.TypeAdapter(alone, config=pydantic.ConfigDict(extra="forbid", hide_input_in_errors=True))


def _plain(section: Any) -> dict[str, Any]:
    return _adapter(type(section)).dump_python((section,), mode="json")[0]


def _named(task: Any, names: Sequence[str]) -> dict[str, Any]:
    inside = {"task": _named(task.task, names[1:])} if len(names) > 1 else {}
    return {**_plain(task), **inside, "name": names[0]}


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


# ---------------------------------------------------------------- mistakes


def _unknown(key: str, known: Sequence[str]) -> str:
    there = f"; there are {', '.join(known)}" if known else ""
    return f"no such key{of_trl(key) or did_you_mean(key, known) or there}"


def _keys(cls: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys of the record at this place in a section."""
    for part in place:
        cls = flags.item_of(cls) if isinstance(part, int) else flags.fields_of(cls).get(str(part))
    return list(flags.fields_of(cls))


def _tasks_with(key: str) -> list[str]:
    """Return the tasks that have a setting of this name."""
    return [name for name in TASKS if key in flags.fields_of(task_class(name))]


def _states(over: Values, place: Place) -> bool:
    """Return whether the command line states a setting at this place, or in the section that stands there."""
    for part in place:
        inside = over.get(part)
        if not isinstance(inside, Mapping):
            return inside is not None
        over = inside
    return bool(over)
