"""What agents ask of a rollout's endpoint, and what they are answered, in OpenAI's form.

Fields that say how the policy is to be sampled are ignored, since it is as in training; what could not be answered as
it is meant is refused.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pellucid.environments.agents import LOOPBACK_HOST, AgentSpec, SolveRequest
from pellucid.environments.pool import ConversationWorker, WorkerFactory
from pellucid.environments.worker import WorkerAnswer
from pellucid.policy.chat_template import TEMPLATE_ERRORS, encode_bridge
from pellucid.policy.tool_calls import parse_function
from pellucid.sandbox.pool import WorkerLimits, WorkerLostError, build_worker_config
from pellucid.serve.api import format_event
from pellucid.serve.command import LISTEN_BACKLOG, open_listening_socket
from pellucid.serve.middleware import RequestError, RequestLimitsMiddleware, install_error_handlers, make_error_response
from pellucid.serve.schemas import NonEmptyText, NullDroppingModel, StreamOptions, Text, TokenCount
from pellucid.types import ConversationOutcome, EnvironmentReply, Message, PolicyTurn, Prompt, UserError


class TextPart(NullDroppingModel):
    type: Literal["text"]
    text: Text


class AgentToolCall(NullDroppingModel):
    id: Text = ""
    type: Literal["function"] = "function"
    function: dict[str, Any]


class AgentMessage(NullDroppingModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[AgentToolCall] | None = None
    tool_call_id: Text = ""
    name: Text | None = None

    @property
    def text(self) -> str:
        """What it says, without its calls."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class AgentFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: NonEmptyText


class AgentTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: AgentFunction


class AgentRequest(NullDroppingModel):
    model: Text = ""
    messages: list[AgentMessage] = Field(min_length=1)
    tools: list[AgentTool] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools, as they were given."""
        return tuple(tool.model_dump(exclude_unset=True) for tool in self.tools or ())

    def build_history(self) -> tuple[Message, ...]:
        """Return the messages as chat templates take them. RequestError for a call whose arguments are no object."""
        names: dict[str, str] = {}
        found: list[Message] = []
        for place, message in enumerate(self.messages):
            calls = [parse_tool_call(call, f"messages.{place}.tool_calls") for call in message.tool_calls or ()]
            names |= {call["id"]: call["function"]["name"] for call in calls}
            role = "system" if message.role == "developer" else message.role
            name = {"name": names.get(message.tool_call_id) or message.name or "tool"} if role == "tool" else {}
            ours = {"tool_calls": calls} if calls and role == "assistant" else {}
            found.append({"role": role, **name, "content": message.text, **ours})
        return tuple(found)


def parse_tool_call(call: AgentToolCall, place: str) -> dict[str, Any]:
    try:
        return {"id": call.id, "type": "function", "function": parse_function(call.function)}
    except ValueError as error:
        raise RequestError(400, f"{place}: {error}") from error


def build_response(request: AgentRequest, said: PolicyTurn) -> dict[str, Any]:
    """Return what the policy has said as a chat completion."""
    body = {"object": "chat.completion", "usage": build_agent_usage(said)}
    return (
        build_response_head(request)
        | body
        | {"choices": [build_choice({"message": build_message(said)}, get_finish_reason(said))]}
    )


def stream_response(request: AgentRequest, said: PolicyTurn) -> Iterator[str]:
    """Yield the same as server-sent events, all that was said in one."""
    first = build_response_head(request) | {"object": "chat.completion.chunk"}
    delta = build_message(said)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    yield format_event(first | {"choices": [build_choice({"delta": delta}, get_finish_reason(said))]})
    if request.stream_options and request.stream_options.include_usage:
        yield format_event(first | {"choices": [], "usage": build_agent_usage(said)})
    yield "data: [DONE]\n\n"


def build_choice(body: dict[str, Any], reason: str) -> dict[str, Any]:
    return {"index": 0, "finish_reason": reason, "logprobs": None} | body


def build_response_head(request: AgentRequest) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model or "policy"}


def build_message(said: PolicyTurn) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in said.message.get("tool_calls", ())
    ]
    content = said.message["content"]
    return {"role": "assistant", "content": content or None if calls else content} | (
        {"tool_calls": calls} if calls else {}
    )


def get_finish_reason(said: PolicyTurn) -> str:
    return "length" if said.is_truncated else "tool_calls" if said.message.get("tool_calls") else "stop"


def build_agent_usage(said: PolicyTurn) -> dict[str, int]:
    read, sampled = said.token_counts
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


# ---------------------------------------------------------------- rollouts
# The World of agents: what one asks is a reply of the world, and what the policy says to it is what it is answered.
#
# A request that goes on from what was said is heard in the same sequence. Any other begins a sequence of its own.


if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

AGENT_GRACE_SECONDS = 10.0
"""Seconds that an agent has to end when the policy says nothing more."""
EMPTY_ANSWER = PolicyTurn({"role": "assistant", "content": ""}, is_truncated=True)
"""What is answered where the limits of a conversation leave no token, as a service does whose context is full."""
CONVERSATION_OVER_ERROR = "the conversation is over: sampler.turns or sampler.max_tokens is reached"
AGENT_NOT_ENDED_ERROR = f"{CONVERSATION_OVER_ERROR}, and the agent has not come to its end"
NO_REQUEST_ERROR = "the agent has asked the policy nothing"


@dataclass(eq=False)
class AgentRollout:
    """An agent at work: what it has asked, and what was said in the sequence that it is in."""

    name: str
    prompt: Prompt
    worker: ConversationWorker
    history: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    pending: deque[PendingRequest] = field(default_factory=deque)
    """Its open requests. While there is one, its time does not pass."""
    remaining_seconds: float = 0.0
    """How many seconds it had left when its time stopped."""
    turns: int = 0
    events: Counter[str] = field(default_factory=Counter)
    is_generating: bool = False
    """Whether the first of its requests is with the policy."""
    is_over: bool = False
    """Whether the policy says nothing more."""
    outcome: ConversationOutcome | None = None
    """Of an agent that has ended while the policy speaks."""

    def add_request(self, request: PendingRequest) -> None:
        if not self.pending:
            self.remaining_seconds, self.worker.deadline = self.worker.deadline - request.arrived_at, float("inf")
        self.pending.append(request)

    def pop_request(self) -> PendingRequest:
        """Return the first request, which no longer waits. Where it was the only one, time passes again."""
        asked = self.pending.popleft()
        if not self.pending:
            self.worker.deadline = time.monotonic() + self.remaining_seconds
        return asked

    def make_reply(self, request: PendingRequest) -> EnvironmentReply:
        """Return a request as what the world says: what it adds, or a history from its beginning."""
        said, added = request.messages[: len(self.history)], request.messages[len(self.history) :]
        goes_on = added and all(message["role"] != "assistant" for message in added)
        if self.history and goes_on and request.tools == self.tools and have_same_content(said, self.history):
            return EnvironmentReply(added, max_tokens=request.max_tokens)
        asks = replace(
            self.prompt,
            text=request.messages,
            tools=request.tools,
            escape_special_tokens=True,
            prefix="",
            prefix_is_complete=False,
        )
        return EnvironmentReply(prompt=asks, max_tokens=request.max_tokens)


class AgentPool:
    """Agents in processes of their own, which print into the file `log`, and the policy that they talk with."""

    def __init__(
        self, talk: AgentSpec, policy: Policy, cfg: WorkerLimits, log: Path | None = None, seed: int = 0
    ) -> None:
        self._talk, self._policy, self._seed = talk, policy, seed
        self._factory = WorkerFactory(talk, build_worker_config(cfg, log))
        self._rollouts: dict[int, AgentRollout] = {}
        self._endpoints: list[AgentEndpoint] = []
        self._ready_replies: deque[tuple[int, EnvironmentReply]] = deque()
        Finalize(self, end_all_rollouts, [self._rollouts, self._factory, self._endpoints], exitpriority=0)

    def start_conversation(self, number: int, prompt: Prompt, sibling: int) -> None:
        """Let an agent begin with a row; its first request is the question."""
        if number in self._rollouts:  # it was left, as by an interrupt
            self._close_rollout(number)
        if not self._endpoints:
            self._endpoints.append(AgentEndpoint())
        rollout = self._rollouts[number] = AgentRollout(
            secrets.token_urlsafe(16), prompt, self._factory.create_worker()
        )
        self._endpoints[0].rollout_numbers[rollout.name] = number
        seed = f"{self._seed}/{prompt.id}/{sibling}"
        try:
            rollout.worker.send_request(
                SolveRequest(make_data_row(prompt), self._endpoints[0].make_rollout_url(rollout.name), seed),
                self._talk.timeout,
            )
        except WorkerLostError as error:
            self._handle_exit(number, WorkerAnswer([], {}, error=str(error)))

    def send_turn(self, number: int, turn: PolicyTurn) -> None:
        """Answer the request that the policy was asked."""
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
        """Answer that the policy says nothing more, to the last of the requests that counts, and refuse the others."""
        rollout = self._rollouts[number]
        rollout.is_over, rollout.remaining_seconds = True, min(rollout.remaining_seconds, AGENT_GRACE_SECONDS)
        self._answer_request(number, EMPTY_ANSWER)

    def receive_replies(self, seconds: float) -> list[tuple[int, EnvironmentReply]]:
        """Return what agents have asked, and the outcomes of those that have ended; wait so long for the first."""
        until = time.monotonic() + seconds
        while True:
            self._poll_agents()
            found = list(self._ready_replies)
            self._ready_replies.clear()
            left = until - time.monotonic()
            at_work = [rollout.worker for rollout in self._rollouts.values() if not rollout.outcome]
            if found or left <= 0 or not at_work:
                return found
            first = min(player.deadline for player in at_work) - time.monotonic()
            bells = [recorder.wakeup for recorder in self._endpoints]
            wait([*bells, *(player.connection for player in at_work)], max(0.0, min(left, first)))

    def close(self) -> None:
        """End the agents, whatever they are doing, and the endpoint; the next conversation starts new ones."""
        end_all_rollouts(self._rollouts, self._factory, self._endpoints)
        self._ready_replies.clear()

    def _poll_agents(self) -> None:
        """Take what was asked, then see who has ended or is late: while an agent waits it is not."""
        for recorder in self._endpoints:
            for asked in recorder.take_requests():
                number = recorder.rollout_numbers.get(asked.rollout_name)
                if number is None:
                    asked.response.set_exception(make_no_rollout_error(asked.rollout_name))
                else:
                    self._rollouts[number].add_request(asked)
                    self._submit_next(number)
        for number, rollout in list(self._rollouts.items()):
            if rollout.outcome:
                continue
            try:
                answered = rollout.worker.receive_answer()
            except WorkerLostError as error:
                answered = WorkerAnswer([], {}, error=AGENT_NOT_ENDED_ERROR if rollout.is_over else str(error))
            if answered:
                self._handle_exit(number, answered)

    def _submit_next(self, number: int) -> None:
        """Ask the policy what is first in line, and refuse what it cannot be asked."""
        rollout = self._rollouts[number]
        while rollout.pending and not rollout.is_generating:
            asked = rollout.pending[0]
            reply = rollout.make_reply(asked)
            if fault := CONVERSATION_OVER_ERROR if rollout.is_over else self._find_fault(reply):
                rollout.pop_request().response.set_exception(RequestError(400, fault))
                continue
            rollout.history, rollout.tools, rollout.is_generating = list(asked.messages), asked.tools, True
            self._ready_replies.append((number, reply))

    def _answer_request(self, number: int, said: PolicyTurn) -> None:
        rollout = self._rollouts[number]
        rollout.is_generating = False
        rollout.pop_request().response.set_result(said)
        if rollout.outcome:
            self._finish(number, rollout.outcome)
        else:
            self._submit_next(number)

    def _find_fault(self, reply: EnvironmentReply) -> str:
        """Return why the policy cannot be asked this, as its chat template has it; empty where it can."""
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
        end_rollout(rollout)


def have_same_content(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Return whether messages say the same; how calls are numbered does not count."""
    return list(map(make_message_key, one)) == list(map(make_message_key, other))


def make_message_key(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("name"), calls


def make_data_row(prompt: Prompt) -> dict[str, Any]:
    """Return the row of a prompt, with its gold answer as `answer`."""
    return {**prompt.columns, **({"answer": prompt.answer} if prompt.answer else {})}


def end_rollout(rollout: AgentRollout) -> None:
    """End an agent with all that it has started, and refuse what it has asked."""
    rollout.worker.terminate()
    for asked in rollout.pending:
        asked.response.set_exception(make_no_rollout_error(rollout.name))


def end_all_rollouts(rollouts: dict[int, AgentRollout], factory: WorkerFactory, endpoints: list[AgentEndpoint]) -> None:
    for rollout in rollouts.values():
        end_rollout(rollout)
    rollouts.clear()
    factory.close()
    while endpoints:
        endpoints.pop().close()


# ---------------------------------------------------------------- recorder
# The endpoint of agents that are trained: each rollout has an address of its own, `/rollout/ID/v1`.
#
# It runs in a thread, takes what is asked, and waits for the answer; who answers is in rollouts.py.


MAX_BODY_BYTES = 50_000_000
TRANSFER_TIMEOUT_SECONDS = 60.0
"""How long a body may take to come, and a piece of an answer to be read."""
MAX_WAITING_REQUESTS = 64
"""How many requests of a rollout may wait at a time."""
KEEP_ALIVE_SECONDS = 10**8
"""Seconds that the connection of an agent may be silent: it ends with the process of the agent."""
MAX_UNKNOWN_CONNECTIONS = 256
"""How many connections may be open that have not asked for a rollout which there is; the oldest makes room for more."""
UNKNOWN_CONNECTION_TIMEOUT_SECONDS = 10.0
"""Seconds that such a connection has to ask for one."""
ACCEPT_BATCH = 64
"""The most connections that are accepted at a time, before the oldest are closed."""
BODY_DISCARD_SECONDS = 1.0
"""Seconds in which the body of a request for an unknown rollout is read and discarded. A client that sends it in that
time reads the answer; a connection that is closed on it would not."""


@dataclass(eq=False)
class PendingRequest:
    """A request on its way to the policy."""

    rollout_name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int = 0
    response: Future[PolicyTurn] = field(default_factory=Future)
    arrived_at: float = field(default_factory=time.monotonic)
    """When it came, by the monotonic clock."""


class AgentEndpoint:
    """The HTTP server. `rollouts` are the numbers of conversations by the names in their addresses.

    bell: what to wait on; it can be read when something was asked.
    """

    def __init__(self) -> None:
        self.rollout_numbers: dict[str, int] = {}
        self.wakeup, self._wakeup_sender = Pipe(duplex=False)
        self._requests: deque[PendingRequest] = deque()
        self._waiting_counts: dict[str, int] = {}
        taken = open_listening_socket(LOOPBACK_HOST, 0)
        self._port = int(taken.getsockname()[1])
        settings = uvicorn.Config(
            make_agent_app(self),
            http=make_protocol(self),
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=ACCEPT_BATCH,
            timeout_notify=0,
            callback_notify=self._close_unknown,
        )
        settings.timeout_graceful_shutdown = 1
        self._socket = taken
        self._server = uvicorn.Server(settings)
        run: dict[str, list[socket.socket]] = {"sockets": [taken]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, name="rollouts", daemon=True)
        self._thread.start()

    def make_rollout_url(self, name: str) -> str:
        """Return the base URL of a rollout."""
        return f"http://{LOOPBACK_HOST}:{self._port}/rollout/{name}/v1"

    def take_requests(self) -> list[PendingRequest]:
        """Return what was asked since the last time, of clients that are still there."""
        while self.wakeup.poll():
            self.wakeup.recv_bytes()
        found: list[PendingRequest] = []
        while self._requests:
            asked = self._requests.popleft()
            if asked.response.set_running_or_notify_cancel():
                found.append(asked)
        return found

    async def wait_for_answer(self, request: PendingRequest) -> PolicyTurn:
        """Return what the policy says to a request. RequestError where it does not."""
        name = request.rollout_name
        if name not in self.rollout_numbers:
            raise make_no_rollout_error(name)
        if self._waiting_counts.get(name, 0) >= MAX_WAITING_REQUESTS:
            raise RequestError(400, f"{MAX_WAITING_REQUESTS} requests of this rollout wait already", "too_many")
        self._waiting_counts[name] = self._waiting_counts.get(name, 0) + 1
        try:
            self._requests.append(request)
            self._wakeup_sender.send_bytes(b"")
            return await asyncio.wrap_future(request.response)
        finally:
            self._waiting_counts[name] -= 1
            if not self._waiting_counts[name]:
                del self._waiting_counts[name]

    def is_known(self, connection: Any) -> bool:
        """Return whether the last request of a connection was for a rollout that there is."""
        return (
            connection.cycle is not None and parse_rollout_name(connection.cycle.scope["path"]) in self.rollout_numbers
        )

    async def _close_unknown(self) -> None:
        """Close the connections that have not asked for a rollout in time. Called once a second."""
        self._socket.listen(LISTEN_BACKLOG)  # asyncio has set it to how many it accepts at a time
        now = time.monotonic()
        connections: set[Any] = set(self._server.server_state.connections)
        for connection in connections:
            if self.is_known(connection):
                connection.since = now
            elif now - connection.since > UNKNOWN_CONNECTION_TIMEOUT_SECONDS:
                connection.transport.abort()

    def close(self) -> None:
        """Refuse what has not been answered, and stop the server."""
        self.rollout_numbers.clear()
        for asked in self.take_requests():
            asked.response.set_exception(make_no_rollout_error(asked.rollout_name))
        self._server.should_exit = True
        self._thread.join(5.0)


def make_no_rollout_error(name: str) -> RequestError:
    return RequestError(404, f"there is no rollout {name}: it has ended, or has never been", "no_rollout")


def parse_rollout_name(path: str) -> str:
    """Return the name of the rollout in a path; empty where there is none."""
    _, *parts = path.split("/")
    return parts[1] if len(parts) > 1 and parts[0] == "rollout" else ""


def make_protocol(recorder: AgentEndpoint) -> type[H11Protocol]:
    """Return the protocol of the server, which bounds the connections that have not asked for a rollout."""

    class Bounded(H11Protocol):
        since = 0.0
        """When it was opened, or was last seen to have asked for a rollout."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's own
            super().connection_made(transport)
            self.since = time.monotonic()
            strangers = [
                each
                for each in self.connections
                if isinstance(each, Bounded) and not each.transport.is_closing() and not recorder.is_known(each)
            ]
            if len(strangers) > MAX_UNKNOWN_CONNECTIONS:
                min(strangers, key=lambda each: each.since).transport.abort()

    return Bounded


class KnownRolloutMiddleware:
    """ASGI middleware that answers requests for unknown rollouts before their bodies are kept."""

    def __init__(self, app: ASGIApp, recorder: AgentEndpoint) -> None:
        self.app, self.recorder = app, recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (name := parse_rollout_name(scope["path"])) in self.recorder.rollout_numbers:
            await self.app(scope, receive, send)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_DISCARD_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        answer = make_error_response(make_no_rollout_error(name))
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)


def make_agent_app(recorder: AgentEndpoint) -> ASGIApp:
    app = FastAPI(title="pellucid", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)

    @app.get("/rollout/{name}/v1/models")
    async def models(name: str) -> dict[str, Any]:
        if name not in recorder.rollout_numbers:
            raise make_no_rollout_error(name)
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "pellucid"}]}

    @app.post("/rollout/{name}/v1/chat/completions")
    async def chat(name: str, request: AgentRequest) -> Response:
        limit = request.max_completion_tokens or request.max_tokens or 0
        said = await recorder.wait_for_answer(
            PendingRequest(name, request.build_history(), request.tool_schemas, limit)
        )
        if request.stream:
            return StreamingResponse(stream_response(request, said), media_type="text/event-stream")
        return JSONResponse(build_response(request, said))

    return KnownRolloutMiddleware(
        RequestLimitsMiddleware(app, MAX_BODY_BYTES, TRANSFER_TIMEOUT_SECONDS, TRANSFER_TIMEOUT_SECONDS), recorder
    )
