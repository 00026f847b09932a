"""A run folder as one HTML page that needs no network: what it learnt, how, and what it said.

Completions are hostile text: every string of a run passes through `shown`. The page has no script, and forbids any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from pellucid.reporting.charts import PAGE_CSS, shown
from pellucid.reporting.curves import accuracy_picture, curves, line
from pellucid.reporting.measures import (
    APART,
    NAMES,
    NO_INTERVAL,
    OVERLAP,
    TOO_FEW,
    about_intervals,
    between,
    consistent,
    evaluation_of,
    headline,
    labelled,
    measures,
    worth_showing,
)
from pellucid.reporting.run_folder import Record, evaluations, read_config, records
from pellucid.reporting.said import said_in
from pellucid.types import Estimate, Evaluation

SENTENCES = {
    "lede.nothing": "No step was finished.",
    "lede.reward": "The mean reward went from {old} at step {first} to {new} at step {last}. "
    "Held-out accuracy was not compared: that takes two evaluations.",
    "lede.gain": "In {steps}, {measure} on {n} held-out prompts {went} from {old} to {new}; {chance}.",
    "lede.same": "In {steps}, {measure} on {n} held-out prompts stayed at {new}.",
    "lede.step": "{count} step",
    "lede.steps": "{count} steps",
    **{f"lede.of_{name}": words for name, words in NAMES.items()},
    "lede.rose": "rose",
    "lede.fell": "fell",
    "lede.apart": "the intervals are apart",
    "lede.overlap": "the intervals overlap, so it may be chance",
    "lede.few": "that is too few prompts for an interval, so it may be chance",
    "lede.alike": "there is no interval, as all prompts had the same reward",
}
"""What a report says first. look/page/words.json has the same in Chinese, beside its English."""
CHANCE = {APART: "lede.apart", OVERLAP: "lede.overlap"}


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run folder from whatever is there: a run may be empty, unfinished or killed."""
    config = read_config(run_dir)
    metrics, evals = consistent(list(records(run_dir / "metrics.jsonl"))), evaluations(run_dir)
    sections = [accuracy_section(evals), curves_section(metrics, evals)]
    said = said_in(run_dir / "rollouts.jsonl", at(config, "log.traces") == "by_length")
    sections += [section("What it said", said), config_section(config)]
    page = Template(beside("report.html")).substitute(
        name=shown(run_dir.resolve().name),
        about=shown(f"{at(config, 'policy.model', 'a model')} on {task_of(config)}"),
        style=PAGE_CSS + beside("report.css"),
        lede=lede(metrics, evals),
        facts=facts(config, metrics),
        sections="\n".join(sections),
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def accuracy_svg(run_dirs: Sequence[Path]) -> str:
    """A picture on its own: held-out accuracy and training reward, of one run or of several seeds and their mean."""
    return accuracy_picture(
        [
            (next(iter(evaluations(run_dir).values()), []), list(records(run_dir / "metrics.jsonl")))
            for run_dir in run_dirs
        ]
    )


def beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def at(config: Record, key: str, missing: object = "") -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return missing if value is None else value


def task_of(config: Record) -> str:
    """Example: "prefixed curriculum arithmetic"."""
    section, names = at(config, "task", {}), []
    while isinstance(section, Mapping):
        names.append(str(section.get("name", "a task")))
        section = section.get("task")
    return " ".join(names)


def with_interval(name: str, estimate: Estimate) -> str:
    """An accuracy in percent, or a reward, with its interval if it has one."""
    if name.startswith("reward"):
        value, bounds = f"{estimate.value:.3f}", f"[{estimate.low:.3f}, {estimate.high:.3f}]"
    else:
        value, bounds = f"{100 * estimate.value:.1f}%", f"[{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    return f"{value} <small>{bounds}</small>" if estimate.has_interval else value


class Lede(NamedTuple):
    """One or two sentences on what happened in a run, in no language yet."""

    key: str
    """Of SENTENCES."""
    values: Mapping[str, str]
    """HTML of what the sentence names."""
    phrases: Mapping[str, str] = {}
    """And its phrases, by their keys in SENTENCES."""


def lede(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    """What happened in the run, in English."""
    key, values, phrases = happened(metrics, evals)
    told = {name: SENTENCES[phrase].format(**values) for name, phrase in phrases.items()}
    return SENTENCES[key].format(**values, **told)


def happened(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> Lede:
    measured = next(iter(evals.values()), [])
    ends = [evaluation_of(measured[0]), evaluation_of(measured[-1])] if len(measured) > 1 else []
    if ends and (name := headline(ends)):
        return gained(name, *ends, steps=measured[-1]["step"] - measured[0]["step"])
    rewards = line(metrics, "reward/mean")
    if not rewards:
        return Lede("lede.nothing", {})
    first, last = rewards[0], rewards[-1]
    values = {"old": f"{first.y:.3f}", "first": f"{first.x}", "new": f"{last.y:.3f}", "last": f"{last.x}"}
    return Lede("lede.reward", values)


def gained(name: str, first: Evaluation, last: Evaluation, steps: int) -> Lede:
    """What so many steps did to the headline: greedy accuracy, or the mean reward if no answer is right or wrong."""
    old, new = measures(first)[name], measures(last)[name]
    gain = round(new.value - old.value, 9)
    ends = {"old": with_interval(name, old), "new": with_interval(name, new)}
    phrases = {
        "steps": "lede.step" if steps == 1 else "lede.steps",
        "measure": f"lede.of_{name}",
        "went": "lede.rose" if gain > 0 else "lede.fell",
        "chance": CHANCE.get(between(old, new), "lede.few" if about_intervals(last) == TOO_FEW else "lede.alike"),
    }
    if not gain:
        del phrases["went"], phrases["chance"]
    return Lede("lede.gain" if gain else "lede.same", {**ends, "n": f"{last.n}", "count": f"{steps:,}"}, phrases)


def facts(config: Record, metrics: Sequence[Record]) -> str:
    """Steps, time, tokens, and what went wrong."""
    planned = None if at(config, "algorithm.minutes") else at(config, "algorithm.steps")
    steps = metrics[-1]["step"] if metrics else 0
    failed, skipped, idle = (int(total(metrics, name)) for name in ("reward/failed", "skipped", "idle"))
    rows = {
        "Steps": (f"{steps:,} of {planned:,}" if planned else f"{steps:,}", bool(planned) and steps < planned),
        "Time in steps": (duration(total(metrics, "time/step")), False),
        "Tokens sampled": (f"{total(metrics, 'tokens'):,.0f}", False),
        "Failed rewards": (f"{failed:,}", failed > 0),
        **{f"Failed, {shown(name)}": (f"{share:.1%}", True) for name, share in failed_shares(metrics).items()},
        "Skipped updates": (f"{skipped:,}", skipped > 0),
        "Updates without a gradient": (f"{idle:,}", idle > 0),
    }
    if any("loss_scale" in row for row in metrics):
        overflowed = int(total(metrics, "skipped/overflow"))
        rows["Updates too large for fp16"] = (f"{overflowed:,}", overflowed > 0)
    return fact_list(rows)


def failed_shares(metrics: Sequence[Record]) -> dict[str, float]:
    """The share of all completions for which each term failed, of the terms that did."""
    names = {name: None for row in metrics for name in row if name.startswith("failed/")}
    return {name.removeprefix("failed/"): total(metrics, name) / len(metrics) for name in names}


def fact_list(rows: Mapping[str, tuple[str, bool]]) -> str:
    """Values with whether each is a warning."""
    return "\n".join(
        f"<div><dt>{name}</dt><dd{' class=warn' if warn else ''}>{value}</dd></div>"
        for name, (value, warn) in rows.items()
    )


def total(metrics: Sequence[Record], name: str) -> float:
    return sum(row.get(name) or 0 for row in metrics)


def duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.0f} s"


def section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def accuracy_section(evals: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    return section("Before and after", "\n".join(before_after(*key, rows) for key, rows in evals.items()))


def before_after(task: str, split: str, rows: Sequence[Record]) -> str:
    first, last = evaluation_of(rows[0]), evaluation_of(rows[-1])
    caption = f"{shown(task)}, {shown(split)}: {last.n} prompts, {last.k} samples of each; {about_intervals(last)}"
    heads = ("", f"Step {rows[0]['step']:,}", f"Step {rows[-1]['step']:,}", "Gain, intervals")
    cells = "".join(measure_row(name, first, last) for name in worth_showing([first, last]))
    return (
        f'<div class="wide"><table><caption>{caption}</caption>\n'
        f"<thead><tr>{''.join(f'<th scope=col>{head}</th>' for head in heads)}</tr></thead>\n"
        f"<tbody>{cells}</tbody></table></div>"
    )


def measure_row(name: str, first: Evaluation, last: Evaluation) -> str:
    before, after = (measures(evaluation).get(name) for evaluation in (first, last))
    if not before or not after:
        return ""
    gain = after.value - before.value
    change = f"{gain:+.3f}" if name.startswith("reward") else f"{100 * gain:+.1f}"
    intervals = {APART: "apart", OVERLAP: "overlapping"}.get(between(before, after), NO_INTERVAL)
    cells = (with_interval(name, before), with_interval(name, after), f"{change} <small>{intervals}</small>")
    label = labelled(name, last.k)
    return f"<tr><th scope=row>{label}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def curves_section(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    drawn = "\n".join(curves(metrics, evals))
    return section("Curves", f'<div class="charts">\n{drawn}\n</div>' if drawn else "")


def config_section(config: Record) -> str:
    rows = "\n".join(f"<tr><th scope=row>{shown(key)}</th><td>{shown(value)}</td></tr>" for key, value in flat(config))
    head = "<thead><tr><th scope=col>Setting</th><th scope=col>Value</th></tr></thead>"
    table = f"<table>{head}\n<tbody>{rows}</tbody></table>"
    return f"<details><summary>Settings</summary>{table}</details>" if rows else ""


def flat(config: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
