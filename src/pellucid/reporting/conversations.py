"""Conversations as they are written down and put into words: who said what, in how many turns, and how tools were used.

A message is a mapping, of a completion as well as of a line of rollouts.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pellucid.reporting.charts import format_count
from pellucid.types import Completion, Message
from pellucid.utils.text import escape_controls

FAULT_PREFIX = "{'error': "
"""What a message of a tool begins with where the call came to nothing, as environments and TRL write it."""
MAX_TOOL_NAME_CHARACTERS = 40
"""How many characters of the name of a tool are shown: the policy has made it up, where there is none of that name."""
MAX_NAMED_FAULTS = 2
"""How many kinds of faults have their names in a line; the others are added up."""


def count_turns(completion: Completion) -> int:
    """How many times the policy spoke, in all sequences of a conversation."""
    sequences = (completion, *completion.branches)
    return sum(message["role"] == "assistant" for each in sequences for message in each.messages)


def get_tool_events(completion: Completion) -> Mapping[str, int]:
    """How calls of tools went in a conversation; empty where none were made."""
    return completion.outcome.events if completion.outcome else {}


def make_conversation_columns(completion: Completion) -> dict[str, Any]:
    """What was said in a conversation, and what it has left behind, as columns; none where there was only an answer."""
    if not completion.messages:
        return {}
    outcome = completion.outcome
    columns: dict[str, Any] = {"messages": copy_messages(completion), "turns": count_turns(completion)}
    if outcome and outcome.events:
        columns["events"] = dict(outcome.events)
    if outcome and outcome.reward is not None:
        columns["environment_reward"] = float(outcome.reward)
    if outcome and outcome.error:
        columns["environment_error"] = outcome.error
    return columns


def make_token_columns(completion: Completion) -> dict[str, Any]:
    """The tokens of a completion, which of them were given, and their log-probs, as columns."""
    return {
        "tokens": list(completion.token_ids),
        **({"given": [list(stretch) for stretch in completion.given_spans]} if completion.given_spans else {}),
        "logprobs": [float(f"{logprob:.6g}") for logprob in completion.logprobs],
    }


def make_branch_columns(completion: Completion) -> dict[str, Any]:
    """The earlier sequences of a conversation whose history was rewritten, as a column."""
    branches = [{"messages": copy_messages(each), **make_token_columns(each)} for each in completion.branches]
    return {"branches": branches} if branches else {}


def copy_messages(completion: Completion) -> list[dict[str, Any]]:
    return [dict(message) for message in completion.messages]


def get_speaker(message: Message) -> str:
    """Who said it: "policy", "environment", "tool NAME"; the system, where it was that."""
    role = message.get("role")
    if role == "tool":
        return f"tool {shorten_tool_name(str(message.get('name') or ''))}".rstrip()
    return {"assistant": "policy", "user": "environment"}.get(str(role), str(role))


def shorten_tool_name(name: str) -> str:
    return name if len(name) <= MAX_TOOL_NAME_CHARACTERS else f"{name[:MAX_TOOL_NAME_CHARACTERS]}…"


def format_message(message: Message) -> str:
    """Its text, and each call of a tool on a line of its own."""
    text = str(message.get("content") or "")
    calls = "\n".join(f"calls {format_tool_call(call)}" for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, (text.strip() and text, calls)))


def format_tool_call(call: Mapping[str, Any]) -> str:
    """A call as one writes it. Example: `multiply(a=3, b=4)`."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    told = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name')}({told})"


def list_turn_names(completion: Completion) -> list[list[str]]:
    """Of each stretch of a conversation's tokens that were sampled the tools that the policy called there, and of each
    that was given who said it; none where messages and stretches do not match.
    """
    turns: list[tuple[bool, list[str]]] = []
    for message in completion.messages:
        is_policy = message.get("role") == "assistant"
        if is_policy or not turns or turns[-1][0]:
            turns.append((is_policy, []))
        turns[-1][1].extend(list_called_tools(message) if is_policy else [get_speaker(message)])
    sampled = list_sampled_stretches(completion)
    if sampled and turns and not sampled[0] and turns[0][0]:
        turns.insert(0, (False, []))  # the prefix of an answer is nobody's message
    if len(turns) > len(sampled) and not turns[-1][0]:
        turns.pop()  # what was said last is nobody's to answer, and has no tokens
    return [names for _, names in turns] if [is_policy for is_policy, _ in turns] == sampled else []


def list_called_tools(message: Message) -> list[str]:
    """The names of the tools that a message calls."""
    names = (str(call.get("function", call).get("name")) for call in message.get("tool_calls") or ())
    return [shorten_tool_name(name) for name in names]


def list_sampled_stretches(completion: Completion) -> list[bool]:
    """Whether each stretch of the tokens was sampled, or given."""
    given = {t for start, end in completion.given_spans for t in range(start, end)}
    kinds = [t not in given for t in range(len(completion.token_ids))]
    return [kind for kind, _ in groupby(kinds)]


def is_failed_call(message: Message) -> bool:
    """Whether it says that a call of a tool came to nothing."""
    return message.get("role") == "tool" and str(message.get("content")).startswith(FAULT_PREFIX)


def describe_tool_use(turns: int, events: Mapping[str, int]) -> Iterator[str]:
    """The turns of a conversation, and how its calls of tools went, in words."""
    yield format_count(turns, "turn")
    faults = [f"{count:,} {escape_controls(kind)}" for kind, count in events.items() if kind != "calls"]
    if events:
        calls = format_count(events.get("calls", 0), "call") + " of tools"
        yield f"{calls} ({', '.join(faults)})" if faults else calls


def format_fault_shares(metrics: Mapping[str, float]) -> str:
    """The kinds of faults of a step, the most frequent first, with the share of the calls."""
    faults = {name.removeprefix("tools/"): share for name, share in metrics.items() if name.startswith("tools/")}
    faults.pop("calls", None)
    kinds = sorted(faults, key=lambda kind: -faults[kind])
    told = [f"{faults[kind]:.0%} {escape_controls(kind)}" for kind in kinds[:MAX_NAMED_FAULTS]]
    rest = sum(faults[kind] for kind in kinds[MAX_NAMED_FAULTS:])
    return ", ".join([*told, *([f"{rest:.0%} other"] if rest else [])])


def cut_middle(text: str, max_characters: int) -> tuple[str, int, str]:
    """The beginning and the end of a text of more than `most` characters, and how many are left out between them."""
    if len(text) <= max_characters:
        return text, 0, ""
    half = max_characters // 2
    return text[:half], len(text) - 2 * half, text[-half:]


def format_messages(messages: Sequence[Message], max_characters: int) -> Iterator[tuple[str, str]]:
    """Who said it and what, message by message, each of about `most` characters at most."""
    for message in messages:
        begin, left_out, end = cut_middle(format_message(message), max_characters)
        between = f"\n[{format_count(left_out, 'character')} left out]\n" if left_out else ""
        yield get_speaker(message), f"{begin}{between}{end}"
