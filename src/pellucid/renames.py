"""Accept the former names of settings in recipes, runs and command lines, and print the new ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEYS = {("algorithm", "min_spread"): "min_reward_range"}
VALUES = {
    ("algorithm", "objective"): {
        "naive": "reinforce",
        "unclipped": "importance_weighted",
        "clipped": "ppo_clip",
        "dynamic": "dcpo",
    },
}


def renamed(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the sections of a recipe with keys and values by their new names.

    Print a line for each old name, unless `source`, which says where it stands, is empty.
    """
    return {section: _section(section, keys, source) for section, keys in values.items()}


def _section(section: str, keys: Any, source: str) -> Any:
    if not isinstance(keys, Mapping):
        return keys
    now = {}
    for key, value in keys.items():
        new_key, new_value = new_names(section, key, value)
        if source and (new_key, new_value) != (key, value):
            tell(source, f'{section}.{key} = "{value}"', f'{new_key} = "{new_value}"')
        now[new_key] = new_value
    return now


def new_names(section: str, key: str, value: Any) -> tuple[str, Any]:
    known = VALUES.get((section, key), {})
    return KEYS.get((section, key), key), known.get(value, value) if isinstance(value, str) else value


def renamed_flags(arguments: Sequence[str]) -> list[str]:
    """Return arguments like `--section.key VALUE` or `--section.key=VALUE` by their new names. Print each old one."""
    return list(_flags(arguments))


def _flags(arguments: Sequence[str]) -> Iterator[str]:
    waiting = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("--") else (waiting, "", argument)
        section, _, key = flag.removeprefix("--").replace("-", "_").partition(".")
        new_key, new_value = new_names(section, key, value)
        if argument.startswith("--"):
            flag = flag if new_key == key else f"--{section}.{new_key}"
            waiting, now = ("" if equals else flag), f"{flag}{equals}{new_value}"
        else:
            waiting, now = "", new_value
        if now != argument:
            tell("the command line", argument, now)
        yield now


def tell(source: str, old: str, new: str) -> None:
    print(f"{source}: {old} is now called {new}", file=sys.stderr)
