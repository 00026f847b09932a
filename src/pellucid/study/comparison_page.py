"""The page of a comparison: one HTML file without script and network. `escape_text` escapes every string of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Template

from pellucid.reporting.charts import (
    PAGE_CSS,
    Point,
    draw_chart,
    escape_text,
    format_count,
    make_estimate_points,
    make_points,
    make_seed_series,
)
from pellucid.reporting.eval_metrics import HEADLINE_LABELS
from pellucid.reporting.report import format_duration, read_asset, render_fact_list, render_section, render_table
from pellucid.study.bootstrap import RESAMPLE_COUNT
from pellucid.study.compare import (
    VariantSummary,
    format_cost_ratio,
    format_estimate,
    get_drawn_dead_share,
    list_caveats,
    print_table,
    summarize_variants,
    write_numbers,
)
from pellucid.study.runs import ComparedRun, Comparison, gather_runs
from pellucid.types import Estimate, UserError
from pellucid.utils.text import escape_controls

_CONCLUSION_CSS_CLASSES = {"above": "above", "below": "below", "cannot tell": "unsure", "": "unsure"}
"""The CSS class of each conclusion."""


def compare_runs(folders: Sequence[Path], baseline: str, output: Path) -> int:
    """`pellucid compare`: print the table, write the page and its numbers. Return the exit status."""
    if output.suffix == ".json" or output.stem == "study":
        raise UserError(f"--output {output} is the name of something else: name a page such as compare.html")
    runs = gather_runs(folders, baseline)
    rows = summarize_variants(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_build_comparison_page(runs, rows), encoding="utf-8")
    write_numbers(output.with_suffix(".json"), runs, rows)
    print_table(runs, rows)
    print(escape_controls(f"page {output}, numbers {output.with_suffix('.json')}"))
    return 0


def _build_comparison_page(comparison: Comparison, rows: Sequence[VariantSummary]) -> str:
    others = [row.variant for row in rows if row.variant != comparison.baseline]
    title = f"{comparison.baseline} and {others[0] if len(others) == 1 else format_count(len(others), 'variant')}"
    sections = [
        render_section("Results", _build_result_table(rows) + _build_notes(comparison, rows)),
        render_section(
            "Curves", "\n".join(_draw_variant_curves(variant, comparison) for variant in comparison.finished)
        ),
        render_section("Cost of a run", _build_cost_table(rows)),
        render_section("Did it do anything", _build_variant_metric_table(rows)),
        render_section("Runs", _build_command_list(comparison)),
    ]
    return Template(read_asset("report.html")).substitute(
        name=escape_text(title if others else comparison.baseline),
        about="Comparison on held-out questions",
        style=PAGE_CSS + read_asset("report.css") + Path(__file__).with_name("study.css").read_text(encoding="utf-8"),
        lede=write_lede(rows),
        facts=_build_facts(comparison, rows),
        sections="\n".join(sections),
    )


def write_lede(rows: Sequence[VariantSummary]) -> str:
    """Return a few sentences with the conclusions that the intervals allow."""
    baseline, *others = rows
    if not others:
        return f"There is only {escape_text(baseline.variant)}: nothing to compare it with."
    by_conclusion = {
        name: [escape_text(row.variant) for row in others if row.conclusion == name] for name in _CONCLUSION_CSS_CLASSES
    }
    clear = [f"{_join_names(by_conclusion[name])} {name}" for name in ("above", "below") if by_conclusion[name]]
    measure = HEADLINE_LABELS[baseline.measure]
    conclusions = f"{'; '.join(clear)} {escape_text(baseline.variant)} in held-out {measure}." if clear else ""
    unclear = _describe_unclear(
        len(by_conclusion["cannot tell"]), len(others), escape_text(baseline.variant), has_conclusions=bool(clear)
    )
    count = len(by_conclusion[""])
    unpaired = f"{format_count(count, 'variant')} could not be paired with it." if count else ""
    return " ".join(part for part in (conclusions, unclear, unpaired) if part)


def _describe_unclear(unclear: int, others: int, baseline: str, has_conclusions: bool) -> str:
    """Return a sentence on the variants of which one cannot tell; without conclusions, the rest could not be paired."""
    if not unclear:
        return ""
    if has_conclusions:
        return f"For {format_count(unclear, 'other variant')} the runs cannot tell."
    if unclear == others:
        subject = "The other variant is not" if unclear == 1 else f"None of {unclear} variants is"
    else:
        subject = "The one variant that could be paired is not"
        if unclear > 1:
            subject = f"None of the {unclear} variants that could be paired is"
    return f"{subject} shown to be above or below {baseline}."


def _join_names(names: Sequence[str]) -> str:
    """Return names as the subject of a sentence. Example: join_names(["a", "b", "c"]) == "a, b and c are"."""
    *first, last = names
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def _build_facts(comparison: Comparison, rows: Sequence[VariantSummary]) -> str:
    left_out = len(comparison.unfinished) + len(comparison.missing)
    questions = {
        len(run.last_evaluation.get("right", ())) or run.last_evaluation["n"] for run in comparison.finished_runs
    }
    values = {
        "Variants": (str(len(rows)), False),
        "Finished runs": (str(len(comparison.finished_runs)), False),
        "Unfinished or missing": (str(left_out), left_out > 0),
        "Seeds": (str(len({seed for row in rows for seed in row.seeds})), False),
        "Held-out questions": (" to ".join(f"{n:,}" for n in sorted({min(questions), max(questions)})), False),
    }
    return render_fact_list(values)


# ---------------------------------------------------------------- tables


def _build_result_table(rows: Sequence[VariantSummary]) -> str:
    ks, is_reward = sorted({row.k for row in rows if row.k}), rows[0].measure == "reward"
    measure = "reward after training" if is_reward else "accuracy after training in percent"
    caption = f"Held-out {measure}, and its difference from the baseline on the same questions"
    mean_at_k = escape_text(f"mean@{' or '.join(map(str, ks))}") if ks and not is_reward else ""
    heads = ["Variant", "Conclusion", "Difference", "", "By seed", "Greedy", mean_at_k, "Runs"]
    if is_reward or _rewards_differ(rows):
        heads[5:7] = ["Reward", ""] if is_reward else ["Greedy", mean_at_k, "Reward"]
    reach = (
        max((abs(end) for row in rows if row.difference for end in _get_interval_ends(row.difference)), default=0)
        or 1.0
    )
    return render_table(heads, [_build_result_row(row, reach, "Reward" in heads) for row in rows], caption, "results")


def _rewards_differ(rows: Sequence[VariantSummary]) -> bool:
    """Whether rewards differ from accuracies."""
    return any(row.greedy and row.reward and abs(row.reward.value - row.greedy.value) > 1e-9 for row in rows)


def _build_result_row(row: VariantSummary, reach: float, with_reward: bool = False) -> list[str]:
    is_reward = row.measure == "reward"
    mean_at_k = "" if row.mean_at_k is None or is_reward else f"{100 * row.mean_at_k:.1f}"
    by_seed = ", ".join(f"{x:+.3f}" if is_reward else f"{100 * x:+.1f}" for x in row.pairs.values())
    reward = [_format_with_interval(row.reward, measure="reward")] if with_reward and not is_reward else []
    return [
        escape_text(row.variant),
        f'<span class="{_CONCLUSION_CSS_CLASSES[row.conclusion]}">{row.conclusion}</span>',
        _format_with_interval(row.difference, "+", row.measure),
        _draw_interval(row, reach) if row.difference else "",
        by_seed,
        _format_with_interval(row.compared_estimate, measure=row.measure),
        mean_at_k,
        *reward,
        str(len(row.seeds)),
    ]


def _format_with_interval(estimate: Estimate | None, sign: str = "", measure: str = "greedy") -> str:
    value, _, bounds = format_estimate(estimate, sign, measure).partition(" ")
    return f"{value} <small>{bounds}</small>" if estimate else ""


def _get_interval_ends(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


def _draw_interval(row: VariantSummary, reach: float) -> str:
    """Return the interval of a difference as an SVG bar with 0 in the middle, on a scale that all variants share."""
    difference = row.difference or Estimate()
    low, value, high = (100 + 94 * x / reach for x in (difference.low, difference.value, difference.high))
    about = format_estimate(difference, "+", row.measure)
    return (
        f'<svg class="span {_CONCLUSION_CSS_CLASSES[row.conclusion]}" viewBox="0 0 200 16" role="img"'
        f' aria-label="{about}">'
        f'<path class="zero" d="M100 0V16"/><path d="M{low:.1f} 8H{high:.1f}"/>'
        f'<circle cx="{value:.1f}" cy="8" r="4"/></svg>'
    )


def _build_notes(comparison: Comparison, rows: Sequence[VariantSummary]) -> str:
    """Return a list in HTML on how the table was computed, and on what it does not show."""
    comparisons = sum(bool(row.difference) for row in rows)
    notes = [
        f"A difference is taken question by question between runs of the same seed. Its interval comes from "
        f"{RESAMPLE_COUNT:,} resamples: seeds with replacement, then questions within a seed, or one draw of questions"
        f" for all seeds where these asked the same. A variant is above or below only where the interval excludes 0.",
        f"{format_count(comparisons, 'comparison')} {'was' if comparisons == 1 else 'were'} made. Of comparisons"
        f" between equals, one in twenty is expected to look apart by chance.",
        *list_caveats(rows),
    ]
    notes += [f"{escape_text(row.variant)}, {reason}: not paired." for row in rows for reason in row.unpaired]
    notes += [f"{escape_text(run.name)} is unfinished and left out." for run in comparison.unfinished]
    notes += [f"{escape_text(variant)} seed {seed} is missing." for variant, seed in comparison.missing]
    return f'\n<ul class="notes">{"".join(f"<li>{note}</li>" for note in notes)}</ul>'


def _build_cost_table(rows: Sequence[VariantSummary]) -> str:
    base = rows[0]
    cells = [
        [
            escape_text(row.variant),
            " · ".join(f"{tokens:,.0f}" for tokens in row.tokens.values()),
            format_cost_ratio(row.tokens, base.tokens),
            " · ".join(format_duration(seconds) for seconds in row.seconds.values()),
            format_cost_ratio(row.seconds, base.seconds),
            "" if row.dead is None else f"{row.dead:.0%}",
        ]
        for row in rows
        if row.seeds
    ]
    caption = (
        "By seed, and the mean as a multiple of the baseline's; time is that of the machine it ran on, dead groups the "
        "share of all that were drawn"
    )
    heads = ("Variant", "Tokens sampled", "Ratio", "Time in steps", "Ratio", "Dead groups")
    return render_table(heads, cells, caption, "results")


def _build_variant_metric_table(rows: Sequence[VariantSummary]) -> str:
    cells = [
        [escape_text(row.variant), escape_text(name), f"{value:.4g}"]
        for row in rows
        for name, value in (row.own or {}).items()
    ]
    caption = "Measures of what a variant adds, means over the steps that have them"
    return render_table(("Variant", "Measure", "Mean"), cells, caption, "results") if cells else ""


def _build_command_list(comparison: Comparison) -> str:
    cells = [
        [escape_text(run.name), f"<code>{escape_text(run.command)}</code>"]
        for run in [*comparison.finished_runs, *comparison.unfinished]
    ]
    listed = render_table(("Run", "Command"), cells, "The command that makes each run", "commands")
    return f"<details><summary>{format_count(len(cells), 'command')}</summary>{listed}</details>"


# ---------------------------------------------------------------- curves


def _draw_variant_curves(variant: str, comparison: Comparison) -> str:
    """Return a row of charts that show the variant in front of the baseline, on scales that all rows share."""
    seeds = len(comparison.finished[variant])
    around = f"mean of {format_count(seeds, 'seed')}, band from lowest to highest" if seeds > 1 else "one seed"
    charts = [
        _draw_comparison_chart(
            f"Held-out {HEADLINE_LABELS[comparison.measure]}",
            around,
            variant,
            comparison,
            *_get_held_out_curve(comparison.measure),
        ),
        _draw_comparison_chart(
            "Training reward",
            f"of what is trained on; {around}",
            variant,
            comparison,
            _get_reward_points,
            _compute_reward_range(comparison),
        ),
        _draw_comparison_chart(
            "Dead groups", f"share of those drawn; {around}", variant, comparison, _get_dead_share_points, (0, 1)
        ),
    ]
    pictures = "\n".join(svg for svg in charts if svg)
    note = "" if pictures else '<p class="soft">No finished run yet.</p>'
    return f'<h3>{escape_text(variant)}</h3>\n{note}<div class="row">\n{pictures}\n</div>'


_PointsFunction = Callable[[ComparedRun], list[Point]]


def _draw_comparison_chart(
    title: str,
    subtitle: str,
    variant: str,
    comparison: Comparison,
    get_points: _PointsFunction,
    include: Sequence[float],
) -> str:
    styles = {comparison.baseline: "third", variant: "first"}  # a single entry for the baseline itself
    series = [
        make_seed_series(name, map(get_points, comparison.finished[name].values()), style)
        for name, style in styles.items()
    ]
    return draw_chart(title, subtitle, series if series[-1].points else [], include)


def _get_held_out_curve(measure: str) -> tuple[_PointsFunction, Sequence[float]]:
    """Return the line of the measure that is compared, and what its axis must reach."""
    return lambda run: make_estimate_points(run.evaluations, measure), (0, 1) if measure == "greedy" else ()


def _get_reward_points(run: ComparedRun) -> list[Point]:
    return make_points(run.metrics, "reward/mean")


def _get_dead_share_points(run: ComparedRun) -> list[Point]:
    return [Point(row["step"], share) for row in run.metrics if (share := get_drawn_dead_share(row)) is not None]


def _compute_reward_range(comparison: Comparison) -> list[float]:
    values = [point.y for run in comparison.finished_runs for point in _get_reward_points(run)]
    return [min(values), max(values)] if values else []
