"""Rows in memory: a list of dicts, a datasets.Dataset or a pandas DataFrame as lines of JSON, and their columns."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pellucid.machine import disk
from pellucid.tasks import dataset
from pellucid.tasks.columns import has_column
from pellucid.tasks.dataset import BadRow, Dataset, held_out_source, listed, make_prompt
from pellucid.tasks.prefixed import prefixes_of
from pellucid.tasks.sources import rows_of
from pellucid.types import UserError

FORMS = "give a list of dicts, a datasets.Dataset, a pandas DataFrame, a file, several, a pattern or a Hub id"
NAMED = ("answer", "solution")
"""Columns that hold the gold answer where no setting says which does; `solution` as data sets for TRL have it."""


class Lines:
    """Rows in memory, which become a file of the run's own: data.jsonl in its folder."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.first_row = rows[0]
        self.json_lines = [line_of(number, row) for number, row in enumerate(rows, start=1)]

    @property
    def digest(self) -> str:
        """The sha256 of the file."""
        return hashlib.sha256("".join(self.json_lines).encode()).hexdigest()

    def write_file(self, path: Path) -> None:
        disk.write_whole(path, "".join(self.json_lines))

    def check_prompts(self, task: Dataset) -> None:
        """Raise UserError for rows that the task cannot make a prompt of, unless it skips them."""
        bad: list[BadRow] = []
        for number, line in enumerate(self.json_lines, start=1):
            where = f"data, row {number}"
            try:
                make_prompt(task, where, json.loads(line))
            except UserError as error:
                bad.append(BadRow(where, str(error).removeprefix(f"{where}: ")))
        if bad and (not task.skip_bad_rows or len(bad) == len(self.json_lines)):
            raise UserError(listed(bad))


def in_memory(data: Any) -> Lines | None:
    """Return rows that were given as such; None where `data` names files or a data set on the Hub."""
    if is_named(data):
        return None
    module = type(data).__module__.partition(".")[0]
    if module == "pandas" and not hasattr(data, "columns"):
        kind = type(data).__name__
        raise UserError(f"data is a pandas {kind}, which is one column: give a DataFrame, data.to_frame()")
    if module == "pandas" and hasattr(data, "to_dict"):
        rows = data.to_dict("records")
    elif module == "datasets" and isinstance(data, Mapping):
        raise UserError(f'data holds the splits {", ".join(data)}: give one, data["{next(iter(data))}"]')
    elif module == "datasets" and hasattr(data, "__len__"):
        rows = [dict(row) for row in data]
    elif isinstance(data, list | tuple):
        rows = data
    else:
        raise UserError(f"data is of type {type(data).__name__}: {FORMS}")
    if not len(rows):
        raise UserError(f"data is empty: {FORMS}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"data, row {number}, is of type {type(row).__name__}, where a dict of columns is needed")
        for name in row:
            if not isinstance(name, str):
                raise UserError(f"data, row {number}, has a column {name!r}: the names of columns must be strings")
    return Lines(rows)


def check_named(task: Dataset) -> None:
    """Raise UserError where the data that a task names cannot be read, or its first row makes no prompt."""
    make_prompt(task, *rows_of(task.data, task.subset, "train")[0])
    if task.test_data:
        source, split = held_out_source(task)
        make_prompt(task, *rows_of(source, task.subset, split)[0])


def is_named(data: Any) -> bool:
    """Return whether data is a name, or several."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, str | Path) for each in data)
    return isinstance(data, str | Path)


def named(data: Any) -> str | list[str]:
    """Return the names of files, or of a data set, as the setting has them."""
    return [str(each) for each in data] if isinstance(data, list | tuple) else str(data)


def columns_of(row: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say which columns hold question and answer, where `section` does not and it shows.

    A column `prompt` is TRL's: messages are a chat, and a string is what the model reads, without a chat template.
    """
    found: dict[str, Any] = {}
    if "prompt" in row and not {"question", "messages", "template"} & {*section, *row}:
        is_chat = not isinstance(row["prompt"], str)
        found = {"messages": "prompt"} if is_chat else {"question": "prompt", "chat": section.get("chat", False)}
    if "answer" not in section and NAMED[0] not in row and NAMED[1] in row:
        found["answer"] = NAMED[1]
    return found


def has_answers(row: Mapping[str, Any], section: Mapping[str, Any]) -> bool:
    return has_column(row, section.get("answer", NAMED[0]))


def line_of(number: int, row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON. UserError, naming the column, for what JSON has no form for."""
    for column, value in row.items():
        try:
            json.dumps(plain(value), ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f'data, row {number}: column "{column}" cannot be kept as JSON: {error}') from error
    return json.dumps({column: plain(value) for column, value in row.items()}, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numpy's numbers and arrays as Python's, dates as text, NaN as nothing."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def forget() -> None:
    """Drop what is kept of files that were read before: in a long session they may have been edited since."""
    dataset.forget()
    prefixes_of.cache_clear()
