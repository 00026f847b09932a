"""Text of others for a terminal: what a model, a data set or an error says is shown, and not obeyed."""

from __future__ import annotations

CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
"""C0 but for tab and newline, DEL and C1: escape sequences begin with one of them, and a carriage return writes over
what stands there."""
DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks and overrides of the direction of writing, by which text reads other than it is."""
SEPARATORS = (0x2028, 0x2029)
"""Characters that some programs take for newlines."""
HALVES = range(0xD800, 0xE000)
"""Halves of a character outside the basic plane, which cannot be encoded alone."""

NAMED = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*CONTROLS, *DIRECTIONS, *SEPARATORS, *HALVES)
}


def harmless(text: str) -> str:
    """With the names of characters that a terminal would act on in their place.

    Example: harmless("\\x1b[31mred\\n") == "\\\\x1b[31mred\\n"
    """
    return text.translate(NAMED)
