"""Files that may have been meant where a path leads to none."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

RECIPE_FOLDERS: list[Path] = []
"""The folder of the recipe that was read last, from which relative paths in it lead first."""
MAX_LISTED_FILES = 1000
"""How many files of a folder are looked at."""


def set_recipe_folder(folder: Path | None) -> None:
    """Note the folder of a recipe, which messages name where they say where a file was looked for; None for none."""
    RECIPE_FOLDERS[:] = [folder] if folder else []


def describe_searched_folders(path: Path) -> str:
    """Return where a relative path was looked for, if that was in more than one place; else nothing."""
    folders = [folder for folder in RECIPE_FOLDERS if folder.resolve() != Path().resolve()]
    if path.expanduser().is_absolute() or not folders:
        return ""
    return f"; it was looked for in {folders[0].resolve()}, the folder of the recipe, and in {Path().resolve()}"


def suggest_path_quoting(name: str) -> str:
    """Return a hint where a file name has a control character, as of a backslash in double quotes in TOML."""
    if name.isprintable():
        return ""
    return "; in double quotes a backslash begins an escape: write a path in single quotes, 'C:\\temp', or with /"


def suggest_file(path: Path, candidates: Sequence[Path]) -> str:
    """Return a hint at the file of the same name elsewhere, or else at one of a similar name; empty for neither."""
    same = [each for each in candidates if each.name == path.name]
    similar = get_close_matches(path.stem, [each.stem for each in candidates], n=1)
    close = same or [each for each in candidates if each.stem in similar]
    return f'; did you mean "{close[0]}"?' if close else ""


def find_nearby_files(path: Path, suffixes: Container[str]) -> list[Path]:
    """Return files with one of these endings, such as ".toml": those in the folder of a path, or in the nearest that
    exists above it, and one level below.
    """
    folder = next((above for above in path.parents if above.is_dir()), Path())
    below = [each for each in list_folder(folder) if each.is_dir() and not each.name.startswith(".")]
    return [each for place in (folder, *below) for each in list_folder(place) if each.suffix.lower() in suffixes]


def list_folder(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(islice(folder.iterdir(), MAX_LISTED_FILES))


# ---------------------------------------------------------------- harmless
# Text of others for a terminal: what a model, a data set or an error says is shown, and not obeyed.


CONTROL_CODES = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
"""C0 but for tab and newline, DEL and C1: escape sequences begin with one of them, and a carriage return writes over
what stands there."""
BIDI_CODES = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks and overrides of the direction of writing, by which text reads other than it is."""
LINE_SEPARATOR_CODES = (0x2028, 0x2029)
"""Characters that some programs take for newlines."""
SURROGATE_CODES = range(0xD800, 0xE000)
"""Halves of a character outside the basic plane, which cannot be encoded alone."""

ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*CONTROL_CODES, *BIDI_CODES, *LINE_SEPARATOR_CODES, *SURROGATE_CODES)
}


def escape_controls(text: str) -> str:
    """With the names of characters that a terminal would act on in their place.

    Example: harmless("\\x1b[31mred\\n") == "\\\\x1b[31mred\\n"
    """
    return text.translate(ESCAPES)


# ---------------------------------------------------------------- braces
# Text with {names} in braces, where {{...}} is text in braces and no name.


PLACEHOLDER_PATTERN = re.compile(r"\{\{([^{}]*)\}\}|\{([^{}]+)\}")


def find_placeholders(template: str) -> set[str]:
    """Return the names in braces.

    Example: placeholders('{completion} {{"score": 7}}') == {"completion"}
    """
    return {match[2] for match in PLACEHOLDER_PATTERN.finditer(template) if match[2] is not None}


def fill_placeholders(template: str, get_text: Callable[[str], str]) -> str:
    """Replace each {name} by its text, and {{...}} by {...}; {} and braces in what is put in are kept."""
    return PLACEHOLDER_PATTERN.sub(
        lambda match: f"{{{match[1]}}}" if match[2] is None else get_text(match[2]), template
    )


# ---------------------------------------------------------------- docstrings
# First sentences of docstrings, read from source files: what they describe may take seconds to import.


def get_module_summary(module: str) -> str:
    """The first sentence of a module's docstring."""
    return extract_first_sentence(ast.get_docstring(parse_module(module)) or "")


def get_dict_summaries(module: str, name: str) -> dict[str, str]:
    """By the keys of a dict in a module, the first sentence on the function of that module that the value is or calls.

    Example: of_dict("pellucid.algorithm.kl", "KL")["k1"] == "log pi - log ref: unbiased."
    """
    body = parse_module(module).body
    documented = {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}
    table = body[find_assignment(name, body)].value  # pyright: ignore[reportAttributeAccessIssue]
    return {
        key.value: extract_first_sentence(documented[get_function_name(value)])
        for key, value in zip(table.keys, table.values, strict=True)
    }


def get_constant_summary(module: str, name: str) -> str:
    """The first sentence of the string that stands below the assignment to a name in a module."""
    body = parse_module(module).body
    return extract_first_sentence(body[find_assignment(name, body) + 1].value.value)  # pyright: ignore[reportAttributeAccessIssue]


def parse_module(module: str) -> ast.Module:
    """The syntax tree of a module, which is not imported; the packages that it lies in are."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def find_assignment(name: str, body: list[ast.stmt]) -> int:
    """The index of the statement that assigns to this name."""
    targets = [
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for node in body
    ]
    return next(i for i, each in enumerate(targets) if any(isinstance(t, ast.Name) and t.id == name for t in each))


def get_function_name(value: ast.expr) -> str:
    """The name of the function that an expression is, or that a lambda calls."""
    called = value.body.func if isinstance(value, ast.Lambda) and isinstance(value.body, ast.Call) else value
    assert isinstance(called, ast.Name)
    return called.id


def extract_first_sentence(docstring: str) -> str:
    """Up to the first full stop outside brackets that ends a word, on one line; of the first paragraph at most.

    Example: first_sentence("r - mean (Dr. GRPO). The mean\\nincludes r.") == "r - mean (Dr. GRPO)."
    """
    text = " ".join(docstring.partition("\n\n")[0].split())
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if text[i : i + 2] == ". " and depth == 0:
            return text[: i + 1]
    return text
