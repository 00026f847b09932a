"""Every sentence of the microscope, in English and Chinese: page/words.json, which the page and the terminal read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
"""The order of the languages in the file."""
PAGE = Path(__file__).with_name("page")


@cache
def words() -> Mapping[str, list[str]]:
    return json.loads((PAGE / "words.json").read_text(encoding="utf-8"))


def say(key: str, language: str = "en", **values: Any) -> str:
    """The sentence of a key, with its {names} replaced by values."""
    sentence = words()[key][LANGUAGES.index(language)]
    for name, value in values.items():
        sentence = sentence.replace(f"{{{name}}}", str(value))
    return sentence


def figure(value: float | None) -> str:
    """A number of a token in three significant digits, as the page writes it too. Example: "-0.0123"."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e5 or magnitude < 1e-4:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.3g}" if magnitude < 1000 else f"{value:.0f}"
