"""Hints for users of TRL: what its settings are called here, or why they do not exist. trl_hints.toml has the texts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_SETTING_PLACEHOLDER = re.compile(r"\{([a-z0-9_.]+)\}")


def _format_setting_key(setting: str) -> str:
    """Return a setting as recipes write it. A name without a section, such as `run`, is a command-line option."""
    return setting if "." in setting else f"--{setting}"


def explain_trl_name(name: str, format_key: Callable[[str], str] = _format_setting_key) -> str:
    """Return a hint if a name is the name of a setting of TRL, such as "learning_rate"; else an empty text.

    Args:
        name: The unknown name.
        format_key: Formats a Pellucid setting, such as "optimizer.lr", as the reader of the hint would write it.
    """
    key = name.replace("-", "_")
    text = _load_texts().get(key)
    if text is None:
        return ""
    return (
        f"; TRL's {key} {_SETTING_PLACEHOLDER.sub(lambda match: format_key(match[1]), text)} (docs/how-to/from-trl.md)"
    )


def explain_trl_value(setting: str, value: object) -> str:
    """Return a hint if a refused value of a setting, such as "algorithm.aggregate", has a meaning in TRL."""
    hints = _load_tables()["values"]
    hint = hints.get(f"{setting} {value}") or hints.get(setting)
    return f"; {hint}" if hint else ""


@cache
def _load_tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def _load_texts() -> dict[str, str]:
    """Return the text of the hint for each TRL name."""
    tables = _load_tables()
    texts = {name: f"is here {text}" for name, text in tables["counterparts"].items()}
    for text, names in tables["without_counterpart"].items():
        texts |= dict.fromkeys(names, f"has no counterpart, as {text}")
    return texts
