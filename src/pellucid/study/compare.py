"""`pellucid compare`: summarize the runs of each variant and pair them with the baseline's, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import rich
import rich.box
from rich.markup import escape
from rich.table import Table

from pellucid.reporting.eval_metrics import (
    HEADLINE_LABELS,
    MIN_INTERVAL_PROMPTS,
    get_zero_variance_share,
    parse_estimate,
)
from pellucid.reporting.loggers import replace_non_finite
from pellucid.reporting.report import sum_metric
from pellucid.reporting.run_files import Record
from pellucid.study.bootstrap import (
    RESAMPLE_COUNT,
    classify_difference,
    compute_false_positive_odds,
    estimate_interval,
)
from pellucid.study.runs import ComparedRun, Comparison
from pellucid.types import Estimate
from pellucid.utils.text import escape_controls

_RELIABLE_SEED_COUNT = 10
"""With this many seeds an interval needs no warning."""
_PER_ANSWER_KEYS = {"greedy": "right", "reward": "rewards"}
"""For each measure, the key of an evaluation whose list has one value per answer."""
_VARIANT_METRIC_PREFIXES = ("effect/", "curriculum/", "prefix/", "groups/drawn")
"""Prefixes of the names of metrics that show whether a variant did anything at all."""


@dataclass(frozen=True)
class VariantSummary:
    """The numbers of a variant, over its finished runs."""

    variant: str
    seeds: tuple[int, ...]
    greedy: Estimate | None = None
    """Accuracy with its interval over seeds and questions; with one seed, over questions."""
    reward: Estimate | None = None
    """The mean reward of greedy answers, likewise."""
    measure: str = "greedy"
    """The measure that is compared with the baseline: `greedy` or `reward`."""
    questions: int = 0
    """The number of questions of the run that had the fewest."""
    k: int = 0
    mean_at_k: float | None = None
    difference: Estimate | None = None
    """The difference from the baseline over paired questions, with its interval."""
    pairs: Mapping[int, float] = field(default_factory=dict)
    """The difference for each seed with which the baseline answered the same questions."""
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
    """Its metrics with a prefix in _VARIANT_METRIC_PREFIXES, each the mean over the steps of all runs."""

    @property
    def compared_estimate(self) -> Estimate | None:
        return self.greedy if self.measure == "greedy" else self.reward


def summarize_variants(comparison: Comparison) -> list[VariantSummary]:
    """Return the summaries of all variants, the baseline first."""
    return [_summarize_variant(variant, comparison) for variant in comparison.finished]


def _summarize_variant(variant: str, comparison: Comparison) -> VariantSummary:
    runs, baseline = comparison.finished[variant], comparison.finished[comparison.baseline]
    if not runs:
        return VariantSummary(variant, ())
    pairs, unpaired = dict[int, list[float]](), list[str]()
    for seed, run in runs.items() if variant != comparison.baseline else ():
        differences = _pair_answers(run, baseline.get(seed), comparison.measure)
        if isinstance(differences, str):
            unpaired.append(f"seed {seed}: {differences}")
        else:
            pairs[seed] = differences
    difference = (
        _estimate_over_seeds(list(pairs.values()), [runs[seed].last_evaluation for seed in pairs]) if pairs else None
    )
    evaluations = [run.last_evaluation for run in runs.values()]
    steps = [row for run in runs.values() for row in run.metrics]
    dead = [share for row in steps if (share := get_drawn_dead_share(row)) is not None]
    means = [last["mean@k"]["value"] for last in evaluations if last.get("mean@k")]
    return VariantSummary(
        variant,
        tuple(runs),
        greedy=_estimate_measure(evaluations, "greedy"),
        reward=_estimate_measure(evaluations, "reward"),
        measure=comparison.measure,
        questions=min(last["n"] for last in evaluations),
        k=evaluations[0]["k"],
        mean_at_k=fmean(means) if len(means) == len(evaluations) else None,
        difference=difference,
        pairs={seed: fmean(values) for seed, values in pairs.items()},
        unpaired=tuple(unpaired),
        conclusion=classify_difference(difference) if difference else "",
        tokens={seed: sum_metric(run.metrics, "tokens") for seed, run in runs.items()},
        seconds={seed: sum_metric(run.metrics, "time/step") for seed, run in runs.items()},
        dead=fmean(dead) if dead else None,
        own=_average_variant_metrics(steps),
    )


def _pair_answers(run: ComparedRun, baseline: ComparedRun | None, measure: str) -> list[float] | str:
    """Return the differences question by question, where neither reward failed, or why there are none."""
    if not baseline:
        return "the baseline has no finished run"
    ours, theirs = (each.last_evaluation.get(_PER_ANSWER_KEYS[measure]) for each in (run, baseline))
    if not ours or not theirs:
        what = "which answers were right" if measure == "greedy" else "the reward of each answer"
        return f"evals.jsonl does not say {what}"
    if run.last_evaluation["questions"] != baseline.last_evaluation["questions"]:
        return "its held-out questions are not the baseline's"
    graded = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return [float(a - b) for a, b in graded] or "no question was graded in both"


def _estimate_measure(evaluations: Sequence[Record], name: str) -> Estimate | None:
    """Return greedy accuracy, or the reward of greedy answers, with its interval.

    None if one of several runs has not recorded it answer by answer, since a mean without an interval would mislead.
    """
    if len(evaluations) == 1:
        return parse_estimate(evaluations[0][name]) if evaluations[0].get(name) else None
    tables = [[x for x in last.get(_PER_ANSWER_KEYS[name]) or () if x is not None] for last in evaluations]
    return _estimate_over_seeds(tables, evaluations) if all(tables) else None


def _estimate_over_seeds(table: Sequence[Sequence[float]], evaluations: Sequence[Record]) -> Estimate:
    """Return the mean of a table with a row for each seed, with its interval.

    If rewards failed, rows are shorter, and a column is no longer one question.
    """
    is_complete = all(len(row) == len(last.get("right") or row) for row, last in zip(table, evaluations, strict=True))
    return estimate_interval(table, is_complete and len({last.get("questions") for last in evaluations}) == 1)


def get_drawn_dead_share(step: Record) -> float | None:
    """Return the share of zero-variance groups among all sampled groups, including those that dynamic sampling dropped.

    None if the step has no such metric.
    """
    dead = get_zero_variance_share(step)
    return None if dead is None else step.get("groups/drawn_dead", dead)


def _average_variant_metrics(rows: Sequence[Record]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row if name.startswith(_VARIANT_METRIC_PREFIXES)})
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: fmean(of_steps) for name, of_steps in values.items() if of_steps}


def write_numbers(path: Path, comparison: Comparison, rows: Sequence[VariantSummary]) -> None:
    """Write all numbers of the page as JSON, for other programs."""
    numbers = {
        "baseline": comparison.baseline,
        "measure": comparison.measure,
        "comparisons": sum(bool(row.difference) for row in rows),
        "resamples": RESAMPLE_COUNT,
        "variants": {row.variant: asdict(row) for row in rows},
        "unfinished": [run.name for run in comparison.unfinished],
        "missing": comparison.missing,
        "commands": {run.name: run.command for run in [*comparison.finished_runs, *comparison.unfinished]},
    }
    path.write_text(json.dumps(replace_non_finite(numbers), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def list_notes(comparison: Comparison, rows: Sequence[VariantSummary]) -> list[str]:
    """Return notes on the table: which conclusions have little evidence, and which runs are left out."""
    questions = min((row.questions for row in rows if row.seeds), default=MIN_INTERVAL_PROMPTS)
    pairs = min((len(row.pairs) for row in rows if row.pairs), default=_RELIABLE_SEED_COUNT)
    notes = list[str]()
    if questions < MIN_INTERVAL_PROMPTS:
        notes.append(
            f"{questions} held-out questions are too few for an interval: the intervals here may be far too narrow."
        )
    if pairs == 1:
        notes.append("One seed per comparison: the interval covers questions only, and says nothing about other runs.")
    elif pairs < _RELIABLE_SEED_COUNT:
        notes.append(
            f"{pairs} seeds per comparison give a coarse interval: if runs differ far more from seed to seed than "
            f"their questions explain, one in {compute_false_positive_odds(pairs)} comparisons of equal variants shows"
            " a difference."
        )
    return [
        *notes,
        *(f"not paired: {row.variant} {reason}" for row in rows for reason in row.unpaired),
        *(f"unfinished, left out: {run.run_dir}" for run in comparison.unfinished),
        *(f"missing: {name}" for name in comparison.missing),
    ]


# ---------------------------------------------------------------- the table in the terminal


def print_table(comparison: Comparison, rows: Sequence[VariantSummary]) -> None:
    baseline = escape(escape_controls(comparison.baseline))
    title = f"held-out {HEADLINE_LABELS[comparison.measure]} and its difference from {baseline}, with 95% intervals"
    table = Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("variant", overflow="fold")
    for name in ("runs", "accuracy" if comparison.measure == "greedy" else "reward", "difference", "conclusion"):
        table.add_column(name, justify="left" if name == "conclusion" else "right", no_wrap=True)
    for row in rows:
        cells = [row.variant, str(len(row.seeds)), "", "", ""]
        if row.seeds:
            estimate = format_estimate(row.compared_estimate, "", row.measure)
            cells[2:] = estimate, format_estimate(row.difference, "+", row.measure), row.conclusion
        table.add_row(*(escape(escape_controls(cell)) for cell in cells))
    rich.print(table)
    for line in list_notes(comparison, rows):
        print(escape_controls(line))


def format_estimate(estimate: Estimate | None, sign: str, measure: str) -> str:
    """Return an accuracy in percent, or a reward, as "VALUE [LOW, HIGH]"."""
    if estimate is None:
        return "-"
    scale, digits = (1, 3) if measure == "reward" else (100, 1)
    value, low, high = (f"{scale * x:{sign}.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]" if estimate.has_interval else value
