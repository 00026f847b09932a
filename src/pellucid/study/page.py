"""The page of a comparison: one HTML file without script and network. `shown` escapes every string of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

from pellucid.machine.harmless import harmless
from pellucid.reporting.charts import PAGE_CSS, Point, Series, chart, counted, range_of, shown
from pellucid.reporting.curves import estimates, line
from pellucid.reporting.measures import NAMES
from pellucid.reporting.report import beside, duration, fact_list, section
from pellucid.study.compare import Summary, caveats, dead_share, points, print_table, summaries, times, write_numbers
from pellucid.study.paired import RESAMPLES
from pellucid.study.runs import Run, Runs, gather
from pellucid.types import Estimate, UserError

MARKS = {"above": "above", "below": "below", "cannot tell": "unsure", "": "unsure"}
"""The CSS class of each conclusion."""


def compare(folders: Sequence[Path], baseline: str, output: Path) -> int:
    """`pellucid compare`: print the table, write the page and its numbers. Return the exit status."""
    if output.suffix == ".json" or output.stem == "study":
        raise UserError(f"--output {output} is the name of something else: name a page such as compare.html")
    runs = gather(folders, baseline)
    rows = summaries(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(runs, rows), encoding="utf-8")
    write_numbers(output.with_suffix(".json"), runs, rows)
    print_table(runs, rows)
    print(harmless(f"page {output}, numbers {output.with_suffix('.json')}"))
    return 0


def page(comparison: Runs, rows: Sequence[Summary]) -> str:
    others = [row.variant for row in rows if row.variant != comparison.baseline]
    title = f"{comparison.baseline} and {others[0] if len(others) == 1 else counted(len(others), 'variant')}"
    sections = [
        section("Results", results(rows) + notes(comparison, rows)),
        section("Curves", "\n".join(curves_of(variant, comparison) for variant in comparison.finished)),
        section("Cost of a run", costs(rows)),
        section("Did it do anything", own(rows)),
        section("Runs", commands(comparison)),
    ]
    return Template(beside("report.html")).substitute(
        name=shown(title if others else comparison.baseline),
        about="Comparison on held-out questions",
        style=PAGE_CSS + beside("report.css") + Path(__file__).with_name("study.css").read_text(encoding="utf-8"),
        lede=lede(rows),
        facts=facts(comparison, rows),
        sections="\n".join(sections),
    )


def lede(rows: Sequence[Summary]) -> str:
    """Return a few sentences on what the intervals allow to say."""
    baseline, *others = rows
    if not others:
        return f"There is only {shown(baseline.variant)}: nothing to compare it with."
    found = {name: [shown(row.variant) for row in others if row.conclusion == name] for name in MARKS}
    said = [f"{listed(found[name])} {name}" for name in ("above", "below") if found[name]]
    apart = f"{'; '.join(said)} {shown(baseline.variant)} in held-out {NAMES[baseline.measure]}." if said else ""
    unsure = unclear(len(found["cannot tell"]), shown(baseline.variant), alone=not said)
    unmeasured = f"{counted(len(found['']), 'variant')} could not be paired with it." if found[""] else ""
    return " ".join(part for part in (apart, unsure, unmeasured) if part)


def unclear(variants: int, baseline: str, alone: bool) -> str:
    if not variants:
        return ""
    if not alone:
        return f"For {counted(variants, 'other variant')} the runs cannot tell."
    what = "The other variant is not" if variants == 1 else f"None of {variants} variants is"
    return f"{what} shown to be above or below {baseline}."


def listed(names: Sequence[str]) -> str:
    """Return names as the subject of a sentence. Example: listed(["a", "b", "c"]) == "a, b and c are"."""
    *first, last = names
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def facts(comparison: Runs, rows: Sequence[Summary]) -> str:
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
    return fact_list(values)


# ---------------------------------------------------------------- tables


def table(kind: str, caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table. Its cells are HTML; the first of a row is its heading."""
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    body = "\n".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for first, *cells in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><caption>{caption}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def results(rows: Sequence[Summary]) -> str:
    ks, is_reward = sorted({row.k for row in rows if row.k}), rows[0].measure == "reward"
    what = "reward after training" if is_reward else "accuracy after training in percent"
    caption = f"Held-out {what}, and its difference from the baseline on the same questions"
    mean_at_k = shown(f"mean@{' or '.join(map(str, ks))}") if ks and not is_reward else ""
    heads = ["Variant", "Conclusion", "Difference", "", "By seed", "Greedy", mean_at_k, "Runs"]
    if is_reward or rewards_differ(rows):
        heads[5:7] = ["Reward", ""] if is_reward else ["Greedy", mean_at_k, "Reward"]
    reach = max((abs(end) for row in rows if row.difference for end in ends(row.difference)), default=0) or 1.0
    return table("results", caption, heads, [result_cells(row, reach, "Reward" in heads) for row in rows])


def rewards_differ(rows: Sequence[Summary]) -> bool:
    """Return whether rewards say anything else than accuracies do."""
    return any(row.greedy and row.reward and abs(row.reward.value - row.greedy.value) > 1e-9 for row in rows)


def result_cells(row: Summary, reach: float, with_reward: bool = False) -> list[str]:
    is_reward = row.measure == "reward"
    mean_at_k = "" if row.mean_at_k is None or is_reward else f"{100 * row.mean_at_k:.1f}"
    by_seed = ", ".join(f"{x:+.3f}" if is_reward else f"{100 * x:+.1f}" for x in row.pairs.values())
    reward = [with_interval(row.reward, measure="reward")] if with_reward and not is_reward else []
    return [
        shown(row.variant),
        f'<span class="{MARKS[row.conclusion]}">{row.conclusion}</span>',
        with_interval(row.difference, "+", row.measure),
        span(row, reach) if row.difference else "",
        by_seed,
        with_interval(row.compared_estimate, measure=row.measure),
        mean_at_k,
        *reward,
        str(len(row.seeds)),
    ]


def with_interval(estimate: Estimate | None, sign: str = "", measure: str = "greedy") -> str:
    value, _, bounds = points(estimate, sign, measure).partition(" ")
    return f"{value} <small>{bounds}</small>" if estimate else ""


def ends(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


def span(row: Summary, reach: float) -> str:
    """Return the interval of a difference as an SVG bar with 0 in the middle, on the scale that all variants share."""
    difference = row.difference or Estimate()
    low, value, high = (100 + 94 * x / reach for x in (difference.low, difference.value, difference.high))
    about = points(difference, "+", row.measure)
    return (
        f'<svg class="span {MARKS[row.conclusion]}" viewBox="0 0 200 16" role="img" aria-label="{about}">'
        f'<path class="zero" d="M100 0V16"/><path d="M{low:.1f} 8H{high:.1f}"/>'
        f'<circle cx="{value:.1f}" cy="8" r="4"/></svg>'
    )


def notes(comparison: Runs, rows: Sequence[Summary]) -> str:
    """Return a list in HTML: what the table rests on, and what it does not show."""
    comparisons = sum(bool(row.difference) for row in rows)
    said = [
        f"A difference is taken question by question between runs of the same seed. Its interval comes from "
        f"{RESAMPLES:,} resamples: seeds with replacement, then questions within a seed, or one draw of questions for "
        f"all seeds where these asked the same. A variant is above or below only where the interval excludes 0.",
        f"{counted(comparisons, 'comparison')} {'was' if comparisons == 1 else 'were'} made. Of comparisons between "
        f"equals, one in twenty is expected to look apart by chance.",
        *caveats(rows),
    ]
    said += [f"{shown(row.variant)}, {reason}: not paired." for row in rows for reason in row.unpaired]
    said += [f"{shown(run.name)} is unfinished and left out." for run in comparison.unfinished]
    said += [f"{shown(variant)} seed {seed} is missing." for variant, seed in comparison.missing]
    return f'\n<ul class="notes">{"".join(f"<li>{note}</li>" for note in said)}</ul>'


def costs(rows: Sequence[Summary]) -> str:
    base = rows[0]
    cells = [
        [
            shown(row.variant),
            " · ".join(f"{tokens:,.0f}" for tokens in row.tokens.values()),
            times(row.tokens, base.tokens),
            " · ".join(duration(seconds) for seconds in row.seconds.values()),
            times(row.seconds, base.seconds),
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
    return table("results", caption, heads, cells)


def own(rows: Sequence[Summary]) -> str:
    cells = [
        [shown(row.variant), shown(name), f"{value:.4g}"] for row in rows for name, value in (row.own or {}).items()
    ]
    caption = "Measures of what a variant adds, means over the steps that have them"
    return table("results", caption, ("Variant", "Measure", "Mean"), cells) if cells else ""


def commands(comparison: Runs) -> str:
    cells = [
        [shown(run.name), f"<code>{shown(run.command)}</code>"]
        for run in [*comparison.finished_runs, *comparison.unfinished]
    ]
    listed = table("commands", "The command that makes each run", ("Run", "Command"), cells)
    return f"<details><summary>{counted(len(cells), 'command')}</summary>{listed}</details>"


# ---------------------------------------------------------------- curves


def curves_of(variant: str, comparison: Runs) -> str:
    """Return a row of charts, each of the variant in front of the baseline, on scales that all rows share."""
    seeds = len(comparison.finished[variant])
    around = f"mean of {counted(seeds, 'seed')}, band from lowest to highest" if seeds > 1 else "one seed"
    charts = [
        compared(f"Held-out {NAMES[comparison.measure]}", around, variant, comparison, *held_out(comparison.measure)),
        compared(
            "Training reward",
            f"of what is trained on; {around}",
            variant,
            comparison,
            reward_line,
            reward_range(comparison),
        ),
        compared("Dead groups", f"share of those drawn; {around}", variant, comparison, dead_line, (0, 1)),
    ]
    drawn = "\n".join(svg for svg in charts if svg)
    note = "" if drawn else '<p class="soft">No finished run yet.</p>'
    return f'<h3>{shown(variant)}</h3>\n{note}<div class="row">\n{drawn}\n</div>'


Measure = Callable[[Run], list[Point]]


def compared(
    title: str, subtitle: str, variant: str, comparison: Runs, get_points: Measure, include: Sequence[float]
) -> str:
    series = [over_seeds(variant, comparison.finished[variant], get_points, "first")]
    if variant != comparison.baseline:
        series.insert(0, over_seeds(comparison.baseline, comparison.finished[comparison.baseline], get_points, "third"))
    return chart(title, subtitle, series if series[-1].points else [], include)


def over_seeds(label: str, runs: Mapping[int, Run], get_points: Measure, style: str) -> Series:
    lines = [points for run in runs.values() if (points := get_points(run))]
    if len(lines) > 1:
        return Series(label, range_of(lines), f"{style} band")
    return Series(label, lines[0] if lines else [], style)


def held_out(measure: str) -> tuple[Measure, Sequence[float]]:
    """Return the line of the measure that is compared, and what its axis must reach."""
    return lambda run: estimates(run.evaluations, measure), (0, 1) if measure == "greedy" else ()


def reward_line(run: Run) -> list[Point]:
    return line(run.metrics, "reward/mean")


def dead_line(run: Run) -> list[Point]:
    return [Point(row["step"], share) for row in run.metrics if (share := dead_share(row)) is not None]


def reward_range(comparison: Runs) -> list[float]:
    values = [point.y for run in comparison.finished_runs for point in reward_line(run)]
    return [min(values), max(values)] if values else []
