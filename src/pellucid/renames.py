"""Accept the former names of settings in recipes, runs and command lines, and print the new ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
            tell(source, f'{section}.{key} = "{shown(value)}"', f'{new_key} = "{shown(new_value)}"')
        now[new_key] = new_value
    return now


def new_names(section: str, key: str, value: Any) -> tuple[str, Any]:
    """Return key and value by their new names. The value may be the words of a flag."""
    known = VALUES.get((section, key), {})
    if isinstance(value, tuple):
        value = type(value)(known.get(word, word) for word in value)
    return KEYS.get((section, key), key), known.get(value, value) if isinstance(value, str) else value


def shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def tell(source: str, old: str, new: str) -> None:
    print(f"{source}: {old} is now called {new}", file=sys.stderr)
