"""Settings on the command line: `--section.key VALUE ...`, read as the types of the settings want them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pellucid.types import UserError

COMMAND_LINE = "the command line"


class Words(tuple[str, ...]):
    """The words behind one flag, before it is known of what type its setting is."""


def is_setting(word: str) -> bool:
    """Return whether a word of the command line is the flag of a setting: `--section.key` or `--section.key=VALUE`."""
    return word.startswith("--") and "." in word.partition("=")[0]


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's own words, and the flags of settings with the words behind them."""
    own: list[str] = []
    settings: list[str] = []
    into = own
    for word in arguments:
        if word.startswith("--"):
            into = settings if is_setting(word) else own
        into.append(word)
        if "=" in word and is_setting(word):  # it has its value
            into = own
    return own, settings


def sections(flags: Sequence[str]) -> dict[str, Any]:
    """Return flags as nested sections, whose values are Words. The last flag of a setting counts.

    Example: sections(["--task.task.seed", "3"]) == {"task": {"task": {"seed": Words(["3"])}}}
    """
    nested: dict[str, Any] = {}
    for flag, words in flags_of(flags):
        *outer, key = flag.removeprefix("--").split(".")
        place = nested
        for name in (part.replace("-", "_") for part in outer):
            inside = place.get(name)
            place[name] = place = inside if isinstance(inside, dict) else {}
        place[key.replace("-", "_")] = words
    return nested


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, Words]]:
    """Yield each flag with the words behind it. A word that begins with one dash is a value, such as -1."""
    flag, values = "", []
    for word in words:
        if not word.startswith("--"):
            if not flag:
                raise UserError(f"{word}: settings are given as --section.key VALUE")
            values.append(word)
            continue
        if flag:
            yield flag, Words(values)
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
    if flag:
        yield flag, Words(values)


# ---------------------------------------------------------------- values by type


def typed(value: Any, kind: Any, key: str) -> Any:
    """Return a value in which Words, however deep, have become what `kind` is made of. `key` names it in errors."""
    if isinstance(value, Words):
        return value_of(value, kind, key)
    if isinstance(value, Mapping):
        kinds = fields_of(kind)
        value = dict(positive(value, kinds))
        return {name: typed(item, kinds.get(name, item_of(kind)), f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [typed(item, item_of(kind), f"{key}.{i}") for i, item in enumerate(value)]
    return value


def positive(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section, with `--section.no-key` as key = false."""
    for name, value in values.items():
        plain = name.removeprefix("no_")
        negated = isinstance(value, Words) and not value and name not in kinds and bool in kinds_of(kinds.get(plain))
        yield (plain, False) if negated else (name, value)


def value_of(words: Words, kind: Any, key: str) -> Any:
    kinds = kinds_of(kind)
    many = next((each for each in kinds if origin(each) in (tuple, list)), None)
    if any(origin(each) is dict for each in kinds):
        if len(words) % 2:
            raise UserError(f"{COMMAND_LINE}: {key} takes names with their values, got {' '.join(words)}")
        return {name: scalar(word, kinds_of(item_of(kind))) for name, word in zip(words[::2], words[1::2], strict=True)}
    if many is not None and (len(words) != 1 or str not in kinds):
        return [scalar(word, kinds_of(item_of(many))) for word in words]
    if not words and bool in kinds:
        return True
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"{COMMAND_LINE}: {key} takes one value, {got}")
    return scalar(words[0], kinds)


def scalar(word: str, kinds: Sequence[Any]) -> Any:
    """Return a word as a number or a truth value where these types have one, else as it is.

    Where a record with a `name` is wanted, such as a reward term, the word is its name.
    """
    if any("name" in fields_of(kind) for kind in kinds):
        return {"name": word}
    if word in [value for kind in kinds if origin(kind) is Literal for value in get_args(kind)]:
        return word
    for kind, read in ((bool, truth), (int, int), (float, float)):
        if kind in kinds or any(type(value) is kind for each in kinds for value in literals(each)):
            with suppress(ValueError):
                return read(word)
    return word


def truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError(word)
    return word.lower() == "true"


# ---------------------------------------------------------------- types


@cache
def fields_of(kind: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass with their types, or of all in a union of them; none for another type."""
    if origin(kind) in (Union, types.UnionType):
        return {name: found for each in kinds_of(kind) for name, found in fields_of(each).items()}
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return {}
    try:
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError, SyntaxError) as error:
        raise UserError(f"the types of the fields of {kind.__name__} cannot be read: {error}") from error
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def kinds_of(kind: Any) -> list[Any]:
    """Return the alternatives that a type is made of."""
    if origin(kind) in (Union, types.UnionType):
        return [each for arm in get_args(kind) for each in kinds_of(arm)]
    return kinds_of(get_args(kind)[0]) if origin(kind) is Annotated else [kind]


def literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if origin(kind) is Literal else ()


def item_of(kind: Any) -> Any:
    """Return the type of the items of a tuple, a list or a dict's values; Any where it is not said."""
    for each in kinds_of(kind):
        if origin(each) in (tuple, list, dict) and get_args(each):
            return get_args(each)[1 if origin(each) is dict else 0]
    return Any


def origin(kind: Any) -> Any:
    return get_origin(kind) or kind
