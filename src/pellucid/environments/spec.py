"""The conversations of a task: the environment, the tools and their JSON schemas, and how long calls may take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pellucid.types import UserError
from pellucid.utils.plugins import load_function, load_object

NON_TOOL_METHODS = ("reset", "get_reward")
ENVIRONMENT_COLUMN = "environment"
"""The column that names the environment of a row, where there are several."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The world of a task's conversations.

    Example: Talk("games.py:Wordle", tools=("tools.py:search",), timeout=5.0)
    """

    environment: str = ""
    """A class, a function that makes one, a mapping of names to such, or a function `reply(messages)`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call."""
    timeout: float = 10.0
    """Seconds that a call may take."""
    returns_environment: bool = False
    """Whether what a conversation leaves of its environment is kept for reward functions."""

    @property
    def is_stateless(self) -> bool:
        """Whether nothing is remembered between calls, so that another process may answer the next."""
        return not self.environment or is_reply_function(load_object(self.environment))


def is_reply_function(value: Any) -> bool:
    """Return whether this is a function `reply(messages)`, or such a method: what the world says, and nothing more."""
    if inspect.isclass(value) or not callable(value):
        return False
    return [name for name in inspect.signature(value).parameters if name != "self"] == ["messages"]


def load_environment_factories(env_spec: EnvironmentSpec) -> dict[str, Callable[[], Any]]:
    """Return what makes an environment, by its name; "" where there is one alone. UserError for what makes none."""
    found = load_object(env_spec.environment) if env_spec.environment else None
    if found is None or is_reply_function(found):
        return {}
    made = dict(found) if isinstance(found, Mapping) else {"": found}
    for name, maker in made.items():
        if not callable(maker):
            what = f'"{name}" in it' if name else "it"
            raise UserError(f'environment = "{env_spec.environment}": {what} is a {type(maker).__name__}: name a class')
    return made


def get_environment_tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an environment that the policy may call, by their names. (TRL 1.16, GRPOTrainer.)"""
    methods = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    tools = {name: getattr(environment, name) for name in methods if not name.startswith("_")}
    return {
        name: tool
        for name, tool in tools.items()
        if name not in NON_TOOL_METHODS and not (name == "reply" and is_reply_function(tool))
    }


def build_tool_schemas(env_spec: EnvironmentSpec, name: str = "") -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of all tools of an environment, of that name where there are several.

    UserError for a tool whose types or docstring do not say what it takes.
    """
    made = load_environment_factories(env_spec)
    maker = made.get("") or made.get(name)
    methods = get_environment_tools(create_blank_environment(maker)).values() if maker else ()
    return tuple(map(build_tool_schema, (*(load_function(spec, "tool") for spec in env_spec.tools), *methods)))


def create_blank_environment(factory: Callable[[], Any]) -> Any:
    """Return an environment whose methods can be looked at; that of a class has not been set up."""
    return object.__new__(factory) if isinstance(factory, type) else factory()


def build_tool_schema(tool: Callable[..., Any]) -> Mapping[str, Any]:
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
