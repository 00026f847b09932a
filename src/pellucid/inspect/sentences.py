"""Every sentence of the microscope, in English and Chinese: page/words.json, which the page and the terminal read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
"""The order of the languages in the file."""
PAGE_DIR = Path(__file__).with_name("page")


@cache
def load_sentences() -> Mapping[str, list[str]]:
    return json.loads((PAGE_DIR / "words.json").read_text(encoding="utf-8"))


def format_sentence(key: str, language: str = "en", **values: Any) -> str:
    """The sentence of a key, with its {names} replaced by values."""
    sentence = load_sentences()[key][LANGUAGES.index(language)]
    for name, value in values.items():
        sentence = sentence.replace(f"{{{name}}}", str(value))
    return sentence


def format_significant(value: float | None) -> str:
    """A number of a token in three significant digits, as the page writes it too. Example: "-0.0123"."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e5 or magnitude < 1e-4:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.3g}" if magnitude < 1000 else f"{value:.0f}"


# ---------------------------------------------------------------- sentences
# One sentence on a token: what the update did to it and why. page/sentence.js chooses alike, and a test compares.


ROUNDING_NATS = {"bfloat16": 0.13, "float16": 0.016}
"""By the dtype of the logits, in nats: a change of a log-prob below this may be rounding alone."""
FLOAT32_ROUNDING_NATS = 5e-4
"""That of logits in float32."""
MIN_SHOWN_DIFFERENCE = 1e-4
"""Differences of log-probs smaller than this are 0 on the page, and said to be less than this."""


def get_logits_dtype(metadata: Mapping[str, Any]) -> str:
    """The dtype of the logits by the metadata of a file; float32 where an older file does not say."""
    return str(metadata.get("dtype") or "float32")


def get_logits_rounding(metadata: Mapping[str, Any]) -> float:
    return ROUNDING_NATS.get(get_logits_dtype(metadata), FLOAT32_ROUNDING_NATS)


def explain_token(token: Mapping[str, Any], language: str = "en", metadata: Mapping[str, Any] | None = None) -> str:
    """token: kind, rule, advantage, ratio, bound, push, change, importance; null where there is none.

    about: the metadata of the token's file.
    """
    told = {name: format_significant(token.get(name)) for name in ("advantage", "ratio", "bound")}
    change, rounding = token.get("change"), get_logits_rounding(metadata or {})
    size = abs(change) if change is not None else None
    told["size"] = (
        format_sentence("below", language, least=format_significant(MIN_SHOWN_DIFFERENCE))
        if size is not None and size < MIN_SHOWN_DIFFERENCE
        else format_significant(size)
    )
    told["dtype"] = get_logits_dtype(metadata or {})
    moved = ""
    if change is not None and abs(change) >= rounding:
        moved = format_sentence("moved.rose" if change > 0 else "moved.fell", language, **told)
    told["lead"] = format_sentence("said.lead", language, **told)
    return format_sentence(choose_sentence_key(token, rounding), language, moved=moved, **told)


def choose_sentence_key(token: Mapping[str, Any], rounding: float) -> str:
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
