"""What the policy has said in one turn as a message: its text, and the calls of tools that are in it.

A tokenizer may know how its model writes calls (`response_template`): then transformers reads them. Else, or where
transformers cannot read them, call_forms.py looks for them. What is no call remains text, braces and all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from pellucid.policy.call_forms import FAULTS, MARKS, THINK, find, one_line
from pellucid.policy.literal import specials
from pellucid.policy.texts import without_end
from pellucid.protocols import Said
from pellucid.types import Message

Tools = Sequence[Mapping[str, Any]]


def read(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    context: Sequence[int],
    tools: Tools,
    eos_ids: Collection[int] = (),
    cut_characters: int = 0,
) -> Said:
    """Return the message that was sampled as `ids`, its end included, behind the token ids `context`.

    Without tools no call is looked for.

    Args:
        eos_ids: the ends of sequence, which a tokenizer may not flag as special.
        cut: the number of characters to leave out at the end: a stop string, and what its last token has after it.
    """
    whole, ids = ids, without_end(ids, eos_ids)
    content = without_tail(str(tokenizer.decode(list(ids), skip_special_tokens=True)), cut_characters)
    if not tools:
        return Said({"role": "assistant", "content": content})
    known, fault = read_by_template(tokenizer, whole, context, tools, eos_ids, cut_characters)
    if known:
        return known
    names = {str(tool.get("function", tool).get("name")) for tool in tools}
    if found := find(
        without_tail(marked_text(tokenizer, ids), cut_characters), begins_in_thought(tokenizer, context), names
    ):
        return said({"role": "assistant", "content": found.text}, found.calls, found.faults)
    return Said({"role": "assistant", "content": content}, (fault,) if fault else ())


def without_tail(text: str, characters: int) -> str:
    return text[: len(text) - characters] if characters else text


def read_by_template(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    context: Sequence[int],
    tools: Tools,
    eos_ids: Collection[int] = (),
    cut_characters: int = 0,
) -> tuple[Said | None, str]:
    """Return what transformers reads, or why it cannot; neither where the tokenizer does not say how."""
    takes = signature(tokenizer.parse_response).parameters
    # Before 5.13 it was a schema, and what stands before an answer did not count.
    if not getattr(tokenizer, "response_template" if "prefix" in takes else "response_schema", None):
        return None, ""
    told = {"prefix": list(context), "tools": [dict(tool) for tool in tools]}
    # An answer that is cut ends before its last token, so that it is given as text.
    sampled: Any = (
        without_tail(str(tokenizer.decode(list(without_end(ids, eos_ids)))), cut_characters)
        if cut_characters
        else list(ids)
    )
    try:
        message: Any = tokenizer.parse_response(sampled, **{name: told[name] for name in told if name in takes})
    except FAULTS as error:
        return None, one_line(error)
    calls = message.pop("tool_calls", None) or ()
    content = (message.get("content") or "").removesuffix("" if cut_characters else end_of(tokenizer, ids, eos_ids))
    return said({**message, "role": "assistant", "content": content}, calls), ""


def end_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], eos_ids: Collection[int]) -> str:
    """Return the text of the last token where that is special, or an end of sequence."""
    last = str(tokenizer.decode(list(ids[-1:]), skip_special_tokens=False))
    return last if last in specials(tokenizer) or without_end(ids, eos_ids) != ids else ""


def marked_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text without special tokens, save those that mark calls."""
    unmarked: Any = tokenizer.convert_tokens_to_ids(list(specials(tokenizer) - MARKS))
    left_out = set(unmarked)
    return str(tokenizer.decode([id for id in ids if id not in left_out], skip_special_tokens=False))


def begins_in_thought(tokenizer: PreTrainedTokenizerBase, context: Sequence[int]) -> bool:
    return str(tokenizer.decode(list(context[-8:]), skip_special_tokens=False)).rstrip().endswith(THINK)


def said(message: Message, calls: Sequence[Any], faults: Sequence[str] = ()) -> Said:
    """Return the message with those of its calls that can be read."""
    readable: list[dict[str, Any]] = []
    unreadable = list(faults)
    for value in calls:
        try:
            readable.append(function_of(value))
        except FAULTS as error:
            unreadable.append(one_line(error))
    numbered = [{"id": f"call_{i}", "type": "function", "function": call} for i, call in enumerate(readable)]
    return Said({**message, "tool_calls": numbered} if numbered else message, tuple(unreadable))


def function_of(value: Any) -> dict[str, Any]:
    """Return the name and the arguments of a call. ValueError where it does not have them."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict):
        raise ValueError(f"no object: {function}")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    try:
        arguments = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        name, arguments = json.loads(as_json([name, {} if arguments is None else arguments]))
    except FAULTS as error:
        raise ValueError(f"{name}: arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{name}: arguments are no object: {arguments}")
    return {"name": name, "arguments": arguments}


def as_json(value: Any) -> str:
    """ValueError for numbers that JSON does not have, and for half a character."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
