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
from pathlib import Path
from typing import Any

from pellucid.look.assembly import page
from pellucid.look.columns import Level, Words, step_bytes
from pellucid.look.questions import LONGEST_LISTED, Questions, spread
from pellucid.look.reading import PAGE, Run
from pellucid.look.words import say
from pellucid.reporting import tokens
from pellucid.types import UserError

LIMIT = 15_000_000
"""Bytes of a page that can still be sent to somebody."""
SAMPLE = 12
"""Steps, and questions, by which it is foreseen how large all of them will be."""
SPARE = 0.97
"""The share of the room that is planned with: steps differ."""
SUMMARIES, QUESTIONS = 0.25, 0.1
"""The shares of the room that the groups of steps without tokens, and the curves of questions, may take."""
LEVELS = (
    Level(4, 1e-4, 3, 0.0),
    Level(3, 1e-3, 2, 0.0),
    Level(3, 1e-3, 2, 0.01),
    Level(3, 1e-3, 2, 0.05),
    Level(3, 1e-3, 2, 0.2),
    Level(3, 1e-3, 2, 2.0),
)
"""In the order in which they are tried: digits that nobody reads go first, then alternatives, those of small
probability before others. The tokens of some steps go last."""
MARKS = 90
"""Bytes of the marks and the key of a block, at most."""
OVERHEAD = 2000
"""Bytes of what a page says of itself."""
Blocks = dict[str, str]


@dataclass
class Packed:
    """What a page holds, and of how much there was."""

    level: Level
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
        counts = {name: [getattr(self, name), getattr(self, f"all_{name}")] for name in COUNTED}
        return {**asdict(self.level), "exact": self.level == LEVELS[0], "counts": counts}

    def count_bytes(self) -> int:
        return sum(len(text) + MARKS for text in self.blocks.values())


COUNTED = ("tokens", "summaries", "questions")


def write(runs: Sequence[Run], output: Path, limit: int = LIMIT) -> str:
    """Write the page. Returns what it left out, a sentence; empty where it holds everything."""
    room = limit - len(page({})[0].encode()) - OVERHEAD
    made = Packed(LEVELS[-1])
    overviews = [run.answer("overview") for run in runs]
    for i, run in enumerate(runs):
        made.blocks |= {f"{i}/overview": packed(overviews[i]), f"{i}/why": packed(run.answer("why"))}
    asked = add_summaries(made, runs, SUMMARIES * room)
    foreseen = foreseen_questions(asked, QUESTIONS * room)
    kept = add_tokens(made, runs, room - foreseen)
    add_questions(made, asked, foreseen, kept)
    for i, overview in enumerate(overviews):
        here = [step for step in overview["recorded"] if f"{i}/tokens/{step}" in made.blocks]
        made.blocks[f"{i}/overview"] = packed({**overview, "recorded": here})
    html, _ = page({**made.blocks, "packed": packed(made.describe())})
    output.write_text(html, encoding="utf-8")
    return left_out(made)


def packed(answer: Mapping[str, Any] | Sequence[Any] | bytes) -> str:
    """Bytes, or JSON, deflated as DecompressionStream("deflate") reads it, in base64."""
    content = answer if isinstance(answer, bytes) else json.dumps(answer, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(content, 9)).decode()


def left_out(contents: Packed) -> str:
    """What a page does not hold, as its foot says it."""
    least = contents.level.least
    said = [say("packed.all") if least > 1 else say("packed.below", least=least)] if least else []
    for name in COUNTED:
        count, whole = getattr(contents, name), getattr(contents, f"all_{name}")
        said += [say(f"packed.{name}", n=whole - count, all=whole)] if count < whole else []
    return say("packed", what=say("packed.join").join(said)) if said else ""


# ---------------------------------------------------------------- the groups of steps, and questions


def add_summaries(contents: Packed, runs: Sequence[Run], budget_bytes: float) -> Questions:
    """Add what the groups of steps were. Returns the questions of the first run, which a page follows."""
    steps = sorted({step for run in runs for step in run.list_steps()})
    sample = spread(steps, SAMPLE)
    size = sum(len(packed(brief(each))) for run in runs for each in run.iterate_summaries(sample)) / max(1, len(sample))
    # By themselves they pack less well than a page of them together.
    chosen = set(spread(steps, max(1, int(budget_bytes / (size or 1)))))
    contents.summaries, contents.all_summaries = len(chosen), len(steps)
    asked = [Questions(partial(paged, contents.blocks, i, run)) for i, run in enumerate(runs)]
    for questions, run in zip(asked, runs, strict=True):
        questions.update(run.fingerprint_steps([step for step in run.list_steps() if step in chosen]))
    return asked[0]


def paged(blocks: Blocks, i: int, run: Run, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The summaries of steps, which are packed by pages on the way."""
    for number, page_of in groupby(run.iterate_summaries(steps), key=lambda each: each["step"] // PAGE):
        together = list(page_of)
        blocks[f"{i}/summaries/{number}"] = packed([brief(each) for each in together])
        yield from together


def brief(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with the beginning of each question, and numbers as they are shown."""
    groups = [
        {
            **group,
            "prompt": group["prompt"][:LONGEST_LISTED],
            **{name: None if group[name] is None else float(f"{group[name]:.4g}") for name in ("gradient", "entropy")},
        }
        for group in summary["groups"]
    ]
    return {**summary, "groups": groups}


def foreseen_questions(questions: Questions, budget_bytes: float) -> float:
    """How many bytes the questions will take, and at most."""
    listed = questions.list_repeated()
    sample = spread([each["question"] for each in listed], SAMPLE)
    of_sample = sum(len(packed(questions.trace_question(name, bool))) + MARKS for name in sample)
    return min(budget_bytes, (of_sample / max(1, len(sample)) * len(listed) + len(packed(listed))) / SPARE)


def add_questions(contents: Packed, questions: Questions, budget_bytes: float, packed_steps: Container[int]) -> None:
    """Add the questions, and the curves of those that were asked most often, as many as have room."""
    listed = questions.list_repeated()
    contents.blocks["0/questions"], contents.all_questions = packed(listed), len(listed)
    budget_bytes -= len(contents.blocks["0/questions"])
    for name in (each["question"] for each in listed):
        text = packed(questions.trace_question(name, lambda step: step in packed_steps))
        budget_bytes -= len(text) + MARKS
        if budget_bytes < 0:
            return
        contents.blocks[f"0/question/{name}"] = text
        contents.questions += 1


# ---------------------------------------------------------------- tokens


def add_tokens(contents: Packed, runs: Sequence[Run], budget_bytes: float) -> Container[int]:
    """Add the tokens of all steps at the most exact level that has room for them, or of as many as fit at the last one.

    Returns these steps.
    """
    recorded = [(run, run.find_recorded_steps()) for run in runs]
    steps, free = sorted(set.union(*(there for _, there in recorded))), budget_bytes - contents.count_bytes()
    of_step = partial(of_runs, recorded)
    contents.level, count = chosen(of_step, {step: of_files(recorded, step) for step in steps}, free)
    words, blocks = Words(), dict[int, Blocks]()
    for step in spread(steps, count):
        if of := of_step(step, words, contents.level):
            blocks[step] = of
    contents.blocks["words"] = packed(list(words.indices))
    free -= len(contents.blocks["words"])
    kept = list(blocks)
    sizes = {step: sum(len(text) + MARKS for text in of.values()) for step, of in blocks.items()}
    while len(kept) > 1 and sum(sizes[step] for step in kept) > free:
        kept = spread(kept, len(kept) - 1 - len(kept) // 50)
    for step in kept:
        contents.blocks |= blocks[step]
    contents.tokens, contents.all_tokens = len(kept), len(steps)
    return set(kept)


def of_files(runs: Sequence[tuple[Run, set[int]]], step: int) -> int:
    """The bytes of a step's files."""
    return sum(tokens.path_of(run.run_dir, step).stat().st_size for run, recorded in runs if step in recorded)


def chosen(
    pack_step: Callable[[int, Words, Level], Blocks], file_bytes: Mapping[int, int], budget_bytes: float
) -> tuple[Level, int]:
    """The most exact level at which all steps have room, to judge by some of them, else the last one; and how many
    steps have room at that.

    files: of each step the bytes of its files, as whose share those of a page are foreseen.
    """
    steps = list(file_bytes)
    sample, fit = spread(steps, SAMPLE), len(steps)
    share = sum(file_bytes[step] for step in sample) / (sum(file_bytes.values()) or 1)
    for level in LEVELS:
        words = Words()
        size = sum(len(text) + MARKS for step in sample for text in pack_step(step, words, level).values())
        left = SPARE * budget_bytes - len(packed(list(words.indices)))
        fit = int(left * len(steps) * share / size) if size else len(steps)
        if fit >= len(steps):
            return level, len(steps)
    return LEVELS[-1], max(1, fit)


def of_runs(runs: Sequence[tuple[Run, set[int]]], step: int, vocabulary: Words, level: Level) -> Blocks:
    """The tokens of a step in each run that recorded it; a damaged file has none."""
    found = {}
    for i, (run, recorded) in enumerate(runs):
        with suppress(UserError):  # the summary of the step says so
            if step in recorded:
                found[f"{i}/tokens/{step}"] = packed(step_bytes(tokens.read(run.run_dir, step), vocabulary, level))
    return found
