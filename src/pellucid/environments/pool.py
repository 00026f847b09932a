"""Runs many conversations at once, each in its own worker process, without waiting for any single one.

Code that hangs, exits or fills its memory loses its own conversation alone. In a notebook, environments that other
processes cannot load run in this one.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.environments import agents, worker
from pellucid.environments.agents import AgentRunner, AgentSpec, SolveRequest
from pellucid.environments.spec import (
    ENVIRONMENT_COLUMN,
    EnvironmentSpec,
    get_environment_tools,
    load_environment_factories,
)
from pellucid.environments.worker import (
    BeginRequest,
    EnvironmentRunner,
    TurnRequest,
    WorkerAnswer,
    decode_worker_answer,
)
from pellucid.sandbox.pool import (
    ForkServer,
    Worker,
    WorkerLimits,
    WorkerLostError,
    WorkerStartError,
    build_worker_config,
    terminate_ended,
    terminate_workers,
)
from pellucid.sandbox.worker import ErrorLog, WorkerConfig
from pellucid.types import (
    AsyncEnvironments,
    ConversationOutcome,
    EnvironmentReply,
    Message,
    PolicyTurn,
    Prompt,
    UserError,
)
from pellucid.utils.plugins import IN_PROCESS_PREFIX, load_function


class ConversationWorker(Worker):
    """The worker process of one conversation at a time."""

    decode = staticmethod(decode_worker_answer)

    def send_request(self, request: BeginRequest | TurnRequest | SolveRequest, timeout: float) -> None:
        """Send a request, to be answered within `timeout` seconds. Raises WorkerLostError if it is not taken."""
        self.set_timeout(timeout)
        self.send(pickle.dumps((request, timeout)))

    def receive_answer(self) -> WorkerAnswer | None:
        """Return the answer, or None if there is none yet. Raises WorkerLostError if none will come."""
        answer: WorkerAnswer | None = self.receive()
        if answer:
            self.deadline = inf
        return answer


class _InProcessWorker:
    """Replaces a ConversationWorker: it answers in this process, without time limits."""

    connection = None
    deadline = inf
    is_alive = True

    def __init__(self, env_spec: EnvironmentSpec, log_error: ErrorLog) -> None:
        self._runner = EnvironmentRunner(env_spec, log_error, has_time_limit=False)
        self._answer: WorkerAnswer | None = None

    def send_request(self, request: BeginRequest | TurnRequest, timeout: float) -> None:  # noqa: ARG002
        self._answer = self._runner.handle(request)

    def receive_answer(self) -> WorkerAnswer | None:
        answer, self._answer = self._answer, None
        return answer

    def terminate(self) -> None:
        """Do nothing: there is no process to end."""


class _InProcessFactory:
    """Creates workers in this process, in place of a WorkerFactory."""

    def __init__(self, env_spec: EnvironmentSpec, log: Path | None) -> None:
        self.create_worker = partial(_InProcessWorker, env_spec, ErrorLog(log or os.devnull))

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class WorkerFactory(ForkServer):
    """Starts the workers of conversations, which run an environment or an agent."""

    def __init__(self, spec: EnvironmentSpec | AgentSpec, config: WorkerConfig) -> None:
        super().__init__(config, _load_spec, pickle.dumps(spec))
        self._kind = "agent" if isinstance(spec, AgentSpec) else "environment"

    def create_worker(self) -> ConversationWorker:
        """Return a new worker. Raises UserError if the user's code cannot be loaded."""
        try:
            return self.start_worker(ConversationWorker)
        except WorkerStartError as error:
            raise UserError(f"the {self._kind} cannot be used: {error}") from None


def _load_spec(pickled: bytes) -> Callable[[Connection], None]:
    """Import the user's code. Return the function that serves conversations."""
    spec: EnvironmentSpec | AgentSpec = pickle.loads(pickled)
    if isinstance(spec, AgentSpec):
        AgentRunner(spec)
        return partial(agents.serve_request, spec)
    EnvironmentRunner(spec)
    return partial(worker.serve_requests, spec)


@dataclass
class _Conversation:
    """A conversation under way: its prompt, the messages so far, and counts of tool calls by result."""

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    """Empty until the conversation has begun."""
    events: Counter[str] = field(default_factory=Counter)

    def build_prompt(self, answer: WorkerAnswer, tools: tuple[Mapping[str, Any], ...]) -> Prompt:
        """Return the prompt, with what the environment adds to its last message."""
        assert not isinstance(self.prompt.text, str)
        addition = "".join(content for *_, content in answer.texts)
        *others, last = self.prompt.text
        self.messages = [*others, {**last, "content": f"{last['content']}{addition}"}]
        return replace(self.prompt, text=tuple(self.messages), tools=tools, escape_special_tokens=True)

    def build_reply(self, answer: WorkerAnswer) -> EnvironmentReply:
        self.events.update(answer.events)
        if answer.is_over:
            return EnvironmentReply(
                outcome=ConversationOutcome(answer.reward, answer.error, dict(self.events), answer.environment)
            )
        messages = tuple(
            {"role": role, **({"name": name} if name else {}), "content": content}
            for role, name, content in answer.texts
        )
        self.messages += messages
        return EnvironmentReply(messages)


class EnvironmentPool:
    """Environments and tools in worker processes, which print into the file `log`. Implements AsyncEnvironments.

    `seed` seeds the environments' random numbers.
    """

    def __init__(self, env_spec: EnvironmentSpec, cfg: WorkerLimits, log: Path | None = None, seed: int = 0) -> None:
        self._set_up(env_spec, seed, WorkerFactory(env_spec, build_worker_config(cfg, log)))

    def _set_up(self, env_spec: EnvironmentSpec, seed: int, factory: WorkerFactory | _InProcessFactory) -> None:
        self._env_spec, self._seed, self._factory = env_spec, seed, factory
        self.idle: list[Any] = []
        self.busy: dict[int, Any] = {}
        """The workers of conversations under way, by their numbers."""
        self._conversations: dict[int, _Conversation] = {}
        self._ready: deque[tuple[int, EnvironmentReply]] = deque()
        self._tool_schemas: dict[str, tuple[Mapping[str, Any], ...]] = {}
        Finalize(self, _end_conversations, [self.idle, self.busy, factory], exitpriority=0)

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Begin a conversation; its first reply is the prompt as the environment completes it."""
        self._discard(number)
        self._conversations[number] = _Conversation(prompt)
        group_seed = f"{self._seed}/{prompt.id}"
        request = BeginRequest(prompt.columns, (group_seed, f"{group_seed}/{sibling}"))
        self._send_request(number, request, self._env_spec.timeout)

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Send the policy's turn: its tool calls are executed, or the environment replies to it."""
        conversation = self._conversations[number]
        conversation.messages.append(turn.message)
        calls = len(turn.message.get("tool_calls") or ())
        request = TurnRequest(turn, tuple(conversation.messages))
        self._send_request(number, request, self._env_spec.timeout * (calls + 2))

    def end_conversation(self, number: int) -> None:
        """End a conversation: the policy says nothing more. The reply is its outcome."""
        self._send_request(number, TurnRequest(PolicyTurn({}), (), is_last=True), self._env_spec.timeout * 2)

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
        """Return the replies that have come, with the numbers of their conversations; wait up to `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            replies = list(self._ready)
            self._ready.clear()
            replies += [(number, reply) for number in list(self.busy) if (reply := self._receive_reply(number))]
            remaining = deadline - time.monotonic()
            connections = [worker.connection for worker in self.busy.values() if worker.connection]
            if replies or remaining <= 0 or not connections:
                return replies
            first_deadline = min(worker.deadline for worker in self.busy.values())
            wait(connections, max(0.0, min(remaining, first_deadline - time.monotonic())))

    def close(self) -> None:
        """End the processes, whatever they are doing; the next conversation starts new ones."""
        _end_conversations(self.idle, self.busy, self._factory)
        self._conversations.clear()
        self._ready.clear()

    def _send_request(self, number: int, request: BeginRequest | TurnRequest, timeout: float) -> None:
        try:
            if number not in self.busy:
                terminate_ended(self.idle)
                self.busy[number] = self.idle.pop() if self.idle else self._factory.create_worker()
            self.busy[number].send_request(request, timeout)
        except WorkerLostError as error:
            self._ready.append((number, self._handle_lost_worker(number, str(error))))

    def _receive_reply(self, number: int) -> EnvironmentReply | None:
        try:
            answer = self.busy[number].receive_answer()
        except WorkerLostError as error:
            return self._handle_lost_worker(number, str(error))
        if answer is None:
            return None
        conversation = self._conversations[number]
        if not conversation.messages and not answer.is_over:
            return EnvironmentReply(prompt=conversation.build_prompt(answer, self._get_schemas(conversation.prompt)))
        reply = conversation.build_reply(answer)
        if reply.outcome:
            self.idle.append(self.busy.pop(number))
            del self._conversations[number]
        return reply

    def _handle_lost_worker(self, number: int, error: str) -> EnvironmentReply:
        """Return the reply for a conversation whose process is lost.

        If tools keep no state between calls, only the calls fail: the conversation goes on in another process.
        """
        self.busy.pop(number).terminate()
        conversation = self._conversations[number]
        calls = conversation.messages[-1].get("tool_calls") if conversation.messages else None
        if self._env_spec.is_stateless and calls:
            texts = [("tool", str(call["function"]["name"]), str({"error": error})) for call in calls]
            return conversation.build_reply(WorkerAnswer(texts, {"calls": len(calls), "lost": len(calls)}))
        del self._conversations[number]
        return EnvironmentReply(
            outcome=ConversationOutcome(error=error, events=dict(conversation.events + Counter(lost=1)))
        )

    def _get_schemas(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        name = str(prompt.columns.get(ENVIRONMENT_COLUMN))
        if name not in self._tool_schemas:
            self._tool_schemas[name] = _build_tool_schemas(self._env_spec, name)
        return self._tool_schemas[name]

    def _discard(self, number: int) -> None:
        """End a conversation of this number that was abandoned, as by an interrupt."""
        if number in self._conversations:
            del self._conversations[number]
            if worker := self.busy.pop(number, None):
                worker.terminate()


class InProcessEnvironments(EnvironmentPool):
    """Environments and tools in this process, as in a notebook: each answers at once, and there are no time limits."""

    def __init__(self, env_spec: EnvironmentSpec, log: Path | None = None, seed: int = 0) -> None:
        self._set_up(env_spec, seed, _InProcessFactory(env_spec, log))


def _end_conversations(idle: list[Any], busy: dict[int, Any], factory: WorkerFactory | _InProcessFactory) -> None:
    terminate_workers(idle)
    terminate_workers(busy)
    factory.close()


def create_environments(
    task: Any, cfg: WorkerLimits, log: Path | None = None, in_process: bool = False
) -> AsyncEnvironments | None:
    """Return the environments that a task's `environment_spec` describes; None for a task without conversations.

    With `in_process` they run in this process, since no other can load them.
    """
    env_spec: EnvironmentSpec | None = getattr(task, "environment_spec", None)
    if not isinstance(env_spec, EnvironmentSpec):
        return None
    if in_process or any(spec.startswith(IN_PROCESS_PREFIX) for spec in (env_spec.environment, *env_spec.tools)):
        return InProcessEnvironments(env_spec, log, task.seed)
    return EnvironmentPool(env_spec, cfg, log, task.seed)


# ---------------------------------------------------------------- the JSON schemas of tools


def _build_tool_schemas(env_spec: EnvironmentSpec, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of the tools and of the environment's methods. `name` selects among environments."""
    tools = [load_function(spec, "tool") for spec in env_spec.tools]
    factories = load_environment_factories(env_spec)
    if factory := factories.get("") or factories.get(name):
        # The methods are only inspected, so a class is not initialized.
        environment = object.__new__(factory) if isinstance(factory, type) else factory()
        tools += get_environment_tools(environment).values()
    return tuple(map(_build_tool_schema, tools))


def _build_tool_schema(tool: Callable[..., Any]) -> Mapping[str, Any]:
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - only tools need it
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"tool {getattr(tool, '__name__', tool)}: {message}: give its arguments types, and its docstring a line for"
            " each under `Args:`"
        ) from error
