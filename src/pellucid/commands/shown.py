"""The settings as tyro shows them in a command's help: their flags, types, docstrings and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import tyro
from tyro.conf import Suppress, arg

from pellucid import config, flags
from pellucid.config import SECTIONS, Config
from pellucid.tasks import TASKS
from pellucid.tasks.wrappers import wraps
from pellucid.types import UserError

EVERYDAY = {
    "policy": ("model", "lora"),
    "sampler": ("max_tokens", "temperature"),
    "algorithm": (
        "steps",
        "prompts_per_step",
        "group_size",
        "micro_batch",
        "advantage",
        "objective",
        "kl_coef",
        "seed",
    ),
    "optimizer": ("lr", "schedule"),
    "evaluate": ("every", "n", "k"),
    "checkpoint": ("every",),
    "log": ("tensorboard", "wandb"),
}
"""The twenty settings that people change, besides those of the task."""
NAME = Annotated[str, arg(metavar="TASK", help="One of `pellucid list tasks`, or your own: path/to/file.py:Class.")]


def with_settings(command: type[Any], recipe: Path | None, args: Sequence[str], all_settings: bool) -> type[Any]:
    """Return the class of a command with its settings as a field; their values are those of the recipe and the words.

    Unless `everything` is wanted, the settings are those of EVERYDAY and of the task.
    """
    read, over = config.read(recipe) if recipe else {}, flags.sections(args)
    values, code = config.merged(read, over), config.code_in(read)
    cfg, task = None, {}
    try:
        if code:  # of the recipe, which may be anybody's: help does not run it
            cfg = config.build(without_task(read), str(recipe), without_task(over))
            task = of_task_as_written(values.get("task", {}))
        else:
            cfg = config.load(recipe, args)
            task = of_task(values.get("task", {}), cfg.task)
    except UserError as refused:  # such as a task that cannot be made yet, as nothing names its data
        try:
            task = (of_task_as_written if code else partial(of_task, task=None))(values.get("task", {}))
        except config.MistakeError:
            raise refused from None
    shown = {}
    for name, cls in SECTIONS.items():
        if name == "task":
            shown[name] = task
        elif all_settings or name in EVERYDAY:
            shown[name] = derived(cls, fields_of(cls, getattr(cfg, name, None), () if all_settings else EVERYDAY[name]))
    settings = dataclasses.make_dataclass("Settings", [(name, cls, made_by(cls)) for name, cls in shown.items()])
    return derived(command, [("settings", Annotated[settings, arg(name="")], made_by(settings))])


def without_task(sections: config.Values) -> dict[str, Any]:
    return {name: section for name, section in sections.items() if name != "task"}


def of_task_as_written(section: Any) -> type[Any]:
    """Return the class of a task with the values that its section states, without importing code that it names.

    A task that is such code shows its name alone.
    """
    name = section.get("name", Config.task_names[0]) if isinstance(section, Mapping) else None
    if isinstance(name, str) and name not in TASKS:
        field = ("name", NAME, dataclasses.field(default=name))
        return dataclasses.make_dataclass("Task", [field], namespace={"__doc__": "A task of its own."})
    _, cls = config.named_task(section, ["task"])
    fields = [field for field in fields_of(cls, as_written(section)) if field[0] not in ("name", "task")]
    if wraps(cls):
        inside = of_task_as_written(section.get("task", {}))
        fields.append(("task", inside, made_by(inside)))
    return derived(cls, [("name", NAME, dataclasses.field(default=name)), *fields])


def as_written(section: Mapping[str, Any]) -> SimpleNamespace:
    """Return the plain values of a section as attributes, and terms of the reward by their names."""
    plain: dict[str, Any] = {name: value for name, value in section.items() if isinstance(value, str | int | float)}
    terms = section.get("rewards")
    if isinstance(terms, list):
        named = [term.get("name", "") if isinstance(term, Mapping) else term for term in terms]
        plain["rewards"] = tuple(SimpleNamespace(name=name) for name in named)
    return SimpleNamespace(**plain)


def of_task(section: Any, task: Any) -> type[Any]:
    """Return the class of the task that a section names; in that of a wrapper stands that of the task inside."""
    name, cls = config.named_task(section, ["task"])
    fields = [field for field in fields_of(cls, task) if field[0] not in ("name", "task")]
    if wraps(cls):
        inside = of_task(section.get("task", {}), task and task.task)
        fields.append(("task", inside, made_by(inside)))
    return derived(cls, [("name", NAME, dataclasses.field(default=name)), *fields])


def fields_of(cls: type[Any], value: Any, shown: Sequence[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each field, the default that of `value` if there is one.

    Fields that are not among `shown` are hidden, where it is not empty.
    """
    fields, kinds = [], flags.fields_of(cls)
    for field in dataclasses.fields(cls):
        kind, default = kinds.get(field.name, Any), getattr(value, field.name, default_of(field))
        by_name = "name" in flags.fields_of(flags.item_of(kind))  # as reward terms are
        if by_name and isinstance(default, list | tuple):
            default = tuple(item.name for item in default)
        told: Any = tuple[str, ...] if by_name else kind
        hidden = not field.init or (shown and field.name not in shown)
        fields.append((field.name, Suppress[told] if hidden else told, made_by(partial(as_it_is, default))))
    return fields


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return tyro.MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


def derived(cls: type[Any], fields: Sequence[tuple[str, Any, Any]]) -> type[Any]:
    """Return a class like `cls` with these fields, which refuses no values; tyro reads the docstrings of `cls`."""
    own = {"__doc__": cls.__doc__, "__post_init__": as_it_is}
    frozen = cls.__dataclass_params__.frozen
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=frozen, namespace=own)


def made_by(factory: Callable[[], Any]) -> Any:
    return dataclasses.field(default_factory=factory)


def as_it_is(value: Any) -> Any:
    return value
