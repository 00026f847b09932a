"""The world of one conversation after the other, in the process where it lives: it asks, answers, and says the reward.

A class of the user's own is an environment as in TRL (1.16, GRPOTrainer): `reset(**row)` returns what is added to the
question, or None; its public methods are tools; `get_reward()` says what a conversation was worth. In place of tools,
or besides, `reply(messages)` returns what the world says next, or None where it says nothing more.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pellucid.environments.spec import (
    ENVIRONMENT_COLUMN,
    EnvironmentSpec,
    get_environment_tools,
    is_reply_function,
    load_environment_factories,
)
from pellucid.rewards.functions import InvalidRewardError, describe_error, validate_number
from pellucid.types import Message, PolicyTurn
from pellucid.utils.files import exit_if_forked
from pellucid.utils.plugins import load_function, load_object

MAX_OBSERVATION_CHARACTERS = 20_000
"""The most characters of an observation; what is beyond is left out."""
NO_ENVIRONMENT = b""


@dataclass(frozen=True)
class BeginRequest:
    """A conversation begins: the row of its question, and seeds, that of its siblings and its own."""

    columns: Mapping[str, Any]
    seeds: tuple[str, str]


@dataclass(frozen=True)
class TurnRequest:
    """The policy has spoken; `messages` are all so far, `last` says that it says nothing more."""

    turn: PolicyTurn
    messages: Sequence[Message]
    is_last: bool = False


@dataclass
class WorkerAnswer:
    """What comes back, as JSON values."""

    texts: list[tuple[str, str, str]]
    """Role, name and content of each message."""
    events: dict[str, int]
    is_over: bool = False
    reward: float | None = None
    error: str = ""


class TimeLimitError(BaseException):
    """A call has taken too long. No Exception, which the user's code might catch."""


class EnvironmentRunner:
    """Answers requests. `note` takes what went wrong in the user's code, and the error."""

    def __init__(
        self, env_spec: EnvironmentSpec, log_error: Callable[[str, BaseException], None], has_time_limit: bool = True
    ) -> None:
        self._env_spec, self._log_error, self._has_time_limit = env_spec, log_error, has_time_limit
        self._tools = {spec.rpartition(":")[2]: load_function(spec, "tool") for spec in env_spec.tools}
        self._factories = load_environment_factories(env_spec)
        found = load_object(env_spec.environment) if env_spec.environment else None
        self._reply_function: Callable[..., Any] | None = found if is_reply_function(found) else None
        self._environments: dict[str, Any] = {}
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle(self, request: BeginRequest | TurnRequest) -> tuple[WorkerAnswer, bytes]:
        """Return the answer, and where the conversation is over the environment as it then is."""
        if isinstance(request, BeginRequest):
            return self._begin(request), NO_ENVIRONMENT
        answer = WorkerAnswer([], {}) if request.is_last else self._handle_turn(request)
        if answer.is_over or request.is_last:
            answer.is_over = True
            self._compute_reward(answer)
            return answer, self._pickle_environment()
        return answer, NO_ENVIRONMENT

    def _begin(self, request: BeginRequest) -> WorkerAnswer:
        shared, own = request.seeds
        seed_generators(shared)
        observation, error = self._call_for_text(lambda: self._reset(request.columns))
        seed_generators(own)
        if error:
            return WorkerAnswer([], {}, is_over=True, error=f"reset: {self._describe_error(error)}")
        return WorkerAnswer([("user", "", observation)] if observation is not None else [], {})

    def _reset(self, columns: Mapping[str, Any]) -> Any:
        if not self._factories:
            return None
        name = "" if "" in self._factories else str(columns.get(ENVIRONMENT_COLUMN))
        if name not in self._factories:
            raise InvalidRewardError(
                f'the row has {ENVIRONMENT_COLUMN} = "{name}"; there are {", ".join(self._factories)}'
            )
        if name not in self._environments:
            self._environments[name] = self._factories[name]()
        self._environment = self._environments[name]
        row = columns if "" in self._factories else {key: x for key, x in columns.items() if key != ENVIRONMENT_COLUMN}
        return self._environment.reset(**row)

    def _handle_turn(self, request: TurnRequest) -> WorkerAnswer:
        calls = request.turn.message.get("tool_calls") or ()
        tools = self._tools | (get_environment_tools(self._environment) if self._environment is not None else {})
        texts: list[tuple[str, str, str]] = []
        events: Counter[str] = Counter()
        for reason in request.turn.unreadable_calls:
            events["unreadable"] += 1
            texts.append(("tool", "unknown", str({"error": f"The call cannot be read: {reason}"})))
        for call in calls:
            name = str(call["function"]["name"])
            content, kind = self._call_tool(tools, name, call["function"]["arguments"])
            texts.append(("tool", name, content))
            events[kind] += bool(kind)
        events["calls"] += len(texts)
        counts = {kind: count for kind, count in events.items() if count}
        return WorkerAnswer(texts, counts) if texts else self._call_reply(request.messages)

    def _call_tool(self, tools: Mapping[str, Callable[..., Any]], name: str, arguments: Any) -> tuple[str, str]:
        """Return what a tool says, and by which kind of fault the call came to nothing, if it did."""
        if name not in tools:
            return str({"error": f"Tool {name} not found."}), "unknown"
        try:
            inspect.signature(tools[name]).bind(**arguments)
        except TypeError as error:
            return str({"error": str(error)}), "arguments"
        result, error = self._call_for_text(lambda: tools[name](**arguments))
        if error is None:
            return str(result), ""
        told = self._describe_error(error)
        if isinstance(error, TimeLimitError):
            return str({"error": told}), "timeout"
        words, unsaid = self._call_for_text(lambda: {"error": str(error)})
        return str({"error": told}) if unsaid else str(words), "raised"

    def _call_reply(self, messages: Sequence[Message]) -> WorkerAnswer:
        own = getattr(self._environment, "reply", None)
        reply = own if own is not None and is_reply_function(own) else self._reply_function
        if reply is None:
            return WorkerAnswer([], {}, is_over=True)
        said, error = self._call_for_text(lambda: reply([dict(message) for message in messages]))
        if error:
            return WorkerAnswer([], {}, is_over=True, error=f"reply: {self._describe_error(error)}")
        return WorkerAnswer([], {}, is_over=True) if said is None else WorkerAnswer([("user", "", said)], {})

    def _compute_reward(self, answer: WorkerAnswer) -> None:
        get_reward = getattr(self._environment, "get_reward", None)
        if get_reward is None or answer.error:
            return
        value, error = self._call_user_code(get_reward)
        if error is None and value is not None:
            answer.reward, error = self._call_user_code(lambda: validate_number(value, "get_reward()"))
        if error:
            answer.error = f"get_reward: {self._describe_error(error)}"

    def _pickle_environment(self) -> bytes:
        if not self._env_spec.returns_environment or self._environment is None:
            return NO_ENVIRONMENT
        return pickle_environment(self._env_spec.environment, self._environment)

    def _call_user_code(self, action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Return what a call of the user's code returns, and what it raises."""
        owner = os.getpid()
        try:
            value = self._call_with_time_limit(action)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever code of the user's raises is an answer
            exit_if_forked(owner, error)
            return None, error
        exit_if_forked(owner)
        return value, None

    def _call_for_text(self, action: Callable[[], Any]) -> tuple[str | None, BaseException | None]:
        """Return what a call of the user's code says as text, or None where it returns None, and what it raises."""
        value, error = self._call_user_code(action)
        if error or value is None:
            return None, error
        return self._call_user_code(lambda: shorten_text(value))

    def _call_with_time_limit(self, action: Callable[[], Any]) -> Any:
        """Return what a call returns, awaited where it is asynchronous. TimeLimitError where it takes too long."""
        with limit_time(self._env_spec.timeout if self._has_time_limit else 0.0):
            result = action()
            if inspect.isawaitable(result):
                self._loop = self._loop or asyncio.new_event_loop()
                result = self._loop.run_until_complete(await_result(result))
        return result

    def _describe_error(self, error: BaseException) -> str:
        if isinstance(error, TimeLimitError):
            return f"no answer within {self._env_spec.timeout:g} s"
        told = replace_surrogates(describe_error(error))
        self._log_error(told, error)
        return told


async def await_result(result: Any) -> Any:
    return await result


@contextmanager
def limit_time(timeout: float) -> Iterator[None]:
    """Raise TimeLimitError in here after so many seconds; 0 is never. What stays in C code does not hear it."""
    if not timeout or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeLimitError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def seed_generators(seed: str) -> None:
    """Seed the random numbers that environments draw: those of Python, and of numpy where it is in use."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(random.Random(seed).randrange(2**32))


def shorten_text(value: Any) -> str:
    """Return the text of a value, cut where it is very long, so that it can be encoded."""
    text = str(value)
    return replace_surrogates(
        text
        if len(text) <= MAX_OBSERVATION_CHARACTERS
        else f"{text[:MAX_OBSERVATION_CHARACTERS]}... ({len(text)} characters)"
    )


def replace_surrogates(text: str) -> str:
    """Return the text with a mark in place of half a surrogate pair, which no tokenizer and no file takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pickle_environment(spec: str, environment: Any) -> bytes:
    """Pickle the attributes of an environment, those that can be."""
    attributes = {}
    for name, value in vars(environment).items():
        try:
            attributes[name] = pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
            continue  # a socket, a lock: reward functions find it missing
    return pickle.dumps((spec, pickle.dumps((type(environment), attributes))))
