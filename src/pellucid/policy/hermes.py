"""Tools in texts, in the form of Hermes, for chat templates that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from pellucid.types import Message

OFFER = """\
You can call tools. Each line describes one of them:
{tools}
To call one, write its name and its arguments in one JSON object, as in
<tool_call>{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}</tool_call>
You may call several, one behind the other. What they answer stands between <tool_response> and </tool_response>."""


def offer(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what a system message says of the tools."""
    return OFFER.format(tools="\n".join(map(written, tools)))


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def spelled_out(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages of the system, the user and the assistant alone: calls and what tools answered are in the texts.

    The answers to the calls of one message are one message of the user, since some templates let no role speak twice.
    """
    out: list[dict[str, Any]] = []
    for answers, some in groupby(messages, lambda message: message["role"] == "tool"):
        if answers:
            out.append({"role": "user", "content": responses(some)})
        else:
            out += map(with_calls_in_text, some)
    return out


def responses(messages: Iterable[Message]) -> str:
    return "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages)


def with_calls_in_text(message: Message) -> dict[str, Any]:
    calls = [f"<tool_call>{written(call_of(call))}</tool_call>" for call in message.get("tool_calls") or ()]
    told = {key: value for key, value in message.items() if key != "tool_calls"}
    return told | {"content": "\n".join(filter(None, [message.get("content"), *calls]))} if calls else told


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}


def preceded(messages: Sequence[Message], text: str, has_system_role: bool) -> list[dict[str, Any]]:
    """Return the messages with a text behind their system message's, or as one.

    by_system: whether there may be a system message; else the text stands before the first message's.
    """
    first, *rest = map(dict, messages)
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
    if has_system_role:
        return [{"role": "system", "content": text}, first, *rest]
    return [first | {"content": f"{text}\n\n{first['content']}"}, *rest]
