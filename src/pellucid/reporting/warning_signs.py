"""Signs in the numbers of a run that training has gone wrong, each with a sentence that says what to change.

The limits were compared with the recorded runs of docs/studies and docs/systems, and with two runs that collapsed. In
none of the recorded runs did entropy rise at all; in one that collapsed it rose by 90% within ten steps. Entropy fell
below 5% of its start, with many groups all wrong, in ten runs: all of them had stopped learning at half of what others
reached on the same questions. The share of answers that were cut off rose by .12 at most; in the other run that
collapsed it rose from .03 to .82 within ten steps, because answers repeated themselves until the limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from pellucid.reporting.best_evaluation import describe_measure, find_best_evaluation
from pellucid.reporting.eval_metrics import INTERVALS_APART, compare_intervals, get_measures
from pellucid.types import Evaluation

SIGN_SENTENCES = {
    "why.accuracy_fell": "After step {now_step}, held-out {now}: less than after step {best_step}, {best}, and more "
    "than chance explains. Lower optimizer.lr, or set optimizer.desired_kl, which adapts it, to 0.0005 or less; "
    "evaluate.patience stops a run that no longer improves.",
    "why.update_too_large": "In {row} steps in a row the update moved the policy by more than 1 nat per answer: in "
    "step {now_step} update/kl was {kl} nats per token, {nats} in an answer. Lower optimizer.lr, or set "
    "optimizer.desired_kl, which adapts it, to 0.0005 or less.",
    "why.entropy_rose": "The entropy rose from {before} to {now} nats per token by step {now_step}: answers become "
    "random, and accuracy falls next. Lower optimizer.lr, or set optimizer.desired_kl, which adapts it, to 0.0005 or "
    "less.",
    "why.entropy_fell": "The entropy fell from {before} to {now} nats per token by step {now_step}, and {wrong} of the "
    "groups have equal rewards that are not right: the answers to a question are all alike, and nothing tells better "
    "from worse. Give easier questions or prefixes, set algorithm.entropy_coef, or lower optimizer.lr.",
    "why.cut_off_rose": "The share of answers that were cut off at sampler.max_tokens rose from {before} to {now} by "
    "step {now_step}. If they repeat themselves, set algorithm.overlong_cache to a fifth of sampler.max_tokens, so "
    "that they earn less, or lower optimizer.lr; if they are sound, raise sampler.max_tokens.",
}
"""Templates of the sentences by key. inspect/page/words.json has them in English and Chinese."""

_UPDATE_KL_LIMIT = 0.005
"""The most nats per token that an update may move the policy: ten times what optimizer.desired_kl is advised to be."""
_ANSWER_KL_LIMIT = 1.0
"""The most nats per answer. Beyond, the answers of one policy are worth few of the other: with normal log-ratios of
variance 2, whose KL is 1, importance weights leave exp(-2) = 14% of the samples."""
_UPDATE_STEPS = 3
"""In how many steps in a row an update must be above both limits."""
_AVERAGED_STEPS = 3
"""Over how many steps entropy and the share of finished answers are averaged: the first and the last ones of a run."""
_ENTROPY_RISE, _MIN_ENTROPY_RISE = 1.5, 0.1
"""The rise that is a sign, as a factor and in nats: that of a policy which is almost certain is noise."""
_ENTROPY_FALL = 0.05
"""The fall that is a sign, as a factor."""
_WRONG_GROUPS_SHARE = 0.3
"""With this share of groups whose rewards are equal and not all right, or more, a low entropy is a sign."""
_FALL_PROBABILITY = 0.0028
"""A policy that is no worse looks as much worse as this with at most this probability. It is that of two independent
95% intervals that are just apart: the tail of a normal variable above 2 * 1.96 / sqrt(2)."""
_CUT_OFF_RISE = 0.25
"""The rise of the share of answers that were cut off that is a sign."""


class WarningSign(NamedTuple):
    """Something that went wrong at a step; `key` and `values` are those of its sentence in SIGN_SENTENCES."""

    key: str
    step: int
    values: Mapping[str, str]

    def describe(self) -> str:
        return SIGN_SENTENCES[self.key].format(**self.values)


class WarningSignWatcher:
    """Finds the signs in a run as it goes on. Each kind is reported once."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {"entropy": [], "completion/finished": []}
        """The first values of the metrics that are compared with their last ones."""
        self._last: deque[Mapping[str, Any]] = deque(maxlen=max(_AVERAGED_STEPS, _UPDATE_STEPS))
        self._step_count = 0
        self._evaluations: dict[int, Evaluation] = {}
        self._found: set[str] = set()

    def observe_step(self, step: int, metrics: Mapping[str, Any]) -> list[WarningSign]:
        """Return the new signs after a step. A metric that is missing, None or NaN is no sign."""
        self._step_count += 1
        self._last.append(metrics)
        for name, first in self._first.items():
            if len(first) < _AVERAGED_STEPS:
                first.extend(_list_numbers([metrics], name))
        signs = [*self._check_update_size(step), *self._check_entropy(step), *self._check_cut_off(step)]
        return self._report_once(signs)

    def observe_evaluation(self, step: int, evaluation: Evaluation) -> list[WarningSign]:
        """Return the new signs after an evaluation."""
        self._evaluations[step] = evaluation
        sign = find_accuracy_fall(self._evaluations)
        return self._report_once([sign] if sign else [])

    def _report_once(self, signs: Sequence[WarningSign]) -> list[WarningSign]:
        new = [sign for sign in signs if sign.key not in self._found]
        self._found.update(sign.key for sign in new)
        return new

    def _check_update_size(self, step: int) -> Iterator[WarningSign]:
        rows = list(self._last)[-_UPDATE_STEPS:]
        sizes, lengths = (_list_numbers(rows, name) for name in ("update/kl", "completion/length_mean"))
        if not len(sizes) == len(lengths) == _UPDATE_STEPS:
            return
        nats = [kl * length for kl, length in zip(sizes, lengths, strict=True)]
        if min(sizes) > _UPDATE_KL_LIMIT and min(nats) > _ANSWER_KL_LIMIT:
            values = {"row": f"{_UPDATE_STEPS}", "kl": f"{sizes[-1]:.2g}", "nats": f"{nats[-1]:.1f}"}
            yield WarningSign("why.update_too_large", step, {**values, "now_step": f"{step}"})

    def _check_entropy(self, step: int) -> Iterator[WarningSign]:
        means = self._average_first_and_last("entropy")
        if means is None:
            return
        before, now = means
        wrong = fmean(
            sum(row.get(f"groups/dead_{kind}") or 0.0 for kind in ("all_wrong", "equal"))
            for row in list(self._last)[-_AVERAGED_STEPS:]
        )
        values = {"before": f"{before:.2f}", "now": f"{now:.2f}", "now_step": f"{step}"}
        if now > max(_ENTROPY_RISE * before, before + _MIN_ENTROPY_RISE):
            yield WarningSign("why.entropy_rose", step, values)
        if now < _ENTROPY_FALL * before and wrong >= _WRONG_GROUPS_SHARE:
            yield WarningSign("why.entropy_fell", step, {**values, "wrong": f"{wrong:.0%}"})

    def _check_cut_off(self, step: int) -> Iterator[WarningSign]:
        means = self._average_first_and_last("completion/finished")
        if means is not None and means[0] - means[1] > _CUT_OFF_RISE:
            before, now = (f"{1 - finished:.0%}" for finished in means)
            yield WarningSign("why.cut_off_rose", step, {"before": before, "now": now, "now_step": f"{step}"})

    def _average_first_and_last(self, name: str) -> tuple[float, float] | None:
        """Return the means of a metric over the first and the last steps; None if they overlap or some lack it."""
        first, last = self._first[name], _list_numbers(list(self._last)[-_AVERAGED_STEPS:], name)
        if self._step_count < 2 * _AVERAGED_STEPS or not len(first) == len(last) == _AVERAGED_STEPS:
            return None
        return fmean(first), fmean(last)


def find_accuracy_fall(evaluations: Mapping[int, Evaluation]) -> WarningSign | None:
    """Return the sign that the last evaluation is worse than the best one by more than chance; None if it is not.

    Greedy answers to the same questions are compared question by question, and all else by intervals.
    """
    best = find_best_evaluation(evaluations)
    if best is None:
        return None
    step, before = list(evaluations)[-1], evaluations[best.step]
    now, estimate = evaluations[step], get_measures(evaluations[step])[best.measure]
    if best.measure == "greedy" and before.questions_digest == now.questions_digest:
        has_fallen = _compute_fall_probability(before.greedy_correct, now.greedy_correct) < _FALL_PROBABILITY
    else:
        has_fallen = compare_intervals(best.estimate, estimate) == INTERVALS_APART
    values = {
        "now": describe_measure(best.measure, estimate, now.k),
        "best": describe_measure(best.measure, best.estimate, best.k),
        "now_step": f"{step}",
        "best_step": f"{best.step}",
    }
    return WarningSign("why.accuracy_fell", step, values) if has_fallen else None


def _list_numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of a metric that are there and finite."""
    values = (row.get(name) for row in rows)
    return [value for value in values if value is not None and math.isfinite(value)]


def _compute_fall_probability(before: Sequence[int | None], now: Sequence[int | None]) -> float:
    """Return the probability of so many answers that are wrong now and were right, if either change is equally likely.

    Questions whose answers are right, or wrong, both times say nothing: the exact test of McNemar.
    """
    changes = [right - was for was, right in zip(before, now, strict=True) if was is not None and right is not None]
    lost, changed = changes.count(-1), len(changes) - changes.count(0)
    return sum(math.comb(changed, n) for n in range(lost, changed + 1)) / 2**changed


def find_warning_signs(
    metrics: Sequence[Mapping[str, Any]], evaluations: Mapping[int, Evaluation]
) -> list[WarningSign]:
    """Return the signs in the steps and evaluations of a run, each kind once, in the order of their steps.

    Args:
        metrics: The records of the steps, in order.
        evaluations: The evaluations by step, in order.
    """
    watcher = WarningSignWatcher()
    signs = [sign for row in metrics for sign in watcher.observe_step(row["step"], row)]
    signs += [sign for step, each in evaluations.items() for sign in watcher.observe_evaluation(step, each)]
    return sorted(signs, key=lambda sign: sign.step)
