"""Conversations as columns of rollouts.jsonl and as text: speakers, turns, and tool calls.

A message is a mapping, both in a completion and in a line of rollouts.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pellucid.reporting.charts import format_count
from pellucid.types import Completion, Message
from pellucid.utils.text import escape_controls

_FAULT_PREFIX = "{'error': "
"""The start of a tool message after a failed call, as environments and TRL write it."""
MAX_TOOL_NAME_CHARACTERS = 40
"""The maximum characters of a tool name that are shown. The policy may have invented a long one."""
_MAX_NAMED_FAULTS = 2
"""The maximum number of kinds of faults that a line names; the others are summed."""


def count_turns(completion: Completion) -> int:
    """Return the number of turns of the policy, in all sequences of a conversation."""
    sequences = (completion, *completion.branches)
    return sum(message["role"] == "assistant" for each in sequences for message in each.messages)


def get_tool_events(completion: Completion) -> Mapping[str, int]:
    """Return the counts of tool calls and of their faults in a conversation; empty without tool calls."""
    return completion.outcome.events if completion.outcome else {}


def make_conversation_columns(completion: Completion) -> dict[str, Any]:
    """Return the messages and the outcome of a conversation as columns; none for a completion without messages."""
    if not completion.messages:
        return {}
    outcome = completion.outcome
    columns: dict[str, Any] = {"messages": list(map(dict, completion.messages)), "turns": count_turns(completion)}
    if outcome and outcome.events:
        columns["events"] = dict(outcome.events)
    if outcome and outcome.reward is not None:
        columns["environment_reward"] = float(outcome.reward)
    if outcome and outcome.error:
        columns["environment_error"] = outcome.error
    return columns


def make_token_columns(completion: Completion) -> dict[str, Any]:
    """Return the tokens of a completion, the given spans, and the log-probs, as columns."""
    return {
        "tokens": list(completion.token_ids),
        **({"given": [list(span) for span in completion.given_spans]} if completion.given_spans else {}),
        "logprobs": [float(f"{logprob:.6g}") for logprob in completion.logprobs],
    }


def make_branch_columns(completion: Completion) -> dict[str, Any]:
    """Return the earlier sequences of a conversation whose history was rewritten, as a column."""
    branches = [
        {"messages": list(map(dict, each.messages)), **make_token_columns(each)} for each in completion.branches
    ]
    return {"branches": branches} if branches else {}


def get_speaker(message: Message) -> str:
    """Return who wrote a message: "policy", "environment", "tool NAME" or another role, such as "system"."""
    role = message.get("role")
    if role == "tool":
        return f"tool {_shorten_tool_name(str(message.get('name') or ''))}".rstrip()
    return {"assistant": "policy", "user": "environment"}.get(str(role), str(role))


def _shorten_tool_name(name: str) -> str:
    return name if len(name) <= MAX_TOOL_NAME_CHARACTERS else f"{name[:MAX_TOOL_NAME_CHARACTERS]}…"


def format_message(message: Message) -> str:
    """Return the text of a message, with each tool call on a line of its own."""
    text = str(message.get("content") or "")
    calls = "\n".join(f"calls {format_tool_call(call)}" for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, (text.strip() and text, calls)))


def format_tool_call(call: Mapping[str, Any]) -> str:
    """Return a tool call as code, such as `multiply(a=3, b=4)`."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    text = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name')}({text})"


def list_turn_names(completion: Completion) -> list[list[str]]:
    """Return the names for each span of a conversation: called tools if it was sampled, speakers if it was given.

    The list is empty if messages and spans do not match.
    """
    turns: list[tuple[bool, list[str]]] = []
    for message in completion.messages:
        is_policy = message.get("role") == "assistant"
        if is_policy or not turns or turns[-1][0]:
            turns.append((is_policy, []))
        turns[-1][1].extend(_list_called_tools(message) if is_policy else [get_speaker(message)])
    given = {t for start, end in completion.given_spans for t in range(start, end)}
    sampled = [is_policy for is_policy, _ in groupby(t not in given for t in range(len(completion.token_ids)))]
    if sampled and turns and not sampled[0] and turns[0][0]:
        turns.insert(0, (False, []))  # a prefix is given, but is not a message
    if len(turns) > len(sampled) and not turns[-1][0]:
        turns.pop()  # the policy does not answer the last message, so it has no tokens
    return [names for _, names in turns] if [is_policy for is_policy, _ in turns] == sampled else []


def _list_called_tools(message: Message) -> list[str]:
    """Return the names of the tools that a message calls."""
    names = (str(call.get("function", call).get("name")) for call in message.get("tool_calls") or ())
    return [_shorten_tool_name(name) for name in names]


def is_failed_call(message: Message) -> bool:
    """Return whether a message says that a tool call failed."""
    return message.get("role") == "tool" and str(message.get("content")).startswith(_FAULT_PREFIX)


def describe_tool_use(turns: int, events: Mapping[str, int]) -> Iterator[str]:
    """Yield texts about the turns of a conversation, and about its tool calls and their faults."""
    yield format_count(turns, "turn")
    faults = [f"{count:,} {escape_controls(kind)}" for kind, count in events.items() if kind != "calls"]
    if events:
        calls = format_count(events.get("calls", 0), "tool call")
        yield f"{calls} ({', '.join(faults)})" if faults else calls


def format_fault_shares(metrics: Mapping[str, float]) -> str:
    """Return the most frequent faults of the tool calls of a step, with their shares."""
    faults = {name.removeprefix("tools/"): share for name, share in metrics.items() if name.startswith("tools/")}
    faults.pop("calls", None)
    kinds = sorted(faults, key=lambda kind: -faults[kind])
    named = [f"{faults[kind]:.0%} {escape_controls(kind)}" for kind in kinds[:_MAX_NAMED_FAULTS]]
    rest = sum(faults[kind] for kind in kinds[_MAX_NAMED_FAULTS:])
    return ", ".join([*named, *([f"{rest:.0%} other"] if rest else [])])


def cut_middle(text: str, max_characters: int) -> tuple[str, int, str]:
    """Return the beginning and the end of a text, and the number of characters that are left out between them."""
    if len(text) <= max_characters:
        return text, 0, ""
    half = max_characters // 2
    return text[:half], len(text) - 2 * half, text[-half:]


def format_messages(messages: Sequence[Message], max_characters: int) -> Iterator[tuple[str, str]]:
    """Yield the speaker and the text of each message, which is cut to about `max_characters`."""
    for message in messages:
        begin, left_out, end = cut_middle(format_message(message), max_characters)
        between = f"\n[{format_count(left_out, 'character')} left out]\n" if left_out else ""
        yield get_speaker(message), f"{begin}{between}{end}"
