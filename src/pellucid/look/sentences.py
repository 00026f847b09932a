"""One sentence on a token: what the update did to it and why. page/sentence.js chooses alike, and a test compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pellucid.look.words import figure, say

ROUNDING = {"bfloat16": 0.13, "float16": 0.016}
"""By the dtype of the logits, in nats: a change of a log-prob below this may be rounding alone."""
FINEST = 5e-4
"""That of logits in float32."""
FLOOR = 1e-4
"""Differences of log-probs smaller than this are 0 on the page, and said to be less than this."""


def dtype_of(metadata: Mapping[str, Any]) -> str:
    """The dtype of the logits by the metadata of a file; float32 where an older file does not say."""
    return str(metadata.get("dtype") or "float32")


def rounding_of(metadata: Mapping[str, Any]) -> float:
    return ROUNDING.get(dtype_of(metadata), FINEST)


def sentence(token: Mapping[str, Any], language: str = "en", metadata: Mapping[str, Any] | None = None) -> str:
    """token: kind, rule, advantage, ratio, bound, push, change, importance; null where there is none.

    about: the metadata of the token's file.
    """
    told = {name: figure(token.get(name)) for name in ("advantage", "ratio", "bound")}
    change, rounding = token.get("change"), rounding_of(metadata or {})
    size = abs(change) if change is not None else None
    told["size"] = say("below", language, least=figure(FLOOR)) if size is not None and size < FLOOR else figure(size)
    told["dtype"] = dtype_of(metadata or {})
    moved = ""
    if change is not None and abs(change) >= rounding:
        moved = say("moved.rose" if change > 0 else "moved.fell", language, **told)
    told["lead"] = say("said.lead", language, **told)
    return say(key_of(token, rounding), language, moved=moved, **told)


def key_of(token: Mapping[str, Any], rounding: float) -> str:
    if token["kind"] == "prompt":
        return "said.prompt"
    if token["rule"]:
        return f"said.{token['rule']}"
    push, change = token.get("push"), token.get("change")
    if not push:
        return "said.unknown" if push is None else "said.still"
    way = "up" if push > 0 else "down"
    if change is None:
        return f"said.{way}"
    if abs(change) < rounding:
        return f"said.{way}_stayed"
    return f"said.{way}_went" if (change > 0) == (push > 0) else f"said.{way}_against"
