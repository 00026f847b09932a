"""One sentence on a token: what the update did to it and why. page/sentence.js chooses alike, and a test compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pellucid.look.words import figure, say

LEAST = 5e-4
"""A change of a log-prob below this is none that anybody would see."""
RULES = (
    "given",
    "zero_variance",
    "no_advantage",
    "overlong_filter",
    "entropy_share",
    "clip_low",
    "clip_high",
    "dual_clip",
    "correction",
    "other",
)
"""Who may have taken the gradient of a token: `rule` of docs/run-folder.md."""


def sentence(token: Mapping[str, Any], language: str = "en") -> str:
    """token: kind, rule, advantage, ratio, bound, push, change, importance; null where there is none."""
    key = key_of(token)
    return say(key, language, **{name: figure(token.get(name)) for name in ("advantage", "ratio", "bound", "change")})


def key_of(token: Mapping[str, Any]) -> str:
    if token["kind"] == "prompt":
        return "said.prompt"
    if token["rule"] in RULES:
        return f"said.{token['rule']}"
    push, change = token.get("push"), token.get("change")
    if not push:
        return "said.unknown" if push is None else "said.still"
    way = "up" if push > 0 else "down"
    if change is None:
        return f"said.{way}"
    if abs(change) < LEAST:
        return f"said.{way}_stayed"
    return f"said.{way}_went" if (change > 0) == (push > 0) else f"said.{way}_against"
