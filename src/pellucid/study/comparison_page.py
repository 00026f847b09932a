"""The page of a comparison: one HTML file without scripts or requests. `escape_text` escapes all strings of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
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
    format_estimate,
    get_drawn_dead_share,
    list_notes,
    print_table,
    summarize_variants,
    write_numbers,
)
from pellucid.study.runs import ComparedRun, Comparison, gather_runs
from pellucid.types import Estimate, UserError
from pellucid.utils.text import escape_controls

_CONCLUSION_CSS_CLASSES = {"above": "above", "below": "below", "cannot tell": "unsure", "": "unsure"}


def compare_runs(folders: Sequence[Path], baseline: str, output: Path) -> int:
    """`pellucid compare`: print the table, write the page and its numbers. Return the exit status."""
    numbers = output.with_suffix(".json")
    if numbers in (output, output.with_name("study.json")):
        raise UserError(f"--output {output}: its numbers would replace {numbers}: name a page such as compare.html")
    runs = gather_runs(folders, baseline)
    rows = summarize_variants(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_build_comparison_page(runs, rows), encoding="utf-8")
    write_numbers(numbers, runs, rows)
    print_table(runs, rows)
    print(escape_controls(f"page {output}, numbers {numbers}"))
    return 0


def _build_comparison_page(comparison: Comparison, rows: Sequence[VariantSummary]) -> str:
    others = [row.variant for row in rows[1:]]
    title = comparison.baseline
    if others:
        title += f" and {others[0] if len(others) == 1 else format_count(len(others), 'variant')}"
    curves = "\n".join(_draw_variant_curves(variant, comparison) for variant in comparison.finished)
    sections = {
        "Results": _build_result_table(rows) + _build_notes(comparison, rows),
        "Curves": curves,
        "Cost of a run": _build_cost_table(rows),
        "Did the variant take effect": _build_variant_metric_table(rows),
        "Runs": _build_command_list(comparison),
    }
    return Template(read_asset("report.html")).substitute(
        name=escape_text(title),
        about="Comparison on held-out questions",
        style=PAGE_CSS + read_asset("report.css") + Path(__file__).with_name("study.css").read_text(encoding="utf-8"),
        lede=write_lede(rows),
        signs="",
        facts=_build_facts(comparison, rows),
        sections="\n".join(render_section(name, content) for name, content in sections.items()),
    )


def write_lede(rows: Sequence[VariantSummary]) -> str:
    """Return a few sentences with the conclusions that the intervals support."""
    baseline, *others = rows
    if not others:
        return f"There is only {escape_text(baseline.variant)}: nothing to compare it with."
    by_conclusion = {
        name: [escape_text(row.variant) for row in others if row.conclusion == name] for name in _CONCLUSION_CSS_CLASSES
    }
    clear = [f"{_join_names(by_conclusion[name])} {name}" for name in ("above", "below") if by_conclusion[name]]
    measure = HEADLINE_LABELS[baseline.measure]
    conclusions = f"{'; '.join(clear)} {escape_text(baseline.variant)} in held-out {measure}." if clear else ""
    unclear, unpaired = len(by_conclusion["cannot tell"]), len(by_conclusion[""])
    sentences = [conclusions]
    if unclear and clear:
        sentences.append(f"For {format_count(unclear, 'other variant')} the runs cannot tell.")
    elif unclear:
        if unpaired:
            subject = "The one variant" if unclear == 1 else f"None of the {unclear} variants"
            subject += " that could be paired is" + (" not" if unclear == 1 else "")
        else:
            subject = "The other variant is not" if unclear == 1 else f"None of {unclear} variants is"
        sentences.append(f"{subject} shown to be above or below {escape_text(baseline.variant)}.")
    if unpaired:
        sentences.append(f"{format_count(unpaired, 'variant')} could not be paired with it.")
    return " ".join(filter(None, sentences))


def _join_names(names: Sequence[str]) -> str:
    """Return names as a subject with its verb. Example: _join_names(["a", "b", "c"]) == "a, b and c are"."""
    *first, last = names
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def _build_facts(comparison: Comparison, rows: Sequence[VariantSummary]) -> str:
    left_out = len(comparison.unfinished) + len(comparison.missing)
    evaluations = [run.last_evaluation for run in comparison.finished_runs]
    questions = [len(last.get("right", ())) or last["n"] for last in evaluations]
    values = {
        "Variants": str(len(rows)),
        "Finished runs": str(len(evaluations)),
        "Unfinished or missing": str(left_out),
        "Seeds": str(len({seed for row in rows for seed in row.seeds})),
        "Held-out questions": " to ".join(f"{n:,}" for n in sorted({min(questions), max(questions)})),
    }
    return render_fact_list({label: (text, label.startswith("Unf") and left_out > 0) for label, text in values.items()})


# ---------------------------------------------------------------- tables


def _build_result_table(rows: Sequence[VariantSummary]) -> str:
    is_reward = rows[0].measure == "reward"
    measure = "reward after training" if is_reward else "accuracy after training in percent"
    caption = f"Held-out {measure}, and its difference from the baseline on the same questions"
    if is_reward:
        measures = ["Reward"]
    else:
        ks = " or ".join(map(str, sorted({row.k for row in rows if row.k})))
        rewards_differ = any(
            row.greedy and row.reward and abs(row.reward.value - row.greedy.value) > 1e-9 for row in rows
        )
        measures = ["Greedy", escape_text(f"mean@{ks}") if ks else "", *(["Reward"] if rewards_differ else [])]
    heads = ["Variant", "Conclusion", "Difference", "", "By seed", *measures, "Runs"]
    differences = [row.difference for row in rows if row.difference]
    max_bound = max((max(abs(each.low), abs(each.high)) for each in differences), default=0) or 1.0
    return render_table(heads, [_build_result_row(row, max_bound, len(measures)) for row in rows], caption, "results")


def _build_result_row(row: VariantSummary, max_bound: float, measure_count: int) -> list[str]:
    is_reward = row.measure == "reward"
    reward = _format_with_interval(row.reward, "", "reward")
    mean_at_k = "" if row.mean_at_k is None else f"{100 * row.mean_at_k:.1f}"
    measures = [reward] if is_reward else [_format_with_interval(row.greedy, "", row.measure), mean_at_k, reward]
    return [
        escape_text(row.variant),
        f'<span class="{_CONCLUSION_CSS_CLASSES[row.conclusion]}">{row.conclusion}</span>',
        _format_with_interval(row.difference, "+", row.measure),
        _draw_interval(row, row.difference, max_bound) if row.difference else "",
        ", ".join(f"{x:+.3f}" if is_reward else f"{100 * x:+.1f}" for x in row.pairs.values()),
        *measures[:measure_count],
        str(len(row.seeds)),
    ]


def _format_with_interval(estimate: Estimate | None, sign: str, measure: str) -> str:
    value, _, bounds = format_estimate(estimate, sign, measure).partition(" ")
    return f"{value} <small>{bounds}</small>" if estimate else ""


def _draw_interval(row: VariantSummary, difference: Estimate, max_bound: float) -> str:
    """Return the interval of a difference as an SVG bar with 0 in the middle, on a scale that all variants share."""
    low, value, high = (100 + 94 * x / max_bound for x in (difference.low, difference.value, difference.high))
    about = format_estimate(difference, "+", row.measure)
    return (
        f'<svg class="span {_CONCLUSION_CSS_CLASSES[row.conclusion]}" viewBox="0 0 200 16" role="img"'
        f' aria-label="{about}">'
        f'<path class="zero" d="M100 0V16"/><path d="M{low:.1f} 8H{high:.1f}"/>'
        f'<circle cx="{value:.1f}" cy="8" r="4"/></svg>'
    )


def _build_notes(comparison: Comparison, rows: Sequence[VariantSummary]) -> str:
    """Return an HTML list of notes on how the table was computed and what it does not show."""
    comparisons = sum(bool(row.difference) for row in rows)
    notes = [
        f"A difference is taken question by question between runs of the same seed. Its interval comes from "
        f"{RESAMPLE_COUNT:,} resamples: seeds with replacement, then questions within a seed, or one draw of questions"
        f" for all seeds if they asked the same. A variant is above or below only if the interval excludes 0.",
        f"{format_count(comparisons, 'comparison')} {'was' if comparisons == 1 else 'were'} made. Of comparisons"
        f" between equal variants, one in twenty is expected to differ by chance.",
        *list_notes(comparison, rows),
    ]
    return f'\n<ul class="notes">{"".join(f"<li>{escape_text(note)}</li>" for note in notes)}</ul>'


def _build_cost_table(rows: Sequence[VariantSummary]) -> str:
    def format_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> str:
        return f"{fmean(values.values()) / fmean(baseline.values()):.2f}x" if any(baseline.values()) else "-"

    base = rows[0]
    cells = [
        [
            escape_text(row.variant),
            " · ".join(f"{tokens:,.0f}" for tokens in row.tokens.values()),
            format_ratio(row.tokens, base.tokens),
            " · ".join(format_duration(seconds) for seconds in row.seconds.values()),
            format_ratio(row.seconds, base.seconds),
            "" if row.dead is None else f"{row.dead:.0%}",
        ]
        for row in rows
        if row.seeds
    ]
    caption = (
        "Values by seed, and their mean relative to the baseline's; times depend on the machine, and dead groups are a "
        "share of all drawn groups"
    )
    heads = ("Variant", "Tokens sampled", "Ratio", "Time in steps", "Ratio", "Dead groups")
    return render_table(heads, cells, caption, "results")


def _build_variant_metric_table(rows: Sequence[VariantSummary]) -> str:
    cells = [
        [escape_text(row.variant), escape_text(name), f"{value:.4g}"]
        for row in rows
        for name, value in (row.own or {}).items()
    ]
    caption = "Metrics that show whether a variant took effect, as means over the steps that log them"
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
    rewards = [point.y for run in comparison.finished_runs for point in make_points(run.metrics, "reward/mean")]

    def draw(title: str, subtitle: str, get_points: Callable[[ComparedRun], list[Point]], *include: float) -> str:
        styles = {comparison.baseline: "third", variant: "first"}  # a single entry for the baseline itself
        series = [
            make_seed_series(name, map(get_points, comparison.finished[name].values()), style)
            for name, style in styles.items()
        ]
        return draw_chart(title, subtitle, series if series[-1].points else [], include)

    charts = [
        draw(
            f"Held-out {HEADLINE_LABELS[comparison.measure]}",
            around,
            lambda run: make_estimate_points(run.evaluations, comparison.measure),
            *((0, 1) if comparison.measure == "greedy" else ()),
        ),
        draw(
            "Training reward",
            f"of the groups trained on; {around}",
            lambda run: make_points(run.metrics, "reward/mean"),
            *((min(rewards), max(rewards)) if rewards else ()),
        ),
        draw("Dead groups", f"share of those drawn; {around}", _get_dead_share_points, 0, 1),
    ]
    pictures = "\n".join(svg for svg in charts if svg)
    note = "" if pictures else '<p class="soft">No finished run yet.</p>'
    return f'<h3>{escape_text(variant)}</h3>\n{note}<div class="row">\n{pictures}\n</div>'


def _get_dead_share_points(run: ComparedRun) -> list[Point]:
    return [Point(row["step"], share) for row in run.metrics if (share := get_drawn_dead_share(row)) is not None]
