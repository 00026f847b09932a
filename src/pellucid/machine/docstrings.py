"""First sentences of docstrings, read from source files: what they describe may take seconds to import."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def of_module(module: str) -> str:
    """The first sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(tree_of(module)) or "")


def of_dict(module: str, name: str) -> dict[str, str]:
    """By the keys of a dict in a module, the first sentence on the function of that module that the value is or calls.

    Example: of_dict("pellucid.algorithm.kl", "KL")["k1"] == "log pi - log ref: unbiased."
    """
    body = tree_of(module).body
    documented = {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}
    table = body[place_of(name, body)].value  # pyright: ignore[reportAttributeAccessIssue]
    return {
        key.value: first_sentence(documented[function_of(value)])
        for key, value in zip(table.keys, table.values, strict=True)
    }


def below(module: str, name: str) -> str:
    """The first sentence of the string that stands below the assignment to a name in a module."""
    body = tree_of(module).body
    return first_sentence(body[place_of(name, body) + 1].value.value)  # pyright: ignore[reportAttributeAccessIssue]


def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module, which is not imported; the packages that it lies in are."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def place_of(name: str, body: list[ast.stmt]) -> int:
    """The index of the statement that assigns to this name."""
    targets = [
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for node in body
    ]
    return next(i for i, each in enumerate(targets) if any(isinstance(t, ast.Name) and t.id == name for t in each))


def function_of(value: ast.expr) -> str:
    """The name of the function that an expression is, or that a lambda calls."""
    called = value.body.func if isinstance(value, ast.Lambda) and isinstance(value.body, ast.Call) else value
    assert isinstance(called, ast.Name)
    return called.id


def first_sentence(docstring: str) -> str:
    """Up to the first full stop outside brackets that ends a word, on one line; of the first paragraph at most.

    Example: first_sentence("r - mean (Dr. GRPO). The mean\\nincludes r.") == "r - mean (Dr. GRPO)."
    """
    text = " ".join(docstring.partition("\n\n")[0].split())
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if text[i : i + 2] == ". " and depth == 0:
            return text[: i + 1]
    return text
