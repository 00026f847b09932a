"""The JSON schemas of tools, from the types and docstrings of functions, as chat templates take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pellucid.environments.talk import Talk, makers, tools_of
from pellucid.machine.plugins import function_of
from pellucid.types import UserError


def schemas_of(env_spec: Talk, name: str = "") -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of all tools of an environment, of that name where there are several.

    UserError for a tool whose types or docstring do not say what it takes.
    """
    made = makers(env_spec)
    maker = made.get("") or made.get(name)
    methods = tools_of(blank(maker)).values() if maker else ()
    return tuple(map(schema, (*(function_of(spec, "tool") for spec in env_spec.tools), *methods)))


def blank(factory: Callable[[], Any]) -> Any:
    """Return an environment whose methods can be looked at; that of a class has not been set up."""
    return object.__new__(factory) if isinstance(factory, type) else factory()


def schema(tool: Callable[..., Any]) -> Mapping[str, Any]:
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - where there are tools, and not before
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        first = " ".join(str(error).split())
        raise UserError(
            f"tool {getattr(tool, '__name__', tool)}: {first}: give its arguments types, and its docstring a line for"
            " each under `Args:`"
        ) from error
