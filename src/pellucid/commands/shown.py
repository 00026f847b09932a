"""The settings as tyro shows them in a command's help: their flags, types, docstrings and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Suppress, arg

from pellucid import config, flags
from pellucid.config import SECTIONS
from pellucid.tasks import task_class
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


def with_settings(command: type[Any], recipe: Path | None, words: Sequence[str], everything: bool) -> type[Any]:
    """Return the class of a command with its settings as a field; their values are those of the recipe and the words.

    Unless `everything` is wanted, the settings are those of EVERYDAY and of the task.
    """
    values = config.merged(config.read(recipe) if recipe else {}, flags.sections(words))
    try:
        cfg = config.load(recipe, words)
    except UserError:  # such as a task that cannot be made yet, as nothing names its data
        cfg = None
    shown = {}
    for name, cls in SECTIONS.items():
        value = getattr(cfg, name, None)
        if name == "task":
            shown[name] = of_task(values.get("task", {}), value)
        elif everything or name in EVERYDAY:
            shown[name] = derived(cls, fields_of(cls, value, () if everything else EVERYDAY[name]))
    settings = dataclasses.make_dataclass("Settings", [(name, cls, made_by(cls)) for name, cls in shown.items()])
    return derived(command, [("settings", Annotated[settings, arg(name="")], made_by(settings))])


def of_task(values: Any, task: Any) -> type[Any]:
    """Return the class of the task that a section names; in that of a wrapper stands that of the task inside."""
    name = config.name_of(values)
    cls = task_class(name)
    fields = [field for field in fields_of(cls, task) if field[0] not in ("name", "task")]
    if wraps(cls):
        inside = of_task(values.get("task", {}), task and task.task)
        fields.append(("task", inside, made_by(inside)))
    return derived(cls, [("name", NAME, dataclasses.field(default=name)), *fields])


def fields_of(cls: type[Any], value: Any, shown: Sequence[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each field, the default that of `value` if there is one.

    Fields that are not among `shown` are hidden, where it is not empty.
    """
    fields = []
    for field in dataclasses.fields(cls):
        kind, default = flags.fields_of(cls)[field.name], getattr(value, field.name, default_of(field))
        if "name" in flags.fields_of(flags.item_of(kind)):  # reward terms, which are given by their names
            kind, default = tuple[str, ...], tuple(item.name for item in default)
        kind = kind if not shown or field.name in shown else Suppress[kind]
        fields.append((field.name, kind, made_by(partial(as_it_is, default))))
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
