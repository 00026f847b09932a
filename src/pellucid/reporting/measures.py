"""The measures of an evaluation: which there are, which of them a person is shown, and their records in evals.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.types import Estimate, Evaluation

FEWEST = 12
"""The fewest prompts that a 95% interval is given for. From fewer, Wilson's interval around 1/2 covers more than half
of all accuracies there are. Student's interval of two rewards that are equally likely is a single point, such as
[0.80, 0.80], in one case of four with 3 prompts and in one of 2,048 with 12."""

ACCURACIES = ("greedy", "mean@k", "pass@k")
REWARDS = ("reward", "reward@k")
"""The mean reward of the greedy answers, and that of a single sample."""

NAMES = {"greedy": "greedy accuracy", "reward": "reward of greedy answers"}
"""The measures that may be the headline, in words."""


def measures(evaluation: Evaluation) -> dict[str, Estimate]:
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


DEAD_GROUPS = ("groups/dead_all_right", "groups/dead_all_wrong", "groups/dead_equal")
"""The metrics of groups with equal rewards; a step has the first two, or the last."""


def are_degrees(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rewards of a run are a matter of degree: those of one of its steps are (`state_correctness`)."""
    return any("groups/dead_equal" in row for row in metrics)


def consistent(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The metrics of a run's steps, none of which calls answers right or wrong where one of them cannot."""
    return list(map(without_correctness, metrics)) if are_degrees(metrics) else list(metrics)


def without_correctness(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step as `describe` gives them for rewards that are a matter of degree."""
    gone = ("completion/correct", "completion/length_right", "completion/length_wrong", *DEAD_GROUPS)
    kept = {name: value for name, value in metrics.items() if name not in gone}
    return kept if (dead := dead_share(metrics)) is None else {**kept, "groups/dead_equal": dead}


def dead_share(metrics: Mapping[str, Any]) -> float | None:
    """The share of a step's groups with equal rewards; None where it is not known."""
    shares = [share for name in DEAD_GROUPS if (share := metrics.get(name)) is not None]
    return sum(shares) if shares else None


def worth_showing(evaluations: Sequence[Evaluation]) -> list[str]:
    """The names of the measures that a person is shown of evaluations side by side, the headline first.

    Rewards that are the same as accuracies go without saying. Accuracies are not shown where rewards are a matter of
    degree.
    """
    found = [measures(evaluation) for evaluation in evaluations]
    there = {name for measured in found for name in measured}
    pairs = (("greedy", "reward"), ("mean@k", "reward@k"))
    differ = any(
        not math.isclose(of[share].value, of[reward].value)
        for of in found
        for share, reward in pairs
        if share in of and reward in of
    )
    names = (*ACCURACIES, *(REWARDS if differ else ())) if have_verdicts(evaluations) else REWARDS
    return [name for name in names if name in there]


def headline(evaluations: Sequence[Evaluation]) -> str:
    """Greedy accuracy or the reward of greedy answers, the first that is worth showing; empty if not all have it.

    One of them may lack it, such as the reward where all greedy answers failed.
    """
    named = [name for name in worth_showing(evaluations) if name in NAMES]
    return next((name for name in named if all(name in measures(each) for each in evaluations)), "")


def labelled(name: str, k: int) -> str:
    """Example: labelled("mean@k", 8) == "mean@8\""""
    return name.replace("@k", f"@{k}")


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON values; NaN and infinities are left to the writer."""
    about = {name: getattr(evaluation, name) for name in ("task", "split", "n", "k")}
    measured = {
        name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        for name, estimate in measures(evaluation).items()
    }
    answers = {
        "questions": evaluation.questions_digest,
        "right": list(evaluation.greedy_correct),
        "failed": evaluation.failed,
    }
    answers |= {"left_out": evaluation.left_out, "undecided": evaluation.undecided}
    return {**about, **measured, **answers, "rewards": list(evaluation.rewards), "verdicts": evaluation.has_verdicts}


def evaluation_of(record: Mapping[str, Any]) -> Evaluation:
    """The evaluation of a record in evals.jsonl; those of older versions know no rewards, and not which was right."""
    return Evaluation(
        **{name: record[name] for name in ("task", "split", "n", "k")},
        greedy=estimate_of(record.get("greedy")),
        mean_at_k=estimate_of(record.get("mean@k")),
        pass_at_k=estimate_of(record.get("pass@k")),
        greedy_correct=tuple(record.get("right", ())),
        questions_digest=record.get("questions", ""),
        failed=record.get("failed", 0),
        left_out=record.get("left_out", 0),
        undecided=record.get("undecided", 0),
        reward=estimate_of(record.get("reward")),
        reward_at_k=estimate_of(record.get("reward@k")),
        rewards=tuple(math.nan if value is None else value for value in record.get("rewards", ())),
        has_verdicts=record.get("verdicts", True),
    )


def estimate_of(record: Mapping[str, Any] | None) -> Estimate:
    """An estimate as JSON has it, where the ends are null if there is no interval."""
    if not record:
        return Estimate()
    low, high = record["low"], record["high"]
    return Estimate(record["value"], math.nan if low is None else low, math.nan if high is None else high)


NO_INTERVAL, APART, OVERLAP = "no interval", "apart", "overlap"
TOO_FEW = "too few prompts for an interval"


def between(one: Estimate, other: Estimate) -> str:
    """How the intervals of two estimates lie: APART, OVERLAP, or NO_INTERVAL where one of them has none."""
    if not (one.has_interval and other.has_interval):
        return NO_INTERVAL
    return APART if one.low > other.high or other.low > one.high else OVERLAP


def about_intervals(evaluation: Evaluation) -> str:
    """What stands in brackets behind the measures of an evaluation. Example: "95% intervals"."""
    return "95% intervals" if evaluation.n >= FEWEST else TOO_FEW
