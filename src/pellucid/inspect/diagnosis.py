"""Reasons why a run does not learn, found in its numbers; each has a plain sentence that names a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pellucid.inspect.group_history import ALL_RIGHT, ALL_WRONG, EQUAL, PARTIAL
from pellucid.inspect.sentences import format_significant
from pellucid.reporting.charts import NON_TERM_METRICS
from pellucid.reporting.eval_metrics import compute_known_mean
from pellucid.reporting.report import get_setting
from pellucid.reporting.run_files import Record

JUDGED_STEPS = 20
"""The number of last steps that are judged."""
_ALL_FAILED_SHARE = 0.95
"""With this share of failed rewards, or more, the reward is said to fail always."""
_NO_SIGNAL_SHARE = 0.8
"""With this share of groups without a signal, or more, a run has little to learn from."""
_CUT_OFF_NOTE_SHARE, _CUT_OFF_TROUBLE_SHARE = 0.1, 0.5
"""With these shares of cut-off answers, or more, they are noted, or hold the run back."""
_CLIPPED_TROUBLE_SHARE = 0.5
"""With this share of clipped tokens, or more, the clip holds the run back."""
_ZERO_LOSS_TOLERANCE = 1e-3
"""A loss smaller than this counts as 0."""
_TROUBLE, _NOTE, _FINE = "trouble", "note", "fine"


@dataclass(frozen=True, slots=True)
class _Finding:
    key: str
    """Its sentence is `why.KEY` of page/words.json."""
    level: str
    step: int
    """The step that shows it best."""
    values: Mapping[str, Any] = field(default_factory=dict)


def diagnose_run(
    config: Record, metrics: Sequence[Record], summaries: Sequence[Record], error: str = ""
) -> list[dict[str, Any]]:
    """Return what explains a run that does not learn, then what looks wrong and is right.

    Args:
        config: The settings of the run.
        metrics: Its metrics, step by step.
        summaries: The summaries of the last steps whose groups are known.
        error: Why the last reward failed, if one did.
    """
    if not metrics:
        return [asdict(_Finding("no_step", _TROUBLE, 0))]
    recent, last = metrics[-JUDGED_STEPS:], metrics[-1]["step"]
    found = [
        *_find_reward_failures(config, recent, error),
        *_find_missing_signal(recent, summaries),
        *_find_cut_off_answers(config, recent),
        *_find_zero_terms(metrics),
        *_find_clipping(config, recent),
        *_find_skipped_updates(recent),
        *_find_zero_loss(config, recent),
    ]
    steps = {"steps": len(recent), "first": recent[0]["step"], "last": last}
    return [asdict(_Finding(each.key, each.level, each.step, {**steps, **each.values})) for each in found]


def _average_metric(rows: Sequence[Record], name: str) -> float | None:
    return compute_known_mean(row.get(name) for row in rows)


def _format_percent(value: float) -> str:
    return f"{value:.0%}"


def _find_reward_failures(config: Record, rows: Sequence[Record], error: str) -> Iterator[_Finding]:
    failed = _average_metric(rows, "reward/failed") or 0.0
    completions = get_setting(config, "algorithm.prompts_per_step", 0) * get_setting(config, "algorithm.group_size", 0)
    if not failed:
        return
    step = next(row["step"] for row in reversed(rows) if row.get("reward/failed"))
    share = min(1.0, failed / completions) if completions else 0.0
    key = "reward_fails" if share >= _ALL_FAILED_SHARE else "reward_fails_sometimes"
    values = {
        "failed": format_significant(failed),
        "share": _format_percent(share),
        "error": error.strip().partition("\n")[0] or "?",
    }
    yield _Finding(key, _TROUBLE, step, values)


def _find_missing_signal(rows: Sequence[Record], summaries: Sequence[Record]) -> Iterator[_Finding]:
    """Find groups of equal rewards, and if the groups themselves are known, which reward it is."""
    right, wrong, equal = (
        _average_metric(rows, f"groups/dead_{name}") or 0.0 for name in (ALL_RIGHT, ALL_WRONG, EQUAL)
    )
    if right + wrong + equal < _NO_SIGNAL_SHARE:
        return
    kinds = [group["signal"] for each in summaries for group in each["groups"]]
    partial = kinds.count(PARTIAL) / len(kinds) if kinds else 0.0
    last = rows[-1]["step"]
    values = {
        "share": _format_percent(right + wrong + equal),
        "right": _format_percent(right),
        "wrong": _format_percent(wrong),
    }
    if equal:
        yield _Finding("all_equal", _TROUBLE, last, values)
    elif partial > 0.5:
        reward = next(g["rewards"][0] for each in summaries for g in each["groups"] if g["signal"] == PARTIAL)
        yield _Finding("all_partial", _TROUBLE, last, {**values, "reward": format_significant(reward)})
    elif right >= _NO_SIGNAL_SHARE:
        yield _Finding("all_right", _TROUBLE, last, values)
    elif wrong >= _NO_SIGNAL_SHARE:
        yield _Finding("all_wrong", _TROUBLE, last, values)
    else:
        yield _Finding("no_signal", _TROUBLE, last, values)


def _find_cut_off_answers(config: Record, rows: Sequence[Record]) -> Iterator[_Finding]:
    finished = _average_metric(rows, "completion/finished")
    if finished is not None and 1 - finished >= _CUT_OFF_NOTE_SHARE:
        limit = get_setting(config, "sampler.max_tokens", "?")
        level = _TROUBLE if 1 - finished >= _CUT_OFF_TROUBLE_SHARE else _NOTE
        yield _Finding("cut_off", level, rows[-1]["step"], {"share": _format_percent(1 - finished), "limit": limit})


def _find_zero_terms(rows: Sequence[Record]) -> Iterator[_Finding]:
    """Find reward terms that were 0 in every completion of the run."""
    terms = {name: None for row in rows for name in row if name.startswith("reward/") and name not in NON_TERM_METRICS}
    for name in terms:
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values and not any(values):
            yield _Finding(
                "never_sampled",
                _TROUBLE,
                rows[-1]["step"],
                {"term": name.removeprefix("reward/"), "all": len(values)},
            )


def _find_clipping(config: Record, rows: Sequence[Record]) -> Iterator[_Finding]:
    low, high = (_average_metric(rows, f"clip/{side}") or 0.0 for side in ("low", "high"))
    if low + high >= _CLIPPED_TROUBLE_SHARE:
        bounds = {
            name: format_significant(get_setting(config, f"algorithm.{name}", None))
            for name in ("clip_low", "clip_high")
        }
        worst = max(rows, key=lambda row: (row.get("clip/low") or 0.0) + (row.get("clip/high") or 0.0))
        yield _Finding("clipped", _TROUBLE, worst["step"], {"share": _format_percent(low + high), **bounds})


def _find_skipped_updates(rows: Sequence[Record]) -> Iterator[_Finding]:
    """Find updates that were skipped, or that had a learning rate of 0."""
    if (skipped := _average_metric(rows, "skipped") or 0.0) >= 0.5:
        yield _Finding("skipped", _TROUBLE, rows[-1]["step"], {"share": _format_percent(skipped)})
    rates = [rate for row in rows[:-1] if (rate := row.get("lr")) is not None]  # the last one of a schedule may be 0
    if rates and not any(rates):
        yield _Finding("lr_zero", _TROUBLE, rows[-1]["step"])


def _find_zero_loss(config: Record, rows: Sequence[Record]) -> Iterator[_Finding]:
    """Find a loss of 0 with a gradient: with one optimizer step on each set of rollouts every ratio is 1."""
    loss, norm = _average_metric(rows, "loss"), _average_metric(rows, "grad_norm")
    ratio = _average_metric(rows, "ratio/mean")
    if loss is None or not norm or abs(loss) >= _ZERO_LOSS_TOLERANCE:
        return
    once = get_setting(config, "algorithm.epochs", 1) == 1 and get_setting(config, "algorithm.minibatches", 1) == 1
    values = {"loss": format_significant(loss), "norm": format_significant(norm), "ratio": format_significant(ratio)}
    yield _Finding("loss_zero" if once else "loss_small", _FINE, rows[-1]["step"], values)
