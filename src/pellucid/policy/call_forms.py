"""Calls of tools in a text, in the forms that models share: Hermes, Llama 3, Mistral, plain JSON, Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

OPEN, CLOSE, PYTHON, MISTRAL = "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
MARKS = frozenset((OPEN, CLOSE, PYTHON, MISTRAL))
BEGINNING = re.compile("|".join(map(re.escape, (OPEN, PYTHON, MISTRAL))))
END = re.compile(rf"{CLOSE}|(?={OPEN})|$")
THINK, THOUGHT = "<think>", "</think>"
FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
NEXT = re.compile(r"[\s;]*(?=[\[{])")
NAMED = re.compile(r'[\[\s]*\{.*?"name"\s*:\s*"([^"]*)"', re.DOTALL)
PYTHONIC = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(.*\)\s*,?\s*\]", re.DOTALL)
WORDS = {"true": True, "false": False, "null": None}
FAULTS = (ValueError, TypeError, KeyError, RecursionError)
"""What is raised for values that cannot be read."""
JSON = json.JSONDecoder()


class Found(NamedTuple):
    """The calls of a text."""

    calls: tuple[Any, ...]
    """JSON values, whether or not they have what a call must have."""
    faults: tuple[str, ...] = ()
    """Of what was marked as a call and is no JSON what is wrong with it, in a line."""
    text: str = ""
    """What else it says."""


def find(text: str, thinking: bool, names: set[str]) -> Found | None:
    """Return the calls of a text, of tools of these names or others; None where it has none.

    thinking: whether it begins inside a thought. What is written in thoughts is no call.
    """
    thought, spoken = "", text
    if thinking or text.lstrip().startswith(THINK):
        before, end, spoken = text.partition(THOUGHT)
        thought = before + end
    found = whole(spoken.strip(), names) or marked(spoken)
    return found and found._replace(text=joined(thought, found.text))


def joined(*texts: str) -> str:
    return "\n".join(filter(None, (text.strip() for text in texts)))


def one_line(value: Any) -> str:
    return " ".join(str(value).split())[:200]


def marked(text: str) -> Found | None:
    """Return the calls behind marks; None where there is no mark."""
    kept: list[str] = []
    calls: list[Any] = []
    faults: list[str] = []
    while mark := BEGINNING.search(text):
        kept.append(text[: mark.start()])
        values, fault, text = (enclosed if mark[0] == OPEN else sequence)(text[mark.end() :])
        calls += values
        faults += filter(None, [fault])
    return Found(tuple(calls), tuple(faults), joined(*kept, text)) if kept else None


def enclosed(text: str) -> tuple[list[Any], str, str]:
    """As `sequence`, up to a closing tag; where a model forgets it, the text goes on behind the JSON."""
    values, fault, rest = sequence(text)
    end = END.search(text if fault else rest)
    assert end is not None
    if fault:
        return values, fault, text[end.end() :]
    if end[0] and rest[: end.start()].strip():
        return [], f"not JSON: behind it stands {one_line(rest[: end.start()])}", rest[end.end() :]
    return values, "", rest[end.end() :] if end[0] else rest


def sequence(text: str) -> tuple[list[Any], str, str]:
    """Return the JSON values that a text begins with, what is wrong with the one after them, and the rest.

    They stand one behind the other or in a list; there may be semicolons between them.
    """
    values: list[Any] = []
    end = 0
    try:
        while start := NEXT.match(text, end):
            value, end = JSON.raw_decode(text, start.end())
            values += value if isinstance(value, list) else [value]
    except FAULTS as error:
        return values, f"not JSON: {one_line(error)}", ""
    return (values, "", text[end:]) if end else ([], f"not JSON: {one_line(text) or 'nothing'}", "")


def whole(text: str, names: set[str]) -> Found | None:
    """Return the calls of a text that is nothing but calls; None where it is something else.

    What is not quite JSON, or Python, is a call where it begins as one of a tool that there is.
    """
    body = fence[1].strip() if (fence := FENCE.fullmatch(text)) else text
    if call := PYTHONIC.fullmatch(body):
        return pythonic(body, call[1] in names)
    if not body.startswith(("[", "{")):
        return None
    values, fault, rest = sequence(body)
    calls = [value for value in values if is_call(value, names)]
    if fault:
        begun = NAMED.match(body)
        return Found(tuple(calls), (fault,)) if begun and begun[1] in names else None
    return Found(tuple(values)) if values and not rest.strip() and calls == values else None


def is_call(value: Any, names: set[str]) -> bool:
    """Return whether a JSON value is a call even where nothing marks it as one.

    Without arguments it is one only where `names`, those of the tools, have its name.
    """
    if not isinstance(value, dict):
        return False
    if "function" in value:
        return value.keys() <= {"id", "type", "function"} and is_call(value["function"], names)
    arguments = value.get("arguments", value.get("parameters"))
    known = {"id", "type", "name", "arguments", "parameters"}
    name = value.get("name")
    if not isinstance(name, str) or not value.keys() <= known:
        return False
    return name in names if arguments is None else isinstance(arguments, dict | str)


def pythonic(text: str, known: bool) -> Found | None:
    """Return the calls of a list in Python's form; where one cannot be read, why not, or None if it is no tool's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of backslashes that mean nothing to it
            tree = ast.parse(text, mode="eval").body
        return Found(tuple(python_call(node) for node in getattr(tree, "elts", ())))
    except (SyntaxError, MemoryError, *FAULTS) as error:
        return Found((), (f"no calls: {one_line(error)}",)) if known else None


def python_call(node: ast.expr) -> dict[str, Any]:
    """ValueError where a node is no call, or has other arguments than literals with names."""
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node)} is none")
    if node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError(f"{ast.unparse(node)} has arguments without names")
    arguments = {keyword.arg: literal(keyword.value) for keyword in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, in which the words of JSON may stand."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {literal(key): literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    if node is None:
        raise ValueError("** takes no arguments apart")
    return ast.literal_eval(node)
