"""Functions and tasks that are given as objects: by the name of a file where they have one, else "here:NAME"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from sys import modules
from typing import Any

from pellucid.machine.plugins import HERE
from pellucid.protocols import grades_together
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks import TASKS
from pellucid.tasks.given import class_around
from pellucid.tasks.wrappers import is_local, wraps
from pellucid.training.files import AXES
from pellucid.types import UserError

Term = str | Callable[..., Any] | RewardTerm | Mapping[str, Any]
Terms = Term | tuple[Term, float] | Sequence[Term | tuple[Term, float]]
"""What `reward=` takes: a term, one with its weight, or a list of them."""
FORMS = 'give a function, the name of a term, "file.py:function", (one of these, weight), or a list of them'
SHIPPED = {spec: name for name, spec in TASKS.items()}


class Objects(dict[str, Any]):
    """What was given to a run, by the names that its settings have for it."""

    def register(self, thing: Any, name: str) -> str:
        """Return the name of an object; another of the same name gets a number."""
        specs = (f"{HERE}{name}{f'-{number}' if number > 1 else ''}" for number in range(1, len(self) + 2))
        spec = next(spec for spec in specs if self.get(spec, thing) is thing)
        self[spec] = thing
        return spec


def terms_of(reward: Any, objects: Objects) -> list[Any]:
    """Return the terms of a reward as a recipe has them. UserError for what is none."""
    if isinstance(reward, list):
        terms = [term for each in reward for term in terms_of(each, objects)]
        if not terms:
            raise UserError(f"reward is an empty list: {FORMS}")
        return terms
    if isinstance(reward, tuple):
        if len(reward) != 2 or isinstance(reward[1], bool) or not isinstance(reward[1], int | float):
            raise UserError(f"reward has a tuple that is no pair of a term and its weight: {FORMS}")
        return [{"name": name_of(reward[0], objects), "weight": reward[1]}]
    if isinstance(reward, RewardTerm):
        return [dataclasses.asdict(reward)]
    return [dict(reward)] if isinstance(reward, Mapping) else [{"name": name_of(reward, objects)}]


def name_of(reward: Any, objects: Objects) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"reward is of type {type(reward).__name__}: {FORMS}")
    return objects.register(reward, called(reward))


def axes_named(sections: Mapping[str, Mapping[str, Any]], objects: Objects) -> dict[str, Any]:
    """Return the sections with names for an advantage or an objective that is a function."""
    keys = dict(sections.get("algorithm", {}))
    keys |= {axis: objects.register(keys[axis], called(keys[axis])) for axis in AXES if callable(keys.get(axis))}
    return {**sections, **({"algorithm": keys} if keys else {})}


def called(function: Callable[..., Any]) -> str:
    """Return the name of a function, as its metric has it."""
    inner = getattr(function, "func", function)  # of functools.partial
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


def section_of(task: Any, objects: Objects) -> dict[str, Any]:
    """Return the section of a recipe for a task: its name and, of a dataclass, its fields. UserError for what is none.

    A class of a file goes by the name of the file, so that other processes find it; so do all that it wraps. What a
    recipe could not hold, be it no dataclass or one with a model among its fields, stays as the object that it is; so
    does one with a `name` of its own, for which a recipe has no place.
    """
    if isinstance(task, str):
        return {"name": task}
    if isinstance(task, type):
        return {"name": class_name(task, objects)}
    missing = [name for name in ("sample", "reward") if not callable(getattr(task, name, None))]
    if grades_together(task):
        missing = [name for name in missing if name != "reward"]
    if missing:
        raise UserError(f"task is of type {type(task).__name__}, which has no {' and no '.join(missing)}")
    known = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
    fields = {field.name for field in known if field.init}
    named_itself = "name" in fields and f"{type(task).__module__}:{type(task).__qualname__}" not in SHIPPED
    if not wraps(task) and (named_itself or not {"seed", "split"} <= fields or not is_plain(task)):
        return {"name": objects.register(class_around(task), type(task).__name__)}
    values = {name: getattr(task, name) for name in fields if name != "name"}
    if values.get("seed") == 0:  # which is that of the run
        del values["seed"]
    if wraps(task):
        values["task"] = section_of(values["task"], objects)
    return {**values, "name": class_name(type(task), objects)}


def class_name(cls: type, objects: Objects) -> str:
    """Return the name under which a recipe finds a class."""
    if is_local(cls) or "." in cls.__qualname__:
        return objects.register(cls, cls.__qualname__.rpartition(".")[2])
    spec = f"{cls.__module__}:{cls.__qualname__}"
    file = getattr(modules.get(cls.__module__), "__file__", None)
    if spec not in SHIPPED and file and Path(file).stem == cls.__module__:
        return f"{file}:{cls.__qualname__}"
    return SHIPPED.get(spec, spec)


def is_plain(value: Any) -> bool:
    """Return whether a recipe could hold a value."""
    if dataclasses.is_dataclass(value):
        return all(is_plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)
