"""Columns of a data row: by name, by a dotted name where they are nested, and chats in the forms that people have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pellucid.machine.plugins import did_you_mean
from pellucid.tasks.rows import Row
from pellucid.types import Message, UserError

_MISSING = object()


def column_text(row: Row, column: str, where: str) -> str:
    value = column_value(row, column, where)
    return "" if value is None else str(value)


def column_value(row: Row, column: str, where: str) -> Any:
    """Return the value of a column, or of what lies in one: "reward_model.ground_truth", "choices.0"."""
    value = _within(row, column)
    if value is _MISSING:
        hint = did_you_mean(column, _names(row))
        if column == "question" and "prompt" in row:
            setting = "question" if isinstance(row["prompt"], str) else "messages"
            hint = f'; give {setting} = "prompt"'
        raise UserError(f'{where}: no column "{column}"{hint}; the columns are {", ".join(_names(row))}')
    return value


def has_column(row: Row, column: str) -> bool:
    return _within(row, column) is not _MISSING


def _within(row: Row, column: str) -> Any:
    """Return what a name stands for; a column that has a dot in its own name comes first."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return _MISSING
    return value


def _names(row: Row) -> list[str]:
    """Return the names of the columns, with those of objects in them in their place."""

    def names() -> Iterator[str]:
        for name, value in row.items():
            if isinstance(value, Mapping) and value:
                yield from (f"{name}.{inner}" for inner in value)
            else:
                yield name

    return list(names())


def chat(value: Any, column: str, where: str) -> tuple[Message, ...]:
    """Return the role and content of each message of a chat. UserError where it does not end with the user's.

    A content may be a list of parts, [{"type": "text", "text": "..."}]: their texts are joined.
    """
    messages = [_message(each, column, where) for each in value] if isinstance(value, list) else []
    if not messages or None in messages or messages[-1] is None or messages[-1]["role"] != "user":
        form = '[{"role": "user", "content": "..."}], with the user\'s message last'
        raise UserError(f'{where}: column "{column}" must look like {form}')
    return tuple(message for message in messages if message is not None)


def _message(value: Any, column: str, where: str) -> Message | None:
    """Return a message in its plain form; None for what is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return None
    content = value.get("content")
    if isinstance(content, list):
        content = _joined(content, column, where)
    return {"role": value["role"], "content": content} if isinstance(content, str) else None


def _joined(parts: list[Any], column: str, where: str) -> str | None:
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise UserError(f'{where}: column "{column}" holds a part of type "{part["type"]}": only text can be read')
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if whole and len(whole) == len(texts) else None
