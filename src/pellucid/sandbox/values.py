"""Turns the results and errors of user code into plain data: floats, and one line of text for each error."""

from __future__ import annotations

import math
import reprlib
import traceback
from pathlib import Path
from sysconfig import get_paths
from typing import Any

MAX_NUMBER = 3.4028234663852886e38
"""The largest number that user code may return, that of float32: sums and squares stay finite in float64."""
MAX_ERROR_CHARACTERS = 300
"""The most characters of an error."""
_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_LIBRARY_PATH_PREFIXES = ("<frozen", *(get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
"""Prefixes of the paths of Python's and other packages' files."""


class InvalidResultError(Exception):
    """User code returned something that cannot be used; the message is one line."""


def shorten_to_one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the user's line that raised it or led to it, even if its `__str__` raises."""
    if isinstance(error, InvalidResultError):
        return str(error)
    summary = traceback.TracebackException.from_exception(error)
    others = [frame for frame in summary.stack if not frame.filename.startswith(_PACKAGE_FOLDER)]
    frames = [frame for frame in others if not frame.filename.startswith(_LIBRARY_PATH_PREFIXES)] or others
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return replace_surrogates(f"{type(error).__name__}: {shorten_to_one_line(str(summary))}{where}")


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD in place of half a surrogate pair, which no tokenizer and no file takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def describe_value(value: Any) -> str:
    try:
        return shorten_to_one_line(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__}"


def validate_number(value: Any, subject: str, expected: str = "a number") -> float:
    """Return a number, or a scalar of numpy or torch, as a float. NaN and infinities pass.

    Raises InvalidResultError for anything else and beyond `MAX_NUMBER`. Its message names `subject` and `expected`.
    """
    is_numeric = any(hasattr(type(value), name) for name in ("__float__", "__index__"))
    if not is_numeric or getattr(value, "ndim", 0):
        raise InvalidResultError(f"{subject} is {describe_value(value)}, where {expected} is needed")
    try:
        result = float(value)
    except OverflowError:
        result = 2 * MAX_NUMBER
    if math.isfinite(result) and abs(result) > MAX_NUMBER:
        raise InvalidResultError(f"{subject} is beyond {MAX_NUMBER:.1e}, the largest number that float32 holds")
    return result
