"""Reasons why a run does not learn, found in its numbers; each has a plain sentence that names a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from pellucid.inspect.group_history import ALL_RIGHT, ALL_WRONG, EQUAL, PARTIAL
from pellucid.inspect.sentences import format_significant
from pellucid.reporting.charts import NON_TERM_METRICS
from pellucid.reporting.eval_metrics import compute_known_mean
from pellucid.reporting.report import get_setting
from pellucid.reporting.run_files import Record
from pellucid.reporting.warning_signs import find_warning_signs
from pellucid.types import Evaluation

JUDGED_STEPS = 20
"""The number of last steps that are judged."""
_ALL_FAILED_SHARE = 0.95
"""With this share of failed rewards, or more, the reward is said to fail always."""
_NO_SIGNAL_SHARE = 0.8
"""With this share of groups without a signal, or more, a run has little to learn from."""
_CUT_OFF_NOTE_SHARE, _CUT_OFF_TROUBLE_SHARE = 0.1, 0.5
"""With these shares of cut-off answers, or more, the finding is a note, or trouble."""
_CLIPPED_TROUBLE_SHARE = 0.5
"""With this share of clipped tokens, or more, the clip holds the run back."""
_ZERO_LOSS_TOLERANCE = 1e-3
"""A loss smaller than this counts as 0."""
_TROUBLE, _NOTE, _FINE = "trouble", "note", "fine"
_Finding = dict[str, Any]


def diagnose_run(
    config: Record,
    metrics: Sequence[Record],
    summaries: Sequence[Record],
    error: str = "",
    evaluations: Mapping[int, Evaluation] | None = None,
) -> list[_Finding]:
    """Return the reasons why a run does not learn, then numbers that only look wrong.

    Each finding has a `key`, for the sentence `why.KEY` in page/words.json, a `level`, the `step` that shows it best,
    and the `values` of the sentence.

    Args:
        config: The settings of the run.
        metrics: Its metrics, step by step.
        summaries: The summaries of the last steps whose groups are known.
        error: Why the last reward failed, if one did.
        evaluations: Its evaluations by step.
    """
    if not metrics:
        return [_make_finding("no_step", _TROUBLE, 0)]
    recent = metrics[-JUDGED_STEPS:]
    found = [
        *_find_reward_failures(config, recent, error),
        *_find_missing_signal(recent, summaries),
        *_find_cut_off_answers(config, recent),
        *_find_zero_terms(metrics),
        *_find_clipping(config, recent),
        *_find_skipped_updates(recent),
        *_find_warning_signs(metrics, evaluations or {}),
        *_find_zero_loss(config, recent),
    ]
    steps = {"steps": len(recent), "first": recent[0]["step"], "last": recent[-1]["step"]}
    return [{**finding, "values": {**steps, **finding["values"]}} for finding in found]


def _make_finding(key: str, level: str, step: int, **values: Any) -> _Finding:
    return {"key": key, "level": level, "step": step, "values": values}


def _average_metric(rows: Sequence[Record], name: str) -> float:
    """Return the mean of a metric over the steps that have it; 0 if none has."""
    return compute_known_mean(row.get(name) for row in rows) or 0.0


def _find_reward_failures(config: Record, rows: Sequence[Record], error: str) -> Iterator[_Finding]:
    failed = _average_metric(rows, "reward/failed")
    if failed:
        step = next(row["step"] for row in reversed(rows) if row.get("reward/failed"))
        sizes = (get_setting(config, f"algorithm.{name}", 0) for name in ("prompts_per_step", "group_size"))
        share = min(1.0, failed / completions) if (completions := prod(sizes)) else 0.0
        yield _make_finding(
            "reward_fails" if share >= _ALL_FAILED_SHARE else "reward_fails_sometimes",
            _TROUBLE,
            step,
            failed=format_significant(failed),
            share=f"{share:.0%}",
            error=error.strip().partition("\n")[0] or "?",
        )


def _find_missing_signal(rows: Sequence[Record], summaries: Sequence[Record]) -> Iterator[_Finding]:
    """Find groups of equal rewards, and from the summaries which partial reward most have."""
    right, wrong, equal = (_average_metric(rows, f"groups/dead_{name}") for name in (ALL_RIGHT, ALL_WRONG, EQUAL))
    if right + wrong + equal < _NO_SIGNAL_SHARE:
        return
    groups = [group for summary in summaries for group in summary["groups"]]
    partial = [group["rewards"][0] for group in groups if group["signal"] == PARTIAL]
    values = {"share": f"{right + wrong + equal:.0%}", "right": f"{right:.0%}", "wrong": f"{wrong:.0%}"}
    key = "no_signal"
    if equal:
        key = "all_equal"
    elif len(partial) > len(groups) / 2:
        key, values["reward"] = "all_partial", format_significant(partial[0])
    elif right >= _NO_SIGNAL_SHARE:
        key = "all_right"
    elif wrong >= _NO_SIGNAL_SHARE:
        key = "all_wrong"
    yield _make_finding(key, _TROUBLE, rows[-1]["step"], **values)


def _find_cut_off_answers(config: Record, rows: Sequence[Record]) -> Iterator[_Finding]:
    finished = compute_known_mean(row.get("completion/finished") for row in rows)
    cut_off = 0.0 if finished is None else 1 - finished
    if cut_off >= _CUT_OFF_NOTE_SHARE:
        limit = get_setting(config, "sampler.max_tokens", "?")
        level = _TROUBLE if cut_off >= _CUT_OFF_TROUBLE_SHARE else _NOTE
        yield _make_finding("cut_off", level, rows[-1]["step"], share=f"{cut_off:.0%}", limit=limit)


def _find_zero_terms(rows: Sequence[Record]) -> Iterator[_Finding]:
    """Find reward terms that were 0 in every completion of the run."""
    terms = {name: None for row in rows for name in row if name.startswith("reward/") and name not in NON_TERM_METRICS}
    for name in terms:
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values and not any(values):
            about = {"term": name.removeprefix("reward/"), "all": len(values)}
            yield _make_finding("never_sampled", _TROUBLE, rows[-1]["step"], **about)


def _find_clipping(config: Record, rows: Sequence[Record]) -> Iterator[_Finding]:
    share = _average_metric(rows, "clip/low") + _average_metric(rows, "clip/high")
    if share >= _CLIPPED_TROUBLE_SHARE:
        bounds = {
            name: format_significant(get_setting(config, f"algorithm.{name}", None))
            for name in ("clip_low", "clip_high")
        }
        worst = max(rows, key=lambda row: (row.get("clip/low") or 0.0) + (row.get("clip/high") or 0.0))
        yield _make_finding("clipped", _TROUBLE, worst["step"], share=f"{share:.0%}", **bounds)


def _find_skipped_updates(rows: Sequence[Record]) -> Iterator[_Finding]:
    """Find updates that were skipped, or that had a learning rate of 0."""
    if (skipped := _average_metric(rows, "skipped")) >= 0.5:
        yield _make_finding("skipped", _TROUBLE, rows[-1]["step"], share=f"{skipped:.0%}")
    rates = [rate for row in rows[:-1] if (rate := row.get("lr")) is not None]  # the last one of a schedule may be 0
    if rates and not any(rates):
        yield _make_finding("lr_zero", _TROUBLE, rows[-1]["step"])


def _find_warning_signs(metrics: Sequence[Record], evaluations: Mapping[int, Evaluation]) -> Iterator[_Finding]:
    """Find accuracy that fell, updates that were too large, and entropy that left its range, in any step of the run."""
    for sign in find_warning_signs(metrics, evaluations):
        is_recent = sign.step > metrics[-1]["step"] - JUDGED_STEPS
        level = _TROUBLE if is_recent else _NOTE
        yield _make_finding(sign.key.removeprefix("why."), level, sign.step, **sign.values)


def _find_zero_loss(config: Record, rows: Sequence[Record]) -> Iterator[_Finding]:
    """Find a loss near 0 with a gradient, which is normal: advantages sum to 0, and ratios are near 1."""
    names = {"loss": "loss", "norm": "grad_norm", "ratio": "ratio/mean"}
    means = {key: compute_known_mean(row.get(name) for row in rows) for key, name in names.items()}
    if means["loss"] is not None and means["norm"] and abs(means["loss"]) < _ZERO_LOSS_TOLERANCE:
        once = all(get_setting(config, f"algorithm.{name}", 1) == 1 for name in ("epochs", "minibatches"))
        values = {key: format_significant(value) for key, value in means.items()}
        yield _make_finding("loss_zero" if once else "loss_small", _FINE, rows[-1]["step"], **values)
