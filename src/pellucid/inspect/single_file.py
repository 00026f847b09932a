"""Runs as one page that works from disk: each answer deflated and in base64, as exact as there is room for.

What is too much is never read: by a few steps it is foreseen how many have room, and of a longer run those are packed
that lie at even distances, the first and the last among them.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pellucid.inspect.group_history import MAX_LISTED_CHARS, QuestionHistory, sample_evenly
from pellucid.inspect.page import build_inspect_page
from pellucid.inspect.run_reader import STEPS_PER_PAGE, RunReader
from pellucid.inspect.sentences import format_sentence, get_logits_dtype, get_logits_rounding
from pellucid.inspect.steps import (
    BEFORE_AFTER,
    NUMBER_COLUMNS,
    RELATIVE_COLUMNS,
    compute_logprob_differences,
    compute_logprobs,
    get_floats,
    split_sequences,
)
from pellucid.reporting import token_files
from pellucid.reporting.token_files import get_token_metadata
from pellucid.types import UserError

MAX_PAGE_BYTES = 15_000_000
"""Bytes of a page that can still be sent to somebody."""
SAMPLE_SIZE = 12
"""Steps, and questions, by which it is foreseen how large all of them will be."""
PLANNED_SHARE = 0.97
"""The share of the room that is planned with: steps differ."""
SUMMARY_SHARE, QUESTION_SHARE = 0.25, 0.1
"""The shares of the room that the groups of steps without tokens, and the curves of questions, may take."""
# ---------------------------------------------------------------- columns
# The tokens of a step as bytes for a page in a file; page/unpack.js reads them.
#
# Four bytes of the header's length, the header as JSON, then the parts that it names, one after another. A part is whole
# numbers in planes: the lowest bytes of all, then the next ones. Where a part has `values`, its numbers are their places.
# Else it has a `unit`: 0 is nothing, and others are 1 + the code of a number in units (see `codes`), its sign lowest.


PACKED_SEQUENCE_FIELDS = ("group", "completion", "branch", "reward", "correct", "finished", "error", "end")
METADATA_FIELDS = ("turns", "silent")
MAX_ERROR_CHARS = 500
SHARED_VALUE_COLUMNS = ("ratio", "advantage", "weight", "importance", "push", "bound")
"""Numbers that many tokens may share, as all of an answer: of at most FEW different ones each is told exactly."""
MAX_SHARED_VALUES = 250
PROBABILITY_UNIT = 1e-3
"""The unit of probabilities: a tenth of a percent, which is what a page shows."""
PROBABILITY_TOLERANCE = 1e-4
"""Probabilities that differ by less than this are the same."""
NEW_ALTERNATIVE = 255
"""The place, among the alternatives before the update, of one that was not there."""


@dataclass(frozen=True, slots=True)
class PrecisionLevel:
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
class Vocabulary:
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
class PackedParts:
    """What the header says of each part, and their bytes."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)

    def add(self, name: str, numbers: np.ndarray, **about: Any) -> None:
        wide = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
        planes = next((count for count in (3, 2, 1) if wide[:, count].any()), 0) + 1
        self.headers.append({"name": name, "count": len(numbers), "planes": planes, **about})
        self.payloads.append(wide[:, :planes].T.tobytes())


def encode_step(table: pa.Table, vocabulary: Vocabulary, level: PrecisionLevel) -> bytes:
    parts, about = PackedParts(), get_token_metadata(table)
    chosen = vocabulary.encode(table["token"].fill_null(-1).to_numpy(), table["text"].combine_chunks())
    parts.add("token", chosen)
    for name in ("kind", "rule"):
        add_exact_column(parts, name, ["" if x is None else x for x in table[name].to_pylist()])
    for name, values in {
        **{name: get_floats(table, of) for name, of in NUMBER_COLUMNS.items()},
        **compute_logprob_differences(table),
    }.items():
        add_number_column(parts, name, values, level)
    known = add_alternatives(parts, table, vocabulary, chosen, level)
    told = {
        "chosen": known,
        "step": about.get("step"),
        "about": {name: about.get(name, {}) for name in METADATA_FIELDS},
        "dtype": get_logits_dtype(about),
        "rounding": get_logits_rounding(about),
        "floor": level.unit,
        "sequences": transpose_sequences(list(split_sequences(table))),
        "parts": parts.headers,
    }
    header = json.dumps(told, separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *parts.payloads])


def transpose_sequences(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Column by column: one follows on another, so that its end says where the next begins."""
    columns = {name: [each[name] for each in found] for name in PACKED_SEQUENCE_FIELDS}
    return columns | {"error": [(error or "")[:MAX_ERROR_CHARS] or None for error in columns["error"]]}


def add_exact_column(parts: PackedParts, name: str, values: Sequence[Any]) -> None:
    different = list(dict.fromkeys(values))
    places = {value: place for place, value in enumerate(different)}
    parts.add(name, np.array([places[value] for value in values], dtype=np.int64), values=different)


def add_number_column(parts: PackedParts, name: str, values: np.ndarray, level: PrecisionLevel) -> None:
    """A column in which there is nothing is left out; one of few values is told exactly."""
    known = np.isfinite(values)
    if not known.any():
        return
    different, inverse = np.unique(np.where(known, values, np.nan), return_inverse=True)
    if name in SHARED_VALUE_COLUMNS and len(different) <= MAX_SHARED_VALUES:
        shown = [float(f"{value:.7g}") if isfinite(value) else None for value in different.tolist()]
        parts.add(name, inverse, values=shown)
        return
    largest = float(np.abs(values[known]).max()) if name in RELATIVE_COLUMNS else 1.0
    unit = level.unit * (largest or 1.0)
    parts.add(
        name, encode_signed(np.where(known, values, 0.0) / unit, known, level.digits), unit=unit, digits=level.digits
    )


def encode_signed(numbers: np.ndarray, known: np.ndarray, digits: int) -> np.ndarray:
    """0 where nothing is known; else 1 + twice the code, and 1 more below 0."""
    return np.where(known, 1 + 2 * encode_magnitudes(np.abs(numbers), digits) + (numbers < 0), 0)


def encode_magnitudes(numbers: np.ndarray, digits: int) -> np.ndarray:
    """Numbers from 0 on to so many significant digits, none finer than 1, as whole numbers without gaps between them.

    With two digits: 0 to 99 are themselves, 100 is 100, 101 is 110, and 190 is 1000.
    """
    first, gap = 10**digits, 9 * 10 ** (digits - 1)
    power = np.zeros(len(numbers), dtype=np.int64)
    while (beyond := np.round(numbers / 10.0**power) >= first).any():
        power += beyond
    return np.round(numbers / 10.0**power).astype(np.int64) + power * gap


# ---------------------------------------------------------------- alternatives


def add_alternatives(
    parts: PackedParts, table: pa.Table, vocabulary: Vocabulary, chosen: np.ndarray, level: PrecisionLevel
) -> bool:
    """top_WHEN_count: 0 where they are not recorded, else 1 + how many there are. Of all, row after row: 0 for the
    token that was chosen there, else 1 + their words; and the codes of their probabilities. After the update, `place`
    is theirs among those before; only of new ones there are words, and of the others the codes are told by the
    difference.

    Returns whether probabilities of chosen tokens are left out, where columns tell their log-probs: they are the same
    where both were taken in the same forward pass.
    """
    if level.least > 1:
        return False
    before, after = (select_alternatives(table, name, vocabulary, chosen, level) for name in BEFORE_AFTER)
    logs = compute_logprobs(table)
    same = matches_logprobs(before, logs["before"]) and matches_logprobs(after, logs["before"] + logs["change"])
    known = np.isfinite(logs["before"]) & np.isfinite(logs["change"]) & same
    parts.add("top_before_count", before.counts)
    parts.add("top_before", before.token_codes)
    parts.add(
        "top_before_p", before.probability_codes[select_stored_probabilities(before, known)], digits=level.percents
    )
    places = find_earlier_positions(after, before)
    old = places != NEW_ALTERNATIVE
    starts = np.cumsum(np.maximum(before.counts - 1, 0)) - np.maximum(before.counts - 1, 0)
    codes_before = np.zeros(len(places), dtype=np.int64)
    codes_before[old] = before.probability_codes[(starts[after.rows] + places)[old]]
    parts.add("top_after_count", after.counts)
    parts.add("top_after_place", places)
    parts.add("top_after", after.token_codes[~old])
    parts.add(
        "top_after_p",
        encode_zigzag(after.probability_codes - codes_before)[select_stored_probabilities(after, known)],
        digits=level.percents,
    )
    return same


def matches_logprobs(alternatives: Alternatives, logprobs: np.ndarray) -> bool:
    """Whether the chosen tokens among them have the probabilities that these log-probs say."""
    own = alternatives.token_codes == 0
    said = np.exp(logprobs[alternatives.rows[own]])
    return bool((np.abs(alternatives.probabilities[own] - said)[np.isfinite(said)] < PROBABILITY_TOLERANCE).all())


def select_stored_probabilities(alternatives: Alternatives, known: np.ndarray) -> np.ndarray:
    return (alternatives.token_codes > 0) | ~known[alternatives.rows]


def encode_zigzag(numbers: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, 2 as 0, 1, 2, 3, 4."""
    return np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)


@dataclass(frozen=True, slots=True)
class Alternatives:
    counts: np.ndarray
    """[N]: 0, or 1 + the number of alternatives."""
    rows: np.ndarray
    """[M], as are the others: the row of each alternative."""
    token_codes: np.ndarray
    """0 for the token that was chosen in the row."""
    probability_codes: np.ndarray
    probabilities: np.ndarray
    """Probabilities."""


def select_alternatives(
    table: pa.Table, when: str, vocabulary: Vocabulary, chosen: np.ndarray, level: PrecisionLevel
) -> Alternatives:
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
    return Alternatives(
        counts, rows[stay], own[stay], encode_magnitudes(likely[stay] / PROBABILITY_UNIT, level.percents), likely[stay]
    )


def find_earlier_positions(after: Alternatives, before: Alternatives) -> np.ndarray:
    """Of each alternative after the update its place in the same row before it."""
    first = {}
    position = 0
    last = -1
    for row, word in zip(before.rows.tolist(), before.token_codes.tolist(), strict=True):
        position = position + 1 if row == last else 0
        first[row, word] = position
        last = row
    found = [
        first.get(pair, NEW_ALTERNATIVE) for pair in zip(after.rows.tolist(), after.token_codes.tolist(), strict=True)
    ]
    return np.array(found, dtype=np.int64)


PRECISION_LEVELS = (
    PrecisionLevel(4, 1e-4, 3, 0.0),
    PrecisionLevel(3, 1e-3, 2, 0.0),
    PrecisionLevel(3, 1e-3, 2, 0.01),
    PrecisionLevel(3, 1e-3, 2, 0.05),
    PrecisionLevel(3, 1e-3, 2, 0.2),
    PrecisionLevel(3, 1e-3, 2, 2.0),
)
"""In the order in which they are tried: digits that nobody reads go first, then alternatives, those of small
probability before others. The tokens of some steps go last."""
BLOCK_OVERHEAD_BYTES = 90
"""Bytes of the marks and the key of a block, at most."""
PAGE_OVERHEAD_BYTES = 2000
"""Bytes of what a page says of itself."""
Blocks = dict[str, str]


@dataclass
class PageContents:
    """What a page holds, and of how much there was."""

    level: PrecisionLevel
    tokens: int = 0
    all_tokens: int = 0
    """Steps of which tokens are recorded."""
    summaries: int = 0
    all_summaries: int = 0
    questions: int = 0
    all_questions: int = 0
    blocks: Blocks = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What page/app.js says at the foot."""
        counts = {name: [getattr(self, name), getattr(self, f"all_{name}")] for name in COUNTED_CONTENTS}
        return {**asdict(self.level), "exact": self.level == PRECISION_LEVELS[0], "counts": counts}

    def count_bytes(self) -> int:
        return sum(len(text) + BLOCK_OVERHEAD_BYTES for text in self.blocks.values())


COUNTED_CONTENTS = ("tokens", "summaries", "questions")


def write_page(runs: Sequence[RunReader], output: Path, limit: int = MAX_PAGE_BYTES) -> str:
    """Write the page. Returns what it left out, a sentence; empty where it holds everything."""
    room = limit - len(build_inspect_page({})[0].encode()) - PAGE_OVERHEAD_BYTES
    made = PageContents(PRECISION_LEVELS[-1])
    overviews = [run.answer("overview") for run in runs]
    for i, run in enumerate(runs):
        made.blocks |= {f"{i}/overview": encode_block(overviews[i]), f"{i}/why": encode_block(run.answer("why"))}
    asked = add_summaries(made, runs, SUMMARY_SHARE * room)
    foreseen = estimate_question_bytes(asked, QUESTION_SHARE * room)
    kept = add_tokens(made, runs, room - foreseen)
    add_questions(made, asked, foreseen, kept)
    for i, overview in enumerate(overviews):
        here = [step for step in overview["recorded"] if f"{i}/tokens/{step}" in made.blocks]
        made.blocks[f"{i}/overview"] = encode_block({**overview, "recorded": here})
    html, _ = build_inspect_page({**made.blocks, "packed": encode_block(made.describe())})
    output.write_text(html, encoding="utf-8")
    return describe_omissions(made)


def encode_block(answer: Mapping[str, Any] | Sequence[Any] | bytes) -> str:
    """Bytes, or JSON, deflated as DecompressionStream("deflate") reads it, in base64."""
    content = answer if isinstance(answer, bytes) else json.dumps(answer, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(content, 9)).decode()


def describe_omissions(contents: PageContents) -> str:
    """What a page does not hold, as its foot says it."""
    least = contents.level.least
    said = (
        [format_sentence("packed.all") if least > 1 else format_sentence("packed.below", least=least)] if least else []
    )
    for name in COUNTED_CONTENTS:
        count, whole = getattr(contents, name), getattr(contents, f"all_{name}")
        said += [format_sentence(f"packed.{name}", n=whole - count, all=whole)] if count < whole else []
    return format_sentence("packed", what=format_sentence("packed.join").join(said)) if said else ""


# ---------------------------------------------------------------- the groups of steps, and questions


def add_summaries(contents: PageContents, runs: Sequence[RunReader], budget_bytes: float) -> QuestionHistory:
    """Add what the groups of steps were. Returns the questions of the first run, which a page follows."""
    steps = sorted({step for run in runs for step in run.list_steps()})
    sample = sample_evenly(steps, SAMPLE_SIZE)
    size = sum(
        len(encode_block(shorten_summary(each))) for run in runs for each in run.iterate_summaries(sample)
    ) / max(1, len(sample))
    # By themselves they pack less well than a page of them together.
    chosen = set(sample_evenly(steps, max(1, int(budget_bytes / (size or 1)))))
    contents.summaries, contents.all_summaries = len(chosen), len(steps)
    asked = [QuestionHistory(partial(pack_summary_pages, contents.blocks, i, run)) for i, run in enumerate(runs)]
    for questions, run in zip(asked, runs, strict=True):
        questions.update(run.fingerprint_steps([step for step in run.list_steps() if step in chosen]))
    return asked[0]


def pack_summary_pages(blocks: Blocks, i: int, run: RunReader, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The summaries of steps, which are packed by pages on the way."""
    for number, page_of in groupby(run.iterate_summaries(steps), key=lambda each: each["step"] // STEPS_PER_PAGE):
        together = list(page_of)
        blocks[f"{i}/summaries/{number}"] = encode_block([shorten_summary(each) for each in together])
        yield from together


def shorten_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with the beginning of each question, and numbers as they are shown."""
    groups = [
        {
            **group,
            "prompt": group["prompt"][:MAX_LISTED_CHARS],
            **{name: None if group[name] is None else float(f"{group[name]:.4g}") for name in ("gradient", "entropy")},
        }
        for group in summary["groups"]
    ]
    return {**summary, "groups": groups}


def estimate_question_bytes(questions: QuestionHistory, budget_bytes: float) -> float:
    """How many bytes the questions will take, and at most."""
    listed = questions.list_repeated()
    sample = sample_evenly([each["question"] for each in listed], SAMPLE_SIZE)
    of_sample = sum(len(encode_block(questions.trace_question(name, bool))) + BLOCK_OVERHEAD_BYTES for name in sample)
    return min(
        budget_bytes, (of_sample / max(1, len(sample)) * len(listed) + len(encode_block(listed))) / PLANNED_SHARE
    )


def add_questions(
    contents: PageContents, questions: QuestionHistory, budget_bytes: float, packed_steps: Container[int]
) -> None:
    """Add the questions, and the curves of those that were asked most often, as many as have room."""
    listed = questions.list_repeated()
    contents.blocks["0/questions"], contents.all_questions = encode_block(listed), len(listed)
    budget_bytes -= len(contents.blocks["0/questions"])
    for name in (each["question"] for each in listed):
        text = encode_block(questions.trace_question(name, lambda step: step in packed_steps))
        budget_bytes -= len(text) + BLOCK_OVERHEAD_BYTES
        if budget_bytes < 0:
            return
        contents.blocks[f"0/question/{name}"] = text
        contents.questions += 1


# ---------------------------------------------------------------- tokens


def add_tokens(contents: PageContents, runs: Sequence[RunReader], budget_bytes: float) -> Container[int]:
    """Add the tokens of all steps at the most exact level that has room for them, or of as many as fit at the last one.

    Returns these steps.
    """
    recorded = [(run, run.find_recorded_steps()) for run in runs]
    steps, free = sorted(set.union(*(there for _, there in recorded))), budget_bytes - contents.count_bytes()
    of_step = partial(pack_step_tokens, recorded)
    contents.level, count = choose_precision(of_step, {step: count_file_bytes(recorded, step) for step in steps}, free)
    words, blocks = Vocabulary(), dict[int, Blocks]()
    for step in sample_evenly(steps, count):
        if of := of_step(step, words, contents.level):
            blocks[step] = of
    contents.blocks["words"] = encode_block(list(words.indices))
    free -= len(contents.blocks["words"])
    kept = list(blocks)
    sizes = {step: sum(len(text) + BLOCK_OVERHEAD_BYTES for text in of.values()) for step, of in blocks.items()}
    while len(kept) > 1 and sum(sizes[step] for step in kept) > free:
        kept = sample_evenly(kept, len(kept) - 1 - len(kept) // 50)
    for step in kept:
        contents.blocks |= blocks[step]
    contents.tokens, contents.all_tokens = len(kept), len(steps)
    return set(kept)


def count_file_bytes(runs: Sequence[tuple[RunReader, set[int]]], step: int) -> int:
    """The bytes of a step's files."""
    return sum(
        token_files.get_tokens_path(run.run_dir, step).stat().st_size for run, recorded in runs if step in recorded
    )


def choose_precision(
    pack_step: Callable[[int, Vocabulary, PrecisionLevel], Blocks], file_bytes: Mapping[int, int], budget_bytes: float
) -> tuple[PrecisionLevel, int]:
    """The most exact level at which all steps have room, to judge by some of them, else the last one; and how many
    steps have room at that.

    files: of each step the bytes of its files, as whose share those of a page are foreseen.
    """
    steps = list(file_bytes)
    sample, fit = sample_evenly(steps, SAMPLE_SIZE), len(steps)
    share = sum(file_bytes[step] for step in sample) / (sum(file_bytes.values()) or 1)
    for level in PRECISION_LEVELS:
        words = Vocabulary()
        size = sum(
            len(text) + BLOCK_OVERHEAD_BYTES for step in sample for text in pack_step(step, words, level).values()
        )
        left = PLANNED_SHARE * budget_bytes - len(encode_block(list(words.indices)))
        fit = int(left * len(steps) * share / size) if size else len(steps)
        if fit >= len(steps):
            return level, len(steps)
    return PRECISION_LEVELS[-1], max(1, fit)


def pack_step_tokens(
    runs: Sequence[tuple[RunReader, set[int]]], step: int, vocabulary: Vocabulary, level: PrecisionLevel
) -> Blocks:
    """The tokens of a step in each run that recorded it; a damaged file has none."""
    found = {}
    for i, (run, recorded) in enumerate(runs):
        with suppress(UserError):  # the summary of the step says so
            if step in recorded:
                found[f"{i}/tokens/{step}"] = encode_block(
                    encode_step(token_files.read_tokens(run.run_dir, step), vocabulary, level)
                )
    return found
