"""The measures of an evaluation: which there are, which of them a person is shown, and their records in evals.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.types import Estimate, Evaluation

MIN_INTERVAL_PROMPTS = 12
"""The fewest prompts that a 95% interval is given for. From fewer, Wilson's interval around 1/2 covers more than half
of all accuracies there are. Student's interval of two rewards that are equally likely is a single point, such as
[0.80, 0.80], in one case of four with 3 prompts and in one of 2,048 with 12."""

ACCURACY_MEASURES = ("greedy", "mean@k", "pass@k")
REWARD_MEASURES = ("reward", "reward@k")
"""The mean reward of the greedy answers, and that of a single sample."""

HEADLINE_LABELS = {"greedy": "greedy accuracy", "reward": "reward of greedy answers"}
"""The measures that may be the headline, in words."""


def get_measures(evaluation: Evaluation) -> dict[str, Estimate]:
    """What was measured, by name: without samples (k = 0), greedy answers alone; in older files, no rewards."""
    named = {
        "greedy": evaluation.greedy,
        "mean@k": evaluation.mean_at_k,
        "pass@k": evaluation.pass_at_k,
        "reward": evaluation.reward,
        "reward@k": evaluation.reward_at_k,
    }
    return {name: estimate for name, estimate in named.items() if math.isfinite(estimate.value)}


def have_verdicts(evaluations: Sequence[Evaluation]) -> bool:
    """Whether answers are right or wrong in all of them: else the reward is the headline."""
    return all(evaluation.has_verdicts for evaluation in evaluations)


ZERO_VARIANCE_METRICS = ("groups/dead_all_right", "groups/dead_all_wrong", "groups/dead_equal")
"""The metrics of groups with equal rewards; a step has the first two, or the last."""


def have_continuous_rewards(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rewards of a run are a matter of degree: those of one of its steps are (`state_correctness`)."""
    return any("groups/dead_equal" in row for row in metrics)


def make_metrics_consistent(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The metrics of a run's steps, none of which calls answers right or wrong where one of them cannot."""
    return list(map(drop_correctness, metrics)) if have_continuous_rewards(metrics) else list(metrics)


def drop_correctness(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step as `describe` gives them for rewards that are a matter of degree."""
    gone = ("completion/correct", "completion/length_right", "completion/length_wrong", *ZERO_VARIANCE_METRICS)
    kept = {name: value for name, value in metrics.items() if name not in gone}
    return kept if (dead := get_zero_variance_share(metrics)) is None else {**kept, "groups/dead_equal": dead}


def get_zero_variance_share(metrics: Mapping[str, Any]) -> float | None:
    """The share of a step's groups with equal rewards; None where it is not known."""
    shares = [share for name in ZERO_VARIANCE_METRICS if (share := metrics.get(name)) is not None]
    return sum(shares) if shares else None


def select_measures(evaluations: Sequence[Evaluation]) -> list[str]:
    """The names of the measures that a person is shown of evaluations side by side, the headline first.

    Rewards that are the same as accuracies go without saying. Accuracies are not shown where rewards are a matter of
    degree.
    """
    found = [get_measures(evaluation) for evaluation in evaluations]
    there = {name for measured in found for name in measured}
    pairs = (("greedy", "reward"), ("mean@k", "reward@k"))
    differ = any(
        not math.isclose(of[share].value, of[reward].value)
        for of in found
        for share, reward in pairs
        if share in of and reward in of
    )
    names = (
        (*ACCURACY_MEASURES, *(REWARD_MEASURES if differ else ())) if have_verdicts(evaluations) else REWARD_MEASURES
    )
    return [name for name in names if name in there]


def select_headline(evaluations: Sequence[Evaluation]) -> str:
    """Greedy accuracy or the reward of greedy answers, the first that is worth showing; empty if not all have it.

    One of them may lack it, such as the reward where all greedy answers failed.
    """
    named = [name for name in select_measures(evaluations) if name in HEADLINE_LABELS]
    return next((name for name in named if all(name in get_measures(each) for each in evaluations)), "")


def format_measure_name(name: str, k: int) -> str:
    """Example: labelled("mean@k", 8) == "mean@8\""""
    return name.replace("@k", f"@{k}")


def make_evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON values; NaN and infinities are left to the writer."""
    about = {name: getattr(evaluation, name) for name in ("task", "split", "n", "k")}
    measured = {
        name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        for name, estimate in get_measures(evaluation).items()
    }
    answers = {
        "questions": evaluation.questions_digest,
        "right": list(evaluation.greedy_correct),
        "failed": evaluation.failed,
    }
    answers |= {"left_out": evaluation.left_out, "undecided": evaluation.undecided}
    return {**about, **measured, **answers, "rewards": list(evaluation.rewards), "verdicts": evaluation.has_verdicts}


def parse_evaluation(record: Mapping[str, Any]) -> Evaluation:
    """The evaluation of a record in evals.jsonl; those of older versions know no rewards, and not which was right."""
    return Evaluation(
        **{name: record[name] for name in ("task", "split", "n", "k")},
        greedy=parse_estimate(record.get("greedy")),
        mean_at_k=parse_estimate(record.get("mean@k")),
        pass_at_k=parse_estimate(record.get("pass@k")),
        greedy_correct=tuple(record.get("right", ())),
        questions_digest=record.get("questions", ""),
        failed=record.get("failed", 0),
        left_out=record.get("left_out", 0),
        undecided=record.get("undecided", 0),
        reward=parse_estimate(record.get("reward")),
        reward_at_k=parse_estimate(record.get("reward@k")),
        rewards=tuple(math.nan if value is None else value for value in record.get("rewards", ())),
        has_verdicts=record.get("verdicts", True),
    )


def parse_estimate(record: Mapping[str, Any] | None) -> Estimate:
    """An estimate as JSON has it, where the ends are null if there is no interval."""
    if not record:
        return Estimate()
    low, high = record["low"], record["high"]
    return Estimate(record["value"], math.nan if low is None else low, math.nan if high is None else high)


NO_INTERVALS, INTERVALS_APART, INTERVALS_OVERLAP = "no interval", "apart", "overlap"
TOO_FEW_PROMPTS = "too few prompts for an interval"


def compare_intervals(one: Estimate, other: Estimate) -> str:
    """How the intervals of two estimates lie: APART, OVERLAP, or NO_INTERVAL where one of them has none."""
    if not (one.has_interval and other.has_interval):
        return NO_INTERVALS
    return INTERVALS_APART if one.low > other.high or other.low > one.high else INTERVALS_OVERLAP


def describe_intervals(evaluation: Evaluation) -> str:
    """What stands in brackets behind the measures of an evaluation. Example: "95% intervals"."""
    return "95% intervals" if evaluation.n >= MIN_INTERVAL_PROMPTS else TOO_FEW_PROMPTS
