"""Parses sampled tokens into a message: the text of a turn, and its tool calls.

If the tokenizer describes how its model writes calls (`response_template`), transformers parses them. Otherwise, or if
transformers cannot parse them, calls are found in the common formats below. Everything else remains text.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from pellucid.policy.chat_template import get_special_tokens
from pellucid.policy.text import strip_eos
from pellucid.types import Message, PolicyTurn
from pellucid.utils.text import format_one_line

_ToolSchemas = Sequence[Mapping[str, Any]]


def parse_turn(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    context: Sequence[int],
    tools: _ToolSchemas,
    eos_ids: Collection[int] = (),
    cut_characters: int = 0,
) -> PolicyTurn:
    """Return the turn that was sampled, as a message.

    Args:
        ids: the sampled tokens, with the EOS token.
        context: the token ids before them.
        tools: the tools that may be called; without tools, no calls are parsed.
        eos_ids: the EOS tokens, which a tokenizer may not flag as special.
        cut_characters: how many characters to omit at the end: a stop string and the rest of its last token.
    """
    all_ids, ids = ids, strip_eos(ids, eos_ids)
    content = _cut(str(tokenizer.decode(list(ids), skip_special_tokens=True)), cut_characters)
    fault = ""
    if tools:
        turn, fault = _parse_by_response_template(tokenizer, all_ids, context, tools, eos_ids, cut_characters)
        if turn:
            return turn
        text = _cut(_decode_with_call_markers(tokenizer, ids), cut_characters)
        before = str(tokenizer.decode(list(context[-8:]), skip_special_tokens=False))
        names = {str(tool.get("function", tool).get("name")) for tool in tools}
        if found := _find_calls(text, before.rstrip().endswith(_THINK_OPEN), names):
            return _build_turn({"role": "assistant", "content": found.text}, found.calls, found.faults)
    return PolicyTurn({"role": "assistant", "content": content}, (fault,) if fault else ())


def _cut(text: str, characters: int) -> str:
    return text[: len(text) - characters]


def _parse_by_response_template(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    context: Sequence[int],
    tools: _ToolSchemas,
    eos_ids: Collection[int],
    cut_characters: int,
) -> tuple[PolicyTurn | None, str]:
    """Return the turn that transformers parses, or why it cannot; neither if the tokenizer has no template."""
    if not getattr(tokenizer, "response_template", None):
        return None, ""
    sampled: Any = list(ids)
    if cut_characters:  # the answer ends within a token, so it is passed as text
        sampled = _cut(str(tokenizer.decode(list(strip_eos(ids, eos_ids)))), cut_characters)
    try:
        message: Any = tokenizer.parse_response(sampled, prefix=list(context), tools=[dict(tool) for tool in tools])
    except _PARSE_ERRORS as error:
        return None, _format_fault(error)
    calls = message.pop("tool_calls", None) or ()
    end = "" if cut_characters else _get_end_text(tokenizer, ids, eos_ids)
    content = (message.get("content") or "").removesuffix(end)
    return _build_turn({**message, "role": "assistant", "content": content}, calls), ""


def _get_end_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], eos_ids: Collection[int]) -> str:
    """Return the text of the last token if it is special or an EOS token; else an empty string."""
    last = str(tokenizer.decode(list(ids[-1:]), skip_special_tokens=False))
    return last if last in get_special_tokens(tokenizer) or strip_eos(ids, eos_ids) != ids else ""


def _decode_with_call_markers(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text without special tokens, except those that mark calls."""
    omitted: Any = tokenizer.convert_tokens_to_ids(list(get_special_tokens(tokenizer) - _CALL_MARKERS))
    omitted_ids = set(omitted)
    return str(tokenizer.decode([id for id in ids if id not in omitted_ids], skip_special_tokens=False))


def _build_turn(message: Message, calls: Sequence[Any], faults: Sequence[str] = ()) -> PolicyTurn:
    """Return a turn with the calls that can be parsed, and the faults of the others."""
    readable: list[dict[str, Any]] = []
    unreadable = list(faults)
    for value in calls:
        try:
            readable.append(parse_function(value))
        except _PARSE_ERRORS as error:
            unreadable.append(_format_fault(error))
    numbered = [{"id": f"call_{i}", "type": "function", "function": call} for i, call in enumerate(readable)]
    return PolicyTurn({**message, "tool_calls": numbered} if numbered else message, tuple(unreadable))


def parse_function(value: Any) -> dict[str, Any]:
    """Return the name and the arguments of a call. Raise ValueError if it does not have them."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict):
        raise ValueError(f"not an object: {function}")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    try:
        arguments = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        # Fails for numbers that JSON does not have, and for lone surrogates.
        text = json.dumps([name, {} if arguments is None else arguments], ensure_ascii=False, allow_nan=False)
        name, arguments = json.loads(text.encode())
    except _PARSE_ERRORS as error:
        raise ValueError(f"{name}: arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{name}: arguments are not an object: {arguments}")
    return {"name": name, "arguments": arguments}


# ---------------------------------------------------------------- calls in a text
# Formats: Hermes, Llama 3, Mistral, plain JSON, and Python.


_TOOL_CALL_OPEN, _TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG, _MISTRAL_TAG = "<|python_tag|>", "[TOOL_CALLS]"
_CALL_MARKERS = frozenset((_TOOL_CALL_OPEN, _TOOL_CALL_CLOSE, _PYTHON_TAG, _MISTRAL_TAG))
_CALL_START_PATTERN = re.compile("|".join(map(re.escape, (_TOOL_CALL_OPEN, _PYTHON_TAG, _MISTRAL_TAG))))
_CALL_END_PATTERN = re.compile(rf"{_TOOL_CALL_CLOSE}|(?={_TOOL_CALL_OPEN})|$")
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CODE_FENCE = "```"
_JSON_VALUE_PATTERN = re.compile(r"[\s;]*(?=[\[{])")
_NAMED_CALL_PATTERN = re.compile(r'[\[\s]*\{.*?"name"\s*:\s*"([^"]*)"', re.DOTALL)
_PYTHONIC_CALL_PATTERN = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
"""The beginning of a list of calls in Python."""
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_PARSE_ERRORS = (ValueError, TypeError, KeyError, RecursionError)
"""The exceptions for values that cannot be parsed."""
_JSON_DECODER = json.JSONDecoder()
_MAX_UNREADABLE_CALLS = 100
"""After this many unreadable calls the rest of a turn is text, since each one costs a search of all of it."""


class _ParsedCalls(NamedTuple):
    """The calls of a text."""

    calls: tuple[Any, ...]
    """JSON values, valid calls or not."""
    faults: tuple[str, ...] = ()
    """One-line errors for text that is marked as a call and is not JSON."""
    text: str = ""
    """The rest of the text."""


def _find_calls(text: str, thinking: bool, names: set[str]) -> _ParsedCalls | None:
    """Return the calls in a text, given the names of the tools; None if it has none. Calls in thoughts are ignored.

    thinking: whether the text begins inside a thought.
    """
    thought, answer = "", text
    if thinking or text.lstrip().startswith(_THINK_OPEN):
        before, end, answer = text.partition(_THINK_CLOSE)
        thought = before + end
    found = _parse_bare_calls(answer.strip(), names) or _parse_marked_calls(answer)
    return found and found._replace(text=_join_texts(thought, found.text))


def _join_texts(*texts: str) -> str:
    return "\n".join(filter(None, (text.strip() for text in texts)))


def _format_fault(value: Any) -> str:
    """Return the beginning of a text as one line, with lone surrogates escaped, since they cannot be encoded."""
    return format_one_line(str(value)[:1000], 200).encode(errors="backslashreplace").decode()


def _parse_marked_calls(text: str) -> _ParsedCalls | None:
    """Return the calls after markers; None if there is no marker."""
    texts: list[str] = []
    calls: list[Any] = []
    faults: list[str] = []
    position = 0
    while len(faults) < _MAX_UNREADABLE_CALLS and (marker := _CALL_START_PATTERN.search(text, position)):
        texts.append(text[position : marker.start()])
        parse = _parse_enclosed_calls if marker[0] == _TOOL_CALL_OPEN else _parse_json_sequence
        values, fault, position = parse(text, marker.end())
        calls += values
        faults += filter(None, [fault])
    return _ParsedCalls(tuple(calls), tuple(faults), _join_texts(*texts, text[position:])) if texts else None


def _parse_enclosed_calls(text: str, start: int) -> tuple[list[Any], str, int]:
    """Like `_parse_json_sequence`, up to a closing tag. If it is missing, the text continues after the JSON."""
    values, fault, rest = _parse_json_sequence(text, start)
    end = _CALL_END_PATTERN.search(text, start if fault else rest)
    assert end is not None
    if fault:
        return values, fault, end.end()
    if end[0] and text[rest : end.start()].strip():
        return [], f"not JSON: followed by {_format_fault(text[rest : end.start()])}", end.end()
    return values, "", end.end() if end[0] else rest


def _parse_json_sequence(text: str, start: int) -> tuple[list[Any], str, int]:
    """Parse the JSON values from index `start` of a text: lists or single values, with or without semicolons between.

    Returns:
        The values, the error of the value after them, and the index of the rest of the text.
    """
    values: list[Any] = []
    end = start
    try:
        while begin := _JSON_VALUE_PATTERN.match(text, end):
            value, end = _JSON_DECODER.raw_decode(text, begin.end())
            values += value if isinstance(value, list) else [value]
    except _PARSE_ERRORS as error:
        return values, f"not JSON: {_format_fault(error)}", len(text)
    if end > start:
        return values, "", end
    return [], f"not JSON: {_format_fault(text[start : start + 1000]) or 'nothing'}", len(text)


def _parse_bare_calls(text: str, names: set[str]) -> _ParsedCalls | None:
    """Return the calls of a text that consists of calls; None if it has something else.

    Invalid JSON or Python counts as a call if it begins like a call of a known tool.
    """
    body = _strip_fence(text)
    if name := _find_pythonic_name(body):
        return _parse_pythonic_calls(body, name in names)
    if not body.startswith(("[", "{")):
        return None
    values, fault, rest = _parse_json_sequence(body, 0)
    calls = [value for value in values if _is_call(value, names)]
    if fault:
        beginning = _NAMED_CALL_PATTERN.match(body)
        return _ParsedCalls(tuple(calls), (fault,)) if beginning and beginning[1] in names else None
    return _ParsedCalls(tuple(values)) if values and not body[rest:].strip() and calls == values else None


def _strip_fence(text: str) -> str:
    """Return the inside of a code fence, if the whole text is one."""
    if not (len(text) >= 2 * len(_CODE_FENCE) and text.startswith(_CODE_FENCE) and text.endswith(_CODE_FENCE)):
        return text
    inside = text[len(_CODE_FENCE) : -len(_CODE_FENCE)].removeprefix("json")
    before = inside[: len(inside) - len(inside.lstrip())]
    after = inside[len(inside.rstrip()) :]
    return inside.strip() if "\n" in before and "\n" in after else text


def _find_pythonic_name(text: str) -> str:
    """Return the name of the first call if a text is a Python list of calls; else an empty string."""
    beginning = _PYTHONIC_CALL_PATTERN.match(text)
    end = text.removesuffix("]").rstrip().removesuffix(",").rstrip()
    return beginning[1] if beginning and text.endswith("]") and end.endswith(")") and len(end) > beginning.end() else ""


def _is_call(value: Any, names: set[str]) -> bool:
    """Return whether a JSON value is a call even without a marker."""
    if isinstance(value, dict) and "function" in value:
        return value.keys() <= {"id", "type", "function"} and _is_function(value["function"], names)
    return _is_function(value, names)


def _is_function(value: Any, names: set[str]) -> bool:
    """Return whether a JSON value has only a name and arguments. Without arguments, the name must be that of a tool."""
    if not isinstance(value, dict) or "function" in value:
        return False
    arguments = value.get("arguments", value.get("parameters"))
    known = {"id", "type", "name", "arguments", "parameters"}
    name = value.get("name")
    if not isinstance(name, str) or not value.keys() <= known:
        return False
    return name in names if arguments is None else isinstance(arguments, dict | str)


def _parse_pythonic_calls(text: str, is_known_tool: bool) -> _ParsedCalls | None:
    """Return the calls in a Python list. If one cannot be parsed: an error for a known tool, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of invalid escapes
            tree = ast.parse(text, mode="eval").body
        return _ParsedCalls(tuple(_parse_python_call(node) for node in getattr(tree, "elts", ())))
    except (SyntaxError, MemoryError, *_PARSE_ERRORS) as error:
        return _ParsedCalls((), (f"not a call: {_format_fault(error)}",)) if is_known_tool else None


def _parse_python_call(node: ast.expr) -> dict[str, Any]:
    """Return a call. Raise ValueError for other nodes, and for arguments without names or literal values."""
    if not isinstance(node, ast.Call):
        raise ValueError(ast.unparse(node))
    if node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError(f"{ast.unparse(node)} has arguments without names")
    arguments = {keyword.arg: _evaluate_literal(keyword.value) for keyword in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _evaluate_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(_JSONConstantReplacer().visit(node))
    except ValueError:  # its message contains a memory address
        raise ValueError(f"{ast.unparse(node)} is not a literal") from None


class _JSONConstantReplacer(ast.NodeTransformer):
    """Replaces JSON constants with Python constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node
