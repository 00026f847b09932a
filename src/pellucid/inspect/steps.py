"""The recorded tokens of a step as columns for a page or a terminal.

Differences are computed here, from the recorded numbers, and not from numbers rounded for a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import Any

import numpy as np
import pyarrow as pa

from pellucid.inspect.sentences import MIN_SHOWN_DIFFERENCE, get_logits_dtype, get_logits_rounding
from pellucid.reporting.token_files import KIND_SAMPLED, get_token_metadata

_SEQUENCE_KEYS = ("group", "completion", "branch")
_SEQUENCE_COLUMNS = ("prompt_id", "reward", "correct", "finished", "parts", "error", "version")
_NUMBER_COLUMNS = ("ratio", "advantage", "weight", "importance", "push", "gradient", "bound")
"""Columns that have the same name in the file and on the page, except those of texts and log-probs."""
_RELATIVE_COLUMNS = ("weight", "push", "gradient")
"""Columns whose numbers shrink with the number of tokens in a step, so they are rounded relative to the largest."""
_SIGNIFICANT_DIGITS = 4
"""Significant digits of a number for the page."""
GROUP_MEASURE_COLUMNS = ("group", "kind", "gradient", "entropy_before")
"""The columns that `measure_groups` reads."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, row by row in the order of the file."""

    metadata: Mapping[str, Any]
    """The metadata of the file: see reporting/token_files.py."""
    sequences: Sequence[Mapping[str, Any]]
    """The prompt of each group (completion -1), its completions and their branches, with rows [start, end)."""
    columns: Mapping[str, Sequence[Any]]
    """token (id), text, kind, rule, the columns of _NUMBER_COLUMNS, the log-probs before, after (of the whole step),
    sampler and ref in nats, change = after - before, gap = before - sampler, drift = before - ref, entropy,
    entropy_change."""

    def join_text(self, sequence: Mapping[str, Any]) -> str:
        return "".join(text or "" for text in self.columns["text"][sequence["start"] : sequence["end"]])

    def compute_gradient_shares(self, group: int) -> dict[int, float]:
        """Return each row's share of the group's gradient; empty if the group has no gradient."""
        rows = [i for each in self.sequences if each["group"] == group for i in range(each["start"], each["end"])]
        norms = {i: self.columns["gradient"][i] or 0.0 for i in rows}
        total = fsum(norms.values())
        return {i: norm / total for i, norm in norms.items()} if total else {}


def build_step_tokens(table: pa.Table) -> StepTokens:
    """Return the columns of a token file, with None for NaN and null."""
    numbers = {
        name: [value if np.isfinite(value) else None for value in values.tolist()]
        for name, values in _compute_numbers(table).items()
    }
    return StepTokens(get_token_metadata(table), _split_sequences(table), _get_texts(table) | numbers)


def _get_texts(table: pa.Table) -> dict[str, list[Any]]:
    return {name: table[name].to_pylist() for name in ("token", "text", "kind", "rule")}


def _compute_numbers(table: pa.Table) -> dict[str, np.ndarray]:
    """Return the numbers of the tokens: [N] each, NaN for a number that is missing."""
    entropy = _get_floats(table, "entropy_before")
    start, after = _get_floats(table, "logprob_start"), _get_floats(table, "logprob_after")
    # The log-prob before the step if recorded, else that before the update: in a step of one update they are equal.
    before = np.where(np.isnan(start), _get_floats(table, "logprob_before"), start)
    sampler, ref = _get_floats(table, "sampler_logprob"), _get_floats(table, "ref_logprob")
    return {
        **{name: _get_floats(table, name) for name in _NUMBER_COLUMNS},
        "entropy": entropy,
        "before": before,
        "after": after,
        "sampler": sampler,
        "ref": ref,
        "change": after - before,
        "gap": before - sampler,
        "drift": before - ref,
        "entropy_change": _get_floats(table, "entropy_after") - entropy,
    }


def measure_groups(table: pa.Table) -> dict[int, dict[str, float | None]]:
    """Return for each group the sum of its gradient norms, and the mean entropy of its sampled tokens in nats.

    Both are rounded to four significant digits.
    """
    groups, sampled = table["group"].to_numpy(), table["kind"].to_numpy() == KIND_SAMPLED
    gradient, entropy = _get_floats(table, "gradient"), _get_floats(table, "entropy_before")
    has_gradient, has_entropy = np.isfinite(gradient), np.isfinite(entropy) & sampled
    measures: dict[int, dict[str, float | None]] = {}
    for group in dict.fromkeys(groups.tolist()):
        norms, entropies = gradient[has_gradient & (groups == group)], entropy[has_entropy & (groups == group)]
        measures[group] = {
            "gradient": float(f"{norms.sum():.4g}") if norms.size else None,
            "entropy": float(f"{entropies.mean():.4g}") if entropies.size else None,
        }
    return measures


def _get_floats(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as [N] float64, with NaN for null."""
    return table[name].to_numpy().astype(np.float64)


def _split_sequences(table: pa.Table) -> list[dict[str, Any]]:
    """Return the sequences, each of them rows [start, end) that follow one another."""
    if not table.num_rows:
        return []
    keys = np.stack([table[name].to_numpy() for name in _SEQUENCE_KEYS])
    bounds = [0, *(np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1).tolist(), table.num_rows]
    first_rows = table.select([*_SEQUENCE_KEYS, *_SEQUENCE_COLUMNS]).take(bounds[:-1]).to_pylist()
    return [
        {**row, "start": start, "end": end} for row, start, end in zip(first_rows, bounds, bounds[1:], strict=False)
    ]


# ---------------------------------------------------------------- for the page


def encode_for_page(table: pa.Table) -> dict[str, Any]:
    """Return the step as a JSON object, with numbers rounded to _SIGNIFICANT_DIGITS.

    Tokens are indices into `vocabulary`, a list of pairs of token id and text. A column without any value is null. A
    scored token has one log-prob, `before`, and the differences from it; other tokens have the other log-probs.
    """
    metadata, texts, numbers = get_token_metadata(table), _get_texts(table), _compute_numbers(table)
    is_unscored = np.isnan(numbers["before"])
    numbers |= {name: np.where(is_unscored, numbers[name], np.nan) for name in ("sampler", "after", "ref")}
    floors = dict.fromkeys(numbers, MIN_SHOWN_DIFFERENCE) | dict.fromkeys(_RELATIVE_COLUMNS)
    rounded = {name: round_values(values, _SIGNIFICANT_DIGITS, floors[name]) for name, values in numbers.items()}
    vocabulary: dict[tuple[Any, Any], int] = {}
    rules = sorted({rule for rule in texts["rule"] if rule})
    return {
        "step": metadata.get("step"),
        "about": metadata,
        "dtype": get_logits_dtype(metadata),
        "rounding": get_logits_rounding(metadata),
        "floor": MIN_SHOWN_DIFFERENCE,
        "sequences": _split_sequences(table),
        "rules": rules,
        "token": [
            vocabulary.setdefault(pair, len(vocabulary)) for pair in zip(texts["token"], texts["text"], strict=True)
        ],
        "kind": "".join((kind or "?")[0] for kind in texts["kind"]),
        "rule": [rules.index(rule) if rule else -1 for rule in texts["rule"]],
        **{name: None if all(x is None for x in values) else values for name, values in rounded.items()},
        **{name: _encode_alternatives(vocabulary, table, name) for name in ("top_before", "top_after")},
        "vocabulary": list(vocabulary),
    }


def _encode_alternatives(
    vocabulary: dict[tuple[Any, Any], int], table: pa.Table, name: str
) -> list[list[float | None] | None] | None:
    """Return for each row the vocabulary indices of its likeliest tokens, each followed by its log-prob."""
    columns = (table[f"{name}{part}"].to_pylist() for part in ("", "_text", "_logprob"))
    rows = [
        [] if row[0] is None else [top for top in zip(*row, strict=True) if top[2] is not None]
        for row in zip(*columns, strict=True)
    ]
    rounded = iter(round_values([logprob for row in rows for _, _, logprob in row], _SIGNIFICANT_DIGITS))
    encoded = []
    for row in rows:
        indices = [vocabulary.setdefault((token, text), len(vocabulary)) for token, text, _ in row]
        encoded.append([part for index in indices for part in (index, next(rounded))] or None)
    return encoded if any(encoded) else None


def round_values(
    values: Sequence[float | None] | np.ndarray, digits: int, floor: float | None = MIN_SHOWN_DIFFERENCE
) -> list[float | None]:
    """Round values to significant digits; those that are not finite become None.

    No digit is finer than `floor`; None means MIN_SHOWN_DIFFERENCE times the largest value.
    """
    numbers = np.array(values, dtype=np.float64)
    numbers[~np.isfinite(numbers)] = np.nan
    sizes = np.nan_to_num(np.abs(numbers))
    unit = floor or MIN_SHOWN_DIFFERENCE * sizes.max(initial=0.0) or MIN_SHOWN_DIFFERENCE
    max_decimals = np.ceil(-np.log10(unit))
    decimals = np.minimum(digits - 1 - np.floor(np.log10(np.maximum(sizes, unit))), max_decimals)
    factor = 10.0 ** np.abs(decimals)
    rounded = np.where(decimals >= 0, np.round(numbers * factor) / factor, np.round(numbers / factor) * factor)
    return [None if isnan(x) else int(x) if x == int(x) else x for x in rounded.tolist()]
