"""`pellucid compare`: summarize the runs of each variant and pair them with the baseline's, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import rich
import rich.box
from rich.markup import escape
from rich.table import Table

from pellucid.reporting.report import total
from pellucid.reporting.run_folder import Record
from pellucid.study.paired import RESAMPLES, conclusion, differences, interval, wrong_at_worst
from pellucid.study.runs import Run, Runs
from pellucid.types import Estimate

MANY_SEEDS = 10
"""With this many seeds an interval needs no warning."""
DEAD = ("groups/dead_all_right", "groups/dead_all_wrong")
OWN_METRICS = ("effect/", "curriculum/", "prefix/", "groups/drawn")
"""Beginnings of the names of metrics that tell whether a variant did anything at all."""


@dataclass(frozen=True)
class Summary:
    """A variant in numbers, over its finished runs."""

    variant: str
    seeds: tuple[int, ...]
    greedy: Estimate | None = None
    """Accuracy with its interval over seeds and questions; with one seed, over questions."""
    k: int = 0
    mean_at_k: float | None = None
    difference: Estimate | None = None
    """The difference from the baseline over paired questions, with its interval."""
    pairs: Mapping[int, float] = field(default_factory=dict)
    """The difference of each seed in which the baseline answered the same questions."""
    unpaired: tuple[str, ...] = ()
    """Why seeds are not paired with the baseline, seed by seed."""
    conclusion: str = ""
    """above, below or cannot tell; empty for the baseline and where nothing is paired."""
    tokens: Mapping[int, float] = field(default_factory=dict)
    """Sampled tokens, by seed."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds spent in steps, by seed."""
    dead: float | None = None
    """The share of dead groups among those drawn, the mean over the steps of all runs."""
    own: Mapping[str, float] | None = None
    """Its metrics that OWN_METRICS names, each the mean over the steps of all runs."""


def summaries(runs: Runs) -> list[Summary]:
    """Return the summaries of all variants, the baseline first."""
    baseline = runs.finished[runs.baseline]
    return [
        summary(variant, of_seed, {} if variant == runs.baseline else baseline)
        for variant, of_seed in runs.finished.items()
    ]


def summary(variant: str, runs: Mapping[int, Run], baseline: Mapping[int, Run]) -> Summary:
    if not runs:
        return Summary(variant, ())
    reasons = {seed: unpaired(run, baseline.get(seed)) for seed, run in runs.items()}
    pairs = {
        seed: differences(runs[seed].last["right"], baseline[seed].last["right"])
        for seed, reason in reasons.items()
        if baseline and not reason
    }
    shared = same_questions([runs[seed].last for seed in pairs])
    difference = interval(list(pairs.values()), shared) if pairs else None
    lasts, steps = [run.last for run in runs.values()], [row for run in runs.values() for row in run.metrics]
    dead = [share for row in steps if (share := dead_share(row)) is not None]
    means = [last["mean@k"]["value"] for last in lasts if last.get("mean@k")]
    return Summary(
        variant,
        tuple(runs),
        greedy=accuracy(lasts),
        k=lasts[0]["k"],
        mean_at_k=fmean(means) if len(means) == len(lasts) else None,
        difference=difference,
        pairs={seed: fmean(values) for seed, values in pairs.items()},
        unpaired=tuple(f"seed {seed}: {reason}" for seed, reason in reasons.items() if baseline and reason),
        conclusion=conclusion(difference) if difference else "",
        tokens={seed: total(run.metrics, "tokens") for seed, run in runs.items()},
        seconds={seed: total(run.metrics, "time/step") for seed, run in runs.items()},
        dead=fmean(dead) if dead else None,
        own=own_metrics(steps),
    )


def unpaired(run: Run, baseline: Run | None) -> str:
    """Return why two runs cannot be compared question by question; empty where they can."""
    if not baseline:
        return "the baseline has no finished run"
    if not run.last.get("right") or not baseline.last.get("right"):
        return "evals.jsonl does not say which answers were right"
    same = run.last["questions"] == baseline.last["questions"]
    return "" if same else "its held-out questions are not the baseline's"


def accuracy(lasts: Sequence[Record]) -> Estimate | None:
    """Return the greedy accuracy with its interval.

    None where one of several runs has not kept which answers were right: a mean without an interval would mislead.
    """
    if len(lasts) == 1:
        return Estimate(**lasts[0]["greedy"])
    rights = [last.get("right") for last in lasts]
    return interval([right for right in rights if right], same_questions(lasts)) if all(rights) else None


def same_questions(lasts: Sequence[Record]) -> bool:
    return len({last.get("questions") for last in lasts}) == 1


def dead_share(step: Record) -> float | None:
    """Return the share of dead groups among all that were drawn, with those that dynamic sampling left out.

    None where the step has no such metric.
    """
    if not all(name in step for name in DEAD):
        return None
    return step.get("groups/drawn_dead", sum(step[name] for name in DEAD))


def own_metrics(rows: Sequence[Record]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row if name.startswith(OWN_METRICS)})
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: fmean(of_steps) for name, of_steps in values.items() if of_steps}


def numbers(runs: Runs, rows: Sequence[Summary]) -> dict[str, Any]:
    """Return all numbers of the page as JSON values, for other programs."""
    return {
        "baseline": runs.baseline,
        "comparisons": sum(bool(row.difference) for row in rows),
        "resamples": RESAMPLES,
        "variants": {row.variant: asdict(row) for row in rows},
        "unfinished": [run.name for run in runs.unfinished],
        "missing": [f"{variant} seed {seed}" for variant, seed in runs.missing],
        "commands": {run.name: run.command for run in [*runs.all, *runs.unfinished]},
    }


def write_numbers(path: Path, runs: Runs, rows: Sequence[Summary]) -> None:
    path.write_text(json.dumps(numbers(runs, rows), indent=2) + "\n", encoding="utf-8")


def caveats(rows: Sequence[Summary]) -> list[str]:
    """Return a caveat where a conclusion rests on few pairs of runs."""
    pairs = min((len(row.pairs) for row in rows if row.pairs), default=MANY_SEEDS)
    if pairs == 1:
        return ["One seed to a comparison: the interval is over questions alone, and says nothing of another run."]
    if pairs < MANY_SEEDS:
        return [
            f"{pairs} seeds to a comparison make a coarse interval: where runs differ far more from seed to seed than "
            f"their questions account for, one comparison of equals in {wrong_at_worst(pairs)} looks apart."
        ]
    return []


# ---------------------------------------------------------------- on the screen


def print_table(runs: Runs, rows: Sequence[Summary]) -> None:
    title = f"held-out greedy accuracy and its difference from {escape(runs.baseline)}, with 95% intervals"
    table = Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("variant", overflow="fold")
    for name in ("runs", "accuracy", "difference", "conclusion"):
        table.add_column(name, justify="left" if name == "conclusion" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in cells(row)))
    rich.print(table)
    for line in caveats(rows):
        print(line)
    for row in rows:
        for reason in row.unpaired:
            print(f"not paired: {row.variant} {reason}")
    for run in runs.unfinished:
        print(f"unfinished, left out: {run.folder}")
    for variant, seed in runs.missing:
        print(f"missing: {variant} seed {seed}")


def cells(row: Summary) -> list[str]:
    if not row.seeds:
        return [row.variant, "0", "", "", ""]
    return [
        row.variant,
        str(len(row.seeds)),
        points(row.greedy),
        points(row.difference, sign="+"),
        row.conclusion,
    ]


def points(estimate: Estimate | None, sign: str = "") -> str:
    """Return an estimate in percent, as "VALUE [LOW, HIGH]"."""
    if estimate is None:
        return "-"
    value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def times(values: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    """Return the mean over seeds as a multiple of the baseline's."""
    return f"{fmean(values.values()) / fmean(baseline.values()):.2f}x" if any(baseline.values()) else "-"
