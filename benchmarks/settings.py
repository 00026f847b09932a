"""Prints docs/reference/settings.md, which has every setting with its type, default, and docstring.

python benchmarks/settings.py > docs/reference/settings.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pellucid.config import SECTIONS, get_field_default, get_field_types
from pellucid.rewards.settings import JudgeSettings, RewardModelSettings
from pellucid.rewards.terms import RewardTerm
from pellucid.tasks import TASKS, load_task_class
from pellucid.tasks.dataset import DatasetTask
from pellucid.tasks.prompts import GeneratedTask

HEAD = """# Settings

This page lists every key of a recipe. `python benchmarks/settings.py` prints it from the code. A recipe is a TOML file
with these sections:

```toml
[policy]
model = "smollm2-135m"

[algorithm]
group_size = 16
```

The same setting is `--algorithm.group-size 16` on the [command line](commands.md), and `group_size=16` in
[`pellucid.train`](python.md). The command line wins over the recipe, and the recipe over the defaults below.
`pellucid train RECIPE --help-all` prints these tables with the values of a recipe.
"""
MISSING = object()


def main() -> None:
    print(HEAD)
    for section, cls in SECTIONS.items():
        if section == "task":
            print_tasks()
        else:
            print(f"## {section}\n\n{describe(cls)}\n\n{make_table(cls)}\n")


def print_tasks() -> None:
    print(
        "## task\n\n`task.name` chooses the task: one of these, or your own as `path/to/file.py:Class`, whose fields"
        " are the keys of the section.\n"
    )
    classes = {name: load_task_class(name) for name in TASKS}
    print(f"### Keys of every task\n\n{make_table(GeneratedTask)}\n")
    source = "Rows come from files or from the Hub: see [your own data](../how-to/data.md)."
    print(f"### Keys of tasks that read data\n\n{source}\n\n{make_table(DatasetTask, GeneratedTask)}\n")
    for name, cls in classes.items():
        bases = (GeneratedTask, DatasetTask) if issubclass(cls, DatasetTask) else (GeneratedTask,)
        also = " It also has the keys of tasks that read data." if issubclass(cls, DatasetTask) else ""
        print(f"### task: {name}\n\n{describe(cls)}{also}\n\n{make_table(cls, *bases)}\n")
    for heading, cls in {
        "task.rewards": RewardTerm,
        "task.rewards.judge": JudgeSettings,
        "task.rewards.reward_model": RewardModelSettings,
    }.items():
        print(f"### {heading}\n\n{describe(cls)}\n\n{make_table(cls)}\n")


def describe(cls: type[Any]) -> str:
    """Return the docstring of a section, without its name and without examples in Python."""
    paragraphs = textwrap.dedent(f"    {inspect.getdoc(cls) or ''}").strip().split("\n\n")
    kept = [" ".join(each.split()) for each in paragraphs if not each.lstrip().startswith("Example")]
    text = "\n\n".join(kept)
    head, colon, rest = text.partition(": ")
    return f"{rest[:1].upper()}{rest[1:]}" if colon and head.startswith("`[") else text


def make_table(cls: type[Any], *bases: type[Any]) -> str:
    """Return a row for each field that is not the same in one of the bases."""
    known = {row for base in bases for row in make_rows(base)}
    rows = [row for row in make_rows(cls) if row not in known]
    header = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*header, *rows]) if rows else "It has no other keys."


def make_rows(cls: type[Any]) -> list[str]:
    """Return a row for each field, except for the name of a task."""
    texts, kinds = read_field_texts(cls), get_field_types(cls)
    return [
        f"| `{field.name}` | {name_type(kinds[field.name])} | {show_default(field)} |"
        f" {describe_field(field, kinds, texts)} |"
        for field in dataclasses.fields(cls)
        if field.init and field.name != "task" and not (field.name == "name" and "task" in texts.get("name", ""))
    ]


def read_field_texts(cls: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and of its bases, by the name of the field."""
    texts = dict[str, str]()
    for base in reversed([each for each in cls.__mro__ if dataclasses.is_dataclass(each)]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if is_text and isinstance(text.value.value, str):
                    texts[field.target.id] = " ".join(text.value.value.split())
    return texts


def describe_field(field: dataclasses.Field[Any], kinds: Any, texts: dict[str, str]) -> str:
    """Return the docstring of a field, and its choices if the docstring does not name them all."""
    text = texts.get(field.name, "")
    choices = [str(choice) for choice in list_choices(kinds[field.name])]
    is_complete = all(choice in text for choice in choices)
    listed = "" if is_complete else f"One of {', '.join(f'`{choice}`' for choice in choices)}."
    escaped = text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return " ".join(filter(None, [escaped, listed]))


def list_choices(kind: Any) -> Iterator[Any]:
    """Yield the values of the Literals in a type."""
    for each in flatten(kind):
        if get_origin(each) is Literal:
            yield from get_args(each)
        elif get_origin(each) is tuple:
            yield from list_choices(get_args(each)[0])


def flatten(kind: Any) -> Iterator[Any]:
    """Yield the alternatives of a type, without the bounds of numbers."""
    if hasattr(kind, "__metadata__"):
        yield from flatten(kind.__origin__)
    elif get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind):
            yield from flatten(each)
    else:
        yield kind


NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "", Any: "any"}


def name_type(kind: Any) -> str:
    """Return a type in words, such as "integer or choice"."""
    names = []
    for each in flatten(kind):
        origin = get_origin(each) or each
        if origin is Literal:
            names.append("choice")
        elif origin in (tuple, list):
            names.append("list")
        elif origin is dict or dataclasses.is_dataclass(origin):
            names.append("table")
        else:
            names.append(NAMES.get(origin, getattr(origin, "__name__", str(origin))))
    return " or ".join(dict.fromkeys(filter(None, names)))


def show_default(field: dataclasses.Field[Any]) -> str:
    default = get_field_default(field, MISSING)
    if default is MISSING:
        return "required"
    if default is None:
        return ""
    if dataclasses.is_dataclass(default):
        return "its own"
    if isinstance(default, tuple):
        default = [item.name if isinstance(item, RewardTerm) else item for item in default]
    shown = json.dumps(default, ensure_ascii=False) if not isinstance(default, dict) else str(default or "{}")
    return "`" + shown.replace("|", "\\|") + "`"


if __name__ == "__main__":
    main()
