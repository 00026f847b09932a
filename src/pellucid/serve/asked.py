"""What agents ask of a rollout's endpoint, and what they are answered, in OpenAI's form.

Fields that say how the policy is to be sampled are ignored, since it is as in training; what could not be answered as
it is meant is refused.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pellucid.policy.tool_calls import function_of
from pellucid.protocols import Said
from pellucid.serve.completions import event
from pellucid.serve.errors import RequestError
from pellucid.serve.messages import Something, StreamOptions, Text, Tokens, WithoutNulls
from pellucid.types import Message


class TextPart(WithoutNulls):
    type: Literal["text"]
    text: Text


class ToolCall(WithoutNulls):
    id: Text = ""
    type: Literal["function"] = "function"
    function: dict[str, Any]


class AgentMessage(WithoutNulls):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text = ""
    name: Text | None = None

    @property
    def text(self) -> str:
        """What it says, without its calls."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Something


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class AgentRequest(WithoutNulls):
    model: Text = ""
    messages: list[AgentMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
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
            calls = [called(call, f"messages.{place}.tool_calls") for call in message.tool_calls or ()]
            names |= {call["id"]: call["function"]["name"] for call in calls}
            role = "system" if message.role == "developer" else message.role
            name = {"name": names.get(message.tool_call_id) or message.name or "tool"} if role == "tool" else {}
            ours = {"tool_calls": calls} if calls and role == "assistant" else {}
            found.append({"role": role, **name, "content": message.text, **ours})
        return tuple(found)


def called(call: ToolCall, place: str) -> dict[str, Any]:
    try:
        return {"id": call.id, "type": "function", "function": function_of(call.function)}
    except ValueError as error:
        raise RequestError(400, f"{place}: {error}") from error


def answer(request: AgentRequest, said: Said) -> dict[str, Any]:
    """Return what the policy has said as a chat completion."""
    body = {"object": "chat.completion", "usage": usage(said)}
    return head(request) | body | {"choices": [choice({"message": message_of(said)}, reason(said))]}


def streamed(request: AgentRequest, said: Said) -> Iterator[str]:
    """Yield the same as server-sent events, all that was said in one."""
    first = head(request) | {"object": "chat.completion.chunk"}
    delta = message_of(said)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    yield event(first | {"choices": [choice({"delta": delta}, reason(said))]})
    if request.stream_options and request.stream_options.include_usage:
        yield event(first | {"choices": [], "usage": usage(said)})
    yield "data: [DONE]\n\n"


def choice(body: dict[str, Any], reason: str) -> dict[str, Any]:
    return {"index": 0, "finish_reason": reason, "logprobs": None} | body


def head(request: AgentRequest) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model or "policy"}


def message_of(said: Said) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in said.message.get("tool_calls", ())
    ]
    content = said.message["content"]
    return {"role": "assistant", "content": content or None if calls else content} | (
        {"tool_calls": calls} if calls else {}
    )


def reason(said: Said) -> str:
    return "length" if said.is_truncated else "tool_calls" if said.message.get("tool_calls") else "stop"


def usage(said: Said) -> dict[str, int]:
    read, sampled = said.token_counts
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
