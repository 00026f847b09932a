"""The HTTP endpoint for agents in training: each rollout has its own OpenAI-compatible URL, `/rollout/ID/v1`.

The server runs in a thread and queues requests. `AgentPool` treats them as replies of an environment, and answers
them with the turns of the policy.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field
from starlette.types import ASGIApp

from pellucid.environments.agents import LOOPBACK_HOST, AgentSpec, SolveRequest
from pellucid.environments.pool import ConversationWorker, WorkerFactory
from pellucid.environments.worker import WorkerAnswer
from pellucid.policy.chat_template import TEMPLATE_ERRORS, encode_bridge
from pellucid.sandbox.pool import WorkerLimits, WorkerLostError, build_worker_config
from pellucid.serve.api import STREAM_END, build_response_head, format_event
from pellucid.serve.command import open_listening_socket
from pellucid.serve.engine import build_message, build_usage, number_tool_calls
from pellucid.serve.middleware import (
    ERROR_HANDLERS,
    GuardMiddleware,
    RequestError,
    RequestLimitsMiddleware,
    make_server,
)
from pellucid.serve.schemas import (
    ChatMessage,
    FunctionSchema,
    RequestBody,
    StreamOptions,
    Text,
    TokenCount,
    ToolCall,
    ToolSchema,
    format_messages,
)
from pellucid.types import ConversationOutcome, EnvironmentReply, Message, PolicyTurn, Prompt, UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy


# ---------------------------------------------------------------- requests and answers
#
# Fields about sampling are ignored, since the policy samples as in training. A request with a field that would change
# the meaning of the answer is refused.


_MODEL_NAME = "policy"


class _AgentToolCall(ToolCall, extra="ignore"):
    pass


class _AgentMessage(ChatMessage, extra="ignore"):
    tool_calls: list[_AgentToolCall] | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - never set


class _AgentFunction(FunctionSchema, extra="allow"):
    pass


class _AgentTool(ToolSchema, extra="allow"):
    function: _AgentFunction  # pyright: ignore[reportIncompatibleVariableOverride] - never set


class _AgentRequest(RequestBody, extra="ignore"):
    model: Text = ""
    messages: list[_AgentMessage] = Field(min_length=1)
    tools: list[_AgentTool] = Field(default=[])
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def build_history(self) -> tuple[Message, ...]:
        """Return the messages for a chat template. Only messages of tools keep their names."""
        history = list[Message]()
        for message in format_messages(self.messages):
            names = {"name": message.get("name", "tool")} if message["role"] == "tool" else {}
            calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
            history.append({"role": message["role"], **names, "content": message["content"], **calls})
        return tuple(history)


def _make_response(request: _AgentRequest, turn: PolicyTurn) -> Response:
    """Return a turn of the policy as a chat completion. A stream has the whole message in its first event."""
    calls = turn.message.get("tool_calls", ())
    message = build_message(turn.message["content"], calls)
    reason = "length" if turn.is_truncated else "tool_calls" if calls else "stop"
    choice = {"index": 0, "finish_reason": reason, "logprobs": None}
    head = build_response_head("chatcmpl", request.model or _MODEL_NAME)
    usage = build_usage(*turn.token_counts)
    if not request.stream:
        body = {"object": "chat.completion", "usage": usage, "choices": [choice | {"message": message}]}
        return JSONResponse(head | body)
    head["object"] = "chat.completion.chunk"
    events = [head | {"choices": [choice | {"delta": number_tool_calls(message)}]}]
    if request.stream_options and request.stream_options.include_usage:
        events.append(head | {"choices": [], "usage": usage})
    return StreamingResponse([*map(format_event, events), STREAM_END], media_type="text/event-stream")


# ---------------------------------------------------------------- the server


_MAX_BODY_BYTES = 50_000_000
_TRANSFER_TIMEOUT_SECONDS = 60.0
"""How long a client may take to send a body, and to receive a piece of an answer."""
_KEEP_ALIVE_SECONDS = 10**8
"""Seconds that an agent's connection may be idle. It closes anyway when the agent's process ends."""
UNKNOWN_CONNECTION_TIMEOUT_SECONDS = 10.0
"""Seconds after which a connection without a request for a known rollout is closed."""


@dataclass(eq=False)
class _PendingRequest:
    """A request that waits for the policy."""

    rollout_name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int
    response: Future[PolicyTurn] = field(default_factory=Future)
    arrived_at: float = field(default_factory=time.monotonic)


class AgentEndpoint:
    """The HTTP server, in a thread."""

    def __init__(self) -> None:
        self.rollout_numbers: dict[str, int] = {}
        """The number of the conversation for each rollout name, which is the ID in the URL."""
        self.wakeup, self._wakeup_sender = Pipe(duplex=False)
        """A connection to wait on: it is readable when there are new requests."""
        self._requests: deque[_PendingRequest] = deque()
        self._socket = open_listening_socket(LOOPBACK_HOST, 0)
        self._port = int(self._socket.getsockname()[1])
        self._server = make_server(
            make_agent_app(self),
            UNKNOWN_CONNECTION_TIMEOUT_SECONDS,
            grace=0.0,
            keep_alive=_KEEP_ALIVE_SECONDS,
            is_waiting=self._is_unknown,
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="rollouts", daemon=True)
        self._thread.start()

    def make_rollout_url(self, name: str) -> str:
        """Return the base URL of a rollout."""
        return f"http://{LOOPBACK_HOST}:{self._port}/rollout/{name}/v1"

    def take_requests(self) -> list[_PendingRequest]:
        """Return the requests since the last call whose clients are still connected."""
        while self.wakeup.poll():
            self.wakeup.recv_bytes()
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        return [request for request in requests if request.response.set_running_or_notify_cancel()]

    async def wait_for_answer(self, request: _PendingRequest) -> PolicyTurn:
        """Queue a request, and return the turn of the policy. Raises RequestError if the request is refused."""
        self.check_rollout(request.rollout_name)
        self._requests.append(request)
        self._wakeup_sender.send_bytes(b"")
        return await asyncio.wrap_future(request.response)

    def check_rollout(self, name: str) -> None:
        """Raise RequestError if there is no such rollout."""
        if name not in self.rollout_numbers:
            raise _make_no_rollout_error(name)

    def _is_unknown(self, connection: Any) -> bool:
        """Return whether a connection has sent no request yet, or its last one is not for a known rollout."""
        cycle = connection.cycle
        return cycle is None or _parse_rollout_name(cycle.scope["path"]) not in self.rollout_numbers

    def close(self) -> None:
        """Refuse the unanswered requests, and stop the server."""
        self.rollout_numbers.clear()
        for request in self.take_requests():
            request.response.set_exception(_make_no_rollout_error(request.rollout_name))
        self._server.should_exit = True
        self._thread.join(5.0)


def _make_no_rollout_error(name: str) -> RequestError:
    return RequestError(404, f"there is no rollout {name}: it has ended, or never existed", "no_rollout")


def _parse_rollout_name(path: str) -> str:
    """Return the name of the rollout in a path; empty if there is none."""
    _, *parts = path.split("/")
    return parts[1] if len(parts) > 1 and parts[0] == "rollout" else ""


def make_agent_app(endpoint: AgentEndpoint) -> ASGIApp:
    app = FastAPI(title="pellucid", docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=ERROR_HANDLERS)

    @app.get("/rollout/{name}/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": _MODEL_NAME, "object": "model", "created": 0, "owned_by": "pellucid"}],
        }

    @app.post("/rollout/{name}/v1/chat/completions")
    async def chat(name: str, request: _AgentRequest) -> Response:
        limit = request.max_completion_tokens or request.max_tokens or 0
        tools = tuple(tool.model_dump(exclude_unset=True) for tool in request.tools)  # with every field the agent sent
        turn = await endpoint.wait_for_answer(_PendingRequest(name, request.build_history(), tools, limit))
        return _make_response(request, turn)

    limited = RequestLimitsMiddleware(app, _MAX_BODY_BYTES, _TRANSFER_TIMEOUT_SECONDS, _TRANSFER_TIMEOUT_SECONDS)
    return GuardMiddleware(limited, lambda scope: endpoint.check_rollout(_parse_rollout_name(scope["path"])))


# ---------------------------------------------------------------- the agents


AGENT_GRACE_SECONDS = 10.0
"""Seconds that an agent has to end after the last turn of the policy."""
_EMPTY_ANSWER = PolicyTurn({"role": "assistant", "content": ""}, is_truncated=True)
"""The answer once a conversation has reached its limits, like that of a service whose context is full."""
CONVERSATION_OVER_ERROR = "the conversation is over: sampler.turns or sampler.max_tokens is reached"
AGENT_NOT_ENDED_ERROR = f"{CONVERSATION_OVER_ERROR}, and the agent has not exited"
NO_REQUEST_ERROR = "the agent sent no request to the policy"


@dataclass(eq=False)
class _AgentRollout:
    """A running agent, with its requests and the history of its current branch."""

    name: str
    prompt: Prompt
    worker: ConversationWorker
    history: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    pending: deque[_PendingRequest] = field(default_factory=deque)
    """Its open requests. Its clock stops while there is one."""
    remaining_seconds: float = 0.0
    """How many seconds it had left when its clock stopped."""
    turns: int = 0
    events: Counter[str] = field(default_factory=Counter)
    is_generating: bool = False
    """Whether the policy is answering the first of its requests."""
    is_over: bool = False
    """Whether the policy takes no more turns."""
    outcome: ConversationOutcome | None = None
    """The outcome of an agent that ended while the policy was generating."""

    def add_request(self, request: _PendingRequest) -> None:
        if not self.pending:
            self.remaining_seconds, self.worker.deadline = self.worker.deadline - request.arrived_at, float("inf")
        self.pending.append(request)

    def pop_request(self) -> _PendingRequest:
        """Remove and return the first request. If it was the only one, the clock of the agent runs again."""
        request = self.pending.popleft()
        if not self.pending:
            self.worker.deadline = time.monotonic() + self.remaining_seconds
        return request

    def make_reply(self, request: _PendingRequest) -> EnvironmentReply:
        """Convert a request to a reply of the environment.

        If it continues the history, the reply holds the added messages. Any other request begins a branch.
        """
        old, added = request.messages[: len(self.history)], request.messages[len(self.history) :]
        is_continued = list(map(_get_content, old)) == list(map(_get_content, self.history))
        is_answered = added and all(message["role"] != "assistant" for message in added)
        if self.history and is_continued and is_answered and request.tools == self.tools:
            return EnvironmentReply(added, max_tokens=request.max_tokens)
        prompt = replace(
            self.prompt,
            text=request.messages,
            tools=request.tools,
            escape_special_tokens=True,
            prefix="",
            prefix_is_complete=False,
        )
        return EnvironmentReply(prompt=prompt, max_tokens=request.max_tokens)


class AgentPool:
    """Agents in their own processes: an AsyncEnvironments whose replies are the requests of the agents."""

    def __init__(
        self, spec: AgentSpec, policy: Policy, cfg: WorkerLimits, log: Path | None = None, seed: int = 0
    ) -> None:
        """Prepare agents. `log` is the file for their output, and `seed` seeds their random numbers."""
        self._spec, self._policy, self._seed = spec, policy, seed
        self._factory = WorkerFactory(spec, build_worker_config(cfg, log))
        self._rollouts: dict[int, _AgentRollout] = {}
        self._endpoints: list[AgentEndpoint] = []
        self._ready_replies: list[tuple[int, EnvironmentReply]] = []
        Finalize(self, _end_all_rollouts, [self._rollouts, self._factory, self._endpoints], exitpriority=0)

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Start an agent with a row of the task. Its first request is the first prompt."""
        if number in self._rollouts:  # left by an interrupt
            self._close_rollout(number)
        if not self._endpoints:
            self._endpoints.append(AgentEndpoint())
        rollout = self._rollouts[number] = _AgentRollout(
            secrets.token_urlsafe(16), prompt, self._factory.create_worker()
        )
        self._endpoints[0].rollout_numbers[rollout.name] = number
        row = {**prompt.columns, **({"answer": prompt.answer} if prompt.answer else {})}
        url, seed = self._endpoints[0].make_rollout_url(rollout.name), f"{self._seed}/{prompt.id}/{sibling}"
        try:
            rollout.worker.send_request(SolveRequest(row, url, seed), self._spec.timeout)
        except WorkerLostError as error:
            self._handle_exit(number, WorkerAnswer([], {}, error=str(error)))

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Answer the first request of an agent with a turn of the policy."""
        rollout = self._rollouts[number]
        calls = turn.message.get("tool_calls", ())
        numbered = [{**call, "id": f"call_{rollout.turns}_{i}"} for i, call in enumerate(calls)]
        rollout.turns += 1
        rollout.events += Counter(calls=len(calls) + len(turn.unreadable_calls), unreadable=len(turn.unreadable_calls))
        rollout.history.append(turn.message)
        self._answer_request(
            number, turn._replace(message={**turn.message, "tool_calls": numbered} if calls else turn.message)
        )

    def end_conversation(self, number: int) -> None:
        """Answer the first request with an empty turn, and refuse all later ones."""
        rollout = self._rollouts[number]
        rollout.is_over, rollout.remaining_seconds = True, min(rollout.remaining_seconds, AGENT_GRACE_SECONDS)
        self._answer_request(number, _EMPTY_ANSWER)

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
        """Return new requests and outcomes of agents. Wait at most `seconds` for the first."""
        end = time.monotonic() + seconds
        while True:
            self._poll_agents()
            replies, self._ready_replies = self._ready_replies, []
            remaining = end - time.monotonic()
            workers = [rollout.worker for rollout in self._rollouts.values() if not rollout.outcome]
            if replies or remaining <= 0 or not workers:
                return replies
            until_deadline = min(worker.deadline for worker in workers) - time.monotonic()
            wakeups = [endpoint.wakeup for endpoint in self._endpoints]
            wait([*wakeups, *(worker.connection for worker in workers)], max(0.0, min(remaining, until_deadline)))

    def close(self) -> None:
        """End all agents and the endpoint. The next conversation starts new ones."""
        _end_all_rollouts(self._rollouts, self._factory, self._endpoints)
        self._ready_replies = []

    def _poll_agents(self) -> None:
        """Take new requests, then find agents that have ended or timed out. Waiting for the policy never times out."""
        for endpoint in self._endpoints:
            for request in endpoint.take_requests():
                number = endpoint.rollout_numbers.get(request.rollout_name)
                if number is None:
                    request.response.set_exception(_make_no_rollout_error(request.rollout_name))
                else:
                    self._rollouts[number].add_request(request)
                    self._submit_next(number)
        for number, rollout in list(self._rollouts.items()):
            if rollout.outcome:
                continue
            try:
                answer = rollout.worker.receive_answer()
            except WorkerLostError as error:
                answer = WorkerAnswer([], {}, error=AGENT_NOT_ENDED_ERROR if rollout.is_over else str(error))
            if answer:
                self._handle_exit(number, answer)

    def _submit_next(self, number: int) -> None:
        """Pass the first valid request to the policy, and refuse invalid ones before it."""
        rollout = self._rollouts[number]
        while rollout.pending and not rollout.is_generating:
            request = rollout.pending[0]
            reply = rollout.make_reply(request)
            if fault := CONVERSATION_OVER_ERROR if rollout.is_over else self._find_fault(reply):
                rollout.pop_request().response.set_exception(RequestError(400, fault))
                continue
            rollout.history, rollout.tools, rollout.is_generating = list(request.messages), request.tools, True
            self._ready_replies.append((number, reply))

    def _answer_request(self, number: int, turn: PolicyTurn) -> None:
        rollout = self._rollouts[number]
        rollout.is_generating = False
        rollout.pop_request().response.set_result(turn)
        if rollout.outcome:
            self._finish(number, rollout.outcome)
        else:
            self._submit_next(number)

    def _find_fault(self, reply: EnvironmentReply) -> str:
        """Return why the chat template refuses these messages; empty if it accepts them."""
        try:
            if reply.prompt:
                self._policy.encode_question(reply.prompt)
            else:
                encode_bridge(self._policy.tokenizer, reply.messages, self._policy.eos_ids)
        except (UserError, *TEMPLATE_ERRORS) as error:
            return " ".join(str(error).split())
        return ""

    def _handle_exit(self, number: int, answer: WorkerAnswer) -> None:
        rollout = self._rollouts[number]
        error = answer.error or ("" if rollout.turns or rollout.is_generating else NO_REQUEST_ERROR)
        outcome = ConversationOutcome(None if error else answer.reward, error, dict(+rollout.events))
        if rollout.is_generating:
            rollout.outcome = outcome
        else:
            self._finish(number, outcome)

    def _finish(self, number: int, outcome: ConversationOutcome) -> None:
        self._close_rollout(number)
        self._ready_replies.append((number, EnvironmentReply(outcome=outcome)))

    def _close_rollout(self, number: int) -> None:
        rollout = self._rollouts.pop(number)
        self._endpoints[0].rollout_numbers.pop(rollout.name, None)
        _end_rollout(rollout)


def _get_content(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message to compare: all but the ids of tool calls."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("name"), calls


def _end_rollout(rollout: _AgentRollout) -> None:
    """End an agent with all of its child processes, and refuse its requests."""
    rollout.worker.terminate()
    for request in rollout.pending:
        request.response.set_exception(_make_no_rollout_error(rollout.name))


def _end_all_rollouts(
    rollouts: dict[int, _AgentRollout], factory: WorkerFactory, endpoints: list[AgentEndpoint]
) -> None:
    for rollout in rollouts.values():
        _end_rollout(rollout)
    rollouts.clear()
    factory.close()
    while endpoints:
        endpoints.pop().close()
