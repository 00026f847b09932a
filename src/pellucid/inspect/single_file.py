"""Writes runs to one HTML page that needs no server. It holds the server's answers, each deflated and in base64.

Steps that will not fit are not read: the sizes of a few steps tell how many will. If there are more, the page holds
evenly spaced ones, among them the first and the last.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from pellucid.inspect.group_history import QuestionHistory, sample_evenly
from pellucid.inspect.page import build_inspect_page
from pellucid.inspect.run_reader import STEPS_PER_PAGE, RunReader
from pellucid.inspect.sentences import format_sentence
from pellucid.reporting import token_files
from pellucid.types import UserError

MAX_PAGE_BYTES = 15_000_000
"""A page of this size can still be sent by mail."""
SAMPLE_SIZE = 12
"""The number of steps whose sizes predict the size of all."""
_PLANNED_SHARE = 0.97
"""The share of the available bytes to fill. The rest is a margin, as steps differ in size."""
_SUMMARY_SHARE, _QUESTION_SHARE = 0.25, 0.1
"""The largest shares of the available bytes for the groups of steps, and for the curves of questions."""
BLOCK_OVERHEAD_BYTES = 90
"""The most bytes of the HTML around a block."""
_PAGE_OVERHEAD_BYTES = 2000
"""Bytes of a page's note on its own contents."""
Blocks = dict[str, str]


class _PageContents:
    """A page's contents: its blocks by key, and for each kind, the number on the page and the total."""

    def __init__(self) -> None:
        self.blocks: Blocks = {}
        self.counts = {"tokens": (0, 0), "summaries": (0, 0), "questions": (0, 0)}


def write_page(runs: Sequence[RunReader], output: Path, limit: int = MAX_PAGE_BYTES) -> str:
    """Write the page. Return a sentence on what it leaves out, empty if that is nothing."""
    available = limit - len(build_inspect_page({})[0].encode()) - _PAGE_OVERHEAD_BYTES
    contents = _PageContents()
    overviews = [run.answer("overview") for run in runs]
    for i, run in enumerate(runs):
        contents.blocks |= {f"{i}/overview": _encode_block(overviews[i]), f"{i}/why": _encode_block(run.answer("why"))}
    questions = _add_summaries(contents, runs, _SUMMARY_SHARE * available)
    names = _add_questions(contents, questions, _QUESTION_SHARE * available)
    packed_steps = add_tokens(contents, runs, available - _count_bytes(contents.blocks))
    for name in names:  # again, since its best answers are those of the steps that are packed
        contents.blocks[f"0/question/{name}"] = _encode_block(questions.trace_question(name, packed_steps))
    for i, overview in enumerate(overviews):
        recorded = [step for step in overview["recorded"] if f"{i}/tokens/{step}" in contents.blocks]
        contents.blocks[f"{i}/overview"] = _encode_block({**overview, "recorded": recorded})
    html, _ = build_inspect_page({**contents.blocks, "packed": _encode_block({"counts": contents.counts})})
    output.write_text(html, encoding="utf-8")
    return _describe_omissions(contents)


def _encode_block(answer: Any) -> str:
    """Return an answer as JSON, deflated as DecompressionStream("deflate") reads it, in base64."""
    return base64.b64encode(zlib.compress(json.dumps(answer, separators=(",", ":")).encode(), 9)).decode()


def _count_bytes(blocks: Blocks) -> int:
    return sum(len(text) + BLOCK_OVERHEAD_BYTES for text in blocks.values())


def _describe_omissions(contents: _PageContents) -> str:
    """Return what a page leaves out, as page/app.js writes it into the footer."""
    parts = [
        format_sentence(f"packed.{name}", n=total - count, all=total)
        for name, (count, total) in contents.counts.items()
        if count < total
    ]
    return format_sentence("packed", what=format_sentence("packed.join").join(parts)) if parts else ""


# ---------------------------------------------------------------- summaries of steps, and questions


def _add_summaries(contents: _PageContents, runs: Sequence[RunReader], budget_bytes: float) -> QuestionHistory:
    """Add the summaries of steps. Return the questions of the first run; a page traces only these."""
    steps = sorted({step for run in runs for step in run.list_steps()})
    sample = sample_evenly(steps, SAMPLE_SIZE)
    sample_bytes = sum(len(_encode_block(summary)) for run in runs for summary in run.iterate_summaries(sample))
    # A single summary is compressed less well than a page of them, so this estimate leaves a margin.
    step_bytes = sample_bytes / max(1, len(sample)) or 1
    chosen = set(sample_evenly(steps, max(1, int(budget_bytes / step_bytes))))
    contents.counts["summaries"] = len(chosen), len(steps)
    histories = [QuestionHistory(partial(_pack_summary_pages, contents.blocks, i, run)) for i, run in enumerate(runs)]
    for history, run in zip(histories, runs, strict=True):
        history.update(run.fingerprint_steps([step for step in run.list_steps() if step in chosen]))
    return histories[0]


def _pack_summary_pages(blocks: Blocks, i: int, run: RunReader, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the summaries of steps, and add them to `blocks` page by page."""
    for number, summaries in groupby(run.iterate_summaries(steps), key=lambda each: each["step"] // STEPS_PER_PAGE):
        page = list(summaries)
        blocks[f"{i}/summaries/{number}"] = _encode_block(page)
        yield from page


def _add_questions(contents: _PageContents, questions: QuestionHistory, budget_bytes: float) -> list[str]:
    """Add the list of questions, and the curves of the most asked, as many as fit. Return their names."""
    listed, names = questions.list_repeated(), []
    contents.blocks["0/questions"] = _encode_block(listed)
    budget_bytes -= len(contents.blocks["0/questions"])
    for name in (question["question"] for question in listed):
        text = _encode_block(questions.trace_question(name))
        budget_bytes -= len(text) + BLOCK_OVERHEAD_BYTES
        if budget_bytes < 0:
            break
        contents.blocks[f"0/question/{name}"] = text
        names.append(name)
    contents.counts["questions"] = len(names), len(listed)
    return names


# ---------------------------------------------------------------- tokens


def add_tokens(contents: _PageContents, runs: Sequence[RunReader], budget_bytes: float) -> set[int]:
    """Add the tokens of all steps, or of as many as fit at even distances. Return these steps."""
    recorded = [(run, set(token_files.list_recorded_steps(run.run_dir))) for run in runs]
    file_bytes = {
        step: count_file_bytes(recorded, step) for step in sorted(set.union(*(steps for _, steps in recorded)))
    }
    steps = sample_evenly(list(file_bytes), estimate_step_count(recorded, file_bytes, budget_bytes))
    blocks = {step: packed for step in steps if (packed := pack_step_tokens(recorded, step))}
    step_bytes = {step: _count_bytes(packed) for step, packed in blocks.items()}
    kept = list(blocks)
    while len(kept) > 1 and sum(step_bytes[step] for step in kept) > budget_bytes:
        kept = sample_evenly(kept, len(kept) - 1 - len(kept) // 50)
    for step in kept:
        contents.blocks |= blocks[step]
    contents.counts["tokens"] = len(kept), len(file_bytes)
    return set(kept)


def count_file_bytes(runs: Sequence[tuple[RunReader, set[int]]], step: int) -> int:
    """Return the bytes of a step's files."""
    return sum(
        token_files.get_tokens_path(run.run_dir, step).stat().st_size for run, recorded in runs if step in recorded
    )


def estimate_step_count(
    runs: Sequence[tuple[RunReader, set[int]]], file_bytes: Mapping[int, int], budget_bytes: float
) -> int:
    """Return how many steps fit, at least 1. A few are packed, and compared with the sizes of their files."""
    sample = sample_evenly(list(file_bytes), SAMPLE_SIZE)
    sample_bytes = sum(_count_bytes(pack_step_tokens(runs, step)) for step in sample)
    share = sum(file_bytes[step] for step in sample) / (sum(file_bytes.values()) or 1)
    all_bytes = sample_bytes / share if share else 0.0
    if all_bytes <= _PLANNED_SHARE * budget_bytes:
        return len(file_bytes)
    return max(1, int(_PLANNED_SHARE * budget_bytes / all_bytes * len(file_bytes)))


def pack_step_tokens(runs: Sequence[tuple[RunReader, set[int]]], step: int) -> Blocks:
    """Return the tokens of a step in each run that recorded it; a damaged file has none."""
    packed = {}
    for i, (run, recorded) in enumerate(runs):
        with suppress(UserError):  # the summary of the step names the damage
            if step in recorded:
                packed[f"{i}/tokens/{step}"] = _encode_block(run.answer(f"tokens/{step}"))
    return packed
