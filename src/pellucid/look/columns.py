"""The tokens of a step as bytes for a page in a file; page/unpack.js reads them.

Four bytes of the header's length, the header as JSON, then the parts that it names, one after another. A part is whole
numbers in planes: the lowest bytes of all, then the next ones. Where a part has `values`, its numbers are their places.
Else it has a `unit`: 0 is nothing, and others are 1 + the code of a number in units (see `codes`), its sign lowest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa

from pellucid.look.sentences import dtype_of, rounding_of
from pellucid.look.steps import NUMBERS, SMALL, TOPS, differences, floats, logprobs, sequences
from pellucid.reporting.tokens import about_of

OF_SEQUENCE = ("group", "completion", "branch", "reward", "correct", "finished", "error", "end")
SAID = ("turns", "silent")
LONGEST_ERROR = 500
OF_ANSWERS = ("ratio", "advantage", "weight", "importance", "push", "bound")
"""Numbers that many tokens may share, as all of an answer: of at most FEW different ones each is told exactly."""
FEW = 250
CERTAIN = 1e-3
"""The unit of probabilities: a tenth of a percent, which is what a page shows."""
SAME = 1e-4
"""Probabilities that differ by less than this are the same."""
NEW = 255
"""The place, among the alternatives before the update, of one that was not there."""


@dataclass(frozen=True, slots=True)
class Level:
    """How exact a packed page is."""

    digits: int
    """Of a number: so many significant ones,"""
    unit: float
    """and none finer than this: nats, or a share of the largest of the step for SMALL."""
    percents: int
    """Significant digits of the probability of an alternative, which is told to CERTAIN."""
    least: float
    """The smallest probability of an alternative that is kept."""


@dataclass(slots=True)
class Words:
    """The table of a page: each pair of a token's id and text by its number."""

    indices: dict[tuple[int, str | None], int] = field(default_factory=dict)

    def encode(self, ids: np.ndarray, texts: pa.Array) -> np.ndarray:
        coded = texts.dictionary_encode()
        known = coded.dictionary.to_pylist()
        places = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        pairs, inverse = np.unique(ids.astype(np.int64) << 32 | (places.astype(np.int64) + 1), return_inverse=True)
        found = [self.index_token(pair >> 32, pair & 0xFFFFFFFF, known) for pair in pairs.tolist()]
        return np.array(found, dtype=np.int64)[inverse]

    def index_token(self, token: int, text_index: int, texts: Sequence[str]) -> int:
        return self.indices.setdefault((token, texts[text_index - 1] if text_index else None), len(self.indices))


@dataclass(slots=True)
class Parts:
    """What the header says of each part, and their bytes."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)

    def add(self, name: str, numbers: np.ndarray, **about: Any) -> None:
        wide = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
        planes = next((count for count in (3, 2, 1) if wide[:, count].any()), 0) + 1
        self.headers.append({"name": name, "count": len(numbers), "planes": planes, **about})
        self.payloads.append(wide[:, :planes].T.tobytes())


def step_bytes(table: pa.Table, vocabulary: Words, level: Level) -> bytes:
    parts, about = Parts(), about_of(table)
    chosen = vocabulary.encode(table["token"].fill_null(-1).to_numpy(), table["text"].combine_chunks())
    parts.add("token", chosen)
    for name in ("kind", "rule"):
        exactly(parts, name, ["" if x is None else x for x in table[name].to_pylist()])
    for name, values in {**{name: floats(table, of) for name, of in NUMBERS.items()}, **differences(table)}.items():
        number(parts, name, values, level)
    known = alternatives(parts, table, vocabulary, chosen, level)
    told = {
        "chosen": known,
        "step": about.get("step"),
        "about": {name: about.get(name, {}) for name in SAID},
        "dtype": dtype_of(about),
        "rounding": rounding_of(about),
        "floor": level.unit,
        "sequences": of_sequences(list(sequences(table))),
        "parts": parts.headers,
    }
    header = json.dumps(told, separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *parts.payloads])


def of_sequences(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Column by column: one follows on another, so that its end says where the next begins."""
    columns = {name: [each[name] for each in found] for name in OF_SEQUENCE}
    return columns | {"error": [(error or "")[:LONGEST_ERROR] or None for error in columns["error"]]}


def exactly(parts: Parts, name: str, values: Sequence[Any]) -> None:
    different = list(dict.fromkeys(values))
    places = {value: place for place, value in enumerate(different)}
    parts.add(name, np.array([places[value] for value in values], dtype=np.int64), values=different)


def number(parts: Parts, name: str, values: np.ndarray, level: Level) -> None:
    """A column in which there is nothing is left out; one of few values is told exactly."""
    known = np.isfinite(values)
    if not known.any():
        return
    different, inverse = np.unique(np.where(known, values, np.nan), return_inverse=True)
    if name in OF_ANSWERS and len(different) <= FEW:
        shown = [float(f"{value:.7g}") if isfinite(value) else None for value in different.tolist()]
        parts.add(name, inverse, values=shown)
        return
    largest = float(np.abs(values[known]).max()) if name in SMALL else 1.0
    unit = level.unit * (largest or 1.0)
    parts.add(name, signed(np.where(known, values, 0.0) / unit, known, level.digits), unit=unit, digits=level.digits)


def signed(numbers: np.ndarray, known: np.ndarray, digits: int) -> np.ndarray:
    """0 where nothing is known; else 1 + twice the code, and 1 more below 0."""
    return np.where(known, 1 + 2 * codes(np.abs(numbers), digits) + (numbers < 0), 0)


def codes(numbers: np.ndarray, digits: int) -> np.ndarray:
    """Numbers from 0 on to so many significant digits, none finer than 1, as whole numbers without gaps between them.

    With two digits: 0 to 99 are themselves, 100 is 100, 101 is 110, and 190 is 1000.
    """
    first, gap = 10**digits, 9 * 10 ** (digits - 1)
    power = np.zeros(len(numbers), dtype=np.int64)
    while (beyond := np.round(numbers / 10.0**power) >= first).any():
        power += beyond
    return np.round(numbers / 10.0**power).astype(np.int64) + power * gap


# ---------------------------------------------------------------- alternatives


def alternatives(parts: Parts, table: pa.Table, vocabulary: Words, chosen: np.ndarray, level: Level) -> bool:
    """top_WHEN_count: 0 where they are not recorded, else 1 + how many there are. Of all, row after row: 0 for the
    token that was chosen there, else 1 + their words; and the codes of their probabilities. After the update, `place`
    is theirs among those before; only of new ones there are words, and of the others the codes are told by the
    difference.

    Returns whether probabilities of chosen tokens are left out, where columns tell their log-probs: they are the same
    where both were taken in the same forward pass.
    """
    if level.least > 1:
        return False
    before, after = (kept(table, name, vocabulary, chosen, level) for name in TOPS)
    logs = logprobs(table)
    same = agree(before, logs["before"]) and agree(after, logs["before"] + logs["change"])
    known = np.isfinite(logs["before"]) & np.isfinite(logs["change"]) & same
    parts.add("top_before_count", before.counts)
    parts.add("top_before", before.token_codes)
    parts.add("top_before_p", before.probability_codes[untold(before, known)], digits=level.percents)
    places = place_of(after, before)
    old = places != NEW
    starts = np.cumsum(np.maximum(before.counts - 1, 0)) - np.maximum(before.counts - 1, 0)
    codes_before = np.zeros(len(places), dtype=np.int64)
    codes_before[old] = before.probability_codes[(starts[after.rows] + places)[old]]
    parts.add("top_after_count", after.counts)
    parts.add("top_after_place", places)
    parts.add("top_after", after.token_codes[~old])
    parts.add(
        "top_after_p", zigzag(after.probability_codes - codes_before)[untold(after, known)], digits=level.percents
    )
    return same


def agree(alternatives: Kept, logprobs: np.ndarray) -> bool:
    """Whether the chosen tokens among them have the probabilities that these log-probs say."""
    own = alternatives.token_codes == 0
    said = np.exp(logprobs[alternatives.rows[own]])
    return bool((np.abs(alternatives.probabilities[own] - said)[np.isfinite(said)] < SAME).all())


def untold(alternatives: Kept, known: np.ndarray) -> np.ndarray:
    return (alternatives.token_codes > 0) | ~known[alternatives.rows]


def zigzag(numbers: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, 2 as 0, 1, 2, 3, 4."""
    return np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)


@dataclass(frozen=True, slots=True)
class Kept:
    counts: np.ndarray
    """[N]: 0, or 1 + the number of alternatives."""
    rows: np.ndarray
    """[M], as are the others: the row of each alternative."""
    token_codes: np.ndarray
    """0 for the token that was chosen in the row."""
    probability_codes: np.ndarray
    probabilities: np.ndarray
    """Probabilities."""


def kept(table: pa.Table, when: str, vocabulary: Words, chosen: np.ndarray, level: Level) -> Kept:
    column = table[f"top_{when}"].combine_chunks()
    there = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.where(there, column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), 0)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    logs = table[f"top_{when}_logprob"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    likely = np.nan_to_num(np.exp(logs.astype(np.float64)))
    ids = column.flatten().fill_null(-1).to_numpy(zero_copy_only=False)
    mine = vocabulary.encode(ids, table[f"top_{when}_text"].combine_chunks().flatten())
    own = np.where(mine == chosen[rows], 0, mine + 1)
    stay = likely >= level.least
    counts = np.where(there, 1 + np.bincount(rows[stay], minlength=len(lengths)), 0)
    return Kept(counts, rows[stay], own[stay], codes(likely[stay] / CERTAIN, level.percents), likely[stay])


def place_of(after: Kept, before: Kept) -> np.ndarray:
    """Of each alternative after the update its place in the same row before it."""
    first = {}
    position = 0
    last = -1
    for row, word in zip(before.rows.tolist(), before.token_codes.tolist(), strict=True):
        position = position + 1 if row == last else 0
        first[row, word] = position
        last = row
    found = [first.get(pair, NEW) for pair in zip(after.rows.tolist(), after.token_codes.tolist(), strict=True)]
    return np.array(found, dtype=np.int64)
