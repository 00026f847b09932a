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
FENCE = "```"
NEXT = re.compile(r"[\s;]*(?=[\[{])")
NAMED = re.compile(r'[\[\s]*\{.*?"name"\s*:\s*"([^"]*)"', re.DOTALL)
PYTHONIC = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
"""How a list of calls in Python's form begins."""
WORDS = {"true": True, "false": False, "null": None}
FAULTS = (ValueError, TypeError, KeyError, RecursionError)
"""What is raised for values that cannot be read."""
JSON = json.JSONDecoder()
MOST_FAULTS = 100
"""After so many unreadable calls the rest of a turn is text: each one costs a look at all of it."""


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
    """Return the beginning of a text as one line, without half characters, which cannot be encoded."""
    return " ".join(str(value)[:1000].split())[:200].encode(errors="backslashreplace").decode()


def marked(text: str) -> Found | None:
    """Return the calls behind marks; None where there is no mark."""
    kept: list[str] = []
    calls: list[Any] = []
    faults: list[str] = []
    at = 0
    while len(faults) < MOST_FAULTS and (mark := BEGINNING.search(text, at)):
        kept.append(text[at : mark.start()])
        values, fault, at = (enclosed if mark[0] == OPEN else sequence)(text, mark.end())
        calls += values
        faults += filter(None, [fault])
    return Found(tuple(calls), tuple(faults), joined(*kept, text[at:])) if kept else None


def enclosed(text: str, at: int) -> tuple[list[Any], str, int]:
    """Read calls as `sequence` does, up to a closing tag; where that is missing, the text goes on behind the JSON."""
    values, fault, rest = sequence(text, at)
    end = END.search(text, at if fault else rest)
    assert end is not None
    if fault:
        return values, fault, end.end()
    if end[0] and text[rest : end.start()].strip():
        return [], f"not JSON: behind it stands {one_line(text[rest : end.start()])}", end.end()
    return values, "", end.end() if end[0] else rest


def sequence(text: str, at: int) -> tuple[list[Any], str, int]:
    """Read the JSON values that stand at a place of a text, one behind the other or in a list, with semicolons or not.

    Returns:
        The values, what is wrong with the one after them, and where the rest of the text begins.
    """
    values: list[Any] = []
    end = at
    try:
        while start := NEXT.match(text, end):
            value, end = JSON.raw_decode(text, start.end())
            values += value if isinstance(value, list) else [value]
    except FAULTS as error:
        return values, f"not JSON: {one_line(error)}", len(text)
    if end > at:
        return values, "", end
    return [], f"not JSON: {one_line(text[at : at + 1000]) or 'nothing'}", len(text)


def whole(text: str, names: set[str]) -> Found | None:
    """Return the calls of a text that is nothing but calls; None where it is something else.

    What is not quite JSON, or Python, is a call where it begins as one of a tool that there is.
    """
    body = unfenced(text)
    if name := pythonic_name(body):
        return pythonic(body, name in names)
    if not body.startswith(("[", "{")):
        return None
    values, fault, rest = sequence(body, 0)
    calls = [value for value in values if is_call(value, names)]
    if fault:
        begun = NAMED.match(body)
        return Found(tuple(calls), (fault,)) if begun and begun[1] in names else None
    return Found(tuple(values)) if values and not body[rest:].strip() and calls == values else None


def unfenced(text: str) -> str:
    """Return what stands in a fence of three backticks, on lines of its own, where that is the whole text."""
    if not (len(text) >= 2 * len(FENCE) and text.startswith(FENCE) and text.endswith(FENCE)):
        return text
    inside = text[len(FENCE) : -len(FENCE)].removeprefix("json")
    before = inside[: len(inside) - len(inside.lstrip())]
    after = inside[len(inside.rstrip()) :]
    return inside.strip() if "\n" in before and "\n" in after else text


def pythonic_name(text: str) -> str:
    """Return the name of the first call where a text is a list of calls in Python's form; else nothing."""
    begun = PYTHONIC.match(text)
    end = text.removesuffix("]").rstrip().removesuffix(",").rstrip()
    return begun[1] if begun and text.endswith("]") and end.endswith(")") and len(end) > begun.end() else ""


def is_call(value: Any, names: set[str]) -> bool:
    """Return whether a JSON value is a call even where nothing marks it as one."""
    if isinstance(value, dict) and "function" in value:
        return value.keys() <= {"id", "type", "function"} and is_function(value["function"], names)
    return is_function(value, names)


def is_function(value: Any, names: set[str]) -> bool:
    """Return whether a JSON value is a name with arguments, and nothing else.

    Without arguments it is one only if `names`, those of the tools, have its name.
    """
    if not isinstance(value, dict) or "function" in value:
        return False
    arguments = value.get("arguments", value.get("parameters"))
    known = {"id", "type", "name", "arguments", "parameters"}
    name = value.get("name")
    if not isinstance(name, str) or not value.keys() <= known:
        return False
    return name in names if arguments is None else isinstance(arguments, dict | str)


def pythonic(text: str, is_known_tool: bool) -> Found | None:
    """Return the calls of a list in Python's form; where one cannot be read, why not, or None if it is no tool's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of backslashes that mean nothing to it
            tree = ast.parse(text, mode="eval").body
        return Found(tuple(python_call(node) for node in getattr(tree, "elts", ())))
    except (SyntaxError, MemoryError, *FAULTS) as error:
        return Found((), (f"no calls: {one_line(error)}",)) if is_known_tool else None


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
