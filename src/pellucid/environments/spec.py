"""The conversations of a task: the environment, the tools, and how long calls may take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pellucid.types import UserError
from pellucid.utils.plugins import load_object

_NON_TOOL_METHODS = ("reset", "get_reward")
ENVIRONMENT_COLUMN = "environment"
"""The column that names the environment of a row, if there are several."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment and the tools of a task's conversations.

    Example: EnvironmentSpec("games.py:Wordle", tools=("tools.py:search",), timeout=5.0)
    """

    environment: str = ""
    """A class, a function that makes an environment, a mapping of names to these, or a function `reply(messages)`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call."""
    timeout: float = 10.0
    """Seconds that a call may take."""
    returns_environment: bool = False
    """Whether reward functions are given the environment as the conversation left it."""

    @property
    def is_stateless(self) -> bool:
        """Whether nothing is remembered between calls, so that another process may answer the next one."""
        return not self.environment or is_reply_function(load_object(self.environment))


def is_reply_function(value: Any) -> bool:
    """Return whether this is a function or a method `reply(messages)`."""
    if inspect.isclass(value) or not callable(value):
        return False
    return [name for name in inspect.signature(value).parameters if name != "self"] == ["messages"]


def load_environment_factories(env_spec: EnvironmentSpec) -> dict[str, Callable[[], Any]]:
    """Return environment factories by name; a single one has the name "". Raises UserError if one is not callable."""
    found = load_object(env_spec.environment) if env_spec.environment else None
    if found is None or is_reply_function(found):
        return {}
    factories = dict(found) if isinstance(found, Mapping) else {"": found}
    for name, factory in factories.items():
        if not callable(factory):
            entry = f'"{name}" in it ' if name else ""
            got = type(factory).__name__
            raise UserError(f'environment = "{env_spec.environment}": {entry}must be a class or a function, got {got}')
    return factories


def get_environment_tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods that the policy may call, by name, as in TRL (1.16, GRPOTrainer)."""
    methods = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    tools = {name: getattr(environment, name) for name in methods if not name.startswith("_")}
    return {
        name: tool
        for name, tool in tools.items()
        if name not in _NON_TOOL_METHODS and not (name == "reply" and is_reply_function(tool))
    }
