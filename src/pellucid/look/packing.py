"""Runs as one page that works from disk: each answer deflated and in base64, so exact as there is room for."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from pellucid.look.assembly import page
from pellucid.look.reading import PAGE, Run
from pellucid.look.steps import for_page
from pellucid.reporting import tokens
from pellucid.reporting.charts import counted

LIMIT = 15_000_000
"""Bytes of a page that can still be sent to somebody."""
SAMPLE = 12
"""Steps of a run by which it is foreseen how large all of them will be."""
SPARE = 0.95
"""The share of the room that is planned with: steps differ."""


@dataclass(frozen=True, slots=True)
class Level:
    """How exact a packed page is."""

    digits: int
    """Significant digits of a number."""
    least: float
    """The smallest probability of an alternative that is kept."""


LEVELS = (Level(4, 0.0), Level(4, 0.001), Level(3, 0.01), Level(3, 0.1), Level(2, 0.1), Level(2, 2.0))
"""In the order in which they are tried: alternatives go first."""


def write(runs: Sequence[Run], output: Path, limit: int = LIMIT) -> str:
    """Write the page. Returns what it left out, a sentence; empty where it holds everything."""
    blocks = {f"{i}/{key}": packed(run.answer(key)) for i, run in enumerate(runs) for key in keys(run)}
    steps = [(i, step) for i, run in enumerate(runs) for step in tokens.steps(run.folder)]
    room = limit - len(page({**blocks, "packed": packed({})})[0].encode()) - 1000
    level, every = chosen(runs, steps, room)
    kept = of_steps(runs, steps[::every], level)
    while sum(map(len, kept.values())) > room and every < len(steps):  # the sample was smaller than the others
        every += 1
        kept = of_steps(runs, steps[::every], level)
    left_out = {"least": level.least, "digits": level.digits, "every": every}
    html, _ = page({**blocks, **kept, "packed": packed(left_out)})
    output.write_text(html, encoding="utf-8")
    return told(level, every, len(steps))


def keys(run: Run) -> Iterator[str]:
    yield from ("overview", "questions", "why")
    yield from (f"summaries/{number}" for number in sorted({step // PAGE for step in run.steps()}))


def chosen(runs: Sequence[Run], steps: Sequence[tuple[int, int]], room: int) -> tuple[Level, int]:
    """The most exact level at which all steps have room, or the least exact with every so many-th step."""
    sample = steps[:: ceil(len(steps) / SAMPLE)]
    size = 0.0
    for level in LEVELS:
        size = sum(map(len, of_steps(runs, sample, level).values())) / len(sample) * len(steps)
        if size <= SPARE * room:
            return level, 1
    return LEVELS[-1], ceil(size / (SPARE * room))


def of_steps(runs: Sequence[Run], steps: Sequence[tuple[int, int]], level: Level) -> dict[str, str]:
    return {
        f"{i}/tokens/{step}": packed(for_page(runs[i].tokens(step), level.digits, level.least)) for i, step in steps
    }


def packed(answer: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON, deflated as DecompressionStream("deflate") reads it, in base64."""
    text = json.dumps(answer, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def told(level: Level, every: int, steps: int) -> str:
    """What a page of this level does not hold."""
    left = [f"alternatives below {level.least:g} in probability"] if 0 < level.least <= 1 else []
    left += ["all alternatives"] if level.least > 1 else []
    left += [f"all but every {every}th of {counted(steps, 'step')}"] if every > 1 else []
    digits = f"; numbers have {level.digits} digits" if level.digits < LEVELS[0].digits else ""
    return f"left out for room: {' and '.join(left)}{digits}" if left else ""
