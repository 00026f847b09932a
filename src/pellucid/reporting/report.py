"""Writes report.html: the results, curves, rollouts and settings of a run, on one page that needs no network.

Completions are untrusted text: every string of a run passes through `escape_text`. The page has no script, and its
content security policy forbids any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from pellucid.reporting.charts import (
    PAGE_CSS,
    draw_accuracy_picture,
    draw_run_charts,
    escape_text,
    format_count,
    make_points,
)
from pellucid.reporting.conversations import describe_tool_use, format_message, get_speaker, is_failed_call
from pellucid.reporting.eval_metrics import (
    HEADLINE_LABELS,
    INTERVALS_APART,
    INTERVALS_OVERLAP,
    NO_INTERVALS,
    TOO_FEW_PROMPTS,
    compare_intervals,
    describe_intervals,
    format_measure_name,
    get_measures,
    make_metrics_consistent,
    parse_evaluation,
    select_headline,
    select_measures,
)
from pellucid.reporting.run_files import Record, read_config, read_end_rollouts, read_evaluation_records, read_records
from pellucid.types import Estimate, Evaluation

SENTENCES = {
    "lede.nothing": "No step was finished.",
    "lede.reward": "The mean reward went from {old} at step {first} to {new} at step {last}. "
    "Held-out accuracy was not compared: that takes two evaluations.",
    "lede.gain": "In {steps}, {measure} on {n} held-out prompts {went} from {old} to {new}; {chance}.",
    "lede.same": "In {steps}, {measure} on {n} held-out prompts stayed at {new}.",
    "lede.step": "{count} step",
    "lede.steps": "{count} steps",
    **{f"lede.of_{name}": words for name, words in HEADLINE_LABELS.items()},
    "lede.rose": "rose",
    "lede.fell": "fell",
    "lede.apart": "the intervals are apart",
    "lede.overlap": "the intervals overlap, so it may be chance",
    "lede.few": "that is too few prompts for an interval, so it may be chance",
    "lede.alike": "there is no interval, as all prompts had the same reward",
}
"""The first sentence of a report. inspect/page/words.json has the same in Chinese, beside its English."""
_CHANCE_PHRASES = {INTERVALS_APART: "lede.apart", INTERVALS_OVERLAP: "lede.overlap"}


def write_report(run_dir: Path) -> Path:
    """Write report.html from the files of a run, which may be empty, unfinished or killed.

    Returns:
        The path of the report.
    """
    config = read_config(run_dir)
    metrics, evals = (
        make_metrics_consistent(list(read_records(run_dir / "metrics.jsonl"))),
        read_evaluation_records(run_dir),
    )
    sections = [_render_accuracy_section(evals), _render_curves_section(metrics, evals)]
    rollouts = _render_rollouts(run_dir / "rollouts.jsonl", get_setting(config, "log.traces") == "by_length")
    sections += [render_section("What it said", rollouts), _render_config_section(config)]
    page = Template(read_asset("report.html")).substitute(
        name=escape_text(run_dir.resolve().name),
        about=escape_text(f"{get_setting(config, 'policy.model', 'a model')} on {format_task_name(config)}"),
        style=PAGE_CSS + read_asset("report.css"),
        lede=_render_lede(metrics, evals),
        facts=_render_facts(config, metrics),
        sections="\n".join(sections),
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def render_accuracy_svg(run_dirs: Sequence[Path]) -> str:
    """Return an SVG of held-out accuracy and training reward, of one run or of several seeds and their mean."""
    return draw_accuracy_picture(
        [
            (next(iter(read_evaluation_records(run_dir).values()), []), list(read_records(run_dir / "metrics.jsonl")))
            for run_dir in run_dirs
        ]
    )


def read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def get_setting(config: Record, key: str, missing: object = "") -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return missing if value is None else value


def format_task_name(config: Record) -> str:
    """Return the names of a task and of the tasks within it, such as "prefixed curriculum arithmetic"."""
    section, names = get_setting(config, "task", {}), []
    while isinstance(section, Mapping):
        names.append(str(section.get("name", "a task")))
        section = section.get("task")
    return " ".join(names)


def _format_estimate_html(name: str, estimate: Estimate) -> str:
    """Return an accuracy in percent, or a reward, with its interval if it has one."""
    if name.startswith("reward"):
        value, bounds = f"{estimate.value:.3f}", f"[{estimate.low:.3f}, {estimate.high:.3f}]"
    else:
        value, bounds = f"{100 * estimate.value:.1f}%", f"[{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    return f"{value} <small>{bounds}</small>" if estimate.has_interval else value


class Lede(NamedTuple):
    """One or two sentences on the result of a run, before they are put into a language."""

    key: str
    """The key of the sentence in SENTENCES."""
    values: Mapping[str, str]
    """The values of the sentence by name, as HTML."""
    phrases: Mapping[str, str] = {}
    """The keys in SENTENCES of its phrases, by name."""


def _render_lede(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    """Return the result of the run in English."""
    key, values, phrases = make_lede(metrics, evals)
    texts = {name: SENTENCES[phrase].format(**values) for name, phrase in phrases.items()}
    return SENTENCES[key].format(**values, **texts)


def make_lede(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> Lede:
    """Return the change of the headline between the first and the last evaluation, or of the training reward."""
    records = next(iter(evals.values()), [])
    ends = [parse_evaluation(records[0]), parse_evaluation(records[-1])] if len(records) > 1 else []
    if ends and (name := select_headline(ends)):
        return _make_gain_lede(name, *ends, steps=records[-1]["step"] - records[0]["step"])
    rewards = make_points(metrics, "reward/mean")
    if not rewards:
        return Lede("lede.nothing", {})
    first, last = rewards[0], rewards[-1]
    values = {"old": f"{first.y:.3f}", "first": f"{first.x}", "new": f"{last.y:.3f}", "last": f"{last.x}"}
    return Lede("lede.reward", values)


def _make_gain_lede(name: str, first: Evaluation, last: Evaluation, steps: int) -> Lede:
    """Return the change of the headline over `steps` steps."""
    old, new = get_measures(first)[name], get_measures(last)[name]
    gain = round(new.value - old.value, 9)
    ends = {"old": _format_estimate_html(name, old), "new": _format_estimate_html(name, new)}
    phrases = {
        "steps": "lede.step" if steps == 1 else "lede.steps",
        "measure": f"lede.of_{name}",
        "went": "lede.rose" if gain > 0 else "lede.fell",
        "chance": _CHANCE_PHRASES.get(
            compare_intervals(old, new), "lede.few" if describe_intervals(last) == TOO_FEW_PROMPTS else "lede.alike"
        ),
    }
    if not gain:
        del phrases["went"], phrases["chance"]
    return Lede("lede.gain" if gain else "lede.same", {**ends, "n": f"{last.n}", "count": f"{steps:,}"}, phrases)


def _render_facts(config: Record, metrics: Sequence[Record]) -> str:
    """Render steps, time, tokens and failures."""
    planned = None if get_setting(config, "algorithm.minutes") else get_setting(config, "algorithm.steps")
    steps = metrics[-1]["step"] if metrics else 0
    failed, skipped, idle = (int(sum_metric(metrics, name)) for name in ("reward/failed", "skipped", "idle"))
    rows = {
        "Steps": (f"{steps:,} of {planned:,}" if planned else f"{steps:,}", bool(planned) and steps < planned),
        "Time in steps": (format_duration(sum_metric(metrics, "time/step")), False),
        "Tokens sampled": (f"{sum_metric(metrics, 'tokens'):,.0f}", False),
        "Failed rewards": (f"{failed:,}", failed > 0),
        **{
            f"Failed, {escape_text(name)}": (f"{share:.1%}", True)
            for name, share in _compute_failed_term_shares(metrics).items()
        },
        "Skipped updates": (f"{skipped:,}", skipped > 0),
        "Updates without a gradient": (f"{idle:,}", idle > 0),
    }
    if any("loss_scale" in row for row in metrics):
        overflowed = int(sum_metric(metrics, "skipped/overflow"))
        rows["Updates too large for fp16"] = (f"{overflowed:,}", overflowed > 0)
    return render_fact_list(rows)


def _compute_failed_term_shares(metrics: Sequence[Record]) -> dict[str, float]:
    """Return the mean over steps of the share of completions for which each term failed, of the terms that did."""
    names = {name: None for row in metrics for name in row if name.startswith("failed/")}
    return {name.removeprefix("failed/"): sum_metric(metrics, name) / len(metrics) for name in names}


def render_fact_list(rows: Mapping[str, tuple[str, bool]]) -> str:
    """Render values by label, each with whether it is a warning."""
    return "\n".join(
        f"<div><dt>{name}</dt><dd{' class=warn' if warn else ''}>{value}</dd></div>"
        for name, (value, warn) in rows.items()
    )


def sum_metric(metrics: Sequence[Record], name: str) -> float:
    return sum(row.get(name) or 0 for row in metrics)


def format_duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.0f} s"


def render_section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def _render_accuracy_section(evals: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    return render_section(
        "Before and after", "\n".join(_render_comparison_table(*key, rows) for key, rows in evals.items())
    )


def _render_comparison_table(task: str, split: str, rows: Sequence[Record]) -> str:
    first, last = parse_evaluation(rows[0]), parse_evaluation(rows[-1])
    caption = f"{escape_text(task)}, {escape_text(split)}: {last.n} prompts, {last.k} samples of each"
    caption += f"; {describe_intervals(last)}"
    heads = ("", f"Step {rows[0]['step']:,}", f"Step {rows[-1]['step']:,}", "Gain, intervals")
    cells = "".join(_render_measure_row(name, first, last) for name in select_measures([first, last]))
    return (
        f'<div class="wide"><table><caption>{caption}</caption>\n'
        f"<thead><tr>{''.join(f'<th scope=col>{head}</th>' for head in heads)}</tr></thead>\n"
        f"<tbody>{cells}</tbody></table></div>"
    )


def _render_measure_row(name: str, first: Evaluation, last: Evaluation) -> str:
    before, after = (get_measures(evaluation).get(name) for evaluation in (first, last))
    if not before or not after:
        return ""
    gain = after.value - before.value
    change = f"{gain:+.3f}" if name.startswith("reward") else f"{100 * gain:+.1f}"
    intervals = {INTERVALS_APART: "apart", INTERVALS_OVERLAP: "overlapping"}.get(
        compare_intervals(before, after), NO_INTERVALS
    )
    cells = (
        _format_estimate_html(name, before),
        _format_estimate_html(name, after),
        f"{change} <small>{intervals}</small>",
    )
    label = format_measure_name(name, last.k)
    return f"<tr><th scope=row>{label}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _render_curves_section(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    charts = "\n".join(draw_run_charts(metrics, evals))
    return render_section("Curves", f'<div class="charts">\n{charts}\n</div>' if charts else "")


def _render_config_section(config: Record) -> str:
    rows = "\n".join(
        f"<tr><th scope=row>{escape_text(key)}</th><td>{escape_text(value)}</td></tr>"
        for key, value in flatten_config(config)
    )
    head = "<thead><tr><th scope=col>Setting</th><th scope=col>Value</th></tr></thead>"
    table = f"<table>{head}\n<tbody>{rows}</tbody></table>"
    return f"<details><summary>Settings</summary>{table}</details>" if rows else ""


def flatten_config(config: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------- rollouts


MAX_TEXT_CHARACTERS = 2000
_MAX_STRIP_TOKENS = 400
MAX_MESSAGES = 40
_PICKS_PER_RANK = 2


def _render_rollouts(rollouts: Path, by_length: bool = False) -> str:
    """Render the best and the worst rollouts of the first and the last step, or of each third of them by length."""
    steps = [rows for rows in read_end_rollouts(rollouts) if rows]
    scope = "each third of a step's completions by length" if by_length else "a step"
    has_conversations = any(row.get("messages") for rows in steps for row in rows)
    legend = (
        " What was given to it is a thin line. Beside what it said stands a solid bar." if has_conversations else ""
    )
    note = (
        f'<p class="soft">The best and the worst of {scope}. Each cell of a strip is a token: the stronger '
        f"its colour, the less likely the policy was to say it.{legend}</p>"
    )
    cards = "\n".join(f"<h3>Step {rows[0]['step']:,}</h3>\n{_render_cards(rows, by_length)}" for rows in steps)
    return f"{note}\n{cards}" if cards else ""


def _render_cards(rollouts: Sequence[Record], by_length: bool = False) -> str:
    """Render the best and the worst completions without duplicates. A failed reward is worse than any other."""
    distinct = list({_make_rollout_key(rollout): rollout for rollout in rollouts}.values())
    if by_length:
        picked = [pick for third in _split_by_length(distinct) for pick in _pick_extremes(third, 1)]
    else:
        picked = _pick_extremes(distinct, _PICKS_PER_RANK)
    articles = "\n".join(_render_card(rank, rollout) for rank, rollout in picked)
    return f'<div class="cards">\n{articles}\n</div>'


def _make_rollout_key(rollout: Record) -> tuple[str, str, str]:
    """Return what duplicates have in common: the whole conversation, not only its last turn."""
    return rollout["prompt"], rollout["completion"], json.dumps(rollout.get("messages"))


def _pick_extremes(rollouts: Sequence[Record], count: int) -> list[tuple[str, Record]]:
    ranked = sorted(rollouts, key=lambda rollout: -inf if rollout["reward"] is None else rollout["reward"])
    worst, best = ranked[:-count][:count], ranked[-count:][::-1]
    return [*(("best", rollout) for rollout in best), *(("worst", rollout) for rollout in worst)]


def _split_by_length(rollouts: Sequence[Record]) -> list[Sequence[Record]]:
    """Return the short, the medium and the long rollouts; fewer groups if there are fewer than three rollouts."""
    ordered, n = sorted(rollouts, key=lambda rollout: len(rollout["tokens"])), len(rollouts)
    thirds = [ordered[i * n // 3 : (i + 1) * n // 3] for i in range(3)]
    return [third for third in thirds if third]


def _render_card(rank: str, rollout: Record) -> str:
    error = f'<p class="warn">{clip_text(rollout["error"])}</p>' if rollout.get("error") else ""
    answer = f'<pre dir="auto" tabindex="0">{_render_prefix(rollout)}{clip_text(rollout["completion"])}</pre>'
    strip = render_token_strip(rollout["logprobs"], rollout.get("given", ()))
    return (
        f'<article class="{rank}"><p><b>{rank}</b>, {", ".join(_describe_rollout(rollout))}</p>{error}\n'
        f'<pre class="prompt" dir="auto" tabindex="0">{clip_text(rollout["prompt"])}</pre>\n'
        f"{_render_conversation(rollout) if rollout.get('messages') else answer}"
        f"{_render_extras(rollout.get('extra', {}))}{strip}</article>"
    )


def _describe_rollout(rollout: Record) -> Iterator[str]:
    """Yield the reward, the length and the ending of a rollout."""
    reward, advantage, own = rollout["reward"], rollout["advantage"], rollout.get("environment_reward")
    yield "reward failed" if reward is None else f"reward {reward:.3f}"
    if own is not None and own != reward:
        yield f"{own:.3f} from the environment"
    yield "no advantage" if advantage is None else f"advantage {advantage:+.2f}"
    if rollout.get("messages"):
        yield from map(escape_text, describe_tool_use(rollout["turns"], rollout.get("events", {})))
        given = sum(end - start for start, end in rollout.get("given", ()))
        yield f"{format_count(len(rollout['tokens']) - given, 'token')} sampled and {given:,} given"
    else:
        yield format_count(len(rollout["tokens"]), "token")
    yield "finished" if rollout["finished"] else "cut off"


def _render_conversation(rollout: Record) -> str:
    """Render the messages of a conversation, with those of earlier branches first."""
    *earlier, last = [*rollout.get("branches", ()), rollout]
    items = (
        [_render_turn("prefix", "given", "given", f"<i>{clip_text(rollout['prefix'])}</i>")]
        if rollout.get("prefix")
        else []
    )
    for branch in earlier:
        items += [*_render_messages(branch["messages"]), '<li class="cut"><p>the history was rewritten</p></li>']
    return '<ol class="talk">\n' + "\n".join([*items, *_render_messages(last["messages"])]) + "\n</ol>"


def _render_messages(messages: Sequence[Record]) -> list[str]:
    """Render the messages of a sequence. Of more than MAX_MESSAGES, the middle is left out."""
    left_out = len(messages) - MAX_MESSAGES
    if left_out <= 0:
        return [_render_message(message) for message in messages]
    half = MAX_MESSAGES // 2
    note = f'<li class="cut"><p>{format_count(left_out, "more message")} in rollouts.jsonl</p></li>'
    return [*map(_render_message, messages[:half]), note, *map(_render_message, messages[-half:])]


def _render_message(message: Record) -> str:
    fault = ', <b class="warn">the call came to nothing</b>' if is_failed_call(message) else ""
    kind = "sampled" if message.get("role") == "assistant" else "given"
    return _render_turn(escape_text(get_speaker(message)), kind, f"{kind}{fault}", clip_text(format_message(message)))


def _render_turn(who: str, kind: str, about: str, text: str) -> str:
    return f'<li class="{kind}"><p><b>{who}</b>, {about}</p><pre dir="auto" tabindex="0">{text}</pre></li>'


def _render_extras(columns: Record) -> str:
    """Render what rewards logged beside the completion."""
    rows = (f"<b>{clip_text(name)}</b> {clip_text(str(value))}" for name, value in columns.items())
    return "".join(f"\n<p>{row}</p>" for row in rows)


def _render_prefix(rollout: Record) -> str:
    """Render the prefix, set apart from the completion."""
    return f"<i>{clip_text(rollout['prefix'])}</i>" if rollout.get("prefix") else ""


def clip_text(text: str) -> str:
    rest = len(text) - MAX_TEXT_CHARACTERS
    return escape_text(text[:MAX_TEXT_CHARACTERS]) + (
        f"\n[{rest:,} more characters in rollouts.jsonl]" if rest > 0 else ""
    )


def render_token_strip(logprobs: Sequence[float | None], given: Sequence[Sequence[int]] = ()) -> str:
    """Render the tokens of a completion as cells, given ones as a thin line.

    The cells show the probabilities of the tokens: their text would need the tokenizer.
    """
    probabilities = [0.0 if logprob is None else exp(logprob) for logprob in logprobs[:_MAX_STRIP_TOKENS]]
    given_indices = {i for start, end in given for i in range(start, min(end, len(probabilities)))}
    sampled = [p for i, p in enumerate(probabilities) if i not in given_indices]
    if not sampled:
        return ""
    cells = "".join(
        _render_given_cell(i) if i in given_indices else _render_sampled_cell(i, p) for i, p in enumerate(probabilities)
    )
    label = f"the chances of {format_count(len(sampled), 'token')}, the lowest {min(sampled):.1%}"
    return (
        f'\n<svg class="strip" role="img" aria-label="{label}" viewBox="0 0 {len(probabilities)} 1" '
        f'preserveAspectRatio="none" style="max-width:{len(probabilities)}rem">{cells}</svg>'
    )


def _render_sampled_cell(i: int, p: float) -> str:
    return f'<rect x="{i}" width="1" height="1" fill-opacity="{1 - p:.2f}"><title>token {i + 1}: {p:.1%}</title></rect>'


def _render_given_cell(i: int) -> str:
    return f'<rect class="given" x="{i}" y="0.4" width="1" height="0.2"><title>token {i + 1}: given</title></rect>'
