"""The process of a conversation calls the environment and the tools, and computes the reward.

A user's class is an environment as in TRL (1.16, GRPOTrainer): `reset(**row)` returns text to add to the question, or
None; its public methods are tools; `get_reward()` returns the reward of a conversation. With or without tools,
`reply(messages)` returns the environment's next message, or None to end the conversation.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from pellucid.environments.spec import (
    ENVIRONMENT_COLUMN,
    EnvironmentSpec,
    get_environment_tools,
    is_reply_function,
    load_environment_factories,
)
from pellucid.sandbox.values import InvalidResultError, replace_surrogates, validate_number
from pellucid.sandbox.worker import (
    ErrorLog,
    call_user_code,
    log_error,
    receive_request,
    send_answer,
    start_watchdog,
    stop_watchdog,
)
from pellucid.types import Message, PolicyTurn
from pellucid.utils.plugins import load_function, load_object

_MAX_OBSERVATION_CHARACTERS = 20_000
"""The most characters of an observation; the rest is left out."""


@dataclass(frozen=True)
class BeginRequest:
    """The start of a conversation: the data row of its prompt, the seed of its group, and its own seed."""

    columns: Mapping[str, Any]
    seeds: tuple[str, str]


@dataclass(frozen=True)
class TurnRequest:
    """A turn of the policy; `messages` are all so far. If `is_last`, no turn follows."""

    turn: PolicyTurn
    messages: Sequence[Message]
    is_last: bool = False


@dataclass
class WorkerAnswer:
    """The answer of a worker, as JSON values and bytes."""

    texts: list[tuple[str, str, str]] = field(default_factory=list)
    """Role, name and content of each message."""
    events: dict[str, int] = field(default_factory=dict)
    is_over: bool = False
    reward: float | None = None
    error: str = ""
    environment: bytes = b""
    """The pickled environment as the conversation left it, for reward functions; empty for none."""


def encode_worker_answer(answer: WorkerAnswer) -> bytes:
    """Return an answer as one line of JSON and the bytes of the environment."""
    values = asdict(answer)
    environment = values.pop("environment")
    return json.dumps(values).encode() + b"\n" + environment


def decode_worker_answer(data: bytes) -> WorkerAnswer:
    """Decode an answer. Raises ValueError, TypeError or RecursionError for other bytes."""
    values, _, environment = data.partition(b"\n")
    return WorkerAnswer(**json.loads(values), environment=environment)


def serve_requests(env_spec: EnvironmentSpec, connection: Connection) -> None:
    """Answer requests until the parent closes its end of the connection."""
    runner = EnvironmentRunner(env_spec)
    while True:
        request: BeginRequest | TurnRequest
        request, seconds = receive_request(connection)
        start_watchdog(seconds)  # for all calls of the request together
        answer = runner.handle(request)
        stop_watchdog()
        send_answer(connection, encode_worker_answer(answer))


class _TimeLimitError(BaseException):
    """A call has taken too long. It is not an Exception, which user code might catch."""


class EnvironmentRunner:
    """Answers requests. `log_error` logs errors in the user's code."""

    def __init__(self, env_spec: EnvironmentSpec, log_error: ErrorLog = log_error, has_time_limit: bool = True) -> None:
        self._env_spec, self._log_error, self._has_time_limit = env_spec, log_error, has_time_limit
        self._tools = {spec.rpartition(":")[2]: load_function(spec, "tool") for spec in env_spec.tools}
        self._factories = load_environment_factories(env_spec)
        found = load_object(env_spec.environment) if env_spec.environment else None
        self._reply_function: Callable[..., Any] | None = found if is_reply_function(found) else None
        self._environments: dict[str, Any] = {}
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle(self, request: BeginRequest | TurnRequest) -> WorkerAnswer:
        """Return the answer; when the conversation is over, with its reward and the environment as it is then."""
        if isinstance(request, BeginRequest):
            return self._begin(request)
        answer = WorkerAnswer() if request.is_last else self._handle_turn(request)
        if answer.is_over or request.is_last:
            answer.is_over = True
            self._compute_reward(answer)
            if self._env_spec.returns_environment and self._environment is not None:
                answer.environment = _pickle_environment(self._env_spec.environment, self._environment)
        return answer

    def _begin(self, request: BeginRequest) -> WorkerAnswer:
        shared, own = request.seeds
        seed_generators(shared)
        observation, exception = self._call_user_code(lambda: self._reset(request.columns), _shorten_text)
        seed_generators(own)
        if exception is not None:
            return WorkerAnswer(is_over=True, error=f"reset: {self._log_and_describe(exception)}")
        return WorkerAnswer([("user", "", observation)] if observation is not None else [])

    def _reset(self, columns: Mapping[str, Any]) -> Any:
        if not self._factories:
            return None
        name = "" if "" in self._factories else str(columns.get(ENVIRONMENT_COLUMN))
        if name not in self._factories:
            raise InvalidResultError(
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
        texts = [
            ("tool", "unknown", str({"error": f"The call cannot be read: {reason}"}))
            for reason in request.turn.unreadable_calls
        ]
        events = Counter({"unreadable": len(texts)})
        for call in calls:
            name = str(call["function"]["name"])
            content, kind = self._call_tool(tools, name, call["function"]["arguments"])
            texts.append(("tool", name, content))
            if kind:
                events[kind] += 1
        events["calls"] = len(texts)
        return WorkerAnswer(texts, dict(+events)) if texts else self._call_reply(request.messages)

    def _call_tool(self, tools: Mapping[str, Callable[..., Any]], name: str, arguments: Any) -> tuple[str, str]:
        """Return the result of a tool call as text, and the kind of its failure: "" if there was none."""
        if name not in tools:
            return str({"error": f"Tool {name} not found."}), "unknown"
        try:
            inspect.signature(tools[name]).bind(**arguments)
        except TypeError as mismatch:
            return str({"error": str(mismatch)}), "arguments"
        result, exception = self._call_user_code(lambda: tools[name](**arguments), _shorten_text)
        if exception is None:
            return str(result), ""
        description = self._log_and_describe(exception)
        if isinstance(exception, _TimeLimitError):
            return str({"error": description}), "timeout"
        text, failure = self._call_user_code(lambda: {"error": str(exception)}, _shorten_text)  # str() runs user code
        return str(text) if failure is None else str({"error": description}), "raised"

    def _call_reply(self, messages: Sequence[Message]) -> WorkerAnswer:
        own = getattr(self._environment, "reply", None)
        reply = own if own is not None and is_reply_function(own) else self._reply_function
        if reply is None:
            return WorkerAnswer(is_over=True)
        text, exception = self._call_user_code(lambda: reply([dict(message) for message in messages]), _shorten_text)
        if exception is not None:
            return WorkerAnswer(is_over=True, error=f"reply: {self._log_and_describe(exception)}")
        return WorkerAnswer(is_over=True) if text is None else WorkerAnswer([("user", "", text)])

    def _compute_reward(self, answer: WorkerAnswer) -> None:
        get_reward = getattr(self._environment, "get_reward", None)
        if get_reward is None or answer.error:
            return
        answer.reward, exception = self._call_user_code(
            get_reward, lambda value: validate_number(value, "get_reward()")
        )
        if exception is not None:
            answer.error = f"get_reward: {self._log_and_describe(exception)}"

    def _call_user_code(
        self, action: Callable[[], Any], convert: Callable[[Any], Any]
    ) -> tuple[Any, BaseException | None]:
        """Return the result of a call, awaited and converted unless it is None, and its exception."""

        def call() -> Any:
            with _limit_time(self._env_spec.timeout if self._has_time_limit else 0.0):
                result = action()
                if inspect.isawaitable(result):
                    self._loop = self._loop or asyncio.new_event_loop()
                    result = self._loop.run_until_complete(result)
                return None if result is None else convert(result)

        return call_user_code(call)

    def _log_and_describe(self, exception: BaseException) -> str:
        """Log an exception, unless a call took too long, and return its description."""
        if isinstance(exception, _TimeLimitError):
            return f"no answer within {self._env_spec.timeout:g} s"
        return self._log_error(exception)


@contextmanager
def _limit_time(timeout: float) -> Iterator[None]:
    """Raise _TimeLimitError in the block after `timeout` seconds; 0 is never. C code is not interrupted."""
    if not timeout or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise _TimeLimitError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def seed_generators(seed: str) -> None:
    """Seed the random numbers of environments: those of Python, and of numpy if it is in use."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(random.Random(seed).randrange(2**32))


def _shorten_text(value: Any) -> str:
    """Return the text of a value, cut if it is very long, without characters that cannot be encoded."""
    text = str(value)
    if len(text) > _MAX_OBSERVATION_CHARACTERS:
        text = f"{text[:_MAX_OBSERVATION_CHARACTERS]}... ({len(text)} characters)"
    return replace_surrogates(text)


def _pickle_environment(spec: str, environment: Any) -> bytes:
    """Pickle those attributes of an environment that can be pickled."""
    attributes = {}
    for name, value in vars(environment).items():
        try:
            attributes[name] = pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
            continue  # a socket, a lock: reward functions find it missing
    return pickle.dumps((spec, pickle.dumps((type(environment), attributes))))
