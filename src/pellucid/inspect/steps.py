"""The recorded tokens of a step as columns for a page or a terminal.

Differences are taken here, from the numbers as they were recorded: what is rounded for a page keeps its differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import Any

import numpy as np
import pyarrow as pa

from pellucid.inspect.sentences import MIN_SHOWN_DIFFERENCE, get_logits_dtype, get_logits_rounding
from pellucid.reporting.token_files import KIND_SAMPLED, METADATA_KEY

SEQUENCE_KEYS = ("group", "completion", "branch")
SEQUENCE_COLUMNS = ("prompt_id", "reward", "correct", "finished", "parts", "error", "version")
NUMBER_COLUMNS = {
    "predicted": "predicted",
    "entropy": "entropy_before",
    "ratio": "ratio",
    "advantage": "advantage",
    "weight": "weight",
    "importance": "importance",
    "push": "push",
    "gradient": "gradient",
    "bound": "bound",
}
"""Columns of the page that are columns of the file."""
RELATIVE_COLUMNS = ("weight", "push", "gradient")
"""Numbers of the size of one part in all tokens of a step."""
BEFORE_AFTER = ("before", "after")
SIGNIFICANT_DIGITS = 4
"""Significant digits of a number for the page."""
GROUP_MEASURE_COLUMNS = ("group", "kind", "gradient", "entropy_before")
"""The columns that `by_group` reads."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, row by row in the order of the file."""

    metadata: Mapping[str, Any]
    """What the writer said of the step: see `reporting/tokens.py`."""
    sequences: Sequence[Mapping[str, Any]]
    """The prompt of each group (completion -1), its completions and their branches, with rows [start, end)."""
    columns: Mapping[str, Sequence[Any]]
    """token (id), text, kind, rule, the numbers of NUMBERS, and before, after, sampler, ref (log-probs in nats, before
    and after the whole step), change = after - before, gap = before - sampler, drift = before - ref, entropy_change."""
    alternatives: Mapping[str, Sequence[Sequence[tuple[int, str, float]] | None]]
    """Of each row the likeliest tokens (id, text, log-prob) before and after the update."""

    def join_text(self, sequence: Mapping[str, Any]) -> str:
        return "".join(text or "" for text in self.columns["text"][sequence["start"] : sequence["end"]])

    def compute_gradient_shares(self, group: int) -> dict[int, float]:
        """Of each row of a group its share of the group's gradient; empty where the group has none."""
        rows = [i for each in self.sequences if each["group"] == group for i in range(each["start"], each["end"])]
        pulls = {i: self.columns["gradient"][i] or 0.0 for i in rows}
        whole = fsum(pulls.values())
        return {i: pull / whole for i, pull in pulls.items()} if whole else {}


def build_step_tokens(table: pa.Table, verdicts: bool = True) -> StepTokens:
    """The columns of a file of tokens, NaN and null alike as None.

    verdicts: False leaves out which answers are right, since the run's rewards are a matter of degree.
    """
    columns: dict[str, Sequence[Any]] = {name: table[name].to_pylist() for name in ("token", "text", "kind", "rule")}
    columns |= {name: replace_nan(get_floats(table, of)) for name, of in NUMBER_COLUMNS.items()}
    columns |= {name: replace_nan(values) for name, values in compute_logprobs(table).items()}
    about = json.loads((table.schema.metadata or {})[METADATA_KEY])
    found = [each if verdicts else {**each, "correct": None} for each in split_sequences(table)]
    return StepTokens(about, found, columns, {name: get_alternatives(table, f"top_{name}") for name in BEFORE_AFTER})


def compute_logprobs(table: pa.Table) -> dict[str, np.ndarray]:
    """Log-probs of the tokens, and their differences: [N] each, NaN where there is none."""
    start, after = get_floats(table, "logprob_start"), get_floats(table, "logprob_after")
    # The log-prob before the update is that of the start where there is one: they are the same in a step of one update.
    before = np.where(np.isnan(start), get_floats(table, "logprob_before"), start)
    sampler, ref = get_floats(table, "sampler_logprob"), get_floats(table, "ref_logprob")
    found = {"before": before, "after": after, "sampler": sampler, "ref": ref}
    found |= {"change": after - before, "gap": before - sampler, "drift": before - ref}
    return found | {"entropy_change": get_floats(table, "entropy_after") - get_floats(table, "entropy_before")}


def compute_logprob_differences(table: pa.Table) -> dict[str, np.ndarray]:
    """The same, of which none can be had from others: of a token that was scored, those before and the differences."""
    found = compute_logprobs(table)
    unscored = np.isnan(found["before"])
    return found | {name: np.where(unscored, found[name], np.nan) for name in ("sampler", "after", "ref")}


def measure_groups(table: pa.Table) -> dict[int, dict[str, float | None]]:
    """Of each group the sum of its gradient norms, and the mean entropy in nats of its sampled tokens before."""
    groups, sampled = table["group"].to_numpy(), table["kind"].to_numpy() == KIND_SAMPLED
    gradient, entropy = get_floats(table, "gradient"), get_floats(table, "entropy_before")
    pulling, known = np.isfinite(gradient), np.isfinite(entropy) & sampled
    found: dict[int, dict[str, float | None]] = {}
    for group in dict.fromkeys(groups.tolist()):
        pulls, entropies = gradient[pulling & (groups == group)], entropy[known & (groups == group)]
        found[group] = {
            "gradient": float(pulls.sum()) if pulls.size else None,
            "entropy": float(entropies.mean()) if entropies.size else None,
        }
    return found


def get_floats(table: pa.Table, name: str) -> np.ndarray:
    """[N] float64, NaN where there is none."""
    return table[name].to_numpy().astype(np.float64)


def replace_nan(values: np.ndarray) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def split_sequences(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows that follow each other and are of one sequence."""
    if not table.num_rows:
        return
    keys = np.stack([table[name].to_numpy() for name in SEQUENCE_KEYS])
    begins = [0, *(np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1).tolist(), table.num_rows]
    facts = table.select([*SEQUENCE_KEYS, *SEQUENCE_COLUMNS]).take(begins[:-1]).to_pylist()
    for fact, start, end in zip(facts, begins, begins[1:], strict=False):
        yield {**fact, "start": start, "end": end}


def get_alternatives(table: pa.Table, name: str) -> list[list[tuple[int, str, float]] | None]:
    columns = (table[column].to_pylist() for column in (name, f"{name}_text", f"{name}_logprob"))
    return [
        None if ids is None else [top for top in zip(ids, texts, logprobs, strict=True) if top[2] is not None]
        for ids, texts, logprobs in zip(*columns, strict=True)
    ]


# ---------------------------------------------------------------- for the page


def encode_for_page(table: pa.Table, verdicts: bool = True) -> dict[str, Any]:
    """A JSON object of the step, its numbers to DIGITS significant digits.

    Texts are numbers of `vocabulary`, pairs of token id and text; a column in which there is nothing is null. Of a
    token that was scored, log-probs are those before the update and differences from it.
    """
    words: dict[tuple[Any, Any], int] = {}
    tokens = build_step_tokens(table, verdicts)
    columns = tokens.columns
    numbers = {name: get_floats(table, of) for name, of in NUMBER_COLUMNS.items()} | compute_logprob_differences(table)
    raw = {
        name: round_values(
            values.tolist(), SIGNIFICANT_DIGITS, None if name in RELATIVE_COLUMNS else MIN_SHOWN_DIFFERENCE
        )
        for name, values in numbers.items()
    }
    rules = sorted({rule for rule in columns["rule"] if rule})
    return {
        "step": tokens.metadata.get("step"),
        "about": tokens.metadata,
        "dtype": get_logits_dtype(tokens.metadata),
        "rounding": get_logits_rounding(tokens.metadata),
        "floor": MIN_SHOWN_DIFFERENCE,
        "sequences": tokens.sequences,
        "rules": rules,
        "token": [index_text(words, pair) for pair in zip(columns["token"], columns["text"], strict=True)],
        "kind": "".join((kind or "?")[0] for kind in columns["kind"]),
        "rule": [rules.index(rule) if rule else -1 for rule in columns["rule"]],
        **{name: None if all(x is None for x in values) else values for name, values in raw.items()},
        **{f"top_{name}": encode_alternatives(words, tokens.alternatives[name]) for name in BEFORE_AFTER},
        "vocabulary": list(words),
    }


def index_text(vocabulary: dict[tuple[Any, Any], int], pair: tuple[Any, Any]) -> int:
    return vocabulary.setdefault(pair, len(vocabulary))


def encode_alternatives(
    vocabulary: dict[tuple[Any, Any], int], alternatives: Sequence[Sequence[tuple[int, str, float]] | None]
) -> list[list[float | None] | None] | None:
    """Of each row the numbers of its alternatives in the vocabulary, in turn with their log-probs."""
    logprobs = iter(round_values([top[2] for row in alternatives if row for top in row], SIGNIFICANT_DIGITS))
    rows = [
        [part for token, text, _ in row for part in (index_text(vocabulary, (token, text)), next(logprobs))]
        if row
        else None
        for row in alternatives
    ]
    return rows if any(rows) else None


def round_values(
    values: Sequence[float | None], digits: int, floor: float | None = MIN_SHOWN_DIFFERENCE
) -> list[float | None]:
    """To so many significant digits, and not finer than `floor`; None is a share of FLOOR of the largest value."""
    found = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    found[~np.isfinite(found)] = np.nan
    size = np.nan_to_num(np.abs(found))
    least = floor or MIN_SHOWN_DIFFERENCE * size.max(initial=0.0) or MIN_SHOWN_DIFFERENCE
    finest = np.ceil(-np.log10(least))
    places = np.minimum(digits - 1 - np.floor(np.log10(np.maximum(size, least))), finest)
    factor = 10.0 ** np.abs(places)
    whole = np.where(places >= 0, np.round(found * factor) / factor, np.round(found / factor) * factor)
    return [None if isnan(x) else int(x) if x == int(x) else x for x in whole.tolist()]
