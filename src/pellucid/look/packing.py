"""Runs as one page that works from disk: each answer deflated and in base64, so exact as there is room for."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


MARKS = 60
"""Bytes of the marks around a block."""
LEVELS = (Level(4, 0.0), Level(4, 0.001), Level(3, 0.01), Level(3, 0.1), Level(2, 0.1), Level(2, 2.0))
"""In the order in which they are tried: alternatives go first."""


def write(runs: Sequence[Run], output: Path, limit: int = LIMIT) -> str:
    """Write the page. Returns what it left out, a sentence; empty where it holds everything."""
    blocks = {f"{i}/{key}": packed(run.answer(key)) for i, run in enumerate(runs) for key in keys(run)}
    steps = [(i, step) for i, run in enumerate(runs) for step in tokens.steps(run.folder)]
    room = limit - len(page({**blocks, "packed": packed({})})[0].encode()) - 1000
    level = chosen(runs, steps, room)
    whole = of_steps(runs, steps, level)
    kept = as_many_as_fit(whole, room)
    html, _ = page({**blocks, **kept, "packed": packed({**asdict(level), "kept": len(kept), "steps": len(steps)})})
    output.write_text(html, encoding="utf-8")
    return told(level, len(kept), len(steps))


def keys(run: Run) -> Iterator[str]:
    yield from ("overview", "questions", "why")
    yield from (f"summaries/{number}" for number in sorted({step // PAGE for step in run.steps()}))


def chosen(runs: Sequence[Run], steps: Sequence[tuple[int, int]], room: int) -> Level:
    """The most exact level at which all steps have room, to judge by some of them; else the least exact."""
    sample = steps[:: ceil(len(steps) / SAMPLE)]
    for level in LEVELS:
        size = sum(map(len, of_steps(runs, sample, level).values())) / len(sample) * len(steps)
        if size <= SPARE * room:
            return level
    return LEVELS[-1]


def as_many_as_fit(blocks: Mapping[str, str], room: int) -> Mapping[str, str]:
    """All blocks, or as many as there is room for at even distances, the first and the last among them."""
    keys, count = list(blocks), len(blocks)
    kept = blocks
    while count > 1 and sum(len(text) + len(key) + MARKS for key, text in kept.items()) > room:
        count -= 1
        places = {round(i * (len(keys) - 1) / max(1, count - 1)) for i in range(count)}
        kept = {keys[place]: blocks[keys[place]] for place in sorted(places)}
    return kept


def of_steps(runs: Sequence[Run], steps: Sequence[tuple[int, int]], level: Level) -> dict[str, str]:
    return {
        f"{i}/tokens/{step}": packed(for_page(runs[i].tokens(step), level.digits, level.least)) for i, step in steps
    }


def packed(answer: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON, deflated as DecompressionStream("deflate") reads it, in base64."""
    text = json.dumps(answer, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def told(level: Level, kept: int, steps: int) -> str:
    """What a page of this level does not hold."""
    left = [f"alternatives below {level.least:g} in probability"] if 0 < level.least <= 1 else []
    left += ["all alternatives"] if level.least > 1 else []
    left += [f"the tokens of {steps - kept} of {counted(steps, 'step')}"] if kept < steps else []
    digits = f"; numbers have {level.digits} digits" if level.digits < LEVELS[0].digits else ""
    return f"left out for room: {' and '.join(left)}{digits}" if left else ""
