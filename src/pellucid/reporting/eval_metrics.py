"""The measures of an evaluation: which are shown, how their intervals compare, and their records in evals.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from pellucid.types import Estimate, Evaluation

MIN_INTERVAL_PROMPTS = 12
"""The least number of prompts for a 95% interval. With fewer, Wilson's interval around 1/2 covers more than half of all
possible accuracies. If two rewards are equally likely, all prompts have the same one in 1 of 4 cases with 3 prompts,
and in 1 of 2,048 with 12; Student's interval is then a single point, such as [0.80, 0.80]."""

_ACCURACY_MEASURES = ("greedy", "mean@k", "pass@k")
REWARD_MEASURES = ("reward", "reward@k")
"""The mean reward of the greedy answers, and that of a single sample."""

HEADLINE_LABELS = {"greedy": "greedy accuracy", "reward": "reward of greedy answers"}
"""The measures that may be the headline, in words."""


def get_measures(evaluation: Evaluation) -> dict[str, Estimate]:
    """Return the finite measures by name. Without samples (k = 0) they are those of greedy answers."""
    measures = {
        "greedy": evaluation.greedy,
        "mean@k": evaluation.mean_at_k,
        "pass@k": evaluation.pass_at_k,
        "reward": evaluation.reward,
        "reward@k": evaluation.reward_at_k,
    }
    return {name: estimate for name, estimate in measures.items() if math.isfinite(estimate.value)}


_ZERO_VARIANCE_METRICS = ("groups/dead_all_right", "groups/dead_all_wrong", "groups/dead_equal")
"""The metrics of groups with equal rewards. A step has either the first two or the last."""


def have_continuous_rewards(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rewards of at least one step do not say which answers are right (`rewards_are_verdicts`)."""
    return any("groups/dead_equal" in row for row in metrics)


def make_metrics_consistent(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the metrics of the steps of a run. If one step has no correctness, remove it from all."""
    return list(map(drop_correctness, metrics)) if have_continuous_rewards(metrics) else list(metrics)


def drop_correctness(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step as if its rewards did not say which answers are right."""
    dropped = ("completion/correct", "completion/length_right", "completion/length_wrong", *_ZERO_VARIANCE_METRICS)
    remaining = {name: value for name, value in metrics.items() if name not in dropped}
    dead = get_zero_variance_share(metrics)
    return remaining if dead is None else {**remaining, "groups/dead_equal": dead}


def compute_known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def get_zero_variance_share(metrics: Mapping[str, Any]) -> float | None:
    """Return the share of groups of a step with equal rewards; None if it was not logged."""
    shares = [share for name in _ZERO_VARIANCE_METRICS if (share := metrics.get(name)) is not None]
    return sum(shares) if shares else None


def select_measures(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the names of the measures to show for evaluations side by side, the headline first.

    Rewards that equal the accuracies are left out, and so are accuracies if rewards do not say which answers are right.
    """
    by_evaluation = [get_measures(evaluation) for evaluation in evaluations]
    names = REWARD_MEASURES
    if all(evaluation.has_verdicts for evaluation in evaluations):
        differ = any(
            not math.isclose(measures[accuracy].value, measures[reward].value)
            for measures in by_evaluation
            for accuracy, reward in zip(_ACCURACY_MEASURES, REWARD_MEASURES, strict=False)
            if accuracy in measures and reward in measures
        )
        names = _ACCURACY_MEASURES + REWARD_MEASURES if differ else _ACCURACY_MEASURES
    return [name for name in names if any(name in measures for measures in by_evaluation)]


def pair_measures(first: Evaluation, last: Evaluation) -> list[tuple[str, Estimate, Estimate]]:
    """Return the name and both estimates of each shown measure that both evaluations have."""
    before, after = get_measures(first), get_measures(last)
    names = select_measures([first, last])
    return [(name, before[name], after[name]) for name in names if name in before and name in after]


def select_headline(evaluations: Sequence[Evaluation]) -> str:
    """Return the first of greedy accuracy and greedy reward that is shown and that all evaluations have; else ""."""
    names = [name for name in select_measures(evaluations) if name in HEADLINE_LABELS]
    return next((name for name in names if all(name in get_measures(each) for each in evaluations)), "")


def format_measure_name(name: str, k: int) -> str:
    """Return "mean@8" for "mean@k" with k = 8."""
    return name.replace("@k", f"@{k}")


_RECORDED_FIELDS = ("task", "split", "n", "k", "failed", "left_out", "undecided")


def make_evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return the record of an evaluation for evals.jsonl. NaN and infinities are not replaced yet."""
    return {
        **{name: getattr(evaluation, name) for name in _RECORDED_FIELDS[:4]},
        **{name: asdict(estimate) for name, estimate in get_measures(evaluation).items()},
        "questions": evaluation.questions_digest,
        "right": list(evaluation.greedy_correct),
        **{name: getattr(evaluation, name) for name in _RECORDED_FIELDS[4:]},
        "rewards": list(evaluation.rewards),
        "verdicts": evaluation.has_verdicts,
    }


def parse_evaluation(record: Mapping[str, Any]) -> Evaluation:
    """Return the evaluation of a record in evals.jsonl. A measure that is missing was NaN."""
    return Evaluation(
        **{name: record[name] for name in _RECORDED_FIELDS},
        greedy=parse_estimate(record.get("greedy")),
        mean_at_k=parse_estimate(record.get("mean@k")),
        pass_at_k=parse_estimate(record.get("pass@k")),
        greedy_correct=tuple(record["right"]),
        questions_digest=record["questions"],
        reward=parse_estimate(record.get("reward")),
        reward_at_k=parse_estimate(record.get("reward@k")),
        rewards=tuple(math.nan if value is None else value for value in record["rewards"]),
        has_verdicts=record["verdicts"],
    )


def parse_estimate(record: Mapping[str, Any] | None) -> Estimate:
    """Return the estimate of a JSON object, in which null stands for NaN."""
    return Estimate(**{name: math.nan if value is None else value for name, value in (record or {}).items()})


NO_INTERVALS, INTERVALS_APART, INTERVALS_OVERLAP = "no interval", "apart", "overlap"
TOO_FEW_PROMPTS = "too few prompts for an interval"


def compare_intervals(one: Estimate, other: Estimate) -> str:
    """Return INTERVALS_APART, INTERVALS_OVERLAP, or NO_INTERVALS if one of the estimates has no interval."""
    if not (one.has_interval and other.has_interval):
        return NO_INTERVALS
    return INTERVALS_APART if one.low > other.high or other.low > one.high else INTERVALS_OVERLAP


def describe_intervals(evaluation: Evaluation) -> str:
    """Return the label of the brackets after the measures of an evaluation, such as "95% intervals"."""
    return "95% intervals" if evaluation.n >= MIN_INTERVAL_PROMPTS else TOO_FEW_PROMPTS
