"""Text with {names} in braces, where {{...}} is text in braces and no name."""

from __future__ import annotations

import re
from collections.abc import Callable

FIELD = re.compile(r"\{\{([^{}]*)\}\}|\{([^{}]+)\}")


def placeholders(template: str) -> set[str]:
    """Return the names in braces.

    Example: placeholders('{completion} {{"score": 7}}') == {"completion"}
    """
    return {match[2] for match in FIELD.finditer(template) if match[2] is not None}


def filled(template: str, get_text: Callable[[str], str]) -> str:
    """Replace each {name} by its text, and {{...}} by {...}; {} and braces in what is put in are kept."""
    return FIELD.sub(lambda match: f"{{{match[1]}}}" if match[2] is None else get_text(match[2]), template)
