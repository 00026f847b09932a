"""Hints at similar file names, text for terminals, options in messages, {placeholders}, and docstrings."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

# ---------------------------------------------------------------- hints at similar file names

_RECIPE_FOLDERS: list[Path] = []
"""The folder of the recipe that was read last; relative paths in a recipe start there."""
_MAX_LISTED_FILES = 1000
"""The maximum number of files of a folder that are considered."""


def set_recipe_folder(folder: Path | None) -> None:
    """Set the folder of the recipe, for `describe_searched_folders`; None for none."""
    _RECIPE_FOLDERS[:] = [folder] if folder else []


def describe_searched_folders(path: Path) -> str:
    """Return a text that names the folders in which a relative path was looked for; empty if there is only one."""
    folders = [folder for folder in _RECIPE_FOLDERS if folder.resolve() != Path().resolve()]
    if path.expanduser().is_absolute() or not folders:
        return ""
    return f"; it was looked for in {folders[0].resolve()}, the folder of the recipe, and in {Path().resolve()}"


QUOTED_PATH_HINT = (
    "; in double quotes a backslash begins an escape: write a path in single quotes, 'C:\\Users\\me', or with /"
)


def suggest_path_quoting(name: str) -> str:
    """Return a hint if a file name has a control character, as from a backslash in double quotes in TOML."""
    return "" if name.isprintable() else QUOTED_PATH_HINT


def suggest_file(path: Path, candidates: Sequence[Path]) -> str:
    """Return a hint at a candidate of the same name, or else of a similar name; empty if there is none."""
    same = [file for file in candidates if file.name == path.name]
    similar_stems = get_close_matches(path.stem, [file.stem for file in candidates], n=1)
    close = same or [file for file in candidates if file.stem in similar_stems]
    return f'; did you mean "{close[0]}"?' if close else ""


def find_nearby_files(path: Path, suffixes: Container[str]) -> list[Path]:
    """Return files near a path with one of these suffixes, such as ".toml".

    They are in the nearest existing folder above the path, or in its subfolders.
    """
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    subfolders = [entry for entry in _list_folder(folder) if entry.is_dir() and not entry.name.startswith(".")]
    return [file for each in (folder, *subfolders) for file in _list_folder(each) if file.suffix.lower() in suffixes]


def _list_folder(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(islice(folder.iterdir(), _MAX_LISTED_FILES))


# ---------------------------------------------------------------- control characters
# Text of a model, a data set or an error is shown in a terminal, which must not act on it.


CONTROL_CODES = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
"""C0 except tab and newline, DEL, and C1. Escape sequences begin with one of them, and a carriage return overwrites a
line."""
BIDI_CODES = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks and overrides of the writing direction, which make text look other than it is."""
_OTHER_CODES = (0x2028, 0x2029, *range(0xD800, 0xE000))
"""Characters that some programs treat as newlines, and surrogates, which cannot be encoded alone."""
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*CONTROL_CODES, *BIDI_CODES, *_OTHER_CODES)
}


def print_notes(*notes: str) -> None:
    """Print each note that is not empty on a line of its own that begins with "! "."""
    for note in filter(None, notes):
        print(escape_controls(f"! {note}"), flush=True)


def escape_controls(text: str) -> str:
    """Replace characters that a terminal would act on by their escapes.

    Example: escape_controls("\\x1b[31mred\\n") == "\\\\x1b[31mred\\n"
    """
    return text.translate(_ESCAPES)


def format_one_line(value: object, limit: int = 300) -> str:
    """Return a text, such as an error, in one line of at most `limit` characters."""
    return " ".join(str(value).split())[:limit]


# ---------------------------------------------------------------- options of `train` in messages

_caller_is_python: ContextVar[bool] = ContextVar("caller_is_python", default=False)


@contextmanager
def write_options_as_keywords() -> Iterator[None]:
    """Within this block, messages name options as keywords of `pellucid.train`."""
    token = _caller_is_python.set(True)
    try:
        yield
    finally:
        _caller_is_python.reset(token)


def is_caller_python() -> bool:
    """Whether the message is for a caller of `pellucid.train`."""
    return _caller_is_python.get()


def format_option(name: str, value: Path | str | int | None = None) -> str:
    """Return an option as the caller writes it: `--policy.model DIR`, or `model="DIR"` for a caller from Python."""
    if not is_caller_python():
        return f"--{name}" if value is None else f"--{name} {value}"
    quoted = f'"{value}"' if isinstance(value, Path | str) else "" if value is None else str(value)
    return f"{_format_keyword(name)}={quoted}"


def format_setting(name: str, value: int) -> str:
    """Return a setting with a value: `evaluate.every = 0`, or `evaluate_every=0` for a caller from Python."""
    return format_option(name, value) if is_caller_python() else f"{name} = {value}"


_SHARED_KEYS = ("every", "patience")
"""Keys of several sections, so that their keywords name the section."""


def _format_keyword(name: str) -> str:
    """Return the keyword of an option."""
    key = name.rpartition(".")[2]
    return name.replace(".", "_") if key in _SHARED_KEYS else key


# ---------------------------------------------------------------- placeholders
# Templates contain {names}; {{...}} stands for {...}.


_PLACEHOLDER_PATTERN = re.compile(r"\{\{([^{}]*)\}\}|\{([^{}]+)\}")


def find_placeholders(template: str) -> set[str]:
    """Return the names of the placeholders in a template.

    Example: find_placeholders('{completion} {{"score": 7}}') == {"completion"}
    """
    return {match[2] for match in _PLACEHOLDER_PATTERN.finditer(template) if match[2] is not None}


def fill_placeholders(template: str, get_text: Callable[[str], str]) -> str:
    """Replace each {name} by its text, and {{...}} by {...}. Empty {} and braces in the texts stay as they are."""
    return _PLACEHOLDER_PATTERN.sub(
        lambda match: f"{{{match[1]}}}" if match[2] is None else get_text(match[2]), template
    )


# ---------------------------------------------------------------- docstrings
# First sentences of docstrings, from source files: importing the modules might take seconds.


def get_module_summary(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    return extract_first_sentence(ast.get_docstring(_parse_module(module)) or "")


def get_dict_summaries(module: str, name: str) -> dict[str, str]:
    """Return the first sentence of the docstring for each key of a dict of functions, or lambdas that call one.

    Example: get_dict_summaries("pellucid.algorithm.kl", "KL_ESTIMATORS")["k1"] == (
        "log(pi / ref): unbiased, for use in the reward; in the loss its expected gradient is 0 (J. Schulman, 2020).")
    """
    body = _parse_module(module).body
    docstrings = {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}
    [table] = [node.value for node in body if ast.unparse(node).startswith((f"{name} =", f"{name}:"))]  # pyright: ignore[reportAttributeAccessIssue]
    summaries = dict[str, str]()
    for key, value in zip(table.keys, table.values, strict=True):
        names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
        summaries[key.value] = extract_first_sentence(next(docstrings[each] for each in names if each in docstrings))
    return summaries


def _parse_module(module: str) -> ast.Module:
    """Return the syntax tree of a module without importing it; its parent packages are imported."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def extract_first_sentence(docstring: str) -> str:
    """Return the first sentence in one line: up to the first full stop outside parentheses, or the first paragraph.

    Example: extract_first_sentence("r - mean (Dr. GRPO). The mean\\nincludes r.") == "r - mean (Dr. GRPO)."
    """
    text = " ".join(docstring.partition("\n\n")[0].split())
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if text[i : i + 2] == ". " and depth == 0:
            return text[: i + 1]
    return text
