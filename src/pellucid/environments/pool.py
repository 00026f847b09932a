"""Processes for conversations: each has one to itself, forked from a process that has imported the user's code.

What hangs, ends or fills the memory of its process costs its own conversation. Where processes cannot be forked they
are started one by one, which takes a second each.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pellucid.environments import agents
from pellucid.environments.agents import AgentRunner, AgentSpec, SolveRequest
from pellucid.environments.spec import (
    ENVIRONMENT_COLUMN,
    EnvironmentSpec,
    get_environment_tools,
    load_environment_factories,
)
from pellucid.environments.worker import BeginRequest, EnvironmentRunner, TurnRequest, WorkerAnswer
from pellucid.rewards import worker
from pellucid.rewards.pool import (
    GRACE_SECONDS,
    MAX_MESSAGE_BYTES,
    SPAWN_CONTEXT,
    START_TIMEOUT_SECONDS,
    build_worker_environment,
    use_safe_path,
)
from pellucid.rewards.settings import RewardConfig
from pellucid.rewards.worker import WorkerConfig
from pellucid.types import (
    AsyncEnvironments,
    ConversationOutcome,
    EnvironmentReply,
    Message,
    PolicyTurn,
    Prompt,
    UserError,
)
from pellucid.utils import signals
from pellucid.utils.channel import Channel
from pellucid.utils.plugins import IN_PROCESS_PREFIX, load_function

CAN_FORK = sys.platform == "linux"


class ConversationLostError(Exception):
    """The process of a conversation has ended or is late; the message says so in words."""


class ConversationWorker:
    """The process of one conversation at a time, as its parent holds it.

    connection: what to wait on. It brings an answer, or the end of the process. pid: 0 before it has said it.
    """

    def __init__(self, connection: Any) -> None:
        self.connection, self.deadline, self.pid = connection, math.inf, 0
        self._channel = Channel(connection, MAX_MESSAGE_BYTES)
        self._pending_answer: WorkerAnswer | None = None
        """An answer whose environment is still to come."""

    @property
    def has_ended(self) -> bool:
        """Whether the process of an idle player is gone: it has nothing to say otherwise."""
        return self.connection.poll()

    def send_request(self, request: BeginRequest | TurnRequest | SolveRequest, timeout: float) -> None:
        """Send a request, to be answered within so many seconds.

        GoneError where the process has ended, or does not take the request in that time.
        """
        self.deadline, self._timeout = time.monotonic() + timeout + GRACE_SECONDS, timeout
        try:
            self._channel.send(pickle.dumps((request, timeout)), timeout + GRACE_SECONDS)
        except TimeoutError as error:
            raise ConversationLostError(f"no answer within {timeout:g} s") from error
        except (OSError, ValueError) as error:
            raise ConversationLostError("its process has ended") from error

    def receive_answer(self) -> tuple[WorkerAnswer, bytes] | None:
        """Return the answer, or None where there is none yet. GoneError where none will come."""
        try:
            while (data := self._channel.receive()) is not None:
                if self._pending_answer is not None:
                    answer, self._pending_answer, self.deadline = self._pending_answer, None, math.inf
                    return answer, data
                told = json.loads(data)
                if "pid" in told:
                    self.pid = told["pid"]
                else:
                    self._pending_answer = WorkerAnswer(**told)
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            raise ConversationLostError("its process has ended") from error
        if time.monotonic() >= self.deadline:
            raise ConversationLostError(f"no answer within {self._timeout:g} s")
        return None

    def terminate(self) -> None:
        """End the process and all that it has started."""
        if not self.pid:
            with suppress(ConversationLostError):
                self.receive_answer()  # it may have said its number since
        if self.pid and hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()  # one that is idle, or has not said its number yet, ends by itself


class WorkerFactory:
    """Makes players."""

    def __init__(self, spec: EnvironmentSpec | AgentSpec, config: WorkerConfig) -> None:
        self._spec_bytes, self._config = pickle.dumps(spec), config
        self._kind = "agent" if isinstance(spec, AgentSpec) else "environment"
        self._fork_server: Any = None
        self._control: Any = None
        self._spawned: list[Any] = []

    def create_worker(self) -> ConversationWorker:
        """Return a new player. UserError where the user's code cannot be loaded."""
        mine, theirs = Pipe()
        if CAN_FORK:
            if self._fork_server is None or not self._fork_server.is_alive() or not self._is_accepting():
                self.close()
                self._fork_server = self._start_fork_server()
            reduction.send_handle(self._control, theirs.fileno(), self._fork_server.pid)
        else:
            with use_safe_path():
                process = SPAWN_CONTEXT.Process(
                    target=run_spawned_worker, args=(theirs, self._spec_bytes, self._config)
                )
                process.start()
            self._spawned.append(process)
        theirs.close()
        return ConversationWorker(mine)

    def _is_accepting(self) -> bool:
        """Return whether the process that forks the others takes what is sent to it; it may hang."""
        writable = select.poll()
        writable.register(self._control.fileno(), select.POLLOUT)
        return bool(writable.poll(START_TIMEOUT_SECONDS * 1000))

    def close(self) -> None:
        """End the process that forks the others."""
        if self._fork_server is not None:
            self._control.close()
            self._fork_server.kill()
            self._fork_server.join()
            self._fork_server = None
        while self._spawned:
            process = self._spawned.pop()
            process.kill()
            process.join()

    def _start_fork_server(self) -> Any:
        """Return the process that forks, which has loaded the user's code. UserError where it cannot."""
        self._control, theirs = Pipe()
        forker = SPAWN_CONTEXT.Process(target=run_fork_server, args=(theirs, self._spec_bytes, self._config))
        signals.open_standard_descriptors()
        with use_safe_path():
            forker.start()
        theirs.close()
        try:
            told = self._receive_load_report()
        except (EOFError, OSError, ValueError):
            told = {"error": 'its process ended; a script needs `if __name__ == "__main__":` around what it does'}
        if error := told.get("error"):
            forker.kill()
            raise UserError(f"the {self._kind} cannot be used: {error}")
        return forker

    def _receive_load_report(self) -> dict[str, str]:
        """Return what the process that forks the others says of the user's code, or that it says nothing in time."""
        channel, until = Channel(self._control, MAX_MESSAGE_BYTES), time.monotonic() + START_TIMEOUT_SECONDS
        try:
            while (data := channel.receive()) is None:
                if not wait([self._control], max(0.0, until - time.monotonic())):
                    return {"error": f"it is not loaded within {START_TIMEOUT_SECONDS:g} s"}
            return json.loads(data)
        finally:
            os.set_blocking(self._control.fileno(), True)


def run_fork_server(control: Connection, spec: bytes, config: WorkerConfig) -> None:
    """Load the user's code, then fork a process for each connection that comes, until the parent closes its end."""
    worker.isolate_process(config)
    loaded: EnvironmentSpec | AgentSpec = pickle.loads(spec)
    control.send_bytes(worker.run_and_report(lambda: create_runner(loaded) and None))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        try:
            handle = reduction.recv_handle(control)
        except (EOFError, OSError, RuntimeError):
            worker.exit_with_children()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            control.close()
            serve_requests(Connection(handle), loaded)
        os.close(handle)


def run_spawned_worker(connection: Connection, spec: bytes, config: WorkerConfig) -> None:
    """Settle as the one process of a conversation, and play."""
    worker.isolate_process(config)
    serve_requests(connection, pickle.loads(spec))


def create_runner(spec: EnvironmentSpec | AgentSpec) -> EnvironmentRunner | AgentRunner:
    """Return who answers requests, with the user's code imported."""
    return (
        AgentRunner(spec, worker.log_error)
        if isinstance(spec, AgentSpec)
        else EnvironmentRunner(spec, worker.log_error)
    )


def serve_requests(connection: Connection, spec: EnvironmentSpec | AgentSpec) -> None:
    """Answer requests until the parent closes its end; an agent answers one."""
    if isinstance(spec, AgentSpec):
        agents.run_agent_worker(connection, spec)
        return
    try:
        connection.send_bytes(json.dumps({"pid": os.getpid()}).encode())
        actor = EnvironmentRunner(spec, worker.log_error)
        while True:
            request: BeginRequest | TurnRequest
            request, seconds = pickle.loads(connection.recv_bytes())
            worker.start_watchdog([seconds])  # of all calls of the request together
            answer, environment = actor.handle(request)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(json.dumps(asdict(answer)).encode())
            connection.send_bytes(environment)
    except (EOFError, OSError):
        worker.exit_with_children()


# ---------------------------------------------------------------- schemas
# The JSON schemas of tools, from the types and docstrings of functions, as chat templates take them.


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


# ---------------------------------------------------------------- stage
# The conversations that are under way, each with its process: told, heard, and none waited for.


@dataclass
class Conversation:
    """What is known of a conversation under way: its question, what was said, and how calls of tools went."""

    prompt: Prompt
    has_begun: bool = False
    messages: list[Message] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def build_prompt(self, answer: WorkerAnswer, tools: tuple[Mapping[str, Any], ...]) -> Prompt:
        """Return the prompt, with what the environment has added to its last message."""
        assert not isinstance(self.prompt.text, str)
        added = "".join(content for *_, content in answer.texts)
        *others, last = self.prompt.text
        self.has_begun, self.messages = True, [*others, {**last, "content": f"{last['content']}{added}"}]
        return replace(self.prompt, text=tuple(self.messages), tools=tools, escape_special_tokens=True)

    def build_reply(self, answer: WorkerAnswer, environment: bytes) -> EnvironmentReply:
        self.events.update(answer.events)
        if answer.is_over:
            return EnvironmentReply(
                outcome=ConversationOutcome(answer.reward, answer.error, dict(self.events), environment)
            )
        said = tuple(build_message(*text) for text in answer.texts)
        self.messages += said
        return EnvironmentReply(said)


def build_message(role: str, name: str, content: str) -> Message:
    return {"role": role, **({"name": name} if name else {}), "content": content}


class EnvironmentPool:
    """The World of environments and tools in processes of their own, which print into the file `log`."""

    def __init__(self, env_spec: EnvironmentSpec, cfg: RewardConfig, log: Path | None = None, seed: int = 0) -> None:
        self._env_spec, self._seed = env_spec, seed
        confines = WorkerConfig(cfg.memory_gb, str(log or os.devnull), build_worker_environment(cfg.secrets))
        self._factory = WorkerFactory(env_spec, confines)
        self.idle: list[ConversationWorker] = []
        self.busy: dict[int, ConversationWorker] = {}
        """The processes of conversations under way, by their numbers."""
        self._conversations: dict[int, Conversation] = {}
        self._ready: deque[tuple[int, EnvironmentReply]] = deque()
        self._tool_schemas: dict[str, tuple[Mapping[str, Any], ...]] = {}
        Finalize(self, terminate_workers, [self.idle, self.busy, self._factory], exitpriority=0)

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Begin a conversation; its first reply is the question as the environment asks it."""
        self._discard(number)
        self._conversations[number] = Conversation(prompt)
        place = f"{self._seed}/{prompt.id}"
        self._send_request(number, BeginRequest(prompt.columns, (place, f"{place}/{sibling}")), self._env_spec.timeout)

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Tell what the policy has said: its calls are made, or it is replied to."""
        conversation = self._conversations[number]
        conversation.messages.append(turn.message)
        calls = len(turn.message.get("tool_calls") or ())
        hear = TurnRequest(turn, tuple(conversation.messages))
        self._send_request(number, hear, self._env_spec.timeout * (calls + 2))

    def end_conversation(self, number: int) -> None:
        """Tell that the policy says nothing more in a conversation. The reply is its outcome."""
        self._send_request(number, TurnRequest(PolicyTurn({}), (), is_last=True), self._env_spec.timeout * 2)

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
        """Return the replies that have come, with the numbers of their conversations; wait so long for the first."""
        until = time.monotonic() + seconds
        while True:
            found = [
                *self._take_ready(),
                *((number, reply) for number in list(self.busy) if (reply := self._receive_reply(number))),
            ]
            left = until - time.monotonic()
            if found or left <= 0 or not self.busy:
                return found
            first = min(player.deadline for player in self.busy.values()) - time.monotonic()
            wait([player.connection for player in self.busy.values()], max(0.0, min(left, first)))

    def close(self) -> None:
        """End the processes, whatever they are doing; the next conversation starts new ones."""
        terminate_workers(self.idle, self.busy, self._factory)
        self._conversations.clear()
        self._ready.clear()

    def _take_ready(self) -> list[tuple[int, EnvironmentReply]]:
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def _send_request(self, number: int, request: BeginRequest | TurnRequest, timeout: float) -> None:
        player = self.busy.get(number)
        try:
            if player is None:
                player = self.busy[number] = self._get_idle_worker()
            player.send_request(request, timeout)
        except ConversationLostError as error:
            self._ready.append((number, self._handle_lost_worker(number, str(error))))

    def _get_idle_worker(self) -> ConversationWorker:
        """Return a player that is idle, or a new one. One that ended while it was idle costs nobody a conversation."""
        while self.idle:
            player = self.idle.pop()
            if not player.has_ended:
                return player
            player.terminate()
        return self._factory.create_worker()

    def _receive_reply(self, number: int) -> EnvironmentReply | None:
        """Return the reply of a conversation, if it has come."""
        try:
            found = self.busy[number].receive_answer()
        except ConversationLostError as error:
            return self._handle_lost_worker(number, str(error))
        if found is None:
            return None
        answer, environment = found
        conversation = self._conversations[number]
        if not conversation.has_begun and not answer.is_over:
            reply = EnvironmentReply(prompt=conversation.build_prompt(answer, self._get_schemas(conversation.prompt)))
        else:
            reply = conversation.build_reply(answer, environment)
        if reply.outcome:
            self.idle.append(self.busy.pop(number))
            del self._conversations[number]
        return reply

    def _handle_lost_worker(self, number: int, error: str) -> EnvironmentReply:
        """Return what follows where the process of a conversation is lost.

        Where nothing was to be remembered, the calls were in vain, and the conversation goes on.
        """
        self.busy.pop(number).terminate()
        conversation = self._conversations[number]
        calls = conversation.messages[-1].get("tool_calls") if conversation.has_begun else None
        if self._env_spec.is_stateless and calls:
            texts = [("tool", str(call["function"]["name"]), str({"error": error})) for call in calls]
            return conversation.build_reply(WorkerAnswer(texts, {"calls": len(calls), "lost": len(calls)}), b"")
        del self._conversations[number]
        return EnvironmentReply(
            outcome=ConversationOutcome(error=error, events=dict(conversation.events + Counter(lost=1)))
        )

    def _get_schemas(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        name = str(prompt.columns.get(ENVIRONMENT_COLUMN))
        if name not in self._tool_schemas:
            self._tool_schemas[name] = build_tool_schemas(self._env_spec, name)
        return self._tool_schemas[name]

    def _discard(self, number: int) -> None:
        """End a conversation of this number that was left, as by an interrupt."""
        if number in self._conversations:
            del self._conversations[number]
            if player := self.busy.pop(number, None):
                player.terminate()


def terminate_workers(
    idle: list[ConversationWorker], busy: dict[int, ConversationWorker], factory: WorkerFactory
) -> None:
    for player in (*idle, *busy.values()):
        player.terminate()
    idle.clear()
    busy.clear()
    factory.close()


# ---------------------------------------------------------------- here
# Conversations in this process, with what other processes cannot load, as in a notebook. There are no time limits.


class InProcessEnvironments:
    """The World of environments and tools in this process: each answers as soon as it is told."""

    def __init__(self, env_spec: EnvironmentSpec, log: Path | None = None, seed: int = 0) -> None:
        self._env_spec, self._log, self._seed = env_spec, log, seed
        self._idle_runners: list[EnvironmentRunner] = []
        self._runners: dict[int, EnvironmentRunner] = {}
        self._conversations: dict[int, Conversation] = {}
        self._ready: deque[tuple[int, EnvironmentReply]] = deque()

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        self._runners[number] = (
            self._idle_runners.pop()
            if self._idle_runners
            else EnvironmentRunner(self._env_spec, self._log_error, has_time_limit=False)
        )
        conversation = self._conversations[number] = Conversation(prompt)
        place = f"{self._seed}/{prompt.id}"
        answer, _ = self._runners[number].handle(BeginRequest(prompt.columns, (place, f"{place}/{sibling}")))
        if answer.is_over:
            reply = conversation.build_reply(answer, b"")
        else:
            tools = build_tool_schemas(self._env_spec, str(prompt.columns.get(ENVIRONMENT_COLUMN)))
            reply = EnvironmentReply(prompt=conversation.build_prompt(answer, tools))
        self._ready.append((number, reply))

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        self._conversations[number].messages.append(turn.message)
        self._handle_turn(number, TurnRequest(turn, tuple(self._conversations[number].messages)))

    def end_conversation(self, number: int) -> None:
        self._handle_turn(number, TurnRequest(PolicyTurn({}), (), is_last=True))

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:  # noqa: ARG002
        """Return the replies, with the numbers of their conversations."""
        found = list(self._ready)
        self._ready.clear()
        return found

    def close(self) -> None:
        """Nothing is to be ended."""

    def _handle_turn(self, number: int, request: TurnRequest) -> None:
        reply = self._conversations[number].build_reply(*self._runners[number].handle(request))
        if reply.outcome:
            self._idle_runners.append(self._runners.pop(number))
        self._ready.append((number, reply))

    def _log_error(self, description: str, error: BaseException) -> None:  # noqa: ARG002
        if self._log:
            with self._log.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)


# ---------------------------------------------------------------- worlds
# The World of a task, if it has conversations.


def create_environments(
    task: Any, cfg: RewardConfig, log: Path | None = None, in_process: bool = False
) -> AsyncEnvironments | None:
    """Return the World that a task's `talk` describes; None for a task without conversations.

    log: the file that takes what is printed there. here: in this process, since no other can load it.
    """
    talk: EnvironmentSpec | None = getattr(task, "environment_spec", None)
    if not isinstance(talk, EnvironmentSpec):
        return None
    if in_process or any(spec.startswith(IN_PROCESS_PREFIX) for spec in (talk.environment, *talk.tools)):
        return InProcessEnvironments(talk, log, task.seed)
    return EnvironmentPool(talk, cfg, log, task.seed)
