"""Settings by their names, as keywords: `steps=30` for algorithm.steps, `evaluate_every=5` for evaluate.every."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pellucid.config import SECTIONS
from pellucid.machine.plugins import did_you_mean, in_one_line
from pellucid.renames import of_trl
from pellucid.types import UserError

OF_EVERY_TASK = ("name", "seed", "split", "task")
"""Fields of a task that are no settings of their own: `seed` is algorithm.seed, which is that of the task, too."""

MEANT = {"dtype": "policy"}
"""Of names that several sections have, those that mean one of them: sampler.dtype is of rollouts alone."""

ARGUMENTS = {"policy.model": "model", "task.data": "data", "task.rewards": "reward", "sampler.name": "sampler_name"}
"""The keywords of settings that pellucid.train takes by names of its own, or whose own name says too little."""

Sections = dict[str, dict[str, Any]]


def sections_of(settings: Mapping[str, Any], task: type | None) -> Sections:
    """Return keywords by section and key, as a recipe has them. `task` is the class of the task, where it is known.

    A name that one section alone has is enough, and so is `dtype`, which is policy.dtype; else it is `section_name`,
    which does for every setting. UserError, naming the choices, for an ambiguous one, and the nearest for one that does
    not exist.
    """
    known = keys_of(task)
    sections: Sections = {}
    mistakes = []
    for name, value in settings.items():
        try:
            section, key = place_of(name, known)
        except UserError as error:
            mistakes.append(str(error))
        else:
            sections.setdefault(section, {})[key] = value
    if mistakes:
        raise UserError(in_one_line(mistakes))
    return sections


def keys_of(task: type | None) -> dict[str, list[str]]:
    """Return the keys of each section."""
    classes = {name: cls for name, cls in SECTIONS.items() if name != "task"}
    known = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in classes.items()}
    own = [field.name for field in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
    return {**known, "task": [name for name in own if name not in OF_EVERY_TASK]}


def place_of(name: str, known: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return section and key of a keyword."""
    whole = {f"{section}_{key}": (section, key) for section, keys in known.items() for key in keys}
    if name in whole:
        return whole[name]
    sections = [section for section, keys in known.items() if name in keys]
    if len(sections) == 1 or name in MEANT:
        return MEANT.get(name, sections[0]), name
    if sections:
        raise UserError(f"{name} is a setting of {' and '.join(sections)}: say {either(name, sections)}")
    if known.get(name):
        raise UserError(f"{name} is a section: say {name}_{known[name][0]}=... for its setting {known[name][0]}")
    names = [*(key for keys in known.values() for key in keys), *whole]
    hint = (
        of_trl(name, keyword_of(known))
        or did_you_mean(name, names).replace('"', "")
        or "; docs/library.md says how settings are named"
    )
    raise UserError(f"pellucid.train has no setting {name}{hint}")


def keyword_of(known: Mapping[str, list[str]]) -> Callable[[str], str]:
    """Return what writes a setting, such as evaluate.every, as the keyword that it is: evaluate_every."""

    def keyword(setting: str) -> str:
        section, _, key = setting.rpartition(".")
        if setting in ARGUMENTS:
            return ARGUMENTS[setting]
        shared = sum(key in keys for keys in known.values()) > 1 and key not in MEANT
        return f"{section}_{key}" if shared else key

    return keyword


def either(name: str, sections: list[str]) -> str:
    *others, last = [f"{section}_{name}" for section in sections]
    return f"{', '.join(others)} or {last}"
