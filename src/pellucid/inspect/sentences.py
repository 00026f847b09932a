"""The sentences of the microscope in English and Chinese, which the page and the terminal read from page/words.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pellucid.reporting.token_files import KIND_PROMPT

_LANGUAGES = ("en", "zh")
"""The order of the languages in the file."""
PAGE_DIR = Path(__file__).with_name("page")


@cache
def load_sentences() -> Mapping[str, list[str]]:
    return json.loads((PAGE_DIR / "words.json").read_text(encoding="utf-8"))


def format_sentence(key: str, language: str = "en", **values: Any) -> str:
    """Return the sentence of a key, with its {names} replaced by values."""
    sentence = load_sentences()[key][_LANGUAGES.index(language)]
    for name, value in values.items():
        sentence = sentence.replace(f"{{{name}}}", str(value))
    return sentence


def format_significant(value: float | None) -> str:
    """Return a number with two or three significant digits, as the page writes it. Example: "-0.0123"."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e5 or magnitude < 1e-4:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.3g}" if magnitude < 1000 else f"{value:.0f}"


# The sentence that explains a token: what the update did to it and why. page/sentence.js chooses it in the same way; a
# test compares the two.


_ROUNDING_NATS = {"bfloat16": 0.13, "float16": 0.016}
"""By dtype of the logits: a change of a log-prob below this many nats may be rounding alone."""
_FLOAT32_ROUNDING_NATS = 5e-4
"""The same for logits in float32."""
MIN_SHOWN_DIFFERENCE = 1e-4
"""The page rounds differences of log-probs to this unit. Sentences call smaller differences "less than" it."""


def get_logits_dtype(metadata: Mapping[str, Any]) -> str:
    """Return the dtype of the logits from the metadata of a file; float32 if it does not name one."""
    return str(metadata.get("dtype") or "float32")


def get_logits_rounding(metadata: Mapping[str, Any]) -> float:
    return _ROUNDING_NATS.get(get_logits_dtype(metadata), _FLOAT32_ROUNDING_NATS)


def explain_token(token: Mapping[str, Any], language: str = "en", metadata: Mapping[str, Any] | None = None) -> str:
    """Return the sentence that explains a token. `metadata` is that of its file.

    A token has kind, rule, advantage, ratio, bound, push and change; None stands for a number that is missing.
    """
    values = {name: format_significant(token.get(name)) for name in ("advantage", "ratio", "bound")}
    change, rounding = token.get("change"), get_logits_rounding(metadata or {})
    size = abs(change) if change is not None else None
    values["size"] = (
        format_sentence("below", language, least=format_significant(MIN_SHOWN_DIFFERENCE))
        if size is not None and size < MIN_SHOWN_DIFFERENCE
        else format_significant(size)
    )
    values["dtype"] = get_logits_dtype(metadata or {})
    moved = ""
    if change is not None and abs(change) >= rounding:
        moved = format_sentence("moved.rose" if change > 0 else "moved.fell", language, **values)
    values["lead"] = format_sentence("said.lead", language, **values)
    return format_sentence(_choose_sentence_key(token, rounding), language, moved=moved, **values)


def _choose_sentence_key(token: Mapping[str, Any], rounding: float) -> str:
    if token["kind"] == KIND_PROMPT:
        return "said.prompt"
    if token["rule"]:
        return f"said.{token['rule']}"
    push, change = token.get("push"), token.get("change")
    if not push:
        return "said.unknown" if push is None else "said.still"
    direction = "up" if push > 0 else "down"
    if change is None:
        return f"said.{direction}"
    if abs(change) < rounding:
        return f"said.{direction}_stayed"
    return f"said.{direction}_went" if (change > 0) == (push > 0) else f"said.{direction}_against"
