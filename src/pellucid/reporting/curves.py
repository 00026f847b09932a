"""Which curves a run is seen by: from the records of its folder to charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan

from pellucid.reporting.charts import CSS, HEIGHT, WIDTH, Point, Series, chart, drawable, mean_of, stack
from pellucid.reporting.measures import TOO_FEW, about_intervals, estimate_of, evaluation_of, labelled, worth_showing
from pellucid.reporting.run_folder import Record

STYLES = ("first", "second", "third", "fourth")
MARGIN = 24
LENGTHS = {"completion/length_mean": "mean", "completion/length_right": "right", "completion/length_wrong": "wrong"}
DEAD = {
    "groups/dead_all_right": "all right",
    "groups/dead_all_wrong": "all wrong",
    "groups/dead_equal": "equal rewards",
}
GAPS = {"sampler/gap_mean": "mean", "sampler/gap_max": "max"}
STAGES = {f"time/{stage}": stage for stage in ("generate", "reward", "score", "update")}
CALLS = "tools/calls"
MOST_LOGGED = 8
"""How many of the metrics that rewards log have a chart on the report; all of them are in metrics.jsonl."""
NOT_TERMS = {"reward/mean", "reward/std", "reward/failed", "reward/no_term", "reward/after_kl"}


def curves(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> list[str]:
    """The charts that the records of a run suffice for."""
    charts = [
        *(drawn for key, rows in evals.items() for drawn in held_out(*key, rows)),
        chart("Reward", "mean of a step", lines(metrics, {"reward/mean": "reward"})),
        chart(
            "Dead groups", "share of groups with equal rewards: no signal", stack(lines(metrics, DEAD)), include=(0, 1)
        ),
        chart("Length", "tokens of a completion", lines(metrics, LENGTHS), include=(0,)),
        *tool_charts(metrics),
        chart("Terms of the reward", "means, before their weights", lines(metrics, terms(metrics))),
        *(
            chart(name.removeprefix("logged/"), "logged by rewards, mean of a step", lines(metrics, {name: "mean"}))
            for name in logged(metrics)
        ),
        chart("Entropy", "nats a token", lines(metrics, {"entropy": "entropy"}), include=(0,)),
        chart("KL", "from the reference, nats a token", lines(metrics, {"kl": "kl"}), include=(0,)),
        chart("Sampler gap", "between sampler and scorer, nats a token", lines(metrics, GAPS), include=(0,)),
        chart("Time", "seconds a step", stack(lines(metrics, STAGES)), include=(0,)),
    ]
    return [drawn for drawn in charts if drawn]


def tool_charts(metrics: Sequence[Record]) -> list[str]:
    """Turns and calls of tools, and which share of these came to nothing, where a run has conversations."""
    held = [row for row in metrics if "turns/mean" in row]
    called = [{**row, CALLS: row.get(CALLS, 0.0)} for row in held] if any(CALLS in row for row in held) else []
    kinds = list({name: None for row in held for name in row if name.startswith("tools/") and name != CALLS})
    faults = [{"step": row["step"], **{kind: row.get(kind, 0.0) for kind in kinds}} for row in called if row[CALLS]]
    labels = {kind: kind.removeprefix("tools/") for kind in kinds}
    return [
        chart("Turns", "of the policy, mean of a conversation", lines(held, {"turns/mean": "turns"}), include=(0,)),
        chart("Calls of tools", "mean of a conversation", lines(called, {CALLS: "calls"}), include=(0,)),
        chart("Calls that came to nothing", "share of the calls of tools", lines(faults, labels), include=(0,)),
    ]


def held_out(task: str, split: str, rows: Sequence[Record]) -> list[str]:
    """Charts of the evaluations, those of accuracy and of reward that are worth showing."""
    names, k = worth_showing([evaluation_of(row) for row in rows]), rows[-1]["k"]
    few = about_intervals(evaluation_of(rows[-1])) == TOO_FEW
    about, charts = f"{task}, {split}, {TOO_FEW if few else 'with 95% intervals'}", []
    if "greedy" in names:
        charts.append(chart("Held-out accuracy", about, sampled_and_greedy(rows, "mean@k", "greedy", k), (0, 1)))
    if "reward" in names:
        charts.append(chart("Held-out reward", about, sampled_and_greedy(rows, "reward@k", "reward", k)))
    return charts if "reward" not in names[:1] else charts[::-1]


def sampled_and_greedy(rows: Sequence[Record], sampled: str, best: str, k: int) -> list[Series]:
    return [
        Series(labelled(sampled, k), estimates(rows, sampled), "second"),
        Series(best, estimates(rows, best), "first"),
    ]


def accuracy_picture(runs: Sequence[tuple[Sequence[Record], Sequence[Record]]]) -> str:
    """One SVG document of the accuracy and the reward of runs, each the (evaluations, metrics) of a seed."""
    greedy, mean = ([estimates(evals, name) for evals, _ in runs] for name in ("greedy", "mean@k"))
    k = next((evals[-1]["k"] for evals, _ in runs if evals), "k")
    rewards = [line(metrics, "reward/mean") for _, metrics in runs]
    seeds = f", {len(runs)} runs and their mean" if len(runs) > 1 else ""
    accuracies = [*over_seeds(f"mean@{k}", mean, "second"), *over_seeds("greedy", greedy, "first")]
    charts = [
        chart("Held-out accuracy", f"share of prompts{seeds or ', with 95% intervals'}", accuracies, include=(0, 1)),
        chart("Training reward", f"mean of a step{seeds}", over_seeds("reward", rewards, "first")),
    ]
    return picture([drawn for drawn in charts if drawn])


def picture(charts: Sequence[str]) -> str:
    """Charts side by side as one SVG document, on paper of its own."""
    width, height = len(charts) * (WIDTH + MARGIN) + MARGIN, HEIGHT + 2 * MARGIN
    placed = (
        f'<svg x="{MARGIN + i * (WIDTH + MARGIN)}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}">{drawn}</svg>'
        for i, drawn in enumerate(charts)
    )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    paper = '<rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>'
    return "\n".join([start, f"<style>{CSS}</style>", paper, *placed, "</svg>\n"])


def over_seeds(label: str, runs: Sequence[Sequence[Point]], style: str) -> list[Series]:
    """One run as it is, with its intervals; several as thin lines under their mean."""
    runs = [points for points in runs if points]
    if len(runs) < 2:
        return [Series(label, points, style) for points in runs]
    bare = ([replace(point, low=nan, high=nan) for point in points] for points in runs)
    return [*(Series("", points, f"{style} thin") for points in bare), Series(label, mean_of(runs), style)]


def lines(rows: Sequence[Record], labels: Mapping[str, str]) -> list[Series]:
    drawn = [(label, points) for name, label in labels.items() if (points := line(rows, name))]
    return [Series(label, points, STYLES[i % len(STYLES)]) for i, (label, points) in enumerate(drawn)]


def terms(metrics: Sequence[Record]) -> dict[str, str]:
    """The terms of a composite reward; a single one would be the reward again."""
    names = [name for name in (metrics[-1] if metrics else {}) if name.startswith("reward/") and name not in NOT_TERMS]
    return {name: name.removeprefix("reward/") for name in names} if len(names) > 1 else {}


def logged(metrics: Sequence[Record]) -> list[str]:
    """The first metrics that rewards logged."""
    return list({name: None for row in metrics for name in row if name.startswith("logged/")})[:MOST_LOGGED]


def line(rows: Sequence[Record], name: str) -> list[Point]:
    return [Point(row["step"], row[name]) for row in rows if drawable(row.get(name))]


def estimates(rows: Sequence[Record], name: str) -> list[Point]:
    """A measure of the evaluations, with its intervals."""
    found = [(row["step"], estimate_of(row.get(name))) for row in rows if row.get(name)]
    return [Point(step, estimate.value, estimate.low, estimate.high) for step, estimate in found]
