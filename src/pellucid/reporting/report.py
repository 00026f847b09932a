"""Writes report.html: the results, curves, rollouts and settings of a run, on one page that needs no network.

Completions are untrusted text: every string of a run passes through `escape_text`. The page has no script, and its
content security policy forbids any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, inf
from pathlib import Path
from string import Template
from typing import Any

from pellucid.reporting.best_evaluation import find_best_evaluation
from pellucid.reporting.charts import (
    PAGE_CSS,
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
    TOO_FEW_PROMPTS,
    compare_intervals,
    describe_intervals,
    format_measure_name,
    get_measures,
    make_metrics_consistent,
    pair_measures,
    parse_evaluation,
    select_headline,
)
from pellucid.reporting.run_files import (
    BEST_MODEL_DIR,
    Record,
    read_best_model_step,
    read_config,
    read_end_rollouts,
    read_evaluation_records,
    read_evaluations,
    read_records,
)
from pellucid.reporting.warning_signs import WarningSign, find_warning_signs
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
"""Templates of the first sentence of a report. inspect/page/words.json has them in English and Chinese."""
_CHANCE_PHRASES = {INTERVALS_APART: "lede.apart", INTERVALS_OVERLAP: "lede.overlap"}


def write_report(run_dir: Path) -> Path:
    """Write report.html from the files of a run, which may be empty, unfinished or killed. Return its path."""
    config, evals = read_config(run_dir), read_evaluation_records(run_dir)
    metrics = make_metrics_consistent(list(read_records(run_dir / "metrics.jsonl")))
    lede, charts = make_lede(metrics, evals), "\n".join(draw_run_charts(metrics, evals))
    phrases = {name: SENTENCES[key].format(**lede["values"]) for name, key in lede["phrases"].items()}
    rollouts = _render_rollouts(run_dir / "rollouts.jsonl", get_setting(config, "log.traces") == "by_length")
    sections = [
        render_section("Before and after", "\n".join(_render_comparison(*key, rows) for key, rows in evals.items())),
        render_section("Curves", f'<div class="charts">\n{charts}\n</div>' if charts else ""),
        render_section("Completions", rollouts),
        _render_settings(config),
    ]
    page = Template(read_asset("report.html")).substitute(
        name=escape_text(run_dir.resolve().name),
        about=escape_text(f"{get_setting(config, 'policy.model', 'a model')} on {format_task_name(config)}"),
        style=PAGE_CSS + read_asset("report.css"),
        lede=SENTENCES[lede["key"]].format(**lede["values"], **phrases),
        signs=_render_signs(find_warning_signs(metrics, read_evaluations(run_dir))),
        facts=_render_facts(config, metrics, _describe_best(run_dir)),
        sections="\n".join(sections),
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


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


def make_lede(metrics: Sequence[Record], evals: Mapping[tuple[str, str], Sequence[Record]]) -> dict[str, Any]:
    """Return the change of the headline measure from the first to the last evaluation, or else of the training reward.

    The result depends on no language: `key` and `phrases` hold keys of SENTENCES, and `values` HTML.
    """
    records = next(iter(evals.values()), [])
    ends = [parse_evaluation(records[0]), parse_evaluation(records[-1])] if len(records) > 1 else []
    if ends and (name := select_headline(ends)):
        return _make_gain_lede(name, *ends, steps=records[-1]["step"] - records[0]["step"])
    rewards = make_points(metrics, "reward/mean")
    if not rewards:
        return {"key": "lede.nothing", "values": {}, "phrases": {}}
    first, last = rewards[0], rewards[-1]
    values = {"old": f"{first.y:.3f}", "first": f"{first.x}", "new": f"{last.y:.3f}", "last": f"{last.x}"}
    return {"key": "lede.reward", "values": values, "phrases": {}}


def _make_gain_lede(name: str, first: Evaluation, last: Evaluation, steps: int) -> dict[str, Any]:
    old, new = get_measures(first)[name], get_measures(last)[name]
    gain = round(new.value - old.value, 9)
    values = {"old": _format_estimate_html(name, old), "new": _format_estimate_html(name, new)}
    values |= {"n": f"{last.n}", "count": f"{steps:,}"}
    phrase_keys = {"steps": "lede.step" if steps == 1 else "lede.steps", "measure": f"lede.of_{name}"}
    if gain:
        without_interval = "lede.few" if describe_intervals(last) == TOO_FEW_PROMPTS else "lede.alike"
        phrase_keys["went"] = "lede.rose" if gain > 0 else "lede.fell"
        phrase_keys["chance"] = _CHANCE_PHRASES.get(compare_intervals(old, new), without_interval)
    return {"key": "lede.gain" if gain else "lede.same", "values": values, "phrases": phrase_keys}


def _render_signs(signs: Sequence[WarningSign]) -> str:
    """Render a sentence for each sign that training has gone wrong."""
    return "\n".join(f'<p class="warn">{escape_text(sign.describe())}</p>' for sign in signs)


def _describe_best(run_dir: Path) -> str:
    """Return which evaluation was the best, and where its model is; empty if there are less than two."""
    evaluations = read_evaluations(run_dir)
    best = find_best_evaluation(evaluations)
    if best is None or len(evaluations) < 2:
        return ""
    is_kept = read_best_model_step(run_dir) == best.step
    return f"{best.describe()}{f', in {BEST_MODEL_DIR}/' if is_kept else ''}"


def _render_facts(config: Record, metrics: Sequence[Record], best: str) -> str:
    """Render steps, time, tokens, the best evaluation and failures."""
    planned = None if get_setting(config, "algorithm.minutes") else get_setting(config, "algorithm.steps")
    steps = metrics[-1]["step"] if metrics else 0
    failed_terms = {name: None for row in metrics for name in row if name.startswith("failed/")}
    counts = {
        "Failed rewards": "reward/failed",
        "Skipped updates": "skipped",
        "Updates without a gradient": "idle",
        **({"Updates too large for fp16": "skipped/overflow"} if any("loss_scale" in row for row in metrics) else {}),
    }
    totals = {label: int(sum_metric(metrics, name)) for label, name in counts.items()}
    rows = {
        "Steps": (f"{steps:,} of {planned:,}" if planned else f"{steps:,}", bool(planned) and steps < planned),
        "Time in steps": (format_duration(sum_metric(metrics, "time/step")), False),
        "Tokens sampled": (f"{sum_metric(metrics, 'tokens'):,.0f}", False),
        **({"Best evaluation": (escape_text(best), False)} if best else {}),
        **{label: (f"{total:,}", total > 0) for label, total in totals.items()},
        **{
            f"Failed, {escape_text(name.removeprefix('failed/'))}": (
                f"{sum_metric(metrics, name) / len(metrics):.1%}",
                True,
            )
            for name in failed_terms
        },
    }
    return render_fact_list(rows)


def render_fact_list(rows: Mapping[str, tuple[str, bool]]) -> str:
    """Render the value of each label, and whether it is a warning."""
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


def render_table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", css_class: str = "") -> str:
    """Render a table. All texts are HTML; the first cell of a row is its heading."""
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    body = "\n".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for first, *cells in rows
    )
    about = f"<caption>{caption}</caption>\n" if caption else ""
    return (
        f'<div class="wide"><table class="{css_class}">{about}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _render_comparison(task: str, split: str, records: Sequence[Record]) -> str:
    """Render the first and the last evaluation of a task as a table."""
    first, last = parse_evaluation(records[0]), parse_evaluation(records[-1])
    caption = f"{escape_text(task)}, {escape_text(split)}: {last.n} prompts, {last.k} samples of each"
    rows = []
    for name, before, after in pair_measures(first, last):
        gain = after.value - before.value
        change = f"{gain:+.3f}" if name.startswith("reward") else f"{100 * gain:+.1f}"
        intervals = compare_intervals(before, after)
        note = "overlapping" if intervals == INTERVALS_OVERLAP else intervals
        estimates = (_format_estimate_html(name, estimate) for estimate in (before, after))
        rows.append([format_measure_name(name, last.k), *estimates, f"{change} <small>{note}</small>"])
    heads = ("", *(f"Step {record['step']:,}" for record in (records[0], records[-1])), "Gain, intervals")
    return render_table(heads, rows, f"{caption}; {describe_intervals(last)}")


def _render_settings(config: Record) -> str:
    rows = [(escape_text(key), escape_text(value)) for key, value in flatten_config(config)]
    table = render_table(("Setting", "Value"), rows)
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


def _render_rollouts(path: Path, by_length: bool) -> str:
    """Render the best and the worst rollouts of the first and the last step, or of each third by length."""
    steps = [rows for rows in read_end_rollouts(path) if rows]
    scope = "each third of a step's completions by length" if by_length else "a step"
    has_conversations = any(row.get("messages") for rows in steps for row in rows)
    legend = (
        " Given tokens are a thin line; sampled messages have a solid bar beside them." if has_conversations else ""
    )
    note = (
        f'<p class="soft">The best and the worst of {scope}. Each cell of a strip is a token: the stronger '
        f"its color, the less likely the policy was to sample it.{legend}</p>"
    )
    cards = "\n".join(f"<h3>Step {rows[0]['step']:,}</h3>\n{_render_cards(rows, by_length)}" for rows in steps)
    return f"{note}\n{cards}" if cards else ""


def _render_cards(rollouts: Sequence[Record], by_length: bool) -> str:
    """Render the best and the worst rollouts. Those with the same conversation are rendered once."""
    distinct = list({(r["prompt"], r["completion"], json.dumps(r.get("messages"))): r for r in rollouts}.values())
    if by_length:
        ordered, n = sorted(distinct, key=lambda rollout: len(rollout["tokens"])), len(distinct)
        thirds = (ordered[i * n // 3 : (i + 1) * n // 3] for i in range(3))
        cards = [card for third in thirds for card in _render_extremes(third, 1)]
    else:
        cards = _render_extremes(distinct, _PICKS_PER_RANK)
    return '<div class="cards">\n' + "\n".join(cards) + "\n</div>"


def _render_extremes(rollouts: Sequence[Record], count: int) -> list[str]:
    """Render the best and the worst rollouts. A failed reward is worse than any other."""
    ranked = sorted(rollouts, key=lambda rollout: -inf if rollout["reward"] is None else rollout["reward"])
    # The best are taken first, so that no rollout of a short list is both.
    worst, best = ranked[:-count][:count], ranked[-count:][::-1]
    return [_render_card("best", rollout) for rollout in best] + [_render_card("worst", rollout) for rollout in worst]


def _render_card(rank: str, rollout: Record) -> str:
    error = f'<p class="warn">{clip_text(rollout["error"])}</p>' if rollout.get("error") else ""
    prefix = f"<i>{clip_text(rollout['prefix'])}</i>" if rollout.get("prefix") else ""
    if rollout.get("messages"):
        answer = _render_conversation(rollout, prefix)
    else:
        answer = f'<pre dir="auto" tabindex="0">{prefix}{clip_text(rollout["completion"])}</pre>'
    logged = (
        f"\n<p><b>{clip_text(name)}</b> {clip_text(str(value))}</p>" for name, value in rollout.get("extra", {}).items()
    )
    return (
        f'<article class="{rank}"><p><b>{rank}</b>, {", ".join(_describe_rollout(rollout))}</p>{error}\n'
        f'<pre class="prompt" dir="auto" tabindex="0">{clip_text(rollout["prompt"])}</pre>\n'
        f"{answer}{''.join(logged)}{render_token_strip(rollout['logprobs'], rollout.get('given', ()))}</article>"
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


def _render_conversation(rollout: Record, prefix: str) -> str:
    """Render the messages of a conversation, with those of earlier branches first."""
    turns = [_render_turn("prefix", "given", "given", prefix)] if prefix else []
    for branch in rollout.get("branches", ()):
        turns += [*_render_messages(branch["messages"]), '<li class="cut"><p>the history was rewritten</p></li>']
    turns += _render_messages(rollout["messages"])
    return '<ol class="talk">\n' + "\n".join(turns) + "\n</ol>"


def _render_messages(messages: Sequence[Record]) -> list[str]:
    """Render the messages of a sequence. If there are over MAX_MESSAGES, leave out the middle."""
    turns, half = [], MAX_MESSAGES // 2
    left_out = range(half, len(messages) - half) if len(messages) > MAX_MESSAGES else range(0)
    for i, message in enumerate(messages):
        if i not in left_out:
            kind = "sampled" if message.get("role") == "assistant" else "given"
            fault = ', <b class="warn">the call failed</b>' if is_failed_call(message) else ""
            speaker, text = escape_text(get_speaker(message)), clip_text(format_message(message))
            turns.append(_render_turn(speaker, kind, f"{kind}{fault}", text))
        elif i == half:
            note = f"{format_count(len(left_out), 'more message')} in rollouts.jsonl"
            turns.append(f'<li class="cut"><p>{note}</p></li>')
    return turns


def _render_turn(speaker: str, css_class: str, about: str, text: str) -> str:
    return f'<li class="{css_class}"><p><b>{speaker}</b>, {about}</p><pre dir="auto" tabindex="0">{text}</pre></li>'


def clip_text(text: str) -> str:
    rest = len(text) - MAX_TEXT_CHARACTERS
    return escape_text(text[:MAX_TEXT_CHARACTERS]) + (
        f"\n[{rest:,} more characters in rollouts.jsonl]" if rest > 0 else ""
    )


def render_token_strip(logprobs: Sequence[float | None], given: Sequence[Sequence[int]] = ()) -> str:
    """Render the probabilities of a completion's tokens as cells, with given tokens as a thin line."""
    given_tokens = {i for start, end in given for i in range(start, end)}
    cells, sampled = [], []
    for i, logprob in enumerate(logprobs[:_MAX_STRIP_TOKENS]):
        if i in given_tokens:
            shape, about = 'class="given" y="0.4" height="0.2"', "given"
        else:
            p = 0.0 if logprob is None else exp(logprob)
            sampled.append(p)
            shape, about = f'height="1" fill-opacity="{1 - p:.2f}"', f"{p:.1%}"
        cells.append(f'<rect x="{i}" width="1" {shape}><title>token {i + 1}: {about}</title></rect>')
    if not sampled:
        return ""
    label = f"the chances of {format_count(len(sampled), 'token')}, the lowest {min(sampled):.1%}"
    return (
        f'\n<svg class="strip" role="img" aria-label="{label}" viewBox="0 0 {len(cells)} 1" '
        f'preserveAspectRatio="none" style="max-width:{len(cells)}rem">{"".join(cells)}</svg>'
    )
